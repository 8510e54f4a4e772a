"""The page docs/results/gpu.md, from the JSON lines of benchmarks.gpu_evidence.

python -m benchmarks.gpu_tables [lines=docs/results/gpu] [out=PAGE]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_evidence import PAGE_FOLDER, PARTS, read
from infsample_rl.config.command_line import option, run_with_options

Record = dict[str, Any]
HEAD = """# The GPU, measured

Written by `python -m benchmarks.gpu_tables` from the JSON lines of `make gpu-evidence PART=a` to `f` in
`docs/results/gpu/`. A part takes nine minutes of one GPU at most, and goes on where it was cut. `code` is the commit
that ran.
"""
TITLES = {
    "a": "The device and the tests",
    "b": "A decode step beside the roofline",
    "c": "The engine beside `generate`, and memory",
    "d": "A training step beside TRL",
    "e": "Runs of the whole system",
    "f": "vLLM beside ours",
}
INTRODUCTIONS = {
    "c": "The paper's figure of memory has 21.55 GB for the full group of 32 and 10.64 GB with one slot.\n\n",
    "d": "The share of the matrix units is that of 6 FLOP for every parameter and token of the learner in what a bf16\n"
    "product of 8192 would do in the seconds that it learns; attention and what is recomputed are left out.\n\n",
}
CUT = (-15, 143)  # by SIGTERM, with which gpu_evidence ends what takes too long
DECODE = {"name": "shape", "kv_dtype": "KV", "top_p": "top-p", "prompt_tokens": "prompt", "own_tokens": "own"}
DECODE |= {
    "rows": "rows",
    "milliseconds": "ms",
    "floor_milliseconds": "floor ms",
    "roofline_fraction": "of the roofline",
}
ENGINE = {"name": "name", "seconds": "seconds", "tokens_per_s": "tokens/s", "running_steps": "steps"}
ENGINE |= {"preemptions": "preemptions", "peak_kv_bytes": "KV GB", "peak_memory_bytes": "peak GB"}
MEMORY = {"name": "name", "group_size": "G", "slots": "g", "kv_pool_bytes": "pool GB", "peak_memory_bytes": "peak GB"}
TRAIN = {"name": "name", "group_size": "G", "seconds_per_step": "s a step", "learner_tokens": "learner's tokens"}
TRAIN |= {"learn": "learn s", "matrix_share": "of the matrix units", "peak_memory_bytes": "peak GB"}
RUN = {"step": "step", "timing/step": "s", "timing/rollout": "rollout s", "timing/weight_sync": "weight sync s"}
RUN |= {"reward/mean": "reward", "learner/logprob_diff_max": "largest difference of log-probabilities"}
RUN |= {"memory/rollout_peak_bytes": "rollout peak GB", "memory/learner_peak_bytes": "learner peak GB"}


@dataclass(kw_only=True)
class TableOptions:
    """Arguments of this command."""

    lines: str = option(PAGE_FOLDER, "folder of the JSON lines")
    out: str = option("", "the page; default: LINES.md")

    def __post_init__(self) -> None:
        self.out = self.out or f"{self.lines.rstrip('/')}.md"


def main() -> int:
    """Write the page."""
    return run_with_options(write, TableOptions, usage=__doc__)


def write(options: TableOptions) -> int:
    """As main()."""
    Path(options.out).write_text(page(Path(options.lines)))
    print(options.out)
    return 0


def page(folder: Path) -> str:
    """The whole page."""
    return HEAD + "".join(f"\n## {TITLES[part]}\n{INTRODUCTIONS.get(part, '')}{_part(folder, part)}" for part in PARTS)


def _part(folder: Path, part: str) -> str:
    shown: dict[tuple[str, bool], Record] = {}  # of every piece the newest that is whole, and the newest cut since
    for record in read(folder / f"{part}.jsonl"):
        whole = record["status"] == 0
        if whole:
            shown.pop((record["piece"], False), None)
        shown[record["piece"], whole] = record
    text = "".join(_shown(record) for record in shown.values() if record["records"] or record["status"])
    wanted = [piece.name for piece in PARTS[part] if piece.module != "random_folder"]
    missing = [name for name in wanted if not {(name, True), (name, False)} & shown.keys()]
    if missing:
        text += f"Not yet measured: {', '.join(missing)}.\n"
    return text


def _shown(record: Record) -> str:
    facts = [f"**{record['piece']}**", record["date"], record.get("machine")]
    facts += [f"code {record['code'] or record['sources']}", _ended(record)]
    said, note = _said(record), record["note"]
    text = f"{', '.join(filter(None, facts))}: `{record['command']}`\n"
    text += f"{said}\n" if said else ""
    return text + (f"\n{note}\n\n" if note else "\n")  # a table ends at an empty line


def _ended(record: Record) -> str:
    """In words; nothing for a piece that is whole."""
    status, after = record["status"], f"after {record['seconds']:.0f} s"
    if status in CUT:
        return f"cut off {after}"
    return f"failed with status {status} {after}" if status else ""


def _said(record: Record) -> str:
    if not record["records"]:
        return ""
    first = record["records"][0]
    if "counts" in first:
        return (", ".join(f"{number} {word}" for word, number in first["counts"].items()) or "no test ended") + "."
    if "summary" in first:
        return f"{first['summary'] or 'no summary'}."
    if "matrix_flops" in first:
        versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
        memory, read_rate, flops = first["memory_bytes"] / 1e9, first["bandwidth"] / 1e12, first["matrix_flops"] / 1e12
        device = f"{first['device']}, {memory:.1f} GB, driver {first['driver'] or 'unknown'}, {versions}"
        return f"{device}; a sum reads {read_rate:.2f} TB/s, a bf16 product of 8192 does {flops:.0f} TFLOP/s."
    if "name" not in first and "step" not in first:  # the facts of a rehearsal
        return f"{first['device']}."
    records = [{**each, **each.get("phases", {})} for each in record["records"]]
    found = (columns for key, columns in COLUMNS.items() if any(key in each for each in records))
    return table(records, next(found, RUN))


def table(records: list[Record], columns: dict[str, str]) -> str:
    """A Markdown table of the columns that some record has, and of the records that have more than one of them; nothing
    without any."""
    records = [each for each in records if sum(each.get(name) is not None for name in columns) > 1]
    if not records:
        return ""
    columns = {name: title for name, title in columns.items() if any(each.get(name) is not None for each in records)}
    rows = [list(columns.values()), ["---"] * len(columns)]
    rows += [[_format(name, each.get(name)) for name in columns] for each in records]
    return "\n" + "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def _format(name: str, value: Any) -> str:
    if value is None:
        return ""
    if name.endswith("_bytes"):
        return f"{value / 1e9:.3g}"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


COLUMNS = {  # by a key that only such records have
    "floor_milliseconds": DECODE,
    "seconds_per_step": TRAIN,
    "rest_bytes": MEMORY,
    "running_steps": ENGINE,
    "timing/step": RUN,
}

if __name__ == "__main__":
    sys.exit(main())

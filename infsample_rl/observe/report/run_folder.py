"""A run folder as it is found: whole, half-written, of a run that goes on or of one that died. What cannot be read is
said, never raised."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infsample_rl.observe.records import parse_record

Record = dict[str, Any]

SIGNS = ("config.yaml", "metrics.jsonl", "completions.jsonl", "run.log")  # one of them makes a folder a run's
WARNINGS_SHOWN = 12
LARGEST = 1e300  # what is above is no measurement


@dataclass(kw_only=True, slots=True)
class RunFolder:
    """What small files of a run hold; completions and samples are read by those who choose from them."""

    path: Path
    label: str  # tells it from the other runs on the page
    settings: Record  # "section.key" -> value
    metrics: list[Record]  # numbers only, each with its step
    versions: Record
    plan: Record
    warnings: list[str]  # the last ones
    notes: list[str] = field(default_factory=list)  # what is missing or damaged

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.settings.get("run.name") or self.path.name)

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to have: as plan.json has them, else run.steps; None where neither says."""
        total = self.plan.get("total_steps", self.settings.get("run.steps"))
        return total if isinstance(total, int) else None

    @property
    def metrics_of_steps(self) -> list[Record]:
        """Without the evaluation before the first step."""
        return [record for record in self.metrics if record["step"] > 0]

    @property
    def last_step(self) -> int:
        """The last step in metrics.jsonl, 0: none."""
        return self.metrics[-1]["step"] if self.metrics else 0


def read_run(path: Path, label: str | None = None) -> RunFolder:
    """The run of a folder. ValueError, in one line, if it is no folder or holds nothing of a run."""
    if not path.is_dir():
        raise ValueError(f"RUN={path} is not a folder; give a run folder, run.dir of the run")
    if not any((path / name).exists() for name in SIGNS):
        raise ValueError(f"RUN={path} holds no run: none of {', '.join(SIGNS)} is in it")
    notes: list[str] = []

    def read(name: str, parse: Callable[[Path], Any], otherwise: Any) -> Any:
        found = guarded(name, notes, lambda: parse(path / name))
        return otherwise if found is None else found

    run = RunFolder(
        path=path,
        label=label or path.resolve().name,
        settings=read("config.yaml", _settings, {}),
        metrics=read("metrics.jsonl", lambda path: _numbers(read_lines(path, notes)), []),
        versions=read("versions.json", _object, {}),
        # a run whose model cannot be planned has none, and one without a warning yet none of the other
        plan=read("plan.json", _object, {}) if (path / "plan.json").exists() else {},
        warnings=read("warnings.jsonl", _warnings, []) if (path / "warnings.jsonl").exists() else [],
        notes=notes,
    )
    if not run.metrics and (path / "metrics.jsonl").exists():
        notes.append("metrics.jsonl holds no step yet")
    return run


def guarded(name: str, notes: list[str], read: Callable[[], Any]) -> Any:
    """What `read` returns; None, said in a note, where the file is missing or holds what nobody has thought of: the
    rest of the page is of use without it."""
    try:
        return read()
    except FileNotFoundError:
        notes.append(f"{name} is missing")
    except Exception as error:
        notes.append(f"{name} cannot be read ({type(error).__name__})")
    return None


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """The records of a JSON lines file, each with its place in bytes; how many lines are none is added to `notes`."""
    damaged, place = 0, 0
    with path.open("rb") as file:
        for line in file:
            record = parse_record(line)
            if record is not None:
                yield place, record
            damaged += record is None
            place += len(line)
    if damaged:
        notes.append(f"{path.name}: {damaged} line{'s' if damaged > 1 else ''} could not be read")


def _settings(path: Path) -> Record:
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _object(path: Path) -> Record:
    return {str(name): value for name, value in json.loads(path.read_text(encoding="utf-8")).items()}


def _numbers(records: Iterator[tuple[int, Record]]) -> list[Record]:
    """In the order of steps, with None for what is no number; of two records of one step the later one counts."""
    by_step = {record["step"]: record for _, record in records if record["step"] >= 0}
    return [{name: number(value) for name, value in by_step[step].items()} for step in sorted(by_step)]


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    return value if isinstance(value, (int, float)) and abs(value) < LARGEST else None


def _warnings(path: Path) -> list[str]:
    records = [record for _, record in read_lines(path, [])]
    return [f"after step {record['step']}: {record['text']}" for record in records[-WARNINGS_SHOWN:]]

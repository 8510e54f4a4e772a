"""Trajectories with real waits for their tools: our engine beside vLLM, first come with a prefix cache, at equal KV
bytes.

python -m benchmarks.turns rivals.vllm_python=PYTHON [model=PATH] [num_prompts=4] [group_size=16] [slots=2] ...

Turns, observations and waits are those of `python -m infsample_rl simulate turns=generated`, their tokens divided by
`scale`. Of sampled turns only the mean is kept, about: one ends where our engine draws one of every so many ids of the
vocabulary, and vLLM is forced to the same lengths. In vLLM a turn is a request with all tokens so far, sent as soon as
its observation is there. Figures are of the median round.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks import figures
from benchmarks.process import end_with_terminate, measure
from benchmarks.rival_settings import VLLM_BLOCK, measure_vllm, vllm_variants
from benchmarks.rounds import beside, measure_rounds, median_round
from benchmarks.workload import Workload
from infsample_rl.commands.simulate_turns import SHORTEST_CAP, TURN_SIGMA, TURN_TOKENS, TurnOptions, generated
from infsample_rl.config.command_line import option, run_with_options

SHORT = 8  # trajectories, without waits, on which vLLM's variants are compared


@dataclass(kw_only=True)
class TurnsOptions(Workload):
    """Arguments of benchmarks.turns."""

    num_prompts: int = option(4, "prompts of the call", low=1)
    group_size: int = option(16, "G, trajectories of every prompt", low=1)
    slots: int = option(2, "g: the KV budget is slots x max_new_tokens + the prompts, in tokens", low=1)
    max_new_tokens: int = option(1024, "most tokens of a trajectory, observations included", low=16)
    scale: int = option(16, "what generated tokens are divided by", low=1)
    longest_tool: float = option(10.0, "seconds at which waits are cut", above=0)
    repeats: int = option(3, "rounds; the median counts", low=1)
    vllm_python: str | None = option(None, "interpreter that has vLLM; none: no vLLM", key="rivals.vllm_python")
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")

    def __post_init__(self) -> None:
        if self.vllm_python is not None and shutil.which(self.vllm_python) is None:
            raise ValueError(f"rivals.vllm_python={self.vllm_python}: there is no such interpreter")
        if self.vllm_python is not None and self.shape is not None:
            raise ValueError(f"rivals.vllm_python needs a model, got shape={self.shape}")
        if self.max_new_tokens * self.scale < SHORTEST_CAP:
            raise ValueError(
                f"max_new_tokens={self.max_new_tokens} x scale={self.scale} must be >= {SHORTEST_CAP}: hardly a "
                "trajectory is shorter"
            )

    def kv_budget_tokens(self) -> int:
        """Of whole blocks of vLLM's."""
        asked = self.slots * self.max_new_tokens + self.num_prompts * self.prompt_tokens
        return -(-asked // VLLM_BLOCK) * VLLM_BLOCK

    def script(self) -> list[dict[str, Any]]:
        """Of every trajectory what stands between its turns: tokens `observed`, and the `seconds` until they are
        there."""
        workload = generated(
            TurnOptions(
                prompts=self.num_prompts,
                group_size=self.group_size,
                cap=self.max_new_tokens * self.scale,
                longest_tool=self.longest_tool,
                seed=self.seed,
            )
        )
        return [
            {
                "observed": [-(-tokens // self.scale) for tokens in each.observation_lengths],
                "seconds": [round(seconds, 3) for seconds in each.tool_seconds],
            }
            for group in workload.groups
            for each in group
        ]


class TurnsBenchmark:
    """Takes one measurement after another. RuntimeError for one that fails."""

    def __init__(self, options: TurnsOptions) -> None:
        self.options = options
        self._workload = asdict(options) | {"ignore_eos": True, "kv_budget_tokens": options.kv_budget_tokens()}
        self._workload["stop_every"] = max(2, round(TURN_TOKENS * math.exp(TURN_SIGMA**2 / 2) / options.scale))
        self._script = options.script()
        self._facts: dict[str, Any] = {}  # that our engine's first measurement has found
        self._fastest: dict[str, Any] | None = None

    def ours(self, number: int) -> dict[str, Any]:
        """Our engine in one round."""
        spec = {"workload": self._workload | {"script": self._script}}
        limits = {"threads": self.options.threads, "timeout_s": self.options.timeout_s}
        found = measure("turns_point.main", spec, **limits)
        self._facts = found
        return self._record("ours", found)

    def vllm(self, number: int) -> dict[str, Any]:
        """vLLM in one round, with the variant that was the fastest on few trajectories without waits."""
        if not self._facts:
            raise RuntimeError("our engine's turns are not known")
        if self._fastest is None:
            self._fastest = self._fastest_variant()
        return self._record("vllm", self._on_vllm(self._fastest, self._trajectories())) | {"settings": self._fastest}

    def _fastest_variant(self) -> dict[str, Any]:
        """The others may take twice as long as the first, its start included: on some machines one hardly moves."""
        short = [each | {"seconds": [0.0] * len(each["seconds"])} for each in self._trajectories()[:SHORT]]
        seconds, limit = [], self.options.timeout_s
        variants = vllm_variants(self._facts["device"])[::-1]
        for settings in variants:
            started = time.monotonic()
            try:
                seconds.append(self._on_vllm(settings, short, timeout_s=limit)["seconds"])
            except RuntimeError as error:
                print(f"benchmarks.turns: vllm {settings}: {error}", file=sys.stderr, flush=True)
                seconds.append(math.inf)
            else:
                limit = min(limit, 2 * (time.monotonic() - started))
        if min(seconds) == math.inf:
            raise RuntimeError("vLLM does not run here")
        return variants[seconds.index(min(seconds))]

    def _trajectories(self) -> list[dict[str, Any]]:
        """The script as vLLM is to follow it, with the lengths of the turns that our engine sampled."""
        return [
            {"prompt": place // self.options.group_size, "lengths": lengths, **script}
            for place, (script, lengths) in enumerate(zip(self._script, self._facts["turns"], strict=True))
        ]

    def _on_vllm(
        self, settings: dict[str, Any], trajectories: list[dict[str, Any]], *, timeout_s: float | None = None
    ) -> dict[str, Any]:
        workload = self._workload | {"trajectories": trajectories, "words": self._facts["words"]}
        workload["timeout_s"] = timeout_s or self.options.timeout_s
        blocks = self.options.kv_budget_tokens() // VLLM_BLOCK
        return measure_vllm(workload, settings | {"num_blocks": blocks}, self._facts)

    def _record(self, name: str, found: dict[str, Any]) -> dict[str, Any]:
        tokens, facts = sum(found["lengths"]), self._facts
        return {
            "name": name,
            "seconds": found["seconds"],
            "tokens": tokens,
            "tokens_per_s": tokens / found["seconds"],
            "trajectories": len(self._script),
            "turns": sum(map(len, facts["turns"])) / len(self._script),
            "running_steps": found["running_steps"],
            "recomputed_tokens": found["recomputed_tokens"],
            "parked_tokens": found.get("parked_tokens"),
            "preemptions": found["preemptions"],
            "kv_pool_bytes": found["kv_pool_bytes"],
            "peak_memory_bytes": found["peak_memory_bytes"],
            "device": facts["device"],
            "versions": facts["versions"] | {each: found[each] for each in ("vllm",) if each in found},
            "workload": asdict(self.options),
        }


def run(options: TurnsOptions) -> int:
    """Every measurement, printed; 1 when one failed."""
    benchmark = TurnsBenchmark(options)
    points = [("benchmarks.turns: ours", benchmark.ours)]
    points += [("benchmarks.turns: vllm", benchmark.vllm)] if options.vllm_python is not None else []
    rounds: list[list[dict[str, Any]]] = []
    failed = measure_rounds(points, options.repeats, rounds)
    measured = [records for records in rounds if records]
    seconds = [[record["seconds"] for record in records] for records in measured]
    found = [
        median_round(records, "seconds") | {"seconds_rounds": own} | beside(seconds[0], own)
        for records, own in zip(measured, seconds, strict=True)
    ]
    if options.json:
        for record in found:
            print(json.dumps(record), flush=True)
    else:
        figures.print_records(found, figures.TURNS_COLUMNS)
    return int(failed)


def main() -> int:
    """Measure and report; 2 for arguments that cannot be used."""
    end_with_terminate()
    return run_with_options(run, TurnsOptions, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())

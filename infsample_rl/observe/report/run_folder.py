"""A run folder as it is found: whole, half-written, of a run that goes on or of one that died. What cannot be read is
said, never raised."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from infsample_rl.observe.records import parse_record

Record = dict[str, Any]

CONFIG, VERSIONS, PLAN, LOG = "config.yaml", "versions.json", "plan.json", "run.log"
METRICS, COMPLETIONS, SAMPLES, WARNINGS = "metrics.jsonl", "completions.jsonl", "samples.jsonl", "warnings.jsonl"
TRACE = "trace.json"
SIGNS = (CONFIG, METRICS, COMPLETIONS, LOG)  # one of them makes a folder a run's
WARNINGS_SHOWN = 12


@dataclass(kw_only=True, slots=True)
class RunFolder:
    """What small files of a run hold. The large ones (completions, samples, trace) are read by those who choose from
    them."""

    path: Path
    label: str  # tells it from the other runs on the page
    settings: dict[str, Record]  # section -> setting -> value
    metrics: list[Record]  # numbers only, each with its step
    versions: Record
    plan: Record
    warnings: list[str]  # the last ones
    notes: list[str] = field(default_factory=list)  # what is missing or damaged

    def setting(self, name: str) -> Any:
        """A setting as "section.key", None where config.yaml does not have it."""
        section, key = name.split(".", 1)
        return self.settings.get(section, {}).get(key)

    @property
    def name(self) -> str:
        """The run's name, else its folder's."""
        return str(self.setting("run.name") or self.path.name)

    @property
    def total_steps(self) -> int | None:
        """Steps that the run is to have: as plan.json has them, else run.steps; None where neither says."""
        total = self.plan.get("total_steps", self.setting("run.steps"))
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
    settings = _read_object(path / CONFIG, notes, yaml.safe_load)
    run = RunFolder(
        path=path,
        label=label or path.resolve().name,
        settings={name: part for name, part in settings.items() if isinstance(part, dict)},
        metrics=_numbers(read_lines(path / METRICS, notes)),
        versions=_read_object(path / VERSIONS, notes),
        plan=_read_object(path / PLAN, notes, needed=False),
        warnings=_read_warnings(path / WARNINGS),
        notes=notes,
    )
    if run.plan and not isinstance(run.plan.get("processes"), list):
        notes.append(f"{PLAN} names no processes")
    if not run.metrics and (path / METRICS).exists():
        notes.append(f"{METRICS} holds no step yet")
    return run


def read_lines(path: Path, notes: list[str]) -> Iterator[tuple[int, Record]]:
    """The records of a JSON lines file, each with its place in bytes; missing files and lines that are none are added
    to `notes`."""
    damaged, whole, place, is_last = 0, 0, 0, False
    try:
        with path.open("rb") as file:
            for line in file:
                record = parse_record(line)
                is_last = record is None and not line.endswith(b"\n")
                damaged += record is None
                whole += record is not None
                if record is not None:
                    yield place, record
                place += len(line)
    except FileNotFoundError:
        notes.append(f"{path.name} is missing")
    except OSError as error:
        notes.append(f"{path.name} cannot be read ({error.strerror})")
    if damaged:
        where = "the last, half-written" if is_last and damaged == 1 else f"{whole} could"
        notes.append(f"{path.name}: {damaged} line{'s' if damaged > 1 else ''} could not be read ({where})")


def number(value: Any) -> float | None:
    """`value` if it is a finite number, else None."""
    try:
        is_finite = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number of hundreds of digits
        return None
    return value if is_finite else None


def _numbers(records: Iterator[tuple[int, Record]]) -> list[Record]:
    """In the order of steps; of two records of one step the later one counts."""
    by_step = {
        record["step"]: {name: number(value) for name, value in record.items()}
        for _, record in records
        if record["step"] >= 0
    }
    return [by_step[step] for step in sorted(by_step)]


def _read_object(
    path: Path, notes: list[str], parse: Callable[[str], Any] = json.loads, *, needed: bool = True
) -> Record:
    try:
        found = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.extend([f"{path.name} is missing"] * needed)
        return {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        notes.append(f"{path.name} cannot be read ({type(error).__name__})")
        return {}
    if not isinstance(found, dict):
        notes.append(f"{path.name} holds no object")
        return {}
    return {str(name): value for name, value in found.items()}


def _read_warnings(path: Path) -> list[str]:
    """The last warnings of the steps that count."""
    records = [record for _, record in read_lines(path, []) if isinstance(record.get("text"), str)]
    return [f"after step {record['step']}: {record['text']}" for record in records[-WARNINGS_SHOWN:]]

"""Curves and a Markdown table of several runs: python scripts/compare_runs.py --out curves.png RUN_FOLDER [RUN_FOLDER
...]"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from infsample_rl.observe.records import read_records
from infsample_rl.observe.report.page import labels

PANELS = (
    ("reward/mean", "mean reward"),
    ("eval/accuracy", "held-out accuracy"),
    ("response/length_mean", "response length, tokens"),
)


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, one dictionary a step."""
    return list(read_records(run / "metrics.jsonl"))


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a metric, one line a run; runs whose names differ in a last number alone share a colour."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS) + 1.2, 3.4), constrained_layout=True)
    kinds = {run: run.rstrip("0123456789").rstrip("_") for run in runs}
    colours = {kind: f"C{index}" for index, kind in enumerate(dict.fromkeys(kinds.values()))}
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for run, rows in runs.items():
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            style = "--" if "control" in run else "-"
            axis.plot(
                *(zip(*points, strict=True) if points else ([], [])),
                marker="o",
                markersize=3,
                label=kinds[run],
                color=colours[kinds[run]],
                linestyle=style,
                alpha=0.8,
            )
        axis.set(xlabel="step", title=label)
        axis.grid(alpha=0.3)
    lines = dict(zip(kinds.values(), axes[0].get_lines(), strict=True))  # one of each kind
    figure.legend(lines.values(), lines.keys(), fontsize=8, loc="outside right upper")
    figure.savefig(path, dpi=110)


def table(runs: dict[str, list[dict[str, Any]]]) -> str:
    """First and last held-out accuracy, reward and length over the first and last five steps, seconds."""
    lines = ["| run | held-out accuracy | reward | length | seconds per step | tokens/s |", "|---|---|---|---|---|---|"]
    for run, rows in runs.items():
        accuracy = [row["eval/accuracy"] for row in rows if row.get("eval/accuracy") is not None]
        steps = [row for row in rows if row["step"] > 0]

        def values(name: str, steps: list[dict[str, Any]] = steps) -> list[float]:
            return [row[name] for row in steps if row.get(name) is not None]

        def ends(name: str, digits: int, values: Callable[[str], list[float]] = values) -> str:
            found = values(name)
            return (
                f"{statistics.fmean(found[:5]):.{digits}f} -> {statistics.fmean(found[-5:]):.{digits}f}"
                if found
                else "-"
            )

        held_out = f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}" if accuracy else "-"
        seconds = f"{statistics.fmean(values('timing/step')):.1f}" if values("timing/step") else "-"
        sampled, rollout = sum(values("response/tokens")), sum(values("timing/rollout"))
        speed = f"{sampled / rollout:,.0f}" if rollout else "-"
        lines.append(
            f"| {run} | {held_out} | {ends('reward/mean', 2)} | {ends('response/length_mean', 0)} | {seconds} | "
            f"{speed} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the runs, write the figure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = dict(zip(labels(arguments.runs), map(read_rows, arguments.runs), strict=True))
    draw(runs, arguments.out)
    print(table(runs))


if __name__ == "__main__":
    main()

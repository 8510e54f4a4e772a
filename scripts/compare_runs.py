"""Curves and a Markdown table of several runs: python scripts/compare_runs.py --out curves.png RUN_FOLDER [RUN_FOLDER ...]"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = (("reward/mean", "mean reward"), ("eval/accuracy", "held-out accuracy"), ("response/length_mean", "response length, tokens"))


def read_rows(run: Path) -> list[dict[str, Any]]:
    """The run's metrics, one dictionary a step."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def draw(runs: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """One panel a metric, one line a run; runs whose names differ in a last number alone share a colour."""
    figure, axes = plt.subplots(1, len(PANELS), figsize=(4.2 * len(PANELS) + 1.2, 3.4), constrained_layout=True)
    kinds = {run: run.rstrip("0123456789").rstrip("_") for run in runs}
    colours = {kind: f"C{index}" for index, kind in enumerate(dict.fromkeys(kinds.values()))}
    for axis, (name, label) in zip(axes, PANELS, strict=True):
        for run, rows in runs.items():
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            style = "--" if "control" in run else "-"
            axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=kinds[run], color=colours[kinds[run]], linestyle=style, alpha=0.8)
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

        def ends(name: str, steps: list[dict[str, Any]] = steps) -> tuple[float, float]:
            values = [row[name] for row in steps]
            return statistics.fmean(values[:5]), statistics.fmean(values[-5:])

        held_out = f"{accuracy[0]:.3f} -> {accuracy[-1]:.3f}" if accuracy else "-"
        reward, length = ends("reward/mean"), ends("response/length_mean")
        seconds = statistics.fmean(row["timing/step"] for row in steps)
        speed = sum(row["response/tokens"] for row in steps) / sum(row["timing/rollout"] for row in steps)
        lines.append(
            f"| {run} | {held_out} | {reward[0]:.2f} -> {reward[1]:.2f} | {length[0]:.0f} -> {length[1]:.0f} | {seconds:.1f} | {speed:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Read the runs, write the figure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    runs = {run.name: read_rows(run) for run in arguments.runs}
    draw(runs, arguments.out)
    print(table(runs))


if __name__ == "__main__":
    main()

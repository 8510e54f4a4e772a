"""What `benchmarks.predictor` shows: tables with intervals, and error and rank correlation over k as a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.figures import new_figure, save
from infsample_rl.config.command_line import print_table

COLUMNS = {
    "recording": "recording",
    "name": "name",
    "k": "k",
    "log_error": "|log ratio|",
    "kendall_tau": "Kendall tau",
    "seconds_per_prediction": "us each",
}
COLOURS = {"none": "#999999", "bert": "#d95f02", "probe": "#1f77b4"}
LABELS = {
    "none": "one length for all",
    "bert": "bert: prompt and first k tokens",
    "probe": "probe: the policy's hidden state",
}


def print_tables(records: list[dict[str, Any]]) -> None:
    """Accuracy, then steps of every schedule over those with true lengths; intervals in brackets."""
    rows = []
    for record in (record for record in records if record["name"] != "oracle"):  # it has no error
        each = record["seconds_per_prediction"]
        texts = {name: _text(record[name], 3) for name in ("log_error", "kendall_tau")}
        rows.append(record | texts | {"seconds_per_prediction": None if each is None else f"{each * 1e6:.1f}"})
    print_table(rows, COLUMNS)
    print("\nrunning steps of a prompt")
    rows = [
        {"recording": record["recording"], "name": record["name"], "k": record["k"], "schedule": schedule}
        | {"steps": _text(found["steps"], 0)}
        | {"oracle": _text(found["steps_over_oracle"], 3), "none": _text(found["steps_over_none"], 3)}
        for record in records
        for schedule, found in record["schedules"].items()
        if record["name"] in ("bert", "probe") or record["k"] == records[0]["k"]
    ]
    names = ("recording", "name", "k", "schedule", "steps")
    print_table(rows, {name: name for name in names} | {"oracle": "over true lengths", "none": "over none"})


def _text(interval: dict[str, float] | None, digits: int) -> str | None:
    if interval is None:
        return None
    value, low, high = (f"{part:.{digits}f}" for part in interval.values())
    return f"{value} [{low}, {high}]"


def draw_predictor(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write predictor.png: a row of panels for every recording, error on the left, Kendall's tau on the right; bands:
    95 % over prompts."""
    files = list(dict.fromkeys(record["recording"] for record in records))
    figure, panels = new_figure(9.5, 0.6 + 2.9 * len(files), len(files), 2)
    for file, (left, right) in zip(files, panels, strict=True):
        here = sorted((record for record in records if record["recording"] == file), key=lambda record: record["k"])
        for name, colour in COLOURS.items():
            points = [record for record in here if record["name"] == name]
            for axes, figure_name in ((left, "log_error"), (right, "kendall_tau")):
                known = [(each["k"], *each[figure_name].values()) for each in points if each[figure_name] is not None]
                if known:
                    ks, values, low, high = zip(*known, strict=True)
                    axes.plot(
                        ks, values, "--" if name == "none" else "o-", markersize=4, color=colour, label=LABELS[name]
                    )
                    axes.fill_between(ks, low, high, color=colour, alpha=0.18 * (name != "none"), linewidth=0)
        left.set_ylim(bottom=0)
        left.set_ylabel("mean |log(predicted / length)|", fontsize=8)
        right.set_ylabel("Kendall's tau within a prompt", fontsize=8)
        left.set_title(f"{file}: {here[0]['held_out_prompts']} held-out prompts", fontsize=9, loc="left")
        ks = sorted({record["k"] for record in here})
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(ks, [str(k) for k in ks])
            axes.set_xlabel("k, tokens decoded before the prediction", fontsize=8)
            axes.tick_params(labelsize=8)
            axes.grid(alpha=0.25)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return save(figure, folder / "predictor.png")

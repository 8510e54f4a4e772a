"""group_size.png of `bench.group_size`: signal, memory, variance and signal-to-noise over G."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MODELLED = "all files, fitted Beta"  # what records call it that are not of one file
COLOURS = {"std": "#1f77b4", "mean_only": "#d95f02"}
RECORDINGS = ("#444444", "#2a9d8f", "#c2a36b", "#8e6bbf")
Records = list[dict[str, Any]]


def draw(records: Records, folder: Path) -> Path:
    """Write group_size.png: two panels without gradients in `records`, else four."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display and no pyplot state
    from matplotlib.figure import Figure

    signal, sampling, gradients = (
        [record for record in records if record["what"] == what] for what in ("signal", "sampling", "gradient")
    )
    rows = 2 if gradients else 1
    figure = Figure(figsize=(10, 0.3 + 3.4 * rows), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(rows, 2, squeeze=False)
    _draw_shares(panels[0][0], signal)
    _draw_memory(panels[0][1], sampling)
    if gradients:
        _draw_variance(panels[1][0], gradients)
        _draw_gain(panels[1][1], gradients)
    for axes in panels.flat:
        _style(axes, sorted({record["group_size"] for record in records}))
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "group_size.png")
    return folder / "group_size.png"


def _draw_shares(axes: Any, records: Records) -> None:
    for colour, (name, points) in zip(RECORDINGS, _by(records, "recording").items(), strict=False):
        sizes, shares = [point["group_size"] for point in points], [point["signal_share"] for point in points]
        label = f"{name}, {points[0]['prompts']} prompts"
        axes.plot(sizes, [share["value"] for share in shares], marker="o", markersize=4, color=colour, label=label)
        axes.fill_between(
            sizes,
            [share["low"] for share in shares],
            [share["high"] for share in shares],
            color=colour,
            alpha=0.13,
            linewidth=0,
        )
    axes.set_ylim(0, 1)
    axes.set_title("groups with right and wrong samples (band: 95 %)", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)


def _draw_memory(axes: Any, points: Records) -> None:
    """With the seconds that 256 samples take beside the points."""
    sizes = [point["group_size"] for point in points]
    for key, label, colour in (
        ("full_group_", "the whole group at once", "#999999"),
        ("", "ours (token_budget)", "#1f77b4"),
    ):
        values = [point[f"{key}kv_tokens"] / 1000 for point in points]
        axes.plot(sizes, values, marker="o", markersize=4, color=colour, label=label)
        for size, value, point in zip(sizes, values, points, strict=True):
            offset = (0, -11) if key == "" else (0, 6)
            axes.annotate(
                f"{point[f'{key}seconds']:.0f} s",
                (size, value),
                offset,
                textcoords="offset points",
                fontsize=7,
                ha="center",
                color=colour,
            )
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:.0f}")
    axes.margins(y=0.15)
    axes.set_title("KV memory, thousand tokens; seconds of 256 samples in it (simulated)", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)


def _draw_variance(axes: Any, records: Records) -> None:
    """As it is: it is also small where groups without signal have no gradient at all."""
    _draw_relative(axes, records, {"within": "-"}, {"within": "fitted Beta"})
    axes.set_ylim(bottom=0)
    axes.set_title("variance of an update of N samples, within prompts (smallest G: 1)", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)


def _draw_gain(axes: Any, records: Records) -> None:
    labels = {"gain_equal_samples": "equal samples", "gain_equal_prompts": "equal prompts"}
    _draw_relative(axes, records, {"gain_equal_samples": "-", "gain_equal_prompts": ":"}, labels)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_title("signal-to-noise of an update, noise within prompts (smallest G: 1)", fontsize=9, loc="left")
    axes.legend(fontsize=7, frameon=False)


def _draw_relative(axes: Any, records: Records, lines: dict[str, str], labels: dict[str, str]) -> None:
    """Lines: the fitted Beta; crosses: the recorded samples alone, where they are enough."""
    for recording, by_recording in _by(records, "recording").items():
        for kind, points in _by(by_recording, "advantage").items():
            sizes = [point["group_size"] for point in points]
            for key, line in lines.items():
                values = [point[key] / points[0][key] for point in points]
                if recording == MODELLED:
                    style = {"linestyle": line, "marker": "o", "label": f"{kind}, {labels[key]}"}
                else:
                    style = {
                        "linestyle": "",
                        "marker": "x",
                        "label": f"{kind}, recorded" if key == next(iter(lines)) else None,
                    }
                axes.plot(sizes, values, markersize=5, color=COLOURS[kind], **style)


def _by(records: Records, key: str) -> dict[str, Records]:
    found: dict[str, Records] = {}
    for record in sorted(records, key=lambda record: record["group_size"]):
        found.setdefault(record[key], []).append(record)
    return found


def _style(axes: Any, sizes: list[int]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("group size G", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)

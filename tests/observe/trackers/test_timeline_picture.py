"""The picture of a step: rows for processes, colours for phases."""

from __future__ import annotations

import json

import numpy as np
from matplotlib.colors import to_rgb

from infsample_rl.observe.timeline_picture import COLOURS, MOST_ROWS, draw_timeline, newest_step

PROCESS = {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "rollout 0 on a"}}


def event(name: str, step: int, pid: int = 1, ts: int = 0, dur: int = 1_000_000) -> dict:
    return {"name": name, "ph": "X", "pid": pid, "tid": 0, "ts": ts, "dur": dur, "args": {"step": step}}


def test_the_newest_step_is_taken_and_idle_time_left_out(tmp_path):
    path = tmp_path / "trace.json"
    path.write_text(json.dumps([PROCESS, event("decode", 1), event("decode", 2, ts=9), event("idle", 2)]))
    assert newest_step(path) == (2, {"rollout 0 on a": [event("decode", 2, ts=9)]})


def test_without_a_trace_there_is_no_picture(tmp_path):
    assert newest_step(tmp_path / "trace.json") is None
    (tmp_path / "trace.json").write_text("[")
    assert newest_step(tmp_path / "trace.json") is None


def test_the_colour_of_a_phase_is_in_its_processes_row():
    picture = draw_timeline(2, {"rollout 0": [event("decode", 2)], "learner 0": [event("backward", 2, pid=2)]})
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    for phase in ("decode", "backward"):
        colour = np.round(np.array(to_rgb(COLOURS[phase])) * 255)
        assert (np.abs(picture.astype(int) - colour).sum(axis=2) < 6).mean() > 0.02, phase


def test_of_many_processes_some_are_drawn():
    few, many = (
        draw_timeline(1, {f"rollout {index}": [event("decode", 1)] for index in range(count)})
        for count in (MOST_ROWS, 10 * MOST_ROWS)
    )
    assert few.shape[0] == many.shape[0]

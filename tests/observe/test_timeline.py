"""trace.json: every worker's phases, step by step, in the Trace Event Format."""

from __future__ import annotations

import json

import pytest

from infsample_rl.observe.timeline import Timeline
from infsample_rl.types import Phase, WorkerPhases


def rollout(index: int, *phases: tuple[str, float, float]) -> WorkerPhases:
    return WorkerPhases("rollout", index, "node-a", [Phase(name, start, end, 0) for name, start, end in phases])


def events(folder, kind="X") -> list[dict]:
    return [event for event in json.loads((folder / "trace.json").read_text()) if event["ph"] == kind]


def drawn(folder, pid=None) -> list[tuple[str, float, float, int]]:
    return [
        (event["name"], event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6, event["args"]["step"])
        for event in events(folder)
        if event["cat"] != "driver" and pid in (None, event["pid"])
    ]


def test_phases_are_drawn_in_their_steps(tmp_path):
    run = Timeline(tmp_path / "trace.json", start_step=0)
    run.end_step(1, 100.0, 110.0)
    run.add([rollout(0, ("decode", 101.0, 108.0), ("prefill", 101.5, 102.0), ("sync", 109.0, 110.0))])
    driver = WorkerPhases("driver", 0, "node-h", [Phase("sample", 100.5, 109.0, 0)])
    run.add([rollout(1, ("decode", 101.0, 104.0)), driver])
    run.end_step(2, 110.0, 120.0)
    run.add([rollout(0, ("decode", 105.0, 113.0), ("decode", 113.0, 119.0), ("save", 121.0, 122.0))])
    run.close()
    assert drawn(tmp_path, 100_001) == [
        ("decode", 101.0, 108.0, 1),
        ("prefill", 101.5, 102.0, 1),
        ("sync", 109.0, 110.0, 1),
        ("decode", 105.0, 113.0, 1),  # its end came late: it belongs to the step it began in
        ("decode", 113.0, 119.0, 2),
        ("save", 121.0, 122.0, 2),
    ]
    assert drawn(tmp_path, 100_002) == [("decode", 101.0, 104.0, 1)]
    assert [event["name"] for event in events(tmp_path) if event["cat"] == "driver"] == ["step 1", "sample", "step 2"]
    names = {event["args"]["name"] for event in events(tmp_path, "M") if event["name"] == "process_name"}
    assert all(isinstance(event[key], int) for event in events(tmp_path) for key in ("ts", "dur", "pid", "tid"))
    assert names == {"rollout 0 on node-a", "rollout 1 on node-a", "driver on node-h"}


def run_steps(run: Timeline, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.add([rollout(0, ("decode", 10.0 * step - 9, 10.0 * step - 5))])
        run.end_step(step, 10.0 * step - 10, 10.0 * step)


def test_only_the_last_steps_are_kept_and_a_whole_file_is_there_at_any_time(tmp_path, monkeypatch):
    monkeypatch.setattr("infsample_rl.observe.timeline.WRITE_EVERY_S", 0.0)
    monkeypatch.setattr("infsample_rl.observe.timeline.KEPT_STEPS", 3)
    run = Timeline(tmp_path / "trace.json", start_step=0)
    for step in range(1, 9):
        run_steps(run, step, step)
        if step > 1:
            found = {event["args"]["step"] for event in events(tmp_path)}
            assert found in (set(range(max(1, last - 2), last + 1)) for last in (step - 1, step))
    run.close()
    assert {event["args"]["step"] for event in events(tmp_path)} == {6, 7, 8}


def test_what_goes_wrong_in_its_thread_is_raised_by_a_later_call(tmp_path):
    run = Timeline(tmp_path / "trace.json", start_step=0)
    run.add([rollout(0, ("decode", 1.0, 2.0))._replace(role="unheard of")])
    run.end_step(1, 0.0, 10.0)
    with pytest.raises(ValueError, match="not in tuple"):
        run.end_step(2, 10.0, 20.0)


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path):
    run = Timeline(tmp_path / "trace.json", start_step=0)
    (tmp_path / ".trace.json.tmp").mkdir()  # as a full disk
    run_steps(run, 1, 2)
    run.add([])
    run.end_step(3, 20.0, 30.0)
    (tmp_path / ".trace.json.tmp").rmdir()
    run.close()
    assert {event["args"]["step"] for event in events(tmp_path)} == {1, 2, 3}


def test_a_new_run_sets_an_older_trace_aside_and_a_resumed_one_replaces_it(tmp_path):
    for start_step, step in ((0, 1), (0, 1), (1, 2)):
        run = Timeline(tmp_path / "trace.json", start_step=start_step)
        run_steps(run, step, step)
        run.close()
    assert (tmp_path / "trace.1.json").exists() and not (tmp_path / "trace.2.json").exists()
    assert {event["args"]["step"] for event in events(tmp_path)} == {2}

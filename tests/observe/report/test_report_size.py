"""Ten thousand completions, 2,500 steps: the page stays small, says what it left out, and is fair in what it chose."""

from __future__ import annotations

import json
import time

import pytest

from infsample_rl.observe.report.curves import MOST_POINTS, Curve, charts
from infsample_rl.observe.report.page import write_report
from infsample_rl.observe.report.run_folder import RunFolder
from infsample_rl.observe.report.samples import choose_completions


@pytest.fixture(scope="module")
def chosen(large_run):
    return choose_completions(large_run / "completions.jsonl", [])


def test_the_page_of_ten_thousand_completions_is_small_and_soon_written(large_run, page_in):
    started = time.process_time()
    assert write_report([large_run], large_run / "report.html") == []
    seconds = time.process_time() - started
    assert (large_run / "report.html").stat().st_size < 20e6 and seconds < 10
    page = page_in(large_run / "report.html")
    assert len(page["learning"][0]["lines"][0]["x"]) <= MOST_POINTS
    timelines = page["timelines"]
    assert timelines["recorded"] == 2500 and 50 < len(timelines["groups"]) < 2500
    assert (timelines["groups"][0]["step"], timelines["groups"][-1]["step"]) == (1, 2500)


def test_best_and_worst_are_those_of_their_step_and_the_random_choice_is_blind_to_the_reward(chosen, large_run):
    records = [json.loads(line) for line in (large_run / "completions.jsonl").open()]
    by_response = {record["response"]: record for record in records}
    picked = []
    for found in chosen["rows"]:
        record, step = by_response[found["response"]], found["step"]
        assert record["step"] == step
        same = [other["reward"] for other in records[(step - 1) * 4 : step * 4]]
        if "b" in found["kinds"]:
            assert record["reward"] == max(same) > min(same)
        if "w" in found["kinds"]:
            assert record["reward"] == min(same) < max(same)
        if "r" in found["kinds"]:
            picked.append(record["reward"])
    mean = sum(record["reward"] for record in records) / len(records)
    assert len(picked) > 1000 and sum(picked) / len(picked) == pytest.approx(mean, abs=0.04)  # 0.5 / sqrt(1000) = 0.016


def test_a_long_line_keeps_its_extremes_in_the_band():
    metrics = [{"step": step, "learner/grad_norm": 100.0 if step == 777 else 1.0} for step in range(1, 5001)]
    run = RunFolder(path=None, label="a", settings={}, metrics=metrics, versions={}, plan={}, warnings=[])
    ((line,),) = [
        chart["lines"] for chart in charts([run], [Curve("Gradient norm", "norm", {"learner/grad_norm": "norm"})])
    ]
    assert (
        len(line["x"]) <= MOST_POINTS
        and max(line["high"]) == 100.0
        and min(line["low"]) == 1.0
        and line["x"][-1] == 5000
    )
    assert line["band"] == "lowest to highest; the line is the mean of 13 steps"

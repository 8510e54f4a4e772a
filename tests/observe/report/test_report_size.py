"""Ten thousand completions, 2,500 steps: the page stays small, says what it left out, and is fair in what it chose."""

from __future__ import annotations

import json
import time

import pytest

from infsample_rl.observe.report.completions import TEXT_CHARACTERS, choose_completions
from infsample_rl.observe.report.curves import MOST_POINTS, Curve, charts
from infsample_rl.observe.report.run_folder import RunFolder
from infsample_rl.observe.report.timelines import spread
from infsample_rl.observe.report.writing import write_report


@pytest.fixture(scope="module")
def chosen(large_run):
    return choose_completions(large_run, [])


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


def test_every_completion_is_listed_and_texts_keep_to_their_share(chosen):
    assert chosen["recorded"] == len(chosen["rows"]) == 10_000
    characters = sum(len(response) + len(chosen["prompts"][prompt]) for prompt, response in chosen["texts"])
    assert 0.8 * TEXT_CHARACTERS < characters <= TEXT_CHARACTERS + 2000
    assert len(chosen["prompts"]) == 500


def test_best_and_worst_are_those_of_their_step(chosen, large_run):
    records = [json.loads(line) for line in (large_run / "completions.jsonl").open()]
    place = {name: index for index, name in enumerate(chosen["fields"])}
    for row, record in zip(chosen["rows"], records, strict=True):
        same = [other["reward"] for other in records[(record["step"] - 1) * 4 : record["step"] * 4]]
        if "b" in row[place["kinds"]]:
            assert record["reward"] == max(same) > min(same)
        if "w" in row[place["kinds"]]:
            assert record["reward"] == min(same) < max(same)
        if row[place["text"]] >= 0:
            assert chosen["texts"][row[place["text"]]][1] == record["response"]


def test_the_random_choice_is_blind_to_the_reward(chosen):
    place = {name: index for index, name in enumerate(chosen["fields"])}
    mean = sum(row[place["reward"]] for row in chosen["rows"]) / len(chosen["rows"])
    picked = [row[place["reward"]] for row in chosen["rows"] if "r" in row[place["kinds"]]]
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


def test_places_are_spread_from_the_first_to_the_last():
    lines = [(at, 10) for at in range(0, 1000, 10)]
    assert spread(lines, 10_000) == [at for at, _ in lines]
    assert spread(lines, 50) == [0, 250, 500, 740, 990]
    assert spread([], 50) == []

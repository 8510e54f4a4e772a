"""The engine and the simulator, given the same lengths and predictions: who decodes in which row, from which running
step to which."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from infsample_rl.config import RolloutConfig
from infsample_rl.config.rollout import PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.engine.length_source import LengthSource
from infsample_rl.rollout.length_prediction.recordings import read_recordings
from infsample_rl.rollout.schedule.kv_budget import num_pool_pages, rows_in
from infsample_rl.rollout.schedule.schedules import fptas_groups
from infsample_rl.rollout.simulator import simulate, simulate_prompts, token_bound
from infsample_rl.rollout.simulator_drafts import Text, new_drafter
from tests.engines import PROMPTS, make_engine

LENGTHS = Path(__file__).parents[2] / "data" / "lengths"
K = 3  # tokens of a prefix


def predicted_length(prefix) -> float:
    """Different for nearly every sample, and often wrong."""
    return random.Random(str(list(prefix))).uniform(1, 40)


def joined(stays):
    """(prompt, sample, start, end, row), those of one sample in one row without a pause as one."""
    found = []
    for prompt, sample, start, end, row in sorted(stays):
        if found and found[-1][:2] == (prompt, sample) and found[-1][3:] == (start, row):
            start = found.pop()[2]
        found.append((prompt, sample, start, end, row))
    return found


MEMORY = (  # in the second no four slots fit
    {"slots": 3},
    {"slots": 4, "kv_budget_tokens": 84},
    {"kv_budget_tokens": 110, "page_size": 1},
)


@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("prompts_at_once", ["1", "2", "auto"])
@pytest.mark.parametrize("schedule", [*(name for name in SCHEDULES if name != "dynamic_slot"), "parked"])
def test_every_sample_decodes_in_the_same_row_and_steps(
    make_model, make_tokenizer, monkeypatch, schedule, prompts_at_once, memory, drafts
):
    parks, schedule = schedule == "parked", "token_budget" if schedule == "parked" else schedule
    settings = {"slots": None, "group_size": 9, "page_size": 4, "preemption": "park" if parks else "recompute"} | memory
    settings |= {"schedule": schedule, "prompts_at_once": prompts_at_once}
    predicts, page_size = schedule in PREDICTED_SCHEDULES, settings["page_size"]
    settings |= {"predictor": "bert", "prefix_tokens": K} if predicts else {"predictor": "none"}
    monkeypatch.setattr(
        LengthSource, "predict", staticmethod(lambda _, prefixes: list(map(predicted_length, prefixes)))
    )
    engine = make_engine(make_model(), make_tokenizer(), speculate=drafts, **settings)
    groups = engine.generate(PROMPTS, seed=2)
    tokens = [[completion.token_ids.tolist() for completion in group] for group in groups]
    found = simulate_prompts(
        [list(map(len, group)) for group in tokens],
        schedule,
        slots=settings["slots"],
        kv_budget_tokens=engine.runner.kv.num_pages * page_size,
        prompts_at_once=None if prompts_at_once == "auto" else int(prompts_at_once),
        predicted=[[predicted_length(sample[:K]) for sample in group] for group in tokens] if predicts else None,
        prefix_tokens=K if predicts else 0,
        page_size=page_size,
        prompt_tokens=list(map(len, PROMPTS)),
        max_new_tokens=engine.config.max_new_tokens,
        record_rows=True,
        parks=parks,
        texts=[Text(prompt, group) for prompt, group in zip(PROMPTS, tokens, strict=True)],
        drafts=drafts,
    )
    assert (engine.stats.accepted_tokens > 0) == (drafts > 0)
    stays = joined(
        (prompt, completion.sample_index, stay.start, stay.end, stay.row)
        for prompt, group in enumerate(groups)
        for completion in group
        for stay in completion.stays
    )
    assert stays == joined(found.stays)
    for name in ("running_steps", "preemptions", "recomputed_tokens", "parked_tokens"):
        assert getattr(engine.stats, name) == getattr(found, name)
    if schedule == "token_budget":
        assert min(found.preemptions, found.parked_tokens if parks else found.recomputed_tokens) > 0
    assert engine.stats.peak_kv_bytes == found.peak_kv_tokens * 2 * 2 * 2 * 16 * 4  # layers, KV, heads, size, bytes
    prompt_pages = -(-min(map(len, PROMPTS)) // page_size)
    lengths = [len(completion) for group in tokens for completion in group]
    assert engine.stats.least_steps == token_bound(lengths, (engine.runner.kv.num_pages - prompt_pages) * page_size)
    if predicts:
        assert len(stays) > 27, "no sample waited with its prefix"


@pytest.mark.parametrize("responses", [2.5, 4, 7.9])
@pytest.mark.parametrize("path", sorted(LENGTHS.glob("*.jsonl*")), ids=lambda path: path.name)
def test_the_budget_gives_algorithm_2_its_groups(path, responses):
    """N follows from the KV budget, in the engine's settings and in the simulator, and a slot decodes its group."""
    recordings = read_recordings(path)
    cap = max(recording.max_new_tokens or max(recording.lengths) for recording in recordings)
    for recording in recordings[:8]:
        lengths, prompt = recording.lengths[:32], recording.prompt_tokens or 100
        predicted = [length * random.Random(index).lognormvariate(0, 0.5) for index, length in enumerate(lengths)]
        budget = int(responses * -(-cap // 16) + -(-prompt // 16)) * 16
        config = RolloutConfig(
            schedule="fptas", kv_budget_tokens=budget, max_new_tokens=cap, prompts_at_once=1, group_size=len(lengths)
        )
        pages = num_pool_pages(config, page_bytes=1, prompts=[prompt])
        slots = rows_in(config, pages, [prompt])
        assert slots == int(responses)
        found = simulate(
            lengths,
            "fptas",
            predicted=predicted,
            kv_budget_tokens=budget,
            page_size=config.page_size,
            prompt_tokens=prompt,
            max_new_tokens=cap,
            record_rows=True,
        )
        rows: dict[int, list[int]] = {}
        for stay in sorted(found.stays, key=lambda stay: stay.start):
            rows.setdefault(stay.row, []).append(stay.sample)
        assert [rows[row] for row in sorted(rows)] == fptas_groups(predicted, slots, 0.1)


def test_running_samples_of_prompts_that_are_not_known_are_no_drafts_for_others():
    texts = [[list(range(100, 110)), list(range(40))], [list(range(40))]]  # the last begins when the first has ended

    def steps(*prompts):
        drawn = [Text(prompt, samples) for prompt, samples in zip(prompts, texts, strict=True)]
        settings = {"slots": 2, "prompts_at_once": 2, "max_new_tokens": 40, "drafts": 3}
        return simulate_prompts([[10, 40], [40]], "arrival", texts=drawn, **settings).running_steps

    assert steps([], []) == steps([70], [80]) > steps([70], [70])


@pytest.mark.parametrize("prompts", [([70], [70]), ([70], [80]), ([], [])], ids=str)
def test_a_drafter_that_knows_the_call_before_drafts_from_it(prompts):
    drafter, text, steps = new_drafter(7), list(range(40)), []  # a text that never repeats itself
    for prompt in prompts:
        given = {"texts": [Text(prompt, [text])], "drafts": 3, "drafter": drafter}
        steps.append(simulate_prompts([[40]], "arrival", slots=1, max_new_tokens=40, **given).running_steps)
    assert steps[0] == 40 and steps[1] < 20

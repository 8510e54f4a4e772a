"""Drafted tokens: every bit of every sample as without, in fewer steps, within the pool."""

from __future__ import annotations

import pytest

from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample
from tests.engines import PROMPTS, bits_of, ends_of, make_engine

SETTINGS = [
    {},
    {"schedule": "token_budget", "slots": None},
    {"schedule": "token_budget", "slots": None, "kv_budget_tokens": 80, "page_size": 4, "preemption": "park"},
    {"schedule": "token_budget", "slots": None, "kv_budget_tokens": 90, "page_size": 1, "preemption": "recompute"},
    {"schedule": "lpt", "predictor": "bert", "prefix_tokens": 5, "page_size": 3},
    {"schedule": "naive", "prompts_at_once": 2},
    {"schedule": "infinite", "prefix_tokens": 4},
    {"top_p": 0.9, "temperature": 0.5},
    {"temperature": 0.0},
    {"micro_group_size": 1, "slots": 1},
]


@pytest.mark.parametrize("drafts", [1, 3, 7, "auto"])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_no_draft_changes_a_bit_of_a_sample(make_model, make_tokenizer, settings, drafts):
    settings = {"schedule": "arrival", "group_size": 12, "max_new_tokens": 40} | settings
    found, steps = [], []
    for speculate in (0, drafts):
        engine = make_engine(make_model(), make_tokenizer(), speculate=speculate, **settings)
        groups = [engine.generate(PROMPTS, seed=3, step=step) for step in (0, 0)]  # the second drafts by the first
        found.append([(ends_of(each), bits_of(each)) for each in groups])
        steps.append(engine.stats.running_steps)
        pool = engine.runner.kv
        assert engine.pages_now() == (pool.num_pages, 0)
    assert found[0] == found[1]
    if drafts in (3, 7):
        assert engine.stats.accepted_tokens > 0
        assert steps[1] < 0.7 * steps[0]  # the very samples have been seen
    assert engine.stats.accepted_tokens <= engine.stats.drafted_tokens


def test_drafts_follow_the_longest_match_and_among_equal_ones_the_most():
    drafter = Drafter(cpu_kernels.load())
    group = PromptGroup(0, [1, 2, 3, 4], [0, 1, 2, 3], GroupSettings("arrival", 4, 4), lambda index: index)
    texts = [[9, 5, 6, 7], [9, 5, 6, 8], [9, 5, 6, 8]]
    for index, tokens in enumerate(texts):
        sample = Sample(group, index, index, 0)
        sample.tokens.extend(tokens)
        assert drafter.draft(sample, 1)[0] == []  # nobody has said more
        drafter.end(sample)
    last = Sample(group, 3, 3, 0)
    last.tokens.extend([9])
    assert drafter.draft(last, 3) == ([5, 6, 8], [5, 6, 7])  # with the prompt's four
    last.tokens.extend([3, 5, 6])
    assert drafter.draft(last, 1) == ([8], [2])
    drafter.close()
    again = PromptGroup(0, [1, 2, 3, 4], [0], GroupSettings("arrival", 1, 1), lambda index: index)
    first = Sample(again, 0, 0, 0)
    first.tokens.append(9)
    assert drafter.draft(first, 2)[0] == [5, 6]

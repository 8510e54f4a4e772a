"""What may come next in a sample, from texts that stay within their bytes."""

from __future__ import annotations

import random
from array import array

import pytest

from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule import drafter as drafter_module
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample


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


def test_groups_with_the_same_prompt_draft_for_one_another():
    drafter = Drafter(cpu_kernels.load())
    settings = GroupSettings("arrival", 1, 1)
    groups = [PromptGroup(place, [1, 2, 3, 4, 6], [0], settings, lambda index: index) for place in (0, 1)]
    first, second = (Sample(group, 0, 0, 0) for group in groups)
    for sample in (first, second):
        sample.tokens.append(8)
        drafter.draft(sample, 1)
    first.tokens.extend([9, 5])
    drafter.end(first)
    drafter.leave(groups[0])
    before = drafter._texts[next(iter(drafter._texts))].known[second][1]
    second.tokens.append(9)
    assert drafter.draft(second, 1)[0] == [5] and before == 1, "its own tokens are known once"


def test_what_a_prompts_own_texts_lack_is_found_in_other_prompts_samples():
    drafter, settings = Drafter(cpu_kernels.load()), GroupSettings("arrival", 3, 3)
    one, other = (PromptGroup(prompt, [prompt], [0, 1], settings, lambda index: index) for prompt in (1, 2))
    before, sibling, sample = Sample(one, 0, 0, 0), Sample(other, 0, 0, 0), Sample(other, 1, 1, 0)
    before.tokens.extend(range(20, 40))
    drafter.end(before)
    sample.tokens.append(20)
    assert drafter.draft(sample, 3) == ([21, 22, 23], [-1, -2, -3])
    sample.tokens.extend(range(21, 28))
    assert drafter.draft(sample, 3) == ([28, 29, 30], [-8, -9, -10])
    for own, found in (
        ([0, 0, 0, 0, 0, 26, 27, 98], ([28], [-8])),
        ([0, 0, 0, 0, 0, *range(23, 28), 99], ([99], [5])),
    ):
        sibling = Sample(other, 2, 2, 0)
        sibling.tokens.extend(own)
        drafter.end(sibling)
        assert drafter.draft(sample, 1) == found
    assert [len(samples) for _, samples in drafter.ended()] == [1, 2], "a sample is kept once"


def test_samples_of_all_prompts_stay_within_their_bytes_and_are_gathered_anew(monkeypatch):
    monkeypatch.setattr(drafter_module, "OTHERS_BYTES", 100_000)
    drafter, sizes = Drafter(cpu_kernels.load()), []
    settings, numbers = GroupSettings("arrival", 1, 1), random.Random(0)
    for prompt in range(40):
        sample = Sample(PromptGroup(prompt, [prompt], [0], settings, lambda index: index), 0, 0, 0)
        for _ in range(300):
            sample.tokens.append(numbers.randrange(10_000))
            drafter.draft(sample, 3)
        drafter.end(sample)
        sizes.append(drafter._of_all.num_bytes)
    assert any(after < before for before, after in zip(sizes, sizes[1:], strict=False))
    assert 50_000 < max(sizes) <= 100_000


def sample_of(prompt, tokens):
    group = PromptGroup(prompt, [prompt], [0], GroupSettings("arrival", 1, 1), lambda index: index)
    made = Sample(group, 0, 0, 0)
    made.tokens.extend(tokens)
    return made


def test_the_newest_samples_of_all_prompts_are_there_after_every_gathering(monkeypatch):
    monkeypatch.setattr(drafter_module, "OTHERS_BYTES", 100_000)
    drafter, numbers, before = Drafter(cpu_kernels.load()), random.Random(0), []
    for prompt in range(0, 80, 2):
        said = [numbers.randrange(10**6) for _ in range(300)]
        drafter.end(sample_of(prompt, said))
        if before:
            assert drafter.draft(sample_of(prompt + 1, before[:20]), 1)[0] == before[20:21]
        before = said


def test_the_newest_samples_of_a_prompt_stay_where_all_of_them_take_too_much(monkeypatch):
    monkeypatch.setattr(drafter_module, "MOST_BYTES", 200_000)
    drafter, numbers = Drafter(cpu_kernels.load()), random.Random(0)
    samples = [[numbers.randrange(10**6) for _ in range(300)] for _ in range(40)]
    for tokens in samples:
        drafter.end(sample_of(1, tokens))
    drafter.close()
    ((_, kept),) = drafter.ended()
    assert kept == [array("i", tokens).tobytes() for tokens in samples[36:]]


@pytest.mark.parametrize("tokens", [65, 1025, 4096, 4097, 32769])
def test_a_token_takes_no_more_bytes_than_the_plan_counts(tokens):
    drafter, numbers = Drafter(cpu_kernels.load()), random.Random(0)
    sample = Sample(PromptGroup(0, [1], [0], GroupSettings("arrival", 1, 1), lambda index: index), 0, 0, 0)
    sample.tokens.extend(numbers.randrange(50_000) for _ in range(tokens))
    drafter.end(sample)
    (kept,) = drafter._texts.values()
    assert max(kept.num_bytes, drafter._of_all.num_bytes) <= drafter_module.BYTES_PER_TOKEN * tokens + 1000


@pytest.mark.parametrize("drafts", [True, False])
def test_texts_stay_within_their_bytes(monkeypatch, drafts):
    monkeypatch.setattr(drafter_module, "MOST_BYTES", 200_000)
    monkeypatch.setattr(drafter_module, "TRIM_EVERY", 3000)
    drafter = Drafter(cpu_kernels.load())
    for prompt in range(8):
        group = PromptGroup(prompt, [prompt], [0], GroupSettings("arrival", 1, 1), lambda index: index)
        sample = Sample(group, 0, 0, 0)
        for token in range(1500):
            sample.tokens.append(token)
            if drafts:
                drafter.draft(sample, 3)
        drafter.end(sample)
        drafter.leave(group)
    kept = [texts.num_bytes for texts in drafter._texts.values()]
    assert sum(kept) <= 200_000 + drafter_module.BYTES_PER_TOKEN * 3000
    drafter.close()
    kept = [texts.num_bytes for texts in drafter._texts.values()]
    assert 1 <= len(kept) < 8 and sum(kept) <= 200_000

"""Trajectories of several turns: what was sampled is what the model says behind all tokens before it, bit for bit the
same however long answers take and whoever gives way meanwhile."""

import random
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from infsample_rl.rollout.engine.turns import Answer
from infsample_rl.types import Episode
from tests.engines import make_engine
from tests.tiny_models import plain_logprobs

PROMPTS = [[40, 41, 42, 43, 44], [50, 51, 52]]
STOPS = tuple(range(100, 160))  # many, so that turns are short
BASE = {"group_size": 6, "slots": None, "max_new_tokens": 48, "schedule": "token_budget", "page_size": 4}


class Answering:
    """Answers every turn with a few tokens made of those before it, up to a number of turns, some later than others."""

    def __init__(self, seed=0, most_turns=4, longest_wait=0, observed=5):
        self.dice, self.most_turns = random.Random(seed), most_turns
        self.longest_wait, self.observed, self.closed = longest_wait, observed, False
        self.turns, self.owed, self.asked = {}, [], []

    def end(self, sample, reason):
        number = self.turns[sample] = self.turns.get(sample, 0) + (reason != "length" or sample not in self.asked)
        self.asked.append(sample)
        ids = [1 + (sum(sample.tokens) + place) % 90 for place in range(self.observed)]
        is_last = reason == "length" or number >= self.most_turns
        reward = float(len(sample.tokens))
        episode = Episode(reward=reward, failure="", turns=number, calls=0, waited_s=0.0) if is_last else None
        self.owed.append([self.dice.randint(0, self.longest_wait), Answer(sample, [] if is_last else ids, episode)])

    def take(self, *, wait_s):
        for entry in self.owed:
            entry[0] -= 1 + 1000 * (wait_s > 0)
        ready = [answer for left, answer in self.owed if left < 0]
        self.owed = [entry for entry in self.owed if entry[0] >= 0]
        return ready

    def close(self):
        self.closed = True


@pytest.fixture(scope="module")
def tiny(tiny_qwen3):
    return AutoModelForCausalLM.from_pretrained(tiny_qwen3).eval(), AutoTokenizer.from_pretrained(tiny_qwen3)


def sample(tiny, turns=None, **changes):
    engine = make_engine(*tiny, stop=STOPS, **(BASE | changes))
    turns = turns or Answering()
    found = engine.generate(PROMPTS, 7, turns=turns)
    assert turns.closed and not turns.owed
    return found, engine, turns


def bits(found):
    return [[(one.token_ids.tolist(), one.logprobs.tobytes(), one.finish_reason) for one in group] for group in found]


def test_sampled_tokens_are_the_models_and_observed_ones_are_marked(tiny):
    found, engine, turns = sample(tiny)
    several = 0
    for prompt, group in zip(PROMPTS, found, strict=True):
        for completion in group:
            own = plain_logprobs(tiny[0], prompt, completion.token_ids, valid_vocab=len(tiny[1]))[0].detach().numpy()
            mask = completion.sampled
            np.testing.assert_allclose(completion.logprobs[mask], own[mask], atol=2e-5)
            ends = [place for place in range(len(mask)) if mask[place] and completion.token_ids[place] in STOPS]
            assert completion.episode.turns == len(ends) + (completion.finish_reason == "length" and bool(mask[-1]))
            for first, second in pairwise(ends):  # behind a turn its observation, then the next turn
                assert not mask[first + 1 : first + 6].any() and mask[first + 6 : second + 1].all()
            several += len(ends) > 1
            assert len(completion.token_ids) <= 48 and completion.episode.reward == len(completion.token_ids)
    assert several > 4
    assert engine.stats.recomputed_tokens == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts_at_once": 1},
        {"kv_budget_tokens": 80, "prompts_at_once": 1},
        {"kv_budget_tokens": 80, "preemption": "park"},
        {"kv_budget_tokens": 80, "preemption": "recompute"},
        {"page_size": 16},
        {"speculate": "3"},
        {"speculate": "3", "kv_budget_tokens": 80, "preemption": "park"},
    ],
    ids=str,
)
@pytest.mark.parametrize("longest_wait", [0, 9])
def test_no_bit_changes_with_budgets_pages_drafts_and_slow_answers(tiny, changes, longest_wait):
    expected, *_ = sample(tiny)
    found, engine, _ = sample(tiny, Answering(seed=3, longest_wait=longest_wait), **changes)
    assert bits(found) == bits(expected)
    if changes.get("preemption") == "park" and longest_wait:
        assert engine.stats.parked_tokens > 0 and engine.stats.recomputed_tokens == 0


def test_an_observation_without_room_for_a_token_ends_the_trajectory(tiny):
    found, _, _ = sample(tiny, Answering(observed=40, most_turns=9))
    for group in found:
        for completion in group:
            assert completion.finish_reason == "length" and len(completion.token_ids) <= 48
            assert completion.sampled[-1], "an observation that nothing follows is not kept"


def test_a_straggler_counts_as_cut(tiny):
    class Late(Answering):
        def end(self, sample, reason):
            super().end(sample, reason)
            wait, (of, observed, episode) = self.owed[-1]
            if episode is not None:
                self.owed[-1][1] = Answer(of, observed, replace(episode, is_straggler=True))

    found, *_ = sample(tiny, Late())
    assert all(completion.finish_reason == "length" for group in found for completion in group)


def test_an_engine_waits_where_everything_is_away(tiny):
    class Late(Answering):
        def take(self, *, wait_s):
            self.waits = getattr(self, "waits", 0) + (wait_s > 0)
            return super().take(wait_s=wait_s) if wait_s else []

    turns = Late()
    found, engine, _ = sample(tiny, turns)
    assert turns.waits > 3 and bits(found) == bits(sample(tiny)[0])
    assert engine.stats.row_utilisation > 0


def test_an_engine_that_waits_pauses_for_other_work(tiny):
    class Late(Answering):
        waits = 0

        def take(self, *, wait_s):
            self.waits += wait_s > 0
            return super().take(wait_s=wait_s) if self.waits > 3 else []

    turns = Late()
    stream = make_engine(*tiny, stop=STOPS, **BASE).stream(PROMPTS, 7, turns=turns, pause_every=10_000)
    for _ in range(3):
        assert next(stream) == [] and len(turns.owed) == 12, "no turn was answered"
    assert sum(map(len, stream)) == 12


def test_a_halted_stream_lets_go_of_those_that_are_away(tiny):
    engine, turns = make_engine(*tiny, stop=STOPS, **BASE), Answering(longest_wait=10_000)
    halted = iter([False] * 20 + [True] * 5)
    assert list(engine.stream(PROMPTS, 7, turns=turns, is_halted=lambda: next(halted))) == []
    assert turns.closed and turns.owed
    assert engine.pages_now()[1] == 0

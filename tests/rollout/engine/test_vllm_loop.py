"""What is sent to vLLM and when, by a stand-in that counts blocks as vLLM does; vLLM itself: test_vllm_engine.py."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace

import pytest

from infsample_rl.config.rollout import SCHEDULES
from infsample_rl.rollout.engine.call import MicroGroups, StopRule
from infsample_rl.rollout.engine.turns import Answer
from infsample_rl.rollout.engine.vllm_loop import VLLMLoop, last_words
from infsample_rl.rollout.schedule.kv_pool import KVPool, Parking
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from infsample_rl.rollout.schedule.step_planner import StepPlanner
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from infsample_rl.types import EngineFailed, Episode
from tests.rollout.engine.test_turns import Answering


class StandIn:
    """Requests get the token `length of the response so far + key`; blocks of equal beginnings are shared."""

    def __init__(self, block: int, slow: float = 0.0, seed: int = 0):
        self.block, self.slow, self.draw = block, slow, random.Random(seed)
        self.requests: dict[str, SimpleNamespace] = {}
        self.blocks = Counter()  # owners by what a block and all before it hold, or by request and place
        self.peak = 0

    def add_request(self, name, prompt, params):
        tokens = prompt["prompt_token_ids"]
        held = [tuple(tokens[: end + self.block]) for end in range(0, len(tokens) - self.block, self.block)]
        found = 0
        while found < len(held) and held[found] in self.blocks:
            found += 1
        request = SimpleNamespace(
            tokens=list(tokens), params=params, held=held, cached=found * self.block, sampled=0, name=name
        )
        self.requests[name] = request
        for place in held:
            self.blocks[place] += 1

    def abort_request(self, names):
        for name in names:
            for place in self.requests.pop(name).held:
                self.blocks[place] -= 1
            self.blocks += Counter()

    def step(self):
        outputs = []
        for request in list(self.requests.values()):
            while len(request.held) * self.block < len(request.tokens):
                place = request.name, len(request.held)
                request.held.append(place)
                self.blocks[place] += 1
            self.peak = max(self.peak, len(self.blocks))
            if not request.sampled and self.draw.random() < self.slow:
                continue  # its prompt is computed in parts
            key, begun = request.params["noise"]
            token = 100 * key + begun + request.sampled
            request.tokens.append(token)
            request.sampled += 1
            finished = request.sampled == request.params["max_tokens"]
            output = SimpleNamespace(token_ids=[token], logprobs=[{token: SimpleNamespace(logprob=-1.0)}])
            outputs.append(
                SimpleNamespace(
                    request_id=request.name, outputs=[output], num_cached_tokens=request.cached, finished=finished
                )
            )
            if finished:
                self.abort_request([request.name])
        return outputs


def new_loop(draw, schedule, engine, lengths, prompts, pages, cap, turns=None):
    """A loop whose samples end at these lengths."""
    by_budget = schedule == "token_budget"
    slots = draw.randint(1, 5)
    samples = len(lengths[0])
    settings = GroupSettings(schedule, samples if schedule == "full_group" else slots, samples, 0.1, 0, engine.block)
    groups = [
        PromptGroup(place, prompt, list(range(samples)), settings, lambda sample, place=place: 50 * place + sample)
        for place, prompt in enumerate(prompts)
    ]
    ends = {
        (50 * place + sample) * 100 + length - 1
        for place, each in enumerate(lengths)
        for sample, length in enumerate(each)
    }
    planner = StepPlanner(
        groups,
        KVPool(pages, engine.block),
        num_slots=20 if by_budget else settings.slots,
        prompts_at_once=draw.randint(1, 3),
        max_new_tokens=cap,
        policy=TokenBudgetPolicy(engine.block, cap) if by_budget else None,
        parking=Parking(2**62),
    )
    params = lambda key, begun, left: {"noise": (key, begun), "max_tokens": left}  # noqa: E731
    micro_groups = MicroGroups(groups, 3, 0, truncates=False)
    return VLLMLoop(engine, params, planner, StopRule(cap, ends, None), micro_groups, 8, lambda: 0, turns=turns)


@pytest.mark.parametrize("slow", [0.0, 0.3])
@pytest.mark.parametrize("schedule", [name for name in SCHEDULES if name != "dynamic_slot"])
def test_the_planner_counts_at_least_the_blocks_that_vllm_takes(schedule, slow):
    """So vLLM never has to preempt. Every sample is whole, however often it was sent again."""
    preempted = 0
    for seed in range(40):
        draw = random.Random(seed)
        block, cap = draw.choice([1, 4, 16]), draw.randint(2, 60)
        prompts = [[place] + [7] * draw.randint(0, 40) for place in range(draw.randint(1, 3))]
        lengths = [[draw.choice([1, cap, draw.randint(1, cap)]) for _ in range(6)] for _ in prompts]
        pages = -(-max(map(len, prompts)) // block) + -(-cap // block) + draw.choice([1, 1, 3, draw.randint(1, 60)])
        engine = StandIn(block, slow, seed)
        loop = new_loop(draw, schedule, engine, lengths, prompts, pages, cap)
        done = {}
        while not loop.planner.is_done:
            for micro_group in loop.step():
                done |= {(each.prompt_index, each.sample_index): each for each in micro_group}
        assert engine.peak <= pages and not engine.requests and not +engine.blocks
        for (place, sample), completion in done.items():
            length = lengths[place][sample]
            assert completion.token_ids.tolist() == [(50 * place + sample) * 100 + index for index in range(length)]
            assert completion.finish_reason == "stop"
            # of a slow step nobody gets a token, so a stay may be without
            assert all(0 <= stay.tokens <= stay.end - stay.start for stay in completion.stays)
        assert len(done) == sum(map(len, lengths)) and loop.planner.num_tokens == sum(map(sum, lengths))
        preempted += loop.stats.preemptions
        assert loop.stats.recomputed_tokens <= loop.stats.sent_tokens - loop.stats.cached_tokens
    assert (preempted > 20) == (schedule == "token_budget")


def test_turns_are_sent_again_with_what_was_observed_and_only_what_had_been_computed_counts_as_recomputed():
    """Samples that end turns at two places; after a turn some tokens are observed, at once or later."""
    observed, away = [9_001, 9_002, 9_003], 0
    for seed in range(40):
        draw = random.Random(seed)
        block, cap = draw.choice([1, 4, 16]), 40
        prompts = [[place] + [7] * draw.randint(0, 40) for place in range(draw.randint(1, 3))]
        lengths = [[draw.randint(12, cap) for _ in range(6)] for _ in prompts]
        pages = -(-max(map(len, prompts)) // block) + -(-cap // block) + draw.choice([1, 3, draw.randint(1, 60)])
        engine, turns = StandIn(block, 0.2, seed), AnsweringTwice(seed, longest_wait=4, observed=observed)
        loop = new_loop(draw, "token_budget", engine, lengths, prompts, pages, cap, turns)
        for key in [100 * (50 * place + sample) for place in range(len(prompts)) for sample in range(6)]:
            loop.stops.stop_token_ids.add(key + 4)
        done = {}
        while not loop.planner.is_done:
            for micro_group in loop.step():
                done |= {(each.prompt_index, each.sample_index): each for each in micro_group}
            away += bool(loop.planner.away)
        assert engine.peak <= pages and not engine.requests and not turns.owed
        for (place, sample), completion in done.items():
            base = 100 * (50 * place + sample)
            first, rest = list(range(base, base + 5)), list(range(base + 8, base + lengths[place][sample]))
            assert completion.token_ids.tolist() == first + observed + rest
            assert (~completion.sampled).nonzero()[0].tolist() == [5, 6, 7] and completion.episode.turns == 2
        assert len(done) == sum(map(len, lengths))
        # of every turn that was sent again 4 tokens at least had not been computed: an observation, and a stop token
        computed = loop.stats.sent_tokens - loop.stats.cached_tokens
        assert 0 < loop.stats.recomputed_tokens <= computed - 4 * len(done)
    assert away > 100


class AnsweringTwice(Answering):
    """Observes the same after a first turn, soon or later, and ends a sample after its second."""

    def end(self, sample, reason):
        number = self.turns[sample] = self.turns.get(sample, 0) + 1
        episode = Episode(reward=1.0, failure="", turns=2, calls=0, waited_s=0.0) if number == 2 else None
        observed = [] if episode else self.observed
        self.owed.append([self.dice.randint(0, self.longest_wait), Answer(sample, observed, episode)])


def test_what_ends_teaches_lengths():
    seen, engine = [], StandIn(4)
    loop = new_loop(random.Random(0), "arrival", engine, [[2, 9]], [[1, 2, 3]], 12, 9)
    loop.watch = SimpleNamespace(ended=lambda sample, length, cut: seen.append((sample.sample_index, length, cut)))
    while not loop.planner.is_done:
        loop.step()
    assert sorted(seen) == [(0, 2, False), (1, 9, False)]


def test_a_stream_that_is_closed_early_leaves_no_request():
    draw, engine = random.Random(0), StandIn(4)
    loop = new_loop(draw, "token_budget", engine, [[9] * 6], [[1, 2, 3]], 12, 9)
    loop.step()
    assert engine.requests
    loop.free()
    assert not engine.requests and loop.planner.pool.num_free == 12


def test_a_preemption_of_vllm_and_two_tokens_at_once_are_errors():
    draw, engine = random.Random(0), StandIn(4)
    counts = iter([3, 5])
    loop = new_loop(draw, "arrival", engine, [[2] * 2], [[1, 2, 3]], 12, 9)
    loop._preemptions, loop._preempted_before = lambda: next(counts), next(counts)
    with pytest.raises(RuntimeError, match="vLLM preempted 2 rows"):
        while not loop.planner.is_done:
            loop.step()
    loop = new_loop(draw, "arrival", engine, [[2] * 2], [[1, 2, 3]], 12, 9)
    step = engine.step
    engine.step = lambda: [
        SimpleNamespace(**{**vars(output), "outputs": [SimpleNamespace(token_ids=[1, 2], logprobs=[])]})
        for output in step()
    ]
    with pytest.raises(RuntimeError, match="vLLM gave 2 tokens of one sample in one step"):
        loop.step()


def test_a_step_that_vllm_cannot_take_is_its_engines_end():
    engine = StandIn(4)
    loop = new_loop(random.Random(0), "arrival", engine, [[2] * 2], [[1, 2, 3]], 12, 9)
    engine.step = lambda: (_ for _ in ()).throw(RuntimeError("\ncancelled"))
    with pytest.raises(EngineFailed, match="vLLM cannot go on: RuntimeError: cancelled"):
        loop.step()


def test_a_vllm_that_gives_no_token_is_not_waited_for():
    engine = StandIn(4, slow=1.0)
    loop = new_loop(random.Random(0), "arrival", engine, [[2] * 2], [[1, 2, 3]], 12, 9)
    with pytest.raises(RuntimeError, match="vLLM gave none of . rows a token in 1000 steps"):
        while True:
            loop.step()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (
            "1 validation error for ModelConfig\n  Value error, Model architectures ['Foo'] are not supported. "
            "[type=value_error, input_value=ArgsKwargs((), {}), input_type=ArgsKwargs]\n"
            "    For further information visit https://errors.pydantic.dev/2.14/v/value_error",
            "Model architectures ['Foo'] are not supported.",
        ),
        ("one\ntwo\n", "two"),
        ("", "ValueError"),
    ],
)
def test_of_what_vllm_refuses_its_own_words_are_said(said, words):
    assert last_words(ValueError(said)) == words

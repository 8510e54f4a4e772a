"""Learner rows on their way out: which rank gets which row, when, with which denominators. The cluster is a list of
what it was sent."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from infsample_rl.controller.groups import Group, SampleRecord
from infsample_rl.controller.waves import Waves
from infsample_rl.types import LossTotals, RowWork
from tests.configs import run_config
from tests.tiny_models import prompt_of

# 4 prompts of 2 samples, as if all were of full length
PROVISIONAL = LossTotals(num_sequences=8, num_tokens=8 * 8, length_normalizer=8)


class Sent(NamedTuple):
    rank: int
    work: RowWork
    keys: list[int]

    @property
    def samples(self) -> list[tuple[int, int]] | None:
        return None if self.work.row is None else [(spec.prompt_index, spec.sample_index) for spec in self.work.row]


class Cluster:
    """Takes down what learner ranks are sent."""

    def __init__(self, ranks: int):
        self.num_learner_ranks, self.sent = ranks, list[Sent]()

    def learn(self, rank: int, work: RowWork, keys: list[int]) -> None:
        self.sent.append(Sent(rank, work, keys))

    def take(self) -> list[Sent]:
        sent, self.sent = self.sent, []
        return sent


def make(
    ranks: int,
    *,
    overlap: bool = True,
    grad_sync: str = "every_row",
    row: int = 16,
    backend: str = "fsdp",
    turns: bool = False,
    **objective,
) -> tuple[Waves, Cluster]:
    cluster = Cluster(ranks)
    config = run_config(
        data={"prompts_per_step": 4, "max_prompt_tokens": 2},
        rollout={"group_size": 2, "slots": 2, "max_new_tokens": 8, "engine": "vllm" if turns else "native"},
        objective={"kl_coef": 0.0, **objective},
        learner={"max_tokens_per_micro_batch": row, "overlap": overlap, "grad_sync": grad_sync, "backend": backend},
        cluster={"learner_ranks": ranks, "rollout_workers": ranks, "colocate": turns},
    )
    return Waves(config, cluster), cluster


def group(index: int, lengths: tuple[int, int] = (4, 5), *, signal: float = 1.0) -> Group:
    """Complete: two samples, of the micro-groups 10 index and 10 index + 1, behind a prompt of 2 tokens."""
    samples = [
        SampleRecord(
            sample_index=place,
            length=length,
            finish_reason="stop",
            micro_group=10 * index + place,
            position=0,
            reward=float(place),
            advantages=(signal * (2 * place - 1),),
        )
        for place, length in enumerate(lengths)
    ]
    prompt = prompt_of(index, [7, index])
    return Group(prompt=prompt, size=2, samples=samples)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("ranks", "settings", "rows"),
    [
        (1, {}, [(0, [0, 1, 2, 3])]),
        (1, {"backend": "deepspeed"}, [(0, [0]), (0, [1]), (0, [2]), (0, [3])]),
        (2, {"grad_sync": "last_row"}, [(0, [0, 1]), (1, [2, 3])]),
        (2, {}, [(0, [0]), (1, [1]), (0, [2]), (1, [3])]),
    ],
)
def test_a_group_above_one_pass_is_a_long_row_for_each_rank_that_runs_free_and_else_rows_of_one_pass(
    overlap, ranks, settings, rows
):
    waves, cluster = make(ranks, overlap=overlap, **settings)
    waves.add(group(0, (8, 8, 8, 8)))
    assert list(waves.updates())
    assert sorted((sent.rank, [index for _, index in sent.samples]) for sent in cluster.take()) == sorted(rows)


def test_with_a_reduction_every_row_ranks_get_their_rows_together_and_the_last_has_one_of_weight_zero():
    waves, cluster = make(2)
    waves.add(group(0))
    assert cluster.take() == [], "the row of prompt 0 is still open"
    waves.add(group(1))
    assert cluster.take() == [], "rank 1 has none yet"
    waves.add(group(2))
    sent = cluster.take()
    assert [(one.rank, one.samples) for one in sent] == [(0, [(0, 0), (0, 1)]), (1, [(1, 0), (1, 1)])]
    assert [one.keys for one in sent] == [[0, 1], [10, 11]]
    assert [{index: ids.tolist() for index, ids in one.work.prompt_ids.items()} for one in sent] == [
        {0: [7, 0]},
        {1: [7, 1]},
    ]
    assert all(one.work.totals == PROVISIONAL and one.work.row_id is None for one in sent)
    waves.finish()
    waves.finish()
    sent = cluster.take()
    assert [(one.rank, one.samples, one.keys, one.work.prompt_ids != {}) for one in sent] == [
        (0, [(2, 0), (2, 1)], [20, 21], True),
        (1, None, [], False),
    ]
    ((totals, is_last),) = waves.updates()
    assert (
        is_last and totals == LossTotals(num_sequences=6, num_tokens=27, length_normalizer=8) and cluster.take() == []
    )


def test_with_one_reduction_an_update_a_row_goes_at_once_to_the_rank_that_has_had_the_fewest_tokens():
    waves, cluster = make(3, grad_sync="last_row")
    for index, lengths in enumerate([(7, 7), (3, 4), (4, 4), (3, 4), (4, 4)]):  # each fills a row of its own
        waves.add(group(index, lengths))
    assert [one.samples[0][0] for one in cluster.sent] == [0, 1, 2, 3], "all but the open row are on their way"
    waves.finish()
    # 16 tokens, 9 and 10; the next row goes to rank 1, the last to rank 2, which has 10 of 16, 18, 10
    assert [(one.rank, one.samples[0][0]) for one in cluster.take()] == [(0, 0), (1, 1), (2, 2), (1, 3), (2, 4)]


@pytest.mark.parametrize("settings", [{"overlap": False}, {"turns": True}])
def test_without_overlap_nothing_goes_out_before_the_denominators_are_known(settings):
    waves, cluster = make(2, **settings)
    for index in range(3):
        waves.add(group(index))
    waves.finish()
    assert cluster.take() == []
    updates = waves.updates()
    totals, is_last = next(updates)
    sent = cluster.take()
    assert is_last and totals == LossTotals(num_sequences=6, num_tokens=27, length_normalizer=8)
    assert [(one.rank, one.samples and one.samples[0][0]) for one in sent] == [(0, 0), (1, 1), (0, 2), (1, None)]
    assert all(one.work.totals == totals and one.work.row_id is None for one in sent)
    assert sorted(sample for one in sent for sample in one.samples or []) == [
        (index, place) for index in range(3) for place in range(2)
    ]
    assert next(updates, None) is None


def test_several_updates_remember_the_log_probabilities_of_rows_before_the_first_and_know_each_row_by_a_number():
    waves, cluster = make(1, mini_batches=2, epochs=2)
    for index in (3, 1, 0, 2):  # as they completed
        waves.add(group(index))
    assert cluster.take() == [], "with several updates a step rows wait"
    seen = []
    for totals, is_last in waves.updates():
        assert totals == LossTotals(num_sequences=4, num_tokens=18, length_normalizer=8)
        seen.append(
            ([(one.samples[0][0], one.work.totals is None, one.work.row_id) for one in cluster.take()], is_last)
        )
    first, second = [(0, False, 0), (1, False, 1)], [(2, False, 2), (3, False, 3)]
    assert seen == [([(2, True, 2), (3, True, 3), *first], False), (second, False), (first, False), (second, True)]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_group_without_signal_goes_nowhere_and_counts_in_the_denominators(overlap):
    waves, cluster = make(1, overlap=overlap)
    waves.add(group(0, signal=0.0))
    waves.add(group(1))
    ((totals, _),) = waves.updates()
    assert [one.samples for one in cluster.take()] == [[(1, 0), (1, 1)]]
    assert totals == LossTotals(num_sequences=4, num_tokens=18, length_normalizer=8)

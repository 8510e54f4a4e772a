import random

import numpy as np
import pytest

from infsample_rl.learner.row_plan import (
    RowPlanner,
    assemble,
    balanced_waves,
    row_cost,
    row_tokens,
    split_passes,
)
from infsample_rl.types import ReferenceReport, ReferenceResult, SampleSpec
from tests.tiny_models import finished, reference_tokens, training_sample


def specs(prompt, lengths, first=0):
    return [
        SampleSpec(prompt_index=prompt, sample_index=first + i, length=n, advantages=(0.5,))
        for i, n in enumerate(lengths)
    ]


def sample_of(prompt, prompt_tokens, length):
    return training_sample(prompt, [0] * prompt_tokens, [0] * length)


def names(rows):
    return [[(spec.prompt_index, spec.sample_index) for spec in row] for row in rows]


def test_short_groups_share_a_row():
    planner = RowPlanner(12, {0: 3, 1: 2})
    assert planner.add_group(specs(0, [2, 2])) == []
    assert planner.add_group(specs(1, [3])) == []  # 3 + 2 + 2, then 2 + 3: exactly 12
    assert names(planner.flush()) == [[(0, 0), (0, 1), (1, 0)]]
    assert planner.flush() == []


def test_a_long_group_is_split_and_its_prompt_repeated():
    planner = RowPlanner(10, {0: 4})
    full = planner.add_group(specs(0, [3, 3, 3, 3, 3]))
    assert names(full + planner.flush()) == [[(0, 0), (0, 1)], [(0, 2), (0, 3)], [(0, 4)]]


def test_a_group_too_long_for_one_pass_is_one_row_for_each_rank_that_runs_free():
    planner = RowPlanner(10, {0: 4, 1: 2}, long_rows=1)
    planner.add_group(specs(1, [2]))
    rows = planner.add_group(specs(0, [3, 3, 3, 3, 3]))  # nothing else shares its row
    assert names(rows) == [[(1, 0)], [(0, index) for index in range(5)]] and planner.flush() == []
    two = RowPlanner(10, {0: 4, 1: 2}, long_rows=2)
    assert names(two.add_group(specs(0, [6, 1, 1, 1, 3]))) == [[(0, 0)], [(0, 1), (0, 2), (0, 3), (0, 4)]]
    # exactly 10: one pass
    assert names(two.add_group(specs(0, [3, 3]))) == [] and names(two.flush()) == [[(0, 0), (0, 1)]]
    assert names(RowPlanner(10, {0: 4}, long_rows=8).add_group(specs(0, [6, 1]))) == [[(0, 0)], [(0, 1)]]


def test_long_rows_hold_every_sample_once_in_even_parts():
    generator = random.Random(1)
    for _ in range(200):
        lengths = [generator.randint(1, 30) for _ in range(generator.randint(2, 40))]
        ranks = generator.randint(1, 5)
        rows = RowPlanner(31, {0: 1}, long_rows=ranks).add_group(specs(0, lengths))
        if 1 + sum(lengths) <= 31:
            continue
        assert [spec.sample_index for row in rows for spec in row] == list(range(len(lengths))) and len(rows) <= ranks
        assert max(sum(spec.length for spec in row) for row in rows) <= sum(lengths) / ranks + max(lengths)


def test_passes_of_a_row():
    samples = [sample_of(0, 3, length) for length in (4, 3, 1, 6, 2)]
    assert split_passes(samples, 19) == [samples]
    assert [[len(sample.response_ids) for sample in part] for part in split_passes(samples, 10)] == [
        [4, 3],
        [1, 6],
        [2],
    ]
    mixed = [sample_of(0, 3, 2), sample_of(1, 3, 2)]
    assert split_passes(mixed, 10) == [mixed]
    with pytest.raises(ValueError, match="a row of 2 prompts is above 9 tokens"):
        split_passes(mixed, 9)


def test_every_sample_is_in_one_row_and_no_row_is_above_the_budget():
    generator = random.Random(0)
    for _ in range(200):
        prompts = {p: generator.randint(1, 20) for p in range(generator.randint(1, 6))}
        groups = [specs(p, [generator.randint(1, 30) for _ in range(generator.randint(1, 12))]) for p in prompts]
        planners = RowPlanner(60, prompts), RowPlanner(60, prompts)
        plans = []
        for planner in planners:
            rows = [row for group in groups for row in planner.add_group(group)] + planner.flush()
            plans.append(rows)
        assert plans[0] == plans[1]  # deterministic
        assert [spec for row in plans[0] for spec in row] == [spec for group in groups for spec in group]
        assert all(0 < row_tokens(row, prompts) <= 60 for row in plans[0])
        for group, prompt in zip(groups, prompts, strict=True):
            if prompts[prompt] + sum(spec.length for spec in group) <= 60:
                assert sum(any(spec in row for spec in group) for row in plans[0]) == 1  # its prompt is computed once


def test_every_row_is_dealt_once_and_ranks_differ_by_no_more_than_a_wave_does():
    generator = random.Random(1)
    for _ in range(200):
        ranks = generator.randint(1, 5)
        prompts = {p: generator.randint(1, 500) for p in range(generator.randint(0, 20))}
        rows = [specs(p, [generator.randint(1, 4000) for _ in range(generator.randint(1, 4))]) for p in prompts]
        waves = balanced_waves(rows, ranks, prompts)
        assert waves == balanced_waves(rows, ranks, prompts)
        dealt = [row for wave in waves for row in wave if row is not None]
        assert sorted(names(dealt)) == sorted(names(rows))
        assert len(waves) == -(-len(rows) // ranks) and all(len(wave) == ranks for wave in waves)
        assert all(None not in wave for wave in waves[:-1])
        costs = [[0.0 if row is None else row_cost(row, prompts) for row in wave] for wave in waves]
        totals = [sum(column) for column in zip(*costs, strict=True)]
        assert (
            max(totals, default=0) - min(totals, default=0)
            <= max((max(wave) - min(wave) for wave in costs), default=0) + 1e-6
        )
        in_turn = sorted((row_cost(row, prompts) for row in rows), reverse=True)
        # no grouping has a smaller sum of maxima
        assert sum(max(wave) for wave in costs) == pytest.approx(sum(in_turn[::ranks]))


def test_assemble_takes_the_samples_of_the_row_with_their_references():
    micro_groups = [[finished(0, 2, [7, 8]), finished(0, 0, [9])], [finished(1, 0, [5])]]
    references = [
        ReferenceResult(
            tokens=[reference_tokens(np.array(logprobs, np.float32)) for logprobs in ([-1, -2], [-3])],
            report=ReferenceReport([0.0, 0.0], 0),
        ),
        ReferenceResult(tokens=[reference_tokens(np.array([-4], np.float32))], report=ReferenceReport([0.0], 0)),
    ]
    row = [
        SampleSpec(prompt_index=0, sample_index=0, length=1, advantages=(0.75,)),
        SampleSpec(prompt_index=1, sample_index=0, length=1, advantages=(-1.0,)),
    ]
    prompts = {0: np.array([1, 2], np.int32), 1: np.array([3], np.int32)}
    samples = assemble(row, prompts, micro_groups, references)
    assert [sample.response_ids.tolist() for sample in samples] == [[9], [5]]
    assert [sample.prompt_ids.tolist() for sample in samples] == [[1, 2], [3]]
    assert [sample.advantages for sample in samples] == [(0.75,), (-1.0,)]
    assert [sample.engine_logprobs.tolist() for sample in samples] == [[-9.0], [-5.0]]
    assert [sample.reference.logprobs.tolist() for sample in samples] == [[-3.0], [-4.0]]
    assert [sample.reference for sample in assemble(row, prompts, micro_groups, [])] == [None, None]


def test_assemble_refuses_missing_samples_and_wrong_lengths():
    prompts = {0: np.array([1, 2], np.int32)}
    for row, name in ((specs(0, [1], first=1), "sample 1"), (specs(0, [4]), "sample 0")):
        with pytest.raises(RuntimeError, match=f"{name} of prompt 0 was not delivered"):
            assemble(row, prompts, [[finished(0, 0, [9])]], [])

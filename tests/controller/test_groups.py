"""The driver's book of a step: dealing, completion, advantages, totals."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from infsample_rl.cluster.dealing import ExpectedLengths, deal
from infsample_rl.config import Config, RewardFunctionConfig
from infsample_rl.controller.groups import StepGroups, loss_totals, mini_batches, trainable_specs
from infsample_rl.controller.step import start_rollout
from infsample_rl.controller.step_metrics import sample_metrics
from infsample_rl.types import Episode, LossTotals, MicroGroupHeader, Prompt, ReferenceReport, RewardResult
from tests import fakes
from tests.configs import run_config
from tests.fakes import rewarded
from tests.tiny_models import prompt_of


def config(deterministic: bool = False, **objective) -> Config:
    return run_config(
        run={"deterministic": deterministic},
        data={"prompts_per_step": 2},
        rollout={"group_size": 2, "slots": 2, "max_new_tokens": 8},
        objective={"kl_coef": 0.0, **objective},
        reference={"path": "teacher"},
    )


def prompts(count: int) -> list[Prompt]:
    return [prompt_of(index, [7, index]) for index in range(count)]


def header(prompt_index: int, samples: list[int]) -> MicroGroupHeader:
    return fakes.header(prompt_index, samples, lengths=[3 + sample for sample in samples])


def rewards(*values) -> RewardResult:
    return rewarded(*values, kk=list(values))


def scored(settings: Config, *earned: tuple, with_reference: bool = False) -> StepGroups:
    """A step whose every prompt has its two samples, of 3 and 4 tokens, and what they earned."""
    groups = StepGroups(prompts(len(earned)), settings, group_size=2, step=0, with_reference=with_reference)
    for index, values in enumerate(earned):
        groups.add_micro_group(index, header(index, [0, 1]))
        groups.add_rewards(index, rewards(*values))
    return groups


def test_whole_prompts_stay_on_one_worker():
    parts = deal(prompts(3), 2, 2, whole_prompts=True, expected=[1.0, 9.0, 1.0])
    dealt = [[(work.prompt_index, work.sample_indices) for work in part] for part in parts]
    assert dealt == [[(0, [0, 1]), (2, [0, 1])], [(1, [0, 1])]]


def test_held_out_rows_are_dealt_evenly_whatever_is_known_of_rows_with_their_numbers():
    known, dealt = ExpectedLengths(), []
    known.observe({0: [300], 1: [100]})
    rollout = SimpleNamespace(start=lambda parts, **_: dealt.append(parts))
    cluster = SimpleNamespace(weights=SimpleNamespace(holders={0, 1}), rollout=rollout)
    run = SimpleNamespace(config=config(), cluster=cluster, expected_lengths=known)
    for evaluation in (False, True):
        start_rollout(run, prompts(2), 4, batch=0, evaluation=evaluation)
    counts = [[sum(len(item.sample_indices) for item in part) for part in parts] for parts in dealt]
    assert counts == [[2, 6], [4, 4]]


def test_turns_are_credited_with_what_was_earned_from_them_on():
    settings = config(advantage="mean_only", turn_credit="turn")
    settings.reward.functions.append(RewardFunctionConfig(name="environment", weight=2.0))
    groups = StepGroups(prompts(1), settings, group_size=2, step=0, with_reference=False)
    told = {"failure": "", "turns": 2, "calls": 0, "waited_s": 0.0}
    episodes = [Episode(reward=sum(own), turn_rewards=own, **told) for own in ([1.0, 0.0], [0.0, 0.5])]
    groups.add_micro_group(0, replace(header(0, [0, 1]), episodes=episodes))
    groups.add_rewards(0, rewards(2.0, 2.0))  # twice what its turns gave, and 1 beside for the second
    (group,) = groups.take_complete()
    assert [sample.advantages for sample in group.samples] == [(0.0, -1.0), (0.0, 1.0)]
    assert group.has_signal and [spec.advantages for spec in trainable_specs(group, settings)] == [(0, -1), (0, 1)]


def test_group_is_complete_with_its_last_reward_and_advantages_span_the_group():
    groups = StepGroups(prompts(2), config(advantage="mean_only"), group_size=2, step=0, with_reference=False)
    groups.add_micro_group(0, header(1, [1]))
    groups.add_micro_group(1, header(1, [0]))
    groups.add_rewards(0, rewards(1.0))
    assert groups.take_complete() == []
    groups.add_rewards(1, rewards(0.0))
    (group,) = groups.take_complete()
    assert [(sample.sample_index, sample.advantage) for sample in group.samples] == [(0, -0.5), (1, 0.5)]
    assert groups.take_complete() == [] and not groups.all_complete()


def test_deterministic_groups_come_in_prompt_order():
    groups = StepGroups(prompts(2), config(deterministic=True), group_size=2, step=0, with_reference=False)
    for key, prompt in ((0, 1), (1, 0)):
        groups.add_micro_group(key, header(prompt, [0, 1]))
    groups.add_rewards(0, rewards(1.0, 0.0))
    assert groups.take_complete() == []
    groups.add_rewards(1, rewards(1.0, 0.0))
    assert [group.prompt.prompt_index for group in groups.take_complete()] == [0, 1]


def test_failed_reward_is_outside_mean_and_every_denominator():
    settings = config(advantage="mean_only")
    groups = scored(settings, (None, 1.0))
    (group,) = groups.take_complete()
    assert [sample.advantage for sample in group.samples] == [0.0, 0.0]
    assert loss_totals(groups.trained(), settings) == LossTotals(num_sequences=1, num_tokens=4, length_normalizer=8)


def test_where_rewards_train_nothing_one_that_failed_is_trained():
    settings = config(distill_coef=1.0, reward_coef=0.0)
    groups = scored(settings, (None, None))
    (group,) = groups.take_complete()
    assert len(trainable_specs(group, settings)) == 2
    assert loss_totals(groups.trained(), settings) == LossTotals(num_sequences=2, num_tokens=7, length_normalizer=8)


def test_group_without_signal_is_not_sent_unless_the_loss_has_a_kl_a_teacher_or_an_entropy_term():
    terms = ({}, 0), ({"kl": "k3", "kl_coef": 0.01}, 2), ({"entropy_coef": 0.1}, 2), ({"distill_coef": 0.1}, 2)
    for objective, sent in terms:
        settings = config(**objective)
        groups = scored(settings, (1.0, 1.0))
        assert len(trainable_specs(groups.take_complete()[0], settings)) == sent


def test_a_kl_in_the_reward_is_subtracted_before_the_advantages_and_is_no_signal_alone():
    settings = config(advantage="mean_only", kl_reward_coef=0.5)
    groups = scored(settings, (1.0, 1.0), with_reference=True)
    assert groups.take_complete() == []
    groups.add_reference(0, ReferenceReport([2.0, 0.0], 3_000))
    (group,) = groups.take_complete()
    assert [spec.advantages for spec in trainable_specs(group, settings)] == [(-0.5,), (0.5,)]
    metrics = sample_metrics(groups)
    assert (metrics["reward/groups_with_signal"], metrics["memory/reference_peak_bytes"]) == (0.0, 3_000)


def test_more_samples_than_the_group_has_is_an_error():
    groups = StepGroups(prompts(1), config(), group_size=2, step=0, with_reference=False)
    groups.add_micro_group(0, header(0, [0, 1]))
    with pytest.raises(RuntimeError, match="got 3 samples, its group has 2"):
        groups.add_micro_group(1, header(0, [2]))


def test_an_overlong_response_loses_some_of_its_reward():
    settings = config(advantage="mean_only", overlong_buffer_tokens=6, overlong_penalty=3.0)
    groups = scored(settings, (1.0, 1.0))  # 1 and 2 tokens beyond 8 - 6
    assert [sample.advantage for sample in groups.take_complete()[0].samples] == [0.25, -0.25]


def test_with_dynamic_sampling_a_group_of_equal_rewards_is_outside_the_update_and_its_denominators():
    settings = config(dynamic_sampling=True)
    groups = scored(settings, (1.0, 1.0), (1.0, 0.0))
    assert [groups.trains(group) for group in groups.take_complete()] == [False, True]
    assert loss_totals(groups.trained(), settings) == LossTotals(num_sequences=2, num_tokens=7, length_normalizer=8)
    groups.extend([prompt_of(2, row=5)])
    assert not groups.all_complete()


def test_a_micro_group_that_is_lost_comes_again_under_another_key_and_the_group_is_handed_out_once():
    groups = StepGroups(prompts(1), config(), group_size=4, step=0, with_reference=False)
    groups.add_micro_group(0, header(0, [0, 1]))
    groups.add_micro_group(1, header(0, [2, 3]))
    groups.add_rewards(0, rewards(1.0, 0.0))
    groups.forget(1)
    assert groups.take_complete() == [] and groups.micro_groups == [0]
    groups.add_micro_group(2, header(0, [3, 2]))
    groups.add_rewards(2, rewards(0.5, 0.25))
    [group] = groups.take_complete()
    assert [(sample.sample_index, sample.reward, sample.micro_group) for sample in group.samples] == [
        *((0, 1.0, 0), (1, 0.0, 0)),
        *((2, 0.25, 2), (3, 0.5, 2)),
    ]
    assert groups.take_complete() == []


@pytest.mark.parametrize("last", ["rewards", "reference"])
def test_what_a_lost_micro_group_had_does_not_count_for_the_one_drawn_again(last):
    groups = StepGroups(prompts(1), config(kl="k3", kl_coef=0.1), group_size=4, step=0, with_reference=True)
    adds = {
        "rewards": lambda key: groups.add_rewards(key, rewards(1.0, 0.0)),
        "reference": lambda key: groups.add_reference(key, ReferenceReport([0.5, 0.5], 1)),
    }
    (first,) = adds.keys() - {last}
    for key, samples in ((0, [0, 1]), (1, [2, 3])):
        groups.add_micro_group(key, header(0, samples))
        adds[last](key)
    adds[first](0)
    groups.forget(1)
    groups.add_micro_group(2, header(0, [2, 3]))
    adds[first](2)
    assert groups.take_complete() == []
    adds[last](2)
    assert [sample.reward for sample in groups.take_complete()[0].samples] == [1.0, 0.0, 1.0, 0.0]


def test_mini_batches_are_in_prompt_order():
    groups = StepGroups(prompts(4), config(), group_size=2, step=0, with_reference=False)
    batches = mini_batches([groups.groups[index] for index in (3, 0, 2, 1)], 2)
    assert [[group.prompt.prompt_index for group in batch] for batch in batches] == [[0, 1], [2, 3]]

"""The prefix phase: what waits, is predicted and started in which order. No model."""

import pytest

from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, with_means


def make_group(schedule, predicted):
    """A group of four samples whose predicted length is looked up by their first token; and the calls of the
    predictor."""
    calls = []

    def predict(prompt_ids, prefixes):
        calls.append((prompt_ids, [list(prefix) for prefix in prefixes]))
        return [predicted[prefix[0]] for prefix in prefixes]

    settings = GroupSettings(schedule, slots=2, group_size=4, prefix_tokens=2)
    return PromptGroup(0, [5, 9], [0, 1, 2, 3], settings, lambda index: 100 + index, predict=predict), calls


def test_the_schedule_starts_after_the_last_prefix_with_each_samples_own_prediction():
    group, calls = make_group("sjf", {10: 7.0, 11: 3.0, 13: 5.0})
    samples = [group.next_sample(slot % 2) for slot in range(4)]
    assert [(sample.key, sample.wait_at) for sample in samples] == [(100, 2), (101, 2), (102, 2), (103, 2)]
    for index, tokens in ((3, [13, 1]), (1, [11, 1]), (0, [10, 1])):
        samples[index].tokens.extend(tokens)
        group.keep_waiting(samples[index])
    assert calls == [] and group.next_sample(0) is None and group.holds(0) and group.has_waiting
    samples[2].tokens.append(12)
    assert group.finish(samples[2])  # ends within its prefix
    assert calls == [([5, 9], [[10, 1], [11, 1], [13, 1]])]
    order = [group.next_sample(0) for _ in range(3)]
    assert [(sample.sample_index, sample.predicted, sample.wait_at) for sample in order] == [
        (1, 3.0, None),
        (3, 5.0, None),
        (0, 7.0, None),
    ]
    assert group.next_sample(0) is None and not group.holds(0) and not group.has_waiting and not group.is_done


def test_a_waiting_sample_goes_on_with_its_tokens_and_finishes_once():
    group, _ = make_group("lpt", {10: 7.0})
    for slot in range(4):
        sample = group.next_sample(slot % 2)
        sample.tokens.extend([10, 1])
        group.keep_waiting(sample)
    for _ in range(4):
        sample = group.next_sample(0)
        assert list(sample.tokens) == [10, 1]
        assert group.finish(sample)
    assert group.is_done and [sample.sample_index for sample in group.finished] == [0, 1, 2, 3]


@pytest.mark.parametrize(("asked", "extra"), [([0, 1, 2, 3], [4, 5]), ([2, 3], [6, 7])])
def test_extra_samples_of_dynamic_slot_never_collide_between_workers(asked, extra):
    settings = GroupSettings("dynamic_slot", slots=2, group_size=4)
    group = PromptGroup(0, [5, 9], asked, settings, lambda index: index)
    assert [group.next_sample(0).sample_index for _ in range(len(asked) + 2)] == asked + extra


def test_a_sample_beyond_those_dynamic_slot_keeps_is_not_wanted():
    group = PromptGroup(0, [5], [0, 1], GroupSettings("dynamic_slot", slots=2, group_size=2), lambda index: index)
    samples = [group.next_sample(0) for _ in range(3)]
    assert [group.finish(sample) for sample in samples] == [True, True, False]
    assert [sample.sample_index for sample in group.finished] == [0, 1]


def test_predictions_found_in_the_rows_order_the_schedule_and_one_that_is_missing_counts_as_their_mean():
    settings = GroupSettings("lpt", slots=2, group_size=4, prefix_tokens=2)
    group = PromptGroup(0, [5, 9], [0, 1, 2, 3], settings, lambda index: index, predicted_in_rows=True)
    samples = [group.next_sample(slot % 2) for slot in range(4)]
    for sample, predicted in zip(samples, (10.0, None, 40.0, 18.0), strict=True):
        assert sample.wait_at == 2
        sample.predicted = predicted
        group.keep_waiting(sample)
    assert with_means([10.0, None, 40.0, 18.0]) == [10, pytest.approx(68 / 3), 40, 18] and with_means([None, None]) == [
        1,
        1,
    ]
    assert [group.next_sample(0).sample_index for _ in range(4)] == [2, 1, 3, 0]

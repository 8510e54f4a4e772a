"""Error, rank correlation and intervals of predicted lengths, on values worked out by hand."""

import math

import numpy as np
import pytest

from infsample_rl.rollout.length_prediction.accuracy import Interval, bootstrap, kendall_tau, prompt_accuracy, summarize


@pytest.mark.parametrize(
    "predicted, lengths, tau",
    [
        ([1, 2, 3, 4], [10, 20, 30, 40], 1.0),
        ([4, 3, 2, 1], [10, 20, 30, 40], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 4 / 6),  # 5 pairs agree, 1 does not
        ([1, 1, 2, 3], [1, 2, 2, 3], 4 / 5),  # 4 agree; 5 of 6 pairs untied in either
        ([12, 2, 1, 12, 2], [1, 4, 7, 1, 0], -0.4714045207910316),  # the example of scipy.stats.kendalltau
        ([5, 5, 5], [1, 2, 3], 0.0),
        ([1, 2, 3], [7, 7, 7], None),
    ],
)
def test_kendall_tau_b(predicted, lengths, tau):
    assert kendall_tau(predicted, lengths) == (None if tau is None else pytest.approx(tau))


def test_errors_leave_cut_samples_out_and_the_order_does_not():
    found = prompt_accuracy([20.0, 5.0, 30.0], [10, 10, 40], [False, False, True])
    assert (found.num_samples, found.num_uncensored) == (3, 2)
    assert found.log_error == pytest.approx(2 * math.log(2)) and found.token_error == pytest.approx(15)
    # the two equal lengths have no order, the cut one is longest
    assert found.tau == pytest.approx(2 / math.sqrt(3 * 2))


def test_several_prompts_weigh_samples_in_errors_and_prompts_in_tau():
    many = prompt_accuracy([2.0, 4.0, 8.0], [1, 2, 4], [False] * 3)  # log 2 each, tau 1
    one = prompt_accuracy([1.0, 2.0], [5, 4], [True, False])  # log 2, tau -1
    found = summarize([many, one])
    assert found.log_error.value == pytest.approx(math.log(2)) and found.log_error.low == pytest.approx(math.log(2))
    assert found.token_error.value == pytest.approx((1 + 2 + 4 + 2) / 4)
    assert found.tau == Interval(0.0, -1.0, 1.0)
    assert (found.num_prompts, found.num_samples, found.num_uncensored) == (2, 5, 4)


def test_what_nothing_is_known_of_is_none():
    found = summarize([prompt_accuracy([9.0, 9.0], [8, 8], [True, True])])
    assert found.log_error is None and found.token_error is None and found.tau is None


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0, -1.0])
def test_predictions_that_are_no_lengths_are_refused(bad):
    with pytest.raises(ValueError, match="finite and > 0"):
        prompt_accuracy([bad, 1.0], [1, 2], [False, False])


def test_bootstrap_is_seeded_and_covers_the_mean_of_a_known_distribution():
    generator, inside = np.random.default_rng(0), 0
    for _ in range(200):
        values = generator.normal(3.0, 1.0, 40)
        interval = bootstrap(values, np.ones(40), resamples=400)
        inside += interval.low <= 3.0 <= interval.high
    assert 178 <= inside <= 199  # 95 % of 200, less what 40 prompts cost the percentile method
    assert (
        bootstrap(values, np.ones(40), seed=1)
        == bootstrap(values, np.ones(40), seed=1)
        != bootstrap(values, np.ones(40), seed=2)
    )


def test_bootstrap_of_a_ratio_draws_both_totals_together():
    assert bootstrap([2, 4, 6], [1, 2, 3]) == Interval(2.0, 2.0, 2.0)
    assert bootstrap([1.0], [0.0]) is None
    assert bootstrap([5.0, 0.0], [1.0, 0.0]) == Interval(5.0, 5.0, 5.0)  # draws without the first prompt say nothing


def test_many_prompts_are_resampled_in_pieces_with_one_result(monkeypatch):
    values = list(range(50))
    whole = bootstrap(values, [1] * 50)
    monkeypatch.setattr("infsample_rl.rollout.length_prediction.accuracy.CHUNK", 170)
    assert bootstrap(values, [1] * 50) == whole

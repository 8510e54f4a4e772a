"""Error and rank correlation of predicted lengths, on values worked out by hand."""

import math

import numpy as np
import pytest

from infsample_rl.rollout.length_prediction.accuracy import kendall_tau, mean_accuracy, prompt_accuracy


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
    assert kendall_tau(np.array(predicted), np.array(lengths)) == (None if tau is None else pytest.approx(tau))


def test_errors_leave_cut_samples_out_and_the_order_does_not():
    found = prompt_accuracy([20.0, 5.0, 30.0], [10, 10, 40], [False, False, True])
    assert (found.num_samples, found.num_uncensored) == (3, 2)
    assert found.log_error == pytest.approx(2 * math.log(2)) and found.token_error == pytest.approx(15)
    # the two equal lengths have no order, the cut one is longest
    assert found.tau == pytest.approx(2 / math.sqrt(3 * 2))


def test_several_prompts_weigh_samples_in_errors_and_prompts_in_tau():
    many = prompt_accuracy([2.0, 4.0, 8.0], [1, 2, 4], [False] * 3)  # log 2 each, tau 1
    one = prompt_accuracy([1.0, 2.0], [5, 4], [True, False])  # log 2, tau -1
    found = mean_accuracy([many, one])
    assert found == {"log_error": pytest.approx(math.log(2)), "token_error": (1 + 2 + 4 + 2) / 4, "tau": 0.0}
    nothing = mean_accuracy([prompt_accuracy([9.0, 9.0], [8, 8], [True, True])])
    assert nothing == {"log_error": None, "token_error": None, "tau": None}

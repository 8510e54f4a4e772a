"""pass@k is the chance it is named for, and its intervals cover what they should."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from infsample_rl.commands.pass_at_k import mean_over_problems, pass_at_k


@pytest.mark.parametrize(("num_samples", "num_right"), [(5, 0), (5, 1), (6, 3), (4, 4), (1, 1)])
def test_pass_at_k_is_the_share_of_draws_with_a_right_sample(num_samples, num_right):
    samples = [index < num_right for index in range(num_samples)]
    for k in range(1, num_samples + 1):
        draws = [any(draw) for draw in combinations(samples, k)]
        assert pass_at_k(num_samples, num_right, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_a_k_above_the_samples_is_refused():
    with pytest.raises(ValueError, match="k must be between 1 and samples = 4, got 5"):
        pass_at_k(4, 2, 5)


def test_one_sample_a_problem_has_wilsons_interval():
    estimate = mean_over_problems([1.0] * 8 + [0.0] * 2)
    assert (estimate.value, estimate.interval) == (0.8, "wilson")
    assert (round(estimate.low, 4), round(estimate.high, 4)) == (0.4902, 0.9433)  # Wilson's 8 of 10
    assert mean_over_problems([0.0] * 10).high == pytest.approx(0.2775, abs=1e-4)  # none of 10 still leaves room


def test_the_bootstrap_covers_the_true_mean_about_as_often_as_it_says():
    generator, covered = np.random.default_rng(0), 0
    for trial in range(50):
        estimate = mean_over_problems(generator.uniform(0, 1, 60).round(2), seed=trial)
        covered += estimate.low <= 0.5 <= estimate.high
        assert estimate.interval == "bootstrap"
    assert 0.86 <= covered / 50 <= 1.0


def test_the_bootstrap_interval_is_as_wide_as_the_normal_one_over_many_problems():
    values = np.random.default_rng(1).uniform(0, 1, 400)
    estimate = mean_over_problems(values)
    assert (estimate.high - estimate.low) / 2 == pytest.approx(1.96 * values.std() / 20, rel=0.05)

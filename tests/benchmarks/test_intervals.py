"""Bootstrap intervals: seeded, right on a known distribution, and of ratios."""

import numpy as np

from benchmarks.intervals import Interval, bootstrap


def test_bootstrap_is_seeded_and_covers_the_mean_of_a_known_distribution():
    generator, inside = np.random.default_rng(0), 0
    for _ in range(200):
        values = generator.normal(3.0, 1.0, 40)
        interval = bootstrap(values, np.ones(40), resamples=400)
        inside += interval.low <= 3.0 <= interval.high
    assert 178 <= inside <= 199  # 95 % of 200, less what 40 prompts cost the percentile method
    first, same, other = (bootstrap(values, np.ones(40), seed=seed) for seed in (1, 1, 2))
    assert first == same != other


def test_bootstrap_of_a_ratio_draws_both_totals_together():
    assert bootstrap([2, 4, 6], [1, 2, 3]) == Interval(2.0, 2.0, 2.0)
    assert bootstrap([1.0], [0.0]) is None
    assert bootstrap([5.0, 0.0], [1.0, 0.0]) == Interval(5.0, 5.0, 5.0)  # draws without the first prompt say nothing

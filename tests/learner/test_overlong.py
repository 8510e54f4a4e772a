import pytest

from infsample_rl.learner.overlong import overlong_penalty


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ((100, 20, 1.0), {1: 0.0, 80: 0.0, 85: -0.25, 90: -0.5, 100: -1.0}),  # DAPO's equation 13
        ((100, 20, 0.5), {1: 0.0, 80: 0.0, 85: -0.125, 90: -0.25, 100: -0.5}),
        ((20480, 4096, 1.0), {16384: 0.0, 18432: -0.5, 20480: -1.0}),  # the paper's own lengths
        ((100, 0, 1.0), {1: 0.0, 100: 0.0}),  # without a buffer nothing is lost
        ((4, 4, 1.0), {1: -0.25, 2: -0.5, 3: -0.75, 4: -1.0}),  # one of the whole response punishes every token
    ],
)
def test_penalties_written_out(settings, expected):
    assert {length: overlong_penalty(length, *settings) for length in expected} == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((50, 100, 101, 1.0), "overlong_buffer_tokens must be between 0 and rollout.max_new_tokens = 100, got 101"),
        ((50, 100, -1, 1.0), "got -1"),
        ((50, 100, 20, -1.0), "overlong_penalty must be >= 0, got -1.0"),
        ((101, 100, 20, 1.0), "a response of 101 tokens is longer than rollout.max_new_tokens = 100"),
    ],
)
def test_what_cannot_be_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        overlong_penalty(*arguments)

import pytest

from infsample_rl.learner.overlong import overlong_penalty


def test_the_line_of_dapos_equation_13():
    lengths = [1, 80, 85, 90, 100]
    assert [overlong_penalty(length, 100, 20, 1.0) for length in lengths] == [0.0, 0.0, -0.25, -0.5, -1.0]
    assert [overlong_penalty(length, 100, 20, 0.5) for length in lengths] == [0.0, 0.0, -0.125, -0.25, -0.5]


def test_the_papers_own_lengths():
    # L_max 20480 with L_cache 4096
    assert [overlong_penalty(length, 20480, 4096, 1.0) for length in (16384, 18432, 20480)] == [0.0, -0.5, -1.0]


def test_without_a_buffer_nothing_is_lost():
    assert [overlong_penalty(length, 100, 0, 1.0) for length in (1, 100)] == [0.0, 0.0]


def test_a_buffer_of_the_whole_response_punishes_every_token():
    assert [overlong_penalty(length, 4, 4, 1.0) for length in (1, 2, 3, 4)] == [-0.25, -0.5, -0.75, -1.0]


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

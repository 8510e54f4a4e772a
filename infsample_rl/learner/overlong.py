"""DAPO's soft punishment of overlong responses. Pure Python: the driver adds it to a reward before the group's
advantages."""

from __future__ import annotations


def overlong_penalty(length: int, max_new_tokens: int, buffer_tokens: int, penalty: float) -> float:
    """What is added to the reward of a response of `length` tokens, from 0 down to -penalty (DAPO, arXiv 2503.14476,
    equation 13).

    0 up to max_new_tokens - buffer_tokens, from there a straight line down to -penalty at max_new_tokens. buffer_tokens
    = 0: always 0. Example: of 100 tokens, buffer 20 and penalty 1: 80 -> 0.0, 85 -> -0.25, 100 -> -1.0. ValueError for
    a buffer outside 0..max_new_tokens, a negative penalty, or a length above max_new_tokens.
    """
    if not 0 <= buffer_tokens <= max_new_tokens:
        raise ValueError(
            f"objective.overlong_buffer_tokens must be between 0 and rollout.max_new_tokens = {max_new_tokens}, got "
            f"{buffer_tokens}"
        )
    if penalty < 0:
        raise ValueError(f"objective.overlong_penalty must be >= 0, got {penalty}: it is what a response loses")
    if length > max_new_tokens:
        raise ValueError(f"a response of {length} tokens is longer than rollout.max_new_tokens = {max_new_tokens}")
    excess = length - (max_new_tokens - buffer_tokens)
    return -penalty * excess / buffer_tokens if excess > 0 else 0.0

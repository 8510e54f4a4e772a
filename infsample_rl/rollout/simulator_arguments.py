"""What simulate() and simulate_prompts() are given, checked: a ValueError with name and value for what cannot be
simulated."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from infsample_rl.rollout.length_prediction.recordings import MOST_TOKENS
from infsample_rl.rollout.schedule.schedules import check_predictions

Repredicted = Sequence[Mapping[int, float]]  # of each sample: tokens generated -> predicted total length


def check(groups: Sequence[Sequence[int]], schedule: str, counts: Mapping[str, int | None]) -> int:
    """The cap of a response, when all arguments are in bounds."""
    if len(groups) == 0:
        raise ValueError("groups must hold the lengths of at least one prompt, got none")
    for lengths in groups:
        if len(lengths) == 0:
            raise ValueError("lengths must be positive and at least one, got none")
        for index, length in enumerate(lengths):
            if not (isinstance(length, Integral) and 1 <= length <= MOST_TOKENS):
                raise ValueError(
                    f"lengths must be positive whole numbers of at most {MOST_TOKENS} tokens, got {length} for sample "
                    f"{index}"
                )
    for name, value in counts.items():
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise ValueError(f"{name} must be >= 1 and whole, got {value}")
    if counts["max_rows"] is not None and schedule != "token_budget":
        raise ValueError(f"max_rows={counts['max_rows']} is not read by schedule {schedule}: give slots instead")
    longest, cap = int(max(map(max, groups))), counts["max_new_tokens"]
    if cap is not None and cap < longest:
        raise ValueError(f"max_new_tokens must be >= the longest of lengths = {longest}, got {cap}")
    return cap or longest


def group_sizes(groups: Sequence[Sequence[int]], schedule: str, given: int | Sequence[int] | None) -> list[int]:
    """Samples wanted of each prompt. Only dynamic_slot may be asked for fewer than the given lengths."""
    counts = [len(lengths) for lengths in groups]
    sizes = counts if given is None else list(given) if isinstance(given, Iterable) else [given] * len(groups)
    if len(sizes) != len(groups):
        raise ValueError(f"group_size must be one number or one for each of the {len(groups)} prompts, got {given}")
    for size, count in zip(sizes, counts, strict=True):
        if not (isinstance(size, Integral) and 1 <= size <= count):
            raise ValueError(f"group_size must be <= the {count} given lengths, whole and >= 1, got {size}")
        if size != count and schedule != "dynamic_slot":
            raise ValueError(
                f"group_size={size} is not read by schedule {schedule}, which decodes all {count} lengths: give {size} "
                "lengths"
            )
    return sizes


def prompt_tokens_of(given: int | Sequence[int], num_prompts: int) -> list[int]:
    """Tokens of each prompt."""
    prompts = list(given) if isinstance(given, Iterable) else [given] * num_prompts
    if len(prompts) != num_prompts or not all(
        isinstance(tokens, Integral) and 0 <= tokens <= MOST_TOKENS for tokens in prompts
    ):
        raise ValueError(
            f"prompt_tokens must be >= 0, one number or one for each of the {num_prompts} prompts, got {given}"
        )
    return prompts


def orders_of(
    groups: Sequence[Sequence[int]],
    schedule: str,
    predicted: Sequence[Sequence[float]] | None,
    repredicted: Sequence[Repredicted] | None,
) -> list[list[float] | None]:
    """What each prompt's schedule orders by, None: nothing. Raises ValueError for predictions that are missing or no
    lengths."""
    for name, given in (("predicted", predicted), ("repredicted", repredicted)):
        found = None if given is None else [None if each is None else len(each) for each in given]
        if found not in (None, [len(lengths) for lengths in groups]):
            counts = f"{[len(lengths) for lengths in groups][:8]} samples, got {found[:8]}"
            raise ValueError(f"{name} must have one length for each of the {counts}")
    for samples in repredicted or ():
        for moments in samples:
            check_predictions(list(moments.values()), "repredicted")
            if any(tokens < 1 for tokens in moments):
                raise ValueError(f"repredicted must be made at 1 token or later, got {min(moments)}")
    if predicted is not None:
        for each in predicted:
            check_predictions(each, "predicted")
        return [[float(length) for length in each] for each in predicted]
    if schedule == "token_budget":
        return [None] * len(groups)
    if repredicted is not None:  # a sample without one ended before it, in the prefix phase
        return [
            [
                float(moments[min(moments)] if moments else length)
                for moments, length in zip(samples, lengths, strict=True)
            ]
            for samples, lengths in zip(repredicted, groups, strict=True)
        ]
    return [[float(length) for length in lengths] for lengths in groups]

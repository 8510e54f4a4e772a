"""What a simulation is given, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral

from infsample_rl.config.fields import kv_pages
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.rollout.length_prediction.recordings import MOST_TOKENS
from infsample_rl.rollout.schedule.first_come import FIRST_COME
from infsample_rl.rollout.schedule.schedules import check_predictions

Repredicted = Sequence[Mapping[int, float]]  # of each sample: tokens generated -> predicted total length


def pool_tokens(given: int | None, num_slots: int, cap: int, page_size: int, prompts: Sequence[int]) -> int:
    """Tokens of the pool: those `given`, by default num_slots full responses and the resident prompts, the longest
    first, as in the engine. ValueError, with the smallest budget that would do, when one prompt and one full response
    of `cap` tokens do not fit."""
    smallest = kv_pages(1, cap, prompts[:1], page_size) * page_size
    if given is not None and given < smallest:
        raise ValueError(f"kv_budget_tokens must be >= {smallest} to hold one prompt and a full response, got {given}")
    return given or kv_pages(num_slots, cap, prompts, page_size) * page_size


def check_counts(groups: Sequence[Sequence[int]], counts: Mapping[str, int | None]) -> int:
    """The cap of a response, when lengths and counts are positive whole numbers."""
    lengths = [length for group in groups for length in group]
    if not lengths or min(map(len, groups)) == 0:
        raise ValueError("lengths must be positive and at least one of every prompt, got none")
    for length in lengths:
        if not (isinstance(length, Integral) and 1 <= length <= MOST_TOKENS):
            raise ValueError(f"lengths must be positive whole numbers of at most {MOST_TOKENS} tokens, got {length}")
    for name, value in counts.items():
        if value is not None and not (isinstance(value, Integral) and value >= 1):
            raise ValueError(f"{name} must be >= 1 and whole, got {value}")
    cap = counts["max_new_tokens"] or int(max(lengths))
    if cap < max(lengths):
        raise ValueError(f"max_new_tokens must be >= the longest of lengths = {max(lengths)}, got {cap}")
    return cap


def one_each(name: str, given: int | Sequence[int], num_prompts: int) -> list[int]:
    found = list(given) if isinstance(given, Iterable) else [given] * num_prompts
    if len(found) != num_prompts or not all(isinstance(each, Integral) and 0 <= each <= MOST_TOKENS for each in found):
        wanted = f"must be >= 0 and whole, one number or one for each of the {num_prompts} prompts"
        raise ValueError(f"{name} {wanted}, got {given}")
    return found


def group_sizes(groups: Sequence[Sequence[int]], schedule: str, given: int | Sequence[int] | None) -> list[int]:
    """Samples wanted of each prompt. Only dynamic_slot may be asked for fewer than the given lengths."""
    counts = [len(lengths) for lengths in groups]
    sizes = counts if given is None else one_each("group_size", given, len(groups))
    for size, count in zip(sizes, counts, strict=True):
        if not 1 <= size <= count:
            raise ValueError(f"group_size must be >= 1 and <= the {count} given lengths, got {size}")
        if size != count and schedule != "dynamic_slot":
            raise ValueError(f"group_size={size} is not read by schedule {schedule}: give {size} of {count} lengths")
    return sizes


def orders_of(
    groups: Sequence[Sequence[int]],
    schedule: str,
    predicted: Sequence[Sequence[float]] | None,
    repredicted: Sequence[Repredicted] | None,
) -> Sequence[list[float] | None]:
    """What each prompt's schedule orders by, None: nothing. ValueError for predictions that are no lengths."""
    for name, given in (("predicted", predicted), ("repredicted", repredicted)):
        if given is not None and list(map(len, given)) != list(map(len, groups)):
            raise ValueError(f"{name} must have one length for each sample of {list(map(len, groups))[:8]}")
    for moments in (moments for samples in repredicted or () for moments in samples):
        check_predictions(list(moments.values()), "repredicted")
        if min(moments, default=1) < 1:
            raise ValueError(f"repredicted must be made at 1 token or later, got {min(moments)}")
    for each in predicted or ():
        check_predictions(each, "predicted")
    if predicted is None and schedule in ("token_budget", FIRST_COME):
        return [None] * len(groups)
    return [[float(length) for length in each] for each in predicted or groups]


def check_read(schedule: str, of_budget: Mapping[str, object], of_predictions: Mapping[str, object]) -> None:
    """ValueError for an argument that the schedule does not read: those of token_budget, and of the schedules that wait
    for predictions."""
    unread = dict(of_budget) if schedule != "token_budget" else {}
    if schedule == FIRST_COME:
        unread.pop("max_rows")
    unread |= of_predictions if schedule not in PREDICTED_SCHEDULES else {}
    for name, value in unread.items():
        if value:
            raise ValueError(f"{name} is not read by schedule {schedule}: leave it out")

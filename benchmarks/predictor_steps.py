"""Running steps and time of schedules under predicted lengths, prompt by prompt, with the simulator's planner."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.intervals import Interval, bootstrap
from infsample_rl.rollout.simulator import Simulation, simulate


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What every schedule is given: KV for `slots` responses of `cap` tokens and the prompt."""

    slots: int
    page_size: int
    cap: int
    prompt_tokens: int
    c0: float  # seconds of a step
    c1: float  # seconds of a row in a step, and of a token computed again


@dataclass(frozen=True, slots=True)
class Cost:
    """What one prompt took."""

    steps: float
    seconds: float


def cost(schedule: str, lengths: list[int], memory: Memory, predicted: np.ndarray | None, k: int | None) -> Cost:
    """Steps and seconds of one prompt's samples.

    predicted: [G] total tokens, NaN for samples that ended within k; None: no predictions, all lengths equal. k None:
    predictions known from the start (`oracle`). Otherwise, as in the engine, `token_budget` learns a sample's when it
    has k tokens, and the fixed-slot schedules decode k tokens of all samples first, wait for the last, predict, and go
    on in that order; the prefixes' KV is taken to stay.
    """
    if predicted is None:
        equal = None if schedule == "token_budget" else [1.0] * len(lengths)
        return _sum([_run(lengths, schedule, memory, predicted=equal)], memory)
    if k is None:
        return _sum([_run(lengths, schedule, memory, predicted=[float(value) for value in predicted])], memory)
    if schedule == "token_budget":
        moments = [{} if np.isnan(value) else {k: float(value)} for value in predicted]
        return _sum([_run(lengths, schedule, memory, repredicted=moments)], memory)
    parts = [_run([min(length, k) for length in lengths], "arrival", memory)]
    left = [(length - k, float(value)) for length, value in zip(lengths, predicted, strict=True) if not np.isnan(value)]
    if left:
        parts.append(_run([length for length, _ in left], schedule, memory, predicted=[value for _, value in left]))
    return _sum(parts, memory)


def compare(costs: list[Cost], oracle: list[Cost], none: list[Cost], seed: int) -> dict[str, Interval | None]:
    """Mean steps and seconds of a prompt, and steps over those with true lengths and over those without predictions,
    with intervals."""
    steps, ones = [item.steps for item in costs], [1] * len(costs)
    return {
        "steps": bootstrap(steps, ones, seed),
        "seconds": bootstrap([item.seconds for item in costs], ones, seed),
        "steps_over_oracle": bootstrap(steps, [item.steps for item in oracle], seed),
        "steps_over_none": bootstrap(steps, [item.steps for item in none], seed),
    }


def _run(lengths: list[int], schedule: str, memory: Memory, **predictions: object) -> Simulation:
    options = {
        "slots": memory.slots,
        "page_size": memory.page_size,
        "prompt_tokens": memory.prompt_tokens,
        "max_new_tokens": memory.cap,
    }
    return simulate(lengths, schedule, **options, **predictions)


def _sum(parts: list[Simulation], memory: Memory) -> Cost:
    steps = sum(part.running_steps for part in parts)
    tokens = sum(part.busy_row_steps + part.recomputed_tokens for part in parts)
    return Cost(steps, memory.c0 * steps + memory.c1 * tokens)

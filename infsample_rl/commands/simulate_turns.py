"""Trajectories of several turns with tools between them, without a model: time, KV memory and bounds beside vLLM's rule
with a prefix cache, at equal KV memory.

python -m infsample_rl simulate turns=generated [prompts=4] [group_size=64] [trajectories=4] [noise=[0]] [json=true] ...
python -m infsample_rl simulate turns=FILE

FILE has a line for every prompt: {"prompt_tokens": 900, "lengths": [[120, 80], ...], "observation_lengths": [[300],
...], "tool_seconds": [[0.4], ...]}, for every trajectory its turns and what stands between two of them. Generated ones
have 10.9 turns in the mean before the cap, observations of 169 tokens in the median and 9,100 at 99 %, and tools that
answer within 1 s in 86 % and within 10 s in 95 % of the calls, within `longest_tool` in all.

token_budget parks the KV of who waits; first_come is vLLM's rule, whose ended turns stay in the prefix cache until
their blocks are needed, and stand before trajectories that have not begun when they come back. The bound is max(longest
trajectory with its tools, work over throughput). The costs are assumed: about those of an 8B policy in bf16 on an H100.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from infsample_rl.commands.schedule_workload import MOST_SIGMA, noisy
from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.rollout.schedule.kv_pool import MOST_POOLS
from infsample_rl.rollout.simulator_turns import Costs, Trajectory, least_seconds, simulate_turns

MEAN_TURNS = 10.9
TURN_TOKENS, TURN_SIGMA = 150, 0.8  # median and spread of a sampled turn: assumed
OBSERVATION_TOKENS, OBSERVATION_SIGMA = 169, 1.7137  # so that 1 % are above 9,100
# so that 86 % are below 1 s and 95 % below 10 s
TOOL_MU, TOOL_SIGMA = -4.4056, 4.0784
PROMPT_TOKENS = 1000
SHORTEST_CAP = 256  # tokens; hardly a trajectory that is drawn is shorter
COLUMNS = {
    "name": ("schedule", ""),
    "seconds": ("s", ",.0f"),
    "of_bound": ("/ bound", ".2f"),
    "of_first_come": ("first_come /", ".2f"),
    "rows": ("rows", ".1f"),
    "recomputed_share": ("recomputed", ".3f"),
    "peak_parked_tokens": ("peak parked", ",.0f"),
    "waiting_kv_token_seconds": ("KV token-s waiting", ",.0f"),
    "idle_seconds": ("idle s", ",.0f"),
}


@dataclass(kw_only=True)
class TurnOptions:
    """Arguments of `python -m infsample_rl simulate turns=...`."""

    turns: str = option("generated", "a file of trajectories, or generated")
    prompts: int = option(4, "of generated ones", low=1)
    group_size: int = option(64, "G, of generated ones", low=1)
    trajectories: float = option(4.0, "full trajectories of cap tokens in the KV pool, beside the prompts", low=1)
    cap: int = option(32768, "most tokens of a trajectory; generated ones above it are drawn again", low=SHORTEST_CAP)
    page_size: int = option(16, "tokens of a KV page", low=1)
    longest_tool: float = option(30.0, "seconds at which generated tools are cut", above=0)
    noise: list[float] = option(
        [0.0],
        "sigma of predicted lengths' lognormal error, each measured; 0: true lengths",
        low=0,
        high=MOST_SIGMA,
    )
    c0: float = option(0.01, "seconds of a running step, and of a prefill", above=0, high=10**6)
    c1: float = option(0.00005, "seconds of a row in a step", low=0, high=10**6)
    prefill: float = option(
        0.00004, "seconds of a token of prompt or observation, or computed again", low=0, high=10**6
    )
    c2: float = option(0.000006, "seconds of a token whose KV is parked and brought back", low=0, high=10**6)
    seed: int = option(0, "of what is generated", low=0)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")


@dataclass(frozen=True)
class TurnWorkload:
    """The trajectories of some prompts."""

    groups: list[list[Trajectory]]
    prompt_tokens: list[int]


def generated(options: TurnOptions) -> TurnWorkload:
    """Trajectories drawn at random."""
    dice = random.Random(options.seed)

    def tokens(median: float, sigma: float) -> int:
        return max(1, round(dice.lognormvariate(math.log(median), sigma)))

    def draw() -> Trajectory:
        turns = 1 + int(math.log(1 - dice.random()) / math.log(1 - 1 / MEAN_TURNS))  # geometric
        return Trajectory(
            tuple(tokens(TURN_TOKENS, TURN_SIGMA) for _ in range(turns)),
            tuple(tokens(OBSERVATION_TOKENS, OBSERVATION_SIGMA) for _ in range(turns - 1)),
            tuple(min(options.longest_tool, dice.lognormvariate(TOOL_MU, TOOL_SIGMA)) for _ in range(turns - 1)),
        )

    groups: list[list[Trajectory]] = []
    for _ in range(options.prompts):
        groups.append([])
        while len(groups[-1]) < options.group_size:
            drawn = draw()
            if drawn.tokens <= options.cap:
                groups[-1].append(drawn)
    return TurnWorkload(groups, [PROMPT_TOKENS] * options.prompts)


def read_turns(path: Path) -> TurnWorkload:
    """A file's trajectories. ValueError in one line, with the line's number, for what is none."""
    groups, prompts = [], []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"turns={path} cannot be read: {error}") from None
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
            columns = (found["lengths"], found["observation_lengths"], found["tool_seconds"])
            group = [Trajectory(*map(tuple, each)) for each in zip(*columns, strict=True)]
            prompts.append(_whole(found.get("prompt_tokens", PROMPT_TOKENS)))
            for each in group:
                _check(each)
        except (ValueError, KeyError, TypeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else " ".join(str(error).split())
            raise ValueError(f"turns={path}, line {number}: {why}") from None
        if not group:
            raise ValueError(f"turns={path}, line {number}: it has no trajectory")
        groups.append(group)
    if not groups:
        raise ValueError(f"turns={path} is empty: give a line for every prompt")
    return TurnWorkload(groups, prompts)


def _check(trajectory: Trajectory) -> None:
    between = len(trajectory.lengths) - 1
    if between < 0 or not len(trajectory.observation_lengths) == len(trajectory.tool_seconds) == between:
        raise ValueError("a trajectory of n turns, n >= 1, has n lengths, n - 1 observation_lengths and tool_seconds")
    for length in (*trajectory.lengths, *trajectory.observation_lengths):
        _whole(length)
    for seconds in trajectory.tool_seconds:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            raise ValueError(f"tool_seconds must be >= 0, got {seconds}")


def _whole(value: Any) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"tokens must be whole and >= 1, got {value}")
    return value


def measure(workload: TurnWorkload, options: TurnOptions) -> Iterator[dict[str, Any]]:
    """A record of vLLM's rule, of token_budget without predictions, and with those of every noise."""
    costs = Costs(options.c0, options.c1, options.prefill, options.c2)
    prompts = sum(-(-tokens // options.page_size) for tokens in workload.prompt_tokens) * options.page_size
    budget = int(options.trajectories * options.cap) + options.page_size + prompts
    bound = least_seconds(workload.groups, costs, budget, workload.prompt_tokens)
    dice = random.Random(options.seed)
    normal = [[dice.gauss(0, 1) for _ in group] for group in workload.groups]
    ways: list[tuple[str, dict[str, Any]]] = [("first_come", {"first_come": True}), ("token_budget", {})]
    for sigma in options.noise:
        lengths = [[each.tokens for each in group] for group in workload.groups]
        told = [noisy(own, each, sigma, options.cap) for own, each in zip(lengths, normal, strict=True)]
        ways.append((f"token_budget, {f'sigma {sigma:g}' if sigma else 'true lengths'}", {"predicted": told}))
    slowest: float | None = None
    for name, own in ways:
        found = simulate_turns(
            workload.groups,
            costs,
            kv_budget_tokens=budget,
            prompt_tokens=workload.prompt_tokens,
            cap=options.cap,
            page_size=options.page_size,
            parked_budget_tokens=MOST_POOLS * budget,
            **own,
        )
        slowest = slowest or found.seconds
        yield {
            "name": name,
            "seconds": found.seconds,
            "bound_seconds": bound,
            "of_bound": found.seconds / bound,
            "of_first_come": slowest / found.seconds,
            "rows": found.sampled_tokens / found.steps,
            "recomputed_share": found.recomputed_share,
            "parked_tokens": found.parked_tokens,
            "peak_parked_tokens": found.peak_parked_tokens,
            "peak_kv_tokens": found.peak_kv_tokens,
            "kv_budget_tokens": budget,
            "waiting_kv_token_seconds": found.waiting_kv_token_seconds,
            "idle_seconds": found.idle_seconds,
        }


def run(options: TurnOptions) -> int:
    """Every measurement, printed."""
    workload = generated(options) if options.turns == "generated" else read_turns(Path(options.turns))
    records = []
    for record in measure(workload, options):
        records.append(record)
        if options.json:
            print(json.dumps(record), flush=True)
    if options.json:
        return 0
    everything = [each for group in workload.groups for each in group]
    turns, tokens = fmean(len(each.lengths) for each in everything), fmean(each.tokens for each in everything)
    print(
        f"{len(workload.groups)} prompts, {len(everything)} trajectories of {turns:.1f} turns and {tokens:,.0f} "
        f"tokens, {records[0]['kv_budget_tokens']:,} tokens of KV; {records[0]['bound_seconds']:,.0f} s: lower bound"
    )
    rows = [{name: format(record[name], form) for name, (_, form) in COLUMNS.items()} for record in records]
    print_table(rows, {name: heading for name, (heading, _) in COLUMNS.items()})
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Simulate and report; 2 for a file or arguments that cannot be used."""
    return run_with_options(run, TurnOptions, arguments, usage=__doc__)

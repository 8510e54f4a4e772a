"""What the schedule comparison is given: its options, the recorded lengths, and one simulated call of them. No
torch."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infsample_rl.config.command_line import option
from infsample_rl.config.rollout import DEFAULT_SLOTS, MOST_DRAFTS, PREDICTED_SCHEDULES, SCHEDULES
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings
from infsample_rl.rollout.schedule.drafter import Drafter
from infsample_rl.rollout.schedule.first_come import FIRST_COME
from infsample_rl.rollout.simulator import Simulation, simulate_prompts
from infsample_rl.rollout.simulator_drafts import Text

# What a decoding step takes where nothing else is said: SmolLM2-135M, float32, on 2 cores (docs/engine.md).
STEP_SECONDS = 0.0170  # c0, of a running step
ROW_SECONDS = 0.00182  # c1, of a row in a step, and of a token computed again
PARK_SECONDS = 0.000012  # c2, of a token whose KV is parked and brought back
MEMORY_BOUND = "memory bound sum l(l+1)/2 / budget (counts the newest token as held; our pool takes it a step later)"
MOST_SIGMA = 10  # of a lognormal error
PROMPTS_PER_CALL = 8  # where several are resident


@dataclass(kw_only=True)
class SimulateOptions:
    """Arguments of `python -m infsample_rl.simulate`."""

    lengths: list[str] = option([], "run folders, or files of recorded lengths, .jsonl or .jsonl.gz")
    slots: int | None = option(
        None,
        "g; none: as many as kv_budget_tokens holds full responses, without it "
        f"{DEFAULT_SLOTS}, and the KV memory is slots x cap + the resident prompts",
        low=1,
    )
    schedules: list[str] = option(
        list(SCHEDULES), f"schedules; {FIRST_COME} is vLLM's own rule", choices=(*SCHEDULES, FIRST_COME)
    )
    preemptions: list[str] = option(
        ["park"], "what token_budget does with preempted samples' KV, each measured", choices=("park", "recompute")
    )
    speculate: list[int] = option(
        [0],
        "tokens drafted for every row of a step, each measured; above 0: files need token_ids",
        low=0,
        high=MOST_DRAFTS,
    )
    group_size: int | None = option(
        None, "G, samples taken of every prompt; one with fewer is taken whole; none: all recorded", low=1
    )
    kv_budget_tokens: int | None = option(
        None, "all KV tokens, prompts included; none: by slots. full_group has memory for G responses", low=1
    )
    page_size: int = option(1, "tokens of a KV page", low=1)
    prompt_tokens: int | None = option(0, "tokens of every prompt; none: as recorded", low=0)
    prompts_at_once: int = option(
        1, f"prompts resident together, {PROMPTS_PER_CALL} a call; 1: every prompt alone", low=1
    )
    noise: list[float] = option(
        [0.0], "sigma of the predictions' lognormal error; 0: true lengths", low=0, high=MOST_SIGMA
    )
    cap: int | None = option(None, "max_new_tokens; none: as recorded, else the longest length of the file", low=1)
    c0: float = option(STEP_SECONDS, "seconds of a running step", low=0, high=10**6)
    c1: float = option(ROW_SECONDS, "seconds of a row in a step, and of a token computed again", low=0, high=10**6)
    c2: float = option(PARK_SECONDS, "seconds of a token whose KV is parked and brought back", low=0, high=10**6)
    seed: int = option(0, "seed of the noise", low=0)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str | None = option(None, "folder of the picture slots.png; none: no picture")

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths is empty: give lengths=FILE.jsonl")
        measured = any(self.noise or name not in PREDICTED_SCHEDULES for name in self.schedules)
        if not (measured and self.preemptions and self.speculate):
            raise ValueError(
                "there is nothing to measure: give schedules=[...] and, for those that order by predictions, "
                "noise=[0]; preemptions and speculate name one way at least"
            )


@dataclass(frozen=True, slots=True)
class Workload:
    """One file's prompts as they are simulated."""

    name: str
    dataset: str
    model: str
    recorded: list[list[int]]  # all lengths: dynamic_slot draws from them
    groups: list[list[int]]  # those of G samples
    normal: list[list[float]]  # the noise of their predictions before it is scaled
    prompt_tokens: list[int]
    cap: int
    group_size: int  # of the largest group
    texts: list[Text] | None  # where something is drafted


def names_of(paths: Sequence[Path]) -> list[str]:
    """What each of several files is called: its base name, the whole path where two have the same one."""
    names = [path.name.split(".jsonl")[0] for path in paths]
    return [str(path) if names.count(name) > 1 else name for name, path in zip(names, paths, strict=True)]


def load(path: Path, options: SimulateOptions, name: str | None = None) -> Workload:
    """A file's prompts, called `name` (None: by its base name); of a run folder those of its lengths.jsonl.

    Raises ValueError for a file that cannot be read, a cap below a length, prompt_tokens that were not recorded.
    """
    recordings = read_recordings(path)
    longest = max(max(recording.lengths) for recording in recordings)
    cap = options.cap or max(recording.max_new_tokens or longest for recording in recordings)
    if cap < longest:
        raise ValueError(f"cap={cap} is below a length of {longest} in {path}; the nearest that works is cap={longest}")
    groups = [recording.lengths[: options.group_size] for recording in recordings]
    normal = []
    for recording, group in zip(recordings, groups, strict=True):
        draw = random.Random(f"{options.seed} {recording.key}")
        normal.append([draw.gauss(0, 1) for _ in group])
    return Workload(
        name=name or names_of([path])[0],
        dataset=recordings[0].dataset,
        model=recordings[0].model,
        recorded=[recording.lengths for recording in recordings],
        groups=groups,
        normal=normal,
        prompt_tokens=[_prompt_tokens(recording, options, path) for recording in recordings],
        cap=cap,
        group_size=max(map(len, groups)),
        texts=_texts(recordings, options, path) if any(options.speculate) else None,
    )


def noisy(lengths: Sequence[int], normal: Sequence[float], sigma: float, cap: int) -> list[float]:
    """Lengths with a lognormal error, at least 1 token and at most `cap`: length x exp(sigma x normal)."""
    return [
        min(float(cap), max(1.0, length * math.exp(sigma * each))) for length, each in zip(lengths, normal, strict=True)
    ]


def simulate_call(
    workload: Workload,
    options: SimulateOptions,
    call: range,
    schedule: str,
    sigma: float | None,
    *,
    parks: bool = True,
    record_rows: bool = False,
    drafts: int = 0,
    drafter: Drafter | None = None,
) -> Simulation:
    """The prompts `call` of a workload in one call. `parks`: where the schedule preempts, KV is parked. `drafter`:
    knows the calls before."""
    dynamic = schedule == "dynamic_slot"
    return simulate_prompts(
        [(workload.recorded if dynamic else workload.groups)[place] for place in call],
        schedule,
        slots=options.slots,
        prompts_at_once=options.prompts_at_once,
        predicted=None
        if sigma is None
        else [noisy(workload.groups[place], workload.normal[place], sigma, workload.cap) for place in call],
        kv_budget_tokens=None if schedule == "full_group" else options.kv_budget_tokens,
        page_size=options.page_size,
        prompt_tokens=[workload.prompt_tokens[place] for place in call],
        group_size=[len(workload.groups[place]) for place in call] if dynamic else None,
        max_new_tokens=workload.cap,
        parks=parks and schedule == "token_budget",
        record_rows=record_rows,
        texts=None if workload.texts is None else [workload.texts[place] for place in call],
        drafts=drafts,
        drafter=drafter,
    )


def calls_of(workload: Workload, options: SimulateOptions) -> list[range]:
    """Which prompts are sampled together."""
    size, count = 1 if options.prompts_at_once == 1 else PROMPTS_PER_CALL, len(workload.groups)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def _texts(recordings: Sequence[Recording], options: SimulateOptions, path: Path) -> list[Text]:
    found = []
    for recording in recordings:
        if recording.token_ids is None:
            raise ValueError(
                f"speculate={options.speculate} drafts from token_ids, and {recording.prompt_id} of {path} has none; "
                "record it with scripts/record_completions.py tokens=all"
            )
        found.append(Text(recording.prompt_token_ids or [], recording.token_ids[: options.group_size]))
    return found


def _prompt_tokens(recording: Recording, options: SimulateOptions, path: Path) -> int:
    tokens = recording.prompt_tokens if options.prompt_tokens is None else options.prompt_tokens
    if tokens is None:
        raise ValueError(
            f"prompt_tokens=none takes the recorded number, and {recording.prompt_id} of {path} has none; give "
            "prompt_tokens=100"
        )
    return tokens

"""Steps that all three conversions share: rows long enough, workers on GPUs, reward functions, and the refusal of what
is missing."""

from __future__ import annotations

import os
from typing import Any

from infsample_rl.commands.convert.conversion import Conversion, default_of

ENGINE = (
    "the engine here has one KV pool of rollout.slots=4 full responses; kv_budget_bytes=24GB or auto makes it "
    "larger and faster, never different"
)
SHARDED = "how the policy is spread over GPUs; any way gives the same gradient here"
MICRO_BATCH = (
    "rows here are packed; learner.max_tokens_per_micro_batch is their length, and the gradient does not depend on it"
)
LOGGED = "what is printed or logged"


def need(conversion: Conversion, ours: str, how: str) -> None:
    """ValueError when a setting that has no default was not found."""
    if ours not in conversion.settings:
        unclear = f" (could not be resolved: {', '.join(conversion.unresolved)})" if conversion.unresolved else ""
        raise ValueError(f"nothing in the file says what {ours} is to be{unclear}; {how} behind the file's name")


def set_row_lengths(
    conversion: Conversion, prompt_tokens: int, new_tokens: int, *theirs: str, row_tokens: int | None = None
) -> None:
    """Learner and reference rows that hold a prompt and a response."""
    longest = prompt_tokens + new_tokens
    for ours in ("learner.max_tokens_per_micro_batch", "reference.max_tokens_per_micro_batch"):
        wanted = max(row_tokens or default_of(ours), longest)
        if wanted != default_of(ours):
            conversion.set(ours, wanted, *theirs, why="holds a prompt and a response")


def place_colocated(conversion: Conversion, gpus: int, *theirs: str, separate_reference: bool = False) -> None:
    """Sampling and training in one process on every GPU. A reference of its own (KL in the reward) takes one GPU, or a
    share of the only one."""
    share = 0.75 if separate_reference and gpus == 1 else 1
    ranks = gpus - 1 if separate_reference and gpus > 1 else gpus
    conversion.set("cluster.colocate", True, *theirs, why="sampling and training on the same GPUs")
    for ours, value in (
        ("rollout_workers", ranks),
        ("rollout_gpus", share),
        ("learner_ranks", ranks),
        ("learner_gpus", share),
    ):
        conversion.set(f"cluster.{ours}", value, *theirs)
    if separate_reference:
        conversion.set(
            "cluster.reference_gpus",
            0.25 if gpus == 1 else 1,
            *theirs,
            why="KL in the reward needs the reference beside the learner",
        )


def place_apart(conversion: Conversion, rollout: int, learner: int, reference: int, *theirs: str) -> None:
    """Rollout workers, learner ranks and, unless 0, reference workers on GPUs of their own."""
    for role, count in (("rollout_workers", rollout), ("learner_ranks", learner), ("reference_workers", reference)):
        if count > 0:
            conversion.set(f"cluster.{role}", count, *theirs)
            conversion.set(f"cluster.{role.split('_')[0]}_gpus", 1, *theirs)


def place_reward_model(conversion: Conversion) -> None:
    """A GPU for the reward worker where a reward model is among the functions."""
    functions = conversion.settings.get("reward.functions")
    if functions is not None and any(entry["name"].startswith("model:") for entry in functions.value):
        conversion.set("cluster.reward_gpus", 1, why="the reward model's own GPU; 0 runs it on the CPU")


def reward_entry(name: str, weight: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    """One of reward.functions, without what is default."""
    entry: dict[str, Any] = {"name": name}
    if weight != 1.0:
        entry["weight"] = weight
    if kwargs:
        entry["kwargs"] = kwargs
    return entry


def first_of(conversion: Conversion, name: str, values: list[Any]) -> Any:
    """The first of several files or data sets; the others are said to be left out."""
    if len(values) > 1:
        conversion.no_equivalent.append(
            f"{name}: {', '.join(map(str, values[1:]))} beside {values[0]}; data.source is one: join them into one file"
        )
    return values[0]


def local_path(path: str) -> str:
    """A path as our settings take it: ~ and $HOME resolved, `file://` off."""
    return os.path.expanduser(os.path.expandvars(path.removeprefix("file://")))

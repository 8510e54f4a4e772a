"""What all three conversions share: why settings change nothing, rows long enough, workers on GPUs, rewards."""

from __future__ import annotations

from typing import Any

from infsample_rl.commands.convert.conversion import Conversion, default_of
from infsample_rl.commands.convert.values import not_negative
from infsample_rl.config import ALL_PROBLEMS

ENGINE = "the engine here has one KV pool; rollout.kv_budget_bytes makes it larger and faster, never different"
SHARDED = "how the policy is spread over GPUs; any way gives the same gradient here"
MICRO_BATCH = (
    "rows here are packed; learner.max_tokens_per_micro_batch is their length, and the gradient does not depend on it"
)
SCHEDULES = {  # of transformers
    "constant": "constant",
    "constant_with_warmup": "constant",
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
}
LOGGED = "what is printed or logged, and when"
COMPUTED = (
    "memory or speed only: rows are packed, kernels chosen by device, weights of model.dtype have float32 masters"
)
READ_ONCE = "every row is read once, at the start, with every column"
CHECKPOINTS = "checkpoints are Hugging Face folders in run.dir, and a run goes on where it stopped (run.resume)"
SWITCHED_OFF = "only with another setting, which is off"
NO_CRITIC_HERE = "there is no critic: a response has one advantage"
WHOLE_ENGINE = "an engine is whole on one GPU: the policy in 16 bits and its KV pool must fit there"
NO_CRITIC = "nearest: objective.advantage=std; there is no critic, and a baseline is the group's own"
NO_DROPOUT = "adapters have no dropout here: the policy that samples has none"
DRAWN_AT_RANDOM = "an update of a step is made of whole prompts here, of single responses drawn at random in "


def set_sources(c: Conversion, name: str, files: list[str]) -> None:
    """data.source of one file or data set; all that are named are said, to be joined."""
    if files:
        c.set("data.source", files[0], name)
    if len(files) > 1:
        c.lacks(name, f"{', '.join(files[1:])} beside {files[0]}; data.source is one: join them into one file")


def set_evaluations(c: Conversion, source: str, *, every: str, of: str, count: int = 0) -> None:
    """Evaluations of `source`, which the setting `of` names: `count` problems, 0 for all, and how often."""
    c.set("data.eval_source", source, of)
    c.set("run.eval_prompts", count or ALL_PROBLEMS, of, why="" if count else "all of them")
    c.set("run.eval_every", c.checked(every, not_negative), every)


def set_lengths(c: Conversion, prompt: int, new: int, theirs: str, row_tokens: int = 0) -> None:
    """The longest prompt and response, and learner and reference rows that hold both."""
    c.set("data.max_prompt_tokens", prompt, theirs)
    c.set("rollout.max_new_tokens", new, theirs)
    for ours in ("learner.max_tokens_per_micro_batch", "reference.max_tokens_per_micro_batch"):
        wanted = max(row_tokens or default_of(ours), prompt + new)
        if wanted != default_of(ours):
            c.set(ours, wanted, theirs, why="holds a prompt and a response")


def set_betas(c: Conversion, name: str) -> None:
    """Adam's two."""
    c.set("learner.beta1", c.checked(name, lambda value: float(value[0])), name)
    c.set("learner.beta2", c.checked(name, lambda value: float(value[1])), name)


def place_colocated(c: Conversion, gpus: int, theirs: str, *, separate_reference: bool = False) -> None:
    """Sampling and training in one process on every GPU. A reference of its own (KL in the reward) takes one GPU, or a
    share of the only one."""
    share = 0.75 if separate_reference and gpus == 1 else 1
    ranks = gpus - 1 if separate_reference and gpus > 1 else gpus
    c.set("cluster.colocate", True, theirs, why="sampling and training on the same GPUs")
    for role, count in (("rollout", "workers"), ("learner", "ranks")):
        c.set(f"cluster.{role}_{count}", ranks, theirs)
        c.set(f"cluster.{role}_gpus", share, theirs)
    if separate_reference:
        why = "KL in the reward needs the reference beside the learner"
        c.set("cluster.reference_gpus", 0.25 if gpus == 1 else 1, theirs, why)


def place_apart(c: Conversion, rollout: int, learner: int, reference: int, theirs: str) -> None:
    """Rollout workers, learner ranks and, unless 0, reference workers on GPUs of their own."""
    for role, count in (("rollout_workers", rollout), ("learner_ranks", learner), ("reference_workers", reference)):
        if count > 0:
            c.set(f"cluster.{role}", count, theirs)
            c.set(f"cluster.{role.split('_')[0]}_gpus", 1, theirs)


def finish_places(c: Conversion, loggers: list[str], theirs: str) -> None:
    """What no peer's file says: the KV pool takes what is free, a reward model has a GPU; and where metrics go."""
    c.set("rollout.kv_budget_bytes", "auto", why="the KV pool takes what memory is left")
    if any(entry["name"].startswith("model:") for entry in c.ours("reward.functions")):
        c.set("cluster.reward_gpus", 1, why="the reward model's own GPU; 0 runs it on the CPU")
    c.set("logging.wandb", "auto" if {"wandb", "all"} & set(loggers) else "disabled", theirs)
    if {"tensorboard", "all"} & set(loggers):
        c.set("logging.tensorboard", True, theirs)
    for name in sorted(set(loggers) - {"console", "wandb", "tensorboard", "file", "all", "none"}):
        c.no_equivalent.append(f"{theirs}={name}: metrics.jsonl holds everything; W&B and TensorBoard are there")


def reward_entry(name: str, weight: float = 1.0, **kwargs: Any) -> dict[str, Any]:
    """One of reward.functions, without what is default."""
    entry = {"name": name, "weight": weight, "kwargs": kwargs}
    return {key: value for key, value in entry.items() if key == "name" or value not in (1.0, {})}

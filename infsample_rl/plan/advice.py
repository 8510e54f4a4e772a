"""What to change first when a process does not fit: the first setting, with a value, that makes it fit, tried by
planning again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from infsample_rl.config import Config
from infsample_rl.plan.devices import Device, host
from infsample_rl.plan.limits import largest_pool, largest_row, with_settings
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import ProcessPlan, is_here, place_of, plan_role

MOST_RANKS = 64
PARTS = (2, 4, 8)  # GPUs over which the model of one worker is split


def advise(config: Config, model: ModelOutline, plan: ProcessPlan, device: Device) -> list[str]:
    """Settings as they are given on the command line that make the process fit; empty: none of those that are known
    does.

    Changes that leave the result as it is come first; each is tried alone, then on top of those before it.
    """
    role = "learner" if plan.role == "colocated" else plan.role
    before: dict[str, Any] = {}
    for changes in _candidates(config, model, plan, device):
        for tried in (changes, before | changes):
            if _fits(config, model, role, tried):
                return [_written(name, value) for name, value in tried.items() if value != _value(config, name)]
        with contextlib.suppress(ValueError):  # of settings that do not go together
            with_settings(config, **(before | changes))
            before |= changes
    return []


def _candidates(config: Config, model: ModelOutline, plan: ProcessPlan, device: Device) -> Iterator[dict[str, Any]]:
    if plan.role == "rollout":
        yield from _of_rollout(config, model, plan, device)
    elif plan.role == "reference":
        yield {"reference__max_tokens_per_micro_batch": config.data.max_prompt_tokens + config.rollout.max_new_tokens}
        yield {"reference__placement": "learner", "reference__offload": True}
        if config.model.dtype == "float32":
            yield {"model__dtype": "bfloat16"}
        for ranks in (ranks for ranks in PARTS if ranks > config.cluster.reference_ranks):
            yield {"cluster__reference_ranks": ranks}
    else:
        if plan.role == "colocated":
            yield from _of_rollout(config, model, plan, device)
        yield from _of_learner(config, model, device)


def _of_rollout(config: Config, model: ModelOutline, plan: ProcessPlan, device: Device) -> Iterator[dict[str, Any]]:
    limits = largest_pool(config, model, plan, device)
    if limits["slots"] >= 1:
        if config.rollout.has_budget:
            yield {
                "rollout__kv_budget_tokens": limits["pages"] * config.rollout.page_size,
                "rollout__kv_budget_bytes": None,
            }
        elif config.rollout.schedule == "full_group":
            yield {"rollout__schedule": "token_budget", "rollout__slots": limits["slots"]}
        else:
            yield {"rollout__slots": limits["slots"]}
    if config.rollout.most_prompts > 1:
        yield {"rollout__prompts_at_once": "1", "rollout__slots": 1}
    if config.rollout.kv_dtype == "auto":
        yield {"rollout__kv_dtype": "int8", "objective__importance": "token_tis"}
    if config.model.dtype == "float32":
        yield {"model__dtype": "bfloat16"}
    if config.cluster.rollout_gpus == 1:
        for parts in (parts for parts in PARTS if parts > config.rollout.tensor_parallel):
            yield {"rollout__engine": "vllm", "rollout__tensor_parallel": parts}


def _of_learner(config: Config, model: ModelOutline, device: Device) -> Iterator[dict[str, Any]]:
    learner = config.learner
    selective = {"learner__activation_checkpointing": 1, "learner__recompute_granularity": "selective"}
    full = {"learner__activation_checkpointing": 1, "learner__recompute_granularity": "full"}
    if learner.activation_checkpointing == 0:
        yield selective
    if learner.activation_checkpointing != 1 or learner.recompute_granularity != "full":
        yield full
    for changes in ({}, full):
        yield from _shorter_rows(config, model, device, changes)
    if learner.logprob_chunk_tokens > 256:
        yield {"learner__logprob_chunk_tokens": 256}
    ranks = config.cluster.learner_ranks
    while ranks < MOST_RANKS and config.cluster.learner_gpus == 1:
        ranks *= 2
        together = {"cluster__rollout_workers": ranks} if config.cluster.colocate else {}
        yield {"cluster__learner_ranks": ranks} | together
        if learner.backend == "deepspeed" and learner.zero_stage < 3:
            yield {"cluster__learner_ranks": ranks, "learner__zero_stage": 3} | together
    if learner.optimizer == "adamw" and learner.backend == "fsdp" and not learner.offload_optimizer:
        yield {"learner__optimizer": "adamw_8bit"}
    if config.cluster.learner_gpus > 0 and not learner.offload_optimizer:
        yield {"learner__offload_optimizer": True, "learner__optimizer": "adamw"}
    if learner.lora_rank == 0:
        yield {"learner__lora_rank": 16}
        yield from _shorter_rows(config, model, device, full | {"learner__lora_rank": 16})


def _shorter_rows(
    config: Config, model: ModelOutline, device: Device, changes: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    """With the longest rows that fit beside these changes, where those are shorter; nothing where other settings, or
    the model, do not allow them."""
    tokens = None
    with contextlib.suppress(ValueError):
        tokens = largest_row(with_settings(config, **changes), model, device)
    if tokens is not None and tokens < config.learner.max_tokens_per_micro_batch:
        yield changes | {"learner__max_tokens_per_micro_batch": tokens}


def _fits(config: Config, model: ModelOutline, role: str, changes: dict[str, Any]) -> bool:
    try:
        changed = with_settings(config, **changes)
        if role == "reference" and changed.reference.placement == "learner":
            role = "learner"
        plan = plan_role(changed, model, role)
    except ValueError:  # they do not go together, or leave a pool too small for one prompt and one response
        return False
    in_host = plan.count * plan.host_bytes if plan.gpus and is_here(changed) else 0
    return plan.sum_bytes <= place_of(changed, model, role).usable_bytes and in_host <= host().memory_bytes


def _value(config: Config, name: str) -> Any:
    section, _, key = name.partition("__")
    return getattr(getattr(config, section), key)


def _written(name: str, value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return f"{name.replace('__', '.')}={text}"

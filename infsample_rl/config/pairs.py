"""What settings may not say together, one row each. Standard library only."""

from __future__ import annotations

import re
from typing import Any

# (when all of these hold, this must hold too, why); alternatives are apart by |, a bound may be another setting
PAIRS = (
    ("", "rollout.temperature>0", "this is training; run.eval_temperature=0 is for greedy evaluation"),
    ("objective.advantage=std|rloo", "rollout.group_size>1", "a group of one has no advantage"),
    ("", "rollout.micro_group_size<=rollout.group_size", ""),
    ("", "objective.mini_batches<=data.prompts_per_step", ""),
    ("", "objective.overlong_buffer_tokens<=rollout.max_new_tokens", ""),
    (
        "objective.importance=auto|none",
        "rollout.kv_dtype=auto",
        "samples come from rounded KV, not from the policy that is trained; take objective.importance=token_tis",
    ),
    ("run.max_staleness=1", "objective.importance=auto|token_tis|sequence_tis", "samples are one policy behind"),
    ("run.max_staleness=1", "objective.dynamic_sampling=false", "further prompts would wait for the next weights"),
    ("run.max_staleness=1", "cluster.colocate=false", "weights would change while they sample"),
    ("objective.kl_in_reward=true", "reference.placement=workers", "rewards need it before the learner has a sample"),
    ("reference.placement=workers", "reference.offload=false", "a worker has no other use for its memory"),
    (
        "reference.placement=learner learner.lora_rank>0",
        "reference.path=none",
        "the reference is the policy without its adapters",
    ),
    ("learner.shard_ranks>0", "learner.backend=fsdp", ""),
    ("learner.offload_optimizer=true", "learner.optimizer=adamw", ""),
    ("learner.backend=deepspeed", "learner.grad_sync=every_row", "ZeRO reduces with every row"),
    ("learner.backend=deepspeed", "model.dtype=float32|bfloat16", "learner.backend=fsdp has float16"),
    ("learner.backend=deepspeed", "learner.optimizer=adamw", "learner.backend=fsdp has adamw_8bit"),
    (
        "learner.backend=deepspeed learner.zero_stage=3 learner.activation_checkpointing>0",
        "learner.recompute_granularity=full",
        "ZeRO-3 gathers parameters in another order when it computes again; learner.backend=fsdp has selective",
    ),
    ("cluster.colocate=true", "cluster.rollout_workers=cluster.learner_ranks", "they are the same processes"),
    ("cluster.colocate=true", "cluster.rollout_gpus=cluster.learner_gpus", "they are the same processes"),
    ("cluster.colocate=true", "cluster.weight_sync=auto", "nothing has to travel"),
    ("run.deterministic=true", "cluster.rollout_gpus=0", "only CPU runs are bitwise repeatable"),
    ("run.deterministic=true", "cluster.learner_gpus=0", "only CPU runs are bitwise repeatable"),
    ("run.deterministic=true", "cluster.reference_gpus=0", "only CPU runs are bitwise repeatable"),
    ("run.deterministic=true", "cluster.reward_gpus=0", "only CPU runs are bitwise repeatable"),
    ("run.deterministic=true", "model.dtype=float32", ""),
    ("run.deterministic=true", "rollout.kv_dtype=auto", "rounded KV need not repeat bitwise"),
    ("run.deterministic=true", "rollout.predictor=none|probe", "rebuilt prefixes round differently; probe is off then"),
)


def check_pairs(config: Any) -> None:
    """ValueError for the first of PAIRS that a run's Config breaks: the setting, its bound, the value, and why."""
    for when, needs, why in PAIRS:
        conditions = [_split(condition) for condition in when.split()]
        name, relation, bounds = _split(needs)
        if not all(_holds(config, *condition) for condition in conditions) or _holds(config, name, relation, bounds):
            continue
        said = [f"{key}={text(_value(config, key))}" for key, _, _ in conditions]
        bound = f"{bounds} = {text(_value(config, bounds))}" if _is_setting(bounds) else bounds.replace("|", " or ")
        raise ValueError(
            f"{name} must be {'' if relation == '=' else f'{relation} '}{bound}{' with ' if said else ''}"
            f"{', '.join(said)}, got {text(_value(config, name))}{': ' if why else ''}{why}"
        )


def text(value: Any) -> str:
    """A value as one types it: true, none, 0.5."""
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _split(condition: str) -> tuple[str, str, str]:
    name, relation, bounds = re.split(r"(<=|>|=)", condition, maxsplit=1)
    return name, relation, bounds


def _is_setting(bound: str) -> bool:
    return re.fullmatch(r"[a-z]+\.[a-z_]+", bound) is not None


def _value(config: Any, name: str) -> Any:
    section, key = name.split(".")
    return getattr(getattr(config, section), key)


def _holds(config: Any, name: str, relation: str, bounds: str) -> bool:
    value = _value(config, name)
    bound = text(_value(config, bounds)) if _is_setting(bounds) else bounds
    if relation == "=":
        return text(value) in bound.split("|")
    if value is None:  # a number that is not set is within every bound, and above none
        return relation == "<="
    return value > float(bound) if relation == ">" else value <= float(bound)

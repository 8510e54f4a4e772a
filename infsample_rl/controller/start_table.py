"""What a run prints of its settings before its first step: what follows from them, and what the user should know."""

from __future__ import annotations

import os

import torch
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from infsample_rl.cluster.rollout_interpreter import rollout_interpreter
from infsample_rl.config import Config, RolloutConfig
from infsample_rl.config.fields import unread_settings
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.model.architecture import KVShape
from infsample_rl.model.generation import stop_ids_of, unused_generation_settings
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.observe.trackers.trackers import check_trackers
from infsample_rl.plan.placement import reference_text, total_gpus, worker_groups
from infsample_rl.rollout.engine.decoder import drafts_tokens, knows
from infsample_rl.rollout.engine.kv_cache import stored_dtype
from infsample_rl.rollout.length_prediction.run_bert import FIRST_GROUPS
from infsample_rl.rollout.length_prediction.watch import PREDICT_EVERY
from infsample_rl.rollout.schedule.kv_budget import CPU_SHARE, GPU_SHARE, num_pool_pages, rows_in

# Rows of derived_table() that the console shows too; run.log has all of them.
IN_SHORT = ("model", "data", "steps", "schedule", "KV pool", "KV memory", "processes", "run folder", "sent away")


def in_short(table: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The rows that the console shows."""
    return [row for row in table if row[0] in IN_SHORT]


def setting_warnings(config: Config) -> list[str]:
    """Settings that work, but not as one might think."""
    rollout, objective, unread = config.rollout, config.objective, unread_settings(config)
    warnings = {
        "rollout.schedule=dynamic_slot keeps the first G samples to finish and so favours short ones": (
            rollout.schedule == "dynamic_slot"
        ),
        f"rollout.schedule={rollout.schedule} without a predictor takes all lengths as equal; set "
        "rollout.predictor=probe": rollout.schedule in PREDICTED_SCHEDULES and rollout.predictor == "none",
        f"rollout.slots={rollout.slots} is but the samples of a micro-group with rollout.schedule=token_budget and a "
        "KV budget, which decide on memory and rows": (
            rollout.has_budget
            and rollout.schedule == "token_budget"
            and rollout.micro_group_size is None
            and rollout.slots is not None
        ),
        f"run.eval_every={config.run.eval_every} evaluates nothing: data.eval_source=FILE gives held-out problems": (
            config.run.eval_every > 0 and config.run.eval_prompts > 0 and not config.has_evaluations
        ),
        f"set, but nothing reads it here: {', '.join(unread)}": bool(unread),
        "model.dtype=float16: the loss is scaled by a fixed number, gradients above 65,504 overflow; bfloat16 has the "
        "range of float32": config.model.dtype == "float16",
        f"rollout.kv_dtype={rollout.kv_dtype}: KV is rounded to 8 bits with scales; "
        "learner/logprob_diff_* shows what that does to log-probabilities; its mean, not every token, is bounded, by "
        f"objective.mismatch_stop={objective.mismatch_stop:g}": rollout.kv_dtype != "auto",
        "reference.offload=true moves nothing: with cluster.learner_gpus=0 the reference is in host memory in any "
        "case": config.reference.offload and config.cluster.learner_gpus == 0,
    }
    return [text for text, holds in warnings.items() if holds]


def context_warnings(architecture: PretrainedConfig, context: int | None) -> list[str]:
    """That sequences are not as long as the model's positions (architecture.context_of)."""
    positions = getattr(architecture, "max_position_embeddings", None)
    if context is None or positions is None or context >= positions:
        return []
    return [
        f"rope_type=longrope: a prompt and its response end at {context} of the model's {positions} tokens, beyond "
        "which rows change each other"
    ]


def sampling_warnings(config: Config, tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig) -> list[str]:
    """What of the model's own generation settings is left out, and stop ids that can never be sampled."""
    rollout = config.rollout
    unused = unused_generation_settings(generation, rollout)
    warnings = [unused] if unused else []
    stop_ids = stop_ids_of(generation, tokenizer, rollout.stop_token_ids)
    never = stop_ids & set(rollout.bad_token_ids)
    if never:
        ends = f"samples end at {sorted(stop_ids - never)}" if stop_ids - never else "no stop id is left"
        warnings.append(f"rollout.bad_token_ids forbids the stop ids {sorted(never)}: {ends}")
    return warnings


def kv_bytes_per_token(architecture: PretrainedConfig, dtype: str, kv_dtype: str = "auto", page_size: int = 16) -> int:
    """Bytes of keys and values of one token over all layers, its share of the scales of its page included (rounded
    up)."""
    stored = stored_dtype(kv_dtype, getattr(torch, dtype))
    return -(-KVShape.of(architecture).page_bytes(page_size, stored) // page_size)


def derived_table(
    config: Config, architecture: PretrainedConfig, *, total_steps: int, step: int, num_rows: dict[str, int]
) -> list[tuple[str, str]]:
    """What follows from the settings and the prompts of each of DataConfig.parts, as (name, value) rows."""
    rollout, data = config.rollout, config.data
    per_token = kv_bytes_per_token(architecture, config.model.dtype, rollout.kv_dtype, rollout.page_size)
    processes = [
        f"{group.count} {group.role}" + (f" ({group.gpus:g} GPU each)" if group.gpus else "")
        for group in worker_groups(config)
    ]
    turns = ", rollout and learner by turns" if config.takes_turns else ""
    devices = f"{total_gpus(config):g} GPUs" if total_gpus(config) else f"CPU, {os.cpu_count()} cores"
    samples = f"{config.samples_per_step} samples = {data.prompts_per_step} prompts x G = {rollout.group_size}"
    going_on = f", going on after step {step}" if step else ""
    epochs = total_steps * data.prompts_per_step / sum(num_rows.values())
    full_group = rollout.group_size * rollout.max_new_tokens * per_token
    return [
        ("model", f"{config.model.path} ({config.model.dtype})"),
        ("reference", reference_text(config)),
        *(("data", line) for line in _source_lines(config, num_rows)),
        ("steps", f"{total_steps} ({epochs:.2g} epochs) of {samples}{going_on}"),
        ("updates per step", _updates_text(config)),
        ("learner", _learner_text(config)),
        *([("engine", _engine_text(config))] if rollout_interpreter(config) else []),
        ("schedule", _schedule_text(config, architecture)),
        *([("environment", _environment_text(config))] if config.environment.is_set else []),
        ("length predictor", _predictor_text(config)),
        ("micro-group", f"{rollout.micro_group} samples"),
        ("KV of a token", f"{per_token:,} bytes{_compression_text(config, architecture)}"),
        ("KV pool", _pool_text(config, per_token)),
        ("KV of the full group", f"{full_group:,} bytes, what decoding all G at once would take"),
        ("learner row", f"up to {config.learner.max_tokens_per_micro_batch:,} tokens"),
        ("evaluation", _evaluation_text(config)),
        ("processes", f"{', '.join(['1 driver', *processes])}{turns}; {devices}"),
        ("run folder", str(config.run.dir)),
        ("sent away", _sent_text(config)),
    ]


def _rows_text(rollout: RolloutConfig) -> str:
    if rollout.schedule == "token_budget" or rollout.num_slots is not None:
        return f"up to {rollout.most_rows} rows"
    return f"as many rows as the KV pool holds full responses, up to {rollout.most_rows},"


def _schedule_text(config: Config, architecture: PretrainedConfig) -> str:
    text = f"{config.rollout.schedule}, {_rows_text(config.rollout)} per rollout worker"
    if config.rollout.engine == "native" and not knows(architecture):
        activation = getattr(architecture, "hidden_act", "silu")
        kind = architecture.model_type + (f" with hidden_act={activation}" if activation != "silu" else "")
        return f"{text}, decoded by transformers' own modules: there are no kernels for {kind}"
    if not drafts_tokens(config, architecture):
        return text
    drafts = config.rollout.speculate
    return text + (", drafts tokens where they pay" if drafts == "auto" else f", up to {drafts} drafted tokens each")


def _environment_text(config: Config) -> str:
    own = config.environment
    return f"{', '.join(filter(None, [own.factory, *own.tools]))}; up to {own.max_turns} turns"


def _engine_text(config: Config) -> str:
    """Of an engine that has an interpreter of its own."""
    processes = config.rollout.tensor_parallel
    split = f", the model split over {processes} processes" if processes > 1 else ""
    return f"{config.rollout.engine} in {rollout_interpreter(config)}{split}"


def _compression_text(config: Config, architecture: PretrainedConfig) -> str:
    if config.rollout.kv_dtype == "auto":
        return ""
    plain = kv_bytes_per_token(architecture, config.model.dtype)
    return f" ({config.rollout.kv_dtype} with scales; {plain:,} in {config.model.dtype})"


def _predictor_text(config: Config) -> str:
    rollout = config.rollout
    if rollout.predictor == "none":
        return "none"
    if not rollout.probes and rollout.predictor == "probe":
        by = f"schedule={rollout.schedule}" if rollout.engine == "native" else f"engine={rollout.engine}"
        return f"none: probe is not read by rollout.{by}"
    waits = f", after {rollout.num_prefix_tokens} tokens" if rollout.num_prefix_tokens else ""
    if rollout.trains_bert:
        return f"bert{waits}, frozen; lengths: all equal until {FIRST_GROUPS} groups have been sampled, which train it"
    if rollout.predictor == "bert":
        return f"bert{waits}, frozen"
    return f"probe{waits}, then every {PREDICT_EVERY} running steps; learns from every finished sample"


def _pool_text(config: Config, per_token: int) -> str:
    """Size of the KV pool; ValueError when one prompt and one full response do not fit in it."""
    rollout = config.rollout
    if rollout.takes_free_memory:
        beside = " and the learner's planned peak" if config.shares_process else ""
        beside = " and the learner at rest" if config.takes_turns else beside
        free = f"of what is free after the weights{beside}"
        if config.cluster.rollout_gpus > 0:
            return f"{GPU_SHARE:g} {free}"
        return f"{CPU_SHARE:g} {free}, divided among the workers"
    prompts = [config.data.max_prompt_tokens] * rollout.planned_prompts
    pages = num_pool_pages(rollout, page_bytes=per_token * rollout.page_size, prompts=prompts)
    tokens = pages * rollout.page_size
    text = f"{tokens * per_token:,} bytes, {tokens:,} tokens in {pages:,} pages, prompts included"
    if rollout.num_prefix_tokens:
        kept = max(0, rollout.group_size - rows_in(rollout, pages, prompts)) * rollout.num_prefix_tokens
        text += f"; up to {kept:,} tokens of waiting prefixes stay while pages allow, the others are computed again"
    return text


def _updates_text(config: Config) -> str:
    objective = config.objective
    if objective.updates_per_step == 1:
        return "1" + ("" if config.learner.overlap else ", after the last sample (learner.overlap=false)")
    parts = f"{objective.epochs} epochs x {objective.mini_batches} mini-batches"
    return f"{objective.updates_per_step} = {parts}, after the last sample"


def _learner_text(config: Config) -> str:
    learner, ranks = config.learner, config.cluster.learner_ranks
    if learner.backend == "deepspeed":
        sharded = f"DeepSpeed ZeRO {learner.zero_stage} over {ranks} ranks"
    elif ranks == 1:
        sharded = "1 rank, not sharded"
    else:
        sharded = f"FSDP2 over {learner.shard_ranks or ranks} of {ranks} ranks"
    return f"{sharded}; weights to the engines: {choose_transport(config)}"


def _source_lines(config: Config, num_rows: dict[str, int]) -> list[str]:
    """Every data source with its rows and, where there are several, its share of all prompts and its rewards."""
    lines, named = [], config.data.named_sources
    for name, part in config.data.parts.items():
        line = f"{part.source}, {num_rows[name]:,} prompts"
        if name:
            share = named[name].weight / sum(entry.weight for entry in named.values())
            line += f", {share:.1%} of what is drawn, as {name}, reward {', '.join(named[name].reward)}"
        lines.append(line)
    return lines


def _sent_text(config: Config) -> str:
    """Who beside the run folder gets what of the run."""
    mode = check_trackers(config)
    places = [f"W&B, {mode}"] if mode == "online" else []
    places += [f"MLflow, {config.logging.mlflow}"] if config.logging.mlflow is not None else []
    what = "numbers, settings and samples as text" if config.logging.upload_completions else "numbers and settings"
    offline = "; W&B is offline, in wandb of the run folder" if mode == "offline" else ""
    parts = [f"{what}, to {' and '.join(places)}"] if places else []
    parts += [f"prompts and responses, to the judge {judge.model} at {judge.url}" for judge in config.reward.judges]
    return ("; ".join(parts) or "nothing") + offline


def _evaluation_text(config: Config) -> str:
    if not config.has_evaluations:
        return "none (data.eval_source, run.eval_prompts)"
    sources = " and ".join(part.held_out for part in config.data.parts.values() if part.held_out is not None)
    each = " each" if " and " in sources else ""
    every = f"every {config.run.eval_every} steps"
    when = every if config.run.eval_every else "before the first and after the last step"
    return f"{config.run.eval_prompts} problems{each} of {sources} x {config.run.eval_samples} samples, {when}"

"""Everything checked before Ray starts, and the table of what was derived from the settings."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
import yaml
from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase

from infsample_rl.cluster.worker_secrets import check_reward_environment
from infsample_rl.config import Config
from infsample_rl.config.fields import unread_settings
from infsample_rl.config.loading import cache_folder
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.controller import checkpoints
from infsample_rl.data.prompts import PromptStream, build_eval_prompts, build_train_prompts
from infsample_rl.learner.optimizer import check_optimizer
from infsample_rl.model.architecture import check_full_attention
from infsample_rl.model.disk import check_disk_folder
from infsample_rl.model.generation_settings import load_generation_config, unused_generation_settings
from infsample_rl.model.loading import context_of, last_hidden_size, load_model_config, load_tokenizer, stop_ids_of
from infsample_rl.model.lora_check import check_lora
from infsample_rl.model.policy_head import masked_index
from infsample_rl.model.shapes import KVShape
from infsample_rl.model.weight_sync.transport import choose_transport
from infsample_rl.observe.trackers.trackers import check_trackers
from infsample_rl.observe.versions import write_versions
from infsample_rl.plan.placement import Node, reference_text, refusal, total_cpus, total_gpus, worker_groups
from infsample_rl.plan.processes import write_plan
from infsample_rl.reward.check import check_reward_functions
from infsample_rl.rollout.engine.kv_cache import stored_dtype
from infsample_rl.rollout.engine.stop_strings import StopStrings
from infsample_rl.rollout.length_prediction.run_probe import RunProbe
from infsample_rl.rollout.length_prediction.watch import PREDICT_EVERY
from infsample_rl.rollout.schedule.kv_budget import num_pool_pages
from infsample_rl.types import Prompt


@dataclass(kw_only=True, slots=True)
class Start:
    """A run that can begin: its inputs are there and its settings fit them."""

    prompts: PromptStream
    eval_prompts: list[Prompt]
    tokenizer: PreTrainedTokenizerBase
    total_steps: int
    step: int  # updates already done, in the run that is resumed
    expected_lengths: dict[str, Any] | None  # dealing.ExpectedLengths.state() of that run
    checkpoint: Path | None
    table: list[tuple[str, str]]
    warnings: list[str]  # what the user should know of the settings before the run begins
    probe: RunProbe | None  # the run's length probe
    lock: TextIO  # held while the process lives


def prepare(config: Config) -> Start:
    """Check everything that can be checked without starting anything. ValueError, in one line, for what cannot work."""
    run_dir = Path(config.run.dir or ".")
    # A folder that is there is locked before it is looked into: a process that SIGTERM ends may still save a
    # checkpoint.
    lock = checkpoints.lock_run_folder(run_dir) if run_dir.is_dir() else None
    try:
        return _prepare(config, run_dir, lock)
    except BaseException:
        if lock is not None:
            lock.close()
        raise


def _prepare(config: Config, run_dir: Path, lock: TextIO | None) -> Start:
    checkpoint, damages = checkpoints.find_checkpoint(run_dir, config.run.resume)
    check_reward_functions(config.reward)
    choose_transport(config.cluster)
    check_optimizer(config.learner.optimizer)
    check_trackers(config)
    check_reward_environment(config)
    if config.cluster.address is None:
        _check_this_machine(config)
    _check_folders(config)
    tokenizer, architecture = load_tokenizer(config.model), load_model_config(config.model)
    check_full_attention(architecture)
    trained = check_lora(config, architecture, checkpoint)
    if len(tokenizer) > architecture.vocab_size:
        raise ValueError(
            f"the tokenizer of model.path={config.model.path} has {len(tokenizer)} ids, the model only "
            f"{architecture.vocab_size}"
        )
    outside = [token for token in config.rollout.stop_token_ids if not 0 <= token < len(tokenizer)]
    if outside:
        raise ValueError(
            f"rollout.stop_token_ids must be ids of the tokenizer, 0 to {len(tokenizer) - 1}, got {outside}"
        )
    masked_index(config.rollout.bad_token_ids, len(tokenizer), "cpu")
    StopStrings(tokenizer, config.rollout.stop_strings)
    context = context_of(architecture)
    prompts = build_train_prompts(config, tokenizer, context)
    eval_prompts = build_eval_prompts(config, tokenizer, context)
    total_steps = config.run.steps or prompts.steps_for_epochs(config.run.epochs)
    config.check_warmup(total_steps)
    step, warnings, expected_lengths = 0, damages, None
    probe = (
        RunProbe(last_hidden_size(architecture), max_new_tokens=config.rollout.max_new_tokens)
        if config.uses_probe
        else None
    )
    if checkpoint is not None:
        state = checkpoints.read_state(checkpoint)
        step, expected_lengths = state["step"], state.get("expected_lengths")
        if step > total_steps:
            raise ValueError(
                f"{checkpoint} is after step {step}, this run has {total_steps}: raise run.steps or run.epochs, or "
                "give another run.dir"
            )
        if step == total_steps:
            warnings.append(
                f"run.dir={run_dir} has all of its {total_steps} steps: nothing is left to train; raise run.steps or "
                "run.epochs to go on"
            )
        prompts.restore(state["data"])
        missing = probe.load(checkpoint) if probe is not None else None
        warnings += [missing] if missing else []
    lock = lock or checkpoints.lock_run_folder(run_dir)
    again = checkpoints.folders_after(run_dir / "checkpoints", step)
    changed = [] if checkpoint is None else _changed_settings(config, run_dir)
    unplanned = write_plan(config, len(tokenizer), run_dir, total_steps=total_steps)
    return Start(
        prompts=prompts,
        eval_prompts=eval_prompts,
        tokenizer=tokenizer,
        total_steps=total_steps,
        step=step,
        expected_lengths=expected_lengths,
        checkpoint=checkpoint,
        table=[
            *derived_table(config, architecture, total_steps=total_steps, step=step, num_rows=prompts.num_rows),
            ("trained", trained),
        ],
        warnings=[
            *warnings,
            *(f"{path} is of a step that is done again: it goes to {path.parent / 'superseded'}" for path in again),
            *(f"changed since this run began: {change}" for change in changed),
            *([unplanned] if unplanned else []),
            *setting_warnings(config),
            *context_warnings(architecture, context),
            *sampling_warnings(config, tokenizer, load_generation_config(config.model, architecture)),
        ],
        probe=probe,
        lock=lock,
    )


def take_over(config: Config, run_dir: Path, step: int) -> None:
    """The workers have started, after `step`: from here on the folder is this start's. Before, it holds what the start
    before it left."""
    checkpoints.set_aside_after(run_dir, step)
    written = run_dir / "config.yaml.partial"
    written.write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
    os.replace(written, run_dir / "config.yaml")
    write_versions(run_dir)


def setting_warnings(config: Config) -> list[str]:
    """Settings that work, but not as one might think."""
    rollout, warnings = config.rollout, []
    if rollout.schedule == "dynamic_slot":
        warnings.append("rollout.schedule=dynamic_slot keeps the first G samples to finish and so favours short ones")
    if rollout.schedule in PREDICTED_SCHEDULES and rollout.predictor == "none":
        warnings.append(
            f"rollout.schedule={rollout.schedule} without a predictor takes all lengths as equal; set "
            "rollout.predictor=probe"
        )
    if rollout.predictor == "bert" and rollout.predictor_path is None:
        warnings.append(
            "rollout.predictor=bert without rollout.predictor_path takes all lengths as equal; give the folder of a "
            "trained length predictor"
        )
    unread = unread_settings(config)
    if unread:
        warnings.append(f"set, but nothing reads it here: {', '.join(unread)}")
    if config.model.dtype == "float16":
        warnings.append(
            "model.dtype=float16: the loss is scaled by a fixed number, gradients above 65,504 overflow; bfloat16 has "
            "the range of float32"
        )
    if rollout.kv_dtype != "auto":
        warnings.append(
            f"rollout.kv_dtype={rollout.kv_dtype}: KV is rounded to 8 bits with a scale per page and kv head; "
            "learner/logprob_diff_* shows what "
            "that does to log-probabilities; its mean, not every token, is bounded, by "
            f"objective.mismatch_stop={config.objective.mismatch_stop:g}"
        )
    if config.reference.offload and config.cluster.learner_gpus == 0:
        warnings.append(
            "reference.offload=true moves nothing: with cluster.learner_gpus=0 the reference is in host memory in any "
            "case"
        )
    objective = config.objective
    if objective.kl != "none" and objective.kl_coef == 0:
        warnings.append(f"objective.kl={objective.kl} with objective.kl_coef=0: there is no KL in the loss")
    return warnings


def context_warnings(architecture: PretrainedConfig, context: int | None) -> list[str]:
    """That sequences are not as long as the model's positions (loading.context_of)."""
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
    config: Config, architecture: PretrainedConfig, *, total_steps: int, step: int, num_rows: int
) -> list[tuple[str, str]]:
    """What follows from the settings, as (name, value) rows."""
    rollout, data = config.rollout, config.data
    per_token = kv_bytes_per_token(architecture, config.model.dtype, rollout.kv_dtype, rollout.page_size)
    processes = [
        f"{group.count} {group.role}" + (f" ({group.gpus:g} GPU each)" if group.gpus else "")
        for group in worker_groups(config)
    ]
    device = f"{total_gpus(config):g} GPUs" if total_gpus(config) else f"CPU, {os.cpu_count()} cores"
    epochs = total_steps * data.prompts_per_step / num_rows
    return [
        ("model", f"{config.model.path} ({config.model.dtype})"),
        ("reference", reference_text(config)),
        ("data", f"{data.source}, {num_rows:,} prompts"),
        ("steps", f"{total_steps} ({epochs:.2g} epochs)" + (f", going on after step {step}" if step else "")),
        ("prompts per step", str(data.prompts_per_step)),
        ("samples per step", f"{config.samples_per_step} = {data.prompts_per_step} prompts x G = {rollout.group_size}"),
        ("updates per step", _updates_text(config)),
        ("learner", _learner_text(config)),
        ("schedule", f"{rollout.schedule}, up to {rollout.most_rows} rows per rollout worker"),
        ("length predictor", _predictor_text(config)),
        ("micro-group", f"{rollout.micro_group} samples"),
        ("KV of a token", f"{per_token:,} bytes{_compression_text(config, architecture)}"),
        ("KV pool per rollout worker", _pool_text(config, per_token)),
        (
            "KV of the full group",
            f"{rollout.group_size * rollout.max_new_tokens * per_token:,} bytes, what decoding all G at once would "
            "take",
        ),
        ("learner row", f"up to {config.learner.max_tokens_per_micro_batch:,} tokens"),
        ("evaluation", _evaluation_text(config)),
        ("processes", ", ".join(["1 driver", *processes])),
        ("devices", device),
        ("run folder", str(config.run.dir)),
    ]


def _compression_text(config: Config, architecture: PretrainedConfig) -> str:
    if config.rollout.kv_dtype == "auto":
        return ""
    return (
        f" ({config.rollout.kv_dtype} with scales; {kv_bytes_per_token(architecture, config.model.dtype):,} in "
        f"{config.model.dtype})"
    )


def _predictor_text(config: Config) -> str:
    rollout = config.rollout
    if rollout.predictor == "none":
        return "none"
    if not rollout.probes and rollout.predictor == "probe":
        return f"none: probe is not read by rollout.schedule={rollout.schedule}"
    if rollout.predictor == "probe" and config.run.deterministic:
        return "none: with run.deterministic=true the probe is off, and all lengths count as equal"
    waits = f", after {rollout.num_prefix_tokens} tokens" if rollout.num_prefix_tokens else ""
    if rollout.predictor == "bert":
        return f"bert{waits}, frozen"
    return f"probe{waits}, then every {PREDICT_EVERY} running steps; learns from every finished sample"


def _pool_text(config: Config, per_token: int) -> str:
    """Size of the KV pool; ValueError when one prompt and one full response do not fit in it."""
    rollout = config.rollout
    if rollout.kv_budget_bytes == "auto":
        return "0.9 of what is free after the weights" + (
            " and the learner's planned peak" if config.cluster.colocate else ""
        )
    prompts = [config.data.max_prompt_tokens] * rollout.prompts_at_once
    pages = num_pool_pages(rollout, page_bytes=per_token * rollout.page_size, prompts=prompts)
    tokens = pages * rollout.page_size
    text = f"{tokens * per_token:,} bytes, {tokens:,} tokens in {pages:,} pages, prompts included"
    if rollout.num_prefix_tokens and not config.run.deterministic:
        kept = (rollout.group_size - rollout.num_slots) * rollout.num_prefix_tokens
        text += f"; up to {kept:,} tokens of waiting prefixes stay while pages allow, the others are computed again"
    return text


def _updates_text(config: Config) -> str:
    objective = config.objective
    if objective.updates_per_step == 1:
        return "1" + ("" if config.learner.overlap else ", after the last sample (learner.overlap=false)")
    return (
        f"{objective.updates_per_step} = {objective.epochs} epochs x {objective.mini_batches} mini-batches, after "
        "the last sample"
    )


def _learner_text(config: Config) -> str:
    learner, ranks = config.learner, config.cluster.learner_ranks
    if learner.backend == "deepspeed":
        sharded = f"DeepSpeed ZeRO {learner.zero_stage} over {ranks} ranks"
    elif ranks == 1:
        sharded = "1 rank, not sharded"
    else:
        sharded = f"FSDP2 over {learner.shard_ranks or ranks} of {ranks} ranks"
    return f"{sharded}; weights to the engines: {choose_transport(config.cluster)}"


def _evaluation_text(config: Config) -> str:
    if config.data.held_out is None or config.run.eval_prompts == 0:
        return "none (data.eval_source, run.eval_prompts)"
    every = (
        f"every {config.run.eval_every} steps" if config.run.eval_every else "before the first and after the last step"
    )
    return f"{config.run.eval_prompts} problems of {config.data.held_out} x {config.run.eval_samples} samples, {every}"


def _check_this_machine(config: Config) -> None:
    """ValueError when a local cluster has too few GPUs or folders are no place for files; CPUs are reservations there,
    as many as are asked for."""
    cpus, gpus = max(os.cpu_count() or 1, total_cpus(config)), torch.cuda.device_count()
    problem = refusal(config, [Node(name="this machine", cpus=cpus, gpus=gpus, all_cpus=cpus, all_gpus=gpus)])
    if problem:
        raise ValueError(problem)
    if config.rollout.park_folder is not None:
        check_disk_folder("rollout.preemption", config.rollout.park_folder)


def _check_folders(config: Config) -> None:
    """Local folders of models must be there; a hub name is tried later."""
    for name, path in (
        ("rollout.predictor_path", config.rollout.predictor_path),
        ("reference.path", config.reference.path),
    ):
        if path is not None and Path(path).is_absolute() and not Path(path).is_dir():
            raise ValueError(f"{name}={path} is not a folder")
    folder = Path(config.model.path)
    if not folder.is_absolute():
        return  # a hub name
    if not folder.is_dir():
        hint = (
            "; `make smollm2` (python -m infsample_rl.model.fetch_smollm2) makes it"
            if cache_folder() in folder.parents
            else ""
        )
        raise ValueError(f"model.path={folder} is not a folder{hint}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(f"model.path={folder} holds no weights (*.safetensors or *.bin)")


def _settings_before(kept: Path) -> dict[str, dict[str, Any]] | None:
    """The settings a run began with; None where the file has been damaged. It is compared with, nothing else."""
    try:
        found = yaml.safe_load(kept.read_text())
    except (yaml.YAMLError, UnicodeDecodeError):
        return None
    return found if isinstance(found, dict) and all(isinstance(values, dict) for values in found.values()) else None


def _changed_settings(config: Config, run_dir: Path) -> list[str]:
    """What changed against the settings that a resumed run began with."""
    kept = run_dir / "config.yaml"
    if not kept.is_file():
        return []
    before = _settings_before(kept)
    if before is None:
        return [f"{kept} is damaged: what changed is not known"]
    return [
        f"{section}.{key}: {before.get(section, {}).get(key)} -> {value}"
        for section, values in dataclasses.asdict(config).items()
        for key, value in values.items()
        if before.get(section, {}).get(key) != value and (section, key) not in (("run", "dir"), ("run", "resume"))
    ]

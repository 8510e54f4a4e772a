"""Settings that were changed while another setting turns off what would read them: said at start, never silently
ignored. Pure."""

from __future__ import annotations

import dataclasses

from infsample_rl.config import Config


def unread_settings(config: Config) -> list[str]:
    """Names of settings that differ from their default though nothing reads them in this run."""
    found = []
    for name, is_idle in _idle_settings(config).items():
        section, _, key = name.partition(".")
        group = getattr(config, section)
        spec = next(spec for spec in dataclasses.fields(group) if spec.name == key)
        default = spec.default if spec.default_factory is dataclasses.MISSING else spec.default_factory()
        if is_idle and getattr(group, key) != default:
            found.append(name)
    return found


def _idle_settings(config: Config) -> dict[str, bool]:
    """Setting -> whether nothing reads it."""
    learner, objective, cluster, reference = config.learner, config.objective, config.cluster, config.reference
    generated = any(source.startswith("reasoning_gym:") for source in (config.data.source, config.data.held_out or ""))
    lora = learner.lora_rank > 0
    own_reference = objective.needs_reference and reference.placement == "workers"
    evaluates = config.run.eval_prompts > 0 and config.data.held_out is not None
    return {
        "run.epochs": config.run.steps is not None,
        "run.eval_samples": not evaluates,
        "run.eval_temperature": not evaluates,
        "rollout.epsilon": config.rollout.schedule not in ("fptas", "infinite"),
        "rollout.predictor_path": config.rollout.predictor != "bert",
        "rollout.predict_every": not config.uses_probe,
        "model.lm_head_fp32": config.model.dtype == "float32",
        "reference.path": not objective.needs_reference,
        "reference.placement": not objective.needs_reference,
        "reference.max_tokens_per_micro_batch": not objective.needs_reference or reference.placement == "learner",
        "reference.offload": not objective.needs_reference or lora,
        "objective.kl_coef": objective.kl == "none" and objective.kl_coef > 0,
        "objective.clip_low": objective.loss == "cispo",
        "objective.importance_cap": config.importance == "none",
        "objective.overlong_penalty": objective.overlong_buffer_tokens == 0,
        "objective.dynamic_sampling_rounds": not objective.dynamic_sampling,
        "learner.zero_stage": learner.backend != "deepspeed",
        "learner.overlap": objective.updates_per_step > 1 or config.run.max_staleness > 0,
        "learner.grad_sync": cluster.learner_ranks == 1,
        "learner.shard_ranks": cluster.learner_ranks == 1,
        "learner.min_lr_ratio": learner.lr_schedule == "constant",
        "learner.offload_optimizer": cluster.learner_gpus == 0 and learner.backend != "deepspeed",
        "learner.recompute_granularity": learner.activation_checkpointing == 0,
        "learner.lora_alpha": not lora,
        "learner.lora_targets": not lora,
        "learner.lora_publish": not lora or cluster.colocate,
        "cluster.reference_workers": not own_reference,
        "cluster.reference_gpus": not own_reference,
        "cluster.reference_cpus": not own_reference,
        "cluster.dashboard": cluster.address is not None,
        "cluster.dashboard_host": cluster.address is not None or not cluster.dashboard,
        "cluster.allow_unauthenticated": cluster.address is None,
        "cluster.wait_for_nodes_s": cluster.address is None,
        "cluster.rollout_cpus": cluster.colocate,
        "cluster.max_workers": cluster.colocate,
        "cluster.min_workers": cluster.colocate,
        "cluster.decode_steps_per_turn": not cluster.colocate,
        "cluster.weight_checksum": cluster.colocate and cluster.learner_ranks == 1 and not lora,
        "data.size": not generated,
        "data.generator_seed": not generated,
        "data.generator_kwargs": not generated,
        "reward.memory_limit": config.reward.isolation == "none",
        "reward.environment": config.reward.isolation == "none",
        "reward.read_paths": config.reward.isolation != "sandbox",
        "reward.write_paths": config.reward.isolation != "sandbox",
        "cluster.reward_gpus": not any(function.name.startswith("model:") for function in config.reward.functions),
    }

"""TRL's settings into ours: GRPOConfig and RLOOConfig of 1.16.0 with what its command line and scripts add."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from infsample_rl.commands.convert.common import (
    DRAWN_AT_RANDOM,
    NO_DROPOUT,
    finish_places,
    place_apart,
    place_colocated,
    set_lengths,
    set_sources,
)
from infsample_rl.commands.convert.conversion import Conversion, Given
from infsample_rl.commands.convert.trl_rewards import set_rewards
from infsample_rl.commands.convert.trl_table import LOSSES, NEAREST_LOSSES, PEER, RLOO_DEFAULTS
from infsample_rl.commands.convert.values import local_path, number, whole
from infsample_rl.config import ALL_PROBLEMS


def convert(given: dict[str, Given], *, trainer: str = "grpo") -> Conversion:
    """All settings; ValueError for what is missing. `trainer`: "grpo" or "rloo"."""
    rloo = dataclasses.replace(PEER, defaults={**PEER.defaults, **RLOO_DEFAULTS})
    notes = {name: given.pop(name).value for name in ("script_code", "script_notes") if name in given}
    c = Conversion(given, rloo if trainer == "rloo" else PEER)
    c.apply_tables()
    _data(c)
    _steps(c)
    (_rloo if trainer == "rloo" else _objective)(c)
    for part in (_importance, _model, set_rewards):
        part(c)
    _workers(c, in_reward=trainer == "rloo" and c.number("beta") > 0)
    c.no_equivalent += notes.get("script_code", [])
    c.differs += notes.get("script_notes", [])
    c.finish(
        {
            "model.path": "--model_name_or_path NAME",
            "data.source": "--dataset_name NAME",
            "reward.functions": "--reward_funcs path/to/file.py:function",
        }
    )
    return c


def _data(c: Conversion) -> None:
    mixture = c.list("datasets")
    name = "datasets" if mixture else "dataset_name"
    if mixture:
        files = c.checked(name, lambda _: [_source(entry["path"], entry.get("name")) for entry in mixture])
        if mixture[0].get("split"):
            c.set("data.split", mixture[0]["split"], name)
    else:
        files = [_source(file, c.value("dataset_config")) for file in c.list(name)]
    set_sources(c, name, files)
    if _is_no(c, "eval_strategy"):
        c.set("data.eval_source", None, "eval_strategy")
        c.value("dataset_test_split")
    elif files:
        c.set("data.eval_source", files[0], "eval_strategy")
        c.set("data.eval_split", str(c.value("dataset_test_split")), "dataset_test_split")
    if c.value("max_completion_length") is None:
        raise ValueError("max_completion_length must be a number: the engine here is allocated for a longest response")
    longest, names = 1024, "max_completion_length"
    if c.value("max_prompt_length") is not None:  # until trl 0.x
        longest, names = c.count("max_prompt_length"), "max_prompt_length max_completion_length"
        c.set("data.long_prompts", "truncate", "max_prompt_length")
    else:
        c.differs.append(
            "data.max_prompt_tokens=1024: TRL has no bound; a longer prompt is refused at start, with the length that "
            "would do"
        )
    set_lengths(c, longest, c.count("max_completion_length"), names)
    c.differs.append(
        "prompts of plain text go through the chat template here, in TRL only lists of messages do; "
        "data.apply_chat_template=false"
    )


def _source(path: Any, config: Any) -> str:
    return f"{local_path(path)}:{config}" if config else local_path(path)


def _is_no(c: Conversion, name: str) -> bool:
    return str(c.value(name)) in ("no", "False")


def _steps(c: Conversion) -> None:
    """Prompts a step and updates a step: a generation batch holds whole groups and is split into updates."""
    at_once = c.count("per_device_train_batch_size") * c.count("num_processes")
    update, group = at_once * c.count("gradient_accumulation_steps"), c.count("num_generations")
    names = "per_device_train_batch_size num_processes gradient_accumulation_steps num_generations"
    generation = update
    if c.value("generation_batch_size") is not None:
        generation, names = c.count("generation_batch_size"), f"{names} generation_batch_size"
    elif c.value("steps_per_generation") is not None:
        generation, names = at_once * c.count("steps_per_generation"), f"{names} steps_per_generation"
    if generation < update:  # several generation batches make one update: all of one policy
        c.differs.append(f"a step samples the {update} responses of an update at once, TRL in batches of {generation}")
        generation = update
    if generation % group:
        raise ValueError(f"{generation} responses a generation batch are no whole groups of num_generations={group}")
    prompts, updates = generation // group, max(1, generation // update)
    c.set("data.prompts_per_step", prompts, names, f"{generation} responses / {group}")
    if updates > prompts:
        why = f"{updates} updates from {prompts} prompts; here an update has whole groups: {prompts}"
        c.lacks("steps_per_generation", why)
        updates = prompts
    if updates > 1:
        c.set("objective.mini_batches", updates, names, "updates from one generation batch")
        c.differs.append(f"{DRAWN_AT_RANDOM}TRL")
    if "num_processes" not in c.given:
        c.differs.append("the number of processes is not in the file: one GPU is taken; add --num_processes N")
    _durations(c, updates * c.count("num_iterations"))


def _durations(c: Conversion, updates: int) -> None:
    """TRL counts updates, run.* counts steps."""
    why = f"{updates} updates a step" if updates > 1 else ""
    if c.whole("max_steps") > 0:
        c.set("run.steps", math.ceil(c.whole("max_steps") / updates), "max_steps", why)
        c.value("num_train_epochs")
    else:
        c.set("run.epochs", c.number("num_train_epochs"), "num_train_epochs")
    by_steps = str(c.value("save_strategy")) == "steps"
    if by_steps and c.number("save_steps") >= 1:
        c.set("run.checkpoint_every", math.ceil(c.whole("save_steps") / updates), "save_steps", why)
    elif _is_no(c, "save_strategy"):
        c.set("run.checkpoint_every", 0, "save_strategy")
    else:
        c.lacks("save_steps" if by_steps else "save_strategy", "set run.checkpoint_every, in steps")
    if not _is_no(c, "eval_strategy"):
        _evaluation(c, updates)
    _schedule(c)


def _evaluation(c: Conversion, updates: int) -> None:
    """The whole held-out set; how often counts updates, or is a share of max_steps, or else that of logging."""
    c.set("run.eval_prompts", ALL_PROBLEMS, "eval_strategy", "all of them")
    if c.value("num_generations_eval") is None:
        c.set("run.eval_samples", c.count("num_generations"), "num_generations_eval num_generations")
    name = "eval_steps" if c.value("eval_steps") is not None else "logging_steps"
    every, total = c.number(name), c.whole("max_steps")
    if str(c.value("eval_strategy")) != "steps":
        c.lacks("eval_strategy", "set run.eval_every, in steps")
    elif every < 1 and total <= 0:
        c.lacks(name, "a share of max_steps, which is not given: set run.eval_every, in steps")
    else:
        count = math.ceil((every * total if every < 1 else every) / updates)
        c.set("run.eval_every", max(1, count), name, f"{updates} updates a step")


def _schedule(c: Conversion) -> None:
    """Warm-up, in updates as here, and the lowest rate."""
    warmup = c.number("warmup_steps")
    if str(c.value("lr_scheduler_type")) == "constant":
        for name in ("warmup_steps", "warmup_ratio"):
            if name in c.given:
                why = "lr_scheduler_type=constant has no warm-up in transformers; learner.warmup_steps if it is wanted"
                c.lacks(name, why)
    elif 0 < warmup < 1:
        c.set_warmup(warmup, "warmup_steps")
    elif warmup > 0:
        c.set("learner.warmup_steps", whole(warmup), "warmup_steps")
    elif "warmup_ratio" in c.given:
        c.set_warmup(c.number("warmup_ratio"), "warmup_ratio")
    extra = c.value("lr_scheduler_kwargs")
    if isinstance(extra, dict) and "min_lr_rate" in extra:
        c.set("learner.min_lr_ratio", number(extra["min_lr_rate"]), "lr_scheduler_kwargs")
    elif isinstance(extra, dict) and "min_lr" in extra:
        lowest = number(extra["min_lr"]) / c.number("learning_rate")
        c.set("learner.min_lr_ratio", lowest, "lr_scheduler_kwargs learning_rate")
    elif extra:
        c.lacks("lr_scheduler_kwargs", "learner.min_lr_ratio is all there is")


def _clip_high(c: Conversion) -> float:
    return c.number("epsilon" if c.value("epsilon_high") is None else "epsilon_high")


def _objective(c: Conversion) -> None:
    high, loss, level = _clip_high(c), c.value("loss_type"), c.value("importance_sampling_level")
    ours = (LOSSES | NEAREST_LOSSES).get(loss)
    if ours is None:
        raise ValueError(f"loss_type={loss} is none of TRL's")
    if loss in NEAREST_LOSSES:
        c.lacks("loss_type", f"nearest: objective.loss={ours}")
    if loss == "bnpo":
        c.differs.append(
            "loss_type=bnpo divides by the tokens of each micro-batch; objective.loss=dapo by those of the update"
        )
    if level == "sequence" and loss not in ("luspo", "vespo"):
        ours = "gspo"
        if loss != "grpo":
            c.differs.append(
                f"importance_sampling_level=sequence with loss_type={loss} weighs long responses more; gspo weighs all "
                "alike"
            )
    c.set("objective.loss", ours, "loss_type importance_sampling_level")
    if ours == "cispo":
        if high < 1:
            why = (
                f"a cap of {high} on the ratio itself scales every gradient by {high}; objective.clip_high=0 caps at 1"
            )
            c.lacks("epsilon_high", why)
        high = max(0.0, high - 1)
    c.set("objective.clip_high", high, "epsilon_high epsilon")
    scale = {"True": "group", "False": "none"}.get(str(c.value("scale_rewards")), c.value("scale_rewards"))
    c.set("objective.advantage", "std" if scale == "group" else "mean_only", "scale_rewards")
    if scale == "batch":
        c.lacks(
            "scale_rewards",
            "objective.advantage=mean_only is its advantage times the batch's standard deviation; std divides by the "
            "group's",
        )
    if scale == "group":
        c.differs.append("1e-4 is added to the group's standard deviation in TRL, 1e-6 here")
    beta, corrected = c.number("beta"), c.truth("use_bias_correction_kl")
    kind = "none" if beta == 0 else "k2" if corrected else "k3"
    c.set("objective.kl", kind, "beta use_bias_correction_kl" if beta else "beta")
    c.set("objective.kl_coef", beta, "beta")
    if kind == "k2":
        c.differs.append(
            "objective.kl=k2: with one update a step it has the very gradient of TRL's k3 times the ratio "
            "(use_bias_correction_kl); what is logged as KL is d^2/2"
        )


def _rloo(c: Conversion) -> None:
    sums = "RLOOTrainer sums a response's log-probabilities; dr_grpo does up to the constant max_new_tokens"
    c.set("objective.advantage", "rloo", why="RLOOTrainer")
    c.set("objective.loss", "dr_grpo", why=sums)
    c.set("objective.clip_high", _clip_high(c), "epsilon_high epsilon")
    c.set("objective.kl", "none", why="RLOOTrainer has the KL in the reward")
    c.set("objective.kl_coef", 0.0, why="RLOOTrainer has the KL in the reward")
    if c.number("beta") > 0:
        c.set("objective.kl_in_reward", True, "beta")
        c.set("objective.kl_reward_coef", c.number("beta"), "beta")
    c.differs.append(
        "RLOOTrainer clips the ratio of a whole response; here the ratio of a token; the same with one update a step"
    )


def _importance(c: Conversion) -> None:
    """TRL corrects for vLLM's other arithmetic."""
    name, cap = "vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"
    if not c.truth("use_vllm") or not c.truth("vllm_importance_sampling_correction"):
        return
    level, _, mode = str(c.value(name)).partition("_")
    if mode == "truncate":
        c.set("objective.importance", "token_tis" if level == "token" else "sequence_tis", name)
        if c.value(cap) is not None:
            c.set("objective.importance_cap", c.number(cap), cap)
    else:
        c.lacks(
            name,
            "samples are weighted, never masked (objective.importance=sequence_tis); the engine here computes as the "
            "learner does, and a run stops where they differ (objective.mismatch_stop)",
        )


def _model(c: Conversion) -> None:
    extra = c.checked("model_init_kwargs", lambda value: dict(value or {}))
    deciding = ("model_init_kwargs",) if {"dtype", "torch_dtype"} & extra.keys() else ("dtype", "bf16", "fp16")
    dtype = str(extra.get("dtype", extra.get("torch_dtype", c.value("dtype"))))
    full = "bf16" in c.given and not c.truth("bf16") and not c.truth("fp16")
    half = "float16" if c.truth("fp16") else "bfloat16"
    is_half = dtype in ("bfloat16", "float16")
    computed = "float32" if full and not is_half else dtype if is_half else half
    names = [name for name in deciding if name in c.given]
    c.set("model.dtype", computed, " ".join(names) or "fp16", "" if names else "mixed precision, bf16 unless said")
    if is_half:
        c.differs.append(f"weights in {dtype} have float32 masters here, none in TRL")
    for key in extra.keys() - {"dtype", "torch_dtype", "attn_implementation", "revision"}:
        c.no_equivalent.append(f"model_init_kwargs.{key}={extra[key]}")
    if c.truth("use_peft"):
        c.set("learner.lora_rank", c.whole("lora_r"), "lora_r use_peft")
        c.set("learner.lora_alpha", c.number("lora_alpha"), "lora_alpha")
        targets = [str(target).strip(", ") for target in c.list("lora_target_modules")]
        why = "" if targets else "peft's choice for most models"
        c.set("learner.lora_targets", targets or ["q_proj", "v_proj"], "lora_target_modules", why)
        if c.number("lora_dropout") > 0:
            c.lacks("lora_dropout", NO_DROPOUT)


def _workers(c: Conversion, *, in_reward: bool) -> None:
    gpus = c.whole("num_processes")
    if c.truth("use_vllm") and c.value("vllm_mode") == "server":
        place_apart(c, 1, gpus, 0, "num_processes vllm_mode")
        c.differs.append("vllm_mode=server: one rollout worker on a GPU of its own; cluster.rollout_workers for more")
        if in_reward:
            c.set("cluster.reference_gpus", 1, "beta")
    else:
        place_colocated(c, gpus, "num_processes", separate_reference=in_reward)
    if c.number("beta") > 0 and not in_reward:
        c.set("reference.placement", "learner", "beta", "beside the policy, as in TRL")
    finish_places(c, [str(name) for name in c.list("report_to")], "report_to")

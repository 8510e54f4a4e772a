"""TRL's settings into ours: GRPOConfig of 1.16.0 with what its command line and scripts add."""

from __future__ import annotations

import math
from pathlib import Path

from infsample_rl.commands.convert.conversion import NO_DROPOUT, SCHEDULES, Conversion, Row
from infsample_rl.commands.convert.trl_reading import COLUMNS, REWARDED, as_lines, is_in_file, read
from infsample_rl.commands.convert.values import (
    choose,
    dictionary,
    local_path,
    local_paths,
    not_negative,
    numbers,
    only,
    positive,
    texts,
    truth,
)
from infsample_rl.config import ALL_PROBLEMS
from infsample_rl.config.reward import ENVIRONMENT
from infsample_rl.data.sources import is_file
from infsample_rl.reward.functions import RULES

IS = "vllm_importance_sampling"
OLD_NAMES = {"torch_dtype": "dtype", f"{IS}_cap": f"{IS}_clip_max"}
OLD_NAMES |= {"nproc_per_node": "num_processes", "num_gpus": "num_processes"}  # of torchrun and deepspeed
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_8bit": "adamw_8bit"}
LOSSES = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo", "bnpo": "dapo", "cispo": "cispo"}
SCALES = {"group": "std", True: "std", "none": "mean_only", False: "mean_only"}
WEIGHTS = {"token_truncate": "token_tis", "sequence_truncate": "sequence_tis"}
HALF_CYCLE = ("num_cycles", 0.5)  # of a cosine, as it has here
ADAPTERS = "adapters of whole modules are all that is trained"
OWN_REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math", "think_format_reward": "think_format"}

ROWS = (
    Row("run_name", "run.name", str),
    Row("output_dir", "run.dir", local_path),
    Row("seed", "run.seed", int, 42),
    Row("num_train_epochs", "run.epochs", float, 3.0),
    Row("model_name_or_path", "model.path", local_path),
    Row("trust_remote_code", "model.trust_remote_code", truth),
    Row("bf16", "model.dtype", lambda on: "bfloat16" if truth(on) else "float32", True),
    Row("fp16", "model.dtype", lambda on: "float16" if truth(on) else None),
    Row("dtype", "model.dtype", lambda name: str(name) if "float16" in str(name) else None),
    Row("shuffle_dataset", "data.shuffle", truth),
    Row("dataset_train_split", "data.split", str, "train"),
    Row("dataset_test_split", "data.eval_split", str, "test", "eval_strategy"),
    Row("processing_class", "model.tokenizer_path", local_path),
    Row("chat_template_kwargs", "data.chat_template_kwargs", dictionary),
    Row("eval_strategy", "run.eval_prompts", lambda _: ALL_PROBLEMS, "no", "eval_strategy"),
    Row("max_prompt_length", "data.long_prompts", lambda longest: "truncate"),
    Row("num_generations", "rollout.group_size", positive, 8),
    Row("num_generations", "run.eval_samples", positive, 8, "eval_strategy"),
    Row("temperature", "rollout.temperature", float, 1.0),
    Row("top_p", "rollout.top_p", float, 1.0),
    Row("top_k", "rollout.top_k", not_negative, 0),
    Row("min_p", "rollout.min_p", float),
    Row("num_iterations", "objective.epochs", int, 1),
    Row("loss_type", "objective.loss", choose(LOSSES, "no such loss"), "dapo"),
    Row("importance_sampling_level", "objective.loss", lambda level: "gspo" if level == "sequence" else None),
    Row("scale_rewards", "objective.advantage", choose(SCALES, "by group, or not at all"), "group"),
    Row("epsilon", "objective.clip_low", float, 0.2),
    Row("epsilon", "objective.clip_high", float, 0.2),
    Row("epsilon_high", "objective.clip_high", float),
    Row("entropy_coef", "objective.entropy_coef", float),
    Row("beta", "objective.kl_coef", float, 0.0),
    Row("use_bias_correction_kl", "objective.kl", lambda on: "k2" if truth(on) else "k3", True, "beta"),
    Row("learning_rate", "learner.lr", float, 1e-6),
    Row("lr_scheduler_type", "learner.lr_schedule", choose(SCHEDULES, "no such schedule"), "linear"),
    Row("adam_beta1", "learner.beta1", float),
    Row("adam_beta2", "learner.beta2", float),
    Row("adam_epsilon", "learner.adam_epsilon", float),
    Row("weight_decay", "learner.weight_decay", float, 0.0),
    Row("max_grad_norm", "learner.max_grad_norm", float, 1.0),
    Row("optim", "learner.optimizer", choose(OPTIMIZERS, "adamw or adamw_8bit"), "adamw_torch"),
    Row("gradient_checkpointing", "learner.activation_checkpointing", lambda on: int(truth(on)), True),
    Row("lora_r", "learner.lora_rank", int, 16, "use_peft"),
    Row("lora_alpha", "learner.lora_alpha", float, 32, "use_peft"),
    Row("lora_target_modules", "learner.lora_targets", texts, ["q_proj", "v_proj"], "use_peft"),
    Row("lora_dropout", "", only(0, why=NO_DROPOUT), 0.05, "use_peft"),
    Row("lora_bias", "", only("none", why=ADAPTERS), when="use_peft"),
    Row("lora_modules_to_save", "", only([], why=ADAPTERS), when="use_peft"),
    Row("lora_target_parameters", "", only([], why=ADAPTERS), when="use_peft"),
    Row("use_dora", "", only(False, why="adapters are LoRA's"), when="use_peft"),
    Row("vllm_structured_outputs_regex", "", only(why="no sample is bound to a pattern"), when="use_vllm"),
    Row(f"{IS}_mode", "objective.importance", choose(WEIGHTS, "token_truncate or sequence_truncate"), when="use_vllm"),
    Row(f"{IS}_correction", "objective.importance", lambda on: None if truth(on) else "none", when="use_vllm"),
    Row(f"{IS}_clip_min", "", only(0, why="weights have a cap alone"), when="use_vllm"),
)
WITHOUT_EFFECT = (
    "use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_server_* vllm_group_port vllm_max_model_* "
    "vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_*_clip_max per_device_eval_batch_size fsdp* deepspeed "
    "config config_file ddp_* multi_gpu num_machines hub_* machine_rank main_process_port mixed_precision logging_* "
    "log_* do_* tf32 use_cache attn_implementation device_map gradient_checkpointing_kwargs use_liger_kernel "
    "torch_compile* dataloader_* disable_* remove_unused_columns env overwrite_output_dir trackio_* project "
    "resume_from_checkpoint push_to_hub num_completions_to_print eval_steps save_steps lora_task_type "
    "lora_inference_mode use_rslora"
)


def convert(path: Path, arguments: list[str]) -> Conversion:
    """All settings; ValueError for what is no file of TRL's, and for what is missing."""
    given, code = read(path, arguments)
    columns, own = given.pop(COLUMNS, None), Path(f"{path.stem}_rows.jsonl").absolute()
    rows = [line for line in code if line.startswith("train_dataset")]
    if rows and not given.get("dataset_name"):
        raise ValueError(f"{path.name}: {rows[-1]}, here by --dataset_name rows.jsonl behind it")
    text = "" if given.get("dataset_name") else as_lines(columns or {}, own)
    if text:
        given["dataset_name"] = str(own)
    given |= given.pop("model_init_kwargs", None) or {}  # of a script or a YAML file: dtype
    given = {OLD_NAMES.get(name, name): value for name, value in given.items()}
    c = Conversion(given, "trl 1.16.0", ROWS, WITHOUT_EFFECT)
    c.dropped += [line for line in code if not (line.startswith("eval_dataset") and c.is_off("eval_strategy"))]
    files, config = c.value("dataset_name", local_paths), c.value("dataset_config")
    files = [f"{file}:{config}" if config else file for file in files]
    c.set_sources(files, "dataset_name", _held_out(c, files, code), "eval_dataset eval_strategy")
    if text:
        c.set("data.source", c.ours("data.source"), why=f"the rows that {path.name} makes, written by this command")
    prompt = c.value("max_prompt_length", lambda longest: 1024 if longest is None else positive(longest))
    c.set_lengths(prompt, c.value("max_completion_length", positive, 512), "max_prompt_length max_completion_length")
    if c.ours("objective.importance") in WEIGHTS.values():
        c.set("objective.importance_cap", c.value(f"{IS}_clip_max", float, 3.0), f"{IS}_clip_max")
    if not c.is_off("use_peft") and not c.is_off("use_rslora"):
        scaled = c.ours("learner.lora_alpha") * math.sqrt(c.ours("learner.lora_rank"))
        c.set("learner.lora_alpha", scaled, "lora_alpha lora_r use_rslora", "alpha times the root of the rank")
    if c.ours("objective.loss") == "cispo":
        _cispo(c)
    _steps(c)
    _environment(c)
    _rewards(c)
    c.place(c.value("num_processes", positive, 1), "num_processes")
    c.finish(c.value("report_to", texts), "report_to")
    if text:
        own.write_text(text, encoding="utf-8")
    return c


def _held_out(c: Conversion, files: list[str], code: list[str]) -> list[str]:
    """Where evaluations read: of a hub data set its other split, where a script says nothing else."""
    own = c.value("eval_dataset", local_paths)
    if c.is_off("eval_strategy"):
        return []
    if own or any(line.startswith("eval_dataset") for line in code):
        return own
    if any(map(is_file, files)):
        c.drop("eval_strategy", "a file has no other split; give held-out rows as data.eval_source")
        return []
    return files


def _cispo(c: Conversion) -> None:
    """Its one bound is of the ratio itself in TRL, and of how far that is above 1 here."""
    theirs = "epsilon" if c.value("epsilon_high") is None else "epsilon_high"
    bound = c.ours("objective.clip_high")
    for ours in ("objective.clip_low", "objective.clip_high"):
        c.settings.pop(ours, None)
    if bound >= 1:
        c.set("objective.clip_high", bound - 1, theirs, "of 1 + clip_high")
    else:
        c.drop(theirs, "cispo's bound of the ratio, 1 + objective.clip_high, is at least 1")


def _steps(c: Conversion) -> None:
    """A generation batch holds whole groups and is split into updates, which is what TRL counts."""
    names = "per_device_train_batch_size num_processes gradient_accumulation_steps"
    names += " generation_batch_size" if c.value("generation_batch_size") is not None else " steps_per_generation"
    at_once = c.value("per_device_train_batch_size", positive, 8) * c.value("num_processes", positive, 1)
    accumulated, group = c.value("gradient_accumulation_steps", positive, 1), c.ours("rollout.group_size")
    several = c.value("steps_per_generation", lambda steps: accumulated if steps is None else positive(steps))
    batch = c.value("generation_batch_size", lambda size: at_once * several if size is None else positive(size))
    if batch % at_once:
        raise ValueError(f"generation_batch_size={batch} is no multiple of the {at_once} responses a device step has")
    several = batch // at_once
    if at_once * several % group:
        raise ValueError(f"{at_once * several} responses a generation are no whole groups of num_generations={group}")
    prompts = at_once * several // group
    c.set("data.prompts_per_step", prompts, names)
    c.set("objective.mini_batches", max(1, min(prompts, several // accumulated)), names)
    updates = max(1, several // accumulated) * c.ours("objective.epochs")  # ours are of a whole prompt at least
    unit = c.ours("objective.mini_batches") * c.ours("objective.epochs") / updates
    if c.value("max_steps", int, 0) > 0:
        c.set("run.steps", math.ceil(c.value("max_steps") / updates), "max_steps", f"{updates} updates a step")
        c.settings.pop("run.epochs")
    often = c.value("logging_steps", positive, 10)
    for kind, ours, default in (("save", "checkpoint_every", 500), ("eval", "eval_every", often)):
        strategy = c.value(f"{kind}_strategy", str, "steps")
        if strategy == "steps":
            c.set(f"run.{ours}", math.ceil(c.value(f"{kind}_steps", positive, default) / updates), f"{kind}_steps")
        elif strategy in ("no", "False"):
            c.set(f"run.{ours}", 0, f"{kind}_strategy")
        else:
            c.drop(f"{kind}_strategy", f"set run.{ours}, in steps")
    _lowest_lr(c)
    if c.value("lr_scheduler_type") != "constant":  # which has no warm-up in transformers
        c.set_warmup("warmup_ratio")
        c.set_warmup("warmup_steps", unit)


def _lowest_lr(c: Conversion) -> None:
    """That of a cosine, which they give as it is or as a share of the highest."""
    kwargs = c.value("lr_scheduler_kwargs", numbers)
    shares = {"min_lr_rate": 1.0, "min_lr": c.ours("learner.lr")}
    for name in kwargs.keys() & shares:
        c.set("learner.min_lr_ratio", kwargs[name] / shares[name], "lr_scheduler_kwargs")
    others = {name: value for name, value in kwargs.items() if name not in shares and (name, value) != HALF_CYCLE}
    if others:
        c.drop("lr_scheduler_kwargs", f"there is learner.min_lr_ratio, and nothing for {', '.join(others)}")


def _environment(c: Conversion) -> None:
    """The class or the tools of a script, and how many turns a trajectory may have."""
    factory, tools = c.value("environment_factory"), c.value("tools", texts, [])
    by_code = [name for name in tools if not is_in_file(name)]
    c.dropped += [f"{name} is made by code; write it into a file and set environment.tools" for name in by_code]
    named = [name for name in tools if name not in by_code]
    if factory:
        c.set("environment.factory", factory, "environment_factory")
    if named:
        c.set("environment.tools", named, "tools")
    if factory or named:
        turns = c.value("max_tool_calling_iterations", lambda calls: 1000 if calls is None else positive(calls) + 1)
        c.set("environment.max_turns", turns, "max_tool_calling_iterations")


def _rewards(c: Conversion) -> None:
    """Rules, functions in files and models of scripts, with their weights."""
    names = c.value("reward_funcs", texts)
    weights = c.value("reward_weights", lambda value: [float(weight) for weight in value or [1.0] * len(names)])
    if len(weights) != len(names):
        raise ValueError(f"reward_weights has {len(weights)} entries for {len(names)} reward_funcs: give one for each")
    rewarded = c.value(REWARDED, bool, False) or not names
    functions = [{"name": ENVIRONMENT, "weight": 1.0}] if rewarded and c.ours("environment.factory") else []
    for theirs, weight in zip(names, weights, strict=True):
        module, _, function = theirs.rpartition(".")
        name = OWN_REWARDS.get(function, theirs) if module in ("", "trl.rewards") else theirs
        if module and theirs.replace(".", "").isidentifier() and name == theirs and not module.startswith("trl"):
            name = f"{module.replace('.', '/')}.py:{function}"
        if name in RULES or (name.partition(":")[2] and "<" not in name):
            functions.append({"name": name, "weight": weight})
        else:
            c.dropped.append(f"{theirs} is made by code; write it into a file and give path/to/file.py:function")
    c.set("reward.functions", functions, "reward_funcs reward_weights")

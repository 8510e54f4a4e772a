"""TRL's settings into ours: GRPOConfig and RLOOConfig of 1.16.0 with what its command line and scripts add."""

from __future__ import annotations

import ast
import math
from typing import Any

from infsample_rl.commands.convert.common import (
    local_path,
    need,
    place_apart,
    place_colocated,
    place_reward_model,
    reward_entry,
    set_row_lengths,
)
from infsample_rl.commands.convert.conversion import Conversion, Given, as_list, number, truth, whole
from infsample_rl.commands.convert.trl_table import (
    DEFAULTS,
    IGNORED,
    LOSSES,
    NEAREST_LOSSES,
    OWN_REWARDS,
    RLOO_DEFAULTS,
    ROWS,
    VERSION,
)
from infsample_rl.config import ALL_PROBLEMS


def convert(given: dict[str, Given], *, trainer: str = "grpo") -> Conversion:
    """All settings; ValueError for what is missing. `trainer`: "grpo" or "rloo"."""
    c = Conversion(given, RLOO_DEFAULTS if trainer == "rloo" else DEFAULTS, VERSION)
    c.apply(ROWS)
    c.fill(_data)
    c.fill(_steps)
    c.fill(_objective, trainer)
    c.fill(_importance)
    c.fill(_model)
    c.fill(_rewards)
    c.fill(_workers, trainer)
    c.fill(_refusals)
    c.finish(IGNORED)
    need(c, "model.path", "add --model_name_or_path NAME")
    need(c, "data.source", "add --dataset_name NAME")
    need(c, "reward.functions", "add --reward_funcs path/to/file.py:function")
    return c


def _data(c: Conversion) -> None:
    mixture = as_list(c.value("datasets")) if c.is_given("datasets") else []
    if mixture:
        first = mixture[0]
        source, config = first["path"], first.get("name")
        c.set("data.source", _with_config(source, config), "datasets")
        if first.get("split"):
            c.set("data.split", first["split"], "datasets")
        if len(mixture) > 1:
            c.lacks("datasets", "data.source is one data set: join them; the first is taken")
    elif c.is_given("dataset_name"):
        c.set(
            "data.source",
            _with_config(local_path(str(c.value("dataset_name"))), c.value("dataset_config")),
            "dataset_name",
            "dataset_config",
        )
    # read from the script
    for name, ours in (("prompt_field", "data.prompt_field"), ("system_prompt", "data.system_prompt")):
        if c.is_given(name):
            c.set(ours, c.value(name), name)
    if str(c.value("eval_strategy")) in ("no", "False"):
        c.set("data.eval_source", None, "eval_strategy")
        c.value("dataset_test_split")
    elif "data.source" in c.settings:
        c.set("data.eval_source", c.settings["data.source"].value, "eval_strategy")
        c.set("data.eval_split", str(c.value("dataset_test_split")), "dataset_test_split")
    new, longest = c.value("max_completion_length"), 1024
    if new is None:
        raise ValueError("max_completion_length must be a number: the engine here is allocated for a longest response")
    c.set("rollout.max_new_tokens", whole(new), "max_completion_length")
    if c.is_given("max_prompt_length") and c.value("max_prompt_length") is not None:  # until trl 0.x
        longest = whole(c.value("max_prompt_length"))
        c.set("data.max_prompt_tokens", longest, "max_prompt_length")
        c.set("data.long_prompts", "truncate", "max_prompt_length")
    else:
        c.differs.append(
            "data.max_prompt_tokens=1024: TRL has no bound; a longer prompt is refused at start, with the length that "
            "would do"
        )
    set_row_lengths(c, longest, whole(new), "max_completion_length")
    c.differs.append(
        "prompts of plain text go through the chat template here, in TRL only lists of messages do; "
        "data.apply_chat_template=false"
    )


def _with_config(source: str, config: Any) -> str:
    return f"{source}:{config}" if config else source


def _steps(c: Conversion) -> None:
    """Prompts a step and updates a step: a generation batch holds whole groups and is split into updates."""
    per_device, processes = whole(c.value("per_device_train_batch_size")), whole(c.value("num_processes"))
    accumulation, group = whole(c.value("gradient_accumulation_steps")), whole(c.value("num_generations"))
    update = per_device * processes * accumulation
    names = ["per_device_train_batch_size", "num_processes", "gradient_accumulation_steps", "num_generations"]
    generation = update
    if c.value("generation_batch_size") is not None:
        generation, names = whole(c.value("generation_batch_size")), [*names, "generation_batch_size"]
    elif c.value("steps_per_generation") is not None:
        generation, names = (
            per_device * processes * whole(c.value("steps_per_generation")),
            [*names, "steps_per_generation"],
        )
    if generation < update:  # several generation batches make one update: all of one policy
        c.differs.append(
            f"a step samples the {update} responses of an update at once; TRL samples them in batches of {generation}"
        )
        generation = update
    if generation % group:
        raise ValueError(
            f"{generation} responses a generation batch are no whole groups of num_generations={group}: TRL refuses "
            "that too"
        )
    prompts, updates = generation // group, max(1, generation // update)
    c.set("data.prompts_per_step", prompts, *names, why=f"{generation} responses / {group}")
    if updates > prompts:
        c.lacks(
            "steps_per_generation",
            f"{updates} updates from {prompts} prompts; here an update has whole groups: {prompts}",
        )
        updates = prompts
    if updates > 1:
        c.set("objective.mini_batches", updates, *names, why="updates from one generation batch")
        c.differs.append(
            "an update of a step is made of whole prompts here, of single responses drawn at random in TRL"
        )
    if not c.is_given("num_processes"):
        c.differs.append("the number of processes is not in the file: one GPU is taken; add --num_processes N")
    per_step = updates * whole(c.value("num_iterations"))
    _durations(c, per_step)


def _durations(c: Conversion, updates: int) -> None:
    """TRL counts updates, run.* counts steps."""
    why = f"{updates} updates a step" if updates > 1 else ""
    if whole(c.value("max_steps")) > 0:
        c.set("run.steps", math.ceil(whole(c.value("max_steps")) / updates), "max_steps", why=why)
        c.value("num_train_epochs")
    else:
        c.set("run.epochs", number(c.value("num_train_epochs")), "num_train_epochs")
    if str(c.value("save_strategy")) == "steps" and number(c.value("save_steps")) >= 1:
        c.set("run.checkpoint_every", math.ceil(whole(c.value("save_steps")) / updates), "save_steps", why=why)
    elif str(c.value("save_strategy")) in ("no", "False"):
        c.set("run.checkpoint_every", 0, "save_strategy")
    else:
        c.lacks(
            "save_strategy" if str(c.value("save_strategy")) != "steps" else "save_steps",
            "set run.checkpoint_every, in steps",
        )
    _evaluation(c, updates)
    warmup = number(c.value("warmup_steps"))
    if str(c.value("lr_scheduler_type")) == "constant":
        for name in ("warmup_steps", "warmup_ratio"):
            if c.is_given(name):
                c.lacks(
                    name,
                    "lr_scheduler_type=constant has no warm-up in transformers; learner.warmup_steps if it is wanted",
                )
    elif 0 < warmup < 1:
        c.set_warmup(warmup, "warmup_steps")
    elif warmup > 0:
        c.set("learner.warmup_steps", whole(warmup), "warmup_steps")
    elif c.is_given("warmup_ratio"):
        c.set_warmup(number(c.value("warmup_ratio")), "warmup_ratio")
    extra = c.value("lr_scheduler_kwargs")
    if isinstance(extra, dict) and "min_lr_rate" in extra:
        c.set("learner.min_lr_ratio", number(extra["min_lr_rate"]), "lr_scheduler_kwargs")
    elif isinstance(extra, dict) and "min_lr" in extra:
        c.set(
            "learner.min_lr_ratio",
            number(extra["min_lr"]) / number(c.value("learning_rate")),
            "lr_scheduler_kwargs",
            "learning_rate",
        )
    elif extra:
        c.lacks("lr_scheduler_kwargs", "learner.min_lr_ratio is all there is")


def _evaluation(c: Conversion, updates: int) -> None:
    """The whole held-out set; how often counts updates, or is a share of max_steps, or else that of logging."""
    if str(c.value("eval_strategy")) in ("no", "False"):
        c.value("eval_steps")
        return
    c.set("run.eval_prompts", ALL_PROBLEMS, "eval_strategy", why="all of them")
    if c.value("num_generations_eval") is None:
        c.set("run.eval_samples", whole(c.value("num_generations")), "num_generations_eval", "num_generations")
    name = "eval_steps" if c.value("eval_steps") is not None else "logging_steps"
    every, total = number(c.value(name)), whole(c.value("max_steps"))
    if str(c.value("eval_strategy")) != "steps":
        c.lacks("eval_strategy", "set run.eval_every, in steps")
    elif every < 1 and total <= 0:
        c.lacks(name, "a share of max_steps, which is not given: set run.eval_every, in steps")
    else:
        c.set(
            "run.eval_every",
            max(1, math.ceil((every * total if every < 1 else every) / updates)),
            name,
            why=f"{updates} updates a step",
        )


def _objective(c: Conversion, trainer: str) -> None:
    high = number(c.value("epsilon") if c.value("epsilon_high") is None else c.value("epsilon_high"))
    if trainer == "rloo":
        return _rloo(c, high)
    loss, level = c.value("loss_type"), c.value("importance_sampling_level")
    ours = LOSSES.get(loss) or NEAREST_LOSSES.get(loss)
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
    c.set("objective.loss", ours, "loss_type", "importance_sampling_level")
    if ours == "cispo" and high < 1:
        c.lacks(
            "epsilon_high",
            f"a cap of {high} on the ratio itself scales every gradient by {high}; objective.clip_high=0 caps at 1",
        )
        c.set("objective.clip_high", 0.0, "epsilon_high")
    else:
        c.set("objective.clip_high", high - (1.0 if ours == "cispo" else 0.0), "epsilon_high", "epsilon")
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
    _kl_in_loss(c)


def _kl_in_loss(c: Conversion) -> None:
    beta = number(c.value("beta"))
    corrected = truth(c.value("use_bias_correction_kl"))
    c.set(
        "objective.kl",
        "none" if beta == 0 else "k2" if corrected else "k3",
        "beta",
        *(["use_bias_correction_kl"] if beta else []),
    )
    c.set("objective.kl_coef", beta, "beta")
    if beta > 0 and corrected:
        c.differs.append(
            "objective.kl=k2: with one update a step it has the very gradient of TRL's k3 times the ratio "
            "(use_bias_correction_kl); what is logged "
            "as KL is d^2/2"
        )


def _rloo(c: Conversion, high: float) -> None:
    c.set("objective.advantage", "rloo", why="RLOOTrainer")
    c.set(
        "objective.loss",
        "dr_grpo",
        why="RLOOTrainer sums a response's log-probabilities; dr_grpo does up to the constant max_new_tokens",
    )
    c.set("objective.clip_high", high, "epsilon_high", "epsilon")
    c.set("objective.kl", "none", why="RLOOTrainer has the KL in the reward")
    c.set("objective.kl_coef", 0.0, why="RLOOTrainer has the KL in the reward")
    beta = number(c.value("beta"))
    if beta > 0:
        c.set("objective.kl_in_reward", True, "beta")
        c.set("objective.kl_reward_coef", beta, "beta")
    c.refuse("normalize_advantages", (False,), "advantages are not divided by the batch's standard deviation")
    c.refuse("reward_clip_range", (None,), "clip in the reward function")
    c.differs.append(
        "RLOOTrainer clips the ratio of a whole response; here the ratio of a token; the same with one update a step"
    )


def _importance(c: Conversion) -> None:
    """TRL corrects for vLLM's other arithmetic."""
    mode = str(c.value("vllm_importance_sampling_mode"))
    if not truth(c.value("use_vllm")) or not truth(c.value("vllm_importance_sampling_correction")):
        return
    if mode.endswith("_truncate"):
        c.set(
            "objective.importance",
            "token_tis" if mode.startswith("token") else "sequence_tis",
            "vllm_importance_sampling_mode",
        )
        cap = c.value("vllm_importance_sampling_clip_max")
        if cap is not None:
            c.set("objective.importance_cap", number(cap), "vllm_importance_sampling_clip_max")
    else:
        c.lacks(
            "vllm_importance_sampling_mode",
            "samples are weighted, never masked (objective.importance=sequence_tis); the engine here computes as the "
            "learner does, and a run stops "
            "where they differ (objective.mismatch_stop)",
        )
    c.refuse("vllm_importance_sampling_clip_min", (None,), "weights are capped from above only")


def _model(c: Conversion) -> None:
    extra = c.value("model_init_kwargs") or {}
    dtype = str(extra.get("dtype", extra.get("torch_dtype", c.value("dtype"))))
    half = "float16" if truth(c.value("fp16")) else "bfloat16"
    full = c.is_given("bf16") and not truth(c.value("bf16")) and not truth(c.value("fp16"))
    deciding = ("model_init_kwargs",) if {"dtype", "torch_dtype"} & extra.keys() else ("dtype", "bf16", "fp16")
    names = [name for name in deciding if c.is_given(name)] or ["fp16"]
    computed = (
        "float32"
        if full and dtype in ("float32", "None", "auto")
        else dtype
        if dtype in ("bfloat16", "float16")
        else half
    )
    c.set(
        "model.dtype", computed, *names, why="" if names != ["fp16"] else "mixed precision, bf16 unless said otherwise"
    )
    if dtype in ("bfloat16", "float16"):
        c.differs.append(f"weights in {dtype} have float32 masters here, none in TRL")
    for key in extra:
        if key not in ("dtype", "torch_dtype", "attn_implementation", "revision"):
            c.no_equivalent.append(f"model_init_kwargs.{key}={extra[key]}")
    if not truth(c.value("use_peft")):
        return
    c.set("learner.lora_rank", whole(c.value("lora_r")), "lora_r", "use_peft")
    c.set("learner.lora_alpha", number(c.value("lora_alpha")), "lora_alpha")
    targets = [str(target).strip(", ") for target in as_list(c.value("lora_target_modules"))]
    c.set(
        "learner.lora_targets",
        targets or ["q_proj", "v_proj"],
        "lora_target_modules",
        why="" if targets else "peft's choice for most models",
    )
    if number(c.value("lora_dropout")) > 0:
        c.lacks("lora_dropout", "adapters have no dropout here: the policy that samples has none")
    for name in ("use_rslora", "use_dora"):
        c.refuse(name, (None, False), "adapters are plain LoRA")


def _rewards(c: Conversion) -> None:
    functions = as_list(c.value("reward_funcs"))
    model = c.value("reward_model_name_or_path")
    weights = [number(weight) for weight in as_list(c.value("reward_weights"))]
    names = [f"model:{model}"] if model else []
    names += [str(function) for function in functions]
    entries = []
    for index, name in enumerate(names):
        weight = weights[index] if index < len(weights) else 1.0
        if name.startswith("get_soft_overlong_punishment"):
            _overlong(c, name, weight)
            continue
        ours = reward_name(name)
        if ours is None:
            c.no_equivalent.append(f"reward_funcs: {name}; write it into a file and give path/to/file.py:function")
            continue
        if name == "reasoning_accuracy_reward":
            c.differs.append(
                "reasoning_accuracy_reward reads the answer behind </think>; reward math reads the last answer stated"
            )
        entries.append(reward_entry(ours, weight))
    if entries:
        given = [name for name in ("reward_funcs", "reward_model_name_or_path", "reward_weights") if c.is_given(name)]
        c.set("reward.functions", entries, *given)
    c.refuse("multi_objective_aggregation", ("sum_then_normalize",), "rewards are summed, then normalised")


def reward_name(name: str) -> str | None:
    """One of our names for a reward function of TRL's: a rule, file.py:function, model:PATH; None where there is
    none."""
    short = name.rpartition(".")[2]
    if short in OWN_REWARDS and name in (short, f"trl.rewards.{short}"):
        return OWN_REWARDS[short]
    if (
        name.startswith("model:")
        or ".py:" in name
        or name in ("gsm8k", "math", "kk", "reasoning_gym", "data_source", "think_format")
    ):
        return name
    module, dot, function = name.rpartition(".")
    if dot and not name.startswith("trl.") and name.replace(".", "").replace("_", "").isalnum():
        return f"{module.replace('.', '/')}.py:{function}"
    return None


def _overlong(c: Conversion, call: str, weight: float) -> None:
    """get_soft_overlong_punishment(max_completion_len, soft_punish_cache) is DAPO's equation 13, which is a setting
    here."""
    values = {"max_completion_len": 1280, "soft_punish_cache": 256}
    try:
        node = ast.parse(call, mode="eval").body
        if isinstance(node, ast.Call):
            values |= dict(zip(values, map(ast.literal_eval, node.args), strict=False))
            values |= {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (SyntaxError, ValueError):
        c.no_equivalent.append(f"reward_funcs: {call}; set objective.overlong_buffer_tokens")
        return
    c.set("objective.overlong_buffer_tokens", whole(values["soft_punish_cache"]), "reward_funcs")
    c.set("objective.overlong_penalty", weight, "reward_funcs", why="its weight")
    if values["max_completion_len"] != c.value("max_completion_length"):
        c.differs.append(
            f"the punishment begins before {values['max_completion_len']} tokens in TRL, before rollout.max_new_tokens "
            "here"
        )


def _workers(c: Conversion, trainer: str) -> None:
    gpus = whole(c.value("num_processes"))
    if truth(c.value("use_vllm")) and c.value("vllm_mode") == "server":
        place_apart(c, 1, gpus, 0, "num_processes", "vllm_mode")
        c.differs.append("vllm_mode=server: one rollout worker on a GPU of its own; cluster.rollout_workers for more")
        if number(c.value("beta")) > 0 and trainer == "rloo":
            c.set("cluster.reference_gpus", 1, "beta")
    else:
        place_colocated(c, gpus, "num_processes", separate_reference=trainer == "rloo" and number(c.value("beta")) > 0)
    if trainer != "rloo" and number(c.value("beta")) > 0:
        c.set("reference.placement", "learner", "beta", why="beside the policy, as in TRL")
    place_reward_model(c)
    report = [str(name) for name in as_list(c.value("report_to"))]
    c.set("logging.wandb", "auto" if {"wandb", "all"} & set(report) else "disabled", "report_to")
    if {"tensorboard", "all"} & set(report):
        c.set("logging.tensorboard", True, "report_to")
    for name in sorted(set(report) - {"wandb", "all", "tensorboard", "none"}):
        c.no_equivalent.append(f"report_to={name}: metrics.jsonl holds everything; W&B and TensorBoard are there")


def _refusals(c: Conversion) -> None:
    c.refuse("repetition_penalty", (1, 1.0), "the policy is softmax(logits / temperature)")
    c.refuse("generation_kwargs", (None, {}), "set rollout.* one by one")
    c.refuse("mask_truncated_completions", (False,), "objective.overlong_buffer_tokens punishes long responses instead")
    c.refuse("sync_ref_model", (False,), "the reference stays frozen")
    c.refuse("top_entropy_quantile", (1, 1.0), "every token is trained")
    c.refuse("use_adaptive_entropy", (False,), "objective.entropy_coef stays as it is")
    for name in (
        "delta",
        "off_policy_mask_threshold",
        "router_aux_loss_coef",
        "max_tool_calling_iterations",
        "vllm_structured_outputs_regex",
    ):
        c.refuse(name, (None,), "nothing here does that")
    for name in ("load_in_4bit", "load_in_8bit"):
        c.refuse(name, (None, False), "weights are model.dtype")
    c.refuse("model_revision", (None, "main"), "download that revision into a folder and give it as model.path")
    c.refuse("dataset_streaming", (None, False), "the data set is read once, at the start")
    c.no_equivalent += as_list(c.value("script_code"))

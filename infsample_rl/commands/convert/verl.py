"""verl's settings into ours: main_ppo of 0.9.1, from a shell script with key=value overrides or a Hydra YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.common import (
    first_of,
    local_path,
    need,
    place_colocated,
    place_reward_model,
    reward_entry,
    set_row_lengths,
)
from infsample_rl.commands.convert.conversion import Conversion, Given, as_list, number, truth, whole
from infsample_rl.commands.convert.scalars import flatten, read_scalar, read_yaml
from infsample_rl.commands.convert.shell import Word, read_commands
from infsample_rl.commands.convert.verl_table import (
    ACTOR,
    AGGREGATIONS,
    ALIASES,
    CORRECTION,
    DEFAULTS,
    IGNORED,
    KL_LOSSES,
    MODEL,
    OPTIM,
    PREFIXES,
    REF,
    ROLLOUT,
    ROWS,
    VERSION,
    WHOLE,
)
from infsample_rl.config import ALL_PROBLEMS


def read(path: Path, words: list[Word], environment: dict[str, str]) -> dict[str, Given]:
    """Settings by verl's names of today. ValueError for what is no file of verl's."""
    if path.suffix in (".yaml", ".yml"):
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
        given = {name: Given(value, path.name) for name, value in flatten(content, WHOLE) if name != "hydra"}
    else:
        commands, _ = read_commands(path.read_text(encoding="utf-8"), environment, keep=_is_training)
        if not commands:
            raise ValueError(f"{path} holds no command with verl.trainer.main_ppo or another trainer of verl's")
        given = _overrides(commands[0])
    return _renamed(given | _overrides(words))


def _is_training(words: list[str]) -> bool:
    return any(
        word.startswith(("verl.trainer.main_", "recipe.")) or word.endswith(("main_ppo.py", "main_dapo.py"))
        for word in words
    )


def _overrides(words: list[Word]) -> dict[str, Given]:
    given = {}
    for word in words:
        name, equals, value = word.text.lstrip("+~").partition("=")
        if equals and not word.text.startswith("-"):
            given[name] = Given(read_scalar(value), f"line {word.line}" if word.line else "argument")
    return given


def _renamed(given: dict[str, Given]) -> dict[str, Given]:
    found: dict[str, Given] = {}
    for name, entry in given.items():
        for old, new in PREFIXES.items():
            name = new + name[len(old) :] if name.startswith(old) else name
        whole_name = next((name_of_dict for name_of_dict in WHOLE if name.startswith(f"{name_of_dict}.")), None)
        if whole_name is None:
            found[ALIASES.get(name, name)] = entry
        else:
            before = found[whole_name].value if whole_name in found else None
            found[whole_name] = Given(_nested(before, name[len(whole_name) + 1 :].split("."), entry.value), entry.place)
    return found


def _nested(before: Any, names: list[str], value: Any) -> dict[str, Any]:
    """`before` with a value at a path of names: _nested({"a": 1}, ["b", "c"], 2) -> {"a": 1, "b": {"c": 2}}."""
    first, *rest = names
    before = before if isinstance(before, dict) else {}
    return before | {first: _nested(before.get(first), rest, value) if rest else value}


def convert(given: dict[str, Given]) -> Conversion:
    """All settings; ValueError for what is missing."""
    c = Conversion(given, DEFAULTS, VERSION)
    c.apply(ROWS)
    for part in (_data, _steps, _objective, _kl, _optimizer, _evaluation, _rewards, _workers):
        c.fill(part)
    c.finish(IGNORED)
    need(c, "model.path", f"add {MODEL}.path=NAME")
    need(c, "data.source", "add data.train_files=FILE.parquet")
    return c


def _data(c: Conversion) -> None:
    for name, ours in (("data.train_files", "data.source"), ("data.val_files", "data.eval_source")):
        files = [local_path(str(file)) for file in as_list(c.value(name))]
        if files:
            c.set(ours, first_of(c, name, files), name)
    overlong, truncation = truth(c.value("data.filter_overlong_prompts")), c.value("data.truncation")
    c.set(
        "data.long_prompts",
        "drop" if overlong else "truncate" if truncation == "left" else "error",
        "data.filter_overlong_prompts",
        "data.truncation",
    )
    if not overlong and truncation in ("right", "middle"):
        c.lacks("data.truncation", "questions are cut from the left (data.long_prompts=truncate), or dropped")
    c.refuse(
        f"{ROLLOUT}.ignore_eos",
        (None, False),
        "a sample ends at the model's end token or one of rollout.stop_token_ids",
    )
    c.refuse(
        f"{ROLLOUT}.do_sample",
        (None, True),
        "samples of a training step are drawn; run.eval_temperature=0 is for evaluations",
    )
    c.refuse("data.train_max_samples", (-1, None), "cut the file")
    c.refuse(
        "data.custom_cls.path", (None,), "a data set class of your own; write its rows into a Parquet or JSONL file"
    )
    c.refuse(f"{ROLLOUT}.multi_turn.enable", (False,), "one turn; tools are not called")
    c.refuse("data.reward_fn_key", ("data_source",), "verl's column data_source is what reward functions get")
    row_tokens = (
        whole(c.value(f"{ACTOR}.ppo_max_token_len_per_gpu")) if truth(c.value(f"{ACTOR}.use_dynamic_bsz")) else None
    )
    names = (
        [f"{ACTOR}.ppo_max_token_len_per_gpu"] if row_tokens else ["data.max_prompt_length", "data.max_response_length"]
    )
    set_row_lengths(
        c,
        whole(c.value("data.max_prompt_length")),
        whole(c.value("data.max_response_length")),
        *names,
        row_tokens=row_tokens,
    )


def _steps(c: Conversion) -> None:
    prompts, mini = whole(c.value("data.train_batch_size")), whole(c.value(f"{ACTOR}.ppo_mini_batch_size"))
    updates = max(1, prompts // mini)
    if prompts % mini and mini < prompts:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of ppo_mini_batch_size={mini}: verl refuses that too"
        )
    c.set("objective.mini_batches", updates, "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    if c.value("trainer.total_training_steps") is not None:
        c.set("run.steps", whole(c.value("trainer.total_training_steps")), "trainer.total_training_steps")
        c.value("trainer.total_epochs")
    else:
        c.set("run.epochs", number(c.value("trainer.total_epochs")), "trainer.total_epochs")
    save = whole(c.value("trainer.save_freq"))
    c.set("run.checkpoint_every", max(0, save), "trainer.save_freq")
    if c.value("trainer.resume_mode") == "disable":
        c.set("run.resume", "never", "trainer.resume_mode")
    elif c.value("trainer.resume_mode") == "resume_path":
        c.lacks("trainer.resume_mode", "a run goes on from its own checkpoints only (run.resume)")
    c.refuse("trainer.resume_from_path", (None, False), "a run goes on from its own checkpoints only (run.resume)")


def _objective(c: Conversion) -> None:
    estimator = c.value("algorithm.adv_estimator")
    by_std = truth(c.value("algorithm.norm_adv_by_std_in_grpo"))
    known = {
        "grpo": "std" if by_std else "mean_only",
        "rloo": "rloo",
        "grpo_vectorized": "std" if by_std else "mean_only",
        "rloo_vectorized": "rloo",
    }
    if estimator not in known:
        c.lacks(
            "algorithm.adv_estimator",
            "nearest: objective.advantage=std; there is no critic, and a baseline is the group's own",
        )
    c.set(
        "objective.advantage",
        known.get(estimator, "std"),
        "algorithm.adv_estimator",
        "algorithm.norm_adv_by_std_in_grpo",
    )
    mode, aggregation = c.value(f"{ACTOR}.policy_loss.loss_mode"), c.value(f"{ACTOR}.loss_agg_mode")
    names = (f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode")
    if aggregation not in AGGREGATIONS:
        c.lacks(names[1], "nearest: objective.loss=dapo")
    loss = mode if mode in ("gspo", "cispo") else AGGREGATIONS.get(aggregation, "dapo")
    if mode not in ("vanilla", "gspo", "cispo"):
        c.lacks(names[0], f"nearest: objective.loss={loss}")
    c.set("objective.loss", loss, *names)
    _aggregation_notes(c, loss, aggregation)
    c.set("objective.clip_high", number(c.value(f"{ACTOR}.clip_ratio_high")), f"{ACTOR}.clip_ratio_high")
    if loss != "cispo":
        c.set("objective.clip_low", number(c.value(f"{ACTOR}.clip_ratio_low")), f"{ACTOR}.clip_ratio_low")
    elif number(c.value(f"{ACTOR}.clip_ratio_low")) < 1:
        c.lacks(f"{ACTOR}.clip_ratio_low", "objective.loss=cispo caps the ratio from above only")
    c.value(f"{ACTOR}.clip_ratio_c")
    if mode == "vanilla":
        c.differs.append(
            "verl bounds the loss of A < 0 at clip_ratio_c |A|, here it is not bounded; the same with one update a step"
        )
    is_level = c.value(f"{CORRECTION}.rollout_is")
    if is_level in ("token", "sequence"):
        c.set("objective.importance", f"{is_level}_tis", f"{CORRECTION}.rollout_is")
        c.set(
            "objective.importance_cap",
            number(c.value(f"{CORRECTION}.rollout_is_threshold")),
            f"{CORRECTION}.rollout_is_threshold",
        )
    c.refuse(f"{CORRECTION}.rollout_rs", (None,), "samples are weighted, never rejected")
    if truth(c.value("algorithm.filter_groups.enable")):
        c.set("objective.dynamic_sampling", True, "algorithm.filter_groups.enable")
        rounds = whole(c.value("algorithm.filter_groups.max_num_gen_batches"))
        c.set(
            "objective.dynamic_sampling_rounds",
            rounds or 1000,
            "algorithm.filter_groups.max_num_gen_batches",
            why="" if rounds else "no bound",
        )
        if c.value("algorithm.filter_groups.metric") not in (
            "reward",
            "score",
            "acc",
            "seq_reward",
            "seq_final_reward",
        ):
            c.lacks("algorithm.filter_groups.metric", "groups are dropped where all rewards are equal")


def _aggregation_notes(c: Conversion, loss: str, aggregation: Any) -> None:
    if loss == "gspo" and aggregation != "seq-mean-token-mean":
        c.differs.append(
            f"loss_agg_mode={aggregation} with gspo weighs long responses more; objective.loss=gspo weighs all "
            "responses alike"
        )
    if loss == "cispo" and aggregation != "token-mean":
        c.differs.append(f"objective.loss=cispo takes the mean over tokens, verl {aggregation}")
    if aggregation == "seq-mean-token-sum":
        c.differs.append(
            "seq-mean-token-sum is max_new_tokens times objective.loss=dr_grpo: one direction, clipped at another "
            "length"
        )
    scale = c.value(f"{ACTOR}.loss_scale_factor")
    if scale is not None and loss == "dr_grpo" and whole(scale) != whole(c.value("data.max_response_length")):
        c.lacks(f"{ACTOR}.loss_scale_factor", "the constant is rollout.max_new_tokens")


def _kl(c: Conversion) -> None:
    in_loss = truth(c.value(f"{ACTOR}.use_kl_loss"))
    kind = c.value(f"{ACTOR}.kl_loss_type")
    if in_loss and kind not in KL_LOSSES:
        c.lacks(f"{ACTOR}.kl_loss_type", "nearest: objective.kl=k3")
    c.set(
        "objective.kl",
        KL_LOSSES.get(kind, "k3") if in_loss else "none",
        f"{ACTOR}.use_kl_loss",
        *([f"{ACTOR}.kl_loss_type"] if in_loss else []),
    )
    c.set(
        "objective.kl_coef",
        number(c.value(f"{ACTOR}.kl_loss_coef")) if in_loss else 0.0,
        f"{ACTOR}.kl_loss_coef" if in_loss else f"{ACTOR}.use_kl_loss",
    )
    if in_loss and str(kind).endswith("+"):
        c.differs.append(
            "objective.kl=k2 has the gradient of verl's straight-through estimators; what is logged as KL is d^2/2"
        )
    coefficient = number(c.value("algorithm.kl_ctrl.kl_coef"))
    if truth(c.value("algorithm.use_kl_in_reward")) and coefficient > 0:
        c.set("objective.kl_in_reward", True, "algorithm.use_kl_in_reward")
        c.set("objective.kl_reward_coef", coefficient, "algorithm.kl_ctrl.kl_coef")
        if c.value("algorithm.kl_penalty") not in ("kl", "k1"):
            c.lacks("algorithm.kl_penalty", "the reward's KL is log(policy / reference)")
        if c.value("algorithm.kl_ctrl.type") != "fixed":
            c.lacks("algorithm.kl_ctrl.type", "objective.kl_reward_coef stays as it is")


def _optimizer(c: Conversion) -> None:
    betas = c.value(f"{OPTIM}.betas")
    c.set("learner.beta1", number(betas[0]), f"{OPTIM}.betas")
    c.set("learner.beta2", number(betas[1]), f"{OPTIM}.betas")
    steps = whole(c.value(f"{OPTIM}.lr_warmup_steps") or 0)
    ratio = number(c.value(f"{OPTIM}.lr_warmup_steps_ratio") or 0)
    if steps > 0:
        c.set(
            "learner.warmup_steps",
            steps * _updates(c),
            f"{OPTIM}.lr_warmup_steps",
            why="in updates" if _updates(c) > 1 else "",
        )
    elif ratio > 0:
        c.set_warmup(ratio, f"{OPTIM}.lr_warmup_steps_ratio")
    if number(c.value(f"{OPTIM}.weight_decay")) > 0:
        c.differs.append("weight decay is of matrices only here, of every parameter in verl")
    if "learner.lora_rank" in c.settings and c.settings["learner.lora_rank"].value > 0:
        c.set("learner.lora_alpha", number(c.value(f"{MODEL}.lora_alpha")), f"{MODEL}.lora_alpha")
        c.set(
            "learner.lora_targets",
            [str(name) for name in as_list(c.value(f"{MODEL}.target_modules"))],
            f"{MODEL}.target_modules",
        )
        c.refuse(f"{MODEL}.lora_adapter_path", (None,), "merge it first (python -m infsample_rl merge)")


def _updates(c: Conversion) -> int:
    """verl's scheduler counts steps, ours updates."""
    prompts, mini = whole(c.value("data.train_batch_size")), whole(c.value(f"{ACTOR}.ppo_mini_batch_size"))
    return max(1, prompts // mini) * whole(c.value(f"{ACTOR}.ppo_epochs"))


def _evaluation(c: Conversion) -> None:
    every, count = whole(c.value("trainer.test_freq")), whole(c.value("data.val_max_samples"))
    if "data.eval_source" not in c.settings:
        c.set("data.eval_source", None, "data.val_files")
        return
    c.set("run.eval_every", max(0, every), "trainer.test_freq")
    c.set(
        "run.eval_prompts",
        count if count > 0 else ALL_PROBLEMS,
        "data.val_max_samples",
        why="all of them" if count <= 0 else "",
    )
    greedy = not truth(c.value(f"{ROLLOUT}.val_kwargs.do_sample"))
    names = [f"{ROLLOUT}.val_kwargs.do_sample"] if greedy else [f"{ROLLOUT}.val_kwargs.temperature"]
    temperature = 0.0 if greedy else number(c.value(f"{ROLLOUT}.val_kwargs.temperature"))
    c.set("run.eval_temperature", temperature, *names)
    for name in ("top_p", "top_k"):
        if temperature > 0 and c.value(f"{ROLLOUT}.val_kwargs.{name}") != c.value(f"{ROLLOUT}.{name}"):
            c.lacks(f"{ROLLOUT}.val_kwargs.{name}", f"evaluations sample with rollout.{name}")


def _rewards(c: Conversion) -> None:
    path = c.value("reward.custom_reward_function.path")
    kwargs = dict(c.value("reward.custom_reward_function.reward_kwargs") or {})
    if truth(c.value("reward.reward_model.enable") or False) and c.value("reward.reward_model.model_path"):
        c.set(
            "reward.functions",
            [reward_entry(f"model:{c.value('reward.reward_model.model_path')}")],
            "reward.reward_model.model_path",
        )
    elif path:
        name = f"{local_path(str(path))}:{c.value('reward.custom_reward_function.name')}"
        theirs = [
            f"reward.custom_reward_function.{key}" for key in ("path", "name", *(["reward_kwargs"] if kwargs else []))
        ]
        c.set("reward.functions", [reward_entry(name, **kwargs)], *theirs)
    else:
        c.set(
            "reward.functions",
            [reward_entry("data_source")],
            why="the rule of each row's data_source, as verl's default does",
        )
        c.differs.append(
            "reward data_source scores with the rules gsm8k and math here: maths answers by math-verify, 1 or 0"
        )
    manager = c.value("reward.reward_manager.name")
    if manager not in ("naive", "dapo", "batch", "prime"):
        c.lacks("reward.reward_manager.name", "reward functions are called one sample at a time")
    shaping = "reward.reward_kwargs.overlong_buffer_cfg"
    if truth(c.value(f"{shaping}.enable") or False):
        c.set("objective.overlong_buffer_tokens", whole(c.value(f"{shaping}.len")), f"{shaping}.len")
        c.set(
            "objective.overlong_penalty",
            number(c.value(f"{shaping}.penalty_factor") or 1.0),
            f"{shaping}.penalty_factor",
        )
    else:
        for name in ("len", "penalty_factor"):
            c.value(f"{shaping}.{name}")


def _workers(c: Conversion) -> None:
    gpus = whole(c.value("trainer.n_gpus_per_node")) * whole(c.value("trainer.nnodes"))
    separate = c.settings.get("objective.kl_in_reward") is not None
    place_colocated(c, gpus, "trainer.n_gpus_per_node", "trainer.nnodes", separate_reference=separate)
    if not separate and c.settings.get("objective.kl") is not None and c.settings["objective.kl"].value != "none":
        c.set("reference.placement", "learner", f"{ACTOR}.use_kl_loss", why="beside the policy, as in verl")
        c.set(
            "reference.offload", truth(c.value(f"{REF}.fsdp_config.param_offload")), f"{REF}.fsdp_config.param_offload"
        )
    if whole(c.value(f"{ROLLOUT}.tensor_model_parallel_size")) > 1:
        c.lacks(
            f"{ROLLOUT}.tensor_model_parallel_size",
            "an engine is whole on one GPU: the policy in 16 bits and its KV pool must fit there",
        )
    place_reward_model(c)
    loggers = [str(name) for name in as_list(c.value("trainer.logger"))]
    c.set("logging.wandb", "auto" if "wandb" in loggers else "disabled", "trainer.logger")
    if "tensorboard" in loggers:
        c.set("logging.tensorboard", True, "trainer.logger")
    for name in sorted(set(loggers) - {"console", "wandb", "tensorboard", "file"}):
        c.no_equivalent.append(f"trainer.logger={name}: metrics.jsonl holds everything; W&B and TensorBoard are there")

"""verl's settings into ours: main_ppo of 0.9.1, from a shell script with key=value overrides or a Hydra YAML file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.common import (
    NO_CRITIC,
    finish_places,
    place_colocated,
    reward_entry,
    set_betas,
    set_evaluations,
    set_lengths,
    set_sources,
)
from infsample_rl.commands.convert.conversion import Conversion, Given
from infsample_rl.commands.convert.recording import commands_of, given_of
from infsample_rl.commands.convert.values import flatten, local_path, number, read_scalar, read_yaml, whole
from infsample_rl.commands.convert.verl_table import (
    ACTOR,
    AGGREGATIONS,
    ALIASES,
    CORRECTION,
    CUSTOM,
    ESTIMATORS,
    KL_LOSSES,
    MODEL,
    OPTIM,
    OVERLONG,
    OWN_CHECKPOINTS,
    PEER,
    PREFIXES,
    REF,
    ROLLOUT,
    WHOLE,
)

TRAINING = r"verl\.trainer\.main_|recipe\.|main_(ppo|dapo)\.py"


def read(path: Path, arguments: list[str]) -> dict[str, Given]:
    """Settings by verl's names of today. ValueError for what is no file of verl's."""
    if path.suffix in (".yaml", ".yml"):
        flags = dict(flatten(read_yaml(path.read_text(encoding="utf-8"), str(path)), WHOLE))
        flags.pop("hydra", None)
    else:
        what = "verl.trainer.main_ppo or another trainer of verl's"
        flags = _overrides(commands_of(path, arguments, TRAINING, what)[-1].words)
    found: dict[str, Given] = {}
    for name, entry in given_of(path, flags, _overrides(arguments), lambda name: name).items():
        for old, new in PREFIXES.items():
            name = new + name[len(old) :] if name.startswith(old) else name
        name = ALIASES.get(name, name)
        kept = next((kept for kept in WHOLE if name.startswith(f"{kept}.")), name)
        before = found[kept].value if kept in found else None
        path_in = name[len(kept) + 1 :].split(".") if name != kept else []
        found[kept] = Given(_nested(before, path_in, entry.value), entry.place, entry.name if name == kept else kept)
    return found


def _overrides(words: list[str]) -> dict[str, Any]:
    pairs = [word.lstrip("+~").partition("=") for word in words if "=" in word and not word.startswith("-")]
    return {name: read_scalar(value) for name, _, value in pairs}


def _nested(before: Any, names: list[str], value: Any) -> Any:
    """`before` with a value at a path of names: _nested({"a": 1}, ["b", "c"], 2) -> {"a": 1, "b": {"c": 2}}."""
    if not names:
        return value
    before = before if isinstance(before, dict) else {}
    return before | {names[0]: _nested(before.get(names[0]), names[1:], value)}


def convert(given: dict[str, Given]) -> Conversion:
    """All settings; ValueError for what is missing."""
    c = Conversion(given, PEER)
    c.apply_tables()
    for part in (_data, _steps, _objective, _correction, _kl, _optimizer, _evaluation, _rewards, _workers):
        part(c)
    c.finish({"model.path": f"{MODEL}.path=NAME", "data.source": "data.train_files=FILE.parquet"})
    return c


def _data(c: Conversion) -> None:
    set_sources(c, "data.train_files", [local_path(file) for file in c.list("data.train_files")])
    overlong, truncation = c.truth("data.filter_overlong_prompts"), c.value("data.truncation")
    long = "drop" if overlong else "truncate" if truncation == "left" else "error"
    c.set("data.long_prompts", long, "data.filter_overlong_prompts data.truncation")
    if not overlong and truncation in ("right", "middle"):
        c.lacks("data.truncation", "questions are cut from the left (data.long_prompts=truncate), or dropped")
    dynamic, names = c.truth(f"{ACTOR}.use_dynamic_bsz"), "data.max_prompt_length data.max_response_length"
    row_tokens = c.count(f"{ACTOR}.ppo_max_token_len_per_gpu") if dynamic else 0
    set_lengths(c, c.count("data.max_prompt_length"), c.count("data.max_response_length"), names, row_tokens)


def _steps(c: Conversion) -> None:
    prompts, mini = c.count("data.train_batch_size"), c.count(f"{ACTOR}.ppo_mini_batch_size")
    if prompts % mini and mini < prompts:
        raise ValueError(
            f"data.train_batch_size={prompts} is no multiple of ppo_mini_batch_size={mini}: verl refuses that too"
        )
    updates = max(1, prompts // mini)
    c.set("objective.mini_batches", updates, f"data.train_batch_size {ACTOR}.ppo_mini_batch_size")
    if c.value("trainer.total_training_steps") is not None:
        c.set("run.steps", c.whole("trainer.total_training_steps"), "trainer.total_training_steps")
        c.value("trainer.total_epochs")
    else:
        c.set("run.epochs", c.number("trainer.total_epochs"), "trainer.total_epochs")
    if c.value("trainer.resume_mode") == "disable":
        c.set("run.resume", "never", "trainer.resume_mode")
    elif c.value("trainer.resume_mode") == "resume_path":
        c.lacks("trainer.resume_mode", OWN_CHECKPOINTS)


def _objective(c: Conversion) -> None:
    estimator, by_std = c.value("algorithm.adv_estimator"), "algorithm.norm_adv_by_std_in_grpo"
    if estimator not in ESTIMATORS:
        c.lacks("algorithm.adv_estimator", NO_CRITIC)
    advantage = ESTIMATORS.get(estimator, "std")
    advantage = "mean_only" if str(estimator).startswith("grpo") and not c.truth(by_std) else advantage
    c.set("objective.advantage", advantage, f"algorithm.adv_estimator {by_std}")
    mode, aggregation = c.value(f"{ACTOR}.policy_loss.loss_mode"), c.value(f"{ACTOR}.loss_agg_mode")
    if aggregation not in AGGREGATIONS:
        c.lacks(f"{ACTOR}.loss_agg_mode", "nearest: objective.loss=dapo")
    loss = mode if mode in ("gspo", "cispo") else AGGREGATIONS.get(aggregation, "dapo")
    if mode not in ("vanilla", "gspo", "cispo"):
        c.lacks(f"{ACTOR}.policy_loss.loss_mode", f"nearest: objective.loss={loss}")
    c.set("objective.loss", loss, f"{ACTOR}.policy_loss.loss_mode {ACTOR}.loss_agg_mode")
    _aggregation_notes(c, loss, aggregation)
    low = f"{ACTOR}.clip_ratio_low"
    if loss != "cispo":
        c.set("objective.clip_low", c.number(low), low)
    elif c.number(low) < 1:
        c.lacks(low, "objective.loss=cispo caps the ratio from above only")
    if mode == "vanilla":
        c.differs.append(
            "verl bounds the loss of A < 0 at clip_ratio_c |A|, here it is not bounded; the same with one update a step"
        )
    filtering = "algorithm.filter_groups"
    if c.truth(f"{filtering}.enable"):
        c.set("objective.dynamic_sampling", True, f"{filtering}.enable")
        rounds, most = c.whole(f"{filtering}.max_num_gen_batches"), f"{filtering}.max_num_gen_batches"
        c.set("objective.dynamic_sampling_rounds", rounds or 1000, most, "" if rounds else "no bound")
        if c.value(f"{filtering}.metric") not in ("reward", "score", "acc", "seq_reward", "seq_final_reward"):
            c.lacks(f"{filtering}.metric", "groups are dropped where all rewards are equal")


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
    scale = f"{ACTOR}.loss_scale_factor"
    if c.value(scale) is not None and loss == "dr_grpo" and c.whole(scale) != c.whole("data.max_response_length"):
        c.lacks(scale, "the constant is rollout.max_new_tokens")


def _correction(c: Conversion) -> None:
    """Weights for the engine's other arithmetic."""
    level, cap = c.value(f"{CORRECTION}.rollout_is"), f"{CORRECTION}.rollout_is_threshold"
    if level in ("token", "sequence"):
        c.set("objective.importance", f"{level}_tis", f"{CORRECTION}.rollout_is")
        c.set("objective.importance_cap", c.number(cap), cap)


def _kl(c: Conversion) -> None:
    name, kind = f"{ACTOR}.use_kl_loss", c.value(f"{ACTOR}.kl_loss_type")
    if not c.truth(name):
        c.set("objective.kl", "none", name)
        c.set("objective.kl_coef", 0.0, name)
    else:
        if kind not in KL_LOSSES:
            c.lacks(f"{ACTOR}.kl_loss_type", "nearest: objective.kl=k3")
        c.set("objective.kl", KL_LOSSES.get(kind, "k3"), f"{name} {ACTOR}.kl_loss_type")
        c.set("objective.kl_coef", c.number(f"{ACTOR}.kl_loss_coef"), f"{ACTOR}.kl_loss_coef")
        if str(kind).endswith("+"):
            c.differs.append(
                "objective.kl=k2 has the gradient of verl's straight-through estimators; what is logged as KL is d^2/2"
            )
    coefficient = c.number("algorithm.kl_ctrl.kl_coef")
    if c.truth("algorithm.use_kl_in_reward") and coefficient > 0:
        c.set("objective.kl_in_reward", True, "algorithm.use_kl_in_reward")
        c.set("objective.kl_reward_coef", coefficient, "algorithm.kl_ctrl.kl_coef")
        if c.value("algorithm.kl_penalty") not in ("kl", "k1"):
            c.lacks("algorithm.kl_penalty", "the reward's KL is log(policy / reference)")
        if c.value("algorithm.kl_ctrl.type") != "fixed":
            c.lacks("algorithm.kl_ctrl.type", "objective.kl_reward_coef stays as it is")


def _optimizer(c: Conversion) -> None:
    set_betas(c, f"{OPTIM}.betas")
    updates = c.ours("objective.mini_batches") * c.ours("objective.epochs")  # verl's schedule counts steps
    names = (f"{OPTIM}.lr_warmup_steps", f"{OPTIM}.lr_warmup_steps_ratio")
    steps, ratio = (c.checked(name, lambda value: number(value or 0)) for name in names)
    if steps > 0:
        why = "in updates" if updates > 1 else ""
        c.set("learner.warmup_steps", whole(steps) * updates, f"{OPTIM}.lr_warmup_steps", why)
    elif ratio > 0:
        c.set_warmup(ratio, f"{OPTIM}.lr_warmup_steps_ratio")
    if c.ours("learner.weight_decay") > 0:
        c.differs.append("weight decay is of matrices only here, of every parameter in verl")
    if c.ours("learner.lora_rank") > 0:
        c.set("learner.lora_alpha", c.number(f"{MODEL}.lora_alpha"), f"{MODEL}.lora_alpha")
        targets = [str(name) for name in c.list(f"{MODEL}.target_modules")]
        c.set("learner.lora_targets", targets, f"{MODEL}.target_modules")


def _evaluation(c: Conversion) -> None:
    files = [local_path(file) for file in c.list("data.val_files")]
    if not files:
        return c.set("data.eval_source", None, "data.val_files")
    if len(files) > 1:
        c.lacks("data.val_files", f"{', '.join(files[1:])} beside {files[0]}; data.eval_source is one: join them")
    count = max(0, c.whole("data.val_max_samples"))
    set_evaluations(c, files[0], every="trainer.test_freq", of="data.val_files", count=count)
    kwargs = f"{ROLLOUT}.val_kwargs"
    name = f"{kwargs}.temperature" if c.truth(f"{kwargs}.do_sample") else f"{kwargs}.do_sample"
    temperature = c.number(name) if name.endswith("temperature") else 0.0
    c.set("run.eval_temperature", temperature, name)
    for name in ("top_p", "top_k"):
        if temperature > 0 and c.value(f"{kwargs}.{name}") != c.value(f"{ROLLOUT}.{name}"):
            c.lacks(f"{kwargs}.{name}", f"evaluations sample with rollout.{name}")


def _rewards(c: Conversion) -> None:
    path, model = c.value(f"{CUSTOM}.path"), c.value("reward.reward_model.model_path")
    kwargs = dict(c.value(f"{CUSTOM}.reward_kwargs") or {})
    if c.truth("reward.reward_model.enable") and model:
        c.set("reward.functions", [reward_entry(f"model:{model}")], "reward.reward_model.model_path")
    elif path:
        entry = reward_entry(f"{local_path(path)}:{c.value(f'{CUSTOM}.name')}", **kwargs)
        names = f"{CUSTOM}.path {CUSTOM}.name" + (f" {CUSTOM}.reward_kwargs" if kwargs else "")
        c.set("reward.functions", [entry], names)
    else:
        why = "the rule of each row's data_source, as verl's default does"
        c.set("reward.functions", [reward_entry("data_source")], why=why)
        c.differs.append(
            "reward data_source scores with the rules gsm8k and math here: maths answers by math-verify, 1 or 0"
        )
    if c.truth(f"{OVERLONG}.enable"):
        c.set("objective.overlong_buffer_tokens", c.whole(f"{OVERLONG}.len"), f"{OVERLONG}.len")
        c.set("objective.overlong_penalty", c.number(f"{OVERLONG}.penalty_factor"), f"{OVERLONG}.penalty_factor")
    else:
        c.value(f"{OVERLONG}.len"), c.value(f"{OVERLONG}.penalty_factor")


def _workers(c: Conversion) -> None:
    gpus, in_reward = c.whole("trainer.n_gpus_per_node") * c.whole("trainer.nnodes"), c.ours("objective.kl_in_reward")
    place_colocated(c, gpus, "trainer.n_gpus_per_node trainer.nnodes", separate_reference=in_reward)
    if not in_reward and c.truth(f"{ACTOR}.use_kl_loss"):
        offload = f"{REF}.fsdp_config.param_offload"
        c.set("reference.placement", "learner", f"{ACTOR}.use_kl_loss", "beside the policy, as in verl")
        c.set("reference.offload", c.truth(offload), offload)
    finish_places(c, [str(name) for name in c.list("trainer.logger")], "trainer.logger")

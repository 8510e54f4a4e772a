"""verl's settings into ours: main_ppo of 0.9.1, from a shell script with key=value overrides or a Hydra YAML file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.conversion import NO_CRITIC, STEADY_KL, Conversion, Row
from infsample_rl.commands.convert.recording import flatten, read_yaml, words_of
from infsample_rl.commands.convert.values import (
    choose,
    local_path,
    local_paths,
    not_negative,
    only,
    positive,
    texts,
    truth,
)
from infsample_rl.config import ALL_PROBLEMS
from infsample_rl.config.peer_flags import read_flags, scalar

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM, MODE, VAL = f"{ACTOR}.optim", f"{ACTOR}.policy_loss.loss_mode", f"{ROLLOUT}.val_kwargs"
CUSTOM, OVERLONG = "custom_reward_function", "reward_kwargs.overlong_buffer_cfg"
USE_KL, BY_STD, RM_ON = f"{ACTOR}.use_kl_loss", "algorithm.norm_adv_by_std_in_grpo", "reward_model.enable"
KL_REWARD, CTRL = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*([\w.]+)\s*(?:,([^${}]*))?\}")  # of OmegaConf
TRAINING = r"verl\.trainer\.main_|recipe\.|main_(ppo|dapo)\.py"
OLD_NAMES = {"reward.": "", "reward_model.reward_kwargs": "reward_kwargs", "reward_model.overlong_buffer": OVERLONG}
DICTS = ("data.apply_chat_template_kwargs", f"{CUSTOM}.reward_kwargs", f"reward.{CUSTOM}.reward_kwargs")
ESTIMATORS = {"grpo": None, "grpo_vectorized": None, "rloo": "rloo", "rloo_vectorized": "rloo"}
KL_LOSSES = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
AGGREGATIONS = {"token-mean": "dapo", "seq-mean-token-mean": "grpo", "seq-mean-token-sum-norm": "dr_grpo"}
MODES = {"vanilla": None, "gspo": "gspo", "cispo": "cispo"}  # these have an aggregation of their own
MANAGERS = ("naive", "dapo", "batch", "prime", "rate_limited", "remote")  # a function's scores as they are
OWN_MANAGER = "a reward manager is not run; give what it computes as a function of reward.functions"

ROWS = (
    Row("trainer.experiment_name", "run.name", str, "gsm8k"),
    Row("trainer.project_name", "logging.wandb_project", str),
    Row("trainer.default_local_dir", "run.dir", local_path),
    Row("trainer.save_freq", "run.checkpoint_every", not_negative, -1),
    Row("trainer.total_training_steps", "run.steps", positive),
    Row("trainer.total_epochs", "run.epochs", float, 30),
    Row("data.shuffle", "data.shuffle", truth),
    Row("data.prompt_key", "data.prompt_field", str, "prompt"),
    Row("data.train_batch_size", "data.prompts_per_step", positive, 1024),
    Row("data.apply_chat_template_kwargs", "data.chat_template_kwargs", dict),
    Row("data.truncation", "data.long_prompts", choose({"left": "truncate", "error": "error"}, "left only"), "error"),
    Row("data.filter_overlong_prompts", "data.long_prompts", lambda on: "drop" if truth(on) else None),
    Row("data.val_max_samples", "run.eval_prompts", lambda n: n if n > 0 else ALL_PROBLEMS, -1, "data.val_files"),
    Row("trainer.test_freq", "run.eval_every", not_negative, -1, "data.val_files"),
    Row(f"{VAL}.n", "run.eval_samples", int, 1, "data.val_files"),
    Row(f"{VAL}.do_sample", "run.eval_temperature", lambda on: None if truth(on) else 0.0, False, "data.val_files"),
    Row(f"{VAL}.temperature", "run.eval_temperature", float, 0, f"{VAL}.do_sample"),
    Row(f"{MODEL}.path", "model.path", local_path),
    Row(f"{MODEL}.trust_remote_code", "model.trust_remote_code", truth),
    Row(f"{MODEL}.enable_gradient_checkpointing", "learner.activation_checkpointing", lambda on: int(truth(on)), True),
    Row(f"{MODEL}.lora_rank", "learner.lora_rank", int, 0),
    Row(f"{MODEL}.lora_alpha", "learner.lora_alpha", float, 16, f"{MODEL}.lora_rank"),
    Row(f"{MODEL}.target_modules", "learner.lora_targets", texts, "all-linear", f"{MODEL}.lora_rank"),
    Row("reward_model.model_path", "reward.functions", lambda path: [{"name": f"model:{path}"}], when=RM_ON),
    Row("reward_model.model.path", "reward.functions", lambda path: [{"name": f"model:{path}"}], when=RM_ON),
    Row("reward_manager.name", "", only(*MANAGERS, why=OWN_MANAGER)),
    Row("reward_model.reward_manager", "", only(*MANAGERS, why=OWN_MANAGER)),
    Row(f"{ROLLOUT}.n", "rollout.group_size", int, 1),
    Row(f"{ROLLOUT}.temperature", "rollout.temperature", float, 1.0),
    Row(f"{ROLLOUT}.top_p", "rollout.top_p", float, 1.0),
    Row(f"{ROLLOUT}.top_k", "rollout.top_k", not_negative, -1),
    Row(f"{ACTOR}.ppo_epochs", "objective.epochs", int, 1),
    Row(f"{ACTOR}.loss_agg_mode", "objective.loss", choose(AGGREGATIONS, "no such loss"), "token-mean"),
    Row(MODE, "objective.loss", choose(MODES, "no such loss"), "vanilla"),
    Row(BY_STD, "objective.advantage", lambda on: "std" if truth(on) else "mean_only", True),
    Row("algorithm.adv_estimator", "objective.advantage", choose(ESTIMATORS, NO_CRITIC), "gae"),
    Row("algorithm.filter_groups.enable", "objective.dynamic_sampling", truth),
    Row(f"{ACTOR}.entropy_coeff", "objective.entropy_coef", float, 0),
    Row(f"{ACTOR}.clip_ratio_low", "objective.clip_low", float, 0.2),
    Row(f"{ACTOR}.clip_ratio_high", "objective.clip_high", float, 0.2),
    Row(USE_KL, "objective.kl_coef", lambda on: None if truth(on) else 0.0, False),
    Row(f"{ACTOR}.kl_loss_type", "objective.kl", choose(KL_LOSSES, "no such estimator"), "low_var_kl", USE_KL),
    Row(f"{ACTOR}.kl_loss_coef", "objective.kl_coef", float, 0.001, USE_KL),
    Row("algorithm.kl_penalty", "", only("kl", "k1", why="a KL in the reward is k1"), when=KL_REWARD),
    Row(f"{CTRL}.kl_coef", "objective.kl_reward_coef", float, 0.001, KL_REWARD),
    Row(f"{CTRL}.type", "", only("fixed", why=STEADY_KL), when=KL_REWARD),
    Row(f"{CTRL}.target_kl", "", only(why=STEADY_KL), when=f"{KL_REWARD} {CTRL}.type=adaptive"),
    Row(f"{CTRL}.horizon", "", only(why=STEADY_KL), when=f"{KL_REWARD} {CTRL}.type=adaptive"),
    Row(f"{OVERLONG}.len", "objective.overlong_buffer_tokens", int, when=f"{OVERLONG}.enable"),
    Row(f"{OVERLONG}.penalty_factor", "objective.overlong_penalty", float, 1.0, f"{OVERLONG}.enable"),
    Row(f"{ACTOR}.fsdp_config.dtype", "model.dtype", str, "bfloat16"),
    Row(f"{ACTOR}.grad_clip", "learner.max_grad_norm", float, 1.0),
    Row(f"{OPTIM}.lr", "learner.lr", float, 1e-6),
    Row(f"{OPTIM}.betas", "learner.beta1", lambda betas: float(betas[0])),
    Row(f"{OPTIM}.betas", "learner.beta2", lambda betas: float(betas[1])),
    Row(f"{OPTIM}.min_lr_ratio", "learner.min_lr_ratio", float),
    Row(f"{OPTIM}.lr_scheduler_type", "learner.lr_schedule", str, "constant"),
    Row(f"{OPTIM}.weight_decay", "learner.weight_decay", float, 0.01),
)
WITHOUT_EFFECT = (
    f"{ROLLOUT}.*_utilization {ROLLOUT}.*parallel_size {ROLLOUT}.name {ROLLOUT}.mode {ROLLOUT}.*eager {ROLLOUT}.free* "
    f"{ROLLOUT}.max_* {ROLLOUT}.load_format {ROLLOUT}.*_prefill {ROLLOUT}.layered_summon *.fsdp_config.* *profiler* "
    f"{MODEL}.use_* {ACTOR}.checkpoint.* {ACTOR}.clip_ratio {ACTOR}.clip_ratio_c {OVERLONG}.log critic.* "
    "*ulysses_sequence_parallel_size *micro_batch_size* *token_len_per_gpu *dynamic_bsz *torch_compile *_workers "
    "trainer.critic_warmup trainer.val_before_train trainer.balance_batch trainer.device ray_* data.return_raw_chat "
    "hydra* defaults* reward_kwargs.max_resp_len"
)


def convert(path: Path, arguments: list[str]) -> Conversion:
    """All settings; ValueError for what is no file of verl's, and for what is missing."""
    given, unresolved = _read(path, arguments)
    c = Conversion(given, "verl 0.9.1", ROWS, WITHOUT_EFFECT)
    left = {name: value for name, value in unresolved.items() if not c.has_no_effect(name)}
    c.dropped += [f"{name}={value}: nothing says what it stands for" for name, value in left.items()]
    files, held_out = (c.value(f"data.{name}_files", local_paths) for name in ("train", "val"))
    c.set_sources(files, "data.train_files", held_out, "data.val_files")
    lengths = ("data.max_prompt_length", "data.max_response_length")
    c.set_lengths(c.value(lengths[0], positive, 512), c.value(lengths[1], positive, 512), " ".join(lengths))
    if not c.is_off(f"{OVERLONG}.enable") and c.value("reward_kwargs.max_resp_len") not in (None, c.value(lengths[1])):
        c.drop("reward_kwargs.max_resp_len", "the buffer ends where responses do, at rollout.max_new_tokens")
    prompts, mini = c.value("data.train_batch_size", positive), c.value(f"{ACTOR}.ppo_mini_batch_size", positive, 256)
    c.set("objective.mini_batches", max(1, prompts // mini), f"data.train_batch_size {ACTOR}.ppo_mini_batch_size")
    if "run.steps" in c.settings:
        c.settings.pop("run.epochs")
    updates = c.ours("objective.mini_batches") * c.ours("objective.epochs")  # verl's schedule counts steps
    c.set_warmup(f"{OPTIM}.lr_warmup_steps_ratio")
    c.set_warmup(f"{OPTIM}.lr_warmup_steps", updates)
    if c.value(f"{CUSTOM}.path"):
        kwargs = c.value(f"{CUSTOM}.reward_kwargs", lambda value: dict(value or {}))
        name = f"{c.value(f'{CUSTOM}.path', local_path)}:{c.value(f'{CUSTOM}.name', str, 'compute_score')}"
        c.set("reward.functions", [{"name": name, "kwargs": kwargs}], f"{CUSTOM}.path {CUSTOM}.name")
    elif "reward.functions" not in c.settings:
        c.set("reward.functions", [{"name": "data_source"}], why="the rule of each row's data_source")
    gpus = c.value("trainer.n_gpus_per_node", positive, 8) * c.value("trainer.nnodes", positive, 1)
    c.place(gpus, "trainer.n_gpus_per_node trainer.nnodes")
    return c.finish(c.value("trainer.logger", texts, ["wandb"]), "trainer.logger")


def _read(path: Path, arguments: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings by their names, and those that refer to what is neither in the file nor in an argument."""
    words = [] if path.suffix in (".yaml", ".yml") else words_of(path, arguments, TRAINING)
    content = _named_file(words) if words else read_yaml(path)
    for word in [*words, *arguments]:
        name, equals, value = word.lstrip("+~").partition("=")
        if equals and not name.startswith(("-", "/")):
            *parents, last = name.split(".")
            inner = content
            for parent in parents:
                inner[parent] = inner.get(parent) or {}
                inner = inner[parent]
            inner[last] = scalar(value)
    leaves = dict(flatten(content, DICTS))
    given: dict[str, Any] = {}
    for name, value in sorted(leaves.items(), key=lambda leaf: not leaf[0].startswith("reward.")):
        for old, new in OLD_NAMES.items():
            name = new + name.removeprefix(old) if name.startswith(old) else name
        if value is not None or name not in given:  # a whole file has both names; verl takes the old one unless null
            given[name] = _resolve(value, leaves)
    unresolved = {name: value for name, value in given.items() if "${" in str(value)}
    return {name: value for name, value in given.items() if name not in unresolved}, unresolved


def _named_file(words: list[str]) -> dict[str, Any]:
    """What the file holds that a command names for Hydra; the name itself, which no setting stands for, where the file
    is not here."""
    flags = read_flags(words)
    folder, name = ([*texts(flags.get(flag)), ""][0] for flag in ("config-path", "config-name"))
    file = Path(words[0], folder, f"{name.removesuffix('.yaml')}.yaml")
    return read_yaml(file) if file.is_file() else {"config-name": name} if name else {}


def _resolve(value: Any, leaves: dict[str, Any]) -> Any:
    """A value with what `${a.b}` and `${oc.select:a.b,default}` stand for; as it is where that is not among these."""
    if isinstance(value, list):
        return [_resolve(item, leaves) for item in value]
    if isinstance(value, dict):
        return {key: _resolve(item, leaves) for key, item in value.items()}
    for _ in range(16):  # one that refers to itself ends too
        found = REFERENCE.search(value) if isinstance(value, str) else None
        if found is None or (found[1] not in leaves and found[2] is None):
            break
        stands_for = leaves[found[1]] if found[1] in leaves else scalar(found[2].strip())
        value = stands_for if found[0] == value else value.replace(found[0], str(stands_for))
    return value

"""OpenRLHF's flags into ours: openrlhf.cli.train_ppo_ray of 0.11.2, and the flags of 0.8 by their old names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from infsample_rl.commands.convert.common import (
    DRAWN_AT_RANDOM,
    ENGINE,
    LOGGED,
    MICRO_BATCH,
    NO_CRITIC,
    NO_DROPOUT,
    SCHEDULES,
    SHARDED,
    WHOLE_ENGINE,
    finish_places,
    place_apart,
    place_colocated,
    reward_entry,
    set_betas,
    set_evaluations,
    set_lengths,
    set_sources,
)
from infsample_rl.commands.convert.conversion import Conversion, Given, Peer, Row
from infsample_rl.commands.convert.recording import commands_of, given_of
from infsample_rl.commands.convert.values import choose, local_path, not_negative, number, read_flags, truth, whole

CORRECTION = "algo.advantage.is_correction"
ADVANTAGES = {"group_norm": "std", "dr_grpo": "mean_only", "rloo": "rloo", "reinforce_baseline": "mean_only"}

ROWS = (
    Row("logger.wandb.run_name", "run.name", str),
    Row("ckpt.output_dir", "run.dir", local_path, "./ckpt"),
    Row("train.seed", "run.seed", whole, 42),
    Row("train.num_episodes", "run.epochs", number, 1),
    Row("ckpt.save_steps", "run.checkpoint_every", not_negative, -1),
    Row("ckpt.max_num", "run.keep_checkpoints", whole, 3),
    Row("actor.model_name_or_path", "model.path", local_path),
    Row("ds.param_dtype", "model.dtype", choose({"bf16": "bfloat16", "fp16": "float16"}, "take model.dtype"), "bf16"),
    Row("data.prompt_split", "data.split", str, "train"),
    Row("data.input_key", "data.prompt_field", str, "input"),
    Row("data.label_key", "data.answer_field", str),
    Row("data.apply_chat_template", "data.apply_chat_template", truth, False),
    Row("rollout.batch_size", "data.prompts_per_step", whole, 1024),
    Row("rollout.n_samples_per_prompt", "rollout.group_size", whole, 1),
    Row("rollout.temperature", "rollout.temperature", number, 1.0),
    Row("rollout.top_p", "rollout.top_p", number, 1.0),
    Row("train.max_epochs", "objective.epochs", whole, 1),
    Row("actor.entropy_coef", "objective.entropy_coef", number),
    Row("actor.optim", "learner.optimizer", choose({"adam": "adamw"}, "learner.optimizer=adamw or adamw_8bit"), "adam"),
    Row("actor.adam.lr", "learner.lr", number, 1e-6),
    Row("actor.adam.eps", "learner.adam_epsilon", number, 1e-8),
    Row("actor.adam.weight_decay", "learner.weight_decay", number, 0.0),
    Row(
        "actor.lr_scheduler",
        "learner.lr_schedule",
        choose(SCHEDULES, "constant, linear or cosine"),
        "cosine_with_min_lr",
    ),
    Row("actor.max_norm", "learner.max_grad_norm", number, 1.0),
    Row("actor.gradient_checkpointing_enable", "learner.activation_checkpointing", lambda on: int(truth(on)), False),
    Row("ds.adam_offload", "learner.offload_optimizer", truth, False),
    Row("ds.zero_stage", "learner.zero_stage", lambda stage: max(1, whole(stage)), 2),
    Row("ds.lora.rank", "learner.lora_rank", whole, 0),
    Row("logger.wandb.project", "logging.wandb_project", str, "openrlhf_train_ppo"),
)
DEFAULTS = {
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 8,
    "ref.num_nodes": 1,
    "ref.num_gpus_per_node": 8,
    "vllm.tensor_parallel_size": 1,
    "vllm.num_engines": 1,
    "train.batch_size": 128,
    "train.max_tokens_per_gpu": 16192,
    "data.max_len": 2048,
    "eval.split": "train",
    "eval.steps": -1,
    "eval.temperature": 0.6,
    "eval.n_samples_per_prompt": 4,
    "actor.adam.betas": [0.9, 0.95],
    "actor.lr_warmup_ratio": 0.03,
    "actor.min_lr_ratio": 0.1,
    "actor.eps_clip": 0.2,
    "actor.policy_loss_type": "ppo",
    "actor.loss_agg_mode": "token-mean",
    "algo.advantage.estimator": "gae",
    f"{CORRECTION}_level": "off",
    f"{CORRECTION}_mode": "mask",
    f"{CORRECTION}_threshold": [0.5, 5.0],
    "algo.kl.init_coef": 0.01,
    "algo.kl.estimator": "k1",
    "reward.overlong_penalty_factor": 1,
    "reward.clip_range": [-10, 10],
    "ds.lora.alpha": 16,
    "ds.lora.target_modules": "all-linear",
}
REFUSED = {
    "data.prompt_probs": (None, "join the data sets into one file in the shares you want"),
    "data.max_samples": (100_000_000, "cut the file, or set run.steps"),
    "train.agent_func_path": (None, "one turn; write its reward as reward_func(queries, prompts, labels)"),
    "algo.kl.target": (None, "objective.kl_coef stays as it is"),
    "actor.dual_clip": (None, "the loss of A < 0 is not bounded; the same with one update a step"),
    "actor.aux_loss_coef": (0, "policies are dense models"),
    "reward.normalize_enable": (False, "rewards are as the function gives them; advantages are normalised by group"),
    "reward.stop_properly_penalty_coef": (None, "objective.overlong_buffer_tokens punishes long responses instead"),
    "reward.clip_range": ([[-10, 10]], "clip in the reward function"),
    "train.enable_ema": (False, "no average of the weights is kept"),
    "ds.load_in_4bit": (False, "weights are model.dtype"),
    "ds.lora.dropout": (0, NO_DROPOUT),
    "data.max_images_per_prompt": (0, "text only"),
    "vllm.tensor_parallel_size": (1, WHOLE_ENGINE),
}
IGNORED = {
    "GRPO has no critic": "critic.* train.colocate_critic_reward",
    MICRO_BATCH: "*micro_batch_size *max_tokens_per_gpu train.dynamic_batch_enable",
    ENGINE: "vllm.* vllm_* enforce_eager enable_prefix_caching rollout.vllm_generate_batch_size",
    SHARDED: "ds.* local_rank",
    LOGGED: "logger.logging_steps",
    "rows are always packed": "ds.packing_samples",
    "attention over packed rows is chosen by device": "ds.attn_implementation",
    "memory only": "ds.enable_sleep deepspeed_enable_sleep reward.offload ref_reward_offload",
    "only with lora.rank > 0": "ds.lora.*",
    "model.dtype=bfloat16 with float32 masters": "bf16",
    "how activations are recomputed": "actor.gradient_checkpointing_reentrant",
    "only with another optimizer or schedule": "actor.min_lr_ratio actor.muon.*",
    "checkpoints are Hugging Face folders, and a run goes on where it stopped": "ckpt.*",
    "W&B reads its key from WANDB_API_KEY": "logger.wandb.*",
    "a response has one advantage": "algo.advantage.gamma algo.advantage.lambd",
    "only with is_correction_level": f"{CORRECTION}_*",
    "only with algo.kl.init_coef > 0": "algo.kl.*",
    "only with dynamic_filtering_enable": "algo.dynamic_filtering_range",
    "one step ahead at most": "train.async_queue_size",
    "weights change between steps only": "train.partial_rollout_enable",
    "run.deterministic, on CPUs": "train.full_determinism_enable",
    "only with enable_ema": "train.ema_beta",
    "cluster.reward_workers and reward_gpus": "reward.num_*",
    "only with overlong_buffer_len": "reward.overlong_penalty_factor",
    "the reference is beside the policy": "ref.num_*",
    "reference.offload": "ref.offload",
    "only with eval.dataset": "eval.*",
    "tokenizers are the fast ones": "data.disable_fast_tokenizer",
    "prompts are read once, at the start": "data.dataloader_num_workers",
    "text only": "data.image_key",
    "models come from the Hugging Face hub or a folder": "use_ms",
    "cluster.address; launch/submit.sh submits a Ray job": "address runtime-env-json working-dir",
}
PEER = Peer("OpenRLHF 0.11.2", ROWS, DEFAULTS, REFUSED, IGNORED)
# Flags of 0.8 and 0.9 whose names are not the end of today's, with _ for its dots.
ALIASES = {
    "pretrain": "actor.model_name_or_path",
    "reward_pretrain": "reward.model_name_or_path",
    "critic_pretrain": "critic.model_name_or_path",
    "remote_rm_url": "reward.remote_url",
    "save_path": "ckpt.output_dir",
    "max_ckpt_num": "ckpt.max_num",
    "save_hf_ckpt": "ckpt.save_hf",
    "load_checkpoint": "ckpt.load_enable",
    "disable_ds_ckpt": "ckpt.disable_ds",
    "micro_train_batch_size": "train.micro_batch_size",
    "micro_rollout_batch_size": "rollout.micro_batch_size",
    "n_samples_per_prompt": "rollout.n_samples_per_prompt",
    "generate_max_len": "rollout.max_new_tokens",
    "flash_attn": "ds.attn_implementation",
    "actor_learning_rate": "actor.adam.lr",
    "critic_learning_rate": "critic.adam.lr",
    "adam_betas": "actor.adam.betas",
    "l2": "actor.adam.weight_decay",
    "entropy_loss_coef": "actor.entropy_coef",
    "gradient_checkpointing": "actor.gradient_checkpointing_enable",
    "init_kl_coef": "algo.kl.init_coef",
    "use_kl_loss": "algo.kl.use_loss",
    "no_advantage_std_norm": "algo.advantage.no_std_norm",
    "enable_vllm_is_correction": f"{CORRECTION}_enable",
    "dynamic_filtering": "algo.dynamic_filtering_enable",
    "dynamic_filtering_reward_range": "algo.dynamic_filtering_range",
    "normalize_reward": "reward.normalize_enable",
    "reward_clip_range": "reward.clip_range",
    "prompt_data": "data.prompt_dataset",
    "prompt_data_probs": "data.prompt_probs",
    "temperature": "rollout.temperature",
    "async_train": "train.async_enable",
    "colocate_all_models": "train.colocate_all",
    "use_wandb": "logger.wandb.key",
    "use_tensorboard": "logger.tensorboard_dir",
    "use_dynamic_batch": "train.dynamic_batch_enable",
    "train_max_tokens_per_gpu": "train.max_tokens_per_gpu",
}
READ = (  # today's names that stand in no table
    "data.prompt_dataset data.input_template data.prompt_max_len rollout.max_new_tokens eval.dataset "
    "actor.eps_clip_low_high reward.remote_url reward.model_name_or_path reward.overlong_buffer_len algo.kl.use_loss "
    "train.colocate_actor_ref ckpt.path ds.packing_samples ds.attn_implementation algo.advantage.gamma algo.advantage.lambd "
    "reward.num_nodes reward.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node"
).split()


def read(path: Path, arguments: list[str]) -> dict[str, Given]:
    """Settings by OpenRLHF's names of today. ValueError for what is no script of OpenRLHF's."""
    words = commands_of(path, arguments, r"openrlhf\.cli\.train_ppo", "openrlhf.cli.train_ppo_ray")[-1].words
    start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli.train_ppo"))
    today = [*(row.theirs for row in ROWS), *DEFAULTS, *REFUSED, *READ]
    ends = Counter(end for name in today for end in _ends(name))
    old = {end: name for name in today for end in _ends(name) if ends[end] == 1} | ALIASES
    return given_of(path, read_flags(words[start + 1 :]), read_flags(arguments), lambda name: old.get(name, name))


def _ends(name: str) -> list[str]:
    """What an older flag may be called: algo.kl.estimator -> algo_kl_estimator, kl_estimator, estimator."""
    parts = name.split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]


def convert(given: dict[str, Given]) -> Conversion:
    """All settings; ValueError for what is missing."""
    c = Conversion(given, PEER)
    c.apply_tables()
    for part in (_data, _steps, _objective, _importance, _kl, _optimizer, _rewards, _workers):
        part(c)
    c.finish(
        {
            "model.path": "--actor.model_name_or_path NAME",
            "data.source": "--data.prompt_dataset NAME",
            "reward.functions": "--reward.remote_url path/to/file.py",
        }
    )
    return c


def _data(c: Conversion) -> None:
    sources = str(c.value("data.prompt_dataset") or "").split(",")
    set_sources(c, "data.prompt_dataset", [local_path(source) for source in sources if source])
    if c.value("data.input_template") is not None and not c.truth("data.apply_chat_template"):
        c.lacks("data.input_template", "write the template into the data, or set data.instruction")
    longest = c.count("data.max_len")
    new, prompt = (
        None if c.value(name) is None else c.count(name) for name in ("rollout.max_new_tokens", "data.prompt_max_len")
    )
    lengths = ("data.max_len", "data.prompt_max_len", "rollout.max_new_tokens")
    names = " ".join(name for name in lengths if name in c.given) or "data.max_len"
    if prompt is None:
        prompt = longest - new if new is not None else longest // 2
    if new is None:
        new = max(1, longest - prompt)
        c.differs.append(
            f"a response may fill data.max_len behind its prompt in OpenRLHF; here prompt and response have {prompt} "
            f"and {new} tokens"
        )
    c.set("data.long_prompts", "truncate", names, "OpenRLHF cuts long prompts from the left")
    dynamic = c.truth("train.dynamic_batch_enable")
    set_lengths(c, prompt, new, names, c.count("train.max_tokens_per_gpu") if dynamic else 0)
    if c.value("eval.dataset") is None:
        return c.set("data.eval_source", None, "eval.dataset")
    set_evaluations(c, local_path(c.value("eval.dataset")), every="eval.steps", of="eval.dataset")
    c.set("data.eval_split", str(c.value("eval.split")), "eval.split")
    c.set("run.eval_samples", c.whole("eval.n_samples_per_prompt"), "eval.n_samples_per_prompt")
    c.set("run.eval_temperature", c.number("eval.temperature"), "eval.temperature")


def _steps(c: Conversion) -> None:
    prompts, batch = c.count("rollout.batch_size"), c.count("train.batch_size")
    responses = prompts * c.count("rollout.n_samples_per_prompt")
    updates = max(1, responses // batch)
    if responses % batch:
        c.differs.append(
            f"{responses} responses in updates of {batch}: the last is smaller in OpenRLHF; here {updates} share them"
        )
    if updates > prompts:
        c.lacks("train.batch_size", f"{updates} updates from {prompts} prompts; here an update has whole groups")
        updates = prompts
    c.set("objective.mini_batches", updates, "rollout.batch_size rollout.n_samples_per_prompt train.batch_size")
    if updates > 1:
        c.differs.append(f"{DRAWN_AT_RANDOM}OpenRLHF")
    if c.truth("train.async_enable"):
        c.set("run.max_staleness", 1, "train.async_enable")


def _objective(c: Conversion) -> None:
    estimator = c.value("algo.advantage.estimator")
    if estimator not in ADVANTAGES:
        c.lacks("algo.advantage.estimator", NO_CRITIC)
    c.set("objective.advantage", ADVANTAGES.get(estimator, "std"), "algo.advantage.estimator")
    if not c.truth("algo.advantage.no_std_norm") and estimator == "reinforce_baseline":
        c.lacks("algo.advantage.no_std_norm", "advantages are not divided by the batch's standard deviation")
    by_token = c.value("actor.loss_agg_mode") == "token-mean"
    loss = "gspo" if c.value("actor.policy_loss_type") == "gspo" else "dapo" if by_token else "grpo"
    c.set("objective.loss", loss, "actor.policy_loss_type actor.loss_agg_mode")
    name = c.first_given("actor.eps_clip_low_high", "actor.eps_clip")
    both = c.value("actor.eps_clip_low_high") is not None
    low, high = c.checked(name, lambda value: [number(value[i]) if both else number(value) for i in (0, 1)])
    c.set("objective.clip_low", low, name)
    c.set("objective.clip_high", high, name)
    if c.truth("algo.dynamic_filtering_enable"):
        c.set("objective.dynamic_sampling", True, "algo.dynamic_filtering_enable")
        c.set("objective.dynamic_sampling_rounds", 1000, "algo.dynamic_filtering_enable", "no bound in OpenRLHF")
        c.value("algo.dynamic_filtering_range")
        c.differs.append(
            "groups are dropped where all rewards are equal; OpenRLHF drops those whose mean score is outside "
            "dynamic_filtering_range"
        )


def _importance(c: Conversion) -> None:
    """Weights for vLLM's other arithmetic; older versions spell level and mode as one type."""
    level, mode = str(c.value(f"{CORRECTION}_level")), str(c.value(f"{CORRECTION}_mode"))
    if c.truth(f"{CORRECTION}_enable"):
        kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask")}
        level, mode = kinds.get(str(c.value(f"{CORRECTION}_type") or "tis"), ("seq", "mask"))
    if level in ("off", "False"):
        return
    names = " ".join(name for name in c.given if name.startswith(CORRECTION))
    c.set("objective.importance", "token_tis", names)
    c.set("objective.importance_cap", number(c.list(f"{CORRECTION}_threshold")[-1]), names)
    if (level, mode) != ("token", "clip") or len(c.list(f"{CORRECTION}_threshold")) > 1:
        c.differs.append(
            "importance weights are capped from above (token_tis); OpenRLHF also bounds them below, or drops what is "
            "outside"
        )


def _kl(c: Conversion) -> None:
    coefficient, in_loss = c.number("algo.kl.init_coef"), c.truth("algo.kl.use_loss")
    if coefficient > 0 and in_loss:
        kind = "k2" if c.truth("algo.kl.unbiased_gradient") else str(c.value("algo.kl.estimator"))
        c.set("objective.kl", kind, "algo.kl.estimator algo.kl.use_loss algo.kl.unbiased_gradient")
        c.set("objective.kl_coef", coefficient, "algo.kl.init_coef")
        return
    c.set("objective.kl", "none", "algo.kl.use_loss")
    c.set("objective.kl_coef", 0.0, "algo.kl.init_coef")
    if coefficient > 0:
        c.set("objective.kl_in_reward", True, "algo.kl.init_coef")
        c.set("objective.kl_reward_coef", coefficient, "algo.kl.init_coef")
        c.differs.append(
            "the KL of a whole response is in its reward, before advantages; OpenRLHF takes a token's KL off the "
            "advantages up to it"
        )


def _optimizer(c: Conversion) -> None:
    set_betas(c, "actor.adam.betas")
    if c.value("actor.lr_scheduler") != "constant":
        c.set_warmup(c.number("actor.lr_warmup_ratio"), "actor.lr_warmup_ratio")
    elif "actor.lr_warmup_ratio" in c.given:
        why = "actor.lr_scheduler=constant has no warm-up in transformers; learner.warmup_steps if it is wanted"
        c.lacks("actor.lr_warmup_ratio", why)
    if c.value("actor.lr_scheduler") == "cosine_with_min_lr":
        c.set("learner.min_lr_ratio", c.number("actor.min_lr_ratio"), "actor.min_lr_ratio", "cosine_with_min_lr")
    if c.ours("learner.lora_rank") > 0:
        c.set("learner.lora_alpha", c.number("ds.lora.alpha"), "ds.lora.alpha")
        c.set("learner.lora_targets", [str(x) for x in c.list("ds.lora.target_modules")], "ds.lora.target_modules")


def _rewards(c: Conversion) -> None:
    entries = []
    for place in str(c.value("reward.remote_url") or "").split(","):
        if place.endswith(".py"):
            entries.append(reward_entry(f"{local_path(place)}:reward_func"))
        elif place:
            why = f"{place} is a server: ask it in a reward function of your own (SECURITY.md: the network)"
            c.lacks("reward.remote_url", why)
    for place in str(c.value("reward.model_name_or_path") or "").split(","):
        if place and not entries:
            entries.append(reward_entry(f"model:{local_path(place)}"))
    if entries:
        names = ("reward.remote_url", "reward.model_name_or_path")
        c.set("reward.functions", entries, " ".join(name for name in names if name in c.given))
    buffer, penalty = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    if c.value(buffer) is not None:
        c.set("objective.overlong_buffer_tokens", c.whole(buffer), buffer)
        c.set("objective.overlong_penalty", c.number(penalty), penalty)
    if c.list("reward.clip_range") == [-10, 10]:
        c.differs.append("OpenRLHF clips rewards to [-10, 10]; here they are as the function gives them")


def _workers(c: Conversion) -> None:
    names = "actor.num_nodes actor.num_gpus_per_node"
    actors = c.whole("actor.num_nodes") * c.whole("actor.num_gpus_per_node")
    in_reward, with_kl = c.ours("objective.kl_in_reward"), c.number("algo.kl.init_coef") > 0
    if c.truth("train.colocate_all") and not c.truth("train.async_enable"):
        place_colocated(c, actors, f"train.colocate_all {names}", separate_reference=in_reward)
        beside = True
    else:
        engines = c.whole("vllm.num_engines") * c.whole("vllm.tensor_parallel_size")
        beside = c.truth("train.colocate_actor_ref") and not in_reward
        references = c.whole("ref.num_nodes") * c.whole("ref.num_gpus_per_node")
        apart = references if with_kl and not beside else 0
        place_apart(c, engines, actors, apart, f"{names} vllm.num_engines vllm.tensor_parallel_size")
    if with_kl and beside and not in_reward:
        c.set("reference.placement", "learner", "algo.kl.use_loss", "beside the policy")
        c.set("reference.offload", c.truth("ref.offload"), "ref.offload")
    c.set("learner.backend", "deepspeed", "ds.zero_stage")
    loggers = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    finish_places(c, [name for key, name in loggers.items() if c.value(key)], "logger.wandb.key")

"""OpenRLHF's flags into ours: openrlhf.cli.train_ppo_ray of 0.11.2."""

from __future__ import annotations

from pathlib import Path

from infsample_rl.commands.convert.conversion import NO_CRITIC, NO_DROPOUT, SCHEDULES, STEADY_KL, Conversion, Row
from infsample_rl.commands.convert.recording import words_of
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
from infsample_rl.config.peer_flags import read_flags

TRAINING = r"openrlhf\.cli\.train_ppo"
ADVANTAGES = {"group_norm": "std", "dr_grpo": "mean_only", "rloo": "rloo"}
LOSSES = {"ppo": None, "gspo": "gspo"}
KL = "algo.kl.init_coef"


def _functions(urls: str) -> list[dict[str, str]]:
    """Reward functions in files; none where one is a server."""
    files = local_paths(urls)
    return [{"name": f"{file}:reward_func"} for file in files if all(file.endswith(".py") for file in files)]


ROWS = (
    Row("logger.wandb.run_name", "run.name", str),
    Row("logger.wandb.project", "logging.wandb_project", str),
    Row("ckpt.output_dir", "run.dir", local_path, "./ckpt"),
    Row("ckpt.save_steps", "run.checkpoint_every", not_negative, -1),
    Row("train.seed", "run.seed", int, 42),
    Row("train.num_episodes", "run.epochs", float, 1),
    Row("train.max_epochs", "objective.epochs", int, 1),
    Row("train.async_enable", "run.max_staleness", lambda on: int(truth(on))),
    Row("actor.model_name_or_path", "model.path", local_path),
    Row("ds.param_dtype", "model.dtype", choose({"bf16": "bfloat16", "fp16": "float16"}, "16 bits"), "bf16"),
    Row("data.input_key", "data.prompt_field", str, "input"),
    Row("data.label_key", "data.answer_field", str),
    Row("data.apply_chat_template", "data.apply_chat_template", truth, False),
    Row("eval.dataset", "run.eval_prompts", lambda _: ALL_PROBLEMS),
    Row("eval.steps", "run.eval_every", not_negative, -1, "eval.dataset"),
    Row("eval.split", "data.eval_split", str, "train", "eval.dataset"),
    Row("eval.temperature", "run.eval_temperature", float, 0.6, "eval.dataset"),
    Row("eval.n_samples_per_prompt", "run.eval_samples", int, 4, "eval.dataset"),
    Row("rollout.batch_size", "data.prompts_per_step", positive, 1024),
    Row("rollout.n_samples_per_prompt", "rollout.group_size", positive, 1),
    Row("rollout.temperature", "rollout.temperature", float, 1.0),
    Row("rollout.top_p", "rollout.top_p", float, 1.0),
    Row("algo.advantage.estimator", "objective.advantage", choose(ADVANTAGES, NO_CRITIC), "gae"),
    Row("algo.dynamic_filtering_enable", "objective.dynamic_sampling", truth),
    Row(KL, "objective.kl_coef", float, 0.01, "algo.kl.use_loss"),
    Row("algo.kl.estimator", "objective.kl", str, "k1", "algo.kl.use_loss"),
    Row("algo.kl.target", "", only(why=STEADY_KL), when=KL),
    Row("algo.kl.horizon", "", only(why=STEADY_KL), when=f"{KL} algo.kl.target"),
    Row("algo.advantage.gamma", "", only(1, why="rewards are not discounted")),
    Row("actor.policy_loss_type", "objective.loss", choose(LOSSES, "no such loss"), "ppo"),
    Row("actor.eps_clip_low_high", "objective.clip_low", lambda bounds: float(bounds[0])),
    Row("actor.eps_clip_low_high", "objective.clip_high", lambda bounds: float(bounds[1])),
    Row("actor.entropy_coef", "objective.entropy_coef", float),
    Row("actor.adam.lr", "learner.lr", float, 1e-6),
    Row("actor.adam.weight_decay", "learner.weight_decay", float, 0.0),
    Row("actor.adam.betas", "learner.beta1", lambda betas: float(betas[0]), [0.9, 0.95]),
    Row("actor.adam.betas", "learner.beta2", lambda betas: float(betas[1]), [0.9, 0.95]),
    Row("actor.adam.eps", "learner.adam_epsilon", float),
    Row("actor.lr_scheduler", "learner.lr_schedule", choose(SCHEDULES, "no such schedule"), "cosine_with_min_lr"),
    Row("actor.min_lr_ratio", "learner.min_lr_ratio", float, 0.1),
    Row("actor.max_norm", "learner.max_grad_norm", float, 1.0),
    Row("actor.gradient_checkpointing_enable", "learner.activation_checkpointing", lambda on: int(truth(on)), False),
    Row("reward.model_name_or_path", "reward.functions", lambda path: [{"name": f"model:{local_path(path)}"}]),
    Row("reward.remote_url", "reward.functions", _functions),
    Row("ds.lora.rank", "learner.lora_rank", int, 0),
    Row("ds.lora.alpha", "learner.lora_alpha", float, 16, "ds.lora.rank"),
    Row("ds.lora.target_modules", "learner.lora_targets", texts, "all-linear", "ds.lora.rank"),
    Row("ds.lora.dropout", "", only(0, why=NO_DROPOUT), when="ds.lora.rank"),
)
WITHOUT_EFFECT = (
    "vllm.* logger.* ckpt.* critic.* ref.* *micro_batch_size *tokens_per_gpu train.colocate_* "
    "train.dynamic_batch_enable *.lambd *.gradient_checkpointing_reentrant ds.zero_stage ds.zpg ds.*offload "
    "ds.*_implementation ds.use_* ds.grad_accum_dtype ds.overlap_comm ds.enable_sleep ds.tensor_parallel_size "
    "ds.packing_samples ds.ring_attn_* ds.deepcompile"
)


def convert(path: Path, arguments: list[str]) -> Conversion:
    """All settings; ValueError for what is no script of OpenRLHF's, and for what is missing."""
    words = words_of(path, arguments, TRAINING)
    start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli.train_ppo"))
    c = Conversion(read_flags(words[start + 1 :]) | read_flags(arguments), "OpenRLHF 0.11.2", ROWS, WITHOUT_EFFECT)
    files, held_out = (c.value(name, local_paths) for name in ("data.prompt_dataset", "eval.dataset"))
    c.set_sources(files, "data.prompt_dataset", held_out, "eval.dataset")
    c.set("data.long_prompts", "truncate", "data.max_len", "from the left")
    longest = c.value("data.max_len", positive, 2048)
    new = c.value("rollout.max_new_tokens", positive, longest - longest // 2)
    prompt = c.value("data.prompt_max_len", positive, longest - new)
    c.set_lengths(prompt, new, "data.prompt_max_len rollout.max_new_tokens data.max_len")
    prompts, batch = c.ours("data.prompts_per_step"), c.value("train.batch_size", positive, 128)
    updates = min(prompts, max(1, prompts * c.ours("rollout.group_size") // batch))
    c.set("objective.mini_batches", updates, "rollout.batch_size rollout.n_samples_per_prompt train.batch_size")
    if c.ours("objective.loss") != "gspo":
        c.set("objective.loss", "dapo", "actor.policy_loss_type", "the mean over tokens")
    coefficient = c.value(KL, float)
    if c.is_off("algo.kl.use_loss") or coefficient == 0:
        c.set("objective.kl_coef", 0.0, KL)
        c.set("objective.kl_reward_coef", coefficient, KL, "of a whole response")
        if coefficient and c.value("algo.kl.estimator") != "k1":
            c.drop("algo.kl.estimator", "a KL in the reward is k1")
    if c.value("actor.lr_scheduler") != "constant":
        c.set_warmup("actor.lr_warmup_ratio", default=0.03)
    actors = c.value("actor.num_nodes", positive, 1) * c.value("actor.num_gpus_per_node", positive, 8)
    engines = c.value("vllm.num_engines", positive, 1) * c.value("vllm.tensor_parallel_size", positive, 1)
    names = "actor.num_nodes actor.num_gpus_per_node vllm.num_engines vllm.tensor_parallel_size train.colocate_all"
    c.place(actors, names, engines if c.is_off("train.colocate_all") else 0)
    return c.finish(["wandb"] if c.value("logger.wandb.key") else [], "logger.wandb.key")

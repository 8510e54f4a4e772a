"""OpenRLHF 0.11.2's defaults, its settings beside ours, and what its older flags were called."""

from __future__ import annotations

from infsample_rl.commands.convert.common import (
    CHECKPOINTS,
    COMPUTED,
    ENGINE,
    LOGGED,
    MICRO_BATCH,
    NO_CRITIC_HERE,
    NO_DROPOUT,
    READ_ONCE,
    SCHEDULES,
    SHARDED,
    SWITCHED_OFF,
    WHOLE_ENGINE,
)
from infsample_rl.commands.convert.conversion import Peer, Row
from infsample_rl.commands.convert.values import choose, local_path, not_negative, number, truth, whole

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
    ENGINE: "vllm.* vllm_* enforce_eager enable_prefix_caching rollout.vllm_generate_batch_size",
    SHARDED: "ds.* local_rank address runtime-env-json working-dir ref.num_* reward.num_*",
    MICRO_BATCH: "*micro_batch_size *max_tokens_per_gpu train.dynamic_batch_enable",
    LOGGED: "logger.*",
    COMPUTED: "ds.packing_samples ds.attn_implementation bf16 actor.gradient_checkpointing_reentrant reward.offload "
    "ref.offload ref_reward_offload ds.enable_sleep deepspeed_enable_sleep train.full_determinism_enable",
    READ_ONCE: "data.disable_fast_tokenizer data.dataloader_num_workers data.image_key use_ms",
    CHECKPOINTS: "ckpt.*",
    SWITCHED_OFF: f"ds.lora.* actor.min_lr_ratio actor.muon.* {CORRECTION}_* algo.kl.* algo.dynamic_filtering_range "
    "train.ema_beta train.async_queue_size train.partial_rollout_enable reward.overlong_penalty_factor eval.*",
    NO_CRITIC_HERE: "critic.* train.colocate_critic_reward algo.advantage.gamma algo.advantage.lambd",
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
    "train.colocate_actor_ref ckpt.path ds.packing_samples ds.attn_implementation algo.advantage.gamma "
    "algo.advantage.lambd reward.num_nodes reward.num_gpus_per_node critic.num_nodes critic.num_gpus_per_node"
).split()

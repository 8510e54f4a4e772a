"""verl 0.9.1's defaults, and its settings beside ours."""

from __future__ import annotations

from infsample_rl.commands.convert.common import (
    CHECKPOINTS,
    COMPUTED,
    ENGINE,
    LOGGED,
    MICRO_BATCH,
    NO_CRITIC_HERE,
    READ_ONCE,
    SHARDED,
    SWITCHED_OFF,
    WHOLE_ENGINE,
)
from infsample_rl.commands.convert.conversion import Peer, Row
from infsample_rl.commands.convert.values import choose, local_path, not_negative, number, truth, whole

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, REF = "actor_rollout_ref.model", "actor_rollout_ref.ref"
OPTIM, CORRECTION = f"{ACTOR}.optim", "algorithm.rollout_correction"
CUSTOM, OVERLONG = "reward.custom_reward_function", "reward.reward_kwargs.overlong_buffer_cfg"
# dicts that stay dicts
WHOLE = ("data.apply_chat_template_kwargs", f"{MODEL}.override_config", f"{CUSTOM}.reward_kwargs")
# Names of older versions, still taken by 0.9.1 or found in published scripts.
ALIASES = {
    "custom_reward_function.path": f"{CUSTOM}.path",
    "custom_reward_function.name": f"{CUSTOM}.name",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.enable": "reward.reward_model.enable",
    "reward_model.model.path": "reward.reward_model.model_path",
    f"{OPTIM}.warmup_style": f"{OPTIM}.lr_scheduler_type",
    f"{OPTIM}.clip_grad": f"{ACTOR}.grad_clip",
    "algorithm.rollout_is_threshold": f"{CORRECTION}.rollout_is_threshold",
}
PREFIXES = {
    "custom_reward_function.reward_kwargs": f"{CUSTOM}.reward_kwargs",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.overlong_buffer": OVERLONG,
}
ESTIMATORS = {"grpo": "std", "grpo_vectorized": "std", "rloo": "rloo", "rloo_vectorized": "rloo"}
KL_LOSSES = {
    theirs: ours
    for ours, names in {"k1": "kl k1", "k2": "mse k2 kl+ k1+ low_var_kl+ k3+", "k3": "low_var_kl k3"}.items()
    for theirs in names.split()
}
AGGREGATIONS = {
    "token-mean": "dapo",
    "seq-mean-token-mean": "grpo",
    "seq-mean-token-sum-norm": "dr_grpo",
    "seq-mean-token-sum": "dr_grpo",
}
DTYPES = {name: name for name in ("bfloat16", "float16", "float32")}
ADAMS = {"AdamW": "adamw", "Adam": "adamw"}
SCHEDULES = {"constant": "constant", "cosine": "cosine"}

ROWS = (
    Row("trainer.experiment_name", "run.name", str, "gsm8k"),
    Row("trainer.default_local_dir", "run.dir", local_path),
    Row("trainer.save_freq", "run.checkpoint_every", not_negative, -1),
    Row("trainer.max_actor_ckpt_to_keep", "run.keep_checkpoints", whole),
    Row("trainer.project_name", "logging.wandb_project", str, "verl_examples"),
    Row("data.seed", "run.seed", whole),
    Row("data.prompt_key", "data.prompt_field", str, "prompt"),
    Row("data.train_batch_size", "data.prompts_per_step", whole, 1024),
    Row("data.shuffle", "data.shuffle", truth, True),
    Row("data.apply_chat_template_kwargs", "data.chat_template_kwargs", dict),
    Row(f"{MODEL}.path", "model.path", local_path),
    Row(f"{MODEL}.tokenizer_path", "model.tokenizer_path", str),
    Row(f"{MODEL}.trust_remote_code", "model.trust_remote_code", truth),
    Row(f"{MODEL}.enable_gradient_checkpointing", "learner.activation_checkpointing", lambda on: int(truth(on)), True),
    Row(f"{MODEL}.lora_rank", "learner.lora_rank", whole, 0),
    Row(f"{ROLLOUT}.n", "rollout.group_size", whole, 1),
    Row(f"{ROLLOUT}.temperature", "rollout.temperature", number, 1.0),
    Row(f"{ROLLOUT}.top_p", "rollout.top_p", number, 1.0),
    Row(f"{ROLLOUT}.top_k", "rollout.top_k", not_negative, -1),
    Row(f"{ROLLOUT}.val_kwargs.n", "run.eval_samples", whole, 1),
    Row(f"{ACTOR}.ppo_epochs", "objective.epochs", whole, 1),
    Row(f"{ACTOR}.entropy_coeff", "objective.entropy_coef", number, 0),
    Row(f"{ACTOR}.clip_ratio_high", "objective.clip_high", number, 0.2),
    Row(f"{ACTOR}.fsdp_config.dtype", "model.dtype", choose(DTYPES, "take model.dtype"), "bfloat16"),
    Row(f"{ACTOR}.fsdp_config.optimizer_offload", "learner.offload_optimizer", truth, False),
    Row(f"{ACTOR}.grad_clip", "learner.max_grad_norm", number, 1.0),
    Row(f"{OPTIM}.optimizer", "learner.optimizer", choose(ADAMS, "learner.optimizer=adamw or adamw_8bit"), "AdamW"),
    Row(f"{OPTIM}.lr", "learner.lr", number, 1e-6),
    Row(f"{OPTIM}.lr_scheduler_type", "learner.lr_schedule", choose(SCHEDULES, "constant or cosine"), "constant"),
    Row(f"{OPTIM}.min_lr_ratio", "learner.min_lr_ratio", number, 0.0),
    Row(f"{OPTIM}.weight_decay", "learner.weight_decay", number, 0.01),
)
DEFAULTS = {
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.filter_overlong_prompts": False,
    "data.truncation": "error",
    "data.val_max_samples": -1,
    f"{MODEL}.lora_alpha": 16,
    f"{MODEL}.target_modules": "all-linear",
    f"{ACTOR}.ppo_mini_batch_size": 256,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_coef": 0.001,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    f"{ACTOR}.use_dynamic_bsz": False,
    f"{ACTOR}.ppo_max_token_len_per_gpu": 16384,
    f"{OPTIM}.lr_warmup_steps": -1,
    f"{OPTIM}.lr_warmup_steps_ratio": 0.0,
    f"{OPTIM}.betas": [0.9, 0.999],
    f"{ROLLOUT}.val_kwargs.temperature": 0,
    f"{ROLLOUT}.val_kwargs.top_p": 1.0,
    f"{ROLLOUT}.val_kwargs.top_k": -1,
    "algorithm.adv_estimator": "gae",
    "algorithm.norm_adv_by_std_in_grpo": True,
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
    "algorithm.kl_ctrl.type": "fixed",
    "algorithm.kl_ctrl.kl_coef": 0.001,
    "algorithm.filter_groups.metric": "reward",
    "algorithm.filter_groups.max_num_gen_batches": 0,
    f"{CORRECTION}.rollout_is_threshold": 2.0,
    "trainer.total_epochs": 30,
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.nnodes": 1,
    "trainer.test_freq": -1,
    "trainer.resume_mode": "auto",
    f"{CUSTOM}.name": "compute_score",
    f"{OVERLONG}.penalty_factor": 1.0,
}
OWN_CHECKPOINTS = "a run goes on from its own checkpoints only (run.resume)"
REFUSED = {
    f"{ROLLOUT}.ignore_eos": (False, "a sample ends at the model's end token or one of rollout.stop_token_ids"),
    f"{ROLLOUT}.do_sample": (True, "samples of a training step are drawn; run.eval_temperature=0 is for evaluations"),
    f"{ROLLOUT}.multi_turn.enable": (False, "one turn; tools are not called"),
    f"{ROLLOUT}.tensor_model_parallel_size": (1, WHOLE_ENGINE),
    f"{MODEL}.lora_adapter_path": (None, "merge it first (python -m infsample_rl merge)"),
    "data.train_max_samples": (-1, "cut the file"),
    "data.custom_cls.path": (None, "a data set class of your own; write its rows into a Parquet or JSONL file"),
    "data.reward_fn_key": ("data_source", "verl's column data_source is what reward functions get"),
    "trainer.resume_from_path": (False, OWN_CHECKPOINTS),
    f"{CORRECTION}.rollout_rs": (None, "samples are weighted, never rejected"),
    "reward.reward_manager.name": (["naive", "dapo", "batch", "prime"], "reward functions get one sample at a time"),
}
IGNORED = {
    ENGINE: f"{ROLLOUT}.* data.val_batch_size reward_model.launch_reward_fn_async actor_rollout_ref.hybrid_engine",
    SHARDED: f"{ACTOR}.fsdp_config.* {REF}.fsdp_config.* *.strategy *.megatron.* *ulysses_sequence_parallel_size "
    "trainer.balance_batch trainer.device trainer.use_legacy_worker_impl ray_* transfer_queue.* "
    "trainer.ray_wait_register_center_timeout reward.num_workers",
    MICRO_BATCH: "*micro_batch_size* *_max_token_len_per_gpu *use_dynamic_bsz",
    LOGGED: f"{OVERLONG}.log trainer.log_val_generations *profiler* global_profiler.* {ACTOR}.calculate_entropy "
    "trainer.rollout_data_dir trainer.validation_data_dir trainer.val_before_train trainer.val_only",
    COMPUTED: f"{MODEL}.use_remove_padding {MODEL}.use_shm {MODEL}.torch_dtype {MODEL}.use_fused_kernels "
    f"{MODEL}.use_liger {MODEL}.fused_kernel_options.* *use_torch_compile {MODEL}.enable_activation_offload "
    f"*entropy_checkpointing *entropy_from_logits_* {ACTOR}.use_prefix_grouper {ACTOR}.shuffle "
    f"{ACTOR}.data_loader_seed",
    READ_ONCE: "data.return_* data.gen_batch_size data.filter_overlong_prompts_workers data.dataloader_num_workers "
    "data.validation_shuffle data.use_shm data.trust_remote_code hydra.* defaults",
    CHECKPOINTS: f"{ACTOR}.checkpoint.* trainer.default_hdfs_dir trainer.del_local_ckpt_after_load "
    "trainer.esi_redundant_time",
    SWITCHED_OFF: f"{MODEL}.lora_* {MODEL}.target_modules {ACTOR}.clip_ratio {ACTOR}.clip_ratio_c {ACTOR}.kl_loss_* "
    f"algorithm.kl_* algorithm.filter_groups.* {CORRECTION}.* {ROLLOUT}.val_kwargs.* {ROLLOUT}.multi_turn.* "
    f"{ROLLOUT}.agent.* reward.reward_model.* reward_model.* {OVERLONG}.*",
    NO_CRITIC_HERE: "critic.* trainer.critic_warmup trainer.max_critic_ckpt_to_keep algorithm.gamma algorithm.lam",
    "a prompt and a response are text of data.max_prompt_tokens and rollout.max_new_tokens": f"data.image_key "
    f"{ROLLOUT}.prompt_length {ROLLOUT}.response_length reward.reward_kwargs.max_resp_len",
}
PEER = Peer("verl 0.9.1", ROWS, DEFAULTS, REFUSED, IGNORED)

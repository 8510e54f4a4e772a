"""TRL 1.16.0's defaults, and its settings beside ours."""

from __future__ import annotations

from typing import Any

from infsample_rl.commands.convert.common import (
    CHECKPOINTS,
    COMPUTED,
    ENGINE,
    LOGGED,
    READ_ONCE,
    SCHEDULES,
    SHARDED,
    SWITCHED_OFF,
)
from infsample_rl.commands.convert.conversion import Peer, Row
from infsample_rl.commands.convert.values import choose, local_path, not_negative, number, truth, whole

LORA_CONFIG = {  # of peft: (the flag, the default where a script makes the LoraConfig)
    "r": ("lora_r", 8),
    "lora_alpha": ("lora_alpha", 8),
    "lora_dropout": ("lora_dropout", 0.0),
    "target_modules": ("lora_target_modules", None),
}
OPTIMIZERS = {
    name: ours
    for ours, names in (
        ("adamw", "adamw_torch adamw_torch_fused adamw_hf"),
        ("adamw_8bit", "adamw_8bit adamw_bnb_8bit paged_adamw_8bit adamw_torch_8bit"),
    )
    for name in names.split()
}
LOSSES = {"grpo": "grpo", "dapo": "dapo", "dr_grpo": "dr_grpo", "cispo": "cispo", "bnpo": "dapo"}
NEAREST_LOSSES = {"sapo": "grpo", "luspo": "gspo", "vespo": "gspo"}
OWN_REWARDS = {"accuracy_reward": "math", "reasoning_accuracy_reward": "math", "think_format_reward": "think_format"}

ROWS = (
    Row("run_name", "run.name", str),
    Row("output_dir", "run.dir", local_path),
    Row("seed", "run.seed", whole, 42),
    Row("model_name_or_path", "model.path", local_path),
    Row("trust_remote_code", "model.trust_remote_code", truth),
    Row("cast_lm_head_to_fp32", "model.lm_head_fp32", truth),
    Row("dataset_train_split", "data.split", str, "train"),
    Row("shuffle_dataset", "data.shuffle", truth, True),
    Row("chat_template_kwargs", "data.chat_template_kwargs", dict),
    Row("prompt_field", "data.prompt_field", str),  # this and the next are read from a script
    Row("system_prompt", "data.system_prompt", str),
    Row("num_generations", "rollout.group_size", whole, 8),
    Row("num_generations_eval", "run.eval_samples", whole),
    Row("temperature", "rollout.temperature", number, 1.0),
    Row("top_p", "rollout.top_p", number, 1.0),
    Row("top_k", "rollout.top_k", not_negative, 0),
    Row("min_p", "rollout.min_p", number),
    Row("num_iterations", "objective.epochs", whole, 1),
    Row("epsilon", "objective.clip_low", number, 0.2),
    Row("entropy_coef", "objective.entropy_coef", number, 0.0),
    Row("learning_rate", "learner.lr", number, 1e-6),
    Row("lr_scheduler_type", "learner.lr_schedule", choose(SCHEDULES, "constant, linear or cosine"), "linear"),
    Row("weight_decay", "learner.weight_decay", number, 0.0),
    Row("adam_beta1", "learner.beta1", number, 0.9),
    Row("adam_beta2", "learner.beta2", number, 0.999),
    Row("adam_epsilon", "learner.adam_epsilon", number, 1e-8),
    Row("max_grad_norm", "learner.max_grad_norm", number, 1.0),
    Row("optim", "learner.optimizer", choose(OPTIMIZERS, "take learner.optimizer=adamw or adamw_8bit"), "adamw_torch"),
    Row("gradient_checkpointing", "learner.activation_checkpointing", lambda on: int(truth(on)), True),
    Row("save_total_limit", "run.keep_checkpoints", whole),
)
DEFAULTS = {
    "warmup_steps": 0,
    "num_train_epochs": 3.0,
    "max_steps": -1,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_processes": 1,
    "save_strategy": "steps",
    "save_steps": 500,
    "eval_strategy": "no",
    "logging_steps": 10,
    "report_to": "none",
    "fp16": False,
    "dtype": "float32",
    "max_completion_length": 512,
    "beta": 0.0,
    "importance_sampling_level": "token",
    "scale_rewards": "group",
    "loss_type": "dapo",
    "use_bias_correction_kl": True,
    "use_vllm": False,
    "vllm_mode": "colocate",
    "vllm_importance_sampling_correction": True,
    "vllm_importance_sampling_mode": "sequence_mask",
    "vllm_importance_sampling_clip_max": 3.0,
    "use_peft": False,
    "lora_r": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "dataset_test_split": "test",
}
RLOO_DEFAULTS = {"num_generations": 2, "beta": 0.05}
NOTHING = "nothing here does that"
REFUSED: dict[str, tuple[Any, str]] = {
    "vllm_importance_sampling_clip_min": (None, "weights are capped from above only"),
    "use_rslora": (False, "adapters are plain LoRA"),
    "use_dora": (False, "adapters are plain LoRA"),
    "multi_objective_aggregation": ("sum_then_normalize", "rewards are summed, then normalised"),
    "repetition_penalty": (1, "the policy is softmax(logits / temperature)"),
    "generation_kwargs": ([{}], "set rollout.* one by one"),
    "mask_truncated_completions": (False, "objective.overlong_buffer_tokens punishes long responses instead"),
    "sync_ref_model": (False, "the reference stays frozen"),
    "top_entropy_quantile": (1, "every token is trained"),
    "use_adaptive_entropy": (False, "objective.entropy_coef stays as it is"),
    "delta": (None, NOTHING),
    "off_policy_mask_threshold": (None, NOTHING),
    "router_aux_loss_coef": (None, NOTHING),
    "max_tool_calling_iterations": (None, NOTHING),
    "vllm_structured_outputs_regex": (None, NOTHING),
    "load_in_4bit": (False, "weights are model.dtype"),
    "load_in_8bit": (False, "weights are model.dtype"),
    "model_revision": ("main", "download that revision into a folder and give it as model.path"),
    "dataset_streaming": (False, "the data set is read once, at the start"),
    "normalize_advantages": (False, "advantages are not divided by the batch's standard deviation"),
    "reward_clip_range": (None, "clip in the reward function"),
}
IGNORED = {
    ENGINE: "use_vllm vllm_* use_transformers_* transformers_continuous_batching_config cache_implementation use_cache "
    "per_device_eval_batch_size per_gpu_eval_batch_size",
    SHARDED: "fsdp* ds3_gather_for_generation deepspeed config_file use_deepspeed zero_stage multi_gpu ddp_* "
    "num_machines machine_rank same_network rdzv_backend main_process_port",
    LOGGED: "logging_* log_* num_completions_to_print disable_tqdm do_train do_eval eval_on_start",
    COMPUTED: "mixed_precision bf16 tf32 gradient_checkpointing_kwargs attn_implementation use_liger_kernel "
    "torch_compile* pad_to_multiple_of disable_dropout torch_empty_cache_steps gradient_accumulation_kwargs",
    READ_ONCE: "dataloader_* dataset_num_proc remove_unused_columns",
    CHECKPOINTS: "overwrite_output_dir resume_from_checkpoint push_to_hub hub_*",
    SWITCHED_OFF: "vllm_importance_sampling_* bnb_4bit_* use_bnb_nested_quant lora_* sapo_* vespo_* entropy_* "
    "ref_model_*",
}
PEER = Peer("trl 1.16.0", ROWS, DEFAULTS, REFUSED, IGNORED)

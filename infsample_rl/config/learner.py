"""Every setting of the update: objective, reference and learner. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from infsample_rl.config.fields import check_bounds, setting
from infsample_rl.config.pairs import check_pairs


@dataclass(kw_only=True)
class ObjectiveConfig:
    """The GRPO objective; the paper's equations 2-4 by default."""

    advantage: str = setting(
        "std", "std: (r - mean) / (std + 1e-6); mean_only (section 3.4); rloo", choices=("std", "mean_only", "rloo")
    )
    turn_credit: str = setting(
        "trajectory",
        "what a turn's tokens are credited with, relative to the group: the trajectory's whole reward, or turn: what "
        "was earned from that turn on, where an environment rewards its turns",
        choices=("trajectory", "turn"),
        read_if=lambda c: c.environment.factory is not None or c.objective.turn_credit == "trajectory",
    )
    loss: str = setting("grpo", "loss and its normalisation", choices=("grpo", "dr_grpo", "dapo", "gspo", "cispo"))
    clip_low: float = setting(
        0.2, "ratio is clipped below at 1 - clip_low", low=0, high=1, read_if=lambda c: c.objective.loss != "cispo"
    )
    clip_high: float = setting(0.2, "ratio is clipped above at 1 + clip_high", low=0)
    kl: str = setting(
        "k3",
        "KL estimator in the loss",
        choices=("k1", "k2", "k3"),
        read_if=lambda c: c.objective.kl_in_loss or c.objective.kl == "k3",
    )
    kl_coef: float = setting(0.001, "weight of the KL in the loss; 0: none", low=0)
    kl_reward_coef: float = setting(
        0.0, "every reward loses kl_reward_coef x log(policy / reference) (section 3.4); 0: none", low=0
    )
    reward_coef: float = setting(1.0, "weight of the rewards' advantages", low=0)
    distill_coef: float = setting(
        0.0,
        "weight of on-policy distillation from reference.path: of the KL to the teacher's likeliest tokens, or, with "
        "distill_top_k=0, of log(teacher / policy) in every token's advantage",
        low=0,
    )
    distill_top_k: int = setting(
        0,
        "likeliest tokens of the teacher at every place that distillation reads, the rest counting as one; 0: the "
        "sampled token alone",
        low=0,
        read_if=lambda c: c.objective.distills or c.objective.distill_top_k == 0,
    )
    distill_kl: str = setting(
        "reverse",
        "reverse: KL(policy || teacher), which seeks a mode; forward: KL(teacher || policy), which covers all of them",
        choices=("reverse", "forward"),
        read_if=lambda c: c.objective.distills or c.objective.distill_kl == "reverse",
    )
    entropy_coef: float = setting(0.0, "weight of the entropy bonus in the loss", low=0)
    importance: str = setting(
        "auto",
        "truncated importance weights for the difference of engine and learner; auto: token_tis with "
        "run.max_staleness=1 or rollout.engine=vllm, else none",
        choices=("auto", "none", "token_tis", "sequence_tis"),
    )
    importance_cap: float = setting(
        2.0, "cap of the importance weights", above=0, read_if=lambda c: c.importance != "none"
    )
    mismatch_stop: float = setting(
        0.05,
        "in bf16, fp16 or with kv_dtype=int8 the run stops above this mean |engine - learner| log-probability",
        above=0,
    )
    mismatch_stop_float32: float = setting(
        1e-4, "in fp32 with kv_dtype=auto the run stops above this |engine - learner| of any token", above=0
    )
    epochs: int = setting(
        1, "updates from every sample of a step (GRPO's mu); above 1 the ratio is to the policy of the first", low=1
    )
    mini_batches: int = setting(1, "updates the step's prompts are split into, in every epoch", low=1)
    overlong_buffer_tokens: int = setting(
        0, "DAPO's soft overlong punishment: its length before max_new_tokens; 0: none", low=0
    )
    overlong_penalty: float = setting(
        1.0,
        "what a response of max_new_tokens loses of its reward, with overlong_buffer_tokens > 0",
        low=0,
        read_if=lambda c: c.objective.overlong_buffer_tokens > 0,
    )
    dynamic_sampling: bool = setting(
        False, "DAPO: groups whose rewards are all equal are dropped and other prompts sampled instead"
    )
    dynamic_sampling_rounds: int = setting(
        4,
        "most rounds of sampling in a step with dynamic_sampling; then it trains with what it has",
        low=1,
        read_if=lambda c: c.objective.dynamic_sampling,
    )

    def __post_init__(self) -> None:
        check_bounds("objective", self)
        check_pairs(
            [
                ("objective.reward_coef=0", "objective.distill_coef>0", "nothing would be trained"),
                ("objective.distill_kl=forward", "objective.distill_top_k>0", "its mean is over the teacher's tokens"),
                ("objective.distill_coef>0", "objective.loss=grpo|dr_grpo|dapo|cispo", "gspo has one ratio a response"),
                ("objective.reward_coef=0", "objective.dynamic_sampling=false", "no reward is trained"),
                (
                    "objective.turn_credit=turn",
                    "objective.loss=grpo|dr_grpo|dapo|cispo",
                    "gspo has one ratio a response",
                ),
            ],
            objective=self,
        )

    @property
    def updates_per_step(self) -> int:
        """Optimizer steps from one step's samples."""
        return self.epochs * self.mini_batches

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl_coef > 0

    @property
    def kl_in_reward(self) -> bool:
        """Whether rewards have a KL term."""
        return self.kl_reward_coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read at all; if not, no reference model is loaded."""
        return self.reference_in_loss or self.kl_in_reward

    @property
    def distills(self) -> bool:
        """Whether the reference is a teacher, towards which every token is drawn."""
        return self.distill_coef > 0

    @property
    def teacher_top_k(self) -> int:
        """Ids that the teacher names at every place; 0 where nothing reads them."""
        return self.distill_top_k if self.distills else 0

    @property
    def reference_in_loss(self) -> bool:
        """Whether the learner reads reference log-probabilities."""
        return self.kl_in_loss or self.distills


def _needs_reference(config: Any) -> bool:
    return config.objective.needs_reference


def _trains_adapters(config: Any) -> bool:
    return config.learner.lora_rank > 0


def _has_ranks(config: Any) -> bool:
    return config.cluster.learner_ranks > 1


@dataclass(kw_only=True)
class ReferenceConfig:
    """The frozen policy of the KL terms, and the teacher of a distillation; loaded only when one is used."""

    path: str | None = setting(None, "folder or hub name; none: model.path", read_if=_needs_reference)
    placement: str = setting(
        "workers",
        "workers: processes of its own; learner: sharded over the learner ranks, beside the policy (with LoRA: the "
        "policy without adapters)",
        choices=("workers", "learner"),
        read_if=_needs_reference,
    )
    offload: bool = setting(
        False,
        "with placement=learner: its weights are in host memory between uses",
        read_if=lambda c: c.objective.needs_reference and c.learner.lora_rank == 0,
    )
    max_tokens_per_micro_batch: int = setting(
        16384, "tokens of one packed row", low=16, read_if=lambda c: c.has_reference_workers
    )

    def __post_init__(self) -> None:
        check_bounds("reference", self)


@dataclass(kw_only=True)
class LearnerConfig:
    """The update."""

    backend: str = setting(
        "fsdp",
        "how parameters are sharded: fsdp is FSDP2 (none at one rank), deepspeed is ZeRO",
        choices=("fsdp", "deepspeed"),
    )
    zero_stage: int = setting(
        2,
        "deepspeed: 1 shards the optimizer, 2 gradients too, 3 parameters too",
        low=1,
        high=3,
        read_if=lambda c: c.learner.backend == "deepspeed",
    )
    shard_ranks: int | None = setting(
        None, "fsdp: ranks that share one copy of the policy (HSDP); none: all", low=1, read_if=_has_ranks
    )
    grad_sync: str = setting(
        "every_row",
        "every_row: gather and reduce with every row, in waves; last_row: fsdp ranks keep whole parameters and "
        "gradients and reduce once",
        choices=("every_row", "last_row"),
        read_if=_has_ranks,
    )
    offload_optimizer: bool = setting(
        False,
        "masters, AdamW moments and the optimizer step in host memory",
        read_if=lambda c: c.cluster.learner_gpus > 0 or c.learner.backend == "deepspeed",
    )
    overlap: bool = setting(
        True,
        "backward of complete groups while others decode; false: after the last sample of the step",
        read_if=lambda c: c.objective.updates_per_step == 1 and c.run.max_staleness == 0 and not c.takes_turns,
    )
    optimizer: str = setting(
        "adamw", "adamw, or adamw_8bit (torchao): moments in 8 bits with scales", choices=("adamw", "adamw_8bit")
    )
    lr: float = setting(1e-6, "AdamW learning rate", above=0)
    lr_schedule: str = setting("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = setting(
        0.0,
        "lr at the end of linear and cosine, as a share of lr",
        low=0,
        high=1,
        read_if=lambda c: c.learner.lr_schedule != "constant",
    )
    warmup_steps: int = setting(0, "updates of linear warm-up from 0", low=0)
    weight_decay: float = setting(0.0, "AdamW weight decay, of matrices only", low=0)
    beta1: float = setting(0.9, "AdamW beta 1", low=0, high=0.999999)
    beta2: float = setting(0.999, "AdamW beta 2", low=0, high=0.999999)
    adam_epsilon: float = setting(1e-8, "AdamW epsilon", above=0)
    max_grad_norm: float = setting(1.0, "gradient norm is clipped at this", above=0)
    max_tokens_per_micro_batch: int = setting(
        16384, "tokens of one forward and backward pass: prompts, and the responses packed behind them", low=16
    )
    logprob_chunk_tokens: int = setting(1024, "tokens whose logits exist at a time", low=1)
    activation_checkpointing: int = setting(
        0, "recompute activations in the backward pass: 0 of none, 1 of every layer, n of every n-th", low=0
    )
    recompute_granularity: str = setting(
        "full",
        "full: of a recomputed layer only its input is kept; selective: its matrix products too",
        choices=("full", "selective"),
        read_if=lambda c: c.learner.activation_checkpointing > 0,
    )
    lora_rank: int = setting(0, "train LoRA adapters of this rank (peft), not the weights; 0: the weights", low=0)
    lora_alpha: float = setting(32.0, "adapters count lora_alpha / lora_rank", above=0, read_if=_trains_adapters)
    lora_targets: list[str] = setting(
        ["all-linear"], "names of the modules that get adapters, or all-linear", read_if=_trains_adapters
    )
    lora_publish: str = setting(
        "merged",
        "what the engine is sent: merged weights, or the adapters, which it merges itself",
        choices=("merged", "adapters"),
        read_if=lambda c: c.learner.lora_rank > 0 and not c.shares_process,
    )
    on_nonfinite: str = setting(
        "stop", "a NaN or infinite loss or gradient: stop the run, or skip the update", choices=("stop", "skip")
    )

    def __post_init__(self) -> None:
        check_bounds("learner", self)

    @property
    def sends_adapters(self) -> bool:
        """Whether an engine in another process is sent adapters alone."""
        return self.lora_rank > 0 and self.lora_publish == "adapters"

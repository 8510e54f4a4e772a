"""All settings of a run, section by section, and what they may not say together. Standard library only.

`configs/` holds YAML that deviates from these defaults; `infsample_rl.config.loading` composes both.
A value out of bounds raises ValueError with the setting's name, the value and the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from infsample_rl.config.cluster import ClusterConfig
from infsample_rl.config.data import DataConfig
from infsample_rl.config.fields import kv_pages
from infsample_rl.config.learner import LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.config.reward import RewardConfig
from infsample_rl.config.rollout import RolloutConfig
from infsample_rl.config.run import LoggingConfig, ModelConfig, RunConfig

TIMELINE_PROMPTS = 2  # of a step, whose samples' timelines are kept


@dataclass(kw_only=True)
class Config:
    """All settings. Building one checks every bound and every pair of settings that could contradict each other."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        for problems in (self._rollout_problems, self._row_problems, self._objective_problems):
            _raise_first(problems())
        if self.run.steps is not None:
            self.check_warmup(self.run.steps)
        for problems in (self._learner_problems, self._reference_problems, self._colocation_problems):
            _raise_first(problems())
        if self.run.deterministic:
            _raise_first(self._deterministic_problems())

    def check_warmup(self, steps: int) -> None:
        """ValueError for a warm-up longer than a run of so many steps."""
        updates, warmup = steps * self.objective.updates_per_step, self.learner.warmup_steps
        if warmup > updates:
            raise ValueError(f"learner.warmup_steps must be <= {updates}, the updates of {steps} steps, got {warmup}")

    def _rollout_problems(self) -> Iterator[str]:
        rollout, group_size, page = self.rollout, self.rollout.group_size, self.rollout.page_size
        if group_size == 1 and self.objective.advantage in ("std", "rloo"):
            yield (
                f"rollout.group_size must be >= 2 with objective.advantage={self.objective.advantage}, got 1: a group "
                "of one has no advantage"
            )
        if rollout.micro_group > group_size:
            yield f"rollout.micro_group_size must be <= rollout.group_size = {group_size}, got {rollout.micro_group}"
        if rollout.temperature == 0:
            yield (
                "rollout.temperature must be > 0 for training, got 0.0; use run.eval_temperature=0 for greedy "
                "evaluation"
            )
        longest_prompt, longest_response = self.data.max_prompt_tokens, rollout.max_new_tokens
        smallest = kv_pages(1, longest_response, [longest_prompt], page) * page
        if rollout.kv_budget_tokens is not None and rollout.kv_budget_tokens < smallest:
            yield (
                f"rollout.kv_budget_tokens must be >= {smallest} to hold a prompt of data.max_prompt_tokens = "
                f"{longest_prompt} and a response of rollout.max_new_tokens = {longest_response} in pages of {page}, "
                f"got {rollout.kv_budget_tokens}"
            )
        if rollout.kv_dtype != "auto" and self.objective.importance in ("auto", "none"):
            yield (
                f"rollout.kv_dtype must be auto with objective.importance={self.objective.importance}, got "
                f"{rollout.kv_dtype}: samples come from rounded KV, not from the policy that is trained; take "
                "objective.importance=token_tis"
            )

    def _row_problems(self) -> Iterator[str]:
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        rows = {"learner": self.learner.max_tokens_per_micro_batch}
        if self.has_reference_workers:
            rows["reference"] = self.reference.max_tokens_per_micro_batch
        for section, tokens in rows.items():
            if longest > tokens:
                yield (
                    f"{section}.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens "
                    f"= {longest}, got {tokens}; the nearest that works is {longest}"
                )

    def _objective_problems(self) -> Iterator[str]:
        objective, prompts, longest = self.objective, self.data.prompts_per_step, self.rollout.max_new_tokens
        if objective.mini_batches > prompts:
            yield f"objective.mini_batches must be <= data.prompts_per_step = {prompts}, got {objective.mini_batches}"
        if objective.overlong_buffer_tokens > longest:
            yield (
                f"objective.overlong_buffer_tokens must be <= rollout.max_new_tokens = {longest}, got "
                f"{objective.overlong_buffer_tokens}"
            )
        if self.run.max_staleness > 0 and objective.importance == "none":
            yield (
                "objective.importance must not be none with run.max_staleness=1: samples come from the policy of the "
                "step before; take token_tis"
            )
        if self.run.max_staleness > 0 and objective.dynamic_sampling:
            yield (
                "objective.dynamic_sampling must be false with run.max_staleness=1: further prompts would wait for the "
                "next weights"
            )

    def _learner_problems(self) -> Iterator[str]:
        learner, ranks = self.learner, self.cluster.learner_ranks
        if learner.shard_ranks is not None and (ranks % learner.shard_ranks != 0 or learner.backend != "fsdp"):
            yield (
                f"learner.shard_ranks must divide cluster.learner_ranks = {ranks}, with learner.backend=fsdp, got "
                f"{learner.shard_ranks} with {learner.backend}"
            )
        if learner.offload_optimizer and learner.optimizer == "adamw_8bit":
            yield "learner.optimizer must be adamw with learner.offload_optimizer=true, got adamw_8bit"
        if learner.backend != "deepspeed":
            return
        if learner.grad_sync == "last_row":
            yield (
                "learner.grad_sync must be every_row with learner.backend=deepspeed, got last_row: ZeRO reduces with "
                "every row"
            )
        if self.model.dtype == "float16":
            yield (
                "model.dtype must be bfloat16 or float32 with learner.backend=deepspeed, got float16; "
                "learner.backend=fsdp has it"
            )
        if learner.optimizer == "adamw_8bit":
            yield (
                "learner.optimizer must be adamw with learner.backend=deepspeed, got adamw_8bit; learner.backend=fsdp "
                "has it"
            )
        is_selective = learner.activation_checkpointing > 0 and learner.recompute_granularity == "selective"
        if is_selective and learner.zero_stage == 3:
            yield (
                "learner.recompute_granularity must be full with learner.zero_stage=3, got selective: ZeRO-3 gathers "
                "parameters in another order when it computes again; learner.backend=fsdp has it"
            )

    def _reference_problems(self) -> Iterator[str]:
        reference = self.reference
        if reference.placement != "learner":
            if reference.offload:
                yield (
                    "reference.offload=true needs reference.placement=learner: a reference worker has no other use for "
                    "its memory"
                )
            return
        if self.objective.kl_in_reward:
            yield (
                "reference.placement must be workers with objective.kl_in_reward=true: rewards need the reference "
                "before the learner has the samples"
            )
        if self.learner.lora_rank > 0 and reference.path is not None:
            yield (
                "reference.path must be none with learner.lora_rank > 0 and reference.placement=learner, got "
                f"{reference.path}: the reference is the policy without its adapters"
            )

    def _colocation_problems(self) -> Iterator[str]:
        cluster = self.cluster
        if not cluster.colocate:
            return
        if cluster.rollout_workers != cluster.learner_ranks:
            yield (
                f"cluster.rollout_workers must equal cluster.learner_ranks = {cluster.learner_ranks} with "
                f"cluster.colocate=true, got {cluster.rollout_workers}"
            )
        if cluster.rollout_gpus != cluster.learner_gpus:
            yield (
                f"cluster.rollout_gpus must equal cluster.learner_gpus = {cluster.learner_gpus:g} with "
                f"cluster.colocate=true, got {cluster.rollout_gpus:g}: they are one process"
            )
        if self.run.max_staleness > 0:
            yield "cluster.colocate must be false with run.max_staleness=1: weights would change while they sample"
        if cluster.weight_sync != "auto":
            yield (
                f"cluster.weight_sync must be auto with cluster.colocate=true, got {cluster.weight_sync}: nothing has "
                "to travel"
            )

    def _deterministic_problems(self) -> Iterator[str]:
        for name in ("rollout_gpus", "learner_gpus", "reference_gpus", "reward_gpus"):
            count = getattr(self.cluster, name)
            if count > 0:
                yield (
                    f"cluster.{name} must be 0 with run.deterministic=true, got {count}: only CPU runs are bitwise "
                    "repeatable"
                )
        if self.model.dtype != "float32":
            yield f"model.dtype must be float32 with run.deterministic=true, got {self.model.dtype}"
        if self.rollout.kv_dtype != "auto":
            yield (
                f"rollout.kv_dtype must be auto with run.deterministic=true, got {self.rollout.kv_dtype}: KV that is "
                "rounded need not repeat bitwise"
            )
        if self.rollout.predictor == "bert":
            yield (
                "rollout.predictor must be none or probe (not used then) with run.deterministic=true, got bert: "
                "rebuilt prefixes round differently"
            )

    @property
    def has_evaluations(self) -> bool:
        """Whether held-out problems are evaluated at all."""
        return self.run.eval_prompts > 0 and self.data.held_out is not None

    @property
    def has_reference_workers(self) -> bool:
        """Whether the reference model has processes of its own."""
        return self.objective.needs_reference and self.reference.placement == "workers"

    @property
    def uses_probe(self) -> bool:
        """Whether the run has a length probe. Not with run.deterministic: what it learns depends on which worker ended
        when."""
        return self.rollout.probes and not self.run.deterministic

    @property
    def importance(self) -> str:
        """objective.importance with auto resolved: none, token_tis or sequence_tis."""
        if self.objective.importance != "auto":
            return self.objective.importance
        return "token_tis" if self.run.max_staleness > 0 else "none"

    @property
    def mismatch_is_rounding(self) -> bool:
        """Whether engine and learner differ by float32 rounding alone, so that objective.mismatch_stop_float32 bounds
        every token.

        Not in 16 bits or with rollout.kv_dtype=fp8 or int8, where objective.mismatch_stop bounds the mean; with
        run.max_staleness=1 they are different policies, and neither holds.
        """
        return self.run.max_staleness == 0 and self.model.dtype == "float32" and self.rollout.kv_dtype == "auto"

    @property
    def mismatch_is_bounded_in_mean(self) -> bool:
        """Whether objective.mismatch_stop bounds the mean difference of engine and learner."""
        return self.run.max_staleness == 0 and not self.mismatch_is_rounding

    @property
    def long_rows(self) -> int:
        """Rows into which the learner cuts a group above learner.max_tokens_per_micro_batch: one for each rank whose
        rows run free of the others, of as many passes as it takes, its prompt computed once. 0: rows of one pass, so
        that ranks keep step."""
        free = self.learner.backend == "fsdp" and (
            self.cluster.learner_ranks == 1 or self.learner.grad_sync == "last_row"
        )
        return self.cluster.learner_ranks if free else 0

    @property
    def timeline_prompts(self) -> range:
        """Places in a step's batch, spread evenly, of the prompts of which samples.jsonl keeps who decoded when."""
        prompts = self.data.prompts_per_step
        return range(0, prompts, -(-prompts // TIMELINE_PROMPTS))

    @property
    def samples_per_step(self) -> int:
        """Samples every step trains on: prompts_per_step x group_size."""
        return self.data.prompts_per_step * self.rollout.group_size


def _raise_first(problems: Iterator[str]) -> None:
    problem = next(problems, None)
    if problem is not None:
        raise ValueError(problem)

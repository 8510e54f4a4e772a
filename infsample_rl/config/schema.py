"""All settings of a run, section by section, and what they may not say together. Standard library only.

`configs/` holds YAML that deviates from these defaults; `infsample_rl.config.loading` composes both.
A value out of bounds raises ValueError with the setting's name, the value and the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from infsample_rl.config.cluster import ClusterConfig
from infsample_rl.config.data import DataConfig
from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.config.fields import kv_pages
from infsample_rl.config.learner import LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.config.pairs import check_pairs
from infsample_rl.config.reward import ENVIRONMENT, RewardConfig, full_name, read_function
from infsample_rl.config.rollout import VLLM_CPU_BLOCK, RolloutConfig
from infsample_rl.config.run import LoggingConfig, ModelConfig, RunConfig

# (when, needs, why): see pairs.py
PAIRS = (
    ("", "rollout.temperature>0", "this is training; run.eval_temperature=0 is for greedy evaluation"),
    ("objective.advantage=std|rloo", "rollout.group_size>1", "a group of one has no advantage"),
    ("", "rollout.micro_group_size<=rollout.group_size", ""),
    ("", "objective.mini_batches<=data.prompts_per_step", ""),
    ("", "objective.overlong_buffer_tokens<=rollout.max_new_tokens", ""),
    (
        "objective.importance=auto|none",
        "rollout.kv_dtype=auto",
        "samples come from rounded KV, not from the policy that is trained; take objective.importance=token_tis",
    ),
    ("run.max_staleness=1", "objective.importance=auto|token_tis|sequence_tis", "samples are one policy behind"),
    ("run.max_staleness=1", "objective.dynamic_sampling=false", "further prompts would wait for the next weights"),
    ("run.max_staleness=1", "cluster.colocate=false", "weights would change while they sample"),
    ("objective.kl_reward_coef>0", "reference.placement=workers", "rewards need it before the learner has a sample"),
    ("reference.placement=workers", "reference.offload=false", "a worker has no other use for its memory"),
    (
        "reference.placement=learner learner.lora_rank>0",
        "reference.path=none",
        "the reference is the policy without its adapters",
    ),
    ("learner.shard_ranks>0", "learner.backend=fsdp", ""),
    ("learner.offload_optimizer=true", "learner.optimizer=adamw", ""),
    ("learner.backend=deepspeed", "learner.grad_sync=every_row", "ZeRO reduces with every row"),
    ("learner.backend=deepspeed", "model.dtype=float32|bfloat16", "learner.backend=fsdp has float16"),
    ("learner.backend=deepspeed", "learner.optimizer=adamw", "learner.backend=fsdp has adamw_8bit"),
    (
        "learner.backend=deepspeed learner.zero_stage=3 learner.activation_checkpointing>0",
        "learner.recompute_granularity=full",
        "ZeRO-3 gathers parameters in another order when it computes again; learner.backend=fsdp has selective",
    ),
    ("cluster.colocate=true", "cluster.rollout_workers=cluster.learner_ranks", "each has its learner rank's place"),
    ("cluster.colocate=true", "cluster.rollout_gpus=cluster.learner_gpus", "each has its learner rank's device"),
    ("cluster.colocate=true", "cluster.weight_sync=auto", "colocated weights have one way"),
    ("cluster.colocate=true", "rollout.tensor_parallel=1", "each learner rank's device holds a whole model by turns"),
    (
        "run.deterministic=true cluster.rollout_gpus=0",
        "model.dtype=float32",
        "on the CPU a row in 16 bits depends on those beside it",
    ),
    (
        "run.deterministic=true cluster.rollout_gpus>0",
        "model.dtype=bfloat16|float16",
        "on a GPU a row in float32 depends on those beside it",
    ),
    ("run.deterministic=true", "rollout.engine=native", "vLLM's sums depend on what decodes together"),
    ("rollout.tensor_parallel>1", "cluster.rollout_gpus=0|1", "its processes cannot share a GPU"),
    ("rollout.engine=vllm", "cluster.weight_sync=auto|object_store|broadcast", "vLLM's memory is its own"),
    ("rollout.engine=vllm", "rollout.temperature>=0.01", "vLLM takes lower ones for it"),
    ("rollout.engine=vllm run.eval_temperature>0", "run.eval_temperature>=0.01", "vLLM takes lower ones for it"),
    ("rollout.engine=vllm", "model.lm_head_fp32=false", "vLLM's head has the dtype of its weights"),
    ("rollout.engine=vllm learner.lora_rank>0", "learner.lora_publish=merged", "vLLM is given whole weights"),
    ("run.deterministic=true", "rollout.kv_dtype=auto", "rounded KV need not repeat bitwise"),
)
TURNS = (  # where trajectories have an environment
    ("", "rollout.schedule=token_budget", "samples that wait for their environment give up their slot"),
    ("", "data.apply_chat_template=true", "a turn's observation is rendered by the chat template"),
)
TIMELINE_PROMPTS = 2  # of a step, whose samples' timelines are kept


@dataclass(kw_only=True)
class Config:
    """All settings. Building one checks every bound and every pair of settings that could contradict each other."""

    run: RunConfig = field(default_factory=RunConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if self.rollout.engine == "vllm" and self.cluster.rollout_gpus == 0:
            pages = -(-self.rollout.page_size // VLLM_CPU_BLOCK)
            self.rollout = replace(self.rollout, page_size=pages * VLLM_CPU_BLOCK)
        self._find_rewards()
        check_pairs(PAIRS if not self.environment.is_set else (*PAIRS, *TURNS), **vars(self))
        if self.objective.distills and self.reference.path is None:
            raise ValueError(
                f"objective.distill_coef={self.objective.distill_coef:g} needs a teacher: give reference.path"
            )
        if self.run.deterministic and not all(judge.keep for judge in self.reward.judges):
            raise ValueError(
                "run.deterministic=true needs keep=true of reward.functions: judge, who may say something else when "
                "asked again"
            )
        self._check_budget()
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        rows = {"learner": self.learner.max_tokens_per_micro_batch}
        if self.has_reference_workers:
            rows["reference"] = self.reference.max_tokens_per_micro_batch
        for section, tokens in rows.items():
            if longest > tokens:
                raise ValueError(
                    f"{section}.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens "
                    f"= {longest}, got {tokens}; the nearest that works is {longest}"
                )
        if self.run.steps is not None:
            self.check_warmup(self.run.steps)
        ranks, shard = self.cluster.learner_ranks, self.learner.shard_ranks
        if shard is not None and ranks % shard != 0:
            raise ValueError(f"learner.shard_ranks must divide cluster.learner_ranks = {ranks}, got {shard}")

    def _find_rewards(self) -> None:
        """Give every entry of data.sources the full names of its functions, and reward.functions those that only they
        name."""
        functions = list(self.reward.functions)
        common = [function.name for function in functions]
        given = [*common, *(name for entry in self.data.sources for name in entry.reward if ".py:" in name)]
        for index, entry in enumerate(self.data.sources):
            entry.reward = [full_name(name, given) for name in entry.reward] or common
            if not entry.reward:
                raise ValueError(f"data.sources[{index}].reward and reward.functions are empty: name a function")
        named = dict.fromkeys(name for entry in self.data.sources for name in entry.reward if name not in common)
        functions += [read_function("data.sources: reward", name) for name in named]
        if not functions and self.environment.factory is not None:
            functions = [read_function("reward.functions", ENVIRONMENT)]
        if not functions and self.objective.reward_coef > 0:
            raise ValueError("reward.functions is empty: give one, e.g. reward.functions=[gsm8k]")
        self.reward = replace(self.reward, functions=functions)
        if self.environment.factory is None and any(function.name == ENVIRONMENT for function in functions):
            raise ValueError("reward.functions: environment needs environment.factory, whose get_reward it is")
        scoring = {name for entry in self.data.sources for name in entry.reward}
        idle = [function.name for function in functions if self.data.sources and function.name not in scoring]
        if idle:
            raise ValueError(
                f"reward.functions: {idle[0]} scores no prompt, as every entry of data.sources names others: give it "
                "to one, or leave it out of reward.functions"
            )

    @property
    def environment_weight(self) -> float:
        """Of what an environment gives, in the reward."""
        return sum(function.weight for function in self.reward.functions if function.name == ENVIRONMENT)

    def rewards_of(self, source: str) -> list[int]:
        """Places in reward.functions of those that score prompts of a source, by its name in DataConfig.parts."""
        names = self.data.named_sources[source].reward if source else None
        return [
            index for index, function in enumerate(self.reward.functions) if names is None or function.name in names
        ]

    def check_warmup(self, steps: int) -> None:
        """ValueError for a warm-up longer than a run of so many steps."""
        updates, warmup = steps * self.objective.updates_per_step, self.learner.warmup_steps
        if warmup > updates:
            raise ValueError(f"learner.warmup_steps must be <= {updates}, the updates of {steps} steps, got {warmup}")

    def _check_budget(self) -> None:
        budget = self.rollout.kv_budget_tokens
        prompt, response, page = self.data.max_prompt_tokens, self.rollout.max_new_tokens, self.rollout.page_size
        smallest = page * kv_pages(1, response, [prompt], page)
        if budget is not None and budget < smallest:
            raise ValueError(
                f"rollout.kv_budget_tokens must be >= {smallest} to hold a prompt of data.max_prompt_tokens = {prompt} "
                f"and a response of rollout.max_new_tokens = {response} in pages of {page}, got {budget}"
            )

    @property
    def has_evaluations(self) -> bool:
        """Whether held-out problems are evaluated at all."""
        return self.run.eval_prompts > 0 and any(part.held_out is not None for part in self.data.parts.values())

    @property
    def shares_process(self) -> bool:
        """Whether a rollout worker and a learner rank are one process."""
        return self.cluster.colocate and self.rollout.engine == "native"

    @property
    def takes_turns(self) -> bool:
        """Whether a rollout worker and a learner rank are two processes on one device, of which one rests while the
        other works."""
        return self.cluster.colocate and self.rollout.engine == "vllm"

    @property
    def has_reference_workers(self) -> bool:
        """Whether the reference model has processes of its own."""
        return self.objective.needs_reference and self.reference.placement == "workers"

    @property
    def is_deterministic(self) -> bool:
        """run.deterministic, where it is none by what the run computes with."""
        if self.run.deterministic is not None:
            return self.run.deterministic
        cluster = self.cluster
        gpus = cluster.rollout_gpus, cluster.learner_gpus, cluster.reference_gpus, cluster.reward_gpus
        is_float32 = self.model.dtype == "float32" and self.rollout.kv_dtype == "auto"
        return is_float32 and self.rollout.engine == "native" and not any(gpus)

    @property
    def importance(self) -> str:
        """objective.importance with auto resolved: none, token_tis or sequence_tis."""
        if self.objective.importance != "auto":
            return self.objective.importance
        return "token_tis" if self.run.max_staleness > 0 or self.rollout.engine == "vllm" else "none"

    @property
    def mismatch_is_rounding(self) -> bool:
        """Whether engine and learner differ by float32 rounding alone, so that objective.mismatch_stop_float32 bounds
        every token.

        Not in 16 bits or with rollout.kv_dtype=int8, where objective.mismatch_stop bounds the mean; with
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

    @property
    def most_samples(self) -> int:
        """Most samples that are asked for at a time: those of a step or of an evaluation."""
        evaluated = self.run.eval_prompts * self.run.eval_samples if self.has_evaluations else 0
        return max(self.samples_per_step, evaluated)

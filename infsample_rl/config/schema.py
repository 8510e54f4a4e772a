"""Every setting, once: its type, default, bound and meaning. Standard library only.

Those of sampling are in config_rollout.py, of the update in config_learner.py, of rewards in config_reward.py, of
processes and machines in config_cluster.py.

`configs/` holds YAML that deviates from these defaults; `infsample_rl.config.loading` composes both.
A value out of bounds raises ValueError with the setting's name, the value and the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infsample_rl.config.cluster import ClusterConfig
from infsample_rl.config.fields import check_bounds, check_temperature, setting
from infsample_rl.config.learner import LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.config.reward import RewardConfig
from infsample_rl.config.reward import RewardFunctionConfig as RewardFunctionConfig  # everyone finds it here
from infsample_rl.config.rollout import RolloutConfig

SPLIT_SOURCES = ("gsm8k", "math", "kk", "kk_tiny")  # sources with a training and a test half of their own
DTYPES = ("float32", "bfloat16", "float16")
ALL_PROBLEMS = 1_000_000  # run.eval_prompts of "the whole held-out set"


@dataclass(kw_only=True)
class RunConfig:
    """One training run."""

    name: str = setting("infsample_rl", "name of the run, of its folder and in W&B")
    dir: str | None = setting(None, "run folder; none: runs/<name>-<date>-<time>")
    seed: int = setting(0, "seed of the sampling noise and the data order", low=0, high=2**31 - 1)
    deterministic: bool = setting(False, "bitwise repeatable on CPU in float32 under any timing or resume; slow")
    resume: str = setting("auto", "auto: go on from run.dir's last checkpoint; never; or the path of a checkpoint")
    steps: int | None = setting(None, "training steps; none: run.epochs passes over the data", low=1)
    epochs: float = setting(1.0, "passes over the data when run.steps is none", above=0)
    checkpoint_every: int = setting(10, "steps between checkpoints; 0: only at the end", low=0)
    keep_checkpoints: int = setting(2, "checkpoints kept, the newest first", low=1)
    eval_every: int = setting(0, "steps between evaluations; 0: only before the first and after the last step", low=0)
    eval_prompts: int = setting(100, "held-out problems per evaluation; 0: no evaluation", low=0)
    eval_samples: int = setting(1, "samples per held-out problem (k of mean@k)", low=1)
    grace_s: float = setting(
        30.0,
        "seconds from SIGTERM until the run is killed: a checkpoint that takes longer is not begun, or given up",
        low=0,
    )
    max_staleness: int = setting(
        0, "updates that sampling may be behind; 1: a step's samples are drawn during the update before", low=0, high=1
    )
    eval_temperature: float | None = setting(
        None, "temperature of evaluations; none: rollout.temperature; 0: greedy", low=0, high=10
    )

    def __post_init__(self) -> None:
        check_bounds("run", self)
        if self.eval_temperature is not None:
            check_temperature("run.eval_temperature", self.eval_temperature)


@dataclass(kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = setting("", "Hugging Face folder or hub name of a causal language model")
    tokenizer_path: str | None = setting(None, "folder or hub name of the tokenizer; none: model.path")
    dtype: str = setting(
        "float32", "dtype of weights and compute; the optimizer always keeps float32 masters", choices=DTYPES
    )
    lm_head_fp32: bool = setting(
        False,
        "logits in float32 from 16-bit weights, in engine, learner and reference alike; without effect in float32",
    )
    trust_remote_code: bool = setting(False, "run code that comes with the model")

    def __post_init__(self) -> None:
        check_bounds("model", self)
        if not self.path:
            raise ValueError(
                "model.path is empty: give a Hugging Face folder or hub name, e.g. model.path=Qwen/Qwen3-1.7B"
            )


DATA_NAMES = ("gsm8k", "math", "kk", "kk_tiny")  # data sets by short names, whatever folder is called so here


@dataclass(kw_only=True)
class DataConfig:
    """Where prompts come from and how they are rendered."""

    source: str = setting(
        "", "gsm8k, math, kk (hub), a .jsonl or .parquet file, a hub data set, or reasoning_gym:<task>"
    )
    split: str = setting("train", "split of a hub data set")
    eval_source: str | None = setting(
        "auto",
        "held-out problems, given like data.source; auto: the test half of gsm8k, math, kk, kk_tiny, reasoning_gym, "
        "else none; none: no evaluation",
    )
    eval_split: str = setting("test", "split of a hub data set for evaluation")
    prompt_field: str | None = setting(None, "field of the question; none: found (question, problem, prompt, quiz)")
    answer_field: str | None = setting(
        None, "field the reward functions get as `answer`; none: found (answer, solution, ...)"
    )
    system_prompt: str | None = setting(None, "system message before every question")
    instruction: str | None = setting(None, "text appended to every question, after a blank line")
    apply_chat_template: bool = setting(
        True, "false: the model is given the plain text, as where its tokenizer has no chat template"
    )
    chat_template_kwargs: dict[str, Any] = setting(
        {}, "keywords of the model's chat template, e.g. {enable_thinking: false}"
    )
    prompts_per_step: int = setting(
        8, "prompts of one step; samples of a step = prompts_per_step x rollout.group_size", low=1
    )
    max_prompt_tokens: int = setting(1024, "longest prompt in tokens", low=1)
    long_prompts: str = setting(
        "error",
        "a prompt above max_prompt_tokens: error, drop it, or truncate its question from the left",
        choices=("error", "drop", "truncate"),
    )
    bad_rows: str = setting(
        "error", "a row that cannot be used: error, or skip it with a warning", choices=("error", "skip")
    )
    shuffle: bool = setting(True, "a new order every epoch, made from run.seed")
    size: int = setting(1000, "problems generated by reasoning_gym:<task>", low=1)
    generator_seed: int = setting(0, "seed of reasoning_gym:<task>; held-out problems use another range", low=0)
    generator_kwargs: dict[str, Any] = setting({}, "settings of the reasoning_gym task, e.g. {max_terms: 3}")

    def __post_init__(self) -> None:
        check_bounds("data", self)
        if not self.source:
            raise ValueError(
                "data.source is empty: give gsm8k, math, kk, a .jsonl or .parquet file, a hub name or "
                "reasoning_gym:<task>"
            )

    @property
    def held_out(self) -> str | None:
        """Where held-out problems come from, `auto` resolved."""
        if self.eval_source != "auto":
            return self.eval_source
        return self.source if self.source in SPLIT_SOURCES or self.source.startswith("reasoning_gym:") else None


@dataclass(kw_only=True)
class LoggingConfig:
    """What the user sees and what is kept."""

    progress: bool = setting(
        True, "the live view on a terminal, a line a step elsewhere; false: notes and warnings alone"
    )
    verbose: bool = setting(False, "more lines: a step's figures, what it waited for, every worker's phases")
    wandb: str = setting(
        "auto", "auto: online with a key, else offline", choices=("auto", "online", "offline", "disabled")
    )
    wandb_project: str = setting("infsample_rl", "W&B project, MLflow experiment")
    tensorboard: bool = setting(False, "also write TensorBoard files")
    mlflow: str | None = setting(
        None, "also log to MLflow at this tracking URI, e.g. sqlite:///FILE or http://HOST:5000; none: no MLflow"
    )
    trace_steps: int = setting(
        20, "steps kept in trace.json, the timeline of every worker's phases, the newest last; 0: no file", low=0
    )
    record_every: int = setting(
        0, "steps between recordings of all samples for python -m infsample_rl replay; 0: none", low=0
    )
    completions_per_step: int = setting(
        4, "samples a step writes to completions.jsonl and the W&B table; 0: none", low=0
    )
    timeline_prompts_per_step: int = setting(
        2,
        "prompts of which a step writes to samples.jsonl who decoded when, all G samples with the ends of their texts; "
        "0: none",
        low=0,
    )
    report: bool = setting(True, "write report.html at every checkpoint and at the end")

    def __post_init__(self) -> None:
        check_bounds("logging", self)


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
        group_size, micro_group = self.rollout.group_size, self.rollout.micro_group
        if group_size == 1 and self.objective.advantage in ("std", "rloo"):
            raise ValueError(
                f"rollout.group_size must be >= 2 with objective.advantage={self.objective.advantage}, got 1: a group "
                "of one has no advantage"
            )
        if micro_group > group_size:
            raise ValueError(
                f"rollout.micro_group_size must be <= rollout.group_size = {group_size}, got {micro_group}"
            )
        if self.rollout.temperature == 0:
            raise ValueError(
                "rollout.temperature must be > 0 for training, got 0.0; use run.eval_temperature=0 for greedy "
                "evaluation"
            )
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        budget, page_size = self.rollout.kv_budget_tokens, self.rollout.page_size
        smallest = (
            -(-self.data.max_prompt_tokens // page_size) + -(-self.rollout.max_new_tokens // page_size)
        ) * page_size
        if budget is not None and budget < smallest:
            raise ValueError(
                f"rollout.kv_budget_tokens must be >= {smallest} to hold a prompt of data.max_prompt_tokens = "
                f"{self.data.max_prompt_tokens} "
                f"and a response of rollout.max_new_tokens = {self.rollout.max_new_tokens} in pages of {page_size}, "
                f"got {budget}"
            )
        if longest > self.learner.max_tokens_per_micro_batch:
            raise ValueError(
                "learner.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens = "
                f"{longest}, "
                f"got {self.learner.max_tokens_per_micro_batch}; the nearest that works is {longest}"
            )
        if (
            self.objective.needs_reference
            and self.reference.placement == "workers"
            and longest > self.reference.max_tokens_per_micro_batch
        ):
            raise ValueError(
                "reference.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens = "
                f"{longest}, "
                f"got {self.reference.max_tokens_per_micro_batch}; the nearest that works is {longest}"
            )
        if self.run.steps is not None:
            self.check_warmup(self.run.steps)
        if self.rollout.kv_dtype != "auto" and self.objective.importance in ("auto", "none"):
            raise ValueError(
                f"rollout.kv_dtype must be auto with objective.importance={self.objective.importance}, got "
                f"{self.rollout.kv_dtype}: samples come "
                "from rounded KV, not from the policy that is trained; take objective.importance=token_tis"
            )
        self._check_objective()
        self._check_learner()
        if self.run.deterministic:
            self._check_deterministic()

    def check_warmup(self, steps: int) -> None:
        """ValueError for a warm-up longer than a run of so many steps."""
        updates, warmup = steps * self.objective.updates_per_step, self.learner.warmup_steps
        if warmup > updates:
            raise ValueError(f"learner.warmup_steps must be <= {updates}, the updates of {steps} steps, got {warmup}")

    def _check_objective(self) -> None:
        objective = self.objective
        if objective.mini_batches > self.data.prompts_per_step:
            raise ValueError(
                f"objective.mini_batches must be <= data.prompts_per_step = {self.data.prompts_per_step}, got "
                f"{objective.mini_batches}"
            )
        if objective.overlong_buffer_tokens > self.rollout.max_new_tokens:
            raise ValueError(
                f"objective.overlong_buffer_tokens must be <= rollout.max_new_tokens = {self.rollout.max_new_tokens}, "
                f"got {objective.overlong_buffer_tokens}"
            )
        if self.run.max_staleness > 0 and objective.importance == "none":
            raise ValueError(
                "objective.importance must not be none with run.max_staleness=1: samples come from the policy of the "
                "step before; take token_tis"
            )
        if self.run.max_staleness > 0 and objective.dynamic_sampling:
            raise ValueError(
                "objective.dynamic_sampling must be false with run.max_staleness=1: further prompts would wait for the "
                "next weights"
            )
        if objective.kl_in_reward and self.reference.placement == "learner":
            raise ValueError(
                "reference.placement must be workers with objective.kl_in_reward=true: rewards need the reference "
                "before the learner has the samples"
            )

    def _check_moments_folder(self) -> None:
        learner, given = self.learner, f"learner.moments_folder={self.learner.moments_folder}"
        if learner.backend == "deepspeed":
            raise ValueError(f"learner.backend must be fsdp with {given}, got deepspeed")
        if learner.optimizer != "adamw":
            raise ValueError(f"learner.optimizer must be adamw with {given}, got {learner.optimizer}")
        if self.cluster.learner_gpus > 0 and not learner.offload_optimizer:
            raise ValueError(
                f"learner.offload_optimizer must be true with {given} and cluster.learner_gpus > 0: only host memory "
                "maps a file"
            )

    def _check_learner(self) -> None:
        learner, ranks = self.learner, self.cluster.learner_ranks
        if learner.shard_ranks is not None and (ranks % learner.shard_ranks != 0 or learner.backend != "fsdp"):
            raise ValueError(
                f"learner.shard_ranks must divide cluster.learner_ranks = {ranks}, with learner.backend=fsdp, got "
                f"{learner.shard_ranks} "
                f"with {learner.backend}"
            )
        if learner.backend == "deepspeed" and learner.grad_sync == "last_row":
            raise ValueError(
                "learner.grad_sync must be every_row with learner.backend=deepspeed, got last_row: ZeRO reduces with "
                "every row"
            )
        if learner.backend == "deepspeed" and self.model.dtype == "float16":
            raise ValueError(
                "model.dtype must be bfloat16 or float32 with learner.backend=deepspeed, got float16; "
                "learner.backend=fsdp has it"
            )
        if learner.backend == "deepspeed" and learner.optimizer == "adamw_8bit":
            raise ValueError(
                "learner.optimizer must be adamw with learner.backend=deepspeed, got adamw_8bit; learner.backend=fsdp "
                "has it"
            )
        is_selective = learner.activation_checkpointing > 0 and learner.recompute_granularity == "selective"
        if is_selective and learner.backend == "deepspeed" and learner.zero_stage == 3:
            raise ValueError(
                "learner.recompute_granularity must be full with learner.zero_stage=3, got selective: ZeRO-3 gathers "
                "parameters in another order "
                "when it computes again; learner.backend=fsdp has it"
            )
        if learner.offload_optimizer and learner.optimizer == "adamw_8bit":
            raise ValueError("learner.optimizer must be adamw with learner.offload_optimizer=true, got adamw_8bit")
        if learner.moments_folder is not None:
            self._check_moments_folder()
        if self.reference.offload and self.reference.placement != "learner":
            raise ValueError(
                "reference.offload=true needs reference.placement=learner: a reference worker has no other use for its "
                "memory"
            )
        if learner.lora_rank > 0 and self.reference.placement == "learner" and self.reference.path is not None:
            raise ValueError(
                "reference.path must be none with learner.lora_rank > 0 and reference.placement=learner, got "
                f"{self.reference.path}: "
                "the reference is the policy without its adapters"
            )
        if self.cluster.colocate and self.cluster.rollout_workers != ranks:
            raise ValueError(
                f"cluster.rollout_workers must equal cluster.learner_ranks = {ranks} with cluster.colocate=true, got "
                f"{self.cluster.rollout_workers}"
            )
        if self.cluster.colocate and self.cluster.rollout_gpus != self.cluster.learner_gpus:
            raise ValueError(
                f"cluster.rollout_gpus must equal cluster.learner_gpus = {self.cluster.learner_gpus:g} with "
                "cluster.colocate=true, "
                f"got {self.cluster.rollout_gpus:g}: they are one process"
            )
        if self.cluster.colocate and self.run.max_staleness > 0:
            raise ValueError(
                "cluster.colocate must be false with run.max_staleness=1: weights would change while they sample"
            )
        if self.cluster.colocate and self.cluster.weight_sync != "auto":
            raise ValueError(
                f"cluster.weight_sync must be auto with cluster.colocate=true, got {self.cluster.weight_sync}: nothing "
                "has to travel"
            )

    def _check_deterministic(self) -> None:
        gpus = {
            name: getattr(self.cluster, name)
            for name in ("rollout_gpus", "learner_gpus", "reference_gpus", "reward_gpus")
        }
        for name, count in gpus.items():
            if count > 0:
                raise ValueError(
                    f"cluster.{name} must be 0 with run.deterministic=true, got {count}: only CPU runs are bitwise "
                    "repeatable"
                )
        if self.model.dtype != "float32":
            raise ValueError(f"model.dtype must be float32 with run.deterministic=true, got {self.model.dtype}")
        if self.rollout.kv_dtype != "auto":
            raise ValueError(
                f"rollout.kv_dtype must be auto with run.deterministic=true, got {self.rollout.kv_dtype}: KV that is "
                "rounded need not repeat bitwise"
            )
        if self.rollout.predictor == "bert":
            raise ValueError(
                "rollout.predictor must be none or probe (not used then) with run.deterministic=true, got "
                f"{self.rollout.predictor}: "
                "rebuilt prefixes round differently"
            )

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
        """Places in a step's batch of the prompts that logging.timeline_prompts_per_step asks for, spread evenly."""
        prompts, wanted = self.data.prompts_per_step, self.logging.timeline_prompts_per_step
        return range(0, prompts if wanted else 0, -(-prompts // max(1, wanted)))

    @property
    def samples_per_step(self) -> int:
        """Samples every step trains on: prompts_per_step x group_size."""
        return self.data.prompts_per_step * self.rollout.group_size

"""Every setting, once: its type, default, bound and meaning. Standard library only.

`configs/` holds YAML that deviates from these defaults; `infsample_rl.config_loading` composes both.
A value out of bounds raises ValueError with the setting's name, the value and the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from infsample_rl.config_fields import check_bounds, parse_bytes, setting

SCHEDULES = ("token_budget", "full_group", "naive", "fixed_slot", "dynamic_slot", "arrival", "fptas", "sjf", "infinite", "lpt")
PREDICTORS = ("none", "bert", "probe")
PREDICTED_SCHEDULES = ("fptas", "sjf", "infinite", "lpt")  # orders that need predicted lengths
PAPER_PREFIX_TOKENS = 16  # k of the paper
SPLIT_SOURCES = ("gsm8k", "math", "kk", "kk_tiny")  # sources with a training and a test half of their own
DTYPES = ("float32", "bfloat16", "float16")
KV_DTYPES = ("auto", "fp8", "int8")


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
    eval_temperature: float | None = setting(None, "temperature of evaluations; none: rollout.temperature; 0: greedy", low=0, high=10)

    def __post_init__(self) -> None:
        check_bounds("run", self)


@dataclass(kw_only=True)
class ModelConfig:
    """The policy."""

    path: str = setting("", "Hugging Face folder or hub name of a causal language model")
    tokenizer_path: str | None = setting(None, "folder or hub name of the tokenizer; none: model.path")
    dtype: str = setting("float32", "dtype of weights and compute; the optimizer always keeps float32 masters", choices=DTYPES)
    lm_head_fp32: bool = setting(False, "logits in float32 from 16-bit weights, in engine, learner and reference alike; without effect in float32")
    trust_remote_code: bool = setting(False, "run code that comes with the model")

    def __post_init__(self) -> None:
        check_bounds("model", self)
        if not self.path:
            raise ValueError("model.path is empty: give a Hugging Face folder or hub name, e.g. model.path=Qwen/Qwen3-1.7B")


@dataclass(kw_only=True)
class DataConfig:
    """Where prompts come from and how they are rendered."""

    source: str = setting("", "gsm8k, math, kk (hub), a .jsonl or .parquet file, a hub data set, or reasoning_gym:<task>")
    split: str = setting("train", "split of a hub data set")
    eval_source: str | None = setting(
        "auto",
        "held-out problems, given like data.source; auto: the test half of gsm8k, math, kk, kk_tiny, reasoning_gym, else none; none: no evaluation",
    )
    eval_split: str = setting("test", "split of a hub data set for evaluation")
    prompt_field: str | None = setting(None, "field of the question; none: found (question, problem, prompt, quiz)")
    answer_field: str | None = setting(None, "field the reward functions get as `answer`; none: found (answer, solution, ...)")
    system_prompt: str | None = setting(None, "system message before every question")
    instruction: str | None = setting(None, "text appended to every question, after a blank line")
    chat_template_kwargs: dict[str, Any] = setting({}, "keywords of the model's chat template, e.g. {enable_thinking: false}")
    prompts_per_step: int = setting(8, "prompts of one step; samples of a step = prompts_per_step x rollout.group_size", low=1)
    max_prompt_tokens: int = setting(1024, "longest prompt in tokens", low=1)
    long_prompts: str = setting(
        "error", "a prompt above max_prompt_tokens: error, drop it, or truncate its question from the left", choices=("error", "drop", "truncate")
    )
    bad_rows: str = setting("error", "a row that cannot be used: error, or skip it with a warning", choices=("error", "skip"))
    shuffle: bool = setting(True, "a new order every epoch, made from run.seed")
    size: int = setting(1000, "problems generated by reasoning_gym:<task>", low=1)
    generator_seed: int = setting(0, "seed of reasoning_gym:<task>; held-out problems use another range", low=0)
    generator_kwargs: dict[str, Any] = setting({}, "settings of the reasoning_gym task, e.g. {max_terms: 3}")

    def __post_init__(self) -> None:
        check_bounds("data", self)
        if not self.source:
            raise ValueError("data.source is empty: give gsm8k, math, kk, a .jsonl or .parquet file, a hub name or reasoning_gym:<task>")

    @property
    def held_out(self) -> str | None:
        """Where held-out problems come from, `auto` resolved."""
        if self.eval_source != "auto":
            return self.eval_source
        return self.source if self.source in SPLIT_SOURCES or self.source.startswith("reasoning_gym:") else None


@dataclass(kw_only=True)
class RolloutConfig:
    """Sampling: G completions of every prompt through a fixed KV pool."""

    group_size: int = setting(8, "G, completions of every prompt", low=1)
    slots: int = setting(4, "rows of a fixed-slot schedule (full_group: G); token_budget: the memory of how many full responses", low=1)
    schedule: str = setting("token_budget", "which sample decodes next (README: schedules)", choices=SCHEDULES)
    predictor: str = setting("probe", "length predictor: probe learns while the run samples; bert is the paper's, frozen", choices=PREDICTORS)
    predictor_path: str | None = setting(None, "folder of the trained bert predictor; none: all lengths predicted equal, with a warning")
    predict_every: int = setting(32, "running steps from one prediction of the probe for all rows to the next", low=1)
    prefix_tokens: int | None = setting(
        None, "k, tokens of every sample decoded before fptas, sjf, infinite and lpt start; none: 16 with a predictor", low=0
    )
    epsilon: float = setting(0.1, "rounding of fptas and infinite (Algorithm 2)", above=0)
    max_new_tokens: int = setting(256, "longest response in tokens", low=1)
    temperature: float = setting(1.0, "0 is exact argmax", low=0, high=10)
    top_p: float = setting(1.0, "nucleus mass kept; 1: all", above=0, high=1)
    top_k: int = setting(0, "most probable tokens kept; 0: all", low=0)
    min_p: float = setting(0.0, "tokens below min_p x the largest probability are dropped", low=0, high=1)
    stop_token_ids: list[int] = setting([], "stop ids beside those of the generation config and the tokenizer")
    stop_strings: list[str] = setting([], "texts that end a sample at the token that completes one; rewards get the text before it")
    bad_token_ids: list[int] = setting([], "ids never sampled; the policy is the softmax over the others, in engine, learner and reference")
    prompts_at_once: int = setting(2, "prompts resident in one worker at a time; rows a prompt's tail leaves idle go to the next", low=1)
    page_size: int = setting(16, "tokens of a KV page", low=1, high=1024)
    kv_budget_tokens: int | None = setting(
        None, "all KV tokens of a worker, prompts included; none: slots x max_new_tokens + resident prompts", low=1
    )
    kv_budget_bytes: str | None = setting(None, "the same in bytes, as 24GB or 512MiB; auto: 0.9 of what is free after the weights")
    kv_dtype: str = setting("auto", "dtype of KV pages; auto: the model's; fp8, int8: 8 bits, a scale per page and kv head", choices=KV_DTYPES)
    max_rows: int | None = setting(None, "most rows of token_budget at a time; none: 256", low=1)
    preemption: str = setting("auto", "KV of a preempted sample: computed again, or parked in host memory", choices=("auto", "recompute", "park"))
    micro_group_size: int | None = setting(None, "samples of one prompt streamed together; none: slots", low=1)
    max_undelivered: int = setting(8, "micro-groups that wait in a worker before it pauses", low=1)

    def __post_init__(self) -> None:
        if isinstance(self.kv_budget_bytes, int):
            self.kv_budget_bytes = str(self.kv_budget_bytes)
        check_bounds("rollout", self)
        if "" in self.stop_strings:
            raise ValueError(f"rollout.stop_strings must not hold an empty string, got {self.stop_strings}; take it out")
        if any("\N{REPLACEMENT CHARACTER}" in string for string in self.stop_strings):
            raise ValueError(f"rollout.stop_strings must not hold U+FFFD, which incomplete characters decode to, got {self.stop_strings}")
        if any(token < 0 for token in self.bad_token_ids):
            raise ValueError(f"rollout.bad_token_ids must be >= 0, got {self.bad_token_ids}")
        if self.kv_budget_bytes is not None:
            if self.kv_budget_tokens is not None:
                raise ValueError(f"give rollout.kv_budget_tokens={self.kv_budget_tokens} or rollout.kv_budget_bytes={self.kv_budget_bytes}, not both")
            if self.kv_budget_bytes != "auto":
                parse_bytes(self.kv_budget_bytes)
        if self.max_rows is not None and self.schedule != "token_budget":
            raise ValueError(f"rollout.max_rows={self.max_rows} is not read by rollout.schedule={self.schedule}: set rollout.slots instead")
        if self.schedule == "dynamic_slot" and self.group_size < self.slots:
            raise ValueError(f"rollout.slots must be <= group_size = {self.group_size} with schedule=dynamic_slot, got {self.slots}")
        self._check_predictor()

    def _check_predictor(self) -> None:
        if self.predictor == "bert" and self.schedule not in PREDICTED_SCHEDULES:
            raise ValueError(f"rollout.predictor=bert is not read by rollout.schedule={self.schedule}: take predictor=probe or schedule=infinite")
        if self.prefix_tokens is None:
            return
        if self.predictor == "none" and self.prefix_tokens > 0:
            raise ValueError(f"rollout.prefix_tokens must be 0 with predictor=none, got {self.prefix_tokens}")
        if self.prefix_tokens > 0 and self.schedule not in PREDICTED_SCHEDULES:
            raise ValueError(
                f"rollout.prefix_tokens must be 0 with schedule={self.schedule}, which waits for no prediction, got {self.prefix_tokens}; "
                "leave it out"
            )
        if self.prefix_tokens >= self.max_new_tokens:
            raise ValueError(f"rollout.prefix_tokens must be < max_new_tokens = {self.max_new_tokens}, got {self.prefix_tokens}")
        if self.predictor == "bert" and self.prefix_tokens < 1:
            raise ValueError(f"rollout.prefix_tokens must be >= 1 with predictor=bert, got {self.prefix_tokens}; the paper takes 16")
        if self.predictor == "probe" and self.schedule in PREDICTED_SCHEDULES and self.prefix_tokens < 2:
            raise ValueError(
                f"rollout.prefix_tokens must be >= 2 with predictor=probe and schedule={self.schedule}, got {self.prefix_tokens}: "
                "the state before the first token is the same for all samples; leave it out"
            )

    @property
    def num_prefix_tokens(self) -> int:
        """k: tokens every sample decodes before a schedule that waits for predicted lengths starts; 0: there is no such phase."""
        if self.prefix_tokens is not None:
            return self.prefix_tokens
        if self.schedule not in PREDICTED_SCHEDULES or self.predictor == "none":
            return 0
        fewest = 2 if self.predictor == "probe" else 1  # the state before the first token is the same for all samples
        return min(PAPER_PREFIX_TOKENS, self.max_new_tokens - 1) if self.max_new_tokens > fewest else 0

    @property
    def probes(self) -> bool:
        """Whether the probe is asked: by a schedule that reads predictions."""
        return self.predictor == "probe" and (self.schedule == "token_budget" or self.schedule in PREDICTED_SCHEDULES)

    @property
    def num_slots(self) -> int:
        """Full responses that the default KV budget holds, and rows of a fixed-slot schedule: slots, or G for `full_group`."""
        return self.group_size if self.schedule == "full_group" else min(self.slots, self.group_size * self.prompts_at_once)

    @property
    def has_budget(self) -> bool:
        """Whether the KV budget is given by itself, not as slots."""
        return self.kv_budget_tokens is not None or self.kv_budget_bytes is not None

    @property
    def most_rows(self) -> int:
        """Most rows that decode at a time."""
        return min(self.max_rows or 256, self.group_size * self.prompts_at_once) if self.schedule == "token_budget" else self.num_slots

    @property
    def micro_group(self) -> int:
        """Samples streamed together."""
        return self.micro_group_size or min(self.slots, self.group_size)


@dataclass(kw_only=True)
class ObjectiveConfig:
    """The GRPO objective; the paper's equations 2-4 by default."""

    advantage: str = setting("std", "std: (r - mean) / (std + 1e-6); mean_only (section 3.4); rloo", choices=("std", "mean_only", "rloo"))
    loss: str = setting("grpo", "loss and its normalisation", choices=("grpo", "dr_grpo", "dapo", "gspo", "cispo"))
    clip_low: float = setting(0.2, "ratio is clipped below at 1 - clip_low", low=0, high=1)
    clip_high: float = setting(0.2, "ratio is clipped above at 1 + clip_high", low=0)
    kl: str = setting("k3", "KL estimator in the loss", choices=("none", "k1", "k2", "k3"))
    kl_coef: float = setting(0.001, "weight of the KL in the loss", low=0)
    kl_in_reward: bool = setting(False, "subtract kl_reward_coef x log(policy / reference) from every reward (section 3.4)")
    kl_reward_coef: float = setting(0.0, "beta of the KL in the reward", low=0)
    importance: str = setting(
        "none", "truncated importance weights for the difference of engine and learner", choices=("none", "token_tis", "sequence_tis")
    )
    importance_cap: float = setting(2.0, "cap of the importance weights", above=0)
    mismatch_stop: float = setting(
        0.05, "in bf16, fp16 or with kv_dtype=fp8, int8 the run stops above this mean |engine - learner| log-probability", above=0
    )
    mismatch_stop_float32: float = setting(1e-4, "in fp32 with kv_dtype=auto the run stops above this |engine - learner| of any token", above=0)
    shuffle_advantages: bool = setting(False, "control run: shuffle the advantages within every group, so nothing can be learnt")

    def __post_init__(self) -> None:
        check_bounds("objective", self)
        if self.kl_in_reward and self.kl_reward_coef == 0:
            raise ValueError("objective.kl_reward_coef must be > 0 with kl_in_reward=true, got 0.0")
        if not self.kl_in_reward and self.kl_reward_coef > 0:
            raise ValueError(
                f"objective.kl_reward_coef={self.kl_reward_coef} is not read with kl_in_reward=false: set kl_in_reward=true or kl_reward_coef=0"
            )

    @property
    def kl_in_loss(self) -> bool:
        """Whether the loss has a KL term."""
        return self.kl != "none" and self.kl_coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are read at all; if not, no reference model is loaded."""
        return self.kl_in_loss or self.kl_in_reward


@dataclass(kw_only=True)
class RewardFunctionConfig:
    """One reward function of the weighted sum."""

    name: str = setting("", "gsm8k, math, kk, reasoning_gym, path/to/file.py:function, or model:<folder or hub name>")
    weight: float = setting(1.0, "factor in the sum")
    kwargs: dict[str, Any] = setting({}, "keywords passed to the function")

    def __post_init__(self) -> None:
        check_bounds("reward.functions", self)


@dataclass(kw_only=True)
class RewardConfig:
    """Reward functions and the processes they run in."""

    functions: list[RewardFunctionConfig] = field(default_factory=list, metadata={})
    timeout_s: float = setting(30.0, "seconds a call may take before its process is killed and the reward is None", above=0)
    retries: int = setting(1, "further tries of a call that died (not of one that timed out)", low=0)
    processes: int = setting(1, "processes of one reward worker that run reward functions", low=1)
    model_batch_tokens: int = setting(16384, "padded tokens in one batch of a reward model", low=1)

    def __post_init__(self) -> None:
        check_bounds("reward", self)
        if not self.functions:
            raise ValueError("reward.functions is empty: give one, e.g. 'reward.functions=[{name: gsm8k}]'")
        for index, function in enumerate(self.functions):
            if not function.name:
                raise ValueError(f"reward.functions[{index}].name is empty: give gsm8k, math, kk, reasoning_gym, file.py:function or model:PATH")


@dataclass(kw_only=True)
class ReferenceConfig:
    """The frozen policy of the KL terms; loaded only when one is used."""

    path: str | None = setting(None, "folder or hub name; none: model.path")
    max_tokens_per_micro_batch: int = setting(16384, "tokens of one packed row", low=16)

    def __post_init__(self) -> None:
        check_bounds("reference", self)


@dataclass(kw_only=True)
class LearnerConfig:
    """The update."""

    backend: str = setting("fsdp", "how parameters are sharded: fsdp is FSDP2", choices=("fsdp",))
    lr: float = setting(1e-6, "AdamW learning rate", above=0)
    lr_schedule: str = setting("constant", "after the warm-up", choices=("constant", "linear", "cosine"))
    min_lr_ratio: float = setting(0.0, "lr at the end of linear and cosine, as a share of lr", low=0, high=1)
    warmup_steps: int = setting(0, "steps of linear warm-up from 0", low=0)
    weight_decay: float = setting(0.0, "AdamW weight decay, of matrices only", low=0)
    beta1: float = setting(0.9, "AdamW beta 1", low=0, high=0.999999)
    beta2: float = setting(0.999, "AdamW beta 2", low=0, high=0.999999)
    adam_epsilon: float = setting(1e-8, "AdamW epsilon", above=0)
    max_grad_norm: float = setting(1.0, "gradient norm is clipped at this", above=0)
    max_tokens_per_micro_batch: int = setting(16384, "tokens of one packed learner row, over all its responses", low=16)
    logprob_chunk_tokens: int = setting(1024, "tokens whose logits exist at a time", low=1)
    activation_checkpointing: bool = setting(False, "recompute activations in the backward pass")
    on_nonfinite: str = setting("stop", "a NaN or infinite loss or gradient: stop the run, or skip the update", choices=("stop", "skip"))

    def __post_init__(self) -> None:
        check_bounds("learner", self)


@dataclass(kw_only=True)
class ClusterConfig:
    """Processes and what each takes."""

    address: str | None = setting(None, "address of a running Ray cluster (auto: the one here); none: a new local one")
    rollout_workers: int = setting(1, "rollout workers", low=1)
    rollout_gpus: float = setting(0.0, "GPUs of one rollout worker", low=0, high=1)
    learner_ranks: int = setting(1, "learner ranks the policy is sharded over", low=1)
    learner_gpus: float = setting(0.0, "GPUs of one learner rank: 0 or 1", low=0, high=1)
    reference_workers: int = setting(1, "reference workers, started only when a KL term is used", low=1)
    reference_gpus: float = setting(0.0, "GPUs of one reference worker", low=0, high=1)
    reward_workers: int = setting(1, "reward workers", low=1)
    reward_gpus: float = setting(0.0, "GPUs of one reward worker, for reward models", low=0, high=1)
    cpus_per_worker: float = setting(1.0, "CPUs Ray reserves for every worker", low=0)
    threads_per_worker: int = setting(1, "CPU threads of torch in every worker", low=1)
    start_timeout_s: float = setting(300.0, "seconds the workers may take to start", above=0)
    progress_timeout_s: float = setting(600.0, "seconds without any progress of a step before the run stops", above=0)
    collective_timeout_s: float = setting(300.0, "seconds a collective of the learner ranks may take", above=0)

    def __post_init__(self) -> None:
        check_bounds("cluster", self)
        if self.learner_gpus not in (0, 1):
            raise ValueError(f"cluster.learner_gpus must be 0 or 1, got {self.learner_gpus:g}: ranks cannot share a GPU; the nearest that works is 1")


@dataclass(kw_only=True)
class LoggingConfig:
    """What the user sees and what is kept."""

    progress: bool = setting(True, "progress bar (plain lines when not a terminal)")
    wandb: str = setting("auto", "auto: online with a key, else offline", choices=("auto", "online", "offline", "disabled"))
    wandb_project: str = setting("infsample_rl", "W&B project")
    tensorboard: bool = setting(False, "also write TensorBoard files")
    completions_per_step: int = setting(4, "samples a step writes to completions.jsonl and the W&B table; 0: none", low=0)

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
                f"rollout.group_size must be >= 2 with objective.advantage={self.objective.advantage}, got 1: a group of one has no advantage"
            )
        if micro_group > group_size:
            raise ValueError(f"rollout.micro_group_size must be <= rollout.group_size = {group_size}, got {micro_group}")
        if self.rollout.temperature == 0:
            raise ValueError("rollout.temperature must be > 0 for training, got 0.0; use run.eval_temperature=0 for greedy evaluation")
        longest = self.data.max_prompt_tokens + self.rollout.max_new_tokens
        budget, page_size = self.rollout.kv_budget_tokens, self.rollout.page_size
        smallest = (-(-self.data.max_prompt_tokens // page_size) + -(-self.rollout.max_new_tokens // page_size)) * page_size
        if budget is not None and budget < smallest:
            raise ValueError(
                f"rollout.kv_budget_tokens must be >= {smallest} to hold a prompt of data.max_prompt_tokens = {self.data.max_prompt_tokens} "
                f"and a response of rollout.max_new_tokens = {self.rollout.max_new_tokens} in pages of {page_size}, got {budget}"
            )
        if longest > self.learner.max_tokens_per_micro_batch:
            raise ValueError(
                f"learner.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens = {longest}, "
                f"got {self.learner.max_tokens_per_micro_batch}; the nearest that works is {longest}"
            )
        if self.objective.needs_reference and longest > self.reference.max_tokens_per_micro_batch:
            raise ValueError(
                f"reference.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens = {longest}, "
                f"got {self.reference.max_tokens_per_micro_batch}; the nearest that works is {longest}"
            )
        if self.run.steps is not None and self.learner.warmup_steps > self.run.steps:
            raise ValueError(f"learner.warmup_steps must be <= run.steps = {self.run.steps}, got {self.learner.warmup_steps}")
        if self.rollout.kv_dtype != "auto" and self.objective.importance == "none":
            raise ValueError(
                f"rollout.kv_dtype must be auto with objective.importance=none, got {self.rollout.kv_dtype}: samples come from rounded KV, "
                "not from the policy that is trained; take objective.importance=token_tis"
            )
        if self.run.deterministic:
            self._check_deterministic()

    def _check_deterministic(self) -> None:
        gpus = {name: getattr(self.cluster, name) for name in ("rollout_gpus", "learner_gpus", "reference_gpus", "reward_gpus")}
        for name, count in gpus.items():
            if count > 0:
                raise ValueError(f"cluster.{name} must be 0 with run.deterministic=true, got {count}: only CPU runs are bitwise repeatable")
        if self.model.dtype != "float32":
            raise ValueError(f"model.dtype must be float32 with run.deterministic=true, got {self.model.dtype}")
        if self.rollout.kv_dtype != "auto":
            raise ValueError(
                f"rollout.kv_dtype must be auto with run.deterministic=true, got {self.rollout.kv_dtype}: KV that is rounded need not repeat bitwise"
            )
        if self.rollout.predictor == "bert":
            raise ValueError(
                f"rollout.predictor must be none or probe (not used then) with run.deterministic=true, got {self.rollout.predictor}: "
                "rebuilt prefixes round differently"
            )

    @property
    def uses_probe(self) -> bool:
        """Whether the run has a length probe. Not with run.deterministic: what it learns depends on which worker ended when."""
        return self.rollout.probes and not self.run.deterministic

    @property
    def mismatch_is_rounding(self) -> bool:
        """Whether engine and learner differ by float32 rounding alone, so that objective.mismatch_stop_float32 bounds every token.

        If not, in 16 bits or with rollout.kv_dtype=fp8 or int8, objective.mismatch_stop bounds the mean.
        """
        return self.model.dtype == "float32" and self.rollout.kv_dtype == "auto"

    @property
    def samples_per_step(self) -> int:
        """Samples every step trains on: prompts_per_step x group_size."""
        return self.data.prompts_per_step * self.rollout.group_size

"""Settings of a run as a whole, of its policy and of what it logs. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass

from infsample_rl.config.fields import check_bounds, check_temperature, setting

DTYPES = ("float32", "bfloat16", "float16")
ALL_PROBLEMS = 1_000_000  # run.eval_prompts of "the whole held-out set"


@dataclass(kw_only=True)
class RunConfig:
    """One training run."""

    name: str = setting("infsample_rl", "name of the run, of its folder and in W&B")
    dir: str | None = setting(None, "run folder; none: runs/<name>-<date>-<time>")
    seed: int = setting(0, "seed of the sampling noise and the data order", low=0, high=2**31 - 1)
    deterministic: bool | None = setting(
        None,
        "the same weights, bit by bit, under any timing, kill and number of rollout workers; none: yes where all is "
        "float32 on the CPU; true on GPUs of one kind, in 16 bits, where more than 64 rows decode slower",
    )
    resume: str = setting("auto", "auto: go on from run.dir's last checkpoint; never; or the path of a checkpoint")
    steps: int | None = setting(None, "training steps; none: run.epochs passes over the data", low=1)
    epochs: float = setting(
        1.0, "passes over the data when run.steps is none", above=0, read_if=lambda c: c.run.steps is None
    )
    checkpoint_every: int = setting(10, "steps between checkpoints; 0: only at the end", low=0)
    keep_checkpoints: int = setting(2, "checkpoints kept, the newest first", low=1)
    eval_every: int = setting(0, "steps between evaluations; 0: only before the first and after the last step", low=0)
    eval_prompts: int = setting(100, "held-out problems per evaluation; 0: no evaluation", low=0)
    eval_samples: int = setting(
        1, "samples per held-out problem (k of mean@k)", low=1, read_if=lambda c: c.has_evaluations
    )
    grace_s: float = setting(
        30.0,
        "seconds from SIGTERM until the run is killed: a checkpoint that takes longer is not begun, or given up",
        low=0,
    )
    max_staleness: int = setting(
        0, "updates that sampling may be behind; 1: a step's samples are drawn during the update before", low=0, high=1
    )
    eval_temperature: float | None = setting(
        None,
        "temperature of evaluations; none: rollout.temperature; 0: greedy",
        low=0,
        high=10,
        read_if=lambda c: c.has_evaluations,
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
    chat_template: str | None = setting(
        None, "file of a Jinja chat template in place of the tokenizer's, which checkpoints keep; none: its own"
    )
    dtype: str = setting(
        "float32", "dtype of weights and compute; the optimizer always keeps float32 masters", choices=DTYPES
    )
    lm_head_fp32: bool = setting(
        False,
        "logits in float32 from 16-bit weights, in engine, learner and reference alike; without effect in float32",
        read_if=lambda c: c.model.dtype != "float32",
    )
    trust_remote_code: bool = setting(False, "run code that comes with the model")

    def __post_init__(self) -> None:
        check_bounds("model", self)
        if not self.path:
            raise ValueError(
                "model.path is empty: give a Hugging Face folder or hub name, e.g. model.path=Qwen/Qwen3-1.7B"
            )


@dataclass(kw_only=True)
class LoggingConfig:
    """What the user sees and what is kept."""

    progress: bool = setting(
        True, "the live view on a terminal, a line a step elsewhere; false: notes and warnings alone"
    )
    wandb: str = setting(
        "auto", "auto: online with a key, else offline", choices=("auto", "online", "offline", "disabled")
    )
    wandb_project: str = setting("infsample_rl", "W&B project, MLflow experiment")
    tensorboard: bool = setting(False, "also write TensorBoard files")
    mlflow: str | None = setting(
        None, "also log to MLflow at this tracking URI, e.g. sqlite:///FILE or http://HOST:5000; none: no MLflow"
    )
    upload_completions: bool = setting(
        False, "W&B and MLflow also get samples as text (completions.jsonl, report.html); false: numbers and settings"
    )
    record_every: int = setting(
        0, "steps between recordings of all samples for python -m infsample_rl replay; 0: none", low=0
    )
    completions_per_step: int = setting(
        4, "samples a step writes to completions.jsonl and the W&B table; 0: none", low=0
    )

    def __post_init__(self) -> None:
        check_bounds("logging", self)

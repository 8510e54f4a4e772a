"""What both sides of benchmarks.train are given, as plain JSON: prompts as ids, sizes, settings they share. Standard
library only."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import measure, run_script
from benchmarks.workload import ModelOptions
from infsample_rl.config.command_line import option

TRL_SCRIPT = Path(__file__).with_name("train_trl.py")

Spec = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One measurement: which side, with which settings, over how many steps."""

    name: str  # ours or trl
    settings: dict[str, Any]  # that only this side reads
    spec: Spec
    variants: list[dict[str, Any]]  # of TRL, as tried


@dataclass(kw_only=True)
class TrainOptions(ModelOptions):
    """Arguments of benchmarks.train. Sampling is plain: no top-k, no top-p, no penalty."""

    group_size: list[int] = option(
        [32], "G, completions of every prompt; a list: all of them, one after another", low=2
    )
    prompts: int = option(1, "prompts of a step", low=1)
    lengths: str = option(
        "fixed",
        "fixed: every response has max_new_tokens; natural: they end where they end",
        choices=("fixed", "natural"),
    )
    repeats: int = option(3, "rounds of a step that warms up and one that is timed; the median counts", low=1)
    max_new_tokens: int = option(96, "longest response", low=1)
    temperature: float = option(1.0, "temperature of sampling and of the trained policy", above=0)
    lr: float = option(1e-5, "AdamW learning rate, constant", above=0)
    slots: int = option(32, "KV memory of our engine, in full responses", low=1)
    max_tokens_per_micro_batch: int = option(2048, "tokens of one pass of our learner", low=16)
    logprob_chunk_tokens: int = option(128, "tokens whose logits exist at a time in our learner", low=1)
    activation_checkpointing: int = option(0, "of our learner: 0 of no layer, 1 of every layer, n of every n-th", low=0)
    recompute_granularity: str = option("full", "of our learner, as in the config", choices=("full", "selective"))
    rivals: list[str] = option(["trl"], "rivals beside ours; []: none", choices=("trl",))
    trl_python: str | None = option(None, "interpreter that has TRL; none: this one", key="rivals.trl_python")
    timeout_s: float = option(3600.0, "seconds one measurement may take", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str = option("bench_out", "folder of the figure")

    def __post_init__(self) -> None:
        if self.shape is not None:
            raise ValueError(
                f"shape={self.shape}: training needs a model that both sides can load; give model=FOLDER instead"
            )
        longest = self.prompt_tokens + self.max_new_tokens
        if self.max_tokens_per_micro_batch < longest:
            raise ValueError(
                f"max_tokens_per_micro_batch={self.max_tokens_per_micro_batch} must hold a prompt and a response: the "
                f"nearest that works is {longest}"
            )
        if "trl" in self.rivals:
            trl_interpreter(self.trl_python, instead="rivals=[]")


def trl_interpreter(python: str | None, *, instead: str) -> str:
    """The interpreter that runs TRL, rivals.trl_python; ValueError, which says what to give instead, where there is
    none."""
    if python is None:
        if importlib.util.find_spec("trl") is None:
            raise ValueError(f"TRL is not in this interpreter: give rivals.trl_python=PYTHON, or {instead}")
        return sys.executable
    found = shutil.which(python)
    if found is None:
        raise ValueError(
            f"rivals.trl_python={python}: there is no such interpreter; give the path of one that has TRL, or {instead}"
        )
    return found


ARITHMETIC = {  # configs/data/arithmetic.yaml
    "source": "reasoning_gym:products",
    "generator_kwargs": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1, "size": 512},
    "instruction": "Give only the number.",
    "max_prompt_tokens": 256,
}


def run_spec(
    options: TrainOptions, *, group_size: int, prompts_per_step: int, prompts: list[list[int]], ignore_eos: bool
) -> Spec:
    """A run of len(prompts) / prompts_per_step steps, as both sides get it. `ignore_eos`: every response has
    max_new_tokens."""
    shared = ("model", "dtype", "device", "threads", "seed", "max_new_tokens", "temperature", "lr")
    return {name: getattr(options, name) for name in shared} | {
        "max_grad_norm": 1.0,
        "ignore_eos": ignore_eos,
        "group_size": group_size,
        "prompts_per_step": prompts_per_step,
        "prompts": prompts,
        "steps": len(prompts) // prompts_per_step,
    }


def our_settings(options: TrainOptions) -> dict[str, Any]:
    """What only our side reads."""
    names = (
        "slots",
        "max_tokens_per_micro_batch",
        "logprob_chunk_tokens",
        "activation_checkpointing",
        "recompute_granularity",
    )
    return {name: getattr(options, name) for name in names}


def measure_run(options: TrainOptions, run: Run) -> dict[str, Any]:
    """Run one side in a process of its own; RuntimeError when that fails."""
    spec, limits = run.spec | run.settings, {"threads": options.threads, "timeout_s": options.timeout_s}
    if run.name == "ours":
        return measure("train_ours.main", spec, **limits, environment=preload())
    return measure_trl(trl_interpreter(options.trl_python, instead="rivals=[]"), spec, **limits)


def measure_trl(interpreter: str, spec: Spec, *, threads: int, timeout_s: float) -> dict[str, Any]:
    """Run TRL in a process of its own; RuntimeError when that fails."""
    # Without its folder on the path: TRL's imports would find our process.py and models.py there (Python 3.11 or
    # newer).
    environment = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if spec["device"] == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    command, environment = [interpreter, str(TRL_SCRIPT)], environment | preload()
    return run_script(command, spec, threads=threads, timeout_s=timeout_s, environment=environment)


def preload() -> dict[str, str]:
    """Environment that gives either side the allocator of our workers, Ray's jemalloc; nothing without Ray."""
    if importlib.util.find_spec("ray") is None:
        return {}
    from infsample_rl.cluster.worker_environment import allocator_environment

    return allocator_environment("learner", gpus=0)


def shown(settings: dict[str, Any]) -> str:
    """Settings in a line."""
    return ", ".join(f"{name}={value}" for name, value in settings.items() if value is not None)


def find_facts(options: TrainOptions, **question: Any) -> dict[str, Any]:
    """Prompts, parameters and device, by a process of its own."""
    limits = {"threads": options.threads, "timeout_s": options.timeout_s}
    return measure("train_ours.find_facts", vars(options) | question, **limits)

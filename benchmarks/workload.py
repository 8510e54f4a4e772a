"""What every engine of a benchmark is given: model, prompts, group size, memory. Standard library only."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from infsample_rl.config import DTYPES
from infsample_rl.config.command_line import option
from infsample_rl.config.rollout import ENGINES, PREEMPTIONS, SCHEDULES

TINY_POLICY = str(Path(__file__).resolve().parents[1] / "infsample_rl" / "assets" / "kk_tiny" / "policy")
PROMPT_CHARACTERS = 400  # the most that a run's samples.jsonl has of a prompt, as controller/step_records.py says
SHAPES = ("qwen3_1.7b", "qwen3_1.7b_two_layers", "qwen3_8b")


@dataclass(kw_only=True)
class ModelOptions:
    """What runs, and on what."""

    model: str = option(TINY_POLICY, "Hugging Face folder or hub name")
    shape: str | None = option(None, "random weights of this shape instead of a model", choices=SHAPES)
    dtype: str = option("float32", "dtype of weights, compute and KV", choices=DTYPES)
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    threads: int = option(len(os.sched_getaffinity(0)), "CPU threads of every engine; default: all cores", low=1)
    seed: int = option(0, "seed of prompts, random weights and sampling", low=0)
    prompt_tokens: int = option(100, "tokens of a prompt", low=1)

    @classmethod
    def of(cls, spec: dict[str, Any]) -> Self:
        """From a mapping that has all of its fields, and others."""
        return cls(**{field.name: spec[field.name] for field in dataclasses.fields(cls)})


@dataclass(kw_only=True)
class Workload(ModelOptions):
    """The options that all benchmarks of rivals share. Sampling is plain everywhere: no top-k, no top-p, and
    temperature 1 beside rivals."""

    slots: int = option(4, "g: the KV budget is slots x max_new_tokens + the prompt, in tokens", low=1)
    max_new_tokens: int = option(128, "longest response", low=1)
    timeout_s: float = option(1800.0, "seconds one measurement may take", low=1)

    def kv_budget_tokens(self) -> int:
        """Tokens of KV that every engine gets: slots x max_new_tokens + prompt_tokens."""
        return self.slots * self.max_new_tokens + self.prompt_tokens


def check_prompts(path: Path) -> None:
    """ValueError for a file that has none, or only the ends of long ones."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines()]
        has_prompts = bool(records) and all("prompt" in each for each in records)
    except (OSError, ValueError, TypeError):
        has_prompts = False
    if not has_prompts:
        raise ValueError(f"prompts={path}: must have a prompt in every line; give a run's completions.jsonl")
    if any("samples" in each and len(each["prompt"]) == PROMPT_CHARACTERS for each in records):
        raise ValueError(
            f"prompts={path}: has only the last {PROMPT_CHARACTERS} characters of a prompt; give the run's "
            "completions.jsonl, which has all"
        )


@dataclass(kw_only=True)
class EngineOptions(Workload):
    """Arguments of benchmarks.engine."""

    group_size: int = option(32, "G, completions of every prompt", low=1)
    ignore_eos: bool = option(True, "all samples run to max_new_tokens; false: natural ends")
    mean_tokens: int = option(
        0,
        "samples of ours end at random ids after about so many tokens, and vLLM is forced to their lengths; 0: at the "
        "model's own. Needs ignore_eos=false",
        low=0,
    )
    repeats: int = option(3, "rounds; the median counts", low=1)
    engines: list[str] = option(
        ["native"],
        "what our schedules run on; dynamic_slot is native alone; vLLM by itself is forced to the same lengths",
        choices=ENGINES,
    )
    schedules: list[str] = option(list(SCHEDULES), "schedules of our engine", choices=SCHEDULES)
    preemptions: list[str] = option(
        ["auto"], "what token_budget does with preempted samples' KV, each measured", choices=PREEMPTIONS
    )
    rivals: list[str] = option(
        ["generate", "generate_batch"], "rivals inside transformers", choices=("generate", "generate_batch")
    )
    vllm_python: str | None = option(None, "interpreter that has vLLM; none: no vLLM", key="rivals.vllm_python")
    vllm_variants: int = option(
        3, "of vLLM's variants so many are tried, those without compiling first", low=1, key="rivals.vllm_variants"
    )
    speculate: list[str] = option(["auto"], "rollout.speculate of our engine, each measured")
    prompts: str | None = option(
        None,
        "JSONL with a `prompt` in every line, as a run's completions.jsonl (whole ones; its samples.jsonl cuts them); "
        "none: one of prompt_tokens. Needs rivals=[]",
    )
    temperature: float = option(1.0, "temperature of our engine; another than 1 needs rivals=[]", above=0)
    num_prompts: int = option(8, "of prompts, the last different ones", low=1)
    rows: list[int] = option(
        [1, 2, 4, 8, 16, 32], "row counts of which a step of ours is timed, to fit c0 + c1 x rows; []: no fit", low=1
    )
    profile: int = option(0, "steps of G rows of ours whose kernels, waits and allocations are counted; 0: none", low=0)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")

    def __post_init__(self) -> None:
        if self.prompts is not None and self.rivals:
            raise ValueError(f"prompts={self.prompts}: rivals inside transformers take one prompt; give rivals=[]")
        if self.prompts is not None:
            check_prompts(Path(self.prompts))
        if self.temperature != 1 and (self.rivals or self.vllm_python):
            raise ValueError(f"temperature={self.temperature:g}: rivals sample at 1; give rivals=[] and no vllm_python")
        if self.mean_tokens and self.ignore_eos:
            raise ValueError(f"mean_tokens={self.mean_tokens}: ends are ignored; give ignore_eos=false")
        if self.vllm_python is not None and shutil.which(self.vllm_python) is None:
            raise ValueError(f"rivals.vllm_python={self.vllm_python}: there is no such interpreter")
        if "vllm" in self.engines and (self.vllm_python is None or self.shape is not None):
            raise ValueError("engines=[vllm] needs rivals.vllm_python=PYTHON and a model, no shape")
        if "vllm" in self.engines and "native" not in self.engines:
            raise ValueError(f"engines={self.engines}: lengths are those of native; give it too")
        if len(set(self.rows)) == 1:
            raise ValueError(
                f"rows={self.rows}: give at least two different counts to fit c0 and c1, or rows=[] for no fit"
            )

"""The plan beside the measured peak of one process: python -m benchmarks.plan_point PART [limit_bytes=N]
[+experiment=NAME] [group.key=value ...]

PART is learner, rollout or reference. The learner trains two updates of full rows, the rollout worker samples a step's
prompts and an evaluation's, the reference worker reads a micro-group twice, all of random tokens, in lengths the
settings allow at most. Before it is measured the process does the same with a toy of the same architecture, so that
libraries are loaded, and their buffers made: its idle footprint. With `limit_bytes` the kernel refuses it more private
memory than that beyond the footprint (RLIMIT_DATA). One JSON object on stdout: predicted_bytes, measured_bytes, error,
lines.
"""

from __future__ import annotations

import copy
import ctypes
import dataclasses
import gc
import itertools
import json
import mmap
import resource
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import random_sample
from benchmarks.process import FREED_AT_ONCE, measure
from infsample_rl.cluster.worker_environment import FEW_COMPILED_PRODUCTS
from infsample_rl.config import Config
from infsample_rl.config.command_line import option, parse_with_settings, run_command
from infsample_rl.config.loading import load_config
from infsample_rl.learner.reference import ReferenceWorker
from infsample_rl.learner.row_plan import RowPlanner
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.loading import load_model_config
from infsample_rl.model.peak_memory import PeakMemory, process_memory
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES, fill_buckets, plan_weights, shapes_of
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import plan_role
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import Completion, LossTotals, Prompt, RolloutWork, SampleSpec, TrainingSample

# One step is sampled; and random tokens are far from what any policy samples, which may not stop the measurement.
ALWAYS = (
    *("run.steps=1", "learner.warmup_steps=0", "cluster.learner_ranks=1"),
    *("objective.mismatch_stop_float32=1e9", "objective.mismatch_stop=1e9"),
)
TIMEOUT_S = 1800.0
TOY = {
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}


@dataclass(kw_only=True)
class PlanPointOptions:
    """What is no setting of the run."""

    limit_bytes: int | None = option(None, "private memory that the process may have beyond its idle footprint")


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Predicted and measured peak of this process, which is spec["part"] with spec["settings"]."""
    part, config = spec["part"], config_of(spec["part"], spec["settings"])
    run = PARTS[part]
    torch.set_num_threads(config.cluster.threads_per_worker)
    device = torch.device("cuda" if getattr(config.cluster, f"{part}_gpus") > 0 else "cpu")
    with tempfile.TemporaryDirectory() as folder:
        run(toy_of(config, folder))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what the toy has left would be taken again, unseen
    process_memory.cache_clear()
    PeakMemory(device).reset()
    if spec["limit_bytes"] is not None:
        limit_data(spec["limit_bytes"])
    measured = run(config)
    plan = plan_role(config, ModelOutline.of(config), part)
    return spec | {
        "predicted_bytes": plan.sum_bytes,
        "measured_bytes": measured,
        "error": plan.sum_bytes / measured - 1,
        "lines": {name: round(size) for name, size in plan.lines.items()},
        "device": str(device),
    }


def limit_data(more: int) -> None:
    """Let this process have so many bytes of private memory more than it has mapped now."""
    status = Path("/proc/self/status").read_text()
    mapped = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * mapped + more, resource.RLIM_INFINITY))


def config_of(part: str, overrides: Sequence[str]) -> Config:
    """The run that a process is a part of. ValueError for settings that do not go together."""
    objective = "default" if part == "reference" else "no_kl"  # no reference worker without a KL
    return load_config([*ALWAYS, f"objective={objective}", *overrides])


def toy_of(config: Config, folder: str) -> Config:
    """The same settings for a tiny random model of the same architecture, saved into `folder`."""
    architecture = copy.deepcopy(load_model_config(config.model))
    for name, value in TOY.items():
        setattr(architecture, name, value)
    if getattr(architecture, "layer_types", None):
        architecture.layer_types = architecture.layer_types[:1]
    AutoModelForCausalLM.from_config(architecture).save_pretrained(folder)
    tokenizer = config.model.tokenizer_path or config.model.path
    return dataclasses.replace(config, model=dataclasses.replace(config.model, path=folder, tokenizer_path=tokenizer))


def train(config: Config) -> int:
    """Two updates of all samples of a step, each as long as it may be; the worker's own peak."""
    learner = LearnerWorker(config, 0, 1, total_steps=2)
    learner.setup(None)
    rows = full_rows(config, len(learner.tokenizer))
    samples = sum(map(len, rows))
    totals = LossTotals(num_sequences=samples, num_tokens=samples * config.rollout.max_new_tokens, length_normalizer=1)
    for _ in range(2):
        for row in rows:
            learner.accumulate(row, totals)
        learner.step(totals)
    return learner.memory.peak_bytes()


def full_rows(config: Config, vocab: int) -> list[list[TrainingSample]]:
    """The rows of one step, cut as in a run."""
    generator, prompts, size = np.random.default_rng(0), range(config.data.prompts_per_step), config.rollout.group_size
    lengths = dict.fromkeys(prompts, config.data.max_prompt_tokens)
    planner = RowPlanner(config.learner.max_tokens_per_micro_batch, lengths, long_rows=config.long_rows)
    rows: list[list[SampleSpec]] = []
    for prompt in prompts:
        rows += planner.add_group(
            [
                SampleSpec(
                    prompt_index=prompt, sample_index=index, length=config.rollout.max_new_tokens, advantages=(1.0,)
                )
                for index in range(size)
            ]
        )
    prompt_ids = generator.integers(0, vocab, (len(prompts), config.data.max_prompt_tokens)).astype(np.int32)

    return [
        [
            random_sample(
                (each.prompt_index, each.sample_index), prompt_ids[each.prompt_index], each.length, vocab, generator
            )
            for each in row
        ]
        for row in rows + planner.flush()
    ]


def sample(config: Config) -> int:
    """Weights arrive, then prompts of full length are sampled; the worker's own peak."""
    worker = RolloutWorker(config, 0)
    parameters = dict(worker.engine.parameters)
    manifest = plan_weights(shapes_of(parameters.items()), 0)
    # shared memory, as Ray's
    store = torch.frombuffer(mmap.mmap(-1, min(BUCKET_BYTES, manifest.num_bytes)), dtype=torch.uint8)
    buckets = fill_buckets(
        ((name, parameter.detach()) for name, parameter in parameters.items()), manifest, itertools.repeat(store)
    )
    worker.load_weights(manifest, (bucket.numpy() for bucket in buckets))
    generator, vocab = np.random.default_rng(0), len(worker.engine.tokenizer)
    rounds = [(config.data.prompts_per_step, config.rollout.group_size)]
    if config.has_evaluations:
        rounds.append((config.run.eval_prompts, config.run.eval_samples))
    for prompts, size in rounds:
        ids = generator.integers(0, vocab, (prompts, config.data.max_prompt_tokens)).astype(np.int32)
        work = [
            RolloutWork(prompt_index=place, prompt_ids=ids[place], sample_indices=list(range(size)))
            for place in range(prompts)
        ]
        for _ in worker.stream(work, step=0, evaluation=size != config.rollout.group_size):
            pass
    return worker.memory.peak_bytes()


def read(config: Config) -> int:
    """Log-probabilities of micro-groups of full length; the worker's own peak."""
    worker = ReferenceWorker(config)
    generator, vocab, tokens = np.random.default_rng(0), worker.policy.valid_vocab, config.rollout.max_new_tokens
    prompt_ids = generator.integers(0, vocab, config.data.max_prompt_tokens).astype(np.int32)
    micro_group = [
        Completion(
            prompt_index=0,
            sample_index=index,
            token_ids=generator.integers(0, vocab, tokens).astype(np.int32),
            logprobs=np.zeros(tokens, np.float32),
            sampling_logprobs=None,
            finish_reason="length",
            policy_version=0,
        )
        for index in range(config.rollout.micro_group)
    ]
    for _ in range(2):
        worker.logprobs(Prompt(prompt_index=0, row=0, messages=[], text="", token_ids=prompt_ids), micro_group)
    return worker.memory.peak_bytes()


PARTS = {"learner": train, "rollout": sample, "reference": read}


def run(arguments: list[str]) -> int:
    """Measure in a process whose allocator gives back what is freed. ValueError for arguments that are wrong."""
    if not arguments or arguments[0] not in PARTS:
        raise ValueError(f"the first argument must be one of {', '.join(PARTS)}")
    part = arguments[0]
    options, settings = parse_with_settings(arguments[1:], PlanPointOptions)
    threads = config_of(part, settings).cluster.threads_per_worker
    environment = FREED_AT_ONCE | {"MKL_DISABLE_FAST_MM": "1"} | ({} if part == "rollout" else FEW_COMPILED_PRODUCTS)
    spec = {"part": part, "settings": settings, "limit_bytes": options.limit_bytes}
    found = measure("plan_point.main", spec, threads=threads, timeout_s=TIMEOUT_S, environment=environment)
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(run, None, usage=__doc__))

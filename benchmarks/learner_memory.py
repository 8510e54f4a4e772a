"""Peak memory of one update over the group size: our learner beside one padded batch of the whole group in plain
transformers.

python -m benchmarks.learner_memory [model=FOLDER] [groups=[8,16,...]] [max_tokens_per_micro_batch=] [json=true] ...

Each point has a process of its own: model, AdamW and its moments are there already when the measured update begins.
Ours packs the group into passes of max_tokens_per_micro_batch behind one prompt; the rival runs all G responses,
padded, at once, with the logits of every position, and has the same masters, optimizer and recomputation. On CPU the
peak is that of the process, less what its imports take; on CUDA what the device lent at most.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks import figures, models
from benchmarks.process import FREED_AT_ONCE, end_with_terminate, measure, measure_points
from benchmarks.workload import ModelOptions
from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.learner.loss import policy_loss
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.learner.unsharded_backend import UnshardedBackend
from infsample_rl.model.logprobs import PackedPolicy, checkpoint_every
from infsample_rl.model.packing import TrainingRow, pack_prompt, pack_samples
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.types import LossTotals, TrainingSample

COLUMNS = {
    "name": "name",
    "group_size": "G",
    "passes": "passes",
    "tokens": "tokens",
    "peak_memory_bytes": "peak MB",
    "state_bytes": "weights, gradients, optimizer MB",
    "rest_bytes": "rest MB",
    "seconds": "s",
}


@dataclass(kw_only=True)
class LearnerMemoryOptions(ModelOptions):
    """Arguments of this command; those of the learner are named and meant as in the config."""

    max_new_tokens: int = option(128, "longest response; they have half of it to all of it", low=2)
    groups: list[int] = option([8, 16, 32, 64, 128, 256], "group sizes G of ours", low=1)
    max_full_batch_group: int = option(64, "largest G of the rival; 0: none", low=0)
    max_tokens_per_micro_batch: int = option(2048, "tokens of one pass", low=16)
    logprob_chunk_tokens: int = option(
        LearnerConfig().logprob_chunk_tokens, "tokens whose logits exist at a time", low=1
    )
    activation_checkpointing: int = option(0, "0: of no layer, 1: of every layer, n: of every n-th; of both", low=0)
    recompute_granularity: str = option(
        "full", "of recomputed layers, as in the config; of both", choices=("full", "selective")
    )
    timeout_s: float = option(1800.0, "seconds one measurement may take", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str = option("bench_out/learner_memory", "folder of the figure")


def main() -> int:
    """Measure all points; 1 when one failed."""
    end_with_terminate()
    return run_with_options(run, LearnerMemoryOptions, usage=__doc__)


def run(options: LearnerMemoryOptions) -> int:
    """As main()."""
    found, failed = measure_points(
        (
            (f"benchmarks.learner_memory: {name}, G = {size}", partial(measure_point, options, name, size))
            for name, size in points(options)
        ),
        as_json=options.json,
    )
    if not options.json and found:
        figures.print_records(found, COLUMNS)
        print(figures.memory_facts(options, found[0]["device"]))
        print(f"figure: {figures.draw_memory(found, Path(options.out))}")
    return 1 if failed else 0


def points(options: LearnerMemoryOptions) -> list[tuple[str, int]]:
    """Ours at every G, then the rival at those that are not too large for it."""
    rival = [("full batch", group) for group in options.groups if group <= options.max_full_batch_group]
    return [("ours", group) for group in options.groups] + rival


def measure_point(
    options: LearnerMemoryOptions, name: str, group_size: int, earlier: list[dict[str, Any]]
) -> dict[str, Any]:
    """The object of one point; `rest_bytes` is the peak less weights, gradients and optimizer state on the device:
    activations and logits."""
    spec = asdict(options) | {"name": name, "group_size": group_size}
    limits = {"threads": options.threads, "timeout_s": options.timeout_s}
    raw = measure("learner_memory.measure_here", spec, **limits, environment=FREED_AT_ONCE)
    return raw | {
        "name": name,
        "group_size": group_size,
        "rest_bytes": raw["peak_memory_bytes"] - raw["state_bytes"],
        "tokens_per_s": raw["tokens"] / raw["seconds"],
        "workload": {key: value for key, value in asdict(options).items() if key not in ("json", "out", "groups")},
    }


OBJECTIVE = ObjectiveConfig(kl_coef=0.0)
LEARNER_SETTINGS = ("max_tokens_per_micro_batch", "logprob_chunk_tokens", "activation_checkpointing")
LEARNER_SETTINGS += ("recompute_granularity",)


def measure_here(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak memory, seconds, rows and tokens of one update; the peak is counted from the built learner on, itself
    included."""
    options = ModelOptions.of(spec)
    learner = LearnerConfig(**{name: spec[name] for name in LEARNER_SETTINGS})
    torch.set_num_threads(options.threads)
    device = models.pick_device(options)
    memory = PeakMemory(device)
    lm, tokenizer = models.load(dataclasses.replace(options, dtype="float32"))
    if learner.activation_checkpointing:
        checkpoint_every(lm, learner.activation_checkpointing, granularity=learner.recompute_granularity)
    policy = (
        PackedPolicy(lm, valid_vocab=len(tokenizer), chunk_tokens=learner.logprob_chunk_tokens)
        if spec["name"] == "ours"
        else PaddedPolicy(lm)
    )
    backend = UnshardedBackend(policy, learner, dtype=getattr(torch, options.dtype))
    prompt = models.make_prompts(options, tokenizer, 1)[0]
    samples = make_samples(prompt, spec["group_size"], spec["max_new_tokens"], len(tokenizer), options.seed)
    passes = split_passes(samples, learner.max_tokens_per_micro_batch) if spec["name"] == "ours" else [samples]
    update(backend, [samples[:1]], device)  # AdamW makes its moments in its first step
    memory.reset()
    started = time.perf_counter()
    update(backend, passes, device)
    seconds = time.perf_counter() - started
    return models.machine(device) | {
        "seconds": seconds,
        "passes": len(passes),
        "tokens": sum(len(sample.response_ids) for sample in samples),
        "peak_memory_bytes": memory.peak_bytes(),
        "state_bytes": state_bytes(backend),
    }


def make_samples(
    prompt: list[int], group_size: int, max_new_tokens: int, vocab_size: int, seed: int
) -> list[TrainingSample]:
    """A group of random responses whose lengths go in turn through eight from max_new_tokens down to half of it: rows
    of any G look alike."""
    generator = np.random.default_rng(seed)
    lengths = [max_new_tokens - (max_new_tokens // 2) * (index % 8) // 7 for index in range(group_size)]
    ids = np.array(prompt, np.int32)
    return [
        models.random_sample((0, index), ids, length, vocab_size, generator) for index, length in enumerate(lengths)
    ]


class PaddedPolicy(nn.Module):
    """The rival: every sample with its prompt in one padded batch, through transformers' own SDPA attention, with all
    logits."""

    def __init__(self, lm: transformers.PreTrainedModel) -> None:
        super().__init__()
        self.lm = lm

    def forward(self, samples: list[TrainingSample], temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities [R], zeros [R]) of the response tokens, in the samples' order."""
        device = self.lm.device
        parts = [
            torch.from_numpy(np.concatenate([sample.prompt_ids, sample.response_ids]).astype(np.int64))
            for sample in samples
        ]
        ids = nn.utils.rnn.pad_sequence(parts, batch_first=True).to(device)
        lengths = torch.tensor([len(part) for part in parts], device=device)
        mask = torch.arange(ids.shape[1], device=device) < lengths[:, None]
        first = len(samples[0].prompt_ids)
        logits = (
            self.lm(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits[:, first - 1 : -1].float()
            / temperature
        )
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, first:, None])[..., 0][mask[:, first:]]
        return logprobs, torch.zeros_like(logprobs)


def update(backend: UnshardedBackend, passes: list[list[TrainingSample]], device: torch.device) -> None:
    """Forward and backward of every pass over one group, as LearnerWorker.accumulate has them, one AdamW step, waited
    for."""
    samples = [sample for part in passes for sample in part]
    totals = LossTotals(
        num_sequences=len(samples), num_tokens=sum(len(sample.response_ids) for sample in samples), length_normalizer=1
    )
    prompt = None
    if len(passes) > 1:
        prompt = pack_prompt(samples[0].prompt_ids, device)
        backend.forward(prompt, 1.0)
    for part in passes:
        row = pack_samples(part, device, prompt and prompt.cuts.shared)
        logprobs = backend.forward(part if isinstance(backend.policy, PaddedPolicy) else row.row, 1.0)[0]
        _loss(logprobs, row, totals).backward()
    if prompt is not None:
        prompt.cuts.shared.gradient_carrier().backward()
    backend.update(factor=1.0, max_norm=1.0, lr=1e-6)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _loss(logprobs: Tensor, row: TrainingRow, totals: LossTotals) -> Tensor:
    return policy_loss(
        logprobs, logprobs.detach(), row.advantages, row.row.sequence_ids, objective=OBJECTIVE, totals=totals
    )[0]


def state_bytes(backend: UnshardedBackend) -> int:
    """Bytes that an update needs whatever its rows: weights, float32 masters and gradients, moments."""
    masters = list(backend.masters.values())
    held = {parameter.data_ptr(): parameter for parameter in (*backend.policy.lm.parameters(), *masters)}
    moments = [value for master in masters for value in backend.optimizer.state[master].values()]
    return sum(tensor.nbytes for tensor in (*held.values(), *masters, *moments))  # a gradient is as large as a master


if __name__ == "__main__":
    sys.exit(main())

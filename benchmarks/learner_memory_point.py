"""One point of `benchmarks.learner_memory`, in the process that `process.measure` starts."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn

from benchmarks import models
from benchmarks.workload import ModelOptions
from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.loss import policy_loss
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.learner.unsharded_backend import UnshardedBackend
from infsample_rl.model.logprobs import PackedPolicy, checkpoint_every
from infsample_rl.model.packing import TrainingRow, pack_prompt, pack_samples
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.types import LossTotals, TrainingSample

OBJECTIVE = ObjectiveConfig(kl="none")
LEARNER_SETTINGS = (
    *("max_tokens_per_micro_batch", "logprob_chunk_tokens", "activation_checkpointing", "recompute_granularity"),
    *("offload_optimizer", "optimizer"),
)


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Peak memory, seconds, rows and tokens of one update; the peak is counted from the built learner on, itself
    included."""
    options = ModelOptions.of(spec)
    learner = LearnerConfig(**{name: spec[name] for name in LEARNER_SETTINGS if name in spec})
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
        "reserved_memory_bytes": memory.reserved_bytes(),
        "weight_bytes": models.weight_bytes(lm),
        "state_bytes": state_bytes(backend, device),
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
        logprobs, _ = backend.forward(part if isinstance(backend.policy, PaddedPolicy) else row.row, 1.0)
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


def state_bytes(backend: UnshardedBackend, device: torch.device) -> int:
    """Bytes on the device that an update needs whatever its rows: weights, float32 masters and gradients, moments."""
    held = {
        parameter.data_ptr(): parameter for parameter in (*backend.policy.lm.parameters(), *backend.masters.values())
    }
    total = sum(tensor.nbytes for tensor in held.values() if tensor.device.type == device.type)
    for master in backend.masters.values():
        if master.device.type == device.type:
            total += master.nbytes
            total += sum(_stored_bytes(value) for value in backend.optimizer.state[master].values())
    return total


def _stored_bytes(value: Tensor) -> int:
    """Bytes of a moment; torchao's 8-bit ones are codes and a scale for each block."""
    if type(value) is Tensor:
        return value.nbytes
    return value.codes.nbytes + value.scale.nbytes

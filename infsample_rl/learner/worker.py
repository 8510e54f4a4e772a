"""One rank of the learner: rows in, gradients accumulated under one policy version, one update a step.

One update per batch: the old log-probabilities are the learner's own, detached, so the ratio is exactly 1; what the engine
reported for the same tokens is compared instead, and a difference that rounding cannot explain stops the run.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from infsample_rl.config import Config
from infsample_rl.learner.checkpoint import load_training_state, save_pretrained_folder, save_training_state
from infsample_rl.learner.fsdp_backend import clip_gradients, full_parameters, scale_gradients, shard_policy
from infsample_rl.learner.loss import engine_mismatch, loss_denominator, policy_loss
from infsample_rl.learner.optimizer import build_optimizer, lr_at
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import TrainingRow, pack_row, pack_samples
from infsample_rl.types import LossTotals, TrainingSample, WeightManifest
from infsample_rl.weight_sync.buckets import pack_buckets


@dataclasses.dataclass
class UpdateSums:
    """This rank's sums over the rows of one update; the loss still has the provisional denominator."""

    loss: float = 0.0
    kl: float = 0.0  # per token, like all below
    entropy: float = 0.0
    clipped: float = 0.0
    mismatch: float = 0.0  # |engine - learner|
    mismatch_k3: float = 0.0
    num_tokens: int = 0
    num_nonfinite_rows: int = 0
    mismatch_max: float = 0.0


class LearnerWorker:
    """Trains the policy; every public method but __init__ is a collective of all ranks."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int) -> None:
        self.config, self.rank, self.world_size, self.total_steps = config, rank, world_size, total_steps
        self.device = torch.device("cuda" if config.cluster.learner_gpus > 0 else "cpu")
        self.dtype: torch.dtype = getattr(torch, config.model.dtype)
        self.num_updates = 0  # updates done, skipped ones included
        self.provisional: LossTotals | None = None
        self.sums = UpdateSums()

    def setup(self, master_address: str, master_port: int, checkpoint: str | None) -> dict[str, str | int]:
        """Join the ranks, load model.path or `checkpoint`, shard. Returns what was set up, for the log."""
        torch.set_num_threads(self.config.cluster.threads_per_worker)
        torch.use_deterministic_algorithms(self.config.run.deterministic)
        torch.manual_seed(self.config.run.seed)
        dist.init_process_group(
            "nccl" if self.device.type == "cuda" else "gloo",
            init_method=f"tcp://{master_address}:{master_port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=self.config.cluster.collective_timeout_s),
        )
        self.tokenizer = load_tokenizer(self.config.model)
        lm = load_model(self.config.model, self.device, path=checkpoint, dtype=torch.float32)
        self.policy = PackedPolicy(
            lm,
            valid_vocab=len(self.tokenizer),
            chunk_tokens=self.config.learner.logprob_chunk_tokens,
            bad_token_ids=self.config.rollout.bad_token_ids,
            head_fp32=self.config.model.lm_head_fp32,
        )
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self._prepare_for_training(lm)
        shard_policy(self.policy, self.device, self.world_size, self.dtype)
        self.optimizer = build_optimizer(self.policy.parameters(), self.config.learner)
        if checkpoint is not None:
            self.num_updates = load_training_state(Path(checkpoint), self.policy, self.optimizer, rank=self.rank)
        return {
            "backend": self.config.learner.backend,
            "device": str(self.device),
            "ranks": self.world_size,
            "parameters": num_parameters,
            "threads": torch.get_num_threads(),
            "updates": self.num_updates,
        }

    def _prepare_for_training(self, lm: nn.Module) -> None:
        for module in lm.modules():
            if isinstance(module, nn.Dropout):  # the policy that sampled had none
                module.p = 0.0
        if self.config.learner.activation_checkpointing:
            lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
            lm.train()  # transformers checkpoints in training mode only

    def accumulate(self, samples: list[TrainingSample] | None, totals: LossTotals) -> dict[str, int]:
        """One wave: forward and backward of one row. None: a row of weight zero, so that this rank's collectives match.

        `totals` may be provisional but must stay the same until step(), which is given the real ones. RuntimeError for a
        non-finite loss, or for log-probabilities that differ from the engine's by more than rounding.
        """
        if self.provisional not in (None, totals):
            raise ValueError(f"totals must stay the same until step(): got {totals} after {self.provisional}")
        self.provisional = totals
        if not samples:
            dummy = pack_row([(np.zeros(1, np.int32), [np.zeros(1, np.int32)])], self.device)
            (self.policy(dummy, self.config.rollout.temperature)[0].sum() * 0.0).backward()
            return {"samples": 0, "row_tokens": 0}
        row = pack_samples(samples, self.device)
        logprobs, entropy = self.policy(row.row, self.config.rollout.temperature)
        loss, metrics = policy_loss(
            logprobs,
            logprobs.detach(),
            row.advantages,
            row.row.sequence_ids,
            objective=self.config.objective,
            totals=totals,
            ref_logprobs=row.reference_logprobs,
            engine_logprobs=row.engine_logprobs,
        )
        (loss * self.world_size).backward()  # FSDP averages over ranks, the loss is a sum over them
        # Checked after the backward pass: a rank that raised before it would leave the others waiting in its collectives.
        self._add_to_sums(samples, row, loss.item(), logprobs.detach(), entropy, metrics)
        return {"samples": len(samples), "row_tokens": row.row.input_ids.shape[1]}

    def _add_to_sums(
        self, samples: list[TrainingSample], row: TrainingRow, loss: float, logprobs: Tensor, entropy: Tensor, metrics: dict[str, float]
    ) -> None:
        if not math.isfinite(loss):
            if self.config.learner.on_nonfinite == "stop":
                worst = _worst_tokens(samples, (~torch.isfinite(logprobs)).float(), logprobs, row)
                raise RuntimeError(f"update {self.num_updates + 1}: loss is {loss}; {worst}; learner.on_nonfinite=skip would skip the update")
            self.sums.num_nonfinite_rows += 1
            return
        absolute, largest, k3 = (value.item() for value in engine_mismatch(logprobs, row.engine_logprobs))
        limit = self.config.objective.mismatch_stop_float32
        if self.config.mismatch_is_rounding and not largest <= limit:  # NaN is a mismatch too
            worst = _worst_tokens(samples, (logprobs - row.engine_logprobs).abs(), logprobs, row)
            raise RuntimeError(
                f"update {self.num_updates + 1}: engine and learner differ by {largest:.3g} in a token's log-probability, above "
                f"objective.mismatch_stop_float32={limit:g}: they do not run the same policy; {worst}"
            )
        sums, num_tokens = self.sums, self.provisional.num_tokens
        sums.loss += loss
        sums.kl += metrics["kl"] * num_tokens
        sums.clipped += metrics["clip_fraction"] * num_tokens
        sums.entropy += entropy.double().sum().item()
        sums.mismatch += absolute
        sums.mismatch_k3 += k3
        sums.mismatch_max = max(sums.mismatch_max, largest)
        sums.num_tokens += len(logprobs)

    def step(self, totals: LossTotals) -> dict[str, float]:
        """Apply the accumulated gradient with the real denominators of the update, and return its metrics over all ranks.

        loss has the real denominator, the other means are over the tokens seen. An update without any valid sample is
        skipped, and so is a non-finite one under learner.on_nonfinite=skip; both count in learner/skipped_updates.
        """
        sums, learner = self._reduce_sums(), self.config.learner
        self._check_mismatch(sums)
        lr = lr_at(self.num_updates, self.total_steps, learner)
        provisional = self.provisional or totals
        empty = totals.num_sequences == 0
        factor = 0.0 if empty else loss_denominator(self.config.objective, provisional) / loss_denominator(self.config.objective, totals)
        scale_gradients(self.policy, factor)
        grad_norm = clip_gradients(self.policy, learner.max_grad_norm)
        finite = math.isfinite(grad_norm) and sums.num_nonfinite_rows == 0
        if not finite and learner.on_nonfinite == "stop":
            raise RuntimeError(f"update {self.num_updates + 1}: gradient norm is {grad_norm}; learner.on_nonfinite=skip would skip the update")
        if finite and not empty:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_updates += 1
        self.provisional, self.sums = None, UpdateSums()
        skipped = float(empty or not finite)
        return self._metrics(sums, sums.loss * factor, grad_norm if finite else 0.0, lr) | {"learner/skipped_updates": skipped}

    def _reduce_sums(self) -> UpdateSums:
        values = torch.tensor(dataclasses.astuple(self.sums), dtype=torch.float64, device=self.device)
        total = values[:-1].clone()
        dist.all_reduce(total)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return UpdateSums(*total.tolist(), mismatch_max=values[-1].item())

    def _check_mismatch(self, sums: UpdateSums) -> None:
        mean, bound = sums.mismatch / max(1, sums.num_tokens), self.config.objective.mismatch_stop
        if not self.config.mismatch_is_rounding and not mean <= bound:  # NaN is a mismatch too
            raise RuntimeError(
                f"update {self.num_updates + 1}: engine and learner differ by {mean:.3g} in the mean log-probability of a token, above "
                f"objective.mismatch_stop={bound} (largest {sums.mismatch_max:.3g}): they do not run the same policy"
            )

    def _metrics(self, sums: UpdateSums, loss: float, grad_norm: float, lr: float) -> dict[str, float]:
        tokens = max(1, sums.num_tokens)
        return {
            "learner/loss": loss,
            "learner/grad_norm": grad_norm,
            "learner/lr": lr,
            "learner/kl": sums.kl / tokens,
            "learner/entropy": sums.entropy / tokens,
            "learner/clip_fraction": sums.clipped / tokens,
            "learner/logprob_diff_mean": sums.mismatch / tokens,
            "learner/logprob_diff_max": sums.mismatch_max,
            "learner/logprob_diff_k3": sums.mismatch_k3 / tokens,
        }

    def export_weights(self, version: int) -> tuple[WeightManifest, list[np.ndarray]] | None:
        """Rank 0: all weights in the model's dtype under their Hugging Face names, in flat buckets. Other ranks: None."""
        tensors = full_parameters(self.policy.lm, self.dtype)
        if self.rank == 0:
            return pack_buckets(tensors, version)
        for _ in tensors:
            pass
        return None

    def save(self, folder: str) -> None:
        """Write a checkpoint: a Hugging Face folder at `folder` and the training state inside it."""
        save_pretrained_folder(Path(folder), self.policy.lm, full_parameters(self.policy.lm, self.dtype), self.tokenizer, rank=self.rank)
        save_training_state(Path(folder), self.policy, self.optimizer, num_updates=self.num_updates, rank=self.rank)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


def _worst_tokens(samples: list[TrainingSample], badness: Tensor, logprobs: Tensor, row: TrainingRow, count: int = 3) -> str:
    """The tokens of largest `badness` [R], named by prompt_index, sample_index and position, with both log-probabilities."""
    names = [(sample, position) for sample in samples for position in range(len(sample.response_ids))]
    lines = []
    for token in badness.nan_to_num(nan=math.inf).topk(min(count, len(badness))).indices.tolist():
        sample, position = names[token]
        lines.append(
            f"(prompt_index={sample.prompt_index}, sample_index={sample.sample_index}, token {position}): "
            f"engine {row.engine_logprobs[token].item():.6f}, learner {logprobs[token].item():.6f}"
        )
    return "; ".join(lines)

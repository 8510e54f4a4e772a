"""One rank of the learner: rows in, gradients accumulated under one policy version, one or several updates a step.

With one update per batch the old log-probabilities are the learner's own, detached, so the ratio is exactly 1; with
several they are the learner's own from its first pass over a row. What the engine reported for the same tokens is
compared with them, and a difference that rounding cannot explain stops the run.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from infsample_rl.config import Config
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.checkpoint import (
    SavedState,
    save_pretrained_folder,
    save_training_state,
    write_progress,
    written_by_all,
)
from infsample_rl.learner.loss import loss_denominator, policy_loss
from infsample_rl.learner.optimizer import lr_at
from infsample_rl.learner.publishing import WeightPublisher
from infsample_rl.learner.reference_policy import build_reference
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.learner.update_sums import UpdateSums
from infsample_rl.model.activation_checkpointing import checkpoint_every
from infsample_rl.model.loading import load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.lora import (
    adapter_parameters,
    adapter_scale,
    load_policy,
    merged_parameters,
    save_adapter_folder,
)
from infsample_rl.model.packing import PackedRow, TrainingRow, pack_prompt, pack_row, pack_samples
from infsample_rl.model.peak_memory import process_memory
from infsample_rl.model.shared_prompt import SharedPrompt
from infsample_rl.model.weight_sync.rendezvous import host_store, open_store
from infsample_rl.observe.phases import phase
from infsample_rl.types import LossTotals, TrainingSample

SCALED_TOKENS = 4096
PassId = tuple[int, int]  # a row's row_id, and the number of the pass in it


class LearnerWorker:
    """Trains the policy; every public method but __init__ and host_store is a collective of all ranks."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int) -> None:
        """`total_steps`: of the run; an update more or less than one a step changes the learning rate's schedule with
        it."""
        self.config, self.rank, self.world_size = config, rank, world_size
        self.total_updates = total_steps * config.objective.updates_per_step
        self.objective = dataclasses.replace(config.objective, importance=config.importance)
        self.device = torch.device("cuda" if config.cluster.learner_gpus > 0 else "cpu")
        self._store: dist.TCPStore | None = None  # where the ranks meet, on rank 0
        self._writers: dist.ProcessGroup | None = None  # the ranks, as they say to each other what they could write
        self.num_updates = 0  # updates done, skipped ones included
        self.num_rows = self.num_row_tokens = 0  # trained since the start
        self.provisional: LossTotals | None = None
        self.sums = UpdateSums()
        self.old_logprobs: dict[PassId, Tensor] = {}  # of this step's rows, where there are several updates
        self._loss_scale = loss_scale(config)

    def host_store(self) -> int:
        """Rank 0 alone, before setup(): the port at which the other ranks find it."""
        self._store = host_store(self.config.cluster.collective_timeout_s)
        return self._store.port

    @phase("setup")
    def setup(self, master_address: str, master_port: int, checkpoint: str | None) -> dict[str, str | int]:
        """Join the ranks at rank 0's host_store(), load model.path or `checkpoint`, shard. Returns what was set up, for
        the log.

        A worker of one rank needs no host_store() before, and neither address nor port.
        """
        torch.set_num_threads(self.config.cluster.threads_per_worker)
        torch.use_deterministic_algorithms(self.config.run.deterministic)
        torch.manual_seed(self.config.run.seed)
        if self.world_size > 1 or self.config.learner.backend == "deepspeed":
            if self.world_size == 1:
                self.host_store()
            # The gradients of an offloaded optimizer have their norm taken in host memory.
            on_gpu = "cpu:gloo,cuda:nccl" if self.config.learner.offload_optimizer else "nccl"
            dist.init_process_group(
                on_gpu if self.device.type == "cuda" else "gloo",
                store=self._store or open_store(master_address, master_port, self.config.cluster.collective_timeout_s),
                rank=self.rank,
                world_size=self.world_size,
                timeout=datetime.timedelta(seconds=self.config.cluster.collective_timeout_s),
            )
            # Ranks wait here for one that writes, whose disk may be slower than any collective: as long as the driver
            # waits for them.
            until_written = datetime.timedelta(seconds=self.config.cluster.progress_timeout_s)
            self._writers = dist.new_group(timeout=until_written, backend="gloo")
        self.tokenizer = load_tokenizer(self.config.model)
        self.memory = process_memory(self.device.type)
        lm, self.adapted = load_policy(self.config, self.device, checkpoint)
        self.policy = PackedPolicy(
            lm,
            valid_vocab=len(self.tokenizer),
            chunk_tokens=self.config.learner.logprob_chunk_tokens,
            bad_token_ids=self.config.rollout.bad_token_ids,
            head_fp32=self.config.model.lm_head_fp32,
        )
        self.policy.entropy_gradient = self.objective.entropy_coef > 0
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        self._prepare_for_training(lm)
        self.backend = self._build_backend()
        self.publisher = WeightPublisher(self.config.cluster, self.sent_parameters, self.rank)
        self.reference = None
        if self.objective.kl_in_loss and self.config.reference.placement == "learner":
            self.reference = build_reference(
                self.config, self.backend, self.adapted, device=self.device, world_size=self.world_size
            )
        if checkpoint is not None:
            saved = SavedState(Path(checkpoint))
            self.backend.load_training_states(saved)
            saved.restore_random_state(self.rank)
            self.num_updates = saved.num_updates
        self.memory.reset()  # pages of the files that were read, which the system takes back when it wants to
        return {
            "backend": type(self.backend).__name__,
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
        learner = self.config.learner
        if learner.activation_checkpointing:
            checkpoint_every(lm, learner.activation_checkpointing, granularity=learner.recompute_granularity)

    def _build_backend(self) -> Backend:
        """Imported where it is chosen: a machine may lack DeepSpeed."""
        learner, dtype = self.config.learner, getattr(torch, self.config.model.dtype)
        if learner.backend == "deepspeed":
            from infsample_rl.learner.deepspeed_backend import DeepSpeedBackend

            return DeepSpeedBackend(self.policy, learner, device=self.device, dtype=dtype, world_size=self.world_size)
        if self.world_size == 1:
            from infsample_rl.learner.unsharded_backend import UnshardedBackend

            return UnshardedBackend(self.policy, learner, dtype=dtype)
        from infsample_rl.learner.fsdp_backend import FsdpBackend

        return FsdpBackend(self.policy, learner, device=self.device, dtype=dtype, world_size=self.world_size)

    def accumulate(
        self, samples: list[TrainingSample] | None, totals: LossTotals, row_id: int | None = None
    ) -> dict[str, int]:
        """Forward and backward of one row, in the passes it takes. None: a row of weight zero, so that this rank's
        collectives match.

        `totals` may be provisional but must stay the same until step(), which is given the real ones. `row_id`: the
        row's number in the step, where there are several updates: its log-probabilities are kept for the passes that
        follow. RuntimeError for a non-finite loss, or for log-probabilities that differ from the engine's by more than
        rounding.
        """
        if self.provisional not in (None, totals):
            raise ValueError(f"totals must stay the same until step(): got {totals} after {self.provisional}")
        self.provisional = totals
        self.sums.denominator = loss_denominator(self.objective, totals)
        if not samples:
            dummy = _dummy_row(self.device)
            self._reference_logprobs(dummy, None)
            logprobs = self._forward(dummy)[0]
            with phase("backward"):
                self.backend.backward(logprobs.sum() * 0.0)
            return {"samples": 0, "row_tokens": 0}
        passes, tokens = self._split(samples), 0
        shared = self._run_prompt(samples) if len(passes) > 1 else None
        for number, part in enumerate(passes):
            tokens += self._accumulate_pass(part, shared, totals, None if row_id is None else (row_id, number))
        if shared is not None:
            tokens += shared.num_tokens
            with phase("backward"):
                self.backend.backward(shared.gradient_carrier())
        self.num_rows, self.num_row_tokens = self.num_rows + 1, self.num_row_tokens + tokens
        return {"samples": len(samples), "row_tokens": tokens}

    def _accumulate_pass(
        self, samples: list[TrainingSample], shared: SharedPrompt | None, totals: LossTotals, pass_id: PassId | None
    ) -> int:
        """Forward and backward of a row, or of some responses of one whose prompt has been run. Returns its tokens."""
        row = pack_samples(samples, self.device, shared)
        reference = row.reference_logprobs
        if self.reference is not None:
            reference = self._reference_logprobs(
                row.row if shared is None else pack_samples(samples, self.device).row, pass_id
            )
        logprobs, entropy = self._forward(row.row)
        old = self._old_logprobs(pass_id, logprobs)
        loss, metrics = policy_loss(
            logprobs,
            old,
            row.advantages,
            row.row.sequence_ids,
            objective=self.objective,
            totals=totals,
            ref_logprobs=reference,
            engine_logprobs=row.engine_logprobs,
            entropy=entropy,
        )
        with phase("backward"):
            self.backend.backward(loss * self._loss_scale)
            # Checked after the backward pass: a rank that raised before it would leave the others waiting in its
            # collectives. Inside its phase: here the host waits for a GPU, whose work until now this is.
            self._check_row(samples, row, loss.item(), logprobs.detach(), old)
        if math.isfinite(loss.item()):
            self.sums.add_row(loss.item(), metrics, totals.num_tokens, old, row.engine_logprobs, entropy)
        return row.row.input_ids.shape[1]

    @torch.no_grad()
    def remember(self, samples: list[TrainingSample] | None, row_id: int) -> None:
        """Keep a row's log-probabilities under the weights of now, before the step's first update changes them. None:
        as in accumulate."""
        if not samples:
            dummy = _dummy_row(self.device)
            self._forward(dummy)
            self._reference_logprobs(dummy, None)
            return
        for number, part in enumerate(self._split(samples)):
            row = pack_samples(part, self.device).row
            self.old_logprobs[row_id, number] = self._forward(row)[0]
            self._reference_logprobs(row, (row_id, number))

    def _split(self, samples: list[TrainingSample]) -> list[list[TrainingSample]]:
        return split_passes(samples, self.config.learner.max_tokens_per_micro_batch)

    def _run_prompt(self, samples: list[TrainingSample]) -> SharedPrompt:
        row = pack_prompt(samples[0].prompt_ids, self.device)
        self._forward(row)
        return row.cuts.shared

    @phase("forward")
    def _forward(self, row: PackedRow) -> tuple[Tensor, Tensor]:
        return self.backend.forward(row, self.config.rollout.temperature)

    def _reference_logprobs(self, row: PackedRow, pass_id: PassId | None) -> Tensor | None:
        if self.reference is None:
            return None
        with phase("reference"):
            return self.reference.logprobs(row, pass_id)

    def _old_logprobs(self, pass_id: PassId | None, logprobs: Tensor) -> Tensor:
        if pass_id is None:
            return logprobs.detach()
        return self.old_logprobs.setdefault(pass_id, logprobs.detach())

    def _check_row(
        self, samples: list[TrainingSample], row: TrainingRow, loss: float, logprobs: Tensor, old: Tensor
    ) -> None:
        """RuntimeError for a loss that is not finite, or tokens whose policy is not the engine's, named."""
        update = self.num_updates + 1
        if not math.isfinite(loss):
            if self.config.learner.on_nonfinite == "stop":
                worst = _worst_tokens(samples, (~torch.isfinite(logprobs)).float(), logprobs, row)
                raise RuntimeError(
                    f"update {update}: loss is {loss}; {worst}; learner.on_nonfinite=skip would skip the update"
                )
            self.sums.num_nonfinite_rows += 1
            return
        difference, limit = (old - row.engine_logprobs).abs(), self.config.objective.mismatch_stop_float32
        if self.config.mismatch_is_rounding and not difference.max() <= limit:  # NaN is a mismatch too
            worst = _worst_tokens(samples, difference, old, row)
            raise RuntimeError(
                f"update {update}: engine and learner differ by {difference.max().item():.3g} in a token's "
                "log-probability, above "
                f"objective.mismatch_stop_float32={limit:g}: they do not run the same policy; {worst}"
            )

    @phase("optimizer")
    def step(self, totals: LossTotals, *, is_last: bool = True) -> dict[str, float | None]:
        """Apply the accumulated gradient with the real denominators of the update, and return its metrics over all
        ranks.

        loss has the real denominator, the other means are over the tokens seen. An update without any valid sample is
        skipped, and so is a non-finite one under learner.on_nonfinite=skip; both count in learner/skipped_updates.
        `is_last`: of the step; what was kept of its rows is dropped.
        """
        learner, update = self.config.learner, self.num_updates + 1
        if learner.grad_sync == "last_row":
            self.backend.reduce_with_next_backward()
            self.backend.backward(self._forward(_dummy_row(self.device))[0].sum() * 0.0)
        elif learner.backend == "deepspeed" and self.provisional is None and totals.num_sequences > 0:
            # all groups had equal rewards, so no row came: DeepSpeed steps with what its last backward pass left, or
            # fails without any
            self.backend.backward(self._forward(_dummy_row(self.device))[0].sum() * 0.0)
        sums = self.sums.over_ranks(self.device, self.world_size)
        self._check_mismatch(sums)
        lr = lr_at(self.num_updates, self.total_updates, learner)
        empty = totals.num_sequences == 0
        denominator = loss_denominator(self.objective, totals)
        # of all ranks: this one may have had no row
        factor = 0.0 if empty else (sums.denominator or denominator) / denominator
        factor /= self._loss_scale
        norm = 0.0
        if empty or sums.num_nonfinite_rows > 0:
            self.backend.discard()
        else:
            norm = self.backend.update(factor=factor, max_norm=learner.max_grad_norm, lr=lr)
        if not math.isfinite(norm) and learner.on_nonfinite == "stop":
            raise RuntimeError(
                f"update {update}: gradient norm is {norm}; learner.on_nonfinite=skip would skip the update"
            )
        skipped = empty or sums.num_nonfinite_rows > 0 or not math.isfinite(norm)
        self.num_updates += 1
        self.provisional, self.sums = None, UpdateSums()
        if is_last:
            self.old_logprobs.clear()
        if self.reference is not None:
            self.reference.end_update(is_last=is_last)
        return {
            "learner/loss": sums.loss * factor,
            "learner/grad_norm": 0.0 if skipped else norm,
            "learner/lr": lr,
            "learner/skipped_updates": float(skipped),
            "memory/learner_peak_bytes": float(self.memory.peak_bytes()),
        } | sums.metrics()

    def _check_mismatch(self, sums: UpdateSums) -> None:
        mean, bound = sums.mismatch / max(1, sums.num_tokens), self.config.objective.mismatch_stop
        if self.config.mismatch_is_bounded_in_mean and not mean <= bound:  # NaN is a mismatch too
            raise RuntimeError(
                f"update {self.num_updates + 1}: engine and learner differ by {mean:.3g} in the mean log-probability "
                "of a token, above "
                f"objective.mismatch_stop={bound} (largest {sums.mismatch_max:.3g}): they do not run the same policy"
            )

    def published_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the model's dtype), one at a time: the weights that sample; run it to its
        end."""
        parameters = self.backend.full_parameters()
        return parameters if self.adapted is None else merged_parameters(parameters, adapter_scale(self.config.learner))

    def sent_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine in another process is sent: published_parameters(), or with learner.lora_publish=adapters the
        adapters."""
        if self.adapted is not None and self.config.learner.lora_publish == "adapters":
            return adapter_parameters(self._trained_parameters())
        return self.published_parameters()

    def _trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full trained parameters in the model's dtype, one at a time; those that are frozen are not gathered."""
        dtype = getattr(torch, self.config.model.dtype)
        return ((name, state["master"].to(dtype)) for name, state in self.backend.training_states())

    @phase("save")
    def save(self, folder: str) -> None:
        """Write a checkpoint: a Hugging Face folder at `folder`, of adapters with LoRA, and the training state inside
        it.

        RuntimeError on all ranks, which stay in step, when one of them cannot write.
        """
        path, rank, world_size = Path(folder), self.rank, self.world_size
        together = partial(written_by_all, what=f"checkpoint {folder}", writers=self._writers)
        if self.adapted is None:
            together(
                lambda tensors: save_pretrained_folder(path, self.policy.lm, tensors, self.tokenizer, rank=rank),
                self.backend.full_parameters(),
            )
        else:
            together(
                lambda tensors: save_adapter_folder(path, self.adapted, tensors, self.tokenizer, rank=rank),
                self._trained_parameters(),
            )
        states = self.backend.training_states()
        kinds = together(lambda tensors: save_training_state(path, tensors, rank=rank, world_size=world_size), states)
        counts = {
            "num_updates": self.num_updates,
            "optimizer_steps": self.backend.optimizer_steps,
            "world_size": world_size,
        }
        together(lambda _: write_progress(path, kinds, **counts) if rank == 0 else None, ())

    def statistics(self) -> dict[str, float]:
        """Sums since the start, by metric name."""
        return {
            "learner_rows": self.num_rows,
            "learner_row_tokens": self.num_row_tokens,
            "learner_updates": self.num_updates,
        }

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()


def loss_scale(config: Config) -> float:
    """What losses are multiplied by before the backward pass, and gradients divided by after it; 1 but in float16.

    A token's gradient is divided by the samples or tokens of the whole update, and would be below float16's smallest
    numbers in a large one (Micikevicius et al. 2018, "Mixed Precision Training", section 3.2). The scale, a power of
    two, makes of it one of SCALED_TOKENS.
    """
    if config.model.dtype != "float16":
        return 1.0
    return 2.0 ** round(math.log2(max(1.0, config.samples_per_step * config.rollout.max_new_tokens / SCALED_TOKENS)))


def _dummy_row(device: torch.device) -> PackedRow:
    """The shortest row there is."""
    return pack_row([(np.zeros(1, np.int32), [np.zeros(1, np.int32)])], device)


def _worst_tokens(
    samples: list[TrainingSample], badness: Tensor, logprobs: Tensor, row: TrainingRow, count: int = 3
) -> str:
    """The tokens of largest `badness` [R], named by prompt_index, sample_index and position, with both
    log-probabilities."""
    names = [(sample, position) for sample in samples for position in range(len(sample.response_ids))]
    lines = []
    for token in badness.nan_to_num(nan=math.inf).topk(min(count, len(badness))).indices.tolist():
        sample, position = names[token]
        lines.append(
            f"(prompt_index={sample.prompt_index}, sample_index={sample.sample_index}, token {position}): "
            f"engine {row.engine_logprobs[token].item():.6f}, learner {logprobs[token].item():.6f}"
        )
    return "; ".join(lines)

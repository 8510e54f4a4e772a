"""One rank of the learner: one or several updates a step, weights published, checkpoints saved."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from infsample_rl.config import Config
from infsample_rl.learner.checkpoint import (
    SavedState,
    save_pretrained_folder,
    save_training_state,
    write_progress,
    written_by_all,
)
from infsample_rl.learner.loss import loss_denominator
from infsample_rl.learner.optimizer import lr_at
from infsample_rl.learner.policy_loading import load_policy
from infsample_rl.learner.publishing import WeightPublisher
from infsample_rl.learner.ranks import build_backend, join_ranks
from infsample_rl.learner.reference import build_reference
from infsample_rl.learner.row_trainer import RowTrainer, dummy_row
from infsample_rl.learner.update_sums import UpdateSums, check_mean
from infsample_rl.model.logprobs import checkpoint_every, packed_policy
from infsample_rl.model.lora import (
    adapter_parameters,
    adapter_scale,
    merged_parameters,
    save_adapter_folder,
)
from infsample_rl.model.peak_memory import process_memory, return_freed_memory
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_sync.store import SignedStore, StoreAddress, host_store, open_store
from infsample_rl.observe.phases import phase
from infsample_rl.types import LossTotals, MaybeNone


class LearnerWorker(RowTrainer):
    """Trains the policy; every public method but __init__ and host_store is a collective of all ranks."""

    def __init__(self, config: Config, rank: int, world_size: int, total_steps: int) -> None:
        """`total_steps`: of the run, over whose updates the learning rate's schedule goes."""
        super().__init__(config)
        self.rank, self.world_size = rank, world_size
        self.total_updates = total_steps * config.objective.updates_per_step
        self.num_steps = 0  # done
        self._store: SignedStore | None = None  # where the ranks meet, rank 0's
        self._writers: dist.ProcessGroup | None = None  # the ranks, as they say to each other what they could write

    def host_store(self, host: str) -> StoreAddress:
        """Rank 0 alone, before setup(): where the other ranks find it, at this address of this machine."""
        self._store, address = host_store(host, self.config.cluster.collective_timeout_s)
        return address

    def make_room(self) -> None:
        """Let go of what the allocator keeps of freed tensors, where an engine is to take its turn on this device."""
        if self.config.takes_turns and self.device.type == "cuda":
            torch.cuda.empty_cache()
        elif self.config.takes_turns:
            return_freed_memory()

    @phase("setup")
    def setup(self, checkpoint: str | None, meeting: StoreAddress | MaybeNone = None) -> dict[str, str | int]:
        """Join the ranks at `meeting`, rank 0's host_store(), load model.path or `checkpoint`, shard. Returns what was
        set up, for the log.

        A worker of one rank needs no host_store() before.
        """
        torch.set_num_threads(self.config.cluster.threads_per_worker)
        # on a GPU torch names what has no such algorithm in a warning, and the run goes on
        torch.use_deterministic_algorithms(self.config.is_deterministic, warn_only=self.device.type == "cuda")
        # nothing here reads what it has not written
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # set by its class
        torch.manual_seed(self.config.run.seed)
        if self.world_size > 1 or self.config.learner.backend == "deepspeed":
            if self.world_size == 1:
                self.host_store("127.0.0.1")
            self._store = self._store or open_store(meeting, self.config.cluster.collective_timeout_s)
            self._writers = join_ranks(self.config, self._store, self.rank, self.world_size)
        self.tokenizer = load_tokenizer(self.config.model)
        self.memory = process_memory(self.device.type)
        learner = self.config.learner
        in_slices = self.world_size > 1 and (learner.backend == "fsdp" or learner.zero_stage == 3)
        lm, self.adapted, slices, how = load_policy(self.config, self.device, checkpoint, in_slices=in_slices)
        self.policy = packed_policy(self.config, lm, len(self.tokenizer))
        self.policy.entropy_gradient = self.objective.entropy_coef > 0
        num_parameters = sum(parameter.numel() for parameter in self.policy.parameters())
        for module in lm.modules():
            if isinstance(module, nn.Dropout):  # the policy that sampled had none
                module.p = 0.0
        if learner.activation_checkpointing:
            checkpoint_every(lm, learner.activation_checkpointing, granularity=learner.recompute_granularity)
        self.backend = build_backend(self.policy, self.config, slices, device=self.device, world_size=self.world_size)
        self.publisher = WeightPublisher(self.config.cluster, self.sent_parameters, self.rank)
        self.reference = None
        if self.objective.reference_in_loss and self.config.reference.placement == "learner":
            self.reference = build_reference(
                self.config, self.backend, self.adapted, device=self.device, world_size=self.world_size
            )
        if checkpoint is not None:
            self._go_on_from(SavedState(Path(checkpoint)))
        self.memory.reset()  # pages of the files that were read, which the system takes back when it wants to
        return {
            "backend": type(self.backend).__name__,
            "device": str(self.device),
            "ranks": self.world_size,
            "parameters": num_parameters,
            "loaded": how,
            "threads": torch.get_num_threads(),
            "updates": self.num_updates,
        }

    def _go_on_from(self, saved: SavedState) -> None:
        """The steps that are left extend the schedule: those before may have had another number of updates each."""
        self.backend.load_training_states(saved)
        saved.restore_random_state(self.rank)
        per_step = self.objective.updates_per_step
        self.num_updates = saved.num_updates
        self.num_steps = self.num_updates // per_step if saved.num_steps is None else saved.num_steps
        self.total_updates += self.num_updates - self.num_steps * per_step

    @phase("optimizer")
    def step(self, totals: LossTotals, *, is_last: bool = True) -> dict[str, float | None]:
        """Apply the accumulated gradient with the real denominators of the update, and return its metrics over all
        ranks.

        loss has the real denominator, the other means are over the tokens seen. An update without any valid sample is
        skipped and has no loss, and a non-finite one is under learner.on_nonfinite=skip; both count in
        learner/skipped_updates. `is_last`: of the step; what was kept of its rows is dropped.
        """
        learner, update = self.config.learner, self.num_updates + 1
        # Without a row, since all groups had equal rewards, DeepSpeed would step with what its last backward pass left.
        is_empty_deepspeed = learner.backend == "deepspeed" and self.provisional is None and totals.num_sequences > 0
        if learner.grad_sync == "last_row":
            self.backend.reduce_with_next_backward()
        if learner.grad_sync == "last_row" or is_empty_deepspeed:
            self.backend.backward(self._forward(dummy_row(self.device))[0].sum() * 0.0)
        sums = self.sums.over_ranks(self.device, self.world_size)
        check_mean(self.config, sums, update)
        lr = lr_at(self.num_updates, self.total_updates, learner)
        empty = totals.num_sequences == 0
        denominator = loss_denominator(self.objective, totals)
        # of all ranks: this one may have had no row
        factor = 0.0 if empty else (sums.denominator or denominator) / denominator
        norm = 0.0
        if empty or sums.num_nonfinite_rows > 0:
            self.backend.discard()
        else:
            unscaled = factor / self._loss_scale  # gradients alone are of scaled losses
            norm = self.backend.update(factor=unscaled, max_norm=learner.max_grad_norm, lr=lr)
        if not math.isfinite(norm) and learner.on_nonfinite == "stop":
            raise RuntimeError(
                f"update {update}: gradient norm is {norm}; learner.on_nonfinite=skip would skip the update"
            )
        skipped = empty or sums.num_nonfinite_rows > 0 or not math.isfinite(norm)
        self.num_updates += 1
        self.num_steps += is_last
        self.provisional, self.sums = None, UpdateSums()
        if is_last:
            self.old_logprobs.clear()
        if self.reference is not None:
            self.reference.end_update(is_last=is_last)
        return {
            "learner/loss": None if empty else sums.loss * factor,
            "learner/grad_norm": 0.0 if skipped else norm,
            "learner/lr": lr,
            "learner/skipped_updates": float(skipped),
            "memory/learner_peak_bytes": float(self.memory.peak_bytes()),
        } | sums.metrics()

    def published_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor in the model's dtype), one at a time: the weights that sample; run it to its
        end."""
        parameters = self.backend.full_parameters()
        return parameters if self.adapted is None else merged_parameters(parameters, adapter_scale(self.config.learner))

    def sent_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """What an engine in another process is sent: published_parameters(), or with learner.lora_publish=adapters the
        adapters."""
        if self.config.learner.sends_adapters:
            return adapter_parameters(self._trained_parameters())
        return self.published_parameters()

    def _trained_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Full trained parameters in the model's dtype, one at a time; those that are frozen are not gathered."""
        dtype = getattr(torch, self.config.model.dtype)
        masters = self.backend.training_states(["master"])
        return ((name.removesuffix("/master"), master.to(dtype)) for name, master in masters)

    @phase("save")
    def save(self, folder: str) -> None:
        """Write a checkpoint: a Hugging Face folder at `folder`, of adapters with LoRA, and the training state inside
        it.

        RuntimeError on all ranks, which stay in step, when one of them cannot write.
        """
        path, rank = Path(folder), self.rank
        together = partial(written_by_all, what=f"checkpoint {folder}", writers=self._writers)
        if self.adapted is None:
            write: Any = partial(save_pretrained_folder, path, self.policy.lm, self.publisher.shapes())
            tensors = self.backend.full_parameters()
        else:
            write, tensors = partial(save_adapter_folder, path, self.adapted), self._trained_parameters()
        together(lambda given: write(given, self.tokenizer, rank=rank), tensors)
        states = partial(save_training_state, path, self.backend.training_shapes())
        together(lambda given: states(given, rank=rank, world_size=self.world_size), self.backend.training_states())
        counts = {"num_steps": self.num_steps, "num_updates": self.num_updates}
        counts["optimizer_steps"] = self.backend.optimizer_steps
        together(lambda _: write_progress(path, **counts) if rank == 0 else None, ())

    def close(self) -> None:
        """Leave the process group."""
        if dist.is_initialized():
            dist.destroy_process_group()

"""The frozen reference policy of the KL terms, or the teacher of a distillation: in a worker of its own, which may be
sharded over several ranks, or on the learner ranks themselves (reference.placement=learner), where nothing is sent.

There with LoRA it is the policy with its adapters off, without a second copy of anything. Else a frozen copy beside the
policy, sharded over the same ranks wherever rows run in lockstep; with learner.grad_sync=last_row, where they do not,
every rank has a whole one.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

from infsample_rl.config import Config
from infsample_rl.learner.backend import Backend
from infsample_rl.learner.policy_loading import load_in_slices
from infsample_rl.learner.ranks import join_default_group
from infsample_rl.learner.row_plan import runs_within
from infsample_rl.model.loading import load_model
from infsample_rl.model.logprobs import PackedPolicy, TokenScores, packed_policy
from infsample_rl.model.lora import adapters_off
from infsample_rl.model.packing import PackedRow, ReferenceScores, pack_row
from infsample_rl.model.peak_memory import process_memory
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_slices import materialize, move_buffers
from infsample_rl.model.weight_sync.store import SignedStore
from infsample_rl.observe.phases import phase
from infsample_rl.types import Completion, MaybeNone, Prompt, ReferenceReport, ReferenceResult, ReferenceTokens

if TYPE_CHECKING:
    from peft import PeftModel

Forward = Callable[[PackedRow, float], TokenScores]  # as PackedPolicy.forward


class ReferenceWorker:
    """Log-probabilities of finished micro-groups under reference.path, or under the policy the run starts from."""

    def __init__(self, config: Config, rank: int = 0, store: SignedStore | None = None) -> None:
        """`rank` of cluster.reference_ranks, which meet in `store`, each with a shard. Every method is a collective of
        them, and gives the same on all."""
        torch.set_num_threads(config.cluster.threads_per_worker)
        ranks = config.cluster.reference_ranks if store is not None else 1
        self.device = torch.device("cuda" if config.cluster.reference_gpus > 0 else "cpu")
        self.temperature = config.rollout.temperature
        self.top_k = config.objective.teacher_top_k
        self.max_tokens = config.reference.max_tokens_per_micro_batch
        self.memory = process_memory(self.device.type)
        if store is not None:
            join_default_group(config, store, rank, ranks, backend="nccl" if self.device.type == "cuda" else "gloo")
        self.policy = load_frozen_policy(config, self.device, ranks=ranks)
        self.memory.reset()  # pages of the file that was read, which the system takes back when it wants to

    @phase("reference")
    @torch.no_grad()
    def logprobs(self, prompt: Prompt, completions: list[Completion]) -> ReferenceResult:
        """Reference log-probabilities of one prompt's completions and, per completion, the sum of policy minus
        reference."""
        tokens: list[ReferenceTokens] = []
        responses = [completion.token_ids for completion in completions]
        sampled = [completion.sampled for completion in completions]
        # rows of at most max_tokens, each with the prompt once
        for part in runs_within([len(ids) for ids in responses], len(prompt.token_ids), self.max_tokens):
            row = pack_row([(prompt.token_ids, responses[part])], self.device, sampled=sampled[part])
            logprobs, ids, likely = score(self.policy, row, self.temperature, self.top_k)
            ends = np.cumsum([mask.sum() for mask in sampled[part]])[:-1]
            flat = (logprobs, ids.to(torch.int32), likely)
            tokens += map(ReferenceTokens, *(np.split(scores.cpu().numpy(), ends) for scores in flat))
        kl_sums = [
            float(np.sum(completion.logprobs[mask] - own.logprobs, dtype=np.float64))
            for completion, own, mask in zip(completions, tokens, sampled, strict=True)
        ]
        return ReferenceResult(tokens=tokens, report=ReferenceReport(kl_sums, self.memory.peak_bytes()))


def score(forward: Forward, row: PackedRow, temperature: float, top_k: int) -> ReferenceScores:
    """Of the row's response tokens, with the `top_k` likeliest ids at each."""
    logprobs, _, ids, likely = forward(dataclasses.replace(row, others=top_k), temperature)
    return ReferenceScores(logprobs, ids, likely)


class ReferencePolicy:
    """The reference's scores of the rows a rank is about to train.

    They are computed at a row's first pass, before the step's first update, and kept for the passes after it: so all
    ranks of a wave compute them or none does, and the collectives of a sharded reference match.
    """

    def __init__(self, forward: Forward, temperature: float, top_k: int) -> None:
        self._forward, self._temperature, self._top_k = forward, temperature, top_k
        self._kept: dict[tuple[int, int], ReferenceScores] = {}
        self._is_updated = False  # whether the step has had its first update

    @torch.no_grad()
    def scores(self, row: PackedRow, pass_id: tuple[int, int] | None) -> ReferenceScores | None:
        """Of the response tokens of a pass; `pass_id`: its row's row_id and its number. None for a row of weight zero
        after an update."""
        if not self._is_updated:
            scores = score(self._forward, row, self._temperature, self._top_k)
            if pass_id is not None:
                self._kept[pass_id] = scores
            return scores
        return None if pass_id is None else self._kept[pass_id]

    def end_update(self, *, is_last: bool) -> None:
        """The optimizer has stepped; `is_last` of the step: what was kept is dropped."""
        self._is_updated = not is_last
        if is_last:
            self._kept.clear()


def build_reference(
    config: Config, backend: Backend, adapted: PeftModel | MaybeNone, *, device: torch.device, world_size: int
) -> ReferencePolicy:
    """The reference beside the policy that `backend` trains, whose adapters, if any, are `adapted`. A collective."""

    def without_adapters(row: PackedRow, temperature: float) -> TokenScores:
        with adapters_off(adapted):
            return backend.forward(row, temperature)

    forward = _frozen_copy(config, device, world_size) if adapted is None else without_adapters
    return ReferencePolicy(forward, config.rollout.temperature, config.objective.teacher_top_k)


def _frozen_copy(config: Config, device: torch.device, world_size: int) -> PackedPolicy:
    # On a CPU machine the weights are in host memory in any case.
    offload = config.reference.offload and device.type != "cpu"
    if world_size > 1 and config.learner.grad_sync == "every_row":
        return load_frozen_policy(config, device, ranks=world_size, offload=offload)
    policy = load_frozen_policy(config, "cpu" if offload else device)
    if offload:
        keep_in_host_memory(policy, device)
    return policy


def load_frozen_policy(
    config: Config, device: torch.device | str, *, ranks: int = 1, offload: bool = False
) -> PackedPolicy:
    """The reference, frozen: reference.path, or the policy the run starts from; of more than one of the `ranks` of the
    default process group this one's shard, in host memory with `offload`.

    ValueError when the policy's tokenizer has ids it does not know.
    """
    path, device = config.reference.path or config.model.path, torch.device(device)
    setting = "reference.path" if config.reference.path else "model.path"
    where, slices = torch.device("cpu") if offload else device, None
    if ranks > 1:
        dtype = getattr(torch, config.model.dtype)
        lm, slices, how = load_in_slices(config.model, where, path=path, dtype=dtype, setting=setting)
        if slices is None and dist.get_rank() == 0:
            warnings.warn(f"the reference is loaded {how}", stacklevel=2)
    else:
        lm = load_model(config.model, where, path=path, setting=setting)
    valid_vocab, rows = len(load_tokenizer(config.model)), lm.get_output_embeddings().weight.shape[0]
    if config.reference.path and rows < valid_vocab:
        raise ValueError(
            f"reference.path={config.reference.path} has a vocabulary of {rows} ids, the policy's tokenizer has "
            f"{valid_vocab}"
        )
    policy = packed_policy(config, lm, valid_vocab).requires_grad_(False)
    if ranks > 1:
        mesh = init_device_mesh(device.type, (ranks,))
        place = CPUOffloadPolicy() if offload else OffloadPolicy()
        for unit in (*policy.decoder_layers(), policy):
            # no backward comes that would free what was gathered
            fully_shard(unit, mesh=mesh, offload_policy=place, reshard_after_forward=True)
    if slices is not None:
        materialize(policy, where)
        for name, shard in policy.lm.named_parameters():
            slices.read(name, shard)
    return policy


def keep_in_host_memory(policy: PackedPolicy, device: torch.device) -> None:
    """Bring a frozen policy's weights to `device` for the time of a forward only, its layers one at a time."""
    move_buffers(policy, device)
    seen: set[nn.Parameter] = set()
    for unit in (*policy.decoder_layers(), policy):
        own = [parameter for parameter in unit.parameters() if parameter not in seen]
        seen.update(own)
        _move_around_forward(unit, own, device)


def _move_around_forward(unit: nn.Module, parameters: list[nn.Parameter], device: torch.device) -> None:
    held = [parameter.data.pin_memory() if device.type == "cuda" else parameter.data for parameter in parameters]

    def bring(*_: object) -> None:
        for parameter, host in zip(parameters, held, strict=True):
            parameter.data = host.to(device, non_blocking=True, copy=True)

    def drop(*_: object) -> None:
        for parameter, host in zip(parameters, held, strict=True):
            parameter.data = host

    unit.register_forward_pre_hook(bring)
    unit.register_forward_hook(drop)
    drop()

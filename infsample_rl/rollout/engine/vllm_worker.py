"""What runs inside vLLM's own processes: tokens are drawn with this package's noise, and new weights are taken.

Only vllm_engine.py names it, to vLLM, which imports it in each of its processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor, nn
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.sample.logits_processor.interface import BatchUpdate, MoveDirectionality

from infsample_rl.model.peak_memory import give_pages_back, return_freed_memory
from infsample_rl.model.policy_head import masked_index
from infsample_rl.rollout.engine.sampler import Sampler

NOISE = "noise"  # in a request's extra_args: its sample's noise key, and the response tokens that it begins with


class NoiseRows(LogitsProcessor):
    """Which sample each row of vLLM's batch belongs to, and how many tokens it has; keeps ids from being sampled."""

    keys: Tensor  # [R] int64, of the step under way
    positions: Tensor  # [R] int64
    banned: Tensor | None = None  # ids that are never sampled

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._rows: dict[int, tuple[int, int, Sequence[int]]] = {}  # key, tokens it began with, and those since

    def is_argmax_invariant(self) -> bool:
        """False: ids are banned at temperature 0 too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the rows that went, came and moved, in this order."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, _, tokens in batch_update.added:
            key, position = (params.extra_args or {}).get(NOISE, (0, 0))  # of vLLM's own warm-up: none
            self._rows[row] = key, position, tokens
        for one, two, direction in batch_update.moved:
            first, second = self._rows.pop(one, None), self._rows.pop(two, None)
            if first is not None:
                self._rows[two] = first
            if second is not None and direction == MoveDirectionality.SWAP:
                self._rows[one] = second

    def apply(self, logits: Tensor) -> Tensor:
        """Before the temperature: note whose rows these are."""
        none: tuple[int, int, Sequence[int]] = 0, 0, ()
        rows = [self._rows.get(row, none) for row in range(logits.shape[0])]
        cls = type(self)
        cls.keys = torch.tensor([key for key, _, _ in rows], dtype=torch.int64, device=logits.device)
        counts = [begun + len(tokens) for _, begun, tokens in rows]
        cls.positions = torch.tensor(counts, dtype=torch.int64, device=logits.device)
        return logits if self.banned is None else logits.index_fill_(1, self.banned.to(logits.device), -torch.inf)


class HashedNoise(nn.Module):
    """In place of vLLM's last step of sampling: draws as this package's own engine does.

    So a sample depends on its logits alone, not on what decodes beside it, nor on whether it was sent once more.
    """

    def __init__(self, sampler: Sampler) -> None:
        super().__init__()
        self._sampler = sampler

    def forward(
        self, logits: Tensor, generators: dict[int, torch.Generator], k: Tensor | None, p: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Tokens [R], and log-probabilities [R, V] in which only two places are finite: the token's own, and where the
        distribution was truncated, at the id after it, that of the truncated one, which is never smaller."""
        drawn = self._sampler.draw(logits, NoiseRows.keys, NoiseRows.positions)
        said, tokens = torch.full(logits.shape, -torch.inf, device=logits.device), drawn.tokens[:, None]
        if drawn.sampling_probs is not None:
            said.scatter_(1, (tokens + 1) % logits.shape[1], drawn.sampling_probs.log().float()[:, None])
        return drawn.tokens, said.scatter_(1, tokens, drawn.probs.log()[:, None])


class WorkerExtension:
    """Mixed into vLLM's worker, whose attributes it finds."""

    device: torch.device
    model_runner: Any
    reload_weights: Any

    def draw_as_our_own(
        self, vocab_size: int, valid_vocab: int, top_p: float, top_k: int, min_p: float, bad_token_ids: list[int]
    ) -> None:
        """Draw with hashed noise from now on. RuntimeError where this vLLM samples in another place."""
        sampler: Any = getattr(self.model_runner, "sampler", None)
        if not hasattr(sampler, "topk_topp_sampler"):
            raise RuntimeError(f"{type(self.model_runner).__name__} has no sampler.topk_topp_sampler")
        drawing = Sampler(
            vocab_size, valid_vocab, temperature=1.0, top_p=top_p, top_k=top_k, min_p=min_p, device=self.device
        )
        sampler.topk_topp_sampler = HashedNoise(drawing)
        banned = masked_index(bad_token_ids, valid_vocab, self.device)
        padding = torch.arange(valid_vocab, vocab_size, device=self.device)
        NoiseRows.banned = padding if banned is None else torch.cat([banned, padding])
        if not len(NoiseRows.banned):
            NoiseRows.banned = None

    def load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take these weights, in place; of each what this process has a part of."""
        self.reload_weights(weights_iterator=tensors)
        for module in self.model_runner.get_model().modules():
            # A head that shares the embedding's weights is not told of new ones, of which the CPU's product has a copy.
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def release_host_memory(self) -> None:
        """On the CPU, where vLLM has no sleep mode: give the system the pages of weights and KV, which are zeros until
        they are written again, and drop what products have packed, which new weights pack again."""
        if self.device.type != "cpu":
            return
        model = self.model_runner.get_model()
        for module in model.modules():
            if hasattr(module, "cpu_linear"):
                module.cpu_linear = None
        for tensor in [*model.parameters(), *self.model_runner.kv_caches]:
            give_pages_back(tensor)
        return_freed_memory()

    def remove_store_file(self) -> str | None:
        """Remove the file through which vLLM's processes have met, which each start would leave; its path. A group that
        is made later makes it again."""
        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        path = getattr(store, "path", None)  # of a FileStore
        if path is not None:
            Path(path).unlink(missing_ok=True)
        return path

    def load_file(self, path: str) -> None:
        """Take the weights that a safetensors file holds."""
        with safe_open(path, "pt") as file:
            self.load_tensors((name, file.get_tensor(name)) for name in file.keys())

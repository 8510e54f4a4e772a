"""Runs the model over the KV pool: prefill of a prompt, one decode step of all rows, the KV of a preempted sample
again.

Letters: R rows, E hidden size, V vocabulary of the model's head.
"""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infsample_rl.model.architecture import KVShape, context_of
from infsample_rl.model.policy_head import head_logits
from infsample_rl.rollout.engine import attention
from infsample_rl.rollout.engine.architecture import check_architecture, check_kv_dtype
from infsample_rl.rollout.engine.cpu_decoder import CompiledDecoder
from infsample_rl.rollout.engine.decoder import LeanDecoder, linear, supports
from infsample_rl.rollout.engine.fused_decoder import FusedDecoder
from infsample_rl.rollout.engine.kv_cache import PagedKV, QuantisedKV, stored_dtype
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.types import MaybeNone

if TYPE_CHECKING:  # Triton may be absent
    from infsample_rl.rollout.kernels.paged_attention import Workspace

PREFILL_TOKENS = {"cpu": 128, "cuda": 2048}  # of a prompt in one forward, so that its activations do not grow with it


class ModelRunner:
    """Runs a model with attention that reads and writes the KV pool. Between its own forwards the model is as it
    was."""

    def __init__(
        self, model: PreTrainedModel, *, deterministic: bool = False, lm_head_fp32: bool = False, kv_dtype: str = "auto"
    ) -> None:
        """`deterministic`: every decode step runs all rows at the full KV extent, so results do not depend on what else
        runs.

        `kv_dtype`: auto (the model's dtype), int8 or fp8. Raises ValueError for fp8 where the device cannot convert it,
        and for a model that cannot be decoded here.
        """
        check_architecture(model)
        self.model, self.deterministic, self.lm_head_fp32 = model, deterministic, lm_head_fp32
        self.shape = KVShape.of(model.config)
        self.vocab_size = model.get_output_embeddings().weight.shape[0]  # rows of the head
        self.context = context_of(model.config)  # None: unbounded
        self.device, self.dtype = model.device, model.dtype
        self.kv_dtype = stored_dtype(kv_dtype, self.dtype)
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        check_kv_dtype(kv_dtype, capability, deterministic=deterministic)
        self.kernels: cpu_kernels.Kernels | MaybeNone = (
            cpu_kernels.load() if self.device.type == "cpu" and self.dtype == torch.float32 else None
        )
        self.find_decoder()
        if not supports(model):
            self._check_own_modules()
        self.kv: PagedKV | MaybeNone = None  # of allocate()

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pool; the one before is freed first."""
        self.kv = None
        sizes = (self.shape, num_pages, page_size, self.kv_dtype, self.device)
        self.kv = PagedKV(*sizes) if self.kv_dtype == self.dtype else QuantisedKV(*sizes, compute_dtype=self.dtype)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers, scales included."""
        return self.shape.page_bytes(page_size, self.kv_dtype)

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int], pages: list[int]) -> Tensor:
        """Write the KV of one prompt, alone, into `pages`; the logits [V] of its first response token."""
        return self.logits(self._extend(prompt_ids, pages, [], 0)[-1:])[0].clone()

    @torch.inference_mode()
    def rebuild(
        self, tokens: list[int], num_kept: int, pages: list[int], prompt_pages: list[int], num_prompt_tokens: int
    ) -> None:
        """Write the KV of a sample's `tokens` from `num_kept` on into its `pages`, which hold that of the ones
        before."""
        prompt = (torch.tensor(prompt_pages, device=self.device), num_prompt_tokens)
        self._extend(tokens, pages, [prompt], num_prompt_tokens, num_kept)

    def _extend(
        self, ids: list[int], pages: list[int], past: list[tuple[Tensor, int]], start: int, num_kept: int = 0
    ) -> Tensor:
        """Run a sequence's `ids` from `num_kept` on, after `start` tokens, and keep their KV in `pages`; last hidden
        states of the last piece."""
        own_pages = torch.tensor(pages, device=self.device)
        hidden = torch.empty(0)
        most = PREFILL_TOKENS[self.device.type]
        for begin in range(num_kept, len(ids), most):
            piece = torch.tensor([ids[begin : begin + most]], device=self.device)
            places = torch.arange(begin, begin + piece.shape[1], device=self.device)
            earlier = [(own_pages[: -(-begin // self.kv.page_size)], begin)] if begin else []
            step = attention.ExtendStep(self.kv, [*past, *earlier], self.kv.token_index(own_pages, places))
            # 1.5 to 2 times faster than torch's products, and less memory
            if self.kernels is not None and supports(self.model):
                hidden = LeanDecoder(self.model, self.kernels)(piece[0], start + places, attention.TokensAsRows(step))
            else:
                hidden = self._forward(piece, (start + places)[None], step)[0]
        return hidden

    @torch.inference_mode()
    def decode(self, batch: RowBatch, num_rows: int | None = None, workspace: Workspace | None = None) -> Tensor:
        """One forward of all rows, or of `num_rows` with idle ones behind the last: last hidden states [R, E] of their
        next tokens.

        `workspace`: attention in Triton.
        """
        num_rows = batch.num_rows if num_rows is None else num_rows
        if isinstance(self.decoder, CompiledDecoder):
            return self.decoder(batch, num_rows, self.kv)
        positions = batch.positions[:num_rows].clamp(min=0)
        write_index = self.kv.token_index(batch.tables[:num_rows].long(), positions[:, None])[:, 0]
        step = self._decode_step(batch, num_rows, positions, write_index, workspace)
        tokens, places = batch.tokens[:num_rows], batch.starts[:num_rows] + positions
        if self.decoder is not None:
            return self.decoder(tokens, places, step)
        return self._forward(tokens[:, None], places[:, None], step)[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]; float32 with lm_head_fp32, else the model's dtype."""
        weight = self.model.get_output_embeddings().weight
        if self.dtype == torch.float32 and not self._keeps_torch:
            return linear(hidden, weight, None, self.kernels)
        return head_logits(hidden, weight, fp32=self.lm_head_fp32)

    def _decode_step(
        self, batch: RowBatch, num_rows: int, positions: Tensor, write_index: Tensor, workspace: Workspace | None
    ) -> attention.Step:
        if workspace is not None:
            from infsample_rl.rollout.engine.triton_step import TritonStep  # Triton may be absent

            return TritonStep(self.kv, batch, num_rows, positions, write_index, workspace)
        if self._kernels_read_pages:
            return attention.CPUKernelStep(self.kv, write_index, batch, num_rows, self.kernels)
        page_size, is_one = self.kv.page_size, len(batch.groups) == 1
        num_pages = batch.tables.shape[1] if self.deterministic else -(-batch.max_length // page_size)
        unseen = torch.arange(num_pages * page_size, device=self.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, -math.inf)
        prompts = []
        for place, group in enumerate(batch.groups):
            rows = None if is_one else (batch.prompt_of_row[:num_rows] == place).nonzero()[:, 0]
            prompts.append((batch.prompt_tables[place : place + 1, : len(group.pages)], len(group.prompt_ids), rows))
        return attention.GatherStep(
            kv=self.kv,
            write_index=write_index,
            pages=batch.tables[:num_rows, :num_pages],
            mask=mask[:, None, None],
            prompts=prompts,
            fixed_shapes=self.deterministic,
        )

    def _forward(self, ids: Tensor, positions: Tensor, step: attention.Step) -> Tensor:
        config = self.model.config
        # what set_attn_implementation ends in
        users_own, config._attn_implementation = config._attn_implementation, attention.NAME
        try:
            return self.model.base_model(
                input_ids=ids, position_ids=positions, use_cache=False, pool=step
            ).last_hidden_state
        finally:
            config._attn_implementation = users_own

    @property
    def _keeps_torch(self) -> bool:
        """deterministic without compiled kernels: torch's usual products, in which a row's result does not depend on
        its place."""
        return self.deterministic and self.kernels is None

    @property
    def _kernels_read_pages(self) -> bool:
        return self.kernels is not None and self.kv_dtype == torch.float32

    def find_decoder(self) -> None:
        """Choose the decoder, at first and when a parameter has been replaced."""
        self.decoder = self._short_decoder() if supports(self.model) and not self._keeps_torch else None

    @torch.inference_mode()
    def _short_decoder(self) -> CompiledDecoder | LeanDecoder | FusedDecoder | None:
        """The short cut through the decoder layers, if it gives what the model's own modules give; else None, and one
        line says why."""
        kv = PagedKV(self.shape, 1, 1, self.dtype, self.device)
        batch = RowBatch(1, 1, 1, 1, kv.scratch_page, self.device)
        batch.tables.fill_(0)
        batch.prompt_lengths.fill_(1)
        tokens, places = batch.tokens.fill_(self.vocab_size // 2), batch.starts.fill_(3)
        step = attention.GatherStep(
            kv, batch.tables[0].long(), batch.tables, None, [(batch.prompt_tables, 1, None)], fixed_shapes=False
        )
        own = self._forward(tokens[:, None], places[:, None], step)[:, 0].float()
        decoder: CompiledDecoder | LeanDecoder | FusedDecoder
        if self._kernels_read_pages:
            decoder = CompiledDecoder(self.model, self.kernels)
            short = decoder(batch, 1, kv)
        else:
            decoder = FusedDecoder(self.model) if self.device.type == "cuda" else LeanDecoder(self.model, self.kernels)
            short = decoder(tokens, places, step).float()
        difference = (short - own).abs().max() / own.abs().max()
        if difference < (1e-4 if self.dtype == torch.float32 else 0.2):  # 36 layers in bfloat16 differ by 0.05
            return decoder
        warnings.warn(
            f"the short decoder differs from {type(self.model).__name__} by {difference:.2g}; transformers' modules "
            "are used, slower",
            stacklevel=3,
        )
        return None

    @torch.inference_mode()
    def _check_own_modules(self) -> None:
        """ValueError for a model whose own modules give something else over a pool, token by token, than over the whole
        sequence.

        Such have layers that keep a state, attend twice in a layer, or ask of attention what ours does not do.
        """
        device = self.device
        ids = [(1 + 7 * place) % self.vocab_size for place in range(4)]
        # of one token each; the last is the response's
        tokens, pages = torch.tensor([ids], device=device), torch.arange(4, device=device)[None]
        whole = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1].float()
        kv = self.kv = PagedKV(self.shape, 4, 1, self.dtype, device)
        step = attention.GatherStep(kv, pages[0, 3:], pages[:, 3:], None, [(pages[:, :3], 3, None)], fixed_shapes=False)
        name, instead = f"model type {self.model.config.model_type}", "take e.g. Llama, Qwen2 or Qwen3"
        try:
            self._extend(ids[:3], [0, 1, 2], [], 0)
            own = self._forward(tokens[:, 3:], pages[:, 3:], step)[:, 0].float()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{name} cannot decode over a pool of KV pages ({first_line(error)}); {instead}"
            ) from error
        difference = (own - whole).abs().max() / whole.abs().max()
        # in 16 bits rounding may send a token to another expert
        if not difference < (1e-3 if self.dtype == torch.float32 else 0.5):
            raise ValueError(
                f"{name} gives something else one token at a time over a pool of KV pages: hidden states differ by "
                f"{difference:.2g} of the largest from a plain forward; {instead}"
            )


def first_line(error: Exception) -> str:
    """The first line of an error's text, cut to what fits into a warning."""
    return str(error).strip().split("\n")[0][:200]

"""Runs the model over the KV pool: prefill of a prompt, one decode step of all rows, the KV of a preempted sample
again.

Letters: R rows, E hidden size, V vocabulary of the model's head.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from infsample_rl.model.architecture import check_full_attention
from infsample_rl.model.loading import context_of
from infsample_rl.model.policy_head import head_logits
from infsample_rl.model.shapes import KVShape
from infsample_rl.rollout.engine import attention
from infsample_rl.rollout.engine.cpu_decoder import CompiledDecoder
from infsample_rl.rollout.engine.cuda_decode import GraphCache, first_line
from infsample_rl.rollout.engine.decoder import LeanDecoder, linear, supports
from infsample_rl.rollout.engine.fused_decoder import FusedDecoder
from infsample_rl.rollout.engine.kv_cache import PagedKV, QuantisedKV, stored_dtype
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels import cpu_kernels

if TYPE_CHECKING:  # Triton may be absent
    from infsample_rl.rollout.engine.triton_step import TritonStep
    from infsample_rl.rollout.kernels.attention_triton import Workspace

PREFILL_TOKENS = {"cpu": 128, "cuda": 2048}  # of a prompt in one forward, so that its activations do not grow with it


@dataclass(frozen=True, kw_only=True)
class ModelShape(KVShape):
    """What the pool and the sampler need to know of a model."""

    vocab_size: int  # rows of the head
    context: int | None  # None: unbounded

    @classmethod
    def of_model(cls, model: PreTrainedModel) -> ModelShape:
        """The model's shape; ValueError when its attention cannot be split into prompt and response parts here."""
        check_architecture(model)
        return cls(
            **asdict(KVShape.of(model.config)),
            vocab_size=model.get_output_embeddings().weight.shape[0],
            context=context_of(model.config),
        )


class ModelRunner:
    """Runs a model with attention that reads and writes the KV pool. Between its own forwards the model is as it
    was."""

    def __init__(
        self, model: PreTrainedModel, *, deterministic: bool = False, lm_head_fp32: bool = False, kv_dtype: str = "auto"
    ) -> None:
        """`deterministic`: every decode step runs all rows at the full KV extent, so results do not depend on what else
        runs.

        `kv_dtype`: auto (the model's dtype), int8 or fp8. Raises ValueError for fp8 where the device cannot convert it.
        """
        self.shape = ModelShape.of_model(model)
        self.model, self.deterministic, self.lm_head_fp32 = model, deterministic, lm_head_fp32
        self.device, self.dtype = model.device, model.dtype
        self.kv_dtype = stored_dtype(kv_dtype, self.dtype)
        capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        check_kv_dtype(kv_dtype, capability, deterministic=deterministic)
        self.kernels = cpu_kernels.load() if self.device.type == "cpu" and self.dtype == torch.float32 else None
        self.find_decoder()
        if not supports(model):
            self._check_own_modules()
        self.kv: PagedKV | None = None
        self.graphs = GraphCache(self)

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pool; one of another size is freed first."""
        if self.kv is not None and (self.kv.num_pages, self.kv.page_size) == (num_pages, page_size):
            return
        self.kv = None
        self.graphs.clear()
        shape = self.shape
        sizes = (shape.num_layers, num_pages, page_size, shape.num_kv_heads, shape.head_dim, self.kv_dtype, self.device)
        self.kv = PagedKV(*sizes) if self.kv_dtype == self.dtype else QuantisedKV(*sizes, compute_dtype=self.dtype)
        self.graphs.check_device()

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page, all layers, scales included."""
        return self.shape.page_bytes(page_size, self.kv_dtype)

    @torch.inference_mode()
    def prefill(self, prompt_ids: list[int], pages: list[int]) -> torch.Tensor:
        """Write the KV of one prompt, alone, into `pages`; the logits [V] of its first response token."""
        return self._logits(self._extend(prompt_ids, pages, [], 0)[-1:])[0].clone()

    @torch.inference_mode()
    def rebuild(
        self, tokens: list[int], num_kept: int, pages: list[int], prompt_pages: list[int], num_prompt_tokens: int
    ) -> None:
        """Write the KV of a sample's `tokens` from `num_kept` on into its `pages`, which hold that of the ones
        before."""
        prompt = (torch.tensor(prompt_pages, device=self.device), num_prompt_tokens)
        self._extend(tokens, pages, [prompt], num_prompt_tokens, num_kept)

    def _extend(
        self, ids: list[int], pages: list[int], past: list[tuple[torch.Tensor, int]], start: int, num_kept: int = 0
    ) -> torch.Tensor:
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
    def decode(self, batch: RowBatch, num_rows: int | None = None, workspace: Workspace | None = None) -> torch.Tensor:
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
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, E] -> logits [R, V]; float32 with lm_head_fp32, else the model's dtype."""
        return self._logits(hidden)

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.model.get_output_embeddings().weight
        if self.dtype == torch.float32 and not self._keeps_torch:
            return linear(hidden, weight, None, self.kernels)
        return head_logits(hidden, weight, fp32=self.lm_head_fp32)

    def _decode_step(
        self,
        batch: RowBatch,
        num_rows: int,
        positions: torch.Tensor,
        write_index: torch.Tensor,
        workspace: Workspace | None,
    ) -> attention.Step | TritonStep:
        if workspace is not None:
            from infsample_rl.rollout.engine.triton_step import TritonStep  # Triton may be absent

            return TritonStep(self.kv, batch, num_rows, positions, write_index, workspace)
        if self.kernels is not None and self.kv_dtype == torch.float32:
            return attention.CPUKernelStep(self.kv, write_index, batch, num_rows, self.kernels)
        page_size = self.kv.page_size
        num_pages = batch.tables.shape[1] if self.deterministic else -(-batch.max_length // page_size)
        unseen = torch.arange(num_pages * page_size, device=self.device) > positions[:, None]
        mask = torch.zeros(unseen.shape, dtype=self.dtype, device=self.device).masked_fill_(unseen, -math.inf)[
            :, None, None
        ]
        return attention.GatherStep(
            kv=self.kv,
            write_index=write_index,
            pages=batch.tables[:num_rows, :num_pages],
            mask=mask,
            prompts=self._prompts(batch, num_rows),
            fixed_shapes=self.deterministic,
        )

    def _prompts(self, batch: RowBatch, num_rows: int) -> list[tuple[torch.Tensor, int, torch.Tensor | None]]:
        prompts = []
        of_row = batch.prompt_of_row[:num_rows]
        for place, group in enumerate(batch.groups):
            rows = None if len(batch.groups) == 1 else (of_row == place).nonzero()[:, 0]
            prompts.append((batch.prompt_tables[place : place + 1, : len(group.pages)], len(group.prompt_ids), rows))
        return prompts

    def _forward(self, ids: torch.Tensor, positions: torch.Tensor, step: attention.Step) -> torch.Tensor:
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

    def find_decoder(self) -> None:
        """Choose the decoder, at first and when a parameter has been replaced."""
        self.decoder = self._short_decoder() if supports(self.model) and not self._keeps_torch else None

    @torch.inference_mode()
    def _short_decoder(self) -> CompiledDecoder | LeanDecoder | FusedDecoder | None:
        """The short cut through the decoder layers, if it gives what the model's own modules give; else None, and one
        line says why."""
        shape = self.shape
        kv = PagedKV(shape.num_layers, 1, 1, shape.num_kv_heads, shape.head_dim, self.dtype, self.device)
        batch = RowBatch(1, 1, 1, 1, kv.scratch_page, self.device)
        for tensor, value in (
            (batch.tables, 0),
            (batch.prompt_lengths, 1),
            (batch.tokens, shape.vocab_size // 2),
            (batch.starts, 3),
        ):
            tensor.fill_(value)
        tokens, places = batch.tokens, batch.starts
        step = attention.GatherStep(
            kv, batch.tables[0].long(), batch.tables, None, [(batch.prompt_tables, 1, None)], fixed_shapes=False
        )
        own = self._forward(tokens[:, None], places[:, None], step)[:, 0].float()
        if self.kernels is not None and self.kv_dtype == torch.float32:
            decoder = CompiledDecoder(self.model, self.kernels)
            short = decoder(batch, 1, kv)
        else:
            decoder = FusedDecoder(self.model) if self.device.type == "cuda" else LeanDecoder(self.model, self.kernels)
            short = decoder(tokens, places, step).float()
        difference = (short - own).abs().max() / own.abs().max()
        if difference < (1e-4 if self.dtype == torch.float32 else 0.2):  # 36 layers in bfloat16 differ by 0.05
            return decoder
        name = type(self.model).__name__
        warnings.warn(
            f"the short decoder differs from {name} by {difference:.2g}; transformers' modules are used, slower",
            stacklevel=3,
        )
        return None

    @torch.inference_mode()
    def _check_own_modules(self) -> None:
        """ValueError for a model whose own modules give something else over a pool, token by token, than over the whole
        sequence.

        Such have layers that keep a state, attend twice in a layer, or ask of attention what ours does not do.
        """
        shape, device = self.shape, self.device
        ids = [(1 + 7 * place) % shape.vocab_size for place in range(4)]
        # of one token each; the last is the response's
        tokens, pages = torch.tensor([ids], device=device), torch.arange(4, device=device)[None]
        whole = self.model.base_model(input_ids=tokens, use_cache=False).last_hidden_state[:, -1].float()
        kv = self.kv = PagedKV(shape.num_layers, 4, 1, shape.num_kv_heads, shape.head_dim, self.dtype, device)
        step = attention.GatherStep(kv, pages[0, 3:], pages[:, 3:], None, [(pages[:, :3], 3, None)], fixed_shapes=False)
        name = f"model type {self.model.config.model_type}"
        try:
            self._extend(ids[:3], [0, 1, 2], [], 0)
            own = self._forward(tokens[:, 3:], pages[:, 3:], step)[:, 0].float()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{name} cannot decode over a pool of KV pages ({first_line(error)}); take e.g. Llama, Qwen2 or Qwen3"
            ) from error
        difference = (own - whole).abs().max() / whole.abs().max()
        # in 16 bits rounding may send a token to another expert
        if not difference < (1e-3 if self.dtype == torch.float32 else 0.5):
            found = f"hidden states differ by {difference:.2g} of the largest from a plain forward"
            raise ValueError(
                f"{name} gives something else one token at a time over a pool of KV pages: {found}; take e.g. Llama, "
                "Qwen2 or Qwen3"
            )


def check_kv_dtype(kv_dtype: str, capability: tuple[int, int] | None, *, deterministic: bool) -> None:
    """Raise ValueError for a rollout.kv_dtype that does not work with deterministic steps or on a GPU of that compute
    capability (None: no GPU)."""
    if kv_dtype != "auto" and deterministic:
        raise ValueError(
            f"rollout.kv_dtype must be auto with run.deterministic=true, got {kv_dtype}: KV that is rounded need not "
            "repeat bitwise"
        )
    if kv_dtype == "fp8" and capability is not None and capability < (8, 9):
        found = f"{capability[0]}.{capability[1]}"
        raise ValueError(
            f"rollout.kv_dtype=fp8 needs a GPU of compute capability 8.9 or above, this one has {found}; take "
            "rollout.kv_dtype=int8"
        )


def check_architecture(model: PreTrainedModel) -> None:
    """ValueError when its attention cannot be split into prompt and response parts here."""
    check_full_attention(model.config)
    settings = model.config.to_dict()
    if settings.get("kv_lora_rank"):
        raise ValueError(
            f"model type {settings['model_type']} has kv_lora_rank, which is not supported; take e.g. Qwen3"
        )
    if model.get_output_embeddings().bias is not None:
        raise ValueError(
            f"model type {settings['model_type']} has a head with a bias, which is not supported; take e.g. Qwen3"
        )
    if not type(model)._supports_attention_backend:
        raise ValueError(
            f"model type {settings['model_type']} does not call transformers' attention interface; take e.g. Llama, "
            "Qwen2 or Qwen3"
        )

"""Runs the model over the KV pool: prefill of a prompt, one decode step of all rows, the KV of a preempted sample
again.

Letters: R rows, E hidden size, V vocabulary of the model's head.
"""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from infsample_rl.model.architecture import KVShape, check_full_attention, context_of
from infsample_rl.model.policy_head import head_logits
from infsample_rl.rollout.engine import attention
from infsample_rl.rollout.engine.cpu_decoder import CompiledDecoder
from infsample_rl.rollout.engine.decoder import FusedDecoder, length_rope_of, supports
from infsample_rl.rollout.engine.kv_cache import PagedKV, QuantisedKV, stored_dtype
from infsample_rl.rollout.engine.row_batch import RowBatch, trial_sample
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.types import MaybeNone

if TYPE_CHECKING:  # Triton may be absent
    from infsample_rl.rollout.kernels.paged_attention import Workspace

PREFILL_TOKENS = {"cpu": 128, "cuda": 2048}  # of a prompt in one forward, so that its activations do not grow with it


class ModelRunner:
    """Runs a model with attention that reads and writes the KV pool. Between its own forwards the model is as it
    was."""

    def __init__(
        self, model: PreTrainedModel, *, lm_head_fp32: bool = False, kv_dtype: str = "auto", exact: bool = False
    ) -> None:
        """`kv_dtype`: auto (the model's dtype) or int8. `exact`: on a GPU, where it is slower, a sample's bits are to
        depend on the sample alone, as they do on the CPU. ValueError for a model that cannot be decoded here."""
        check_architecture(model)
        self.model, self.lm_head_fp32 = model, lm_head_fp32
        self.exact = exact and model.device.type == "cuda"  # until graph_cache finds that the kernels do not work
        self.shape = KVShape.of(model.config)
        self.context = context_of(model.config)  # None: unbounded
        self.device, self.dtype = model.device, model.dtype
        self.kv_dtype = stored_dtype(kv_dtype, self.dtype)
        self.kernels: cpu_kernels.Kernels | MaybeNone = (
            cpu_kernels.load() if self.device.type == "cpu" and self.dtype == torch.float32 else None
        )
        self.length_rope = length_rope_of(model.config)
        self.find_decoder()
        self._check_decoding()
        self.kv: PagedKV | MaybeNone = None  # of allocate()

    @torch.inference_mode()
    def find_decoder(self) -> None:
        """Choose the decoder, at first and when a parameter has been replaced; None: the model's own modules."""
        self.decoder: CompiledDecoder | FusedDecoder | None = None
        if supports(self.model):
            if self._kernels_read_pages and not self.length_rope:
                self.decoder = CompiledDecoder(self.model, self.kernels)
            else:
                on_gpu = self.device.type == "cuda"
                self.decoder = FusedDecoder(self.model, self.kernels, joins=on_gpu, in_blocks=self.exact)
                if self.exact:
                    with contextlib.suppress(ImportError):  # Triton may be absent
                        self.decoder.use_triton()

    @property
    def is_exact(self) -> bool:
        """Whether a sample's bits depend on nothing but the sample: no row beside it, no preemption, no page size."""
        if isinstance(self.decoder, FusedDecoder):
            return self.exact and self.decoder.triton_layers is not None and self.kv_dtype == self.dtype
        return self.decoder is not None

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return self.model.get_output_embeddings().weight.shape[0]

    def allocate(self, num_pages: int, page_size: int) -> None:
        """Allocate the pool; the one before is freed first."""
        self.kv = None
        kind = PagedKV if self.kv_dtype == self.dtype else QuantisedKV
        self.kv = kind(self.shape, num_pages, page_size, self.dtype, self.device)

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
        before: where `is_exact` the very bits that decoding wrote, since every token is a row of a step."""
        if self.is_exact:
            sizes = (len(pages), 1, len(prompt_pages), self.kv.scratch_page, self.device)
            for begin in range(num_kept, len(tokens), PREFILL_TOKENS["cpu"]):
                piece = range(begin, min(begin + PREFILL_TOKENS["cpu"], len(tokens)))
                batch = RowBatch(len(piece), *sizes)
                batch.arrange_tokens(tokens, piece, pages, prompt_pages, num_prompt_tokens)
                self.decode(batch, workspace=self.new_workspace(batch))
            return
        prompt = (torch.tensor(prompt_pages, device=self.device), num_prompt_tokens)
        self._extend(tokens, pages, [prompt], num_prompt_tokens, num_kept)

    def _extend(
        self, ids: list[int], pages: list[int], past: list[tuple[Tensor, int]], start: int, num_kept: int = 0
    ) -> Tensor:
        """Run a sequence's `ids` from `num_kept` on, after `start` tokens, and keep their KV in `pages`; last hidden
        states of the last piece."""
        own_pages = torch.tensor(pages, device=self.device)
        hidden = torch.empty(0)
        # 1.5 to 2 times faster than torch's products, and less memory
        is_short = self.kernels is not None and supports(self.model)
        decoder = FusedDecoder(self.model, self.kernels, joins=False) if is_short else None
        most = PREFILL_TOKENS[self.device.type]
        for begin in range(num_kept, len(ids), most):
            piece = torch.tensor([ids[begin : begin + most]], device=self.device)
            places = torch.arange(begin, begin + piece.shape[1], device=self.device)
            earlier = [(own_pages[: -(-begin // self.kv.page_size)], begin)] if begin else []
            step = attention.ExtendStep(self.kv, [*past, *earlier], self.kv.token_index(own_pages, places))
            if decoder is not None:
                hidden = decoder(piece[0], start + places, step)
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
        step = self._decode_step(batch, num_rows, workspace)
        if isinstance(self.decoder, FusedDecoder) and (hidden := self.decoder.in_triton(step)) is not None:
            return hidden
        positions = batch.positions[:num_rows].clamp(min=0)
        tokens, places = batch.tokens[:num_rows], batch.starts[:num_rows] + positions
        if self.decoder is not None:
            return self.decoder(tokens, places, step)
        return self._forward(tokens[:, None], places[:, None], step)[:, 0]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [R, E] -> logits [R, V]; float32 with lm_head_fp32, else the model's dtype."""
        weight = self.model.get_output_embeddings().weight
        if self.kernels is not None:
            return self.kernels.linear(hidden, weight)
        return head_logits(hidden, weight, fp32=self.lm_head_fp32)

    def new_workspace(self, batch: RowBatch) -> Workspace | None:
        """What attention in Triton needs beside the batch's tensors; None without CUDA."""
        if self.device.type != "cuda":
            return None
        from infsample_rl.rollout.kernels.paged_attention import Workspace  # Triton may be absent

        return Workspace(batch.max_rows, self.model.config.num_attention_heads, self.shape.head_dim, batch.device)

    def _decode_step(self, batch: RowBatch, num_rows: int, workspace: Workspace | None) -> attention.Step:
        if workspace is not None:
            from infsample_rl.rollout.engine.triton_layers import TritonStep  # Triton may be absent

            return TritonStep(self.kv, batch, num_rows, workspace)
        positions = batch.positions[:num_rows].clamp(min=0)
        write_index = self.kv.token_index(batch.tables[:num_rows].long(), positions[:, None])[:, 0]
        if self._kernels_read_pages:
            return attention.CPUKernelStep(self.kv, write_index, batch, num_rows, self.kernels)
        page_size, is_one = self.kv.page_size, len(batch.groups) == 1
        num_pages = -(-batch.max_length // page_size)
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
    def _kernels_read_pages(self) -> bool:
        return self.kernels is not None and self.kv_dtype == torch.float32

    @torch.inference_mode()
    def _check_decoding(self) -> None:
        """ValueError for a model that gives something else over a pool, token by token, than over the whole sequence.

        Such have layers that keep a state, attend twice in a layer, or ask of attention what ours does not do.
        """
        sample = trial_sample(self.vocab_size, [0, 1, 2], [3])  # pages of one token each
        group, ids = sample.group, [*sample.group.prompt_ids, *sample.tokens]
        whole = self.model.base_model(input_ids=torch.tensor([ids], device=self.device), use_cache=False)
        wanted = whole.last_hidden_state[0, -1].float()
        self.kv = PagedKV(self.shape, 4, 1, self.dtype, self.device)
        batch = RowBatch(1, 1, 1, 3, self.kv.scratch_page, self.device)
        batch.arrange([sample])
        name, instead = f"model type {self.model.config.model_type}", "take e.g. Llama, Qwen2 or Qwen3"
        try:
            self.prefill(group.prompt_ids, group.pages)
            found = self.decode(batch)[0].float()
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise ValueError(
                f"{name} cannot decode over a pool of KV pages ({first_line(error)}); {instead}"
            ) from error
        difference = (found - wanted).abs().max() / wanted.abs().max()
        # in 16 bits rounding may send a token to another expert
        if not difference < (1e-3 if self.dtype == torch.float32 else 0.5):
            raise ValueError(
                f"{name} gives something else one token at a time over a pool of KV pages: hidden states differ by "
                f"{difference:.2g} of the largest from a plain forward; {instead}"
            )


def check_architecture(model: PreTrainedModel) -> None:
    """ValueError when its attention cannot be split into prompt and response parts here."""
    check_full_attention(model.config)
    if getattr(model.config, "kv_lora_rank", None):
        found = "has kv_lora_rank, which is not supported"
    elif model.get_output_embeddings().bias is not None:
        found = "has a head with a bias, which is not supported"
    elif not type(model)._supports_attention_backend:
        found = "does not call transformers' attention interface"
    else:
        return
    raise ValueError(f"model type {model.config.model_type} {found}; take e.g. Llama, Qwen2 or Qwen3")


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type where it has none, cut to what fits into a warning."""
    return (str(error).strip() or type(error).__name__).split("\n")[0][:200]

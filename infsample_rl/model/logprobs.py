"""The policy over packed rows: log-probabilities and entropies of given tokens, in chunks, so that no full [tokens,
vocabulary] float32 tensor exists.

The policy is softmax(logits / temperature) over the ids below `valid_vocab` (the tokenizer's length) that are not
masked: rows a model's head has beyond are padding, and neither they nor `rollout.bad_token_ids` are ever sampled by the
engine. Shape letters: R tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from infsample_rl.config import Config
from infsample_rl.model.logit_passes import LogitPasses
from infsample_rl.model.packed_attention import use_packed_attention
from infsample_rl.model.packing import PackedRow
from infsample_rl.model.peak_memory import return_freed_memory
from infsample_rl.model.policy_head import head_backward, head_logits, masked_index

# Of R tokens: log-probabilities [R], entropies [R], K ids of each [R, K] and their log-probabilities [R, K].
TokenScores = tuple[Tensor, Tensor, Tensor, Tensor]
WIDTH_STEP = 64  # columns of the head's products
# Kept by selective recomputation: what most of a layer's arithmetic gives. Compiled FlexAttention is not seen and so
# computed again.
_ATEN = torch.ops.aten
PRODUCTS = [
    *(_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default),
    *(_ATEN._scaled_dot_product_flash_attention_for_cpu.default, _ATEN._scaled_dot_product_flash_attention.default),
    *(_ATEN._scaled_dot_product_efficient_attention.default, _ATEN._scaled_dot_product_cudnn_attention.default),
]


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    valid_vocab: int,
    masked: Tensor | None = None,
    head_fp32: bool = False,
    entropy_gradient: bool = False,
    weight_gradient: Callable[[], Tensor] | None = None,
    others: Tensor | int = 0,
) -> TokenScores:
    """Log-probabilities of `labels` [R] and entropies (nats) from hidden [R, E] and head_weight, of which the first
    `valid_vocab` rows count; and of `others`, ids [R, K] or the K likeliest of every token, the ids and their
    log-probabilities.

    `masked`: ids without probability (`masked_index`); none of `labels` may be one. `head_fp32`: as in `head_logits`.
    `entropy_gradient`: entropies have a gradient, which an entropy bonus needs. `weight_gradient`: the sum that
    head_weight's gradient is added to at once; autograd then gets none, and no gradient of one pass lives through its
    backward. At most `chunk_tokens` rows of logits exist at a time, in the backward pass too: every chunk's are
    computed again there.
    """
    head = _Head(LogitPasses(temperature, masked), chunk_tokens, valid_vocab, head_fp32, weight_gradient)
    return _TokenLogprobs.apply(hidden, head_weight, labels, others, head, entropy_gradient)


class _Head(NamedTuple):
    passes: LogitPasses
    chunk_tokens: int
    valid_vocab: int
    fp32: bool
    weight_gradient: Callable[[], Tensor] | None


class _TokenLogprobs(torch.autograd.Function):
    """Chunks of logits, neither kept nor differentiated by autograd."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        others: Tensor | int,
        head: _Head,
        entropy_gradient: bool,
    ) -> TokenScores:
        rows, parts = weight[: head.valid_vocab], []
        chunks = (hidden.split(head.chunk_tokens), labels.split(head.chunk_tokens))
        if isinstance(others, int):
            wanted: Any = [others] * len(chunks[0])
        else:
            wanted = others.split(head.chunk_tokens)
        for part, ids, of_part in zip(*chunks, wanted, strict=True):
            logits = head_logits(part, rows, fp32=head.fp32)
            other_ids, arguments = head.passes.arguments_of(logits, of_part)  # before a pass works in place
            summary = head.passes.summary(logits, ids)
            parts.append((*summary, other_ids, arguments - summary[-1][:, None]))
        logprobs, entropies, normalizers, other_ids, likely = (torch.cat(found) for found in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, weight, labels, other_ids, entropies, normalizers)
        ctx.head, ctx.entropy_gradient = head, entropy_gradient
        ctx.mark_non_differentiable(other_ids, *(() if entropy_gradient else (entropies,)))
        return logprobs, entropies, other_ids, likely

    @staticmethod
    def backward(
        ctx: Any, of_logprobs: Tensor, of_entropies: Tensor, _of_ids: Tensor, of_others: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, other_ids, entropies, normalizers = ctx.saved_tensors
        head: _Head = ctx.head
        of_weight, adds = None, head.weight_gradient
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros_like(weight) if adds is None else adds()
        rows, of_hidden = weight[: head.valid_vocab], []
        of_rows = None if of_weight is None else of_weight[: head.valid_vocab]
        tokens = (hidden, labels, entropies, normalizers, of_logprobs, of_entropies, other_ids, of_others)
        for part, ids, entropy, normalizer, g, h, *others in zip(
            *(tensor.split(head.chunk_tokens) for tensor in tokens), strict=True
        ):
            of_entropy, beside = h if ctx.entropy_gradient else None, tuple(others) if others[0].shape[1] else None
            given = (ids, normalizer, entropy, g, of_entropy, beside)
            gradient = head.passes.gradient(head_logits(part, rows, fp32=head.fp32), *given)
            of_hidden.append(head_backward(gradient, part, rows, of_rows, fp32=head.fp32))
            del gradient  # before the next chunk's logits are there
        return torch.cat(of_hidden), of_weight if adds is None else None, None, None, None, None


class PackedPolicy(nn.Module):
    """A causal language model that maps a packed row to log-probabilities.

    The head is used inside this forward, so a sharded wrapper (FSDP2) gathers it there and nowhere else.
    """

    masked: Tensor | None  # a buffer

    def __init__(
        self,
        lm: PreTrainedModel,
        *,
        valid_vocab: int,
        chunk_tokens: int,
        bad_token_ids: Sequence[int] = (),
        head_fp32: bool = False,
    ) -> None:
        """`bad_token_ids` have no probability; `head_fp32`: logits in float32 whatever the weights' dtype
        (model.lm_head_fp32)."""
        super().__init__()
        self.entropy_gradient = False  # set where the loss has an entropy bonus
        self.head_gradient: Callable[[], Tensor] | None = None  # set by a backend that sums the head's gradient itself
        if getattr(lm.get_output_embeddings(), "bias", None) is not None:
            raise ValueError(
                f"{type(lm).__name__} has a head with a bias, which is not supported, neither as policy nor as "
                "reference"
            )
        use_packed_attention(lm)
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.head_fp32 = head_fp32
        weight = lm.get_output_embeddings().weight
        self.valid_vocab = min(valid_vocab, weight.shape[0])
        device = "cpu" if weight.is_meta else weight.device  # of an outline, as its other buffers
        masked = masked_index(bad_token_ids, self.valid_vocab, device)
        # Rows of the head that are multiplied: 151,669 columns, whose rows begin anywhere, are slow on a GPU.
        self._head_rows = min(-(-self.valid_vocab // WIDTH_STEP) * WIDTH_STEP, weight.shape[0])
        if self._head_rows > self.valid_vocab:
            padding = torch.arange(self.valid_vocab, self._head_rows, device=device)
            masked = padding if masked is None else torch.cat([masked, padding])
        self.register_buffer("masked", masked, persistent=False)

    def decoder_layers(self) -> list[nn.Module]:
        """The transformer blocks, the units of sharding and of activation checkpointing."""
        return [module for module in self.lm.modules() if type(module).__name__ in (self.lm._no_split_modules or ())]

    def forward(self, row: PackedRow, temperature: float) -> TokenScores:
        """Scores of the row's response tokens, float32; K ids as in row.others.

        Of a prompt alone, R = 0: its shared prompt is filled, and what is returned of it is its last hidden state, in
        every place.
        """
        shared = row.cuts.shared
        hidden = self.lm.base_model(
            input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=None, use_cache=False, cuts=row.cuts
        ).last_hidden_state[0]
        if row.cuts.reads_shared:
            hidden = torch.cat([shared.last_hidden[None], hidden])
        elif shared is not None:
            last = hidden[-1]
            shared.end(last)
            return last, last, last, last
        return_freed_memory()  # logits are larger than anything that the layers have left
        return token_logprobs(
            hidden[row.predictor_index],
            self.lm.get_output_embeddings().weight,
            row.labels,
            valid_vocab=self._head_rows,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            masked=self.masked,
            head_fp32=self.head_fp32,
            entropy_gradient=self.entropy_gradient,
            weight_gradient=self.head_gradient,
            others=row.others,
        )


def checkpoint_every(lm: PreTrainedModel, every: int, *, granularity: str = "full") -> None:
    """Recompute the activations of every `every`-th decoder layer, the first included, in the backward pass; 1: of all.
    Exact.

    `granularity`: "full", of a layer only its input is kept; "selective", also the results of its matrix products and
    attention (Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 5):
    norms, rotations and activation functions are cheap to compute again and about half of what a layer keeps.
    ValueError for a model whose layers cannot be recomputed. transformers recomputes layers in training mode only: they
    are in it afterwards, without what drops out or adds noise there.
    """
    layers = [module for module in lm.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not lm.supports_gradient_checkpointing:
        raise ValueError(
            f"learner.activation_checkpointing must be 0 for {type(lm).__name__}, got {every}: its layers cannot be "
            "recomputed"
        )
    selective = (
        {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if granularity == "selective" else {}
    )
    with warnings.catch_warnings():  # its new name, activation_checkpointing_enable, is not in transformers 5.17
        warnings.filterwarnings("ignore", "`gradient_checkpointing_enable` is deprecated", FutureWarning)
        lm.gradient_checkpointing_enable({"use_reentrant": False} | selective)
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % every == 0
        layer.training = True  # not its modules: the policy that sampled had no dropout
        for name in [name for name, value in vars(layer).items() if "drop" in name and isinstance(value, float)]:
            setattr(layer, name, 0.0)  # of functional dropout in the layer itself


def packed_policy(config: Config, lm: PreTrainedModel, valid_vocab: int) -> PackedPolicy:
    """`lm` as a packed policy of these settings; `valid_vocab`: ids of the policy's tokenizer."""
    return PackedPolicy(
        lm,
        valid_vocab=valid_vocab,
        chunk_tokens=config.learner.logprob_chunk_tokens,
        bad_token_ids=config.rollout.bad_token_ids,
        head_fp32=config.model.lm_head_fp32,
    )

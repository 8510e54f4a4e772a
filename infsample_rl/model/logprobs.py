"""Log-probabilities and entropy of given tokens, in chunks, so that no full [tokens, vocabulary] float32 tensor exists.

The policy is softmax(logits / temperature) over the ids below `valid_vocab` (the tokenizer's length) that are not masked:
rows a model's head has beyond are padding, and neither they nor `rollout.bad_token_ids` are ever sampled by the engine.
Shape letters: R tokens, V vocabulary, E hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from infsample_rl.model.packed_attention import use_packed_attention
from infsample_rl.model.packing import PackedRow
from infsample_rl.model.policy_head import head_logits, masked_index


def token_logprobs(
    hidden: Tensor,
    head_weight: Tensor,
    labels: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    masked: Tensor | None = None,
    head_fp32: bool = False,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities of `labels` [R] and entropies (nats, without gradient) from hidden [R, E] and head_weight [V, E].

    `masked`: ids without probability (`masked_index`); none of `labels` may be one. `head_fp32`: as in `head_logits`.
    At most `chunk_tokens` rows of logits exist at a time, in the backward pass too: every chunk is recomputed there.
    """
    chunks = [
        checkpoint(_chunk_logprobs, part, head_weight, ids, temperature, masked, head_fp32, use_reentrant=False, preserve_rng_state=False)
        for part, ids in zip(hidden.split(chunk_tokens), labels.split(chunk_tokens), strict=True)
    ]
    logprobs, entropies = zip(*chunks, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk_logprobs(
    hidden: Tensor, head_weight: Tensor, labels: Tensor, temperature: float, masked: Tensor | None, head_fp32: bool
) -> tuple[Tensor, Tensor]:
    logits = head_logits(hidden, head_weight, fp32=head_fp32)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature  # float32; float64 stays
    if masked is not None:
        with torch.no_grad():  # a logit of -inf gets gradient exp(-inf) = 0 already; recorded, it would cost a copy in the backward pass
            logits.index_fill_(-1, masked, -math.inf)
    normalizer = logits.logsumexp(-1)
    logprobs = logits.gather(-1, labels[:, None])[:, 0] - normalizer
    with torch.no_grad():
        weighted = torch.exp(logits - normalizer[:, None]) * logits
        if masked is not None:
            weighted.index_fill_(-1, masked, 0.0)  # 0 x -inf is NaN, its limit 0
        entropy = normalizer - weighted.sum(-1)
    return logprobs, entropy


class PackedPolicy(nn.Module):
    """A causal language model that maps a packed row to log-probabilities.

    The head is used inside this forward, so a sharded wrapper (FSDP2) gathers it there and nowhere else.
    """

    def __init__(
        self, lm: PreTrainedModel, *, valid_vocab: int, chunk_tokens: int, bad_token_ids: Sequence[int] = (), head_fp32: bool = False
    ) -> None:
        """`bad_token_ids` have no probability; `head_fp32`: logits in float32 whatever the weights' dtype (model.lm_head_fp32)."""
        super().__init__()
        use_packed_attention(lm)
        self.lm = lm
        self.chunk_tokens = chunk_tokens
        self.head_fp32 = head_fp32
        weight = lm.get_output_embeddings().weight
        self.valid_vocab = min(valid_vocab, weight.shape[0])
        self.register_buffer("masked", masked_index(bad_token_ids, self.valid_vocab, weight.device), persistent=False)

    def decoder_layers(self) -> list[nn.Module]:
        """The transformer blocks, the units of sharding and of activation checkpointing."""
        return [module for module in self.lm.modules() if type(module).__name__ in (self.lm._no_split_modules or ())]

    def forward(self, row: PackedRow, temperature: float) -> tuple[Tensor, Tensor]:
        """(log-probabilities [R], entropies [R]) of the row's response tokens, float32."""
        hidden = self.lm.base_model(
            input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=None, use_cache=False, cuts=row.cuts
        ).last_hidden_state[0]
        weight = self.lm.get_output_embeddings().weight[: self.valid_vocab]
        return token_logprobs(
            hidden[row.predictor_index],
            weight,
            row.labels,
            temperature=temperature,
            chunk_tokens=self.chunk_tokens,
            masked=self.masked,
            head_fp32=self.head_fp32,
        )

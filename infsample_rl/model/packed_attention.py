"""Attention over a packed row `[prompt | response 1 | ... | response n]`: a response sees its prompt and itself.

The prompt is in the row, or, where a group takes several passes, in a SharedPrompt of an earlier one: the row is then
`[response 1 | ... | response n]`.

Registered with transformers' AttentionInterface as "infsample_packed"; the model call takes the row's RowCuts as the
keyword `cuts`, so no model code is changed. On CPU (and as the fallback) it runs SDPA over folds of responses of
similar length, never over a T x T mask; on CUDA FlexAttention with a block mask.

Shape letters: T tokens of the row, P prompt tokens, N responses of a fold, L their (padded) length, H query heads,
K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel

from infsample_rl.model.shared_prompt import SharedPrompt

PACKED_ATTENTION = "infsample_packed"
# responses share a fold when the shortest has this share of the longest's tokens, so padding stays below 20 %
MIN_FILL = 0.8
# copied keys and values kept for the backward pass, in row lengths; above it the folds are recomputed
MAX_KEPT_COPIES = 2.0
STATE_SPACE_MODELS = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h"),
    *("recurrent_gemma", "rwkv", "zamba", "zamba2"),
)
LOGIT_SCALES = ("logit_scale", "logits_scaling")
LOGIT_CHANGES = ("final_logit_softcapping", *LOGIT_SCALES)  # models that change logits after the head


@dataclass(frozen=True, kw_only=True)
class Segment:
    """One prompt and its responses as half-open token spans of a row: Segment(prompt=(0, 3), responses=[(3, 5), (5,
    9)]).

    Where the prompt is shared it has a span of its own, from 0, and the responses count from 0 too.
    """

    prompt: tuple[int, int]
    responses: list[tuple[int, int]]

    @property
    def end(self) -> int:
        """Where the next segment begins."""
        return (self.responses or [self.prompt])[-1][1]


@dataclass(frozen=True, kw_only=True)
class Fold:
    """Responses of one segment that attend in one SDPA call."""

    prompt: tuple[int, int]  # in the row, or in the shared prompt
    index: Tensor  # [N, L] row positions; short responses repeat their last position, whose copies are never read

    @cached_property
    def mask(self) -> Tensor:
        """[L, P + L] bool: all of the prompt, then the lower triangle. Made at first use: FlexAttention needs none, and
        it grows as L squared."""
        prompt, length = self.prompt[1] - self.prompt[0], self.index.shape[1]
        return torch.ones(length, prompt + length, dtype=torch.bool, device=self.index.device).tril_(prompt)


@dataclass(frozen=True, kw_only=True)
class RowCuts:
    """Where the prompts and responses of a row lie, with what its attention needs on its device, built once for all
    layers."""

    num_tokens: int
    segments: list[Segment]
    folds: list[Fold]
    order: Tensor  # [T] for each row position, its place in the concatenation of all prompt and fold outputs
    # recompute the folds in the backward pass instead of keeping their copies of the prompt's keys and values
    recompute: bool
    block_mask: BlockMask | None  # FlexAttention's mask, on CUDA only
    shared: SharedPrompt | None = None  # what the row fills, if it is a prompt alone, or whose responses it has

    @property
    def reads_shared(self) -> bool:
        """Whether the prompt is in an earlier pass."""
        return self.shared is not None and bool(self.segments[0].responses)


def build_cuts(segments: list[Segment], device: torch.device | str, shared: SharedPrompt | None = None) -> RowCuts:
    """Plan the attention of a row whose segments lie one after another; of one segment with a `shared` prompt, that or
    the responses."""
    num_tokens, reads_shared = segments[-1].end, shared is not None and bool(segments[-1].responses)
    visible_tokens = num_tokens + (shared.num_tokens if reads_shared else 0)
    folds = [
        _build_fold(segment.prompt, spans, device)
        for segment in segments
        for spans in _similar_lengths(segment, visible_tokens)
    ]
    copied = sum(fold.index.numel() + len(fold.index) * (fold.prompt[1] - fold.prompt[0]) for fold in folds)
    prompts = [] if reads_shared else [torch.arange(*segment.prompt) for segment in segments]
    positions = torch.cat(prompts + [fold.index.flatten().cpu() for fold in folds])
    order = torch.empty(num_tokens, dtype=torch.long)
    # Reversed: of a response's padding copies the first place, which is the real one, is written last.
    order[positions.flip(0)] = torch.arange(len(positions) - 1, -1, -1)
    return RowCuts(
        num_tokens=num_tokens,
        segments=segments,
        folds=folds,
        order=order.to(device),
        recompute=copied > MAX_KEPT_COPIES * visible_tokens,
        block_mask=_build_block_mask(segments, num_tokens, visible_tokens, device)
        if torch.device(device).type == "cuda"
        else None,
        shared=shared,
    )


def _similar_lengths(segment: Segment, num_tokens: int) -> list[list[tuple[int, int]]]:
    """Responses in groups of similar length whose copies of keys and values stay below num_tokens, so that G sets no
    memory."""
    groups: list[list[tuple[int, int]]] = []
    prompt_tokens = segment.prompt[1] - segment.prompt[0]
    for span in sorted(segment.responses, key=lambda span: (span[0] - span[1], span[0])):  # longest first
        length = groups[-1][0][1] - groups[-1][0][0] if groups else 0
        fits = groups and (len(groups[-1]) + 1) * (prompt_tokens + length) <= num_tokens
        if fits and span[1] - span[0] >= MIN_FILL * length:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups


def _build_fold(prompt: tuple[int, int], spans: list[tuple[int, int]], device: torch.device | str) -> Fold:
    starts, ends = torch.tensor(spans).unbind(1)
    length = int((ends - starts).max())
    index = torch.minimum(starts[:, None] + torch.arange(length), ends[:, None] - 1)
    return Fold(prompt=prompt, index=index.to(device))


def packed_mask_function(
    segments: list[Segment], num_tokens: int, device: torch.device | str, shared_tokens: int = 0
) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """FlexAttention's mask_mod of a row: causal, inside the segment, and of responses only the query's own.

    With `shared_tokens` the keys of a shared prompt, which every query sees, come before those of the row.
    """
    segment_of = torch.empty(num_tokens, dtype=torch.int32)
    response_of = torch.full((num_tokens,), -1, dtype=torch.int32)  # -1: a prompt token
    for number, segment in enumerate(segments):
        for response, (start, end) in enumerate(segment.responses):
            response_of[start:end] = response
        start, end = (0, num_tokens) if shared_tokens else (segment.prompt[0], segment.end)
        segment_of[start:end] = number
    segment_of, response_of = segment_of.to(device), response_of.to(device)

    def visible(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        own = (response_of[key] == -1) | (response_of[key] == response_of[query])
        return (key <= query) & (segment_of[key] == segment_of[query]) & own

    def visible_behind_shared(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key < shared_tokens) | visible(batch, head, query, (key - shared_tokens).clamp(min=0))

    return visible_behind_shared if shared_tokens else visible


def _build_block_mask(
    segments: list[Segment], num_queries: int, num_keys: int, device: torch.device | str
) -> BlockMask:
    mask = packed_mask_function(segments, num_queries, device, num_keys - num_queries)
    return create_block_mask(mask, None, None, num_queries, num_keys, device=device)


def takes_flex_attention(head_size: int, dtype: torch.dtype) -> bool:
    """Whether FlexAttention's CUDA kernels do: they want a head size that is a power of two, and no float64."""
    return head_size in (16, 32, 64, 128, 256) and dtype != torch.float64


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    return torch.compile(flex_attention, dynamic=True)  # rows differ in length


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    cuts: RowCuts,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attention function of "infsample_packed": query [1, H, T, D], key and value [1, K, T, D] -> ([1, T, H, D], None).

    Dropout is ignored: the policy that sampled had none. RuntimeError for a layer with a sliding window or with another
    mask, ValueError for attention sinks.
    """
    if kwargs.get("s_aux") is not None:
        raise ValueError(
            f"{type(module).__name__} has attention sinks: only softmax over tokens can be trained on packed rows"
        )
    if attention_mask is not None or kwargs.get("sliding_window") is not None:
        raise RuntimeError(f"packed attention of {type(module).__name__} takes no mask and no sliding window")
    prompt = exchange_prompt(module, key, value, cuts)
    if cuts.block_mask is not None and takes_flex_attention(query.shape[-1], query.dtype):
        if prompt is not None:
            key, value = torch.cat([prompt[0], key], 2), torch.cat([prompt[1], value], 2)
        output = _compiled_flex_attention()(
            query, key, value, block_mask=cuts.block_mask, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None
    return folded_attention(query, key, value, scaling, cuts, prompt), None


def exchange_prompt(module: nn.Module, key: Tensor, value: Tensor, cuts: RowCuts) -> tuple[Tensor, Tensor] | None:
    """Keys and values [1, K, P, D] of the prompt before a row of responses; those of a prompt alone are kept. None: the
    row has its prompts."""
    if cuts.reads_shared:
        return cuts.shared.keys_and_values(module)
    if cuts.shared is not None:
        cuts.shared.keep(module, key, value)
    return None


def folded_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    cuts: RowCuts,
    prompt: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The SDPA form of packed attention on any device: [1, H, T, D], [1, K, T, D] twice -> [1, T, H, D]. Exact, with
    gradient.

    `prompt`: keys and values [1, K, P, D] of a prompt that is not in the row.
    """
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [T, H or K, D]
    prompts = (key, value) if prompt is None else tuple(tensor[0].transpose(0, 1) for tensor in prompt)
    outputs = []
    for segment in cuts.segments if prompt is None else []:
        span = slice(*segment.prompt)
        q, k, v = (tensor[span].transpose(0, 1)[None] for tensor in (query, key, value))
        output = _fused_attention(q, k, v, scaling, mask=None)  # [1, H, P, D]
        outputs.append(output[0].transpose(0, 1))
    for fold in cuts.folds:
        if cuts.recompute:
            outputs.append(
                checkpoint(
                    _attend_fold,
                    query,
                    key,
                    value,
                    *prompts,
                    scaling,
                    fold,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        else:
            outputs.append(_attend_fold(query, key, value, *prompts, scaling, fold))
    return torch.cat(outputs).index_select(0, cuts.order)[None]


def _attend_fold(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    prompt_key: Tensor,
    prompt_value: Tensor,
    scaling: float | None,
    fold: Fold,
) -> Tensor:
    q = _gather(query, fold).transpose(1, 2)  # [N, H, L, D]
    k = _behind_prompt(key, prompt_key, fold).transpose(1, 2)  # [N, K, P + L, D]
    v = _behind_prompt(value, prompt_value, fold).transpose(1, 2)
    output = _fused_attention(q, k, v, scaling, mask=fold.mask)
    return output.transpose(1, 2).flatten(0, 1)  # [N L, H, D]


def _fused_attention(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, *, mask: Tensor | None
) -> Tensor:
    """SDPA, causal without a `mask`. On the meta device torch takes its plain form, scores and all; plan/ is to see the
    tensors of the CPU's."""
    if query.device.type != "meta":
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=True
        )
    # SDPA makes them of booleans
    numbers = None if mask is None else torch.empty(mask.shape, dtype=query.dtype, device=mask.device)
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(query, key, value, 0.0, mask is None, attn_mask=numbers, scale=scaling)[0]


def _gather(tensor: Tensor, fold: Fold) -> Tensor:
    return tensor.index_select(0, fold.index.flatten()).view(*fold.index.shape, *tensor.shape[1:])


def _behind_prompt(tensor: Tensor, prompts: Tensor, fold: Fold) -> Tensor:
    prompt = prompts[slice(*fold.prompt)].expand(len(fold.index), -1, -1, -1)
    return torch.cat([prompt, _gather(tensor, fold)], dim=1)


def check_packable(config: PretrainedConfig) -> None:
    """ValueError for a model whose layers mix tokens other than by full attention, or that changes its logits after the
    head."""
    settings = config.to_dict()
    kinds = set(settings.get("layer_types") or []) - {"full_attention"}
    if kinds:
        found = ", ".join(sorted(kinds))
        raise ValueError(
            f"model type {config.model_type} has layers of type {found}: only full attention can be trained on packed "
            "rows"
        )
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    if window is not None and not settings.get("layer_types"):
        raise ValueError(
            f"model type {config.model_type} has sliding_window={window}: only full attention can be trained on packed "
            "rows"
        )
    if config.model_type in STATE_SPACE_MODELS:
        raise ValueError(
            f"model type {config.model_type} mixes tokens by a state space: only attention can be trained on packed "
            "rows"
        )
    changed = changed_logits(settings)
    if settings.get("attn_logit_softcapping"):
        cap = settings["attn_logit_softcapping"]
        raise ValueError(
            f"model type {config.model_type} has attn_logit_softcapping={cap}: only plain attention can be trained on "
            "packed rows"
        )
    if changed:
        raise ValueError(
            f"model type {config.model_type} has {changed[0]}={settings[changed[0]]}: logits changed after the head "
            "are not supported"
        )


def changed_logits(settings: dict[str, Any]) -> list[str]:
    """Settings of a model by which it changes its logits after the head. A scale of 1 changes nothing; a cap of 1
    does."""
    return [name for name in LOGIT_CHANGES if settings.get(name) and not (name in LOGIT_SCALES and settings[name] == 1)]


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention; ValueError when its layers do not go through the attention interface."""
    check_packable(model.config)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: packed rows "
            "cannot be trained"
        )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

"""Attention over a packed row `[prompt | response 1 | ... | response n]`: a response sees its prompt and itself.
Where a group takes several passes the prompt is in a SharedPrompt of an earlier one, not in the row.

Registered with transformers' AttentionInterface as "infsample_packed"; the model call takes the row's RowCuts as the
keyword `cuts`, so no model code is changed. On CPU (and as the fallback) it runs SDPA over folds of responses of
similar length, never over a T x T mask; on CUDA FlexAttention with a block mask.

Shape letters: T tokens of the row, P prompt tokens, N responses of a fold, L their (padded) length, H query heads,
K key-value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from infsample_rl.model.architecture import check_full_attention
from infsample_rl.model.row_cuts import Fold, RowCuts

PACKED_ATTENTION = "infsample_packed"
# The kernel for decoding, which torch takes below 128 queries, has no choice for several query heads a key-value head.
ALWAYS_TRAINS = {"FORCE_USE_FLEX_ATTENTION": True}
# Compilations of FlexAttention that a process may need; torch allows 8. It compiles anew by which tensors need a
# gradient, and where a row's sizes happen to be equal or 1, such as its blocks and the heads.
MOST_COMPILATIONS = 64


def takes_flex_attention(head_size: int, dtype: torch.dtype) -> bool:
    """Whether FlexAttention's CUDA kernels do: they want a head size that is a power of two, and no float64."""
    return head_size in (16, 32, 64, 128, 256) and dtype != torch.float64


@cache
def _compiled_flex_attention() -> Callable[..., Tensor]:
    # Rows differ in length. Without `fullgraph` a graph break would fall back to full scores in silence.
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


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

    Dropout is ignored: the policy that sampled had none. ValueError for a layer with a sliding window or attention
    sinks, which not every config tells.
    """
    if kwargs.get("s_aux") is not None or kwargs.get("sliding_window") is not None:
        found = "attention sinks" if kwargs.get("s_aux") is not None else "a sliding window"
        raise ValueError(f"{type(module).__name__} has {found}: only full attention can be trained on packed rows")
    prompt = exchange_prompt(module, key, value, cuts)
    if cuts.block_mask is not None and takes_flex_attention(query.shape[-1], query.dtype):
        if prompt is not None:
            key, value = torch.cat([prompt[0], key], 2), torch.cat([prompt[1], value], 2)
        options = {"block_mask": cuts.block_mask, "scale": scaling, "enable_gqa": True, "kernel_options": ALWAYS_TRAINS}
        with torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS):
            output = _compiled_flex_attention()(query, key, value, **options)
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
    prompt_key, prompt_value = (key, value) if prompt is None else (tensor[0].transpose(0, 1) for tensor in prompt)
    outputs = []
    for segment in cuts.segments if prompt is None else []:
        span = slice(*segment.prompt)
        q, k, v = (tensor[span].transpose(0, 1)[None] for tensor in (query, key, value))
        output = _fused_attention(q, k, v, scaling, mask=None)  # [1, H, P, D]
        outputs.append(output[0].transpose(0, 1))
    attend = _attend_fold
    if cuts.recompute:
        attend = partial(checkpoint, _attend_fold, use_reentrant=False, preserve_rng_state=False)
    outputs += [attend(query, key, value, prompt_key, prompt_value, scaling, fold) for fold in cuts.folds]
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


def use_packed_attention(model: PreTrainedModel) -> None:
    """Switch `model` to packed attention; ValueError when its layers do not go through the attention interface."""
    check_full_attention(model.config)
    model.set_attn_implementation(PACKED_ATTENTION)
    if model.config._attn_implementation != PACKED_ATTENTION:
        raise ValueError(
            f"{type(model).__name__} does not take its attention from transformers' AttentionInterface: packed rows "
            "cannot be trained"
        )


AttentionInterface.register(PACKED_ATTENTION, packed_attention)

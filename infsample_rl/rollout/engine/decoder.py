"""The decoder stack of Llama, Qwen2 and Qwen3 for one new token of every row, in as few calls as it takes.

transformers' modules spend about half of a small step in Python; here a layer is two dozen calls, over the model's own
parameters, which are read where they are. Other architectures run through their own modules. float32 on CPU has
cpu_decoder.py, where a compiler is and the KV is not quantised. Letters: R rows, E hidden size, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from infsample_rl.rollout.engine.attention import Step
from infsample_rl.rollout.kernels.cpu_kernels import Kernels
from infsample_rl.types import MaybeNone

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


class LeanDecoder:
    """Runs `model`'s decoder layers on [R] tokens. Construct it anew when a parameter is replaced; values may change in
    place."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels | None) -> None:
        """`kernels` None: plain torch. Raises ValueError for a model that `supports` does not accept."""
        if not supports(model):
            raise ValueError(f"LeanDecoder runs {', '.join(ARCHITECTURES)} with SiLU, got {type(model).__name__}")
        self.model, self.kernels = model.model, kernels
        self.layers = [_LayerWeights(layer) for layer in self.model.layers]
        self.head_dim = self.layers[0].head_dim

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        """tokens [R], positions [R] in the whole sequence -> last hidden states [R, E], normed."""
        hidden = F.embedding(tokens, self.model.embed_tokens.weight)
        cos, sin = self.model.rotary_emb(hidden[:, None], positions[:, None])  # [R, 1, D] each
        for index, layer in enumerate(self.layers):
            query, keys, values = self._project(layer, hidden, cos, sin)
            attended = step.attend(index, query, keys, values, layer.scaling)
            hidden = self._finish(layer, hidden, attended)
        return self._norm(hidden, self.model.norm.weight, self.layers[0].epsilon)

    def _project(self, layer: _LayerWeights, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [R, E] -> query [R, heads, 1, D], keys and values [R, kv heads, 1, D], rotated."""
        normed = self._norm(hidden, layer.norm_in, layer.epsilon)
        query, keys, values = (
            self._linear(normed, *weights).unflatten(1, (-1, self.head_dim))
            for weights in (layer.query, layer.key, layer.value)
        )
        if layer.query_norm is not None:
            query, keys = (
                self._norm(query, layer.query_norm, layer.epsilon),
                self._norm(keys, layer.key_norm, layer.epsilon),
            )
        return rotate(query, cos, sin)[:, :, None], rotate(keys, cos, sin)[:, :, None], values[:, :, None]

    def _finish(self, layer: _LayerWeights, hidden: Tensor, attended: Tensor) -> Tensor:
        """hidden [R, E] and attention's output [R, 1, heads, D] -> the layer's output [R, E]."""
        hidden = hidden + self._linear(attended.flatten(1), *layer.out)
        normed = self._norm(hidden, layer.norm_post, layer.epsilon)
        gate, up = self._linear(normed, *layer.gate), self._linear(normed, *layer.up)
        inner = F.silu(gate).mul_(up) if self.kernels is None else self.kernels.silu_mul(gate, up)
        return hidden + self._linear(inner, *layer.down)

    def _norm(self, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        if self.kernels is not None:
            return self.kernels.rms_norm(hidden, weight, epsilon)
        wide = hidden.float()  # rounded where transformers' modules round
        return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return linear(x, weight, bias, self.kernels)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """x [R, E] @ weight [F, E].T + bias -> [R, F]."""
    if kernels is not None:
        return kernels.linear(x, weight, bias)
    # with few rows BLAS reads the weights up to 2.5 times faster this way round
    if x.device.type == "cpu" and x.dtype == torch.float32:
        product = torch.mm(weight, x.t()).t()
        return (product if bias is None else product + bias).contiguous()
    return F.linear(x, weight, bias)


class _LayerWeights:
    """One decoder layer's parameters, an attribute each: finding them in the modules takes as long as a small
    product."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.norm_in, self.norm_post = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        self.epsilon = layer.input_layernorm.variance_epsilon
        projections = (
            attention.q_proj,
            attention.k_proj,
            attention.v_proj,
            attention.o_proj,
            mlp.gate_proj,
            mlp.up_proj,
            mlp.down_proj,
        )
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            (module.weight, module.bias) for module in projections
        )
        has_norms = hasattr(attention, "q_norm")  # Qwen3's
        self.query_norm: Tensor | MaybeNone = attention.q_norm.weight if has_norms else None
        self.key_norm: Tensor | MaybeNone = attention.k_norm.weight if has_norms else None
        self.head_dim, self.scaling = attention.head_dim, attention.scaling


def supports(model: PreTrainedModel) -> bool:
    """Whether LeanDecoder can run `model`."""
    return type(model).__name__ in ARCHITECTURES and model.config.hidden_act == "silu"


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [R, heads, D] by cos and sin [R, 1, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin

"""The decoder stack of Llama, Qwen2 and Qwen3 for one new token of every row on CUDA: few, large kernels.

All that lies between two attentions is one function, which torch.compile turns into four matrix products and a kernel
between each two. Weights are its arguments, so one compilation serves all layers. Steps of up to 64 rows in bfloat16 or
float16 run in Triton instead (triton_layers.py), where its kernels take the shapes. Letters: R rows, E hidden size, D
head size.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from infsample_rl.rollout.engine.attention import Step
from infsample_rl.rollout.engine.decoder import ARCHITECTURES, rotate, supports
from infsample_rl.rollout.kernels.layer_weights import AttentionIn, AttentionOut

if TYPE_CHECKING:  # Triton may be absent
    from infsample_rl.rollout.engine.triton_layers import TritonLayers


class FusedDecoder:
    """Runs `model`'s decoder layers on [R] tokens. Construct it anew when a parameter's storage is replaced; values may
    change in place.

    The projections that share an input become one buffer each, and the model's parameters views of it: no second copy.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Raises ValueError for a model that `supports` does not accept."""
        if not supports(model):
            raise ValueError(f"FusedDecoder runs {', '.join(ARCHITECTURES)} with SiLU, got {type(model).__name__}")
        self.model = model.model
        self._ins = [_attention_in(layer) for layer in self.model.layers]
        self._outs = [_attention_out(layer) for layer in self.model.layers]
        self._scalings = [layer.self_attn.scaling for layer in self.model.layers]
        self.use_eager()
        self.triton_layers: TritonLayers | None = None

    def use_triton(self) -> None:
        """Run steps of few rows in Triton from now on, where its kernels take these weights."""
        from infsample_rl.rollout.engine.triton_layers import TritonLayers, why_not  # Triton may be absent

        if self.triton_layers is None and not why_not(self._ins[0], self._outs[0]):
            self.triton_layers = TritonLayers(self.model, self._ins, self._outs, self._scalings)

    def compile(self) -> None:
        """Compile at the next call: once for one row, once for any other number."""
        self.is_compiled = True
        # dynamic=False keeps the weights' sizes constant; the number of rows is marked as the one size that varies
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        self._project, self._between = compiled(project), compiled(finish_and_project)
        self._last = compiled(finish_and_norm)

    def use_eager(self) -> None:
        """Uncompiled, as at first."""
        self.is_compiled = False
        self._project, self._between, self._last = project, finish_and_project, finish_and_norm

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        """tokens [R], positions [R] in the whole sequence -> last hidden states [R, E], normed."""
        if self.triton_layers is not None and self.triton_layers.takes(step):
            return self.triton_layers(tokens, positions, step)
        hidden = self._any_rows(F.embedding(tokens, self.model.embed_tokens.weight))
        # cos and sin [R, 1, D]
        rotation = [self._any_rows(part) for part in self.model.rotary_emb(hidden[:, None], positions[:, None])]
        query, keys, values = self._project(hidden, *rotation, self._ins[0])
        for index, (_, following) in enumerate(pairwise(self._ins)):
            attended = self._attend(index, step, query, keys, values)
            hidden, query, keys, values = self._between(
                self._any_rows(hidden), attended, *rotation, self._outs[index], following
            )
        index = len(self._outs) - 1
        attended = self._attend(index, step, query, keys, values)
        return self._last(self._any_rows(hidden), attended, self._outs[index], self.model.norm.weight)

    def _attend(self, layer: int, step: Step, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        attended = step.attend(layer, query[:, :, None], keys[:, :, None], values[:, :, None], self._scalings[layer])
        return self._any_rows(attended.flatten(1))

    def _any_rows(self, tensor: Tensor) -> Tensor:
        """Tell torch.compile that the number of rows varies; one row it compiles apart in any case."""
        if self.is_compiled and tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return tensor


def project(hidden: Tensor, cos: Tensor, sin: Tensor, weights: AttentionIn) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [R, E] -> query [R, heads, D], keys and values [R, kv heads, D], rotated."""
    heads, kv_heads = weights.num_heads, weights.num_kv_heads
    product = F.linear(_norm(hidden, weights.norm, weights.epsilon), weights.weight, weights.bias)
    query, keys, values = product.view(-1, heads + 2 * kv_heads, weights.head_dim).split(
        [heads, kv_heads, kv_heads], dim=1
    )
    if weights.query_norm is not None:
        query, keys = _norm(query, weights.query_norm, weights.epsilon), _norm(keys, weights.key_norm, weights.epsilon)
    return rotate(query, cos, sin), rotate(keys, cos, sin), values


def finish(hidden: Tensor, attended: Tensor, weights: AttentionOut) -> Tensor:
    """hidden [R, E] and attention's output [R, heads D] -> the layer's output [R, E]."""
    hidden = hidden + F.linear(attended, weights.out, weights.out_bias)
    gate, up = F.linear(_norm(hidden, weights.norm, weights.epsilon), weights.gate_up, weights.gate_up_bias).chunk(
        2, dim=1
    )
    return hidden + F.linear(F.silu(gate) * up, weights.down, weights.down_bias)


def finish_and_project(
    hidden: Tensor, attended: Tensor, cos: Tensor, sin: Tensor, weights: AttentionOut, following: AttentionIn
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From one attention's output to the layer's output and the next attention's query, keys and values."""
    hidden = finish(hidden, attended, weights)
    return hidden, *project(hidden, cos, sin, following)


def finish_and_norm(hidden: Tensor, attended: Tensor, weights: AttentionOut, norm: Tensor) -> Tensor:
    """From the last attention's output to the normed hidden states."""
    return _norm(finish(hidden, attended, weights), norm, weights.epsilon)


def _norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    wide = hidden.float()  # rounded where transformers' modules round
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


def _attention_in(layer: Any) -> AttentionIn:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_norms = hasattr(attention, "q_norm")
    return AttentionIn(
        norm=layer.input_layernorm.weight,
        weight=joined([linear.weight for linear in projections]),
        bias=None if attention.q_proj.bias is None else joined([linear.bias for linear in projections]),
        query_norm=attention.q_norm.weight if has_norms else None,
        key_norm=attention.k_norm.weight if has_norms else None,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        epsilon=layer.input_layernorm.variance_epsilon,
    )


def _attention_out(layer: Any) -> AttentionOut:
    out, mlp = layer.self_attn.o_proj, layer.mlp
    projections = (mlp.gate_proj, mlp.up_proj)
    return AttentionOut(
        out=out.weight,
        out_bias=out.bias,
        norm=layer.post_attention_layernorm.weight,
        gate_up=joined([linear.weight for linear in projections]),
        gate_up_bias=None if mlp.gate_proj.bias is None else joined([linear.bias for linear in projections]),
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        epsilon=layer.post_attention_layernorm.variance_epsilon,
    )


def joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all `parameters`, one after the other along their first dimension, whose views they are from now
    on.

    They stay the same Parameter objects, so names, state_dict and loading in place are as before. Joined already:
    found, not copied.
    """
    first, ends = parameters[0], [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    rows = sum(parameter.shape[0] for parameter in parameters)
    is_joined = all(after.data_ptr() == end for end, after in zip(ends, parameters[1:], strict=False))
    one_storage = len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could not be loaded into later
        if is_joined and one_storage and all(parameter.is_contiguous() for parameter in parameters):
            return first.detach().as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(
            parameters, whole.split([parameter.shape[0] for parameter in parameters]), strict=True
        ):
            parameter.data = part
    return whole

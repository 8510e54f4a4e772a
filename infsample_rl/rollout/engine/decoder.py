"""The decoder stack of Llama, Qwen2 and Qwen3 for new tokens as rows: few, large operations.

transformers' modules spend about half of a small step in Python. Here all that lies between two attentions is one
function, which torch.compile turns into four matrix products and a kernel between each two; weights are its arguments,
so one compilation serves all layers. On CUDA, steps of up to 64 rows in bfloat16 or float16 run in Triton instead
(triton_layers.py), where its kernels take the shapes; float32 on the CPU has cpu_decoder.py. Other architectures run
through their own modules. Letters: R rows, E hidden size, D head size.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from infsample_rl.config import Config
from infsample_rl.rollout.engine.attention import AttentionIn, AttentionOut, Step
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.kernels.cpu_kernels import Kernels

if TYPE_CHECKING:  # Triton may be absent
    from infsample_rl.rollout.engine.triton_layers import TritonLayers

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
LENGTH_ROPES = ("dynamic", "longrope")  # whose angles depend on the longest position of a forward


def knows(architecture: PretrainedConfig) -> bool:
    """Whether a model of this config will be one that `supports` accepts."""
    named = architecture.architectures or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(architecture.model_type, "")]
    return named[0] in ARCHITECTURES and architecture.hidden_act == "silu"


def length_rope_of(architecture: PretrainedConfig) -> str:
    """The type of a model's RoPE where it is one of LENGTH_ROPES, else nothing."""
    kind = (architecture.to_dict().get("rope_parameters") or {}).get("rope_type")
    return kind if kind in LENGTH_ROPES else ""


def is_compiled(config: Config, architecture: PretrainedConfig) -> bool:
    """Whether compiled kernels will run the layers of such a model on the CPU."""
    is_plain = config.model.dtype == "float32" and config.rollout.kv_dtype == "auto"
    return is_plain and knows(architecture) and cpu_kernels.has_compiler()


def drafts_tokens(config: Config, architecture: PretrainedConfig) -> bool:
    """Whether tokens will be drafted for such a model, as speculation_of() decides when it is there."""
    if not config.rollout.speculates or length_rope_of(architecture):
        return False
    if config.cluster.rollout_gpus == 0:
        return is_compiled(config, architecture)
    return knows(architecture) and cpu_kernels.has_compiler()


def supports(model: PreTrainedModel) -> bool:
    """Whether the decoders of this package can run `model`."""
    return type(model).__name__ in ARCHITECTURES and model.config.hidden_act == "silu"


class FusedDecoder:
    """Runs `model`'s decoder layers on [R] tokens. Construct it anew when a parameter's storage is replaced; values may
    change in place."""

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels | None = None, *, joins: bool = True, in_blocks: bool = False
    ) -> None:
        """`model`: one that `supports` accepts. `kernels` None: torch's operators. `joins`: the projections that share
        an input become one buffer each, and the model's parameters views of it, without a second copy; not for weights
        on the CPU, which may lie in a mapped file. `in_blocks`: as TritonLayers'."""
        self.model, self.kernels, self._in_blocks = model.model, kernels, in_blocks
        self._ins: list[AttentionIn] = []
        self._outs: list[AttentionOut] = []
        for layer in self.model.layers:
            self._ins.append(_attention_in(layer, joins=joins))
            self._outs.append(_attention_out(layer, joins=joins))
            if joins and self.model.device.type == "cuda":
                torch.cuda.empty_cache()  # of what was joined: pieces that nothing else fits into, half of a model
        self._scalings = [layer.self_attn.scaling for layer in self.model.layers]
        self.is_compiled = False
        self._project, self._between, self._last = project, finish_and_project, finish_and_norm
        self.triton_layers: TritonLayers | None = None

    def use_triton(self) -> None:
        """Run steps of few rows in Triton from now on, where its kernels take these weights."""
        from infsample_rl.rollout.engine.triton_layers import TritonLayers, takes_weights  # Triton may be absent

        if self.triton_layers is None and takes_weights(self._ins[0], self._outs[0]):
            parts = self._ins, self._outs, self._scalings
            self.triton_layers = TritonLayers(self.model, *parts, in_blocks=self._in_blocks)

    def in_triton(self, step: Step) -> Tensor | None:
        """Last hidden states [R, E], normed, of the newest tokens of a step that the Triton kernels take; else None."""
        if self.triton_layers is None or not self.triton_layers.takes(step):
            return None
        return self.triton_layers(step)

    def compile(self) -> None:
        """Compile at the next call: once for one row, once for any other number."""
        self.is_compiled = True
        # dynamic=False keeps the weights' sizes constant; the number of rows is marked as the one size that varies
        compiled = partial(torch.compile, dynamic=False, fullgraph=True)
        self._project, self._between = compiled(project), compiled(finish_and_project)
        self._last = compiled(finish_and_norm)

    def __call__(self, tokens: Tensor, positions: Tensor, step: Step) -> Tensor:
        """tokens [R], positions [R] in the whole sequence -> last hidden states [R, E], normed."""
        kernels = self.kernels
        hidden = self._any_rows(F.embedding(tokens, self.model.embed_tokens.weight))
        # cos and sin [R, 1, D]
        cos, sin = (self._any_rows(part) for part in self.model.rotary_emb(hidden[:, None], positions[:, None]))
        query, keys, values = self._project(hidden, cos, sin, self._ins[0], kernels)
        for index, (_, following) in enumerate(pairwise(self._ins)):
            attended = self._any_rows(step.attend(index, query, keys, values, self._scalings[index]).flatten(1))
            hidden, query, keys, values = self._between(
                self._any_rows(hidden), attended, cos, sin, self._outs[index], following, kernels
            )
        last = len(self._outs) - 1
        attended = self._any_rows(step.attend(last, query, keys, values, self._scalings[last]).flatten(1))
        return self._last(self._any_rows(hidden), attended, self._outs[-1], self.model.norm.weight, kernels)

    def _any_rows(self, tensor: Tensor) -> Tensor:
        """Tell torch.compile that the number of rows varies; one row it compiles apart in any case."""
        if self.is_compiled and tensor.shape[0] > 1:
            torch._dynamo.maybe_mark_dynamic(tensor, 0)
        return tensor


def project(
    hidden: Tensor, cos: Tensor, sin: Tensor, weights: AttentionIn, kernels: Kernels | None
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [R, E] -> query [R, heads, D], keys and values [R, kv heads, D], rotated."""
    heads, kv_heads, epsilon = weights.num_heads, weights.num_kv_heads, weights.epsilon
    normed, counts = _norm(hidden, weights.norm, epsilon, kernels), (heads, kv_heads, kv_heads)
    sizes = [count * weights.head_dim for count in counts]
    products = _products(normed, weights.weights, weights.biases, sizes, kernels)
    query, keys, values = [product.unflatten(1, (-1, weights.head_dim)) for product in products]
    if weights.query_norm is not None:
        query = _norm(query, weights.query_norm, epsilon, kernels)
        keys = _norm(keys, weights.key_norm, epsilon, kernels)
    return rotate(query, cos, sin), rotate(keys, cos, sin), values


def finish(hidden: Tensor, attended: Tensor, weights: AttentionOut, kernels: Kernels | None) -> Tensor:
    """hidden [R, E] and attention's output [R, heads D] -> the layer's output [R, E]."""
    hidden = hidden + _linear(attended, weights.out, weights.out_bias, kernels)
    normed, sizes = _norm(hidden, weights.norm, weights.epsilon, kernels), 2 * [weights.down.shape[1]]
    gate, up = _products(normed, weights.gate_up, weights.gate_up_biases, sizes, kernels)
    inner = F.silu(gate) * up if kernels is None else kernels.silu_mul(gate, up)
    return hidden + _linear(inner, weights.down, weights.down_bias, kernels)


def finish_and_project(
    hidden: Tensor,
    attended: Tensor,
    cos: Tensor,
    sin: Tensor,
    weights: AttentionOut,
    following: AttentionIn,
    kernels: Kernels | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From one attention's output to the layer's output and the next attention's query, keys and values."""
    hidden = finish(hidden, attended, weights, kernels)
    return hidden, *project(hidden, cos, sin, following, kernels)


def finish_and_norm(
    hidden: Tensor, attended: Tensor, weights: AttentionOut, norm: Tensor, kernels: Kernels | None
) -> Tensor:
    """From the last attention's output to the normed hidden states."""
    return _norm(finish(hidden, attended, weights, kernels), norm, weights.epsilon, kernels)


def _products(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    sizes: list[int],
    kernels: Kernels | None,
) -> list[Tensor]:
    """x by every weight, with its bias; by one of all, cut into columns of these sizes."""
    products = [_linear(x, weight, bias, kernels) for weight, bias in zip(weights, biases, strict=True)]
    return products if len(products) == len(sizes) else list(products[0].split(sizes, dim=1))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, kernels: Kernels | None) -> Tensor:
    """x [R, E] @ weight [F, E].T + bias -> [R, F]."""
    return F.linear(x, weight, bias) if kernels is None else kernels.linear(x, weight, bias)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of x [R, heads, D] by cos and sin [R, 1, D]."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _norm(hidden: Tensor, weight: Tensor, epsilon: float, kernels: Kernels | None) -> Tensor:
    if kernels is not None:
        return kernels.rms_norm(hidden.contiguous(), weight, epsilon)
    wide = hidden.float()  # rounded where transformers' modules round
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)).to(hidden.dtype)


def _attention_in(layer: Any, *, joins: bool) -> AttentionIn:
    attention = layer.self_attn
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    has_norms = hasattr(attention, "q_norm")
    return AttentionIn(
        norm=layer.input_layernorm.weight,
        weights=_joined_or_each([linear.weight for linear in projections], joins=joins),
        biases=_joined_or_each([linear.bias for linear in projections], joins=joins),
        query_norm=attention.q_norm.weight if has_norms else None,
        key_norm=attention.k_norm.weight if has_norms else None,
        num_heads=attention.q_proj.out_features // attention.head_dim,
        num_kv_heads=attention.k_proj.out_features // attention.head_dim,
        head_dim=attention.head_dim,
        epsilon=layer.input_layernorm.variance_epsilon,
    )


def _attention_out(layer: Any, *, joins: bool) -> AttentionOut:
    out, mlp = layer.self_attn.o_proj, layer.mlp
    projections = (mlp.gate_proj, mlp.up_proj)
    return AttentionOut(
        out=out.weight,
        out_bias=out.bias,
        norm=layer.post_attention_layernorm.weight,
        gate_up=_joined_or_each([linear.weight for linear in projections], joins=joins),
        gate_up_biases=_joined_or_each([linear.bias for linear in projections], joins=joins),
        down=mlp.down_proj.weight,
        down_bias=mlp.down_proj.bias,
        epsilon=layer.post_attention_layernorm.variance_epsilon,
    )


def _joined_or_each(parameters: list[Any], *, joins: bool) -> tuple[Any, ...]:
    if not joins:
        return tuple(parameters)
    return (None if parameters[0] is None else joined(parameters),)


def joined(parameters: list[nn.Parameter]) -> Tensor:
    """One tensor of all `parameters`, one after the other along their first dimension, whose views they are from now
    on.

    They stay the same Parameter objects, so names, state_dict and loading in place are as before. Joined already:
    found, not copied.
    """
    first, ends = parameters[0], [parameter.data_ptr() + parameter.nbytes for parameter in parameters]
    rows = [parameter.shape[0] for parameter in parameters]
    is_joined = all(after.data_ptr() == end for end, after in zip(ends, parameters[1:], strict=False))
    one_storage = len({parameter.untyped_storage().data_ptr() for parameter in parameters}) == 1
    with torch.inference_mode(False), torch.no_grad():  # a tensor made in inference mode could not be loaded into later
        if is_joined and one_storage and all(parameter.is_contiguous() for parameter in parameters):
            return first.detach().as_strided((sum(rows), *first.shape[1:]), first.stride(), first.storage_offset())
        whole = torch.cat([parameter.detach() for parameter in parameters])
        for parameter, part in zip(parameters, whole.split(rows), strict=True):
            parameter.data = part
    return whole

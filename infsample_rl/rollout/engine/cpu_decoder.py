"""The decoder stack of Llama, Qwen2 and Qwen3 for one new token of every row, in one call of compiled code
(cpu_decoder.h).

Float32 on CPU, over the model's own parameters and the KV pool's pages, which are read where they are. A row's result
is bitwise the same whatever the batch around it, its place, its pages and the number of threads. Letters: R rows, E
hidden size, D head size.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.cpu_kernels import Kernels, check

ANGLES = 256  # places that cos and sin are computed for at a time
WORK_PER_THREAD = 1 << 20  # multiply-adds of a step below which a second thread costs more than it brings

# by Bad in cpu_decoder.h
BAD_INDEX = ("", "lengths or tables", "prompt_lengths or prompt_tables", "prompt_of_row", "tokens")
BAD_ANGLE = 5


def _struct(pointers: str, integers: str, floats: str = "") -> list[tuple[str, type]]:
    kinds = ((pointers, ctypes.c_void_p), (integers, ctypes.c_int64), (floats, ctypes.c_float))
    return [(name, kind) for names, kind in kinds for name in names.split()]


class _Model(ctypes.Structure):
    _fields_ = _struct("layers embedding norm", "num_layers vocab_size hidden heads kv_heads size inner", "eps scaling")


class _Step(ctypes.Structure):
    _fields_ = _struct(
        "tokens starts positions tables lengths prompt_tables prompt_lengths prompt_of_row store cos sin workspace out",
        "rows row_pages num_prompts prompt_pages num_pages page_size num_angles threads",
    )


class CompiledDecoder:
    """Runs `model`'s decoder layers on the rows of a batch. Parameters may change in place, and be replaced by others
    of the same shape.

    Beside the model and the pool it holds cos and sin by place, 8 D bytes each (2 MB for 4,096 tokens at D = 64), and a
    workspace of 4 (2 E + max(E, query size) + max(query, key and value size, inner size)) bytes for every row of the
    largest batch so far.
    """

    def __init__(self, model: PreTrainedModel, kernels: Kernels) -> None:
        """`model`: one that decoder.supports accepts, whose angles do not depend on the longest position. ValueError
        where it is not float32 on CPU."""
        self.model, self.kernels = model.model, kernels
        attention, layers = self.model.layers[0].self_attn, self.model.layers
        self._struct = _Model(
            num_layers=len(layers),
            vocab_size=self.model.embed_tokens.weight.shape[0],
            hidden=model.config.hidden_size,
            heads=model.config.num_attention_heads,
            kv_heads=model.config.num_key_value_heads,
            size=attention.head_dim,
            inner=model.config.intermediate_size,
            eps=self.model.norm.variance_epsilon,
            scaling=attention.scaling,
        )
        self._places = _weight_places(self.model)
        self._addresses: list[int] = []
        self._find_weights(self._weights_at())
        self._work_per_row = sum(parameter.numel() for parameter in layers.parameters())
        self._row_floats = kernels.workspace_floats(ctypes.addressof(self._struct))
        self._workspace = torch.empty(0)
        self._angles = Angles(self.model.rotary_emb, attention.head_dim)

    def __call__(self, batch: RowBatch, num_rows: int, kv: PagedKV) -> Tensor:
        """Last hidden states [R, E], normed, of the newest tokens of the batch's first `num_rows` rows; their KV is
        written to `kv`."""
        addresses = self._weights_at()
        if addresses != self._addresses:
            self._find_weights(addresses)
        out = torch.empty(num_rows, self._struct.hidden)
        step, angles = self._step(batch, num_rows, kv), self._angles
        step.out = out.data_ptr()
        if self._workspace.numel() < num_rows * self._row_floats:
            self._workspace = torch.empty(num_rows * self._row_floats)
        step.workspace = self._workspace.data_ptr()
        while True:
            step.cos, step.sin, step.num_angles = angles.cos.data_ptr(), angles.sin.data_ptr(), len(angles.cos)
            bad, what = divmod(self.kernels.decode(ctypes.addressof(self._struct), ctypes.addressof(step)), 8)
            if not what:
                return out
            if what != BAD_ANGLE:
                raise ValueError(
                    f"{BAD_INDEX[what]}[{bad}] is out of range: lengths go from 1 to what the pages hold, pages and "
                    "tokens must exist"
                )
            angles.reach(int(batch.starts[bad] + batch.positions[bad]))

    def _step(self, batch: RowBatch, num_rows: int, kv: PagedKV) -> _Step:
        """The step's tensors but for output, workspace and angles."""
        store = kv.store
        columns = (batch.tokens, batch.starts, batch.positions, batch.tables, batch.lengths)
        prompts = (batch.prompt_tables, batch.prompt_lengths, batch.prompt_of_row)
        return _Step(
            *[tensor.data_ptr() for tensor in (*columns, *prompts, store)],
            rows=num_rows,
            row_pages=batch.tables.shape[1],
            num_prompts=batch.prompt_tables.shape[0],
            prompt_pages=batch.prompt_tables.shape[1],
            num_pages=store.shape[1],
            page_size=store.shape[2],
            threads=max(1, min(torch.get_num_threads(), num_rows * self._work_per_row // WORK_PER_THREAD)),
        )

    def _weights_at(self) -> list[int]:
        """Addresses of the weights in the order of _weight_places, 0 for one that is not there."""
        return [
            0 if parameters is None or (weight := parameters[name]) is None else weight.data_ptr()
            for parameters, name in self._places
        ]

    def _find_weights(self, addresses: list[int]) -> None:
        """Take the weights from where they lie now."""
        model = self._struct
        for parameters, name in self._places:
            if parameters is not None and (weight := parameters[name]) is not None:
                check(f"a {name} of the model", weight, weight.shape)
        self._addresses, self._layers = addresses, (ctypes.c_void_p * (len(addresses) - 2))(*addresses[2:])
        model.embedding, model.norm = addresses[:2]
        model.layers = ctypes.addressof(self._layers)


class Angles:
    """cos and sin [places, D] of a model's rotary embedding, by its own module: of the first places of a sequence, as
    far as any row has come."""

    def __init__(self, module: Any, head_dim: int) -> None:
        self._module = module
        self.cos = self.sin = torch.empty(0, head_dim)

    def reach(self, place: int) -> None:
        """Hold those up to `place`, at least twice as far as before. ValueError for what is no place."""
        if place < 0:
            raise ValueError(f"starts and positions must be places in a sequence, got {place}")
        have = len(self.cos)
        new = [
            self._module(self.cos, torch.arange(at, at + ANGLES)[None])
            for at in range(have, max(place + 1, 2 * have), ANGLES)
        ]
        self.cos, self.sin = (
            torch.cat([old, *(part[0] for part in parts)])
            for old, parts in zip((self.cos, self.sin), zip(*new, strict=True), strict=True)
        )


def _weight_places(model: Any) -> list[tuple[dict[str, nn.Parameter | None] | None, str]]:
    """The model's weights as (module's parameters, name), in the order of `Layer` in cpu_decoder.h after two others.

    By the module's own table, so that a parameter that replaces one is seen too. None where the module does not exist.
    """
    places = [(model.embed_tokens._parameters, "weight"), (model.norm._parameters, "weight")]
    for layer in model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        norms = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else (None, None)  # Qwen3's
        for norm in (layer.input_layernorm, *norms, layer.post_attention_layernorm):
            places.append((None if norm is None else norm._parameters, "weight"))
        own = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        for module in (*own, mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            places += [(module._parameters, "weight"), (module._parameters, "bias")]
    return places

"""One decode step on CUDA in Triton: attention over pages where they lie, and, for up to 64 rows of Llama, Qwen2 and
Qwen3, the whole decoder layers: six kernels a layer, each launched before the last has ended.

The kernels are attention's input (norm, product, head norms, rotation, KV write), its parts, their merge, its output,
gate and up, down. Constants were chosen on an H200 at the shapes of Qwen3-1.7B. The file needs Triton, so it is
imported only where a step is to run on it. Letters: R rows, E hidden size, D head size, K inputs of a product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import torch
import triton
import triton.language as tl
from torch import Tensor

from infsample_rl.rollout.engine.attention import AttentionIn, AttentionOut
from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.paged_attention import STORED_DTYPES, Workspace, paged_attention, write_tokens
from infsample_rl.rollout.kernels.triton_linear import (
    _embed_kernel,
    _gated_kernel,
    _heads_kernel,
    _hidden_kernel,
    _norm_kernel,
)

MAX_ROWS = 64
HIDDEN_TILE, GATED_TILE = 64, 128  # weight rows of a program; of a head's: D
REGISTERS = 65536  # of a multiprocessor
STAGED_BYTES = 100 * 1024  # of shared memory for blocks of weights on their way


@dataclass
class TritonStep:
    """One token of R rows through the Triton kernels: fixed shapes, lengths read on the device, fit for a CUDA
    graph."""

    kv: PagedKV
    batch: RowBatch
    num_rows: int
    workspace: Workspace

    @cached_property
    def positions(self) -> Tensor:
        """[R], of the newest tokens in their responses, >= 0."""
        return self.batch.positions[: self.num_rows].clamp(min=0)

    @cached_property
    def write_index(self) -> Tensor:
        """[R], for pages that PagedKV must write itself."""
        return self.kv.token_index(self.batch.tables[: self.num_rows].long(), self.positions[:, None])[:, 0]

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """As attention.Step's, T = R."""
        kv = self.kv
        if not kv.is_quantised:
            own_keys, own_values = kv.layers[2 * layer : 2 * layer + 2]
            write_tokens(keys, values, own_keys, own_values, self.batch.tables, self.positions)
        else:
            kv.write(layer, self.write_index, keys, values)
        return self.attend_written(layer, query.contiguous(), scaling)

    def attend_written(self, layer: int, query: Tensor, scaling: float, *, early: bool = False) -> Tensor:
        """query [R, H N, D] -> [R, H N, D], over pages that hold the newest tokens. `early`: with programmatic
        dependent launch (sm_90)."""
        batch, (keys, values) = self.batch, self.kv.layers[2 * layer : 2 * layer + 2]
        return paged_attention(
            query,
            keys,
            values,
            batch.tables,
            batch.lengths,
            batch.prompt_tables,
            batch.prompt_lengths,
            batch.prompt_row_starts,
            scaling,
            workspace=self.workspace,
            key_scales=self.kv.key_scales[layer] if self.kv.is_quantised else None,
            value_scales=self.kv.value_scales[layer] if self.kv.is_quantised else None,
            early=early,
        )


class Launch(NamedTuple):
    """What a product's kernel runs with."""

    preloads: int  # blocks that a program loads before what it depends on is done
    warps: int


class Settings(NamedTuple):
    """What a product's kernel does best with. What its sums are made of does not depend on the number of rows, so that
    a row has the same bits in any company."""

    programs: float  # per multiprocessor at least, by splitting K
    block_k: int  # columns of a block of weights at most
    launches: tuple[Launch, Launch, Launch]  # with up to 16, 32 and 64 rows


STAGES = 4  # blocks of weights on their way beside those preloaded
SETTINGS = {
    "heads": Settings(1.8, 64, (Launch(4, 8), Launch(4, 8), Launch(4, 8))),
    "out": Settings(1.8, 128, (Launch(2, 4), Launch(2, 8), Launch(2, 8))),
    # with eight warps 64 rows spill 760 bytes a thread (ptxas for sm_90)
    "gated": Settings(2.8, 64, (Launch(2, 4), Launch(2, 8), Launch(2, 4))),
    "down": Settings(1.8, 128, (Launch(4, 8), Launch(2, 8), Launch(2, 8))),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """How one product is divided among programs."""

    num_inputs: int
    num_tiles: int
    tile: int
    splits: int  # of K
    settings: Settings

    @property
    def num_partials(self) -> int:
        """Sums of all programs for one row."""
        return self.num_tiles * self.splits * self.tile

    def sizes(self, num_rows: int, *, early: bool, product: tl.dtype) -> dict:
        """Compile-time sizes and launch options of its kernel."""
        settings, padded = self.settings, max(16, triton.next_power_of_2(num_rows))
        launch = settings.launches[(padded // 16).bit_length() - 1]
        width = self.num_inputs // self.splits
        block = min(settings.block_k, width & -width)  # powers of two
        stages = max(2, min(STAGES, STAGED_BYTES // (2 * block * (self.tile + padded))))
        sizes = {"K": self.num_inputs, "M": padded, "TILE": self.tile, "SPLITS": self.splits, "BLOCK_K": block}
        sizes["PRELOADS"] = min(launch.preloads, width // block)
        # what is fused into one rounding would depend on how rows are spread over threads
        options = {"num_warps": launch.warps, "num_stages": stages, "launch_pdl": early, "enable_fp_fusion": False}
        if early:  # so many registers that all programs find a place at once
            options["maxnreg"] = min(248, REGISTERS // (32 * launch.warps * math.ceil(settings.programs)) & -8)
        return sizes | {"EARLY": early, "PRODUCT": product} | options


def plan(settings: Settings, num_inputs: int, num_tiles: int, tile: int, num_processors: int) -> Plan:
    """The fewest splits of K, of 64 columns or a multiple, that give every multiprocessor its programs."""
    blocks = num_inputs // 64
    divisors = [count for count in range(1, blocks + 1) if blocks % count == 0]
    wanted = settings.programs * num_processors
    splits = next((count for count in divisors if num_tiles * count >= wanted), blocks)
    return Plan(num_inputs, num_tiles, tile, splits, settings)


def plans(into: AttentionIn, out: AttentionOut, num_processors: int) -> dict[str, Plan]:
    """The plans of a layer's four products, by name."""
    size, inner = into.weights[0].shape[1], out.down.shape[1]
    shapes = {  # inputs, blocks of columns, columns of a block
        "heads": (size, into.weights[0].shape[0] // into.head_dim, into.head_dim),
        "out": (out.out.shape[1], size // HIDDEN_TILE, HIDDEN_TILE),
        "gated": (size, 2 * inner // GATED_TILE, GATED_TILE),
        "down": (inner, size // HIDDEN_TILE, HIDDEN_TILE),
    }
    return {name: plan(SETTINGS[name], *shape, num_processors) for name, shape in shapes.items()}


class TritonLayers:
    """The layers whose weights are `ins` and `outs`. Hidden states [R, E] stay in one buffer, beside their sums of
    squares by tile."""

    def __init__(self, model: Any, ins: list[AttentionIn], outs: list[AttentionOut], scalings: list[float]) -> None:
        """The weights are such that `takes_weights`."""
        self.model, self.ins, self.outs, self.scalings = model, ins, outs, scalings
        device, one, other = ins[0].weights[0].device, ins[0], outs[0]
        is_cuda = device.type == "cuda"
        self.early = is_cuda  # the interpreter has no programmatic dependent launch
        num = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 4
        self.tiles = one.weights[0].shape[1] // HIDDEN_TILE  # of hidden states
        self.plans = plans(one, other, num)
        most = max(plan.num_partials for plan in self.plans.values())
        self.partials = torch.empty(MAX_ROWS * most, dtype=torch.float32, device=device)
        num_tiles = max(plan.num_tiles for plan in self.plans.values())
        self.counters = torch.zeros(num_tiles, dtype=torch.int32, device=device)
        # the interpreter has no other dot
        self.product = tl.float32 if triton.knobs.runtime.interpret else STORED_DTYPES[one.weights[0].dtype]
        self.square_sizes = {"SQUARE_PARTS": self.tiles, "SQUARE_PAD": triton.next_power_of_2(self.tiles)}
        self._angles: list[tuple[Tensor, Tensor]] = []  # the last is the longest; captured steps may read the others

    def takes(self, step: object) -> TypeGuard[TritonStep]:
        """Whether the layers can run a step."""
        return isinstance(step, TritonStep) and step.num_rows <= MAX_ROWS

    def angles(self, batch: RowBatch, page_size: int) -> tuple[Tensor, Tensor]:
        """cos and sin [places, D] of every place that a batch's tables can hold, by the model's own module."""
        places = (batch.prompt_tables.shape[1] + batch.tables.shape[1]) * page_size
        if not self._angles or len(self._angles[-1][0]) < places:
            table = self.model.embed_tokens.weight
            parts = self.model.rotary_emb(table[:1, None], torch.arange(places, device=table.device)[None])
            self._angles.append((parts[0][0].contiguous(), parts[1][0].contiguous()))
        return self._angles[-1]

    def __call__(self, step: TritonStep) -> Tensor:
        """Last hidden states [R, E], normed, of the newest tokens of a step's rows."""
        table = self.model.embed_tokens.weight
        num_rows, size, tokens = step.num_rows, table.shape[1], step.batch.tokens
        cos, sin = self.angles(step.batch, step.kv.page_size)
        hidden = torch.empty(num_rows, size, dtype=table.dtype, device=table.device)
        squares = torch.empty(num_rows, self.tiles, dtype=torch.float32, device=table.device)
        _embed_kernel[(num_rows, self.tiles)](tokens, table, hidden, squares, E=size, TILE=HIDDEN_TILE)
        for index, (into, out) in enumerate(zip(self.ins, self.outs, strict=True)):
            query = self.project(into, hidden, squares, cos, sin, step, index)
            attended = step.attend_written(index, query, self.scalings[index], early=self.early)
            self.add_product("out", attended, out.out, out.out_bias, hidden, squares)
            gated = self.gate(out, hidden, squares)
            self.add_product("down", gated, out.down, out.down_bias, hidden, squares)
        normed = torch.empty_like(hidden)
        _norm_kernel[(num_rows, self.tiles)](
            hidden, squares, self.model.norm.weight, normed, self.ins[0].epsilon,
            E=size, TILE=HIDDEN_TILE, **self.square_sizes, EARLY=self.early, launch_pdl=self.early,
        )  # fmt: skip
        return normed

    def project(
        self,
        weights: AttentionIn,
        hidden: Tensor,
        squares: Tensor,
        cos: Tensor,
        sin: Tensor,
        step: TritonStep,
        layer: int,
    ) -> Tensor:
        """hidden [R, E] -> query [R, heads, D], rotated by cos and sin [places, D]; keys and values are written to the
        layer's pages."""
        num_rows, kv, plan = len(hidden), step.kv, self.plans["heads"]
        shape = (num_rows, weights.num_kv_heads, weights.head_dim)
        query = torch.empty(num_rows, weights.num_heads, weights.head_dim, dtype=hidden.dtype, device=hidden.device)
        is_direct = not kv.is_quantised
        keys, values = (
            kv.layers[2 * layer : 2 * layer + 2] if is_direct else (hidden.new_empty(shape) for _ in range(2))
        )
        batch = step.batch
        _heads_kernel[(plan.num_tiles * plan.splits,)](
            hidden, squares, weights.norm, weights.weights[0], weights.biases[0], weights.query_norm,
            weights.key_norm, cos, sin, query, keys, values,
            batch.tables, batch.positions, batch.starts, batch.tables.stride(0),
            self.partials, self.counters, num_rows, weights.epsilon,
            HEADS=weights.num_heads, KV_HEADS=weights.num_kv_heads, PAGE=kv.page_size if is_direct else 0,
            **self.square_sizes,
            **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip
        if not is_direct:
            kv.write(layer, step.write_index, keys, values)
        return query

    def gate(self, weights: AttentionOut, hidden: Tensor, squares: Tensor) -> Tensor:
        """hidden [R, E] -> silu(gate) * up of its norm [R, intermediate size]."""
        num_rows, plan = len(hidden), self.plans["gated"]
        out = torch.empty(num_rows, weights.down.shape[1], dtype=hidden.dtype, device=hidden.device)
        _gated_kernel[(plan.num_tiles * plan.splits,)](
            hidden, squares, weights.norm, weights.gate_up[0], weights.gate_up_biases[0], out, self.partials,
            self.counters, num_rows, weights.epsilon,
            N=out.shape[1], **self.square_sizes, **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip
        return out

    def add_product(
        self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None, hidden: Tensor, squares: Tensor
    ) -> None:
        """hidden [R, E] += x @ weight.T + bias, and its sums of squares anew. `name`: out or down."""
        num_rows, plan = len(hidden), self.plans[name]
        _hidden_kernel[(plan.num_tiles * plan.splits,)](
            x, weight, bias, hidden, squares, self.partials, self.counters, num_rows,
            N=hidden.shape[1], **plan.sizes(num_rows, early=self.early, product=self.product),
        )  # fmt: skip


def takes_weights(into: AttentionIn, out: AttentionOut) -> bool:
    """Whether the kernels can run layers of these weights."""
    weight, head_dim = into.weights[0], into.head_dim
    # GPUs of other compute capabilities have too little shared memory
    if weight.is_cuda and torch.cuda.get_device_capability(weight.device)[0] not in (9, 10):
        return False
    tensors = [tensor for tensor in (*into, *out) if isinstance(tensor, Tensor)]
    return (
        weight.dtype in (torch.bfloat16, torch.float16)
        and head_dim in (32, 64, 128, 256)
        and not any(size % 64 for size in (weight.shape[1], out.down.shape[1], out.out.shape[1]))
        and all(tensor.is_contiguous() for tensor in tensors)
    )

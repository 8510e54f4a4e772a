"""How the matrix products of a decoder layer in Triton are divided among programs: by shapes and numbers of rows, tuned
on an H200 at the shapes of Qwen3-1.7B."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import triton
import triton.language as tl

from infsample_rl.rollout.engine.attention import AttentionIn, AttentionOut

HIDDEN_TILE, GATED_TILE = 64, 128  # weight rows of a program; of a head's: D
REGISTERS = 65536  # of a multiprocessor
STAGED_BYTES = 100 * 1024  # of shared memory for blocks of weights on their way


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

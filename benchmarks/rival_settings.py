"""How each rival runs: at its best, and within the KV budget of our slots. Ints and names only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.engine import EngineOptions

VLLM_BLOCK = 32  # tokens; on CPU a multiple of 32 is needed
# tokens of a block of generate_batch: small ones waste least of a small pool, and gather no slower than its default of
# 256
PAGE = 16


@dataclass(frozen=True)
class Measurement:
    """One measurement: which function takes it, and the variants of which the fastest is reported."""

    name: str
    variants: list[dict[str, Any]]
    same_variant_as: str | None = None  # take what was fastest in this measurement, instead of trying all again

    @property
    def what(self) -> str:
        """ours, generate, generate_batch or vllm."""
        return self.name.split("/")[0]


def rival_measurements(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    """Every rival asked for, at its best and at equal KV bytes."""
    found = []
    if "generate" in options.rivals:
        found += _generate(options)
    if "generate_batch" in options.rivals:
        found += _generate_batch(options, facts)
    if options.vllm_python is not None:
        found += _vllm(options, facts)
    return found


def micro_batch_rows(budget_tokens: int, tokens_per_row: int, group_size: int) -> int:
    """Rows of even micro-batches: as few batches as the budget allows when every row holds its own prompt and
    response."""
    most = max(1, min(group_size, budget_tokens // tokens_per_row))
    return math.ceil(group_size / math.ceil(group_size / most))


def _generate(options: EngineOptions) -> list[Measurement]:
    row_tokens = options.prompt_tokens + options.max_new_tokens
    equal = micro_batch_rows(options.kv_budget_tokens(options.prompts_at_once), row_tokens, options.group_size)
    caches = ("dynamic", "static")
    return [
        Measurement("generate", [{"rows": options.group_size, "cache": cache} for cache in caches]),
        Measurement("generate/equal_kv", [{"rows": equal, "cache": cache} for cache in caches]),
    ]


def _generate_batch(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    """Compiling and CUDA graphs are tried on a GPU; on a CPU compiling makes it slower, since lengths change at every
    step."""
    row_tokens = options.prompt_tokens + options.max_new_tokens
    ample = options.group_size * options.prompts * (row_tokens + PAGE) + 2 * PAGE
    plain = {
        "page_size": PAGE,
        "scheduler": "fifo",
        "copies": False,
        "compile_level": 0,
        "cuda_graph": None,
        "safety_margin": 0.0,
        "kv_bytes_per_token": facts["kv_bytes_per_token"],
    }
    variants = [plain, plain | {"scheduler": "prefill_first"}, plain | {"copies": True}]
    if facts["device"] != "cpu":
        variants += [plain | {"compile_level": 1}, plain | {"cuda_graph": True}]
    budget = options.kv_budget_tokens(options.prompts_at_once)
    return [
        Measurement("generate_batch", [variant | {"kv_tokens": ample} for variant in variants]),
        Measurement("generate_batch/equal_kv", [variant | {"kv_tokens": budget} for variant in variants]),
    ]


def _vllm(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    def blocks(tokens: int) -> int:
        return math.ceil(tokens / VLLM_BLOCK)

    ample = (
        options.prompts * (blocks(options.prompt_tokens) + options.group_size * (blocks(options.max_new_tokens) + 1))
        + 1
    )
    budget = options.kv_budget_tokens(options.prompts_at_once) // VLLM_BLOCK
    # Seen on CPU: compiled with free threads (nobind) is fastest; compiling with bound ones (auto) took over nine
    # minutes; in eager mode either binding can win.
    tried = [(True, "auto"), (False, "nobind")] if facts["device"] == "cpu" else [(False, None), (True, None)]
    variants = [{"enforce_eager": eager, "omp_bind": binding} for eager, binding in tried]
    return [
        Measurement("vllm", [variant | {"num_blocks": ample} for variant in variants]),
        Measurement(
            "vllm/equal_kv", [variant | {"num_blocks": budget} for variant in variants], same_variant_as="vllm"
        ),
    ]

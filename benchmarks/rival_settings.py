"""How each rival runs: at its best, and within the KV budget of our slots; and vLLM's process. Ints and names only."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.process import measure, run_script
from benchmarks.workload import EngineOptions

VLLM_SCRIPT = Path(__file__).with_name("vllm_rival.py")
VLLM_BLOCK = 32  # tokens; on CPU a multiple of 32 is needed
# tokens of a block of generate_batch: small ones waste least of a small pool, and gather no slower than its default of
# 256
PAGE = 16


@dataclass(frozen=True)
class Measurement:
    """One measurement: which function takes it, and the variants of which the fastest is reported."""

    name: str
    variants: list[dict[str, Any]]

    @property
    def what(self) -> str:
        """ours, ours_on_vllm, generate, generate_batch or vllm."""
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
    equal = micro_batch_rows(options.kv_budget_tokens(), row_tokens, options.group_size)
    caches = ("dynamic", "static")
    return [
        Measurement("generate", [{"rows": options.group_size, "cache": cache} for cache in caches]),
        Measurement("generate/equal_kv", [{"rows": equal, "cache": cache} for cache in caches]),
    ]


def _generate_batch(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    """Compiling and CUDA graphs are tried on a GPU; on a CPU compiling makes it slower, since lengths change at every
    step."""
    row_tokens = options.prompt_tokens + options.max_new_tokens
    ample = options.group_size * (row_tokens + PAGE) + 2 * PAGE
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
    budget = options.kv_budget_tokens()
    return [
        Measurement("generate_batch", [variant | {"kv_tokens": ample} for variant in variants]),
        Measurement("generate_batch/equal_kv", [variant | {"kv_tokens": budget} for variant in variants]),
    ]


def _vllm(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    def blocks(tokens: int) -> int:
        return math.ceil(tokens / VLLM_BLOCK)

    group = blocks(options.prompt_tokens) + options.group_size * (blocks(options.max_new_tokens) + 1)
    budget = options.kv_budget_tokens() // VLLM_BLOCK
    variants = vllm_variants(facts["device"])[: options.vllm_variants]
    return [
        Measurement("vllm", [variant | {"num_blocks": group * len(facts["prompts"])} for variant in variants]),
        Measurement("vllm/equal_kv", [variant | {"num_blocks": budget} for variant in variants]),
    ]


def vllm_variants(device: str) -> list[dict[str, Any]]:
    """How vLLM may be started. Seen on CPU: compiled with free threads (nobind) is fastest; compiling with bound ones
    (auto) took over nine minutes; in eager mode either binding can win."""
    tried = [(True, "auto"), (True, "nobind"), (False, "nobind")] if device == "cpu" else [(False, None), (True, None)]
    return [{"enforce_eager": eager, "omp_bind": binding} for eager, binding in tried]


def on_vllm(options: EngineOptions, facts: dict[str, Any]) -> list[Measurement]:
    """Our schedules on vLLM, but for dynamic_slot, which it does not have. token_budget has the blocks of
    `vllm/equal_kv`; the others have one more for every slot, for the prompt's last tokens, as kv_pool_bytes says."""
    bindings = ("auto", "nobind") if facts["device"] == "cpu" else (None,)
    budget = {"kv_budget_tokens": options.kv_budget_tokens() // VLLM_BLOCK * VLLM_BLOCK, "page_size": VLLM_BLOCK}
    found = []
    for schedule in (name for name in options.schedules if name != "dynamic_slot"):
        rollout = {"schedule": schedule, "predictor": "none"}
        rollout |= budget if schedule == "token_budget" else {"page_size": VLLM_BLOCK}
        variants = [{"rollout": rollout, "omp_bind": binding} for binding in bindings]
        found.append(Measurement(f"ours_on_vllm/{schedule}", variants))
    return found


def measure_on_vllm(workload: dict[str, Any], settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """One measurement of our schedules on vLLM (vllm_point.py)."""
    spec = {"workload": workload, "settings": settings, "prompts": facts["prompts"], "stop_ids": facts["stop_ids"]}
    limits = {"threads": workload["threads"], "timeout_s": workload["timeout_s"]}
    environment = _environment(settings)
    return measure("vllm_point.main", spec, python=workload["vllm_python"], environment=environment, **limits)


def _environment(settings: dict[str, Any]) -> dict[str, str]:
    found = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    found["VLLM_CPU_KVCACHE_SPACE"] = "1"
    return found if settings["omp_bind"] is None else found | {"VLLM_CPU_OMP_THREADS_BIND": settings["omp_bind"]}


def measure_vllm(workload: dict[str, Any], settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """One measurement of vLLM, in the form of those of `engine_point.py`. Its pool holds one whole sample at least."""
    sample = workload["prompt_tokens"] + workload["max_new_tokens"]
    blocks = max(settings["num_blocks"], math.ceil(sample / VLLM_BLOCK))
    spec = {
        name: workload[name]
        for name in ("dtype", "seed", "group_size", "max_new_tokens", "prompt_tokens", "ignore_eos")
    }
    spec |= {
        "model": workload["model"] if workload["shape"] is None else workload["config_folder"],
        "random_weights": workload["shape"] is not None,
        "prompts": facts["prompts"],
        "lengths": workload.get("lengths"),
        "trajectories": workload.get("trajectories"),
        "words": workload.get("words"),
        "stop_ids": facts["stop_ids"],
        "block_size": VLLM_BLOCK,
        "num_blocks": blocks + 1,  # it keeps one for itself
        "max_num_seqs": workload["group_size"] * len(facts["prompts"]),
        "enforce_eager": settings["enforce_eager"],
    }
    # Without its folder on the path: vLLM's imports would find our report.py and models.py there (Python 3.11 or
    # newer).
    environment = {"PYTHONSAFEPATH": "1"} | _environment(settings)
    command = [workload["vllm_python"], str(VLLM_SCRIPT)]
    found = run_script(
        command, spec, threads=workload["threads"], timeout_s=workload["timeout_s"], environment=environment
    )
    pool = blocks * VLLM_BLOCK * facts["kv_bytes_per_token"]
    return found | {"peak_kv_bytes": pool, "kv_pool_bytes": pool}

"""Starts vllm_rival.py with the interpreter that has vLLM, and says what KV its blocks take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from benchmarks.process import run_script
from benchmarks.rival_settings import VLLM_BLOCK

SCRIPT = Path(__file__).with_name("vllm_rival.py")


def measure_vllm(workload: dict[str, Any], settings: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """One measurement of vLLM, in the form of those of `engine_point.py`. Its pool holds one whole sample at least."""
    sample = workload["prompt_tokens"] + workload["max_new_tokens"]
    blocks = max(settings["num_blocks"], math.ceil(sample / VLLM_BLOCK) + 1)  # it keeps one block for itself
    spec = {
        name: workload[name]
        for name in ("dtype", "seed", "group_size", "max_new_tokens", "prompt_tokens", "ignore_eos", "repeats")
    }
    spec |= {
        "model": workload["model"] if workload["shape"] is None else workload["config_folder"],
        "random_weights": workload["shape"] is not None,
        "prompts": facts["prompts"][: workload["prompts"]],
        "stop_ids": facts["stop_ids"],
        "block_size": VLLM_BLOCK,
        "num_blocks": blocks,
        "max_num_seqs": workload["group_size"] * workload["prompts"],
        "enforce_eager": settings["enforce_eager"],
    }
    # Without its folder on the path: vLLM's imports would find our report.py and models.py there (Python 3.11 or
    # newer).
    environment = {"PYTHONSAFEPATH": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    if settings["omp_bind"] is not None:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = settings["omp_bind"]
    command = [workload["vllm_python"], str(SCRIPT)]
    found = run_script(
        command, spec, threads=workload["threads"], timeout_s=workload["timeout_s"], environment=environment
    )
    pool = blocks * VLLM_BLOCK * facts["kv_bytes_per_token"]
    return found | {"peak_kv_bytes": pool, "kv_pool_bytes": pool, "reserved_memory_bytes": None}

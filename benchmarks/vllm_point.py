"""Our schedules on vLLM, a measurement of `benchmarks.engine`: run by the interpreter that has vLLM."""

from __future__ import annotations

import importlib
import os
import time
from typing import Any

import torch

from benchmarks.models import pick_device, rollout_config
from benchmarks.workload import Workload
from infsample_rl.config import Config, DataConfig, ModelConfig, RewardConfig, RewardFunctionConfig
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.rollout.engine.vllm_engine import ENVIRONMENT, VLLMEngine

STATISTICS = ("running_steps", "peak_kv_bytes", "kv_pool_bytes", "preemptions", "recomputed_tokens", "row_steps")


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds, lengths and the engine's own figures, of a run after one with another seed that warms up; peak memory
    is counted from the loaded model on, the model included."""
    workload, options = Workload.of(spec["workload"]), spec["workload"]
    torch.set_num_threads(workload.threads)
    os.environ.update(ENVIRONMENT)
    vllm = importlib.import_module("vllm")
    device = pick_device(workload)
    memory = PeakMemory(device)
    model = ModelConfig(path=workload.model, dtype=workload.dtype)
    config = Config(
        model=model,
        rollout=rollout_config(options, engine="vllm", **spec["settings"]["rollout"]),
        data=DataConfig(source="none", max_prompt_tokens=workload.prompt_tokens),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="kk")]),
    )
    stop_ids = set() if options["ignore_eos"] else set(spec["stop_ids"])
    engine = VLLMEngine(config, load_tokenizer(model), stop_token_ids=stop_ids)
    memory.reset()
    engine.generate(spec["prompts"], seed=workload.seed)
    started = time.perf_counter()
    groups = engine.generate(spec["prompts"], seed=workload.seed + 1)
    seconds = time.perf_counter() - started
    found = {name: getattr(engine.stats, name) for name in STATISTICS}
    lengths = [len(completion.token_ids) for group in groups for completion in group]
    found |= {"seconds": seconds, "lengths": lengths, "peak_memory_bytes": memory.peak_bytes()}
    return found | {"vllm": vllm.__version__}

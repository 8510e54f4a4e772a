"""Memory that runs out in real workers, and the line the user gets: who asked, the plan, settings that are less."""

from __future__ import annotations

import dataclasses
import json
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ray import cloudpickle

from infsample_rl.cluster.calls import what_was_raised
from infsample_rl.cluster.failures import Restarts
from infsample_rl.cluster.out_of_memory import KernelKills, explain, is_out_of_memory
from infsample_rl.config import (
    Config,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
)
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.worker import RolloutWorker
from infsample_rl.types import LossTotals, TrainingSample

CUDA = (  # torch 2.13's words
    "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.12 GiB is "
    "free. Including non-PyTorch "
    "memory, this process has 77.97 GiB memory in use."
)
RESPONSE_TOKENS = 3800


def config(model: Path, run_dir: Path, **rollout: object) -> Config:
    return Config(
        run=RunConfig(dir=str(run_dir)),
        model=ModelConfig(path=str(model)),
        data=DataConfig(source="rows.jsonl", max_prompt_tokens=64),
        rollout=RolloutConfig(**{"max_new_tokens": RESPONSE_TOKENS, **rollout}),
        objective=ObjectiveConfig(kl="none", kl_coef=0.0),
        learner=LearnerConfig(max_tokens_per_micro_batch=8192),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="kk")]),
    )


def travelled(error: Exception) -> Exception:
    """A worker's exception as the driver gets it."""
    return pickle.loads(cloudpickle.dumps(error))


def write_plan(run_dir: Path, role: str) -> None:
    lines = [
        {"name": "weights", "bytes": 2 * 10**9},
        {"name": "activations", "bytes": 6 * 10**9},
        {"name": "logits", "bytes": 10**8},
    ]
    (run_dir / "plan.json").write_text(
        json.dumps({"processes": [{"role": role, "lines": lines, "sum_bytes": 81 * 10**8}]})
    )


def test_a_learner_row_that_does_not_fit_names_phase_plan_and_settings(tiny_qwen3, tmp_path):
    settings = config(tiny_qwen3, tmp_path)
    write_plan(tmp_path, "learner")
    worker = LearnerWorker(settings, 0, 1, 10)
    worker.setup("", 0, None)
    ids = np.arange(RESPONSE_TOKENS, dtype=np.int32) % 250
    sample = TrainingSample(
        prompt_index=0,
        sample_index=0,
        prompt_ids=ids[:64],
        response_ids=ids,
        advantage=1.0,
        engine_logprobs=np.full(RESPONSE_TOKENS, -5.0, np.float32),
        reference_logprobs=None,
    )
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 8 * 2**20, before[1]))  # 8 MiB more than it has now
    try:
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            worker.accumulate([sample], LossTotals(num_sequences=1, num_tokens=RESPONSE_TOKENS, length_normalizer=1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    text = f"learner rank 0: {what_was_raised(travelled(raised.value))}"
    line = explain(text, settings)
    assert re.match(
        r"learner rank 0 ran out of memory( in phase \w+)?; it asked for [\d.]+ [KMG]B; the plan said 8.1 GB for it, ",
        line,
    )
    assert (
        "most of it activations 6 GB, weights 2 GB, logits 100 MB; set learner.max_tokens_per_micro_batch=4096, or "
        "learner.activation" in line
    )
    assert explain(line, settings) == line and "\n" not in line


def test_the_innermost_phase_travels_with_an_exception():
    with pytest.raises(RuntimeError) as raised, phase("outer"), phase("inner"):
        torch.empty(2**58)
    assert what_was_raised(travelled(raised.value)).endswith("; in phase inner")


def test_a_pool_that_does_not_fit_names_the_rollout_worker_and_a_smaller_one(tiny_qwen3, tmp_path):
    settings = config(tiny_qwen3, tmp_path, kv_budget_bytes="900000GB")
    with pytest.raises(RuntimeError) as raised:
        RolloutWorker(settings, 3)
    line = explain(f"rollout worker 3: {what_was_raised(travelled(raised.value))}", settings)
    assert line.startswith("rollout worker 3 ran out of memory; it asked for 900 TB; set")
    assert "; set rollout.kv_budget_bytes=450000000000000, or rollout.max_rows=8, or rollout.kv_dtype=int8" in line


def test_words_of_cuda_numpy_python_and_ray_are_understood(tmp_path):
    settings = config(Path("model"), tmp_path)
    said = explain(f"learner rank 1: {CUDA}; in phase optimizer", settings)
    assert said.startswith(
        "learner rank 1 ran out of memory in phase optimizer; it asked for 2.68 GB, 1.2 GB were free; set "
        "learner.optimizer="
    )
    with pytest.raises(MemoryError) as raised:
        np.empty(2**58)
    assert explain(f"reward worker 0: {what_was_raised(travelled(raised.value))}", settings).startswith(
        "reward worker 0 ran out of memory; it asked for 2"
    )
    assert explain(f"reference worker 0: {what_was_raised(MemoryError())}", settings).startswith(
        "reference worker 0 ran out of memory; set reference."
    )
    assert is_out_of_memory("its process died (Ray's memory monitor ended it: the node ran low on memory)")
    for other in ("learner rank 0: loss is nan", "rollout worker 1: its process died (Worker exit type: SYSTEM_ERROR)"):
        assert explain(other, settings) == other


@pytest.mark.parametrize("plan", [None, "[]", "{", '{"processes": []}', '{"processes": [{"role": "learner"}]}'])
def test_a_missing_or_damaged_plan_is_left_out(tmp_path, plan):
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    assert "the plan said" not in explain(f"learner rank 0: {CUDA}", config(Path("model"), tmp_path))


def test_advice_is_settings_that_the_run_does_not_have_and_that_are_allowed(tmp_path):
    least = LearnerConfig(
        max_tokens_per_micro_batch=3864,
        activation_checkpointing=1,
        logprob_chunk_tokens=256,
        optimizer="adamw_8bit",
        lora_rank=8,
    )
    settings = dataclasses.replace(config(Path("model"), tmp_path), learner=least)
    assert "; set " not in explain(f"learner rank 0: {CUDA}", settings)
    line = explain(
        f"learner rank 0: {CUDA}; in phase forward",
        dataclasses.replace(settings, learner=LearnerConfig(max_tokens_per_micro_batch=4000)),
    )
    assert "set learner.max_tokens_per_micro_batch=3864, or learner.activation_checkpointing=1" in line
    colocated = explain(f"learner rank 0: {CUDA}; in phase decode", settings)
    assert "set rollout.slots=2" in colocated


def test_a_worker_that_the_kernel_ended_is_told_apart_from_one_that_died(tmp_path):
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("pgfault 7\noom_kill 3\n")
    kills, died = KernelKills(vmstat), "rollout worker 0: its process died"
    assert kills.add_to(died) == died
    vmstat.write_text("pgfault 7\noom_kill 4\n")
    notes: list[str] = []
    restarts = Restarts(1, notes.append, lambda seconds: None, kills.add_to)
    restarts.begin("rollout worker 0", "its process died")
    assert notes == [
        "rollout worker 0: its process died; out of memory: the kernel's OOM killer has ended a process on the "
        "driver's machine; started again (restart 1 of at most 1 before a step is finished)"
    ]
    assert kills.add_to(died) == died and KernelKills(tmp_path / "none").add_to(died) == died


@pytest.mark.slow
def test_the_command_ends_with_the_line_and_exit_code_1(tiny_qwen3, sums_file, tmp_path):
    arguments = [
        f"model.path={tiny_qwen3}",
        f"data.source={sums_file}",
        "data.max_prompt_tokens=64",
        "reward.functions=[{name: gsm8k}]",
    ]
    arguments += [
        "rollout.max_new_tokens=16",
        "rollout.kv_budget_bytes=900000GB",
        "objective=no_kl",
        "run.eval_prompts=0",
        "logging.wandb=disabled",
    ]
    command = [sys.executable, "-m", "infsample_rl.main", *arguments, f"run.dir={tmp_path / 'run'}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(r"rollout worker [01] ran out of memory", line) and "set rollout.kv_budget_bytes=" in line

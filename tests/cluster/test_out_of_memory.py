"""Memory that runs out in real workers, and the line the user gets: who, the plan, settings that are less."""

from __future__ import annotations

import json
import pickle
import re
import resource
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch
from ray import cloudpickle

from infsample_rl.cluster.calls import what_was_raised
from infsample_rl.cluster.out_of_memory import LESS, explain, is_out_of_memory
from infsample_rl.config.loading import load_config
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.observe.phases import phase
from infsample_rl.types import LossTotals
from tests.tiny_models import training_sample

CUDA = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 79.10 GiB"  # torch 2.13's words
RESPONSE_TOKENS = 3800


def config(model: Path, run_dir: Path, *settings: str):
    return load_config(
        [
            f"run.dir={run_dir}",
            f"model.path={model}",
            "data.max_prompt_tokens=64",
            f"rollout.max_new_tokens={RESPONSE_TOKENS}",
            "learner.max_tokens_per_micro_batch=8192",
            "objective=no_kl",
            "cluster.learner_ranks=1",
            *settings,
        ]
    )


def travelled(error: Exception) -> Exception:
    """A worker's exception as the driver gets it."""
    return pickle.loads(cloudpickle.dumps(error))


def test_a_learner_row_that_does_not_fit_names_phase_plan_and_settings(tiny_qwen3, tmp_path):
    lines = [{"name": "weights", "bytes": 2 * 10**9}, {"name": "activations", "bytes": 6 * 10**9}]
    plan = {"processes": [{"role": "learner", "lines": lines, "sum_bytes": 81 * 10**8}]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    worker = LearnerWorker(config(tiny_qwen3, tmp_path), 0, 1, 10)
    worker.setup(None)
    ids = [index % 250 for index in range(RESPONSE_TOKENS)]
    sample = training_sample(0, ids[:64], ids)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 8 * 2**20, before[1]))  # 8 MiB more than it has now
    try:
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            worker.accumulate([sample], LossTotals(num_sequences=1, num_tokens=RESPONSE_TOKENS, length_normalizer=1))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    line = explain(f"learner rank 0: {what_was_raised(travelled(raised.value))}", str(tmp_path))
    assert re.match(
        r"learner rank 0 ran out of memory( in phase \w+)?; the plan said 8.10 GB for it, most of it ", line
    )
    assert f"activations 6.00 GB, weights 2.00 GB; take {LESS['learner']} (learner rank 0: " in line
    assert explain(line, str(tmp_path)) == line and "\n" not in line


def test_the_innermost_phase_travels_with_an_exception():
    with pytest.raises(RuntimeError) as raised, phase("outer"), phase("inner"):
        torch.empty(2**58)
    assert what_was_raised(travelled(raised.value)).endswith("; in phase inner")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            f"learner rank 1: {CUDA}; in phase optimizer",
            f"learner rank 1 {{}} in phase optimizer; take {LESS['learner']}",
        ),
        (f"learner rank 0: {CUDA}; in phase decode", f"learner rank 0 {{}} in phase decode; take {LESS['rollout']}"),
        ("reward worker 0: Unable to allocate 2.0 TiB", f"reward worker 0 {{}}; take {LESS['reward']}"),
        ("reference worker 0: MemoryError", f"reference worker 0 {{}}; take {LESS['reference']}"),
        ("[Errno 12] Cannot allocate memory", "the driver {}"),
        (
            f"every reward of 3 steps in a row failed: model:m: raised OutOfMemoryError: {CUDA} on prompt row 7",
            f"a reward function or model {{}}; take {LESS['reward']} (every reward of 3 steps",
        ),
        ("rollout worker 0: its process died (Ray ended it: the node ran low on memory)", "rollout worker 0 {}"),
    ],
)
def test_words_of_cuda_numpy_python_and_ray_are_understood(tmp_path, text, said):
    assert is_out_of_memory(text)
    assert explain(text, str(tmp_path)).startswith(said.format("ran out of memory"))


@pytest.mark.parametrize("text", ["learner rank 0: loss is nan", "rollout worker 1: its process died (SYSTEM_ERROR)"])
def test_other_failures_stay_as_they_are(tmp_path, text):
    assert explain(text, str(tmp_path)) == text


@pytest.mark.parametrize("plan", [None, "[]", "{", '{"processes": []}', '{"processes": [{"role": "learner"}]}'])
def test_a_missing_or_damaged_plan_is_left_out(tmp_path, plan):
    if plan is not None:
        (tmp_path / "plan.json").write_text(plan)
    assert "the plan said" not in explain(f"learner rank 0: {CUDA}", str(tmp_path))


@pytest.mark.slow
def test_the_command_ends_with_the_line_and_exit_code_1(tiny_run, tmp_path):
    machine = psutil.virtual_memory().total
    arguments = [*tiny_run, "rollout.slots=null", f"rollout.kv_budget_bytes={0.8 * machine:.0f}", "objective=no_kl"]
    command = [sys.executable, "-m", "infsample_rl.main", *arguments, f"run.dir={tmp_path / 'run'}"]
    limit = ["prlimit", f"--data={0.6 * machine:.0f}"]  # of each process
    done = subprocess.run([*limit, *command], capture_output=True, text=True, timeout=900, cwd=tmp_path)
    assert done.returncode == 1, done.stderr[-2000:]
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert (
        re.search(r"rollout worker [01] ran out of memory", line) and "take a smaller rollout.kv_budget_bytes" in line
    )

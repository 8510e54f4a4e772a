"""vLLM as the engine, by vLLM itself: the samples of the native engine, whatever decides when they decode."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infsample_rl.cluster.rollout_interpreter import MADE_HERE
from infsample_rl.cluster.worker_environment import allocator_environment
from infsample_rl.config import ModelConfig, RolloutConfig
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_sync.buckets import plan_weights, shapes_of, stream_buckets
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.engine.vllm_engine import VLLMEngine

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = Path(__file__).with_name("vllm_script.py")
POLICY = str(ROOT / "infsample_rl" / "assets" / "kk_tiny" / "policy")
# of a block and more, of whole blocks alone (64), of less than one
PROMPTS = [list(range(5, 75)), list(range(7, 71)), list(range(9, 21))]
PLAIN = {"group_size": 16, "max_new_tokens": 64}
WITHOUT = {"predictor": "none"}
RUNS = {
    "preempted": ({**PLAIN, "kv_budget_tokens": 640}, {}),
    "eight rows": ({**PLAIN, "slots": 8, "schedule": "arrival"}, {}),
    "32 rows": ({**PLAIN, "slots": 32, "schedule": "arrival"}, {}),
    "64 rows": ({**PLAIN, "slots": 64, "schedule": "arrival"}, {}),
    "infinite": ({**PLAIN, "slots": 3, "schedule": "infinite", **WITHOUT}, {}),
    "naive": ({**PLAIN, "slots": 5, "schedule": "naive", "prompts_at_once": 1}, {}),
    "part of a group": (
        {**PLAIN, "slots": 4, "schedule": "lpt", **WITHOUT},
        {"sample_indices": [[3, 9], [0], [15, 2]]},
    ),
    "stop strings": ({**PLAIN, "slots": 4, "stop_strings": ["e", "kn"]}, {}),
    "truncated": ({**PLAIN, "kv_budget_tokens": 640, "top_p": 0.9, "top_k": 20, "temperature": 0.8}, {}),
    "banned": ({**PLAIN, "slots": 4, "bad_token_ids": [42, 54]}, {}),
    "greedy": ({**PLAIN, "slots": 4}, {"evaluation": True, "temperature": 0.0}),
    "evaluation": ({**PLAIN, "slots": 4, "schedule": "naive"}, {"evaluation": True, "temperature": 0.7}),
    "other weights": ({**PLAIN, "slots": 6}, {"weights": "OTHER"}),
}


def run_vllm(
    folder: Path,
    asked: list,
    *,
    policy: str = POLICY,
    environment: dict[str, str] | None = None,
    python: str | Path = MADE_HERE,
) -> dict:
    """What vllm_script.py finds."""
    assert Path(python).exists(), "make vllm makes the interpreter, which make test-all does before"
    command = [str(python), str(SCRIPT), policy, json.dumps(asked), str(folder / "found.json")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(environment or {})}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory) -> Path:
    """The policy, each weight a little larger or smaller."""
    folder = tmp_path_factory.mktemp("weights")
    model = load_model(ModelConfig(path=POLICY, dtype="float32"))
    for parameter in model.parameters():
        parameter.data.mul_(1.05)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory, other_weights) -> dict:
    asked = []
    for name, (settings, options) in RUNS.items():
        options = {**options, "prompts": PROMPTS}
        if "weights" in options:
            options["weights"] = str(other_weights)
        asked.append([name, settings, options])
    return run_vllm(tmp_path_factory.mktemp("vllm"), asked)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_every_sample_is_the_native_engines(found, other_weights, name):
    settings, options = RUNS[name]
    options = dict(options)
    weights = str(other_weights) if options.pop("weights", None) else POLICY
    model = load_model(ModelConfig(path=weights, dtype="float32"))
    engine = SamplingEngine(model, load_tokenizer(ModelConfig(path=POLICY)), RolloutConfig(**settings))
    groups, here = engine.generate(PROMPTS, seed=0, step=1, **options), found[name]
    assert here["tokens"] == [[sample.token_ids.tolist() for sample in group] for group in groups]
    assert here["reasons"] == [[sample.finish_reason for sample in group] for group in groups]
    for kind in ("logprobs", "sampling_logprobs"):
        for there, group in zip(here[kind], groups, strict=True):
            for one, sample in zip(there, group, strict=True):
                other = getattr(sample, kind)
                assert (one is None) == (other is None)
                assert one is None or np.abs(np.array(one) - other).max() < 1e-4
    assert here["versions"] == ([1] if "weights" in RUNS[name][1] else [0])


@pytest.mark.slow
def test_vllm_never_preempts_and_its_blocks_come_back(found):
    """VLLMLoop raises where it did: these are the pool and what was sent again."""
    preempted = found["preempted"]
    assert preempted["pages"] == 640 // 32 and preempted["preemptions"] > 3 and preempted["recomputed"] > 0
    for name, each in found.items():
        assert each["pages_held"] == 0 and each["cached"] > 0
        settings, options = RUNS[name]
        if settings.get("schedule", "token_budget") != "token_budget" and "evaluation" not in options:
            assert each["preemptions"] == each["recomputed"] == 0, name
    # the default budget has a block more for every slot, so that all of them can run
    shapes = {name: each["pages"] for name, each in found.items()}
    assert shapes["64 rows"] > shapes["32 rows"] > shapes["eight rows"]


@pytest.mark.slow
def test_a_model_split_over_two_processes_gives_the_same_samples(found, tmp_path, other_weights):
    options = {"prompts": PROMPTS, "weights": str(other_weights)}
    settings = {**PLAIN, "slots": 6, "tensor_parallel": 2}
    split = run_vllm(tmp_path, [["split", settings, options]])["split"]
    assert split["tokens"] == found["other weights"]["tokens"]


class Split:
    """vLLM in several processes, as far as weights go."""

    llm_engine = SimpleNamespace(has_unfinished_requests=lambda: False)

    def collective_rpc(self, name: str, args: tuple[str]) -> None:
        code = (
            "import os, sys\nfrom safetensors.torch import load_file\n"
            "print(os.stat(sys.argv[1]).st_nlink, load_file(sys.argv[1]))"
        )
        self.asked = name
        self.found = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True).stdout

    def reset_prefix_cache(self) -> None:
        pass


def test_weights_on_their_way_to_several_processes_are_in_no_folder_that_a_kill_would_leave():
    named = [("a", torch.arange(3.0)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))]
    engine, vllm = VLLMEngine.__new__(VLLMEngine), Split()
    engine._llm, engine._rests, engine.config = vllm, False, RolloutConfig(engine="vllm", tensor_parallel=2)
    manifest = plan_weights(shapes_of(named), 1, 2**16)
    engine.load({}, manifest, stream_buckets(named, manifest))
    assert vllm.asked == "load_file" and vllm.found.split(maxsplit=1) == ["0", f"{dict(named)}\n"]


@pytest.mark.slow
def test_between_turns_it_samples_nothing_and_then_with_the_weights_that_came(found, tmp_path, other_weights):
    options = {"prompts": PROMPTS, "weights": str(other_weights), "turns": True}
    turns = run_vllm(tmp_path, [["turns", {**PLAIN, "slots": 6}, options]])["turns"]
    assert "none have come since" in turns["refused"]
    assert turns["broken"] == "weights did not all reach vLLM: division by zero"
    assert turns["tokens"][0] != turns["tokens"][1] == found["other weights"]["tokens"]


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory) -> tuple[Path, int]:
    """A model whose weights can be told from all else that a process holds, and their bytes in float32."""
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=512, hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, num_attention_heads=16,
            num_key_value_heads=16, head_dim=64, max_position_embeddings=1024,
        )
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    load_tokenizer(ModelConfig(path=POLICY)).save_pretrained(folder)
    return folder, sum(parameter.nbytes for parameter in model.parameters())


def check_that_turns_free(held: list[int], num_bytes: float) -> None:
    """As vllm_script.py's take_turns() tells of a start, and of two turns: awake and at rest."""
    started, *turns = held
    for awake, asleep in (turns[:2], turns[2:]):
        assert awake - started > num_bytes and awake - asleep > num_bytes


WIDE = {"group_size": 16, "max_new_tokens": 32, "kv_budget_tokens": 2048}


@pytest.mark.slow
def test_between_turns_it_holds_neither_weights_nor_kv(tmp_path, wide_model):
    """With the allocator that a run gives it."""
    folder, weights = wide_model
    options = {"prompts": PROMPTS, "weights": str(folder), "turns": True}
    environment = allocator_environment("rollout", 0)
    found = run_vllm(tmp_path, [["turns", WIDE, options]], policy=str(folder), environment=environment)["turns"]
    check_that_turns_free(found["held"], 0.9 * weights)


@pytest.mark.gpu
def test_between_turns_the_gpu_is_the_learners(tmp_path, wide_model):
    folder, weights = wide_model
    torch.cuda.mem_get_info()
    pytest.importorskip("vllm")
    options = {"prompts": PROMPTS, "weights": str(folder), "turns": True}
    asked = [["turns", {**WIDE, "kv_budget_tokens": 65536}, options]]
    found = run_vllm(tmp_path, asked, policy=str(folder), python=sys.executable)["turns"]
    pool = 65536 * 2 * 2 * 1024 * 4  # keys and values, of two bytes, of 16 heads of 64, in four layers
    check_that_turns_free(found["held"], 0.9 * (weights / 2 + pool))
    assert found["tokens"][0] == found["tokens"][1] and "none have come since" in found["refused"]

"""Roofline, fit and row counts of the benchmarks, with the expected values written out."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import memory, models, process, rival_settings, vllm_point
from benchmarks.engine import (
    EngineBenchmark,
    EngineOptions,
    fit_step_time,
    kv_bytes_read,
    ours_measurements,
    record_of,
    roofline_seconds,
)
from benchmarks.memory import MemoryOptions, points
from benchmarks.rival_settings import micro_batch_rows, on_vllm, rival_measurements
from benchmarks.workload import Workload
from infsample_rl.cluster.rollout_interpreter import MADE_HERE
from infsample_rl.rollout.schedule.kv_budget import num_pool_pages

FACTS = {"kv_bytes_per_token": 8, "device": "cpu", "prompts": [[1]], "stop_ids": []}
BLOCK_BYTES = 32 * 2048  # of 32 tokens of the default model


def test_kv_bytes_read_and_their_time_by_hand():
    # 3 steps x 10 prompt tokens; lengths 3 and 2 read 0 + 1 + 2 and 0 + 1 earlier response tokens; 4 bytes each
    assert kv_bytes_read([3, 2], running_steps=3, prompt_tokens=10, kv_bytes_per_token=4) == 4 * (30 + 3 + 1)
    assert roofline_seconds(running_steps=10, weight_bytes_read=100, kv_bytes=500, bandwidth=1000.0) == 1.5


def test_step_time_is_fitted_by_least_squares():
    c0, c1 = fit_step_time({1: 0.012, 2: 0.014, 4: 0.018, 8: 0.026})
    assert (c0, c1) == (pytest.approx(0.010), pytest.approx(0.002))
    with pytest.raises(ValueError, match="two different counts"):
        fit_step_time({4: 1.0})


@pytest.mark.parametrize(
    ("budget", "row", "group", "rows"),
    [
        (612, 228, 32, 2),  # 2 rows fit
        (4196, 228, 32, 16),  # 18 fit, so two batches, of 16 each
        (228, 228, 32, 1),
        (100, 228, 32, 1),  # never none
        (100000, 228, 32, 32),
    ],
)
def test_micro_batches_are_as_few_as_the_budget_allows_and_even(budget, row, group, rows):
    assert micro_batch_rows(budget, row, group) == rows


def test_every_rival_runs_at_its_best_and_at_equal_kv():
    options = EngineOptions(vllm_python="python", group_size=32, slots=4, max_new_tokens=128, prompt_tokens=100)
    found = {each.name: each.variants for each in rival_measurements(options, FACTS | {"prompts": [[1]] * 2})}
    assert list(found) == [
        "generate",
        "generate/equal_kv",
        "generate_batch",
        "generate_batch/equal_kv",
        "vllm",
        "vllm/equal_kv",
    ]
    assert {variant["rows"] for variant in found["generate"]} == {32}
    assert {variant["rows"] for variant in found["generate/equal_kv"]} == {2}
    assert {variant["kv_tokens"] for variant in found["generate_batch/equal_kv"]} == {612}
    assert {variant["num_blocks"] for variant in found["vllm/equal_kv"]} == {19}  # 19 x 32 = 608 <= 612
    assert {variant["num_blocks"] for variant in found["vllm"]} == {2 * (4 + 32 * 5)}  # room for all, of each prompt
    tried = [(each["enforce_eager"], each["omp_bind"]) for each in found["vllm"]]
    assert tried == [(True, "auto"), (True, "nobind"), (False, "nobind")]
    options.vllm_variants = 1
    assert [len(each.variants) for each in rival_measurements(options, FACTS)][-2:] == [1, 1]


def test_our_schedules_on_vllm_have_the_blocks_that_it_has_by_itself(monkeypatch):
    settings = {"vllm_python": "python", "group_size": 32, "slots": 4, "max_new_tokens": 128, "prompt_tokens": 100}
    options = EngineOptions(engines=["native", "vllm"], schedules=["token_budget", "dynamic_slot", "lpt"], **settings)
    found = {each.name: each for each in on_vllm(options, FACTS)}
    assert list(found) == ["ours_on_vllm/token_budget", "ours_on_vllm/lpt"]
    assert {each.what for each in found.values()} == {"ours_on_vllm"}
    monkeypatch.setattr(rival_settings, "run_script", lambda command, spec, **limits: spec)
    *_, equal = rival_measurements(options, FACTS)
    alone = rival_settings.measure_vllm(asdict(options), equal.variants[0], FACTS)
    for variant in found["ours_on_vllm/token_budget"].variants:
        config = models.rollout_config(asdict(options), **variant["rollout"])
        pages = num_pool_pages(config, page_bytes=1, prompts=[options.prompt_tokens])
        assert pages == 19 == alone["num_blocks"] - 1  # it keeps one for itself
    assert alone["kv_pool_bytes"] == 19 * 32 * FACTS["kv_bytes_per_token"]


def test_every_prompt_has_its_tokens():
    options = EngineOptions(rivals=[], group_size=2, max_new_tokens=3, prompt_tokens=1)
    facts = FACTS | {"prompts": [[1]] * 4, "weight_bytes_read": 1, "bandwidth": 1.0, "versions": {}}
    raw = {"seconds": 1.0, "lengths": [3] * 8, "running_steps": 3, "peak_kv_bytes": 1, "peak_memory_bytes": 1}
    assert record_of("ours", options, facts, raw | {"kv_pool_bytes": 1})["tokens_equal"]


# A vLLM that decodes nothing, of which this process and one of its own hold more as they load than later.
LOADS = """
import subprocess, sys
MUCH = 300 << 20
HOLDS = f"import time; much = b'x' * {MUCH}; del much; print(flush=True); time.sleep(60)"

class LLM:
    def __init__(self, **options):
        self.llm_engine = self
        assert b"x" * MUCH
        subprocess.Popen([sys.executable, "-c", HOLDS], stdout=subprocess.PIPE).stdout.readline()
    def add_request(self, *request): pass
    def has_unfinished_requests(self): return False
    def get_metrics(self): return []

class SamplingParams:
    def __init__(self, **options): pass

class RequestOutputKind:
    FINAL_ONLY = 2

__version__ = "0"
"""


def test_the_peak_of_vllm_is_that_of_all_its_processes_after_loading(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text(LOADS)
    (tmp_path / "vllm" / "sampling_params.py").write_text("from vllm import RequestOutputKind")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    options = EngineOptions(vllm_python=sys.executable, group_size=2, max_new_tokens=3)
    settings = {"enforce_eager": True, "omp_bind": "nobind", "num_blocks": 4}
    found = rival_settings.measure_vllm(asdict(options), settings, FACTS)
    assert found["vllm"] == "0" and found["peak_memory_bytes"] < 200 << 20


def test_the_peak_of_our_schedules_on_vllm_is_that_after_loading(tiny_qwen3, monkeypatch):
    class Engine:
        stats = SimpleNamespace(**dict.fromkeys(vllm_point.STATISTICS, 0))

        def __init__(self, *config, stop_token_ids):
            assert b"x" * (300 << 20)

        def generate(self, prompts, *, seed):
            return []

    monkeypatch.setattr(vllm_point, "VLLMEngine", Engine)
    monkeypatch.setattr(vllm_point, "ENVIRONMENT", {})
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0"))
    options = EngineOptions(model=str(tiny_qwen3), threads=1, device="cpu")
    spec = {"workload": asdict(options), "settings": {"rollout": {}}, "prompts": [[1]], "stop_ids": []}
    assert vllm_point.main(spec)["peak_memory_bytes"] < 200 << 20


@pytest.mark.slow
def test_on_vllm_every_length_is_the_native_engines_and_vllm_by_itself_is_forced_to_them(tmp_path):
    assert MADE_HERE.exists(), "make vllm makes the interpreter, which make test-all does before"
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("A says B lies.", "B says so.")))
    options = EngineOptions(
        **{"engines": ["native", "vllm"], "schedules": ["token_budget"], "rivals": [], "vllm_python": str(MADE_HERE)},
        **{"rows": [], "ignore_eos": False, "max_new_tokens": 96, "group_size": 16, "threads": 1},
        prompts=str(prompts),
    )
    measuring = EngineBenchmark(options, str(tmp_path))
    (native,), (on_it,) = ours_measurements(options), on_vllm(options, measuring.facts)
    native = measuring.record(native, 0)
    found = measuring._measure(on_it.what, measuring.workload, on_it.variants[1])
    assert found["lengths"] == measuring.workload["lengths"] and sum(found["lengths"]) == native["tokens"]
    assert len(found["lengths"]) == 32 and options.prompt_tokens == max(map(len, measuring.facts["prompts"])) < 20
    eager = {"enforce_eager": True, "omp_bind": "nobind", "num_blocks": found["kv_pool_bytes"] // BLOCK_BYTES}
    alone = measuring._measure("vllm", measuring.workload, eager)
    assert sorted(alone["lengths"]) == sorted(found["lengths"])
    assert alone["kv_pool_bytes"] == found["kv_pool_bytes"]


@pytest.mark.parametrize(
    ("shape", "weights", "not_read", "kv_token"),
    [
        ("qwen3_1.7b", 3_441_149_952, 0, 114_688),  # tied: the head is read
        ("qwen3_8b", 16_381_470_720, 151936 * 4096 * 2, 147_456),  # an embedding that is not the head is not
    ],
)
def test_weight_and_kv_bytes_of_a_shape(shape, weights, not_read, kv_token):
    with torch.device("meta"):
        model = models.AutoModelForCausalLM.from_config(models.shape_config(shape), dtype=torch.bfloat16)
    assert (models.weight_bytes(model), models.weight_bytes_read(model)) == (weights, weights - not_read)
    assert models.kv_bytes_per_token(model) == kv_token


def test_prompts_differ_and_have_the_length_asked_for(tiny_qwen3):
    tokenizer = models.load_tokenizer(models.ModelConfig(path=str(tiny_qwen3)))
    for length in (5, 60, 300):
        prompts = models.make_prompts(Workload(prompt_tokens=length), tokenizer, 3)
        assert [len(prompt) for prompt in prompts] == [length] * 3
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert tokenizer.decode(prompts[0]).endswith("<|im_start|>assistant\n")


def test_generate_with_32_rows_comes_first_and_saved_share_is_of_it():
    options = MemoryOptions(groups=[8, 32, 64], slot_counts=[1], shape="qwen3_1.7b")
    asked = points(options)
    budget = options.schedule
    assert [(point["schedule"], point["group_size"], point["slots"]) for point in asked] == [
        *[(None, 32, None), (None, 8, None), ("full_group", 8, 8), ("full_group", 32, 32)],
        *[(budget, 8, 1), (budget, 32, 1), (budget, 64, 1)],
    ]
    raw = {"seconds": 2.0, "weight_bytes": 30, "kv_pool_bytes": 10}
    rival = memory.record_of(options, asked[0], raw | {"lengths": [3, 4], "peak_memory_bytes": 100}, [])
    ours = memory.record_of(options, asked[5], raw | {"lengths": [3, 4], "peak_memory_bytes": 45}, [rival])
    assert (ours["saved_share"], ours["rest_bytes"], ours["tokens_per_s"]) == (pytest.approx(0.55), 5, 3.5)


def test_one_point_that_fails_hides_no_other(capsys):
    def fails(earlier):
        raise RuntimeError("out of memory")

    asked = [("one", lambda earlier: {"n": 1}), ("two", fails), ("three", lambda earlier: {"n": len(earlier) + 1})]
    assert process.measure_points(asked, as_json=True) == ([{"n": 1}, {"n": 2}], True)
    captured = capsys.readouterr()
    assert captured.out == '{"n": 1}\n{"n": 2}\n' and "two failed: out of memory" in captured.err


MEASURES = """
import sys
from benchmarks.process import end_with_terminate, run_script
end_with_terminate()
hold = "import os, time; print(os.getpid(), file=open({path!r}, 'w'), flush=True); time.sleep(60)"
run_script([sys.executable, "-c", hold], {{}}, threads=1, timeout_s=60, environment={{}})
"""
HANGS = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print(1 << 30, file=open({path!r}, 'w'), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(("code", "status"), [(MEASURES, 143), (HANGS, -9)])
def test_a_command_is_ended_with_its_measurement_which_has_a_session_of_its_own(code, status, tmp_path):
    path = tmp_path / "process"
    command = [sys.executable, "-c", code.format(path=str(path))]
    running = subprocess.Popen(command, cwd=Path(__file__).parents[2], start_new_session=True)
    while not (path.exists() and path.read_text()):
        assert running.poll() is None
        time.sleep(0.05)
    process.terminate_group(running, wait_s=10.0 if status > 0 else 0.5)
    assert running.returncode == status and not Path("/proc", path.read_text().strip()).exists()


def test_a_process_is_ended_with_its_group_and_its_last_words_are_said(tmp_path):
    talks = [sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"]
    with pytest.raises(RuntimeError, match="status 3: the reason"):
        process.run_script(talks, {}, threads=1, timeout_s=20, environment={})
    child = (
        "import subprocess, sys, time; subprocess.Popen(['sleep', '61']); print('waiting', flush=True); time.sleep(60)"
    )
    with pytest.raises(RuntimeError, match="longer than timeout_s=1; last words: waiting"):
        process.run_script([sys.executable, "-c", child], {}, threads=1, timeout_s=1, environment={})

"""The benchmarks of engine and memory as a user runs them, on a tiny random model."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest

from benchmarks import engine, engine_point, figures, learner_memory, memory, rival_settings
from benchmarks.workload import Workload
from infsample_rl.config import ModelConfig
from infsample_rl.controller.step_records import PROMPT_CHARACTERS
from infsample_rl.model.loading import load_model

KEYS = ["name", "seconds", "tokens", "tokens_per_s", "running_steps"]
KEYS += ["peak_kv_bytes", "peak_memory_bytes", "roofline_fraction"]
KV_TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, float32
PNG = b"\x89PNG"
EAGER = {"enforce_eager": True, "omp_bind": "nobind"}


@pytest.fixture(scope="module")
def engine_records(tiny_qwen3, run_benchmark):
    """Two schedules, one of them with both kinds of preemption, and `generate` at G = 6, four slots, eight tokens."""
    sizes = ["group_size=6", "slots=4", "max_new_tokens=8", "prompt_tokens=16", "threads=1", "rows=[1,3]", "profile=6"]
    shown = [
        "schedules=[arrival,token_budget]",
        "preemptions=[auto,recompute]",
        "rivals=[generate]",
        "device=cpu",
        "repeats=1",
    ]
    said = run_benchmark("engine", f"model={tiny_qwen3}", *sizes, *shown, "json=true")
    return {record["name"]: record for record in map(json.loads, said.splitlines())}


@pytest.mark.slow
def test_every_measurement_is_one_json_object_of_equally_many_tokens(engine_records):
    ours = ["ours/arrival", "ours/token_budget", "ours/token_budget/recompute"]
    assert list(engine_records) == [*ours, "generate", "generate/equal_kv"]
    for record in engine_records.values():
        assert list(record)[: len(KEYS)] == KEYS and record["tokens_equal"]
        assert (record["tokens"], record["tokens_per_s"]) == (48, pytest.approx(48 / record["seconds"]))


@pytest.mark.slow
def test_steps_follow_from_the_rows(engine_records):
    steps = {name: record["running_steps"] for name, record in engine_records.items()}
    # who decodes its first token needs no page yet
    assert steps.pop("ours/token_budget") <= steps.pop("ours/token_budget/recompute") <= 16
    # 48 tokens of budget hold 2 rows of 24: 3 batches
    assert steps == {"ours/arrival": 16, "generate": 8, "generate/equal_kv": 24}


@pytest.mark.slow
def test_kv_stays_within_the_pool_and_the_pool_within_the_memory(engine_records):
    budget = (4 * 8 + 16) * KV_TOKEN
    for record in engine_records.values():
        assert record["kv_budget_bytes"] == budget
        assert record["peak_kv_bytes"] <= record["kv_pool_bytes"]
        assert record["peak_memory_bytes"] > record["kv_pool_bytes"]
    # the last token is never fed back
    assert engine_records["generate"]["peak_kv_bytes"] in (6 * 23 * KV_TOKEN, 6 * 24 * KV_TOKEN)
    assert engine_records["generate/equal_kv"]["peak_kv_bytes"] <= budget


def test_samples_that_drafts_change_are_told():
    hashes = {"ours/lpt/speculate=0": "a", "ours/lpt": "a", "ours/token_budget/speculate=0": "a", "generate": None}
    records = [{"name": name, "samples_sha256": text, "device": "cpu"} for name, text in hashes.items()]
    changed = {"name": "ours/token_budget", "samples_sha256": "b", "device": "cpu"}
    assert engine.other_samples(records) == [] and engine.other_samples([*records, changed]) == ["ours/token_budget"]


def test_an_engine_that_is_cut_says_what_it_measured(monkeypatch, capsys):
    class Cut:
        def __init__(self, options, scratch):
            self.facts = {"device": "cpu"}

        def record(self, measurement, number):
            if measurement.name == "ours/infinite":
                raise SystemExit(143)
            return {"name": measurement.name, "seconds": 1.0, "peak_memory_bytes": 7, "profile": None}

    monkeypatch.setattr(engine, "EngineBenchmark", Cut)
    with pytest.raises(SystemExit):
        engine.run(engine.EngineOptions(schedules=["token_budget", "infinite"], rivals=[], json=True))
    assert json.loads(capsys.readouterr().out)["name"] == "ours/token_budget"


def test_vllm_is_forced_to_the_lengths_at_which_stated_ends_ended_ours(tiny_qwen3, monkeypatch, tmp_path):
    monkeypatch.setattr(engine, "measure", lambda name, spec, **limits: engine_point.main(json.loads(json.dumps(spec))))
    sizes = {"group_size": 16, "slots": 16, "max_new_tokens": 24, "prompt_tokens": 16, "threads": 1, "device": "cpu"}
    options = engine.EngineOptions(
        model=str(tiny_qwen3), rivals=[], rows=[], ignore_eos=False, mean_tokens=4, schedules=["token_budget"], **sizes
    )
    measuring = engine.EngineBenchmark(options, str(tmp_path))
    (ours,) = engine.ours_measurements(options)
    record = measuring.record(ours, 0)
    lengths = measuring.workload["lengths"]
    assert len(lengths) == 16 and record["tokens"] == sum(lengths) < 16 * 12 and len(set(lengths)) > 3
    forced = {}
    monkeypatch.setattr(rival_settings, "run_script", lambda command, spec, **limits: forced.update(spec) or {})
    measuring._measure("vllm", measuring.workload | {"vllm_python": "python"}, {**EAGER, "num_blocks": 9})
    assert forced["lengths"] == lengths


@pytest.mark.gpu
def test_a_step_on_cuda_is_one_launch_without_syncs_and_allocations(run_benchmark):
    sizes = ["group_size=4", "slots=4", "max_new_tokens=8", "prompt_tokens=9", "rows=[]", "profile=6"]
    shown = ["schedules=[arrival]", "rivals=[]", "device=cuda", "dtype=bfloat16", "json=true"]
    found = json.loads(run_benchmark("engine", *sizes, *shown))["profile"]
    assert found["launches"] <= 2 and found["host_syncs"] == 0 and found["device_allocations"] == 0
    assert found["kernels"] > 20


@pytest.mark.parametrize("copies", [False, True])
def test_generate_batch_keeps_to_its_pool_and_to_the_token_count(tiny_qwen3, copies):
    workload = asdict(Workload(model=str(tiny_qwen3), slots=4, max_new_tokens=8, prompt_tokens=16, threads=1))
    workload |= {"group_size": 12, "ignore_eos": True}
    settings = {"page_size": 8, "scheduler": "fifo", "compile_level": 0, "cuda_graph": None, "safety_margin": 0.0}
    settings |= {"kv_bytes_per_token": KV_TOKEN, "copies": copies, "kv_tokens": 70}
    found = engine_point.main({"what": "generate_batch", "workload": workload, "settings": settings})
    assert found["lengths"] == [8] * 12
    assert found["kv_pool_bytes"] == 64 * KV_TOKEN  # 8 blocks of 8 tokens, of which 2 hold no sample
    assert found["running_steps"] >= 12 * 8 // 3  # every row reads a prompt of its own, so at most 3 rows at a time


@pytest.mark.slow
def test_memory_of_ours_has_pool_and_weights_apart_and_a_pool_that_is_flat_in_g(tiny_qwen3, run_benchmark, tmp_path):
    sizes = ["groups=[2,6]", "slots=[2]", "max_new_tokens=16", "prompt_tokens=16", "max_generate_group=1", "threads=1"]
    settings = ["mean_tokens=4", "schedule=arrival", "json=true", "device=cpu"]
    said = run_benchmark("memory", f"model={tiny_qwen3}", *sizes, *settings)
    records = [json.loads(line) for line in said.splitlines()]
    assert [(each["name"], each["group_size"], each["slots"]) for each in records] == [
        ("ours/arrival", 2, 2),
        ("ours/arrival", 6, 2),
    ]
    for record in records:
        assert record["peak_kv_bytes"] <= record["kv_pool_bytes"] == (2 * 16 + 16) * KV_TOKEN
        assert 2 * 16 < record["tokens"] <= (record["group_size"] + 2) * 16
        assert record["peak_memory_bytes"] == record["weight_bytes"] + record["kv_pool_bytes"] + record["rest_bytes"]
    assert figures.draw_memory(records, tmp_path / "figures").read_bytes()[:4] == PNG


@pytest.mark.parametrize("rows", [2, 6])
def test_memory_of_generate_grows_with_its_rows(tiny_qwen3, rows):
    spec = asdict(Workload(model=str(tiny_qwen3), max_new_tokens=8, prompt_tokens=16, threads=1))
    found = memory.measure_here(spec | {"group_size": rows, "slots": None, "schedule": None})
    # the last token is never fed back
    assert found["lengths"] == [8] * rows and found["kv_pool_bytes"] == rows * (16 + 7) * KV_TOKEN


@pytest.mark.parametrize("name", ["ours", "full batch"])
def test_an_update_of_either_side_has_every_token_and_weights_gradients_and_moments(tiny_qwen3, name):
    sizes = {"max_new_tokens": 8, "prompt_tokens": 16, "max_tokens_per_micro_batch": 32, "threads": 1}
    spec = asdict(learner_memory.LearnerMemoryOptions(model=str(tiny_qwen3), device="cpu", **sizes))
    found = learner_memory.measure_here(spec | {"name": name, "group_size": 4})
    assert found["tokens"] == 8 + 8 + 7 + 7 and found["passes"] == (2 if name == "ours" else 1)
    parameters = sum(parameter.numel() for parameter in load_model(ModelConfig(path=str(tiny_qwen3))).parameters())
    assert found["state_bytes"] >= 4 * 4 * parameters


@pytest.mark.parametrize(
    ("command", "argument", "said"),
    [
        (engine, "group_sise=4", "did you mean group_size=...? keys: model, shape,"),
        (engine, "rows=[4]", "at least two different counts"),
        (engine, "mean_tokens=4", "mean_tokens=4: ends are ignored; give ignore_eos=false"),
        (
            engine,
            "rivals.vllm_python=nowhere/python",
            "rivals.vllm_python=nowhere/python: there is no such interpreter",
        ),
        (engine, "prompts=a.jsonl", "prompts=a.jsonl: rivals inside transformers take one prompt; give rivals=[]"),
        (engine, "prompts=a.jsonl rivals=[]", "prompts=a.jsonl: must have a prompt in every line; give a run's"),
        (memory, "slots=[0]", "must be >= 1"),
    ],
)
def test_bad_arguments_end_with_one_line_and_status_2(command, argument, said, refused):
    assert said in refused(command.main, *argument.split())


def test_prompts_that_a_run_has_cut_are_refused_with_the_file_that_has_them_whole(tmp_path, refused):
    path = tmp_path / "samples.jsonl"
    for characters in (PROMPT_CHARACTERS - 1, PROMPT_CHARACTERS):
        path.write_text(json.dumps({"prompt": "a" * characters, "samples": [{"length": 1}]}) + "\n")
        if characters < PROMPT_CHARACTERS:
            assert engine.EngineOptions(prompts=str(path), rivals=[]).prompts == str(path)
    said = f"{path}: has only the last 400 characters of a prompt; give the run's completions.jsonl, which has all"
    assert said in refused(engine.main, f"prompts={path}", "rivals=[]")

"""The benchmark commands as a user runs them, on a tiny random model."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import measure
from benchmarks.workload import Workload
from infsample_rl.commands import measurements

ROOT = Path(__file__).resolve().parents[2]
BLOCKED = (
    "import sys, runpy; [sys.modules.__setitem__(name, None) for name in ('ray', 'hydra', 'omegaconf', 'deepspeed')];"
)
KEYS = [
    "name",
    "seconds",
    "tokens",
    "tokens_per_s",
    "running_steps",
    "peak_kv_bytes",
    "peak_memory_bytes",
    "roofline_fraction",
]
KV_TOKEN = 2 * 2 * 2 * 16 * 4  # keys and values, 2 layers, 2 heads of 16, float32


def run(command: str, *arguments: str, cwd: Path) -> subprocess.CompletedProcess:
    """`python -m benchmarks.COMMAND`, where ray, hydra, omegaconf and deepspeed cannot be imported."""
    code = (
        f"{BLOCKED} sys.argv[0] = 'x'; sys.path.insert(0, {str(ROOT)!r}); runpy.run_module('benchmarks.{command}', "
        "run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=cwd, timeout=200
    )


OURS_BY_BUDGET = ["ours/token_budget", "ours/token_budget/recompute"]
SHOWN = ["schedules=[arrival,token_budget]", "preemptions=[auto,recompute]", "rivals=[generate]"]


@pytest.fixture(scope="module")
def engine_records(tiny_qwen3, tmp_path_factory):
    """Two schedules, one of them with both kinds of preemption, and `generate` at G = 6, four slots, eight tokens."""
    sizes = ["group_size=6", "slots=4", "max_new_tokens=8", "prompt_tokens=16", "threads=1", "rows=[1,3]"]
    done = run("engine", f"model={tiny_qwen3}", *sizes, "json=true", *SHOWN, cwd=tmp_path_factory.mktemp("bench"))
    assert done.returncode == 0, done.stderr
    return {record["name"]: record for record in map(json.loads, done.stdout.splitlines())}


@pytest.mark.slow
def test_every_measurement_is_one_json_object_with_the_fixed_keys(engine_records):
    assert list(engine_records) == ["ours/arrival", *OURS_BY_BUDGET, "generate", "generate/equal_kv"]
    assert all(list(record)[: len(KEYS)] == KEYS for record in engine_records.values())


@pytest.mark.slow
def test_all_engines_sample_the_same_number_of_tokens(engine_records):
    assert {name: record["tokens"] for name, record in engine_records.items()} == dict.fromkeys(engine_records, 48)
    assert all(record["tokens_equal"] for record in engine_records.values())
    assert all(record["tokens_per_s"] == pytest.approx(48 / record["seconds"]) for record in engine_records.values())


@pytest.mark.slow
def test_steps_follow_from_the_rows(engine_records):
    steps = {name: record["running_steps"] for name, record in engine_records.items()}
    # who decodes its first token needs no page yet
    assert steps.pop("ours/token_budget") <= steps.pop("ours/token_budget/recompute") <= 16
    # 48 tokens of budget hold 2 rows of 24: 3 batches
    assert steps == {"ours/arrival": 16, "generate": 8, "generate/equal_kv": 24}


@pytest.mark.slow
def test_kv_stays_within_the_pool_and_the_budget_is_that_of_the_slots(engine_records):
    assert {record["kv_budget_bytes"] for record in engine_records.values()} == {(4 * 8 + 16) * KV_TOKEN}
    assert all(0 < record["peak_kv_bytes"] <= record["kv_pool_bytes"] for record in engine_records.values())
    # the last token is never fed back
    assert engine_records["generate"]["peak_kv_bytes"] in (6 * 23 * KV_TOKEN, 6 * 24 * KV_TOKEN)
    assert (
        engine_records["generate/equal_kv"]["peak_kv_bytes"] <= engine_records["generate/equal_kv"]["kv_budget_bytes"]
    )


@pytest.mark.slow
def test_memory_roofline_and_step_time_are_there(engine_records):
    for record in engine_records.values():
        assert record["peak_memory_bytes"] > 0 and 0 < record["roofline_fraction"] and record["bandwidth"] > 0
    ours = engine_records["ours/arrival"]
    assert ours["c0"] is not None and ours["c1"] is not None
    # none where the folder is in memory
    assert {name for name, record in engine_records.items() if record["c2"]} <= {"ours/token_budget"}
    assert set(ours["step_seconds"]) == {"1", "3"} == set(engine_records["generate"]["step_seconds"])
    assert [variant["settings"]["cache"] for variant in engine_records["generate"]["variants"]] == ["dynamic", "static"]


@pytest.mark.slow
def test_without_json_there_is_a_table_and_a_figure(engine_records, tmp_path, capsys):
    measurements.print_table(list(engine_records.values()), measurements.ENGINE_COLUMNS)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:2] == ["name", "s"] and [line.split()[0] for line in lines[1:]] == list(engine_records)
    assert measurements.draw_engine(list(engine_records.values()), tmp_path / "figures").read_bytes()[:4] == b"\x89PNG"


def test_generate_batch_keeps_to_its_pool_and_to_the_token_count(tiny_qwen3):
    workload = asdict(Workload(model=str(tiny_qwen3), slots=4, max_new_tokens=8, prompt_tokens=16, threads=1))
    workload |= {"group_size": 6, "prompts": 2, "ignore_eos": True, "repeats": 1}
    plain = {
        "page_size": 8,
        "scheduler": "fifo",
        "compile_level": 0,
        "cuda_graph": None,
        "safety_margin": 0.0,
        "kv_bytes_per_token": KV_TOKEN,
    }
    for copies in (False, True):
        found = measure.main(
            {"what": "generate_batch", "workload": workload, "settings": plain | {"copies": copies, "kv_tokens": 70}}
        )
        assert found["lengths"] == [8] * 12
        assert found["kv_pool_bytes"] == 64 * KV_TOKEN  # 8 blocks of 8 tokens, of which 2 hold no sample
        assert found["running_steps"] >= 12 * 8 // 3  # every row reads a prompt of its own, so at most 3 rows at a time


@pytest.mark.slow
def test_memory_of_ours_has_pool_and_weights_apart_and_a_pool_that_is_flat_in_g(tiny_qwen3, tmp_path):
    sizes = [
        "groups=[2,6]",
        "slots=[2]",
        "max_new_tokens=16",
        "prompt_tokens=16",
        "max_generate_group=1",
        "threads=1",
        "mean_tokens=4",
    ]
    done = run("memory", f"model={tiny_qwen3}", *sizes, "schedule=arrival", "json=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(record["name"], record["group_size"], record["slots"]) for record in records] == [
        ("ours/arrival", 2, 2),
        ("ours/arrival", 6, 2),
    ]
    assert records[0]["kv_pool_bytes"] == records[1]["kv_pool_bytes"] == (2 * 16 + 16) * KV_TOKEN
    for record in records:
        assert record["tokens"] > 2 * 16 and record["peak_kv_bytes"] <= record["kv_pool_bytes"]
        assert record["peak_memory_bytes"] == record["weight_bytes"] + record["kv_pool_bytes"] + record["rest_bytes"]
    assert measurements.draw_memory(records, tmp_path / "figures").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_memory_of_generate_grows_with_its_rows(tiny_qwen3):
    workload = asdict(Workload(model=str(tiny_qwen3), max_new_tokens=8, prompt_tokens=16, threads=1)) | {
        "prompts": 1,
        "mean_tokens": 4,
    }
    for rows in (2, 6):
        settings = {"kind": "generate", "group_size": rows, "slots": None, "schedule": None}
        found = measure.main({"what": "memory", "workload": workload, "settings": settings})
        # the last token is never fed back
        assert found["lengths"] == [8] * rows and found["kv_pool_bytes"] == rows * (16 + 7) * KV_TOKEN


@pytest.mark.parametrize(
    ("command", "argument", "said"),
    [
        ("engine", "group_sise=4", "did you mean group_size=...? keys: model, shape,"),
        ("engine", "schedules=[sjff]", "did you mean sjf?"),
        ("engine", "rows=[4]", "at least two different counts"),
        ("memory", "slots=[0]", "must be >= 1"),
    ],
)
def test_bad_arguments_end_with_one_line_and_status_2(command, argument, said, tmp_path):
    done = run(command, argument, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and said in done.stderr and len(done.stderr.splitlines()) == 1

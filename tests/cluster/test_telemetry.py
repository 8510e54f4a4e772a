"""Metrics as Prometheus would scrape them from Ray's own endpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from infsample_rl.cluster.telemetry import METRICS

ROOT = Path(__file__).resolve().parents[2]
REWARD = """
def digits(prompts, completions, **columns):
    return [sum(c.isdigit() for c in text) / (1 + len(text)) for text in completions]
"""
SAMPLE = re.compile(r"^ray_infsample_rl_(\w+)\{(.*)\} (\S+)$")

EXPORTS = """
import json, os, sys, time, urllib.request
import ray
from infsample_rl.cluster import telemetry
from infsample_rl.observe.phases import phase

telemetry.EXPORT_S = 0.3
ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
tokens = 0

def statistics():
    global tokens
    tokens += 10
    return {"kv_pages": 64, "kv_pages_used": 48, "sampled_tokens": tokens, ("calls_in_flight", "reward"): 3}

exporter = telemetry.MetricsExporter(statistics, run="l\u00e4uf", role="rollout", worker=2)
exporter.count("restarts", label="rollout 1")
exporter.count("restarts", label="rollout 1")
exporter.observe("step_seconds", 2.0)
with phase("decode"):
    time.sleep(0.2)
print(telemetry.metrics_addresses()[0], flush=True)
sys.stdin.readline()
exporter.stop()
ray.shutdown()
print("stopped", flush=True)
"""


def scrape(address: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """name -> [(labels, value)] of our metrics."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for line in urllib.request.urlopen(address, timeout=10).read().decode().splitlines():
        match = SAMPLE.match(line)
        if match:
            found.setdefault(match[1], []).append((dict(re.findall(r'(\w+)="([^"]*)"', match[2])), float(match[3])))
    return found


def phases_in(seen: dict[str, list[tuple[dict[str, str], float]]]) -> set[str]:
    return {labels["phase"] for labels, _ in seen.get("phase_seconds_total", [])}


def workers_in(seen: dict[str, list[tuple[dict[str, str], float]]]) -> set[str]:
    return {labels["worker"] for labels, _ in seen.get("kv_pages", [])}


def wait_for(
    address: str, names: set[str], phases: set[str], timeout_s: float, workers: frozenset[str] = frozenset()
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Samples seen until every name and phase was, and `workers` of kv_pages at once: workers export one after
    another."""
    seen: dict[str, list[tuple[dict[str, str], float]]] = {}
    end = time.monotonic() + timeout_s
    while (
        missing := (names - seen.keys())
        | (phases - phases_in(seen))
        | {f"kv_pages of {worker}" for worker in workers - workers_in(seen)}
    ):
        assert time.monotonic() < end, f"missing: {sorted(missing)}"
        try:
            seen |= scrape(address)
        except OSError:
            pass  # the agent has not started to serve, or a run has just ended
        time.sleep(0.2)
    return seen


@pytest.mark.slow
def test_what_a_process_exports_is_scraped_with_its_labels():
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_metrics_report_interval_ms": "1000"}
    process = subprocess.Popen(
        [sys.executable, "-c", EXPORTS],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        cwd=ROOT,
    )
    try:
        address = process.stdout.readline().strip()
        names = {
            "kv_pages",
            "kv_pages_used",
            "calls_in_flight",
            "sampled_tokens_total",
            "restarts_total",
            "phase_seconds_total",
        }
        names |= {"step_seconds_bucket"}
        found = wait_for(address, names, {"decode"}, 120)
        process.communicate("\n", timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0
    labels, value = found["kv_pages_used"][0]
    assert value == 48 and (labels["role"], labels["worker"]) == ("rollout", "2")
    assert labels["run"] == r"l\\xe4uf"  # the backslash escaped, as Prometheus writes it
    assert found["calls_in_flight"][0][0]["stage"] == "reward" and found["calls_in_flight"][0][1] == 3
    assert [(labels["part"], value) for labels, value in found["restarts_total"]] == [("rollout 1", 2)]
    assert found["sampled_tokens_total"][0][1] % 10 == 0, "a sum since the start stays one"
    assert [labels["phase"] for labels, _ in found["phase_seconds_total"]] == ["decode"]


def test_every_metric_is_in_the_docs_with_its_kind():
    rows = re.findall(
        r"^\| `(\w+)` \| (gauge|counter|histogram) \|", (ROOT / "docs" / "observability.md").read_text(), re.MULTILINE
    )
    assert dict(rows) == {name: kind for name, (kind, _, _) in METRICS.items()}


@pytest.mark.slow
def test_a_run_is_seen_from_outside_while_it_runs_and_its_trace_afterwards(tiny_qwen3, sums_file, tmp_path):
    reward = tmp_path / "my_rewards.py"
    reward.write_text(REWARD)
    folder = tmp_path / "run"
    arguments = [
        f"model.path={tiny_qwen3}",
        f"data.source={sums_file}",
        "data.eval_source=null",
        "data.max_prompt_tokens=64",
        f"reward.functions=[{{name: '{reward}:digits'}}]",
        "objective=default",
        "data.prompts_per_step=4",
        "rollout.group_size=8",
        "rollout.slots=2",
        "rollout.max_new_tokens=96",
        "learner.max_tokens_per_micro_batch=256",
        "learner.warmup_steps=0",
        "run.steps=40",
        "cluster.rollout_workers=2",
        "cluster.learner_ranks=2",
        f"run.dir={folder}",
        "logging.wandb=offline",
    ]
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_metrics_report_interval_ms": "1000"}
    command = [sys.executable, "-m", "infsample_rl.main", *arguments]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )
    lines: list[str] = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("metrics: "):
                break
        assert lines and lines[-1].startswith("metrics: http://"), "".join(lines[-20:])
        reader = threading.Thread(target=lambda: lines.extend(process.stdout), daemon=True)
        reader.start()
        names = {
            "kv_pages",
            "rows",
            "sampled_tokens_total",
            "micro_groups_yielded_total",
            "micro_groups_arrived_total",
            "learner_rows_total",
        }
        names |= {
            "calls_in_flight",
            "driver_busy_seconds_total",
            "step_seconds_count",
            "object_store_bytes_total",
            "phase_seconds_total",
        }
        phases = {"decode", "reward", "reference", "forward", "backward"}
        found = wait_for(lines[-1].split()[1].rstrip(","), names, phases, 300, frozenset({"0", "1"}))
        assert process.wait(timeout=300) == 0, "".join(lines[-20:])
    finally:
        process.kill()
    assert {labels["worker"] for labels, _ in found["kv_pages"]} == {"0", "1"}
    events = json.loads((folder / "trace.json").read_text())
    processes = {
        event["pid"]: event["args"]["name"].split(" on ")[0] for event in events if event["name"] == "process_name"
    }
    assert set(processes.values()) == {
        "driver",
        "rollout 0",
        "rollout 1",
        "reward 0",
        "reference 0",
        "learner 0",
        "learner 1",
    }
    shown = {(processes[event["pid"]].split()[0], event["name"]) for event in events if event["ph"] == "X"}
    assert shown >= {
        ("rollout", "decode"),
        ("rollout", "prefill"),
        ("rollout", "sync"),
        ("reward", "reward"),
    }
    assert shown >= {
        ("reference", "reference"),
        ("learner", "forward"),
        ("learner", "backward"),
        ("learner", "optimizer"),
        ("driver", "sample"),
    }
    assert len({event["args"]["step"] for event in events if event["ph"] == "X"}) == 20, (
        "the newest that trace.json keeps"
    )
    wandb = next((folder / "wandb").glob("offline-run-*/*.wandb")).read_bytes()
    assert b"proc.memory.rssMB" in wandb, "system metrics of the machine the driver is on"

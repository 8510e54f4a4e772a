"""Imports point one way, and what a GPU image may lack is never needed by engine and learner."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "infsample_rl"
STAGES = ("rollout", "reward", "reference", "learner")


def imports(path: Path) -> set[str]:
    """Full names of everything a file imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


FILES = {path.relative_to(PACKAGE).as_posix(): imports(path) for path in sorted(PACKAGE.rglob("*.py"))}


def importers_of(prefix: str) -> set[str]:
    return {name for name, found in FILES.items() if any(item == prefix or item.startswith(prefix + ".") for item in found)}


def test_only_the_cluster_its_session_and_its_actors_import_ray():
    benchmark = {"bench/fake_actors.py", "bench/scale_point.py"}
    asking = {"asking.py", "in_flight.py", "ray_calls.py", "rollout_streams.py", "traffic.py", "watchdog.py", "weight_delivery.py"}
    with_ray = {"actors.py", "cluster.py", "ray_connection.py", "ray_session.py", "telemetry.py"} | asking
    assert importers_of("ray") - benchmark == with_ray


def test_only_config_loading_imports_hydra_and_omegaconf():
    assert importers_of("hydra") | importers_of("omegaconf") == {"config_loading.py"}


@pytest.mark.parametrize("stage", STAGES)
def test_stages_never_import_each_other(stage):
    others = {f"infsample_rl.{other}" for other in STAGES if other != stage}
    wrong = {
        name: item for name, found in FILES.items() if name.startswith(stage + "/") for item in found if any(item.startswith(o + ".") for o in others)
    }
    assert wrong == {}


def test_the_plan_starts_nothing():
    above = tuple(f"infsample_rl.{name}." for name in ("driver", "cluster", "actors", "startup", "bench"))
    wrong = {name: item for name, found in FILES.items() if name.startswith("plan/") for item in found if item.startswith(above)}
    assert wrong == {}


def test_conversions_and_the_commands_after_training_start_no_cluster():
    """They read settings, engine and learner; Ray and the driver are for runs."""
    after = [name for name in FILES if name.startswith("convert/") or name in ("evaluate.py", "chat.py", "replay.py", "run_settings.py")]
    forbidden = ("infsample_rl.cluster", "infsample_rl.driver", "infsample_rl.actors", "infsample_rl.startup", "ray")
    assert {name: item for name in after for item in FILES[name] if item.startswith(forbidden)} == {}


def test_nothing_imports_the_driver_but_main_and_its_async_kind():
    assert importers_of("infsample_rl.driver") - {"bench/scale_point.py"} == {"main.py", "async_driver.py"}


def test_only_the_logger_imports_the_report():
    assert {name for name in importers_of("infsample_rl.report") if not name.startswith("report/")} == {"metrics.py"}


def test_stages_model_and_types_know_nothing_above_them():
    with_ray = (
        "actors",
        "asking",
        "cluster",
        "in_flight",
        "ray_calls",
        "ray_connection",
        "ray_session",
        "rollout_streams",
        "telemetry",
        "traffic",
        "weight_delivery",
    )
    driving = ("driver", "groups", "waves", "startup", "keeping", "main", "metrics", "summary", "timeline", "report", "sample_records", "plan")
    above = {f"infsample_rl.{name}" for name in (*with_ray, *driving)}
    below = [name for name in FILES if name.split("/")[0] in (*STAGES, "model", "weight_sync", "data") or name in ("types.py", "config.py")]
    wrong = {name: item for name in below for item in FILES[name] if any(item == a or item.startswith(a + ".") for a in above)}
    assert wrong == {}


@pytest.mark.parametrize(
    "pure",
    [
        "config.py",
        "types.py",
        "placement.py",
        "plan/process_plan.py",
        "groups.py",
        "arrivals.py",
        "chaos.py",
        "checksums.py",
        "crew.py",
        "dealing.py",
        "failures.py",
        "interruption.py",
        "metric_names.py",
        "phases.py",
        "critical_path.py",
        "timeline.py",
        "health.py",
        "health_rules.py",
        "out_of_memory.py",
        "logging_outputs/live_view.py",
        "logging_outputs/trace.py",
        *(name for name in FILES if name.startswith("report/")),
        "config_cluster.py",
        "config_fields.py",
        "config_learner.py",
        "config_reward.py",
        "config_rollout.py",
        "config_secrets.py",
        "config_unread.py",
        "convert/conversion.py",
        "convert/python_script.py",
        "convert/scalars.py",
        "convert/shell.py",
        "convert/trl.py",
        "convert/verl.py",
        "convert/openrlhf.py",
        "pass_at_k.py",
        "reward/peer_forms.py",
        "secret_env.py",
        "shared_files.py",
        "simulate.py",
        "rollout/schedule.py",
        "rollout/fast_forward.py",
        "rollout/optimum.py",
        "rollout/simulator.py",
        "rollout/simulator_arguments.py",
        "model/hub.py",
        "rollout/length_prediction/recordings.py",
        "rollout/kv_pool.py",
        "learner/row_plan.py",
        "learner/advantage.py",
        "weight_sync/transport.py",
        "learner/overlong.py",
    ],
)
def test_pure_files_have_no_tensors(pure):
    assert {item for item in FILES[pure] if item.split(".")[0] in ("torch", "transformers")} == set()


def test_engine_and_learner_import_without_ray_hydra_omegaconf_and_deepspeed():
    block = "import sys; [sys.modules.__setitem__(name, None) for name in ('ray', 'hydra', 'omegaconf', 'deepspeed')];"
    code = block + "import infsample_rl.rollout.worker, infsample_rl.learner.worker, infsample_rl.reference.worker, infsample_rl.reward.worker"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)

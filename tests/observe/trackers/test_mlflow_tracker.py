"""What MLflow is given, read back from its own store; the real library, where it is installed."""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

from infsample_rl.config.loading import load_config
from infsample_rl.controller.checks import prepare
from infsample_rl.controller.inputs import read_inputs
from infsample_rl.observe.trackers.mlflow_tracker import LONGEST_NAME, mlflow_name

needs_mlflow = pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="pip install -e .[mlflow]")


@pytest.fixture(autouse=True)
def own_patience(monkeypatch):
    """The tracker sets defaults in the environment; other tests do not see them."""
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, os.environ.get(name, "1"))


def test_without_mlflow_the_setting_is_refused_in_one_line_before_anything_is_written(log_run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        ValueError,
        match=r"logging.mlflow=sqlite:///x.db needs MLflow, which is not installed: pip install -e .\[mlflow\]",
    ):
        log_run(tmp_path / "run", range(1, 2), mlflow="sqlite:///x.db")
    assert not (tmp_path / "run").exists()


NAMES = {  # as they are reported: as MLflow takes them
    "eval/pass@1": "eval/pass_at_1",
    "reward/f/acc%": "reward/f/acc_",
    "reward/f/len(chars)": "reward/f/len_chars_",
    "reward/f/a=b": "reward/f/a_b",
    "reward/f//../": "reward/f/_/_/_",
    "reward/f/größe 1.5-x": "reward/f/größe 1.5-x",
    f"reward/f/{300 * 'x'}": f"reward/f/{300 * 'x'}"[:LONGEST_NAME],
}


def test_a_reported_name_is_changed_to_one_that_mlflow_takes():
    assert {name: mlflow_name(name) for name in NAMES} == NAMES


@needs_mlflow
def test_metrics_settings_and_samples_arrive_and_a_resumed_run_goes_on(log_run, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)  # MLflow puts artifacts of a local store beside it
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log_run(tmp_path / "run", range(1, 4), mlflow=uri)
    run_id = (tmp_path / "run" / "mlflow_id").read_text().strip()
    client = MlflowClient(tracking_uri=uri)
    assert {file.path for file in client.list_artifacts(run_id)} == {"config.yaml"}
    log_run(tmp_path / "run", range(3, 5), start_step=2, mlflow=uri, failed=True, upload_completions=True)
    (run,) = client.search_runs([client.get_experiment_by_name("infsample_rl").experiment_id])
    assert (
        run.info.run_id == run_id == (tmp_path / "run" / "mlflow_id").read_text().strip()
        and run.info.status == "FAILED"
    )
    points = {(point.step, point.value) for point in client.get_metric_history(run_id, "reward/mean")}
    assert points == {(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)}
    assert run.data.metrics["eval/pass_at_1"] == 0.5 and run.data.params["run.name"] == "tiny"
    assert {"config.yaml", "completions.jsonl"} <= {file.path for file in client.list_artifacts(run_id)}
    for name in NAMES:  # its own store refuses any other
        client.log_metric(run_id, mlflow_name(name), 1.0)


@needs_mlflow
def test_a_run_whose_files_cannot_be_stored_has_ended_all_the_same(log_run, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    def fail(*_: object) -> None:
        raise OSError("there is no such bucket")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(MlflowClient, "log_artifact", fail)
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    log_run(tmp_path / "run", range(1, 2), mlflow=uri)
    run_id = (tmp_path / "run" / "mlflow_id").read_text().strip()
    assert MlflowClient(tracking_uri=uri).get_run(run_id).info.status == "FINISHED"
    assert "there is no such bucket" in (tmp_path / "run" / "warnings.jsonl").read_text()


@needs_mlflow
def test_a_server_that_is_not_there_is_refused_at_start(log_run, tmp_path):
    with pytest.raises(ValueError, match="logging.mlflow=http://127.0.0.1:9 cannot be used: "):
        log_run(tmp_path / "run", range(1, 2), mlflow="http://127.0.0.1:9")


@needs_mlflow
def test_a_server_that_is_not_there_is_refused_before_there_is_a_run_folder(tmp_path):
    config = load_config([f"run.dir={tmp_path / 'run'}", "logging.mlflow=http://127.0.0.1:9"])
    with pytest.raises(ValueError, match="logging.mlflow=http://127.0.0.1:9 cannot be used: "):
        prepare(config, read_inputs(config))
    assert list(tmp_path.iterdir()) == []

"""MLflow: metrics, settings as parameters, and at the end config.yaml, the samples and the report as artifacts.

Written with MlflowClient, without MLflow's active run of the process:
https://mlflow.org/docs/latest/api_reference/python_api/mlflow.client.html
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infsample_rl.config import Config

if TYPE_CHECKING:
    from mlflow import MlflowClient

WITH_SAMPLES = ("completions.jsonl", "report.html")
LONGEST_NAME = 250  # characters of a metric
LONGEST_VALUE = 500  # characters of a parameter, what every version of its server takes
MOST_PARAMETERS = 100  # in a request
# its own would wait for minutes
PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def check_mlflow(uri: str) -> None:
    """ValueError, in one line, where MLflow is not installed."""
    if importlib.util.find_spec("mlflow") is None:
        raise ValueError(
            f"logging.mlflow={uri} needs MLflow, which is not installed: pip install -e .[mlflow], or leave "
            "logging.mlflow out"
        )


def reach_mlflow(uri: str) -> None:
    """ValueError, in one line, for a place that does not answer."""
    with _refused(uri):
        _client_of(uri).search_experiments(max_results=1)


class MlflowTracker:
    """A run of the experiment logging.wandb_project at the tracking URI logging.mlflow; its id is in run_dir/mlflow_id.

    Raises ValueError when the place cannot be reached at start.
    """

    name = "MLflow"

    def __init__(self, config: Config, run_dir: Path, kept_id: str | None) -> None:
        self.said: list[str] = []
        self._run_dir, self._uri = run_dir, str(config.logging.mlflow)
        self._uploads_completions = config.logging.upload_completions
        with _refused(self._uri):
            self._client = _client_of(self._uri)
            self._run_id = self._start(config, kept_id)
        self.place = f"MLflow: run {self._run_id} at {self._uri}"

    def _start(self, config: Config, run_id: str | None) -> str:
        from mlflow.entities import Param

        name = config.logging.wandb_project
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        run_id = self._client.create_run(experiment_id, run_name=config.run.name).info.run_id
        (self._run_dir / "mlflow_id").write_text(run_id + "\n", encoding="utf-8")
        sections = dataclasses.asdict(config).items()
        settings = {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}
        params = [Param(key, str(value)[:LONGEST_VALUE]) for key, value in settings.items()]
        for first in range(0, len(params), MOST_PARAMETERS):
            self._client.log_batch(run_id, params=params[first : first + MOST_PARAMETERS])
        return run_id

    def log(self, step: int, values: dict[str, float], samples: list[dict[str, Any]]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [Metric(mlflow_name(name), value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def rewind(self, step: int) -> None:
        """Points cannot be taken back: those of a step that is done again have the later time."""

    def close(self, *, failed: bool) -> None:
        self._client.set_terminated(self._run_id, "FAILED" if failed else "FINISHED")  # first: storing files may fail
        for name in ("config.yaml", *(WITH_SAMPLES if self._uploads_completions else ())):
            if (self._run_dir / name).exists():
                self._client.log_artifact(self._run_id, str(self._run_dir / name))


def _client_of(uri: str) -> MlflowClient:
    for name, value in PATIENCE.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient  # slow to import

    return MlflowClient(tracking_uri=uri)


@contextmanager
def _refused(uri: str) -> Iterator[None]:
    """What fails in it as one line."""
    try:
        yield
    except Exception as error:  # MLflow's own, requests', SQLAlchemy's: whatever it is, the place cannot be used
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ValueError(f"logging.mlflow={uri} cannot be used: {why}") from error


def mlflow_name(name: str) -> str:
    """The name as MLflow takes one: of few kinds of characters, and a path in which no part is empty, "." or "..".

    mlflow_name("eval/pass@1") -> "eval/pass_at_1"; mlflow_name("reward/f/acc%") -> "reward/f/acc_"
    """
    known = re.sub(r"[^\w.\-/ :]", "_", name.replace("@", "_at_"))
    return re.sub(r"(?<![^/])\.{0,2}(?![^/])", "_", known)[:LONGEST_NAME].rstrip("/.")

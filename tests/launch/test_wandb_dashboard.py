"""The team's W&B workspace is built from the table of metrics; nothing is saved here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from infsample_rl.observe.metric_names import METRICS

ROOT = Path(__file__).resolve().parents[2]
needs_workspaces = pytest.mark.skipif(
    importlib.util.find_spec("wandb_workspaces") is None, reason="pip install -e .[wandb-workspaces]"
)


@pytest.fixture(scope="module")
def dashboard():
    """launch/wandb_dashboard.py as a module."""
    spec = importlib.util.spec_from_file_location("wandb_dashboard", ROOT / "launch" / "wandb_dashboard.py")
    module = sys.modules["wandb_dashboard"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_overview_shows_metrics_that_exist(dashboard):
    assert [name for _, names in dashboard.OVERVIEW for name in names if name not in METRICS] == []


def test_without_the_package_one_line_says_what_to_install(dashboard, refused, monkeypatch):
    for name in (
        "wandb_workspaces",
        "wandb_workspaces.reports",
        "wandb_workspaces.reports.v2",
        "wandb_workspaces.workspaces",
    ):
        monkeypatch.setitem(sys.modules, name, None)
    assert refused(dashboard.main, "json=true").endswith("is not installed: pip install -e .[wandb-workspaces]")


@needs_workspaces
def test_every_metric_is_plotted_over_step(tmp_path):
    command = [sys.executable, ROOT / "launch" / "wandb_dashboard.py", "project=kk", "entity=team", "json=true"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    view = json.loads(done.stdout)
    sections = view["spec"]["section"]["panelBankConfig"]["sections"]
    panels = [panel["config"] for section in sections for panel in section["panels"]]
    plotted = {name for panel in panels for name in panel.get("metrics", [])}
    assert plotted == {name for name in METRICS if "<" not in name}
    assert (
        {panel["xAxis"] for panel in panels if "metrics" in panel}
        == {section["localPanelSettings"]["xAxis"] for section in sections}
        == {"step"}
    )
    assert (view["entity"], view["project"]) == ("team", "kk")

"""versions.json names what the run ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
from pathlib import Path

from infsample_rl.observe.versions import _commit, versions, write_versions

ROOT = Path(__file__).resolve().parents[2]


def test_versions_are_those_of_this_interpreter_and_machine(tmp_path):
    write_versions(tmp_path)
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found["python"] == platform.python_version() and found["torch"] == importlib.metadata.version("torch")
    assert found["cores"] == os.cpu_count() and found["memory_bytes"] > 1e8 and found == versions()


def test_the_commit_of_a_checkout_is_named_and_marked_when_files_differ(tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    assert _commit(tmp_path) is None
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert _commit(tmp_path) == head[:12]
    (tmp_path / "file").write_text("a")
    subprocess.run([*git, "add", "file"], check=True)
    assert _commit(tmp_path) == head[:12] + "+"

"""versions.json names what the run ran on."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform

from infsample_rl.observe.versions import versions, write_versions


def test_versions_are_those_of_this_interpreter_and_machine(tmp_path):
    write_versions(tmp_path)
    found = json.loads((tmp_path / "versions.json").read_text())
    assert found["python"] == platform.python_version() and found["torch"] == importlib.metadata.version("torch")
    assert found["cores"] == os.cpu_count() and found["memory_bytes"] > 1e8 and found == versions()

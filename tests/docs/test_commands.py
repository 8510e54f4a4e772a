"""Every command of README and docs runs, or says why it is not run; those that are not run still have settings that exist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import ROOT, blocks_of, pages, training_commands

from infsample_rl.config_loading import compose

PAGES = pages()
LONGEST_S = 540


def test_the_pages_have_commands_and_most_of_the_tutorial_is_run():
    blocks = {page.path.name: page.blocks for page in PAGES}
    assert {"README.md", "tutorial.md", "resume.md", "bigger_group.md"} <= set(blocks)
    assert sum(not block.reason for block in blocks["tutorial.md"]) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.stem)
def test_settings_in_the_commands_exist(page):
    for block in page.blocks:
        for arguments in training_commands(block):
            overrides = [argument for argument in arguments if "=" in argument]
            if "--config-dir" not in arguments:
                compose(overrides)  # raises for a name that is none, and for a value of the wrong type


def test_what_is_not_run_is_told_with_its_reason(tmp_path):
    text = "<!-- not run: needs a GPU -->\n```\npython -m infsample_rl.main x=1\n```\n\n```\na diagram\n```\ntext\n\n```\nmake run\n```\n"
    (tmp_path / "page.md").write_text(text)
    import pages as module

    module.ROOT, root = tmp_path, module.ROOT
    try:
        found = blocks_of(tmp_path / "page.md")
    finally:
        module.ROOT = root
    assert [(block.line, block.reason) for block in found] == [(2, "needs a GPU"), (11, "")]


@pytest.fixture(scope="session")
def checkout(tmp_path_factory) -> Path:
    """A copy of what commands read and write; the rest by links."""
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name == "docs":
            shutil.copytree(path, folder / "docs")
        elif path.name not in (".git", ".venv", ".venv-docs", "runs", "build"):
            (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", [page for page in PAGES if any(not block.reason for block in page.blocks)], ids=lambda page: page.path.stem)
def test_commands_of_a_page_run(page, checkout):
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RAY_AUTH_MODE": "disabled",
        "WANDB_MODE": "offline",
    }
    for block in page.blocks:
        if block.reason:
            continue
        command = ["bash", "-euo", "pipefail", "-c", block.text]
        done = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=LONGEST_S)
        assert done.returncode == 0, f"{block.name}\n{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"

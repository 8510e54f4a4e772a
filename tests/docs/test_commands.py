"""Every command of README and docs runs, or says why it is not run; those that are not run still have settings that
exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from infsample_rl.config.loading import compose, load_config

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:python|make|launch/\S+\.sh|\./\S+|infsample_rl|pip|docker|sbatch|kubectl|ray|wandb|head|cat|"
    r"export|\.|for|tensorboard) "
)
NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")


@dataclass
class Block:
    """A fenced block of shell commands."""

    page: str
    line: int
    text: str
    reason: str = ""  # why it is not run; "": it is

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass
class Page:
    """A page and its blocks of commands, which run in order in one folder."""

    path: Path
    blocks: list[Block] = field(default_factory=list)


def pages() -> list[Page]:
    """README, CONTRIBUTING and all pages of docs/ that have commands; docs/reference/ only repeats usage texts."""
    paths = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [Page(path, blocks_of(path)) for path in paths if path.parent.name != "reference"]
    return [page for page in found if page.blocks]


def blocks_of(path: Path) -> list[Block]:
    """The fenced blocks of a page whose first line is a command."""
    blocks, inside, started, reason, before = [], None, 0, "", ""
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.startswith("```") and inside is None:
            marked = NOT_RUN.search(before)
            inside, started, reason = [], number, marked[1] if marked else ""
        elif line.startswith("```"):
            text = "\n".join(inside)
            if COMMAND.match(text):
                blocks.append(Block(path.name, started, text + "\n", reason))
            inside = None
        elif inside is not None:
            inside.append(line)
        if line.strip():
            before = line
    return blocks


def training_commands(block: Block) -> list[list[str]]:
    """Arguments of every `python -m infsample_rl.main` of a block, as the shell would split them; placeholders such as
    FILE stay."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [
        line.split("infsample_rl.main", 1)[1]
        for line in lines
        if line.lstrip().startswith("python -m infsample_rl.main")
    ]
    return [[part for part in shlex.split(line, comments=True) if part != "..."] for line in found]


PAGES = pages()
LONGEST_S = 900  # of a block; on a quiet machine a run of these pages takes about a minute


def test_the_pages_have_commands_and_most_of_the_tutorial_is_run():
    blocks = {page.path.name: page.blocks for page in PAGES}
    assert {"README.md", "tutorial.md", "resume.md", "bigger_group.md"} <= set(blocks)
    assert sum(not block.reason for block in blocks["tutorial.md"]) >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.path.stem)
def test_settings_in_the_commands_exist(page):
    for block in page.blocks:
        for arguments in training_commands(block):
            # a loop's variable
            overrides = [argument for argument in arguments if "=" in argument and "$" not in argument]
            if not block.reason:
                load_config(overrides)  # also what contradicts each other
            elif "--config-dir" not in arguments:
                # raises for a name that is none, and for a value of the wrong type; paths are placeholders
                compose(overrides)


def test_no_two_pages_train_into_one_folder():
    """A run goes on where its folder's last one ended, and refuses other data: who follows both pages would meet
    that."""
    pages_of: dict[str, set[str]] = {}
    for page in PAGES:
        for arguments in (
            arguments for block in page.blocks if not block.reason for arguments in training_commands(block)
        ):
            for folder in (
                argument for argument in arguments if argument.startswith("run.dir=") and "$" not in argument
            ):
                pages_of.setdefault(folder, set()).add(page.path.name)
    assert len(pages_of) > 5 and {folder: pages for folder, pages in pages_of.items() if len(pages) > 1} == {}


def test_what_is_not_run_is_told_with_its_reason(tmp_path):
    text = (
        "<!-- not run: needs a GPU -->\n```\npython -m infsample_rl.main x=1\n```\n\n```\na "
        "diagram\n```\ntext\n\n```\nmake run\n```\n"
    )
    (tmp_path / "page.md").write_text(text)
    found = blocks_of(tmp_path / "page.md")
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
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(not block.reason for block in page.blocks)], ids=lambda page: page.path.stem
)
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
        with subprocess.Popen(
            command,
            cwd=checkout,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=LONGEST_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGTERM)  # the run ends its workers
                output, _ = process.communicate(timeout=60)
        assert process.returncode == 0, f"{block.name}\n{block.text}\n{output[-4000:]}"

"""The commands of README and docs, page by page, and why some of them are not run."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COMMAND = re.compile(
    r"^(?:[A-Z_]+=\S+ )*(?:python|make|launch/\S+\.sh|\./\S+|infsample_rl|pip|docker|sbatch|kubectl|ray|wandb|head|cat|export|\.|for|tensorboard) "
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
                blocks.append(Block(str(path.relative_to(ROOT)), started, text + "\n", reason))
            inside = None
        elif inside is not None:
            inside.append(line)
        if line.strip():
            before = line
    return blocks


def training_commands(block: Block) -> list[list[str]]:
    """Arguments of every `python -m infsample_rl.main` of a block, as the shell would split them; placeholders such as FILE stay."""
    lines = block.text.replace("\\\n", " ").splitlines()
    found = [line.split("infsample_rl.main", 1)[1] for line in lines if line.lstrip().startswith("python -m infsample_rl.main")]
    return [[part for part in shlex.split(line, comments=True) if part != "..."] for line in found]

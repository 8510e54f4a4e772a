"""Converts a file that a test writes, and composes what is printed as the README says."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert.__main__ import main
from infsample_rl.config.loading import load_config


class Converted:
    """What the command printed, and the checked Config it composes to."""

    def __init__(self, text, folder):
        experiment = folder / "mine" / "experiment" / "theirs.yaml"
        experiment.parent.mkdir(parents=True, exist_ok=True)
        experiment.write_text(text)
        self.text = text
        self.config = load_config(["+experiment=theirs"], str(folder / "mine"))

    def under(self, heading):
        """The comment lines below a heading, joined."""
        lines = self.text.split("\n")
        start = lines.index(f"# {heading}:") + 1 if f"# {heading}:" in lines else len(lines)
        found = [line for line in lines[start:] if line]
        return "\n".join(
            found[: next((index for index, line in enumerate(found) if not line.startswith("#   ")), len(found))]
        )


@pytest.fixture
def convert(tmp_path, capsys):
    """convert("trl", "file.yaml", text, *arguments) -> Converted; the command must end with 0."""

    def run(peer, name, text, *arguments):
        path = tmp_path / name
        path.write_text(text)
        code = main([peer, str(path), *arguments])
        printed = capsys.readouterr()
        assert code in (0, 3), printed.err
        return Converted(printed.out, tmp_path)

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """refused("trl", "file.yaml", text, *arguments) -> the one line it says, with exit code 2."""

    def run(peer, name, text, *arguments):
        path = tmp_path / name
        path.write_text(text)
        assert main([peer, str(path), *arguments]) == 2
        return capsys.readouterr().err.strip()

    return run

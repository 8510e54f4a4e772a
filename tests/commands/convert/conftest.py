"""Converts a file that a test writes, and composes what is printed as the README says."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert.__main__ import main
from infsample_rl.config.loading import load_config


class Converted:
    """The exit code, what the command printed, and the checked Config it composes to."""

    def __init__(self, code, printed, folder):
        experiment = folder / "mine" / "experiment" / "theirs.yaml"
        experiment.parent.mkdir(parents=True, exist_ok=True)
        experiment.write_text(printed.out)
        self.code, self.text, self.said = code, printed.out, printed.err
        self.config = load_config(["+experiment=theirs"], str(folder / "mine"))

    def has(self, expected):
        """The part of the Config that `expected` names, to compare with it."""
        parts = (name.split(".") for name in expected)
        return {f"{section}.{key}": getattr(getattr(self.config, section), key) for section, key in parts}

    def functions(self):
        """(file or rule, weight) of every reward function."""
        return [(entry.name.rpartition("/")[2], entry.weight) for entry in self.config.reward.functions]


@pytest.fixture
def convert(tmp_path, capsys):
    """convert("trl", "file.yaml", text, *arguments) -> Converted: 3 and the dropped on stderr, or 0 and nothing."""

    def run(peer, name, text, *arguments):
        (tmp_path / name).write_text(text)
        code = main([peer, str(tmp_path / name), *arguments])
        printed = capsys.readouterr()
        assert code in (0, 3), printed.err
        dropped = [line[2:] for line in printed.out.splitlines() if line.startswith("# not converted: ")]
        assert printed.err.splitlines() == dropped and code == (3 if dropped else 0)
        return Converted(code, printed, tmp_path)

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """refused("trl", "file.yaml", text, *arguments) -> the one line it says, with exit code 2."""

    def run(peer, name, text, *arguments):
        (tmp_path / name).write_text(text)
        assert main([peer, str(tmp_path / name), *arguments]) == 2
        *dropped, said = capsys.readouterr().err.strip().split("\n")
        assert all(line.startswith("not converted: ") for line in dropped)
        return said

    return run

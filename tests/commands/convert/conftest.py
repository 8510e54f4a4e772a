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

    def under(self, heading):
        """The comment lines below a heading, joined."""
        return self.text.partition(f"\n# {heading}:\n")[2].partition("\n\n")[0].strip()

    def values(self, *names):
        """Settings by their dotted names."""
        return tuple(getattr(getattr(self.config, section), key) for section, key in (n.split(".") for n in names))

    def has(self, expected):
        """The part of the Config that `expected` names, to compare with it."""
        return dict(zip(expected, self.values(*expected), strict=True))


@pytest.fixture
def convert(tmp_path, capsys):
    """convert("trl", "file.yaml", text, *arguments) -> Converted: 3 and the dropped on stderr, or 0 and nothing."""

    def run(peer, name, text, *arguments):
        (tmp_path / name).write_text(text)
        code = main([peer, str(tmp_path / name), *arguments])
        printed = capsys.readouterr()
        assert code in (0, 3), printed.err  # which of the two is told below
        found = Converted(code, printed, tmp_path)
        dropped = [found.under(heading) for heading in ("No equivalent here", "Unknown, not converted")]
        lines = [line.removeprefix("#   ") for text in dropped for line in text.split("\n") if line]
        assert found.said.splitlines() == [f"not converted: {line}" for line in lines]
        assert code == (3 if lines else 0)
        return found

    return run


@pytest.fixture
def refused(tmp_path, capsys):
    """refused("trl", "file.yaml", text, *arguments) -> the one line it says, with exit code 2."""

    def run(peer, name, text, *arguments):
        (tmp_path / name).write_text(text)
        assert main([peer, str(tmp_path / name), *arguments]) == 2
        said = capsys.readouterr().err.strip()
        assert "\n" not in said
        return said

    return run

"""python -m infsample_rl: the list of commands, and that each can be asked for help."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from infsample_rl import __version__
from infsample_rl.__main__ import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]


def test_the_commands_are_listed_on_one_screen(capsys):
    assert main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 24 and max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[2:]] == list(COMMANDS)


def test_the_version_is_told(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"infsample_rl {__version__}\n"


def test_a_command_that_does_not_exist_is_refused_with_those_that_do(capsys):
    assert main(["tran"]) == 2
    assert capsys.readouterr().err == f"error: tran is no command; there are {', '.join(COMMANDS)}\n"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_how_it_is_used(name, capsys):
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    own = {"train": "infsample_rl.main"} | {
        each: f"infsample_rl.{each}" for each in ("plan", "simulate", "chaos", "evaluate")
    }
    module = own.get(name, f"infsample_rl {name}")
    assert f"python -m {module}" in said


@pytest.mark.parametrize("name", ["simulate", "chaos", "evaluate", "plan"])
def test_commands_that_had_a_module_of_their_own_keep_its_name(name, tmp_path):
    command = [sys.executable, "-m", f"infsample_rl.{name}", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == 0 and f"infsample_rl.{name}" in done.stdout, done


def test_every_command_is_a_module_of_the_package():
    assert all(callable(import_module(module).main) for module, _ in COMMANDS.values())


def test_the_root_holds_at_most_eight_modules():
    assert len(list((ROOT / "infsample_rl").glob("*.py"))) <= 8

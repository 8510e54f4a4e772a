"""Arguments of the commands, their help, exit codes and errors."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from infsample_rl.config.command_line import option, parse, parse_with_settings, run_command, run_with_options


@dataclass(kw_only=True)
class Few:
    count: int = option(1, "a count", low=1)
    share: float = option(0.5, "a share")
    names: list[str] = option(["a"], "names", choices=("a", "b"))
    loud: bool = option(False, "loud")
    python: str | None = option(None, "a path", key="rivals.python")


def test_arguments_take_their_fields_types():
    found = parse(["count=3", "share=0.25", "names=[a, b]", "loud=true", "rivals.python=/bin/x"], Few)
    assert found == Few(count=3, share=0.25, names=["a", "b"], loud=True, python="/bin/x")
    assert parse(["names=b", "rivals.python=none"], Few) == Few(names=["b"])
    assert parse(["names=[]"], Few).names == []


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("cuont=3", "did you mean count=...? keys: count, share, names, loud, rivals.python"),
        ("count", "keys: count"),
        ("count=0", "must be >= 1; the nearest that works is 1"),
        ("count=two", "must be a whole number"),
        ("share=x", "must be a number"),
        ("loud=yes", "must be true or false"),
        ("names=[a,bb]", "did you mean b"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line_with_the_keys(argument, said):
    with pytest.raises(ValueError) as error:
        parse([argument], Few)
    assert said in str(error.value) and "keys: count" in str(error.value) and "\n" not in str(error.value)


def test_settings_of_a_run_are_left_for_hydra():
    assert parse_with_settings(["count=3", "run.steps=4", "+experiment=mine"], Few) == (
        Few(count=3),
        ["run.steps=4", "+experiment=mine"],
    )
    with pytest.raises(ValueError, match="'coutn' is not key=value"):
        parse_with_settings(["coutn", "run.steps=4"], Few)


@pytest.mark.parametrize(
    ("error", "status"),
    [(ValueError, 2), (UnicodeError, 2), (RuntimeError, 1), (FileNotFoundError, 1), (MemoryError, 1)],
)
def test_a_failure_is_one_line_and_its_exit_code(error, status, capsys):
    def fail(arguments: list[str]) -> int:
        raise error("what went\n  wrong")

    assert run_command(fail, ["count=3"], usage="how") == status
    assert capsys.readouterr().err == "error: what went wrong\n"


def test_a_misspelt_argument_is_not_taken_for_a_setting():
    with pytest.raises(ValueError, match="cuont is no argument; did you mean count=...?"):
        parse_with_settings(["cuont=3"], Few)
    assert parse_with_settings(["data.count=3", "model=x"], Few) == (Few(), ["data.count=3", "model=x"])


def test_what_is_no_failure_of_a_user_is_raised():
    with pytest.raises(KeyError):
        run_command(lambda arguments: {}["x"], [], usage="how")


def test_help_is_asked_for_anywhere_and_runs_nothing(capsys, monkeypatch):
    assert run_command(lambda arguments: 7, ["count=3", "-h"], usage="how") == 0
    assert capsys.readouterr().out == "how\n"
    assert run_command(lambda arguments: len(arguments), ["a", "b"], usage="how") == 2
    monkeypatch.setattr(sys, "argv", ["few", "--help"])
    assert run_with_options(lambda options: 7, Few, usage="few\n") == 0
    shown = capsys.readouterr().out
    assert shown.startswith("few\n\n") and "  rivals.python        a path (none)\n" in shown


def test_options_are_parsed_before_a_command_begins(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["few", "count=3"])
    assert run_with_options(lambda options: options.count, Few, usage="few") == 3
    monkeypatch.setattr(sys, "argv", ["few", "count=0"])
    assert run_with_options(lambda options: 7, Few, usage="few") == 2
    assert capsys.readouterr().err.startswith("error: count=0: must be >= 1")


def test_ctrl_c_is_one_line(capsys):
    def interrupt(arguments: list[str]) -> int:
        raise KeyboardInterrupt

    assert run_command(interrupt, [], usage="how") == 130
    assert capsys.readouterr().err == "interrupted\n"

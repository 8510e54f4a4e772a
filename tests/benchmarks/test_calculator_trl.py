"""benchmarks.calculator_trl: what it refuses. Its run takes minutes a step."""

import importlib.util

import pytest

from benchmarks import calculator_trl


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["rows=7"], "rows=7 does not divide a step of 64 samples"),
        (["steps=0"], "steps"),
        ([], "TRL is not in this interpreter"),
    ],
)
def test_bad_arguments_are_one_line(refused, monkeypatch, arguments, said):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert said in refused(calculator_trl.main, *arguments)

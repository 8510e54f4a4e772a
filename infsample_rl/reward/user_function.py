"""A user's reward function: importing its file, and saying in one line what it raised and where."""

from __future__ import annotations

import contextlib
import difflib
import importlib.util
import inspect
import io
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from infsample_rl.config.peer_flags import read_flags
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.trl_stand_ins import Run, StandIns, TrainerReached, begin

FETCHING = ("trl", "datasets", "transformers", "peft")  # what a TRL script loads models and rows with


def import_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the file `path`; ValueError in one line if it cannot be had."""
    return import_name(path, name, "reward.functions")


def import_name(path: str, name: str, setting: str) -> Any:
    """What a setting names of the file `path`, imported under a private module name: a function, or of
    environment.factory a class, what makes one's instances, or a dictionary of such. ValueError in one line if it
    cannot be had."""
    kind, is_kind = ("class", inspect.isclass) if setting == "environment.factory" else ("function", inspect.isfunction)
    module = _import_file(path, setting)
    found = vars(module).get(name)
    if isinstance(found, dict) and kind == "class":
        return found
    if not callable(found) or (inspect.isclass(found) and kind == "function"):
        own = [key for key, value in vars(module).items() if is_kind(value) and value.__module__ == module.__name__]
        plural = "classes" if kind == "class" else "functions"
        listed = f"its {plural} are {', '.join(own) or 'none'}{_nearest(name, own)}"
        raise ValueError(f"{setting}: {path} has no {kind} {name}; {listed}")
    return found


def given_to_trainer(words: list[str], name: str, setting: str) -> Any:
    """What the TRL script of these words, run up to its trainer's train(), gives the trainer as `name`. TRL is stood in
    for; all else is the script's own. The script is this process's from then on, as if it had been imported.

    ValueError in one line where it does not get there, or gives no such thing."""
    begin(words, read_flags(words[1:]), ["trl"])
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            _import_file(words[0], setting, is_main=True)
    except TrainerReached as reached:
        found = reached.trainer._kwargs.get(name)
        if not found:
            raise ValueError(f"{setting}: {words[0]} gives its trainer no {name}") from None
        return found
    except ValueError as error:
        last = said.getvalue().strip().rpartition("\n")[2]
        raise ValueError(f"{error}{f': {last}' if last else ''}") from None
    raise ValueError(
        f"{setting}: {words[0]} has ended before it called train() of a trainer; of a class in it give {words[0]}:NAME"
    )


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _import_file(path: str, setting: str, *, is_main: bool = False) -> ModuleType:
    """`is_main`: as the script that this process runs."""
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        there = [entry for entry in os.listdir(folder) if entry.endswith(".py")] if os.path.isdir(folder) else []
        raise ValueError(f"{setting}: no file {path}{_nearest(os.path.basename(path), there)}")
    full = os.path.abspath(path)
    private = "infsample_rl_user_" + "".join(letter if letter.isalnum() else "_" for letter in full)
    if private in sys.modules:
        return sys.modules[private]
    if os.path.dirname(full) not in sys.path:
        sys.path.append(os.path.dirname(full))  # for modules beside the file; last, so that they hide nothing
    source = Path(full).read_bytes()
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.append(StandIns(["trl"]))  # last: where it is not installed
    # Imported up to where it would train, without what it loads for that.
    stand_ins = begin([full], {}, FETCHING) if not is_main and _trains(source) else None
    spec = importlib.util.spec_from_file_location(private, full)
    assert spec is not None and spec.loader is not None  # both are there for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[private] = module
    try:
        if is_main:
            module.__name__, sys.modules["__main__"] = "__main__", module
        exec(compile(source, full, "exec"), vars(module))
    except TrainerReached:
        if is_main:
            raise
    except (Exception, SystemExit) as error:  # not what ends this process: Ctrl-C and SIGTERM
        raise ValueError(f"{setting}: {path} cannot be imported: {describe_error(error, full)}") from error
    finally:
        Run.is_on = False
        if stand_ins is not None:
            stand_ins.leave()
    return module


def _trains(source: bytes) -> bool:
    """Whether importing a file would train: it has a trainer, and does not ask whether it is the main script."""
    return re.search(rb"\bif\s+__name__\b", source) is None and re.search(rb"Trainer\b", source) is not None


def describe_error(error: BaseException, path: str | None) -> str:
    """One line: the error, and where in the user's file (else where at all) it was raised."""
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [frame for frame in frames if path is not None and os.path.abspath(frame[0]) == path]
    message = str(error)
    if isinstance(error, SyntaxError) and error.filename:
        own, message = [(error.filename, error.lineno)], error.msg
    where = [f" ({filename}:{line})" for filename, line in (own or frames)[-1:]]
    said = " ".join(without_values(message).split())[:300]
    return f"{type(error).__name__}{': ' if said else ''}{said}{''.join(where)}"

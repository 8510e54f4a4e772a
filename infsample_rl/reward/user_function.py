"""A user's reward function: importing its file, and saying in one line what it raised and where."""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable
from types import ModuleType
from typing import Any

from infsample_rl.reward.hidden_values import without_values


def import_function(path: str, name: str) -> Callable[..., Any]:
    """The function `name` of the file `path`; ValueError in one line if it cannot be had."""
    return import_name(path, name, "reward.functions")


def import_name(path: str, name: str, setting: str) -> Callable[..., Any]:
    """What a setting names of the file `path`, imported under a private module name: a function, or of
    environment.factory a class, or what makes one's instances. ValueError in one line if it cannot be had."""
    kind, is_kind = ("class", inspect.isclass) if setting == "environment.factory" else ("function", inspect.isfunction)
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        there = [entry for entry in os.listdir(folder) if entry.endswith(".py")] if os.path.isdir(folder) else []
        raise ValueError(f"{setting}: no file {path}{_nearest(os.path.basename(path), there)}")
    module = _import_file(path, setting)
    found = vars(module).get(name)
    if not callable(found) or (inspect.isclass(found) and kind == "function"):
        own = [key for key, value in vars(module).items() if is_kind(value) and value.__module__ == module.__name__]
        plural = "classes" if kind == "class" else "functions"
        listed = f"its {plural} are {', '.join(own) or 'none'}{_nearest(name, own)}"
        raise ValueError(f"{setting}: {path} has no {kind} {name}; {listed}")
    return found


def _nearest(name: str, known: list[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {nearest[0]}?" if nearest else ""


def _import_file(path: str, setting: str) -> ModuleType:
    full = os.path.abspath(path)
    name = "infsample_rl_user_" + "".join(letter if letter.isalnum() else "_" for letter in full)
    if name in sys.modules:
        return sys.modules[name]
    if os.path.dirname(full) not in sys.path:
        sys.path.append(os.path.dirname(full))  # for modules beside the file; last, so that they hide nothing
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None  # both are there for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # not what ends this process: Ctrl-C and SIGTERM
        raise ValueError(f"{setting}: {path} cannot be imported: {describe_error(error, full)}") from error
    return module


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

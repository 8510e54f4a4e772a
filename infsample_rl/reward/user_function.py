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
    """The function `name` of the file `path`, imported under a private module name; ValueError in one line if it cannot
    be had."""
    if not os.path.isfile(path):
        raise ValueError(f"reward.functions: no file {path}{_similar_file(path)}")
    module = _import_file(path)
    found = [
        key for key, value in vars(module).items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if name not in vars(module):
        nearest = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {nearest[0]}?" if nearest else ""
        raise ValueError(
            f"reward.functions: {path} has no function {name}; its functions are {', '.join(found) or 'none'}{hint}"
        )
    function = vars(module)[name]
    if not callable(function) or inspect.isclass(function):
        listed = ", ".join(found) or "none"
        raise ValueError(
            f"reward.functions: {path}:{name} is not a function but {type(function).__name__}; its functions are "
            f"{listed}"
        )
    return function


def _similar_file(path: str) -> str:
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        return f" (there is no folder {folder} either)"
    nearest = difflib.get_close_matches(
        os.path.basename(path), [entry for entry in os.listdir(folder) if entry.endswith(".py")], n=1
    )
    return f"; did you mean {os.path.join(folder, nearest[0])}?" if nearest else ""


def _import_file(path: str) -> ModuleType:
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
        del sys.modules[name]
        raise ValueError(f"reward.functions: {path} cannot be imported: {describe_error(error, full)}") from error
    return module


def describe_error(error: BaseException, path: str | None) -> str:
    """One line: the error, and where in the user's file (else where at all) it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if path is not None and os.path.abspath(frame.filename) == path]
    if isinstance(error, SyntaxError) and error.filename:
        where, message = f" ({error.filename}:{error.lineno})", error.msg
    else:
        frame = next(reversed(own or frames), None)
        where, message = f" ({frame.filename}:{frame.lineno})" if frame else "", str(error)
    line = " ".join(without_values(message).split())[:300]
    return f"{type(error).__name__}{': ' if line else ''}{line}{where}"

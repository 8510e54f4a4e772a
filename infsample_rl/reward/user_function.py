"""A user's reward function: importing its file, and saying in one line what it raised and where."""

from __future__ import annotations

import ast
import contextlib
import dis
import importlib.util
import inspect
import io
import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from infsample_rl.config.fields import did_you_mean
from infsample_rl.config.peer_flags import read_flags
from infsample_rl.reward.hidden_values import without_values
from infsample_rl.reward.trl_stand_ins import Run, StandIns, TrainerReached, begin, is_result

FETCHING = ("trl", "datasets", "transformers", "peft")  # what a TRL script loads models and rows with


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
        listed = f"its {plural} are {', '.join(own) or 'none'}{did_you_mean(name, own)}"
        raise ValueError(f"{setting}: {path} has no {kind} {name}; {listed}")
    if inspect.isfunction(found):
        _check_reads(found, path, setting)
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


def _import_file(path: str, setting: str, *, is_main: bool = False) -> ModuleType:
    """`is_main`: as the script that this process runs."""
    if not os.path.isfile(path):
        folder = os.path.dirname(path) or "."
        there = [entry for entry in os.listdir(folder) if entry.endswith(".py")] if os.path.isdir(folder) else []
        raise ValueError(f"{setting}: no file {path}{did_you_mean(os.path.basename(path), there)}")
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
    """Whether importing a file would make a trainer: what runs then calls one. What stands in a function runs where it
    is called, what is behind `if __name__` not at all."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return False  # importing it says so
    left, everything = list[ast.AST]([tree]), list(ast.walk(tree))
    functions = {node.name: node.body for node in everything if isinstance(node, ast.FunctionDef)}
    classes = [node for node in everything if isinstance(node, ast.ClassDef)]
    own = {node.name for node in classes if any(map(_is_trainer, node.bases))}
    while left:
        node = left.pop()
        if isinstance(node, ast.Call):
            if _is_trainer(node.func) or _name_of(node.func) in own:
                return True
            left += functions.pop(_name_of(node.func), [])
        if isinstance(node, ast.If) and "__name__" in ast.dump(node.test):
            left += node.orelse
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return False


def _is_trainer(node: ast.expr) -> bool:
    return _name_of(node).endswith("Trainer")


def _name_of(node: ast.expr) -> str:
    """ "GRPOTrainer" of GRPOTrainer and of trl.GRPOTrainer."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _check_reads(function: FunctionType, path: str, setting: str) -> None:
    """ValueError for a function that reads what its file has loaded by what stood in: every call of it would fail."""
    for name in _globals_of(function.__code__):
        if is_result(function.__globals__.get(name)):
            raise ValueError(
                f"{setting}: {path}: {function.__name__} reads {name}, which is not loaded where importing the file "
                'trains; put the training behind `if __name__ == "__main__":`'
            )


def _globals_of(code: CodeType) -> Iterator[str]:
    yield from (each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL")
    for constant in code.co_consts:
        if isinstance(constant, CodeType):  # of a comprehension
            yield from _globals_of(constant)


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

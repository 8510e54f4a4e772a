"""Runs a TRL script against modules that record what they are given, up to the trainer's train().

trl and what else would load or fetch something is stood in for: whatever is taken from it is a Recorded. Runs in the
sandbox, with the standard library only, as: trl_stand_ins FLAGS_AS_JSON SCRIPT.py [ARGUMENT ...]
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType
from typing import Any

LOADING = {"trl", "datasets", "transformers", "torch", "peft", "accelerate", "deepspeed", "vllm", "wandb"}
FLAGS: dict[str, Any] = {}
TAKEN: set[str] = set()  # flags that are no settings, where a parser of TRL's has read them


class Settings:
    """What the script's own subclass of GRPOConfig or ScriptArguments is a class of; what is not given is None."""

    def __getattr__(self, name: str) -> None: ...


class Recorded:
    """Stands for what a module would have given: its name, what a call of it was given, and what it was taken from."""

    def __init__(self, name: str, of: Any = None, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None):
        self.__dict__.update(_name=name, _of=of, _args=args, _kwargs=kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._name.endswith(("Config()", "Arguments()")):
            return self._kwargs.get(name)
        return (self._kwargs or {}).get(name) or Recorded(f"{self._name}.{name}", self)

    def __setattr__(self, name: str, value: Any) -> None:
        (self.__dict__ if name.startswith("__") or self._kwargs is None else self._kwargs)[name] = value

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._name.endswith("Trainer().train"):
            write_record(self._of)
        if "Parser().parse_args" in self._name:
            return parsed(*self._of._args)
        if args and isinstance(args[0], FunctionType) and not self._name.endswith((".map", ".filter")):
            return args[0]  # it decorates
        return Recorded(f"{self._name}()", self._of, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return Recorded(f"{self._name}[{key!r}]", self, (), {})

    def __iter__(self) -> Any:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Settings,)

    def __ge__(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__


def parsed(kinds: Any) -> list[Any]:
    """An object of every class that TrlParser or HfArgumentParser was given, with all flags."""
    made = []
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        made.append(kind() if isinstance(kind, Recorded) else kind.__new__(kind))
        (made[-1]._kwargs if isinstance(kind, Recorded) else vars(made[-1])).update(FLAGS)
        TAKEN.update(("config", *getattr(kind, "__dataclass_fields__", ())))
    return made


def as_json(value: Any) -> Any:
    """A Recorded with all it was made of, a function or class as FILE.py:NAME, an object by its attributes or as
    text."""
    if isinstance(value, Recorded):
        call = {"name": value._name, "of": value._of, "args": value._args, "kwargs": value._kwargs}
        return value._name.removeprefix("torch.") if value._kwargs is None else call
    if isinstance(value, FunctionType):
        return f"{os.path.abspath(value.__code__.co_filename)}:{value.__qualname__}"
    if isinstance(value, type) and (file := getattr(sys.modules.get(value.__module__), "__file__", None)):
        return f"{os.path.abspath(file)}:{value.__qualname__}"
    return {"args": [], "kwargs": vars(value)} if isinstance(value, Settings) else str(value)


def write_record(trainer: Any) -> None:
    """All is known: write it down and end."""
    with open(os.environ["INFSAMPLE_RL_RECORD"], "w") as file:
        json.dump({"trainer": trainer, "taken": sorted(TAKEN)}, file, default=as_json)
    os._exit(0)


class Finder(MetaPathFinder, Loader):
    """Finds a Recorded for every module of LOADING."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in LOADING else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return Recorded(spec.name)

    def exec_module(self, module: Any) -> None: ...


def main() -> None:
    """Run the script; its trainer's train() ends it."""
    flags, script = sys.argv[1:3]
    FLAGS.update(json.loads(flags))
    sys.argv, sys.path[0] = sys.argv[2:], os.path.dirname(os.path.abspath(script))
    sys.meta_path.insert(0, Finder())
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())} (line {lines[-1] if lines else '?'})")


if __name__ == "__main__":
    main()

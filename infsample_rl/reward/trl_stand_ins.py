"""Modules in the place of trl, and of what else would load or fetch something: a TRL script runs against them up to its
trainer's train(), and is imported where TRL is not installed. Standard library only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType
from typing import Any


class TrainerReached(BaseException):
    """The script has called train() of this trainer."""

    def __init__(self, trainer: Recorded) -> None:
        super().__init__(trainer)
        self.trainer = trainer


class Run:
    """Of the script, once for a process."""

    is_on = False  # else what is stood in for can be imported, and not called
    flags: dict[str, Any] = {}
    taken: set[str] = set()  # flags that are no settings, where a parser of TRL's has read them
    own: set[str] = set()  # flags that the script's own argparse has read
    subclasses: set[str] = set()  # of a trainer, the script's own

    @staticmethod
    def reached(trainer: Recorded) -> None:
        """What is done when train() is called."""
        raise TrainerReached(trainer)


class Settings:
    """What the script's own subclass of GRPOConfig or ScriptArguments is a class of; what is not given is None."""

    def __getattr__(self, name: str) -> None: ...


class OwnTrainer:
    """What the script's own subclass of a trainer is a class of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._given = Recorded("Trainer()", None, args, kwargs)
        Run.subclasses.add(type(self).__name__)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._given, name)

    def train(self, *args: Any, **kwargs: Any) -> None:
        Run.reached(self._given)


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
        if not Run.is_on:
            raise ModuleNotFoundError(f"{self._name} is called, and something stands in the place of its package")
        if self._name.endswith("Trainer().train"):
            Run.reached(self._of)
        if "Parser().parse_args" in self._name:
            return parsed(*self._of._args)
        if args and isinstance(args[0], FunctionType) and not self._name.endswith((".map", ".filter")):
            return args[0]  # it decorates
        return Recorded(f"{self._name}()", self._of, args, kwargs)

    def __getitem__(self, key: Any) -> Any:
        return Recorded(f"{self._name}[{key!r}]", self, (key,), {})

    def __iter__(self) -> Any:
        return iter(())

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (OwnTrainer if self._name.endswith("Trainer") else Settings,)

    def __ge__(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__


def is_result(value: Any) -> bool:
    """Whether something stands for what a call would have loaded: no class, and no settings, which are as given."""
    name = value._name if isinstance(value, Recorded) else ""
    return "()" in name and not name.startswith("trl.") and not name.endswith(("Config()", "Arguments()"))


class StandIns(MetaPathFinder, Loader):
    """Finds a Recorded for every module of these packages."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.partition(".")[0] in self._packages else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return Recorded(spec.name)

    def exec_module(self, module: Any) -> None: ...

    def leave(self) -> None:
        """From here on these packages are the real ones, for who imports them."""
        sys.meta_path.remove(self)
        for name in [name for name, module in sys.modules.items() if isinstance(module, Recorded)]:
            del sys.modules[name]


def begin(words: Sequence[str], flags: dict[str, Any], packages: Iterable[str]) -> StandIns:
    """From here on this process is the script of these words, with these modules stood in for."""
    sys.argv = list(words)
    Run.is_on = True
    Run.flags.update((name.replace("-", "_"), value) for name, value in flags.items())
    stand_ins = StandIns(packages)
    sys.meta_path.insert(0, stand_ins)
    return stand_ins


def parsed(kinds: Any) -> list[Any]:
    """An object of every class that TrlParser or HfArgumentParser was given, with all flags."""
    made = []
    for kind in kinds if isinstance(kinds, (list, tuple)) else [kinds]:
        made.append(kind() if isinstance(kind, Recorded) else kind.__new__(kind))
        (made[-1]._kwargs if isinstance(kind, Recorded) else vars(made[-1])).update(Run.flags)
        Run.taken.update(("config", *getattr(kind, "__dataclass_fields__", ())))
    return made


def share_argparse() -> None:
    """Let the script's own parser pass over flags that it does not know, and note those that it does."""
    parse = argparse.ArgumentParser.parse_known_args

    def parse_known_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        options = [option for action in self._actions for option in action.option_strings]
        names = {option.lstrip("-").replace("-", "_") for option in options}
        Run.own.update(names & Run.flags.keys())
        return parse(self, args, namespace)

    def parse_args(self: Any, args: Any = None, namespace: Any = None) -> Any:
        return parse_known_args(self, args, namespace)[0]

    argparse.ArgumentParser.parse_known_args = parse_known_args  # type: ignore[method-assign]
    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign]

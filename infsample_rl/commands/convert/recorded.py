"""What stands for the values of a TRL script's modules: it remembers where it is from and what was done to it.

Imported by trl_stand_ins.py alone, which runs in the sandbox: standard library only.
"""

from __future__ import annotations

import functools
import os
import re
from enum import Enum
from pathlib import PurePath
from types import FunctionType
from typing import Any

COLUMN = "\ue000{}\ue001"  # what a column of a data set holds here


class Recorded:
    """Stands for what a module would have given: an attribute of `origin`, or what a call of it returns."""

    def __init__(self, name: str, origin: Recorded | None = None, call: tuple[Any, dict[str, Any]] | None = None):
        self.__dict__.update(_name=name, _origin=origin, _call=call)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.__dict__[name] = Recorded(f"{self._name}.{name}", self)
        return self.__dict__[name]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and isinstance(args[0], FunctionType) and not kwargs:
            return args[0]  # it decorates
        return Recorded(f"{self._name}()", self, (args, kwargs))

    def __getitem__(self, key: Any) -> Any:
        return Recorded(f"{self._name}[{key!r}]", self)

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __str__(self) -> str:
        return f"$({self._name})"

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def _computed(self, *others: Any) -> Any:
        return Recorded(f"{self._name} ...", self)

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _computed
    __floordiv__ = __rfloordiv__ = __mod__ = __pow__ = __or__ = __ror__ = __neg__ = _computed

    def _not(self, other: Any) -> bool:
        return False

    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _not
    __fspath__ = __repr__ = __str__


class Dataset:
    """A data set that was named: where it is from, and what is done to it."""

    def __init__(self, source: dict[str, Any], steps: tuple[Any, ...] = ()):
        self.source, self.steps = source, steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return functools.partial(self._done, name)

    def _done(self, method: str, *args: Any, **kwargs: Any) -> Dataset:
        given = kwargs.get("function", args[0] if args else None)
        step = {"method": method, "given": getattr(given, "__name__", "" if given is None else repr(given)[:40])}
        if method == "map" and callable(given) and not kwargs.get("batched"):
            step |= shape_of(given, kwargs.get("fn_kwargs") or {})
        return Dataset(self.source, (*self.steps, step))

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str) and self.source.get("split") is None:
            return Dataset(self.source | {"split": key}, self.steps)
        return Row() if isinstance(key, int) else Recorded(f"dataset[{key!r}]")

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0


class Row(dict):
    """A row of a data set, in which every column stands for itself."""

    def __missing__(self, column: str) -> str:
        return COLUMN.format(column)


def shape_of(function: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The system message and the column of the question that `function` makes of a row, and whether that is all."""
    try:
        made = function(Row(), **kwargs)
        messages = made["prompt"]
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        content = {message["role"]: message["content"] for message in messages}
    except Exception:
        return {}
    column = re.fullmatch(COLUMN.format(r"(\w+)"), str(content.get("user")))
    kept = all(value == COLUMN.format(name) for name, value in made.items() if name != "prompt")
    all_told = kept and column is not None and len(messages) == len(content) and not content.keys() - {"system", "user"}
    system = content.get("system")
    return {"system": system, "column": column and column[1], "all_told": all_told}


def load_dataset(path: Any, name: Any = None, *_: Any, split: Any = None, data_files: Any = None, **__: Any) -> Any:
    """datasets.load_dataset, recorded."""
    if data_files is not None and path in ("json", "parquet"):
        path = data_files.get(split or "train") if isinstance(data_files, dict) else data_files
    if isinstance(split, (list, tuple)):
        return [Dataset({"path": path, "name": name, "split": part}) for part in split]
    return Dataset({"path": path, "name": name, "split": split})


def plain(value: Any) -> Any:
    """A value as JSON has it; $(NAME) for what only running the script would give."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Recorded):
        is_dtype = re.fullmatch(r"torch\.\w+", value._name)
        return value._name.removeprefix("torch.") if is_dtype else str(value)
    if isinstance(value, Enum):
        return plain(value.value)
    return str(value) if isinstance(value, PurePath) else f"$({getattr(value, '__qualname__', type(value).__name__)})"


def pretrained(value: Any) -> tuple[Any, dict[str, Any]]:
    """The name and the keywords of `from_pretrained(NAME, ...)` in what was made of it; (value, {}) for others."""
    origin = value
    while isinstance(origin, Recorded):
        if origin._call is not None:
            args, kwargs = origin._call
            kwargs = dict(kwargs)
            name = args[0] if args else kwargs.pop("pretrained_model_name_or_path", kwargs.pop("model_name", None))
            if origin._name.endswith("from_pretrained()"):
                return name, kwargs
            if isinstance(name, Recorded):  # get_peft_model(model, ...)
                return pretrained(name)
        origin = origin._origin
    return value, {}


def reward_name(function: Any) -> Any:
    """FILE.py:NAME, model:NAME or a name of TRL's; {"name", "args", "kwargs"} of what a call made."""
    if isinstance(function, str):
        return f"model:{function}"
    if isinstance(function, FunctionType) and "<" not in function.__qualname__:
        return f"{os.path.abspath(function.__code__.co_filename)}:{function.__qualname__}"
    if isinstance(function, Recorded):
        name, _ = pretrained(function)
        if isinstance(name, str):
            return f"model:{name}"
        if function._call is None:
            return function._name
        made_by = function._name.removesuffix("()").rpartition(".")[2]
        return {"name": made_by, "args": plain(function._call[0]), "kwargs": plain(function._call[1])}
    return {"name": getattr(function, "__qualname__", type(function).__name__), "args": [], "kwargs": {}}

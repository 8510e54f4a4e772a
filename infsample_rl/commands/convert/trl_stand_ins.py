"""Runs a TRL script against modules that record what they are given, up to the trainer's train().

    INFSAMPLE_RL_RECORD=FILE python trl_stand_ins.py '{"flags": {...}, "defaults": {...}}' SCRIPT.py [ARGUMENT ...]

trl, torch and what else would load or fetch something, and every module the script imports and this environment lacks,
are stood in for: whatever is taken from them is a Recorded. Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import runpy
import sys
import sysconfig
import traceback
from enum import Enum
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

LOADING = {"trl", "datasets", "transformers", "torch", "peft", "accelerate", "deepspeed", "vllm", "wandb", "unsloth"}
TRAINER = "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks"
COLUMN = "\ue000{}\ue001"  # what a column of a data set holds here
FLAGS: dict[str, Any] = {}
DEFAULTS: dict[str, Any] = {}
RECORD: dict[str, Any] = {"own": [], "imports": []}  # own: flags that are the script's own


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

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

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


class _Keeping(type):
    """Classes whose objects keep their keywords, whatever __init__ a dataclass made of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.__new__(cls)
        made.__dict__.update(dict(zip(("output_dir",), args, strict=False)) | kwargs)
        return made


class Settings(metaclass=_Keeping):
    """GRPOConfig, ModelConfig and the like; what they were not given is TRL's default."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DEFAULTS.get(name)


class Parser:
    """TrlParser and HfArgumentParser; the flags have been read by who started this."""

    def __init__(self, dataclass_types: Any = (), **_: Any):
        self._kinds = list(dataclass_types) if isinstance(dataclass_types, (list, tuple)) else [dataclass_types]

    def parse_args_and_config(self, *_: Any, **__: Any) -> tuple[Any, ...]:
        """An object of every class."""
        own = [set(getattr(kind, "__dataclass_fields__", ())) for kind in self._kinds]
        RECORD["own"] += sorted({name for names in own for name in names} - set(DEFAULTS))
        return tuple(
            kind(**{name: v for name, v in FLAGS.items() if isinstance(kind, _Keeping) or name in names})
            for kind, names in zip(self._kinds, own, strict=True)
        )

    parse_args_into_dataclasses = parse_args_and_config


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


class Row(dict):  # type: ignore[type-arg]
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


class GRPOTrainer:
    """Keeps what it is given; train() ends the script."""

    kind = "grpo"

    def __init__(self, *args: Any, **kwargs: Any):
        RECORD["trainer"] = dict(zip(TRAINER.split(), args, strict=False)) | kwargs
        RECORD["kind"] = self.kind
        self.args = RECORD["trainer"].get("args")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Recorded(f"trainer.{name}")

    def train(self, *_: Any, **__: Any) -> None:
        """All is known: write it down and end."""
        write_record()
        os._exit(0)


class RLOOTrainer(GRPOTrainer):
    """The same, of RLOO."""

    kind = "rloo"


GIVEN = {
    "trl": {"GRPOTrainer": GRPOTrainer, "RLOOTrainer": RLOOTrainer, "TrlParser": Parser}
    | {name: lambda *_, **__: None for name in ("get_peft_config", "get_quantization_config", "get_kbit_device_map")},
    "transformers": {"HfArgumentParser": Parser, "TrainingArguments": Settings},
    "datasets": {"load_dataset": load_dataset, "load_from_disk": load_dataset},
}


class StandIn(ModuleType):
    """A module that has whatever is asked of it."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        top = self.__name__.partition(".")[0]
        if name.startswith("__"):
            raise AttributeError(name)
        if top == "trl" and name.endswith(("Config", "Arguments")):
            value: Any = _Keeping(name, (Settings,), {})
        else:
            value = GIVEN.get(top, {}).get(name) or Recorded(f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class Finder(MetaPathFinder, Loader):
    """Finds stand-ins: for LOADING before anything else, and last for what is not there."""

    def __init__(self, names: set[str] | None):
        self._names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        top = name.partition(".")[0]
        if top not in self._names if self._names is not None else not _asked_by_script():
            return None
        RECORD["imports"].append(top)
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def _asked_by_script() -> bool:
    """Whether the module that imports is the user's: libraries try for modules they can do without."""
    frame = sys._getframe(2)
    while frame.f_back is not None and "importlib" in frame.f_code.co_filename:
        frame = frame.f_back
    libraries = (sysconfig.get_path("stdlib"), sys.prefix, sys.base_prefix, "<")
    return not frame.f_code.co_filename.startswith(libraries)


def plain(value: Any) -> Any:
    """A value as JSON has it; $(NAME) for what only running the script would give."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple, set)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Recorded):
        is_dtype = value._call is None and value._name.startswith("torch.")
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
    return {"name": plain(function), "args": [], "kwargs": {}}


def write_record() -> None:
    """The record of the trainer that was made last."""
    given = RECORD["trainer"]
    model, init = pretrained(given.get("model"))
    functions = given.get("reward_funcs") or []
    functions = functions if isinstance(functions, (list, tuple)) else [functions]
    lora = given.get("peft_config")
    made = {
        "kind": RECORD["kind"],
        "model": plain(model),
        "model_init_kwargs": plain(init),
        "settings": plain(vars(given["args"]) if isinstance(given.get("args"), Settings) else {}),
        "reward_funcs": [reward_name(function) for function in functions],
        "lora": plain(lora._call[1]) if isinstance(lora, Recorded) and lora._call else None,
        "own": sorted(set(RECORD["own"])),
        "imports": sorted(set(RECORD["imports"])),
    }
    for name in ("train_dataset", "eval_dataset"):
        data = given.get(name)
        made[name] = {"source": plain(data.source), "steps": plain(data.steps)} if isinstance(data, Dataset) else None
    with open(os.environ["INFSAMPLE_RL_RECORD"], "w") as file:
        json.dump(made, file)


def main() -> None:
    """Run the script, and leave the record where its trainer trains, or else where the script ends."""
    known, script = sys.argv[1:3]
    FLAGS.update(json.loads(known)["flags"])
    DEFAULTS.update(json.loads(known)["defaults"])
    parse = argparse.ArgumentParser.parse_known_args

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        namespace, rest = parse(self, *args, **kwargs)
        RECORD["own"] += vars(namespace)
        return namespace, rest

    argparse.ArgumentParser.parse_known_args = noted  # type: ignore[method-assign,assignment]
    sys.argv, sys.path[0] = sys.argv[2:], os.path.dirname(os.path.abspath(script))
    sys.meta_path.insert(0, Finder(LOADING))
    sys.meta_path.append(Finder(None))
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        where = f" (line {lines[-1]})" if lines else ""
        print(f"{type(error).__name__}: {' '.join(str(error).split())}{where}", file=sys.stderr)
        os._exit(1)
    if "trainer" in RECORD:
        write_record()


if __name__ == "__main__":
    main()

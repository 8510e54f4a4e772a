"""Runs a TRL script against modules that record what they are given, up to the trainer's train().

    INFSAMPLE_RL_RECORD=FILE python -m ...trl_stand_ins '{"flags": {...}, "defaults": {...}}' SCRIPT.py [ARGUMENT ...]

trl, torch and what else would load or fetch something, and every module the script imports and this environment lacks,
are stood in for: whatever is taken from them is a Recorded. Runs in the sandbox, with the standard library only.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import sysconfig
import traceback
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from infsample_rl.commands.convert.recorded import Dataset, Recorded, load_dataset, plain, pretrained, reward_name

LOADING = {"trl", "datasets", "transformers", "torch", "peft", "accelerate", "deepspeed", "vllm", "wandb", "unsloth"}
TRAINER = "model reward_funcs args train_dataset eval_dataset processing_class reward_processing_classes callbacks"
FLAGS: dict[str, Any] = {}
DEFAULTS: dict[str, Any] = {}
RECORD: dict[str, Any] = {"own": [], "imports": [], "parsed": False}  # own: flags that are the script's own


class _Keeping(type):
    """Classes whose objects keep their keywords, whatever __init__ a dataclass made of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = cls.__new__(cls)  # type: ignore[call-overload]  # of the class made, not of type
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
        RECORD["parsed"] = True
        own = [set(getattr(kind, "__dataclass_fields__", ())) for kind in self._kinds]
        RECORD["own"] += sorted({name for names in own for name in names} - set(DEFAULTS))
        return tuple(
            kind(**{name: v for name, v in FLAGS.items() if isinstance(kind, _Keeping) or name in names})
            for kind, names in zip(self._kinds, own, strict=True)
        )

    parse_args_into_dataclasses = parse_args_and_config


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


GIVEN: dict[str, dict[str, Any]] = {
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
        "parsed": RECORD["parsed"],
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

    argparse.ArgumentParser.parse_known_args = noted  # type: ignore[method-assign]  # the script's own parser
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

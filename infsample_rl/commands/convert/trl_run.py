"""Runs a TRL script against modules that record what they are given, and writes down what its trainer got. Runs in the
sandbox, as: trl_run FLAGS_AS_JSON SCRIPT.py [ARGUMENT ...]"""

from __future__ import annotations

import json
import os
import runpy
import sys
import traceback
from types import FunctionType
from typing import Any

from infsample_rl.reward.trl_stand_ins import Recorded, Run, Settings, begin, share_argparse

LOADING = ("trl", "datasets", "transformers", "torch", "peft", "accelerate", "deepspeed", "vllm", "wandb")


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


def write_record(trainer: Recorded) -> None:
    """All is known: write it down and end, before the script's own clearing up."""
    made = {"trainer": trainer, "taken": sorted(Run.taken), "own": sorted(Run.own), "classes": sorted(Run.subclasses)}
    factory = (trainer._kwargs or {}).get("environment_factory")
    kinds = factory.values() if isinstance(factory, dict) else [factory]
    made["rewarded"] = any(hasattr(kind, "get_reward") for kind in kinds)
    with open(os.environ["INFSAMPLE_RL_RECORD"], "w") as file:
        json.dump(made, file, default=as_json)
    os._exit(0)


def main() -> None:
    """Run the script; its trainer's train() ends it."""
    flags, script = sys.argv[1:3]
    sys.path[0] = os.path.dirname(os.path.abspath(script))
    begin(sys.argv[2:], json.loads(flags), LOADING)
    share_argparse()
    Run.reached = write_record  # type: ignore[method-assign]
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == script]
        sys.exit(f"{type(error).__name__}: {' '.join(str(error).split())} (line {lines[-1] if lines else '?'})")


if __name__ == "__main__":
    main()

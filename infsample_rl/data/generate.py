"""Generates the problems of one reasoning_gym task: a pickled request on stdin, a pickled answer on stdout.

Run by sources.py as a script of its own, under a fixed PYTHONHASHSEED; imports nothing of this package.
Request {"task", "seed", "size", "kwargs"}; answer {"entries": [...]}, or {"error": one line} for a user's mistake.
"""

from __future__ import annotations

import difflib
import pickle
import random
import sys
from dataclasses import fields
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS


def generate(task: str, seed: int, size: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`size` entries of the task, or the user's mistake."""
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:5]
        return {"error": f"reasoning_gym has no task {task!r} (of {len(DATASETS)}); the nearest are {', '.join(near)}"}
    random.seed(seed)  # one task draws from the module's generator
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        settings = ", ".join(sorted({field.name for field in fields(DATASETS[task][1])} - {"seed", "size"}))
        reason = " ".join(str(error).split())
        return {"error": f"data.generator_kwargs={kwargs} do not suit the task: {reason}; its settings are {settings}"}
    return {"entries": [dataset[index] for index in range(size)]}


if __name__ == "__main__":
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # what tasks print goes to stderr
    pickle.dump(generate(**pickle.load(sys.stdin.buffer)), answers)

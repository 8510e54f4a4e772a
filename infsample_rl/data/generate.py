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


def generate(task: str, seed: int, size: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """`size` entries of the task, or the user's mistake."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        return {"error": f"the package reasoning-gym cannot be imported ({error}): pip install reasoning-gym"}
    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3) or sorted(DATASETS)[:5]
        return {"error": f"reasoning_gym has no task {task!r} (of {len(DATASETS)}); the nearest are {', '.join(near)}"}
    random.seed(seed)  # one task draws from the module's generator
    try:
        dataset = reasoning_gym.create_dataset(task, seed=seed, size=size, **kwargs)
    except (TypeError, ValueError, AssertionError) as error:
        settings = sorted({field.name for field in fields(DATASETS[task][1])} - {"seed", "size"})
        reason = " ".join(str(error).split())
        return {
            "error": f"data.generator_kwargs={kwargs} do not suit the task: {reason}; its settings are "
            f"{', '.join(settings)}"
        }
    return {"entries": [dataset[index] for index in range(size)]}


def main() -> None:
    """Answer one request; what tasks print goes to stderr."""
    answers, sys.stdout = sys.stdout.buffer, sys.stderr
    request = pickle.load(sys.stdin.buffer)
    pickle.dump(generate(**request), answers)


if __name__ == "__main__":
    main()

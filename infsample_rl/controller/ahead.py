"""Samples that an asynchronous run has drawn for its next step, kept in a checkpoint beside which the weights that drew
them are gone."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from safetensors import safe_open

from infsample_rl.controller.recording import Fetch, completion_arrays, joined, read_completions, split, write_arrays
from infsample_rl.types import Completion, Episode

FILE = "ahead.safetensors"


def fetch_all(keys: list[int], fetch: Fetch) -> list[list[Completion]] | None:
    """The completions of these micro-groups; None where one is gone."""
    found = [fetch(key) for key in keys]
    return None if any(micro_group is None for micro_group in found) else found  # type: ignore[return-value]


def write_ahead(folder: Path, micro_groups: list[list[Completion]]) -> None:
    """Write FILE into a checkpoint."""
    completions = [completion for micro_group in micro_groups for completion in micro_group]
    numbers = [number for number, micro_group in enumerate(micro_groups) for _ in micro_group]
    arrays = {
        "micro_groups": np.array(numbers, np.int32),
        "prompt_indices": np.array([completion.prompt_index for completion in completions], np.int32),
        **completion_arrays(completions),
    }
    truncated = [completion.sampling_logprobs for completion in completions]
    if all(logprobs is not None for logprobs in truncated):
        arrays["sampling_logprobs"] = joined(truncated, np.float32)
    facts = {
        "policy_version": completions[0].policy_version,
        "finish_reasons": [completion.finish_reason for completion in completions],
        "episodes": [completion.episode and asdict(completion.episode) for completion in completions],
    }
    # not in the header, which may have 100 MB: episodes keep their messages
    arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
    write_arrays(arrays, folder / FILE)


def read_ahead(checkpoint: Path | None) -> list[list[Completion]]:
    """The micro-groups that a checkpoint keeps, in the order in which they were written; none where it keeps none."""
    if checkpoint is None or not (checkpoint / FILE).is_file():
        return []
    with safe_open(checkpoint / FILE, framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no mapping
        # older checkpoints have them in the header
        facts = json.loads(arrays["facts"].tobytes() if "facts" in arrays else file.metadata()["facts"])
    completions = read_completions(arrays, arrays["prompt_indices"].tolist(), facts)
    episodes = facts.get("episodes") or [None] * len(completions)  # older checkpoints know of none
    known = zip(completions, episodes, strict=True)
    completions = [replace(completion, episode=episode and Episode(**episode)) for completion, episode in known]
    if "sampling_logprobs" in arrays:
        truncated = zip(completions, split(arrays["sampling_logprobs"], arrays["lengths"]), strict=True)
        completions = [replace(completion, sampling_logprobs=own) for completion, own in truncated]
    numbered = zip(arrays["micro_groups"].tolist(), completions, strict=True)
    return [[completion for _, completion in group] for _, group in groupby(numbered, key=lambda pair: pair[0])]

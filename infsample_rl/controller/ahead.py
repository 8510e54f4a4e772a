"""Samples that an asynchronous run has drawn for its next step, kept in a checkpoint beside which the weights that drew
them are gone."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np
from safetensors import safe_open

from infsample_rl.controller.recording import Fetch, joined, split, write_arrays
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
        "sample_indices": np.array([completion.sample_index for completion in completions], np.int32),
        "lengths": np.array([len(completion.token_ids) for completion in completions], np.int32),
        "token_ids": joined([completion.token_ids for completion in completions], np.int32),
        "logprobs": joined([completion.logprobs for completion in completions], np.float32),
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
    lengths = arrays["lengths"]
    token_ids, logprobs = split(arrays["token_ids"], lengths), split(arrays["logprobs"], lengths)
    truncated = split(arrays["sampling_logprobs"], lengths) if "sampling_logprobs" in arrays else None
    episodes = facts.get("episodes") or [None] * len(lengths)  # older checkpoints know of none
    completions = [
        Completion(
            prompt_index=int(arrays["prompt_indices"][place]),
            sample_index=int(arrays["sample_indices"][place]),
            token_ids=token_ids[place],
            logprobs=logprobs[place],
            sampling_logprobs=None if truncated is None else truncated[place],
            finish_reason=reason,
            policy_version=facts["policy_version"],
            episode=episode and Episode(**episode),
        )
        for place, (reason, episode) in enumerate(zip(facts["finish_reasons"], episodes, strict=True))
    ]
    numbered = zip(arrays["micro_groups"].tolist(), completions, strict=True)
    return [[completion for _, completion in group] for _, group in groupby(numbered, key=lambda pair: pair[0])]

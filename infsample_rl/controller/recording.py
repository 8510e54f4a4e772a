"""Whole steps that a run records, so that `python -m infsample_rl replay RUN step=3` trains on the same samples.

RUN/recordings/step_000003/, every logging.record_every steps:
    samples.safetensors  all token ids, log-probabilities, rewards and advantages of the step
    recording.json       which groups were trained, and what the learner said
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from infsample_rl.controller.checkpoints import folders_after
from infsample_rl.controller.groups import Group, SampleRecord, StepGroups
from infsample_rl.controller.step_metrics import Metrics
from infsample_rl.types import Completion, Prompt

FOLDER, SAMPLES, FACTS = "recordings", "samples.safetensors", "recording.json"
Fetch = Callable[[int], list[Completion] | None]  # a micro-group by its key; None: it is gone


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStep:
    """One step as the learner got it."""

    step: int
    total_steps: int  # of the run: the learning rate's schedule depends on it
    groups: list[Group]  # those that were trained, in prompt order, every sample's micro_group 0
    completions: list[Completion]  # of all their samples
    metrics: Metrics  # the run's own learner/* of the step


def write_recording(
    run_dir: Path, groups: StepGroups, fetch: Fetch, metrics: Metrics, *, step: int, total_steps: int
) -> bool:
    """Write a step into RUN/recordings, under a temporary name first. False: some of its samples are gone."""
    trained = sorted(groups.trained(), key=lambda group: group.prompt.prompt_index)
    samples = [sample for group in trained for sample in group.samples]
    fetched: dict[Any, Any] = {key: fetch(key) for key in dict.fromkeys(sample.micro_group for sample in samples)}
    if None in fetched.values():
        return False
    completions = [fetched[sample.micro_group][sample.position] for sample in samples]
    rewards = [math.nan if sample.reward is None else sample.reward for sample in samples]
    arrays = {
        "prompt_lengths": np.array([len(group.prompt.token_ids) for group in trained], np.int32),
        "prompt_ids": joined([group.prompt.token_ids for group in trained], np.int32),
        "group_sizes": np.array([len(group.samples) for group in trained], np.int32),
        **completion_arrays(completions),
        "rewards": np.array(rewards, np.float64),
        "advantages": joined([sample.advantages for sample in samples], np.float64),
        "turns": np.array([len(sample.advantages) for sample in samples], np.int32),  # that have one each
    }
    facts = {
        "step": step,
        "total_steps": total_steps,
        "policy_version": groups.step,
        "prompt_indices": [group.prompt.prompt_index for group in trained],
        "rows": [group.prompt.place for group in trained],
        "prompts": [group.prompt.text for group in trained],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "metrics": {name: value for name, value in metrics.items() if name.startswith("learner/")},
    }
    folder = recording_folder(run_dir, step)
    partial = folder.with_name(f".partial_{folder.name}")
    for old in (partial, folder):  # a step that is done again replaces what it was
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    write_arrays(arrays, partial / SAMPLES)
    (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8", errors="backslashreplace")
    os.replace(partial, folder)
    return True


def read_recording(run_dir: Path, step: int) -> RecordedStep:
    """A recorded step. ValueError, with the steps that there are, when it was not recorded."""
    folder = recording_folder(run_dir, step)
    if not (folder / FACTS).is_file():
        steps = [str(int(path.name[5:])) for path in folders_after(run_dir / FOLDER, -1)]
        raise ValueError(
            f"step={step} of {run_dir} was not recorded; recorded steps: {', '.join(steps) or 'none'}; set "
            "logging.record_every=1 in a run to keep all"
        )
    try:
        facts, arrays = json.loads((folder / FACTS).read_text()), load_file(folder / SAMPLES)
    except (ValueError, SafetensorError) as error:
        raise ValueError(
            f"step={step} of {run_dir} cannot be read ({folder}): {' '.join(str(error).split())}"
        ) from None
    groups = _groups_of(facts, arrays)
    prompt_indices = [group.prompt.prompt_index for group in groups for _ in group.samples]
    return RecordedStep(
        step=facts["step"],
        total_steps=facts["total_steps"],
        groups=groups,
        completions=read_completions(arrays, prompt_indices, facts),
        metrics=facts["metrics"],
    )


def _groups_of(facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> list[Group]:
    columns = (arrays[name].tolist() for name in ("sample_indices", "lengths", "rewards"))
    advantages = split(arrays["advantages"], arrays["turns"])
    unsampled = [int(np.isnan(own).sum()) for own in split(arrays["logprobs"], arrays["lengths"])]
    samples = iter(
        SampleRecord(
            sample_index=index,
            length=length,
            observed=observed,
            finish_reason=reason,
            micro_group=0,
            position=position,
            reward=None if math.isnan(reward) else reward,
            advantages=tuple(own.tolist()),
        )
        for position, (reason, observed, own, index, length, reward) in enumerate(
            zip(facts["finish_reasons"], unsampled, advantages, *columns, strict=True)
        )
    )
    prompt_ids = split(arrays["prompt_ids"], arrays["prompt_lengths"])
    known = zip(facts["prompt_indices"], facts["rows"], facts["prompts"], prompt_ids, strict=True)
    prompts = [
        Prompt(prompt_index=index, row=row, messages=[], text=text, token_ids=token_ids)
        for index, row, text, token_ids in known
    ]
    sizes = arrays["group_sizes"].tolist()
    return [
        Group(prompt=prompt, size=size, samples=list(islice(samples, size)))
        for prompt, size in zip(prompts, sizes, strict=True)
    ]


def recording_folder(run_dir: Path, step: int) -> Path:
    """Where a step is recorded."""
    return run_dir / FOLDER / f"step_{step:06d}"


def write_arrays(arrays: dict[str, np.ndarray], path: Path) -> None:
    """As save_file, but OSError where there is no room."""
    try:
        save_file(arrays, path)
    except SafetensorError as error:
        raise OSError(f"{path} cannot be written: {error}") from error


def completion_arrays(completions: Sequence[Completion]) -> dict[str, np.ndarray]:
    """What read_completions() reads, beside facts of the step."""
    return {
        "sample_indices": np.array([completion.sample_index for completion in completions], np.int32),
        "lengths": np.array([len(completion.token_ids) for completion in completions], np.int32),
        "token_ids": joined([completion.token_ids for completion in completions], np.int32),
        "logprobs": joined([completion.logprobs for completion in completions], np.float32),
    }


def read_completions(
    arrays: dict[str, np.ndarray], prompt_indices: Sequence[int], facts: dict[str, Any]
) -> list[Completion]:
    """The completions of completion_arrays(), whose prompts these are."""
    token_ids, logprobs = (split(arrays[name], arrays["lengths"]) for name in ("token_ids", "logprobs"))
    known = zip(prompt_indices, arrays["sample_indices"].tolist(), facts["finish_reasons"], strict=True)
    return [
        Completion(
            prompt_index=prompt_index,
            sample_index=sample_index,
            token_ids=token_ids[place],
            logprobs=logprobs[place],
            sampling_logprobs=None,
            finish_reason=reason,
            policy_version=facts["policy_version"],
        )
        for place, (prompt_index, sample_index, reason) in enumerate(known)
    ]


def joined(arrays: Sequence[Any], dtype: type) -> np.ndarray:
    """One array of all, in order."""
    return np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)


def split(whole: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """Arrays of these lengths out of one that joined() made."""
    return np.split(whole, np.cumsum(lengths))[: len(lengths)]

"""What a run keeps of its samples, so that each half can run again without the other: lengths for the scheduler, whole
steps for the learner.

RUN/lengths.jsonl                        every step: a line for every prompt, as `python -m infsample_rl.simulate
lengths=RUN` reads it RUN/samples.jsonl                        every step: of a few prompts, who decoded when
(sample_records.py) RUN/recordings/step_000003/              every logging.record_every steps, for `python -m
infsample_rl replay RUN step=3`
    samples.safetensors                  all token ids, log-probabilities, rewards and advantages of the step
    recording.json                       which groups were trained, and what the learner said
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from transformers import PreTrainedTokenizerBase

from infsample_rl.config import Config
from infsample_rl.controller.groups import Group, SampleRecord, StepGroups
from infsample_rl.controller.sample_records import sample_records
from infsample_rl.controller.step_metrics import Metrics, completion_records
from infsample_rl.observe.run_log import LENGTHS_FILE, SAMPLES_FILE, RunLogger
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
    metrics: dict[str, float | None]  # the run's own learner/* of the step


class StepRecorder:
    """Keeps a step's samples, as much of them as the settings say."""

    def __init__(
        self, config: Config, run_dir: Path, tokenizer: PreTrainedTokenizerBase, log: RunLogger, *, total_steps: int
    ) -> None:
        self._config, self._run_dir, self._tokenizer, self._log, self._total_steps = (
            config,
            run_dir,
            tokenizer,
            log,
            total_steps,
        )

    def keep(self, groups: StepGroups, fetch: Fetch, metrics: Metrics, *, step: int) -> list[dict[str, Any]]:
        """Write lengths, who decoded when and, where it is due, the whole step; the completions that are shown."""
        logging = self._config.logging
        self._log.append(LENGTHS_FILE, length_records(groups, self._config, step=step))
        self._log.append(SAMPLES_FILE, sample_records(groups, fetch, self._tokenizer, self._config, step=step))
        if (
            logging.record_every
            and step % logging.record_every == 0
            and not write_recording(self._run_dir, groups, fetch, metrics, step=step, total_steps=self._total_steps)
        ):
            self._log.warn(f"step {step} is not recorded: a worker that held some of its samples was lost")
        return completion_records(groups, fetch, self._tokenizer, self._config, step=step)


def length_records(groups: StepGroups, config: Config, *, step: int) -> list[dict[str, Any]]:
    """A line of recorded lengths for every prompt of a step (rollout/length_prediction/recordings.py)."""
    names = {"step": step, "dataset": config.data.source, "model": config.model.path}
    records = []
    for group in groups.groups:
        samples = group.samples
        known = {"prompt_id": f"row {group.prompt.row}, step {step}", "prompt_tokens": len(group.prompt.token_ids)}
        known |= {"max_new_tokens": config.rollout.max_new_tokens, "lengths": [sample.length for sample in samples]}
        truncated, scores = (
            [sample.finish_reason == "length" for sample in samples],
            [sample.reward for sample in samples],
        )
        records.append(names | known | {"truncated": truncated, "scores": scores})
    return records


def write_recording(
    run_dir: Path, groups: StepGroups, fetch: Fetch, metrics: Metrics, *, step: int, total_steps: int
) -> bool:
    """Write a step into RUN/recordings, under a temporary name first. False: some of its samples are gone."""
    trained = sorted(groups.trained(), key=lambda group: group.prompt.prompt_index)
    samples = [(group, sample) for group in trained for sample in group.samples]
    fetched = {key: fetch(key) for key in dict.fromkeys(sample.micro_group for _, sample in samples)}
    if None in fetched.values():
        return False
    completions = [fetched[sample.micro_group][sample.position] for _, sample in samples]
    arrays = {
        "prompt_lengths": np.array([len(group.prompt.token_ids) for group in trained], np.int32),
        "prompt_ids": _joined([group.prompt.token_ids for group in trained], np.int32),
        "group_sizes": np.array([len(group.samples) for group in trained], np.int32),
        "sample_indices": np.array([sample.sample_index for _, sample in samples], np.int32),
        "lengths": np.array([sample.length for _, sample in samples], np.int32),
        "token_ids": _joined([completion.token_ids for completion in completions], np.int32),
        "logprobs": _joined([completion.logprobs for completion in completions], np.float32),
        "rewards": np.array(
            [math.nan if sample.reward is None else sample.reward for _, sample in samples], np.float64
        ),
        "advantages": np.array([sample.advantage for _, sample in samples], np.float64),
    }
    facts = {
        "step": step,
        "total_steps": total_steps,
        "policy_version": groups.step,
        "prompt_indices": [group.prompt.prompt_index for group in trained],
        "rows": [group.prompt.row for group in trained],
        "prompts": [group.prompt.text for group in trained],
        "finish_reasons": [completion.finish_reason for completion in completions],
        "metrics": {name: value for name, value in metrics.items() if name.startswith("learner/")},
    }
    folder = recording_folder(run_dir, step)
    partial = folder.with_name(f".partial_{folder.name}")
    for old in (partial, folder):  # a step that is done again replaces what it was
        shutil.rmtree(old, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(arrays, partial / SAMPLES)
    (partial / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8", errors="backslashreplace")
    os.replace(partial, folder)
    return True


def read_recording(run_dir: Path, step: int) -> RecordedStep:
    """A recorded step. ValueError, with the steps that there are, when it was not recorded."""
    folder = recording_folder(run_dir, step)
    if not (folder / FACTS).is_file():
        there = (
            ", ".join(str(int(path.name.removeprefix("step_"))) for path in sorted((run_dir / FOLDER).glob("step_*")))
            or "none"
        )
        raise ValueError(
            f"step={step} of {run_dir} was not recorded; recorded steps: {there}; set logging.record_every=1 in a run "
            "to keep all"
        )
    try:
        facts, arrays = json.loads((folder / FACTS).read_text()), load_file(folder / SAMPLES)
    except (ValueError, SafetensorError) as error:
        raise ValueError(
            f"step={step} of {run_dir} cannot be read ({folder}): {' '.join(str(error).split())}"
        ) from None
    prompt_ids = np.split(arrays["prompt_ids"], np.cumsum(arrays["prompt_lengths"])[:-1])
    token_ids, logprobs = (
        np.split(arrays[name], np.cumsum(arrays["lengths"])[:-1]) for name in ("token_ids", "logprobs")
    )
    groups, completions, place = [], [], 0
    for number, prompt_index in enumerate(facts["prompt_indices"]):
        prompt = Prompt(
            prompt_index=prompt_index,
            row=facts["rows"][number],
            messages=[],
            text=facts["prompts"][number],
            token_ids=prompt_ids[number],
        )
        group = Group(prompt=prompt, size=int(arrays["group_sizes"][number]))
        for _ in range(group.size):
            sample_index, reward = int(arrays["sample_indices"][place]), float(arrays["rewards"][place])
            reason = facts["finish_reasons"][place]
            sample = SampleRecord(
                sample_index=sample_index,
                length=len(token_ids[place]),
                finish_reason=reason,
                micro_group=0,
                position=place,
            )
            sample.reward, sample.advantage = None if math.isnan(reward) else reward, float(arrays["advantages"][place])
            group.samples.append(sample)
            completions.append(
                Completion(
                    prompt_index=prompt_index,
                    sample_index=sample_index,
                    token_ids=token_ids[place],
                    logprobs=logprobs[place],
                    sampling_logprobs=None,
                    finish_reason=reason,
                    policy_version=facts["policy_version"],
                )
            )
            place += 1
        groups.append(group)
    return RecordedStep(
        step=facts["step"],
        total_steps=facts["total_steps"],
        groups=groups,
        completions=completions,
        metrics=facts["metrics"],
    )


def recording_folder(run_dir: Path, step: int) -> Path:
    """Where a step is recorded."""
    return run_dir / FOLDER / f"step_{step:06d}"


def _joined(arrays: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.asarray(array, dtype) for array in arrays]) if arrays else np.zeros(0, dtype)

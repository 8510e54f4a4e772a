"""What a run writes down of a step's samples, a line each in RUN/lengths.jsonl, samples.jsonl and completions.jsonl.

lengths.jsonl has every prompt, as `python -m infsample_rl.simulate lengths=RUN` reads it; samples.jsonl who decoded
when, of a few prompts; completions.jsonl a few samples as text. A whole step, token by token: recording.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from infsample_rl.config import Config
from infsample_rl.controller.groups import Group, SampleRecord, StepGroups
from infsample_rl.controller.recording import Fetch, write_recording
from infsample_rl.controller.run_state import RunState
from infsample_rl.controller.step_metrics import Metrics
from infsample_rl.model.tokenizer import Response, read_response
from infsample_rl.observe.run_log import LENGTHS_FILE, SAMPLES_FILE
from infsample_rl.types import Episode, RowStay

TEXT_END = 80  # characters of a response's beginning, and of its end, that samples.jsonl has
CUT_SHARE = 0.1
PROMPT_CHARACTERS = 400  # of a prompt's end, where the question is

Records = list[dict[str, Any]]
ResponseOf = Callable[[SampleRecord], Response | None]


class StepRecorder:
    """Writes a step's samples down, as much of them as the settings say."""

    def __init__(self, run: RunState, tokenizer: PreTrainedTokenizerBase) -> None:
        self._run, self._tokenizer = run, tokenizer

    def record(self, groups: StepGroups, metrics: Metrics) -> Records:
        """Write lengths, who decoded when and, where it is due, the whole step; the completions that are shown."""
        run, step, logging = self._run, self._run.step, self._run.config.logging
        if cut := cut_by_observations(groups, run.config, step=step):
            run.log.warn_seldom(cut)
        fetch = cache(run.cluster.micro_groups.completions)
        response_of = response_reader(fetch, self._tokenizer, run.config.rollout.stop_strings)
        run.log.append(LENGTHS_FILE, length_records(groups, run.config, step=step))
        run.log.append(SAMPLES_FILE, sample_records(groups, response_of, step=step))
        if logging.record_every and step % logging.record_every == 0:
            if not write_recording(run.run_dir, groups, fetch, metrics, step=step, total_steps=run.total_steps):
                run.log.warn(f"step {step} is not recorded: a worker that held some of its samples was lost")
        return completion_records(groups, response_of, logging.completions_per_step, step=step)


def cut_by_observations(groups: StepGroups, config: Config, *, step: int) -> str:
    """A warning where observations had no room in CUT_SHARE of the trajectories, so that these ended; else empty."""
    episodes = [sample.episode for group in groups.groups for sample in group.samples if sample.episode is not None]
    unfit = [episode.unfit_tokens for episode in episodes if episode.unfit_tokens]
    if not unfit or len(unfit) < CUT_SHARE * len(episodes):
        return ""
    most = config.environment.max_observation_tokens
    return (
        f"step {step}: {len(unfit)} of {len(episodes)} trajectories ended because an observation, of up to "
        f"{max(unfit)} tokens, did not fit in what was left of rollout.max_new_tokens={config.rollout.max_new_tokens}: "
        f"raise it, or take shorter ones (environment.max_observation_tokens={most})"
    )


def response_reader(fetch: Fetch, tokenizer: PreTrainedTokenizerBase, stop_strings: list[str]) -> ResponseOf:
    """What rewards saw of a sample; None where its micro-group is gone since it was trained."""

    def response_of(sample: SampleRecord) -> Response | None:
        micro_group = fetch(sample.micro_group)
        return None if micro_group is None else read_response(tokenizer, micro_group[sample.position], stop_strings)

    return response_of


def length_records(groups: StepGroups, config: Config, *, step: int) -> Records:
    """A line of recorded lengths for every prompt of a step (rollout/length_prediction/recordings.py)."""
    return [
        {
            "step": step,
            "dataset": group.prompt.source or config.data.source,
            "model": config.model.path,
            "prompt_id": f"row {group.prompt.place}, step {step}",
            "prompt_tokens": len(group.prompt.token_ids),
            "max_new_tokens": config.rollout.max_new_tokens,
            "lengths": [sample.length for sample in group.samples],
            "truncated": [sample.finish_reason == "length" for sample in group.samples],
            "scores": [sample.reward for sample in group.samples],
        }
        for group in groups.groups
    ]


def sample_records(groups: StepGroups, response_of: ResponseOf, *, step: int) -> Records:
    """A record for each of Config.timeline_prompts. Times are seconds since its `started`, a time.time().

    Example: {"step": 3, "prompt_index": 0, "row": 17, "started": 1763630000.25, "prompt": "1 + 1 = ?", "samples":
    [{"sample_index": 0, "length": 24, "finish_reason": "stop", "reward": 1.0, "worker": 0, "forecast": [8, 31.5],
    "text": "2", "stays": [[2, 40, 61, 0.0, 1.25, 24, [[50, 52, 3]]]]}]}
    """
    return [
        _group_record(group, response_of, step)
        for group in groups.groups
        if any(sample.stays for sample in group.samples)
    ]


def _group_record(group: Group, response_of: ResponseOf, step: int) -> dict[str, Any]:
    started = min(stay.started for sample in group.samples for stay in sample.stays)
    return {
        "step": step,
        "prompt_index": group.prompt.prompt_index,
        "row": group.prompt.place,
        "started": started,
        "prompt": group.prompt.text[-PROMPT_CHARACTERS:],
        "samples": [_sample_record(sample, response_of(sample), started) for sample in group.samples],
    }


def _sample_record(sample: SampleRecord, response: Response | None, started: float) -> dict[str, Any]:
    return {
        "sample_index": sample.sample_index,
        "length": sample.length,
        "finish_reason": sample.finish_reason,
        "reward": sample.reward,
        "worker": sample.worker,
        "forecast": None if sample.forecast is None else [sample.forecast.known, round(sample.forecast.tokens, 1)],
        "text": None if response is None else ends_of(response.text),
        "stays": [_stay_record(stay, started) for stay in sample.stays],
    }


def _stay_record(stay: RowStay, started: float) -> list[Any]:
    times = [round(stay.started - started, 4), round(stay.ended - started, 4)]
    return [stay.row, stay.start, stay.end, *times, stay.tokens, [list(span) for span in stay.accepted]]


def ends_of(text: str) -> str:
    """Beginning and end of a long text: ends_of("a" * 100 + "b" * 100) -> 80 a, " ... ", 80 b."""
    return text if len(text) <= 2 * TEXT_END + 5 else f"{text[:TEXT_END]} ... {text[-TEXT_END:]}"


def completion_records(groups: StepGroups, response_of: ResponseOf, most: int, *, step: int) -> Records:
    """Up to `most` samples, spread evenly over the step's (prompt, sample) order; those that are gone are left out."""
    everything = [(group.prompt, sample) for group in groups.groups for sample in group.samples]
    count = min(most, len(everything))
    chosen = [everything[index * len(everything) // count] for index in range(count)]
    return [
        {
            "step": step,
            "prompt_index": prompt.prompt_index,
            "row": prompt.place,
            "sample_index": sample.sample_index,
            "prompt": prompt.text,
            "response": response.text,
            "reward": sample.reward,
            "components": sample.components,
            "advantage": sample.advantage,
            "length": sample.length,
            "finish_reason": sample.finish_reason,
            "policy_version": groups.step,
            **episode_record(sample.episode, response),
            **({"turn_advantages": sample.advantages} if len(sample.advantages) > 1 else {}),
        }
        for prompt, sample in chosen
        if (response := response_of(sample)) is not None
    ]


def episode_record(episode: Episode | None, response: Response) -> dict[str, Any]:
    """What is written of a trajectory's turns: "observed", characters [from, to) of the response that its environment
    gave, "turn_rewards" and "failure", why it has no reward; nothing where there is no environment."""
    if episode is None:
        return {}
    return {"observed": response.observed, "turn_rewards": episode.turn_rewards, "failure": episode.failure}

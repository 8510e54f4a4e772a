"""Metrics of a step, computed from the driver's book and the workers' reports. Names are final: dashboards build on
them."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from infsample_rl.controller.groups import SampleRecord, StepGroups
from infsample_rl.rollout.length_prediction.accuracy import mean_accuracy, prompt_accuracy
from infsample_rl.types import StreamEnd

FORECAST_PROMPTS = 16  # of a step, of which the length predictor's errors are computed

Metrics = dict[str, float | None]
RoundEnds = list[StreamEnd]  # what rollout workers said at the end of a round of sampling


class UpdateReport(NamedTuple):
    """A step's optimizer steps, and what there was beside them. Times are time.time()."""

    metrics: list[Metrics]  # of each optimizer step
    row_times: list[tuple[int, float, float]]  # (learner rank, begin, end) of every row
    sampled: StepGroups  # groups whose samples arrived meanwhile: those that were trained, or the next step's
    backward_done: float
    ended: float


def step_metrics(groups: StepGroups, rounds: list[RoundEnds], update: UpdateReport, *, started: float) -> Metrics:
    """All that a step's groups, rounds of sampling and updates say; call it when the step is done. `started`:
    time.time()."""
    metrics = sample_metrics(groups) | forecast_metrics(groups) | update_metrics(update.metrics)
    if (kl := groups.reward_kl()) is not None:
        metrics["learner/kl"] = kl
    metrics |= rollout_metrics(rounds) | timing_metrics(groups, update, started=started)
    if not rounds:  # a checkpoint has kept the samples: an earlier process knows how long they took
        metrics |= {"timing/rollout": None, "timing/tokens_per_s": None}
    return metrics


def sample_metrics(groups: StepGroups) -> Metrics:
    """Rewards and lengths over all samples of the step, and what the reference took. Samples without a reward are
    outside the reward figures."""
    samples = [sample for group in groups.groups for sample in group.samples]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    lengths = [sample.length for sample in samples]
    metrics: Metrics = {
        "reward/mean": statistics.fmean(rewards) if rewards else None,
        "reward/std": float(np.std(rewards)) if rewards else None,
        "reward/failed": _num_failed(samples),
        "reward/groups_with_signal": statistics.fmean(group.has_signal for group in groups.groups),
        "response/length_mean": statistics.fmean(lengths),
        "response/length_std": float(np.std(lengths)),
        "response/length_max": max(lengths),
        "response/cut": sum(sample.finish_reason == "length" for sample in samples) / len(samples),
        "response/tokens": sum(lengths),
        "response/samples": len(samples),
    }
    if groups.with_reference:
        metrics["memory/reference_peak_bytes"] = groups.reference_peak_bytes
    by_source = {f"reward/mean/{source}": mean for source, mean in _means_by_source(groups).items()}
    of_functions = {f"reward/{name}": mean for name, mean in _component_means(samples).items()}
    return metrics | of_functions | by_source | _episode_metrics(samples)


def _num_failed(samples: list[SampleRecord]) -> int:
    """Samples of which functions gave no reward: where a run has none, to distil without rewards, nothing failed."""
    return sum(sample.reward is None and bool(sample.components) for sample in samples)


def _episode_metrics(samples: list[SampleRecord]) -> Metrics:
    """What environments did, where there are any."""
    episodes = [sample.episode for sample in samples if sample.episode is not None]
    if not episodes:
        return {}
    return {
        "environment/turns_mean": statistics.fmean(episode.turns for episode in episodes),
        "environment/calls_mean": statistics.fmean(episode.calls for episode in episodes),
        "environment/failed": sum(bool(episode.failure) for episode in episodes),
        "environment/replayed": sum(episode.replayed for episode in episodes),
        "environment/stragglers": sum(episode.is_straggler for episode in episodes),
        "environment/waited_s_mean": statistics.fmean(episode.waited_s for episode in episodes),
        "environment/observed_tokens": sum(sample.observed for sample in samples),
    }


def _means_by_source(groups: StepGroups) -> Metrics:
    """The mean reward of every source's samples, where there are several data.sources."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups.groups:
        rewards[group.prompt.source] += [sample.reward for sample in group.samples if sample.reward is not None]
    return {source: statistics.fmean(of) if of else None for source, of in rewards.items() if source}


def _component_means(samples: list[SampleRecord]) -> Metrics:
    names = sorted({name for sample in samples for name in sample.components})
    if len(names) < 2:
        return {}
    values = {
        name: [value for sample in samples if (value := sample.components.get(name)) is not None] for name in names
    }
    # Divided first: functions may return numbers whose sum no float holds.
    return {name: math.fsum(value / len(found) for value in found) if found else None for name, found in values.items()}


def evaluation_metrics(groups: StepGroups, samples: int) -> Metrics:
    """Held-out accuracy: mean@k over all samples, pass@1 of every problem's first sample. Samples without a reward are
    outside both; None where none has one."""
    everything = [sample for group in groups.groups for sample in group.samples]
    rewards = [sample.reward for sample in everything if sample.reward is not None]
    first = [group.samples[0].reward for group in groups.groups if group.samples[0].reward is not None]
    accuracy = statistics.fmean(rewards) if rewards else None
    return {
        "eval/accuracy": accuracy,
        "eval/pass@1": statistics.fmean(first) if first else None,
        f"eval/mean@{samples}": accuracy,
        "eval/length_mean": statistics.fmean(sample.length for sample in everything),
        "eval/failed": _num_failed(everything),
        **{f"eval/{name}": mean for name, mean in _component_means(everything).items()},
        **{f"eval/accuracy/{source}": mean for source, mean in _means_by_source(groups).items()},
    }


def rollout_metrics(rounds: list[RoundEnds]) -> Metrics:
    """Workers decode side by side, a worker's streams one after the other: a round's steps and peaks are its largest
    worker's, rounds and counts add, utilisation is weighted by steps. What lost workers did is not in it.
    """
    streams = [end.stats for ends in rounds for end in ends]
    steps = sum(stream["running_steps"] for stream in streams)
    accepted, rows = (sum(stream[name] for stream in streams) for name in ("accepted_tokens", "row_steps"))
    cached, sent = (sum(stream[name] for stream in streams) for name in ("cached_tokens", "sent_tokens"))
    least = sum(stream["least_steps"] for stream in streams)
    busy = sum(stream["row_utilisation"] * stream["running_steps"] for stream in streams)
    return {
        "rollout/running_steps": sum(_largest_worker(ends, "running_steps") for ends in rounds if ends),
        "rollout/of_bound": steps / least if least else None,
        "rollout/rounds": len(rounds),
        "rollout/peak_kv_bytes": max((stream["peak_kv_bytes"] for stream in streams), default=None),
        "rollout/kv_pool_bytes": max((stream["kv_pool_bytes"] for stream in streams), default=None),
        "memory/rollout_peak_bytes": max(
            (stream["peak_memory_bytes"] for stream in streams if "peak_memory_bytes" in stream), default=None
        ),
        "rollout/row_utilisation": busy / steps if steps else None,
        "rollout/recomputed_tokens": sum(stream["recomputed_tokens"] for stream in streams),
        "rollout/parked_tokens": sum(stream["parked_tokens"] for stream in streams),
        "rollout/preemptions": sum(stream["preemptions"] for stream in streams),
        "rollout/tokens_per_row_step": 1 + accepted / rows if rows else None,
        "rollout/drafted_tokens": sum(stream["drafted_tokens"] for stream in streams),
        "rollout/accepted_tokens": accepted,
        "rollout/draft_seconds": sum(_largest_worker(ends, "draft_seconds") for ends in rounds if ends),
        "rollout/prefix_cache_hits": cached / sent if sent else None,
        "predictor/seconds": sum(_largest_worker(ends, "predict_seconds") for ends in rounds if ends),
    }


def _largest_worker(ends: RoundEnds, name: str) -> float:
    sums: dict[int, float] = defaultdict(float)
    for end in ends:
        sums[end.worker] += end.stats[name]
    return max(sums.values())


def forecast_metrics(groups: StepGroups) -> Metrics:
    """How good the first prediction of every sample's length was: errors over samples that ended by themselves,
    Kendall's tau-b within prompts.

    Over FORECAST_PROMPTS of the step's prompts, spread evenly: a tau takes the square of G. Nothing where nothing was
    predicted.
    """
    every = -(-len(groups.groups) // FORECAST_PROMPTS)
    found = [[sample for sample in group.samples if sample.forecast is not None] for group in groups.groups[::every]]
    prompts = [
        prompt_accuracy(
            [max(sample.forecast.tokens, 1.0) for sample in samples],
            [sample.length for sample in samples],
            [sample.finish_reason == "length" for sample in samples],
        )
        for samples in found
        if samples
    ]
    if not prompts:
        return {}
    mean = mean_accuracy(prompts)
    return {
        "predictor/log_error": mean["log_error"],
        "predictor/token_error": mean["token_error"],
        "predictor/tau": mean["tau"],
    }


def update_metrics(updates: list[dict[str, float | None]]) -> Metrics:
    """Means over a step's updates that have a value; skipped ones are counted, the learning rate is the last one's,
    memory and maxima the most there was, the gradient's norm that of updates which were made.
    """
    found: dict[str, list[Any]] = {
        name: [update[name] for update in updates if update[name] is not None] for name in updates[0]
    }
    if "learner/grad_norm" in found:
        found["learner/grad_norm"] = [
            update["learner/grad_norm"] for update in updates if not update["learner/skipped_updates"]
        ] or [0.0]
    largest = {name: name.startswith("memory/") or name.endswith("_max") for name in found}
    means = {
        name: (max if largest[name] else statistics.fmean)(values) if values else None for name, values in found.items()
    }
    skipped = sum(update["learner/skipped_updates"] or 0 for update in updates)
    return means | {
        "learner/skipped_updates": skipped,
        "learner/lr": updates[-1]["learner/lr"],
        "learner/updates": len(updates),
    }


def timing_metrics(groups: StepGroups, update: UpdateReport, *, started: float) -> Metrics:
    """Seconds of a step's phases, up to now."""
    decoded, beside = _last_sample_at(groups), max(started, _last_sample_at(update.sampled))
    tokens = sum(sample.length - sample.observed for group in groups.groups for sample in group.samples)
    ranks = {rank for rank, _, _ in update.row_times}
    overlapped = sum(max(0.0, min(end, beside) - begin) for _, begin, end in update.row_times)
    return {
        "timing/step": time.time() - started,
        "timing/rollout": decoded - groups.started_at,
        "timing/backward_after_rollout": max(0.0, update.backward_done - beside),
        "timing/update": update.ended - update.backward_done,
        "timing/overlap": overlapped / len(ranks) if ranks else 0.0,  # a rank's rows while others decoded
        # > 0: trained while others decoded
        "timing/backward_lead": max((beside - begin for _, begin, _ in update.row_times), default=0.0),
        # > 0: scored while its group decoded
        "timing/reward_lead": max(group.last_sample_at - group.first_reward_at for group in groups.groups),
        "timing/tokens_per_s": tokens / (decoded - groups.started_at),
    }


def _last_sample_at(groups: StepGroups) -> float:
    return max(group.last_sample_at for group in groups.groups)

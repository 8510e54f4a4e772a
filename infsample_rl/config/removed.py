"""Settings that are gone: refused with what replaces them, and dropped from old runs where they stood at their
default, or where another setting says the same."""

from __future__ import annotations

import dataclasses
from typing import Any

ANY = object()


@dataclasses.dataclass(frozen=True)
class Removed:
    """What a setting was when it went, ANY where another says the same, and what to do without it: `instead` follows
    "it is gone: "."""

    default: Any
    instead: str


_CPUS = Removed(None, "set cluster.cpus_per_worker, of every worker")
REMOVED = {
    "learner.moments_folder": Removed(None, "take learner.offload_optimizer=true or learner.optimizer=adamw_8bit"),
    "learner.warmup_ratio": Removed(0.0, "set learner.warmup_steps, the share times the run's updates"),
    "objective.kl_in_reward": Removed(ANY, "set objective.kl_reward_coef, which is the KL's weight, 0 for none"),
    "objective.shuffle_advantages": Removed(False, "tests/runs/test_learning.py makes that run"),
    "data.size": Removed(1000, "set data.generator_kwargs.size"),
    "data.generator_seed": Removed(0, "set data.generator_kwargs.seed"),
    "rollout.predict_every": Removed(32, "the probe predicts every 32 running steps"),
    "rollout.max_undelivered": Removed(8, "a worker pauses with 8 micro-groups that wait"),
    "rollout.park_folder": Removed(None, "set rollout.preemption to the folder"),
    "reward.retries": Removed(1, "a call whose process died is tried once more"),
    "reward.write_paths": Removed([], "functions may write in their temporary folder, or take reward.isolation=limits"),
    "reward.model_batch_tokens": Removed(16384, "a reward model's batch has 16,384 padded tokens at most"),
    "cluster.dashboard": Removed(False, "start Ray with `ray start --head` and set cluster.address=auto"),
    "cluster.dashboard_host": Removed("127.0.0.1", "start Ray with `ray start --head --dashboard-host=HOST`"),
    "cluster.decode_steps_per_turn": Removed(8, "a process that does both decodes 8 steps between two learner rows"),
    "cluster.rollout_cpus": _CPUS,
    "cluster.learner_cpus": _CPUS,
    "cluster.reference_cpus": _CPUS,
    "cluster.reward_cpus": _CPUS,
    "cluster.threads_per_worker": Removed(1, "set cluster.cpus_per_worker, which is the number of threads too"),
    "cluster.max_workers": Removed(None, "stop the run and go on with another cluster.rollout_workers"),
    "cluster.min_workers": Removed(1, "a step needs one rollout worker, lost ones are replaced"),
    "cluster.start_timeout_s": Removed(300.0, "set cluster.progress_timeout_s, where a start takes more than 300 s"),
    "cluster.weight_checksum": Removed(False, "leave it out, weights that do not fit are refused in any case"),
    "cluster.collective_timeout_s": Removed(300.0, "set cluster.progress_timeout_s to twice of it"),
    "logging.verbose": Removed(False, "metrics.jsonl, trace.json and report.html have every figure of a step"),
    "logging.trace_steps": Removed(20, "trace.json keeps the newest 20 steps"),
    "logging.timeline_prompts_per_step": Removed(2, "samples.jsonl has two prompts of every step"),
    "logging.report": Removed(True, "report.html is always written"),
}


def why_removed(name: str) -> str:
    """ "learner.warmup_ratio is gone: set learner.warmup_steps, ...", or "" for a setting that was never there."""
    return f"{name} is gone: {REMOVED[name].instead}" if name in REMOVED else ""


def without_removed(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of an old run without those that are gone. ValueError for the first that was changed there, since
    the run would not be the same."""
    kept: dict[str, Any] = {}
    for section, values in settings.items():
        kept[section] = {}
        for key, value in values.items():
            gone = REMOVED.get(f"{section}.{key}")
            if gone is None:
                kept[section][key] = value
            elif gone.default not in (ANY, value):
                raise ValueError(f"{section}.{key}={value}: {why_removed(f'{section}.{key}')}")
    return kept

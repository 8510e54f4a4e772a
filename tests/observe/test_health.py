"""Every rule on a series that crosses its threshold and on one that does not; what is said again and when; settings
named that compose."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from pathlib import Path

import pytest
import yaml

from infsample_rl.config import Config
from infsample_rl.config.loading import load_config
from infsample_rl.observe.health import FORGET_STEPS, REMIND_STEPS, Health
from infsample_rl.observe.health_rules import RULES
from infsample_rl.observe.records import read_records

PACKAGE = Path(__file__).resolve().parents[2] / "infsample_rl"
RECORDED = sorted((Path(__file__).parents[1] / "data" / "metrics").glob("*.jsonl"))
FINE = {  # a step of a run that learns
    "reward/mean": 0.5, "reward/std": 0.5, "reward/groups_with_signal": 1.0, "reward/failed": 0, "response/cut": 0.1,
    "learner/kl": 0.002, "learner/entropy": 0.3, "learner/grad_norm": 0.2, "learner/skipped_updates": 0.0,
    "learner/logprob_diff_mean": 0.002, "learner/logprob_diff_max": 1e-5, "learner/engine_ess": 0.99,
    "rollout/row_utilisation": 0.5, "predictor/used": 1.0, "predictor/steps_saved": 20, "cluster/rollout_workers": 2,
    "response/samples": 128,
}  # fmt: skip


@functools.cache
def kk_tiny() -> Config:
    return load_config([])


def settings(*overrides: str) -> Config:
    """The default experiment with section.key=value, checked as a command's would be."""
    config = copy.deepcopy(kk_tiny())
    for override in overrides:
        name, _, value = override.partition("=")
        section, _, key = name.partition(".")
        setattr(config, section, dataclasses.replace(getattr(config, section), **{key: yaml.safe_load(value)}))
    return dataclasses.replace(config)


def findings(config: Config, *stretches: tuple[int, dict]) -> list[tuple[int, str, str]]:
    """(step, rule, text) of everything said over stretches of (steps, what is not FINE in them)."""
    health, step, said = Health(config), 0, []
    for count, changed in stretches:
        for _ in range(count):
            step += 1
            said += [(step, finding.rule, finding.text) for finding in health.enter(step, FINE | changed)]
    return said


# rule, settings, series that must not be said, series that must
SIGNAL, SAVED = "reward/groups_with_signal", "predictor/steps_saved"
MEAN, MAX = "learner/logprob_diff_mean", "learner/logprob_diff_max"
CASES = [
    ("constant_reward", [], [(9, {}), (7, {SIGNAL: 0.0}), (1, {})], [(8, {SIGNAL: 0.0, "reward/std": 0.0})]),
    ("constant_reward", [], [(20, {SIGNAL: 0.25})], [(8, {SIGNAL: 0.0, "reward/std": 0.4})]),
    ("constant_reward", ["reference.path=x", "objective.distill_coef=1"], [(20, {SIGNAL: 0.0, "reward/std": 0.0})],
    None),
    ("exploding_kl", ["objective.kl=k3", "objective.kl_coef=0.001"], [(20, {"learner/kl": 0.15})], [(12, {}), (2,
    {"learner/kl": 0.3})]),
    ("exploding_kl", ["objective.kl=k3", "objective.kl_coef=0.001"], [(9, {}), (1, {"learner/kl": 9.0}), (9, {})],
    [(3, {"learner/kl": 1.2})]),
    ("exploding_kl", ["objective.kl_coef=0"], [(20, {"learner/kl": 9.0})], None),
    ("exploding_kl", ["objective.kl_coef=0", "objective.kl_reward_coef=0.001"], [(20, {"learner/kl": 0.15})], [(3,
    {"learner/kl": 1.2})]),
    ("exploding_kl", ["reference.path=x", "objective.kl_coef=0.001", "objective.distill_coef=1"], [(20,
    {"learner/kl": 9.0})], None),
    ("collapsing_entropy", [], [(5, {}), (20, {"learner/entropy": 0.05})], [(5, {}), (5, {"learner/entropy": 0.02})]),
    ("collapsing_entropy", [], [(20, {"learner/entropy": 0.0001})], [(5, {}), (20, {"learner/entropy": 0.0})]),
    ("collapsing_entropy", [], [(5, {}), (20, {"learner/entropy": None})], None),  # steps without a learner row
    ("all_cut", [], [(20, {"response/cut": 0.62})], [(5, {"response/cut": 0.97})]),
    ("predictor_worse_than_none", [], [(20, {"predictor/used": 0.0, SAVED: -70})], [(5, {SAVED: -3})]),
    ("predictor_worse_than_none", [], [(20, {"predictor/tau": 0.1})], [(10, {"predictor/tau": -0.1})]),
    ("idle_rows", [], [(20, {"rollout/row_utilisation": 0.2})], [(5, {"rollout/row_utilisation": 0.1})]),
    ("idle_rows", ["rollout.prompts_at_once=1"], [(20, {"rollout/row_utilisation": 0.2})], [(5,
    {"rollout/row_utilisation": 0.1})]),
    ("idle_rows", ["environment.factory=a.py:A"], [(20, {"rollout/row_utilisation": 0.05})], None),
    (
        "idle_rows",
        ["rollout.schedule=arrival", "rollout.slots=64", "data.prompts_per_step=2"],
        [(20, {"cluster/rollout_workers": 1, "rollout/row_utilisation": 0.4})],
        [(5, {"rollout/row_utilisation": 0.4})],
    ),
    (
        "idle_rows",
        ["rollout.schedule=full_group", "data.prompts_per_step=2"],
        [(20, {"cluster/rollout_workers": 4, "rollout/row_utilisation": 0.4})],
        [(5, {"cluster/rollout_workers": 4, "rollout/row_utilisation": 0.1})],
    ),
    ("skipped_updates", [], [(20, {})], [(1, {"learner/skipped_updates": 1.0})]),
    ("always_clipped", [], [(19, {"learner/grad_norm": 9.0}), (1, {})], [(20, {"learner/grad_norm": 4.0})]),
    ("always_clipped", [], [(40, {"learner/grad_norm": 2.0})], None),
    ("failing_rewards", [], [(20, {"reward/failed": 6})], [(3, {"reward/failed": 20})]),
    ("failing_rewards", [], [(20, {"reward/failed": 20, "response/samples": 384})], [(3, {"reward/failed": 60,
    "response/samples": 384})]),
    ("failing_rewards", ["reference.path=x", "objective.distill_coef=1", "objective.reward_coef=0"], [(20,
    {"reward/failed": 128})], None),
    ("growing_mismatch", ["objective.mismatch_stop_float32=0.0001"], [(20, {MAX: 6e-5})], [(5, {}), (5, {MAX: 6e-5})]),
    ("growing_mismatch", ["model.dtype=bfloat16"], [(5, {}), (20, {MEAN: 0.02})], [(5, {}), (5, {MEAN: 0.03})]),
    ("stale_samples", ["run.max_staleness=1"], [(20, {"learner/engine_ess": 0.7})], [(5, {"learner/engine_ess": 0.4})]),
]  # fmt: skip


def test_steps_without_a_row_do_not_hide_what_the_others_show():
    config, low = settings("run.max_staleness=1"), {"learner/engine_ess": 0.4}
    said = findings(config, *([(1, low), (1, {"learner/engine_ess": None})] * 5))
    assert [(step, rule) for step, rule, _ in said] == [(9, "stale_samples")] and "leave 40%" in said[0][2]


@pytest.mark.parametrize(
    ("overrides", "cause"),
    [([], "no sample with a reward or a signal"), (["learner.on_nonfinite=skip"], "was not finite")],
)
def test_a_skipped_update_is_called_not_finite_only_where_such_are_skipped(overrides, cause):
    ((_, rule, text),) = findings(settings(*overrides), (1, {"learner/skipped_updates": 1.0}))
    assert rule == "skipped_updates" and cause in text


@pytest.mark.parametrize(
    ("rule", "overrides", "quiet", "said"), CASES, ids=[f"{place}-{case[0]}" for place, case in enumerate(CASES)]
)
def test_a_rule_speaks_where_its_threshold_is_crossed_and_only_there(rule, overrides, quiet, said):
    config = settings(*overrides)
    assert findings(config, *quiet) == []
    if said is None:
        return
    ((step, name, text),) = findings(config, *said)
    assert (step, name) == (sum(count for count, _ in said) if rule != "collapsing_entropy" else 10, rule)
    assert "\n" not in text and re.search(r"\d", text)
    for setting, value in re.findall(
        r"\b((?:rollout|objective|learner|model|run|data|reward)\.\w+)=([\w.-]+)", text.split(": ", 1)[-1]
    ):
        if setting not in ("rollout.max_new_tokens", "learner.max_tokens_per_micro_batch"):  # those two go together
            settings(*overrides, f"{setting}={float(value) if 'e-' in value else value}")


def test_every_rule_has_a_case_and_a_row_in_the_docs():
    names = {rule.__name__ for rule in RULES}
    assert {case[0] for case in CASES} == names
    rows = set(re.findall(r"^\| `(\w+)` \|", (PACKAGE.parent / "docs" / "warnings.md").read_text(), re.MULTILINE))
    assert rows == names


def test_every_metric_that_rules_read_is_one_that_a_step_has():
    read = set(re.findall(r'"((?:\w+)/\w+)"', (PACKAGE / "observe" / "health_rules.py").read_text()))
    others = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "health_rules.py")
    missing = {name for name in read if f'"{name}"' not in others}
    assert missing - {"predictor/tau"} == set()  # of a run that records its forecasts


def test_all_cut_names_a_row_that_holds_the_longer_response():
    config = settings("rollout.max_new_tokens=900", "data.max_prompt_tokens=1024")
    ((_, _, text),) = findings(config, (5, {"response/cut": 1.0}))
    assert "rollout.max_new_tokens=1800 (with learner.max_tokens_per_micro_batch=2824)" in text
    settings("data.max_prompt_tokens=1024", "rollout.max_new_tokens=1800", "learner.max_tokens_per_micro_batch=2824")


def test_what_holds_is_said_once_and_again_when_worse_or_after_many_steps_or_when_it_comes_back():
    config, held = settings(), {"rollout/row_utilisation": 0.1}
    assert [step for step, _, _ in findings(config, (REMIND_STEPS, held))] == [5]
    assert [step for step, _, _ in findings(config, (2 * REMIND_STEPS, held))] == [5, 5 + REMIND_STEPS]
    worse = findings(config, (10, held), (10, {"rollout/row_utilisation": 0.02}))
    assert worse[0][0] == 5 and 10 < worse[1][0] <= 15
    flickers = [(5, held), (5, {}), (5, held)]
    assert len(findings(config, *flickers)) == 1
    assert len(findings(config, (5, held), (FORGET_STEPS + 5, {}), (5, held))) == 2


def test_nothing_is_said_of_missing_or_infinite_metrics():
    health = Health(settings("objective.kl=k3", "objective.kl_coef=0.001"))
    for step in range(1, 40):
        assert health.enter(step, {}) == []
        assert health.enter(step, dict.fromkeys(FINE) | {"learner/kl": math.nan, "learner/entropy": math.inf}) == []
    assert health.enter(0, FINE | {"response/cut": 1.0}) == []


def test_a_resumed_run_is_compared_with_its_own_first_steps_and_a_rewound_one_forgets():
    config = settings()
    history = [{"step": step, **FINE} for step in range(1, 21)]
    collapsed = FINE | {"learner/entropy": 0.01}
    resumed = Health(config, history)
    said = [finding.rule for step in range(21, 30) for finding in resumed.enter(step, collapsed)]
    assert said == ["collapsing_entropy"] and resumed.num_holding == 1
    resumed.rewind(20)
    again = [finding.rule for step in range(21, 30) for finding in resumed.enter(step, collapsed)]
    assert again == ["collapsing_entropy"]
    assert [finding for step in range(21, 40) for finding in Health(config).enter(step, collapsed)] == []


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_recorded_runs_that_learn_are_found_healthy(path):
    health, steps = Health(settings()), 0
    for record in read_records(path):
        assert health.enter(record["step"], record) == []
        steps += 1
    assert steps >= 25

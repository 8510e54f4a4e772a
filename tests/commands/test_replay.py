"""A recorded step gives the learner alone what it gave the run, and its lengths the scheduler alone."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml

from infsample_rl.commands import replay
from infsample_rl.commands.schedule_workload import SimulateOptions, load
from infsample_rl.config.loading import compose, load_config
from infsample_rl.controller.groups import StepGroups, loss_totals, provisional_totals, trainable_specs
from infsample_rl.controller.recording import read_recording, write_recording
from infsample_rl.controller.step_records import StepRecorder, length_records
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.learner.row_plan import assemble
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.observe.run_log import RunLogger
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from tests.fakes import header, rewarded


@pytest.fixture
def arguments(tiny_run, tmp_path):
    """Settings of a small run in tmp_path/run."""
    update = "learner.max_tokens_per_micro_batch=96 objective.kl=k3 objective.kl_coef=0.01"
    kept = "logging.record_every=1 run.checkpoint_every=1"
    return [*tiny_run, "rollout.max_new_tokens=24", f"run.dir={tmp_path / 'run'}", *f"{update} {kept}".split()]


@pytest.fixture
def recorded_run(arguments, tmp_path):
    """A first step made by engine and learner, without Ray: every sample a row of its own, under provisional
    denominators."""
    config = load_config(arguments)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(yaml.safe_dump(compose(arguments)))
    tokenizer = load_tokenizer(config.model)
    prompts = build_train_prompts(config, tokenizer, None).next_batch()
    engine = SamplingEngine(load_model(config.model), tokenizer, config.rollout)
    groups, micro_groups = StepGroups(prompts, config, group_size=4, step=0, with_reference=False), []
    for completions in engine.stream([prompt.token_ids.tolist() for prompt in prompts], seed=0):
        key, lengths = len(micro_groups), [len(completion.token_ids) for completion in completions]
        micro_groups.append(completions)
        told = {"lengths": lengths, "finish_reasons": [completion.finish_reason for completion in completions]}
        indices = [completion.sample_index for completion in completions]
        groups.add_micro_group(key, header(completions[0].prompt_index, indices, **told))
        sums = [int(completion.token_ids.sum()) for completion in completions]
        rewards = [None if value % 5 == 0 else float(value % 11) for value in sums]
        groups.add_rewards(key, rewarded(*rewards))
    trained = groups.take_complete()
    rows = [[spec] for group in trained for spec in trainable_specs(group, config)]
    learner_config = load_config([*arguments, "reference.placement=learner"])
    learner = LearnerWorker(learner_config, rank=0, world_size=1, total_steps=2)
    learner.setup(None)
    by_prompt = {prompt.prompt_index: prompt.token_ids for prompt in prompts}
    for row in reversed(rows):
        learner.accumulate(assemble(row, by_prompt, micro_groups, []), provisional_totals(config))
    metrics = learner.step(loss_totals(trained, config))
    assert write_recording(run_dir, groups, lambda key: micro_groups[key], metrics, step=1, total_steps=2)
    found = {"folder": run_dir, "config": config, "groups": groups, "metrics": metrics}
    return SimpleNamespace(**found, fetch=lambda key: micro_groups[key])


def test_the_learner_alone_finds_the_runs_loss_and_gradient(recorded_run, capsys):
    assert replay.main([str(recorded_run.folder), "step=1", "json=true"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["run"]["learner/grad_norm"] > 0
    for name in ("learner/grad_norm", "learner/entropy", "learner/lr"):
        assert found["replay"][name] == pytest.approx(found["run"][name], rel=1e-5, abs=0), name
    # zero but for rounding: on policy advantages cancel, and the reference is the policy
    for name in ("learner/loss", "learner/kl"):
        assert found["replay"][name] == pytest.approx(found["run"][name], abs=1e-6), name
    assert found["replay"]["learner/logprob_diff_max"] < 1e-4
    assert replay.main([str(recorded_run.folder), "step=1", "objective.loss=dapo"]) == 0
    shown = capsys.readouterr().out
    assert "learner/grad_norm" in shown and "relative" in shown


@pytest.fixture
def other(recorded_run, tmp_path):
    """A folder with another model than the run's."""
    model, folder = load_model(recorded_run.config.model), tmp_path / "other"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(folder)
    load_tokenizer(recorded_run.config.model).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("adapters", [[], ["learner.lora_rank=2", "learner.lora_alpha=4"]])
def test_a_reference_of_its_own_is_asked_as_the_runs_workers_were(recorded_run, other, adapters):
    recorded = read_recording(recorded_run.folder, 1)

    def kl(*changes: str) -> float | None:
        config = replay.replay_config(recorded_run.folder, [*adapters, *changes])
        return replay.replay(config, recorded, None)["learner/kl"]

    own = kl(f"reference.path={other}")
    assert own > 1e-4 and kl() < 1e-6 and kl("objective.kl_coef=0") is None
    if not adapters:
        assert own == pytest.approx(kl(f"reference.path={other}", "reference.placement=learner"), rel=1e-5)


def test_a_step_that_was_distilled_without_rewards_is_trained(recorded_run, other):
    recorded = read_recording(recorded_run.folder, 1)
    for sample in (sample for group in recorded.groups for sample in group.samples):
        sample.reward, sample.advantages = None, (0.0,)
    settings = ["objective.reward_coef=0", "objective.distill_coef=1", "objective.kl_coef=0"]
    config = replay.replay_config(recorded_run.folder, [*settings, f"reference.path={other}"])
    found = replay.replay(config, recorded, None)
    assert found["learner/skipped_updates"] == 0 and found["learner/grad_norm"] > 1e-4


def test_a_recording_holds_every_sample_as_it_was(recorded_run):
    recorded = read_recording(recorded_run.folder, 1)
    assert recorded.total_steps == 2
    for group, was in zip(recorded.groups, recorded_run.groups.groups, strict=True):
        assert np.array_equal(group.prompt.token_ids, was.prompt.token_ids)
        kept, given = group.samples, was.samples
        assert [(s.reward, s.advantage, s.length) for s in kept] == [(s.reward, s.advantage, s.length) for s in given]


def test_what_was_not_kept_is_said_in_one_line(recorded_run, capsys):
    for wrong, message in (
        (["step=2"], "was not recorded; recorded steps: 1"),
        ([], "give the step"),
        (["step=x"], "must be a whole number"),
    ):
        assert replay.main([str(recorded_run.folder), *wrong]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="began from checkpoint 3, which .* has not kept"):
        replay.start_of(recorded_run.folder, 4)


def test_the_lengths_of_a_run_go_into_the_scheduler_alone(recorded_run):
    lines = [json.dumps(record) for record in length_records(recorded_run.groups, recorded_run.config, step=1)]
    (recorded_run.folder / "lengths.jsonl").write_text("\n".join(lines) + "\n")
    options = SimulateOptions(lengths=[str(recorded_run.folder)], prompt_tokens=None)
    workload = load(recorded_run.folder, options)
    assert workload.groups == [[sample.length for sample in group.samples] for group in recorded_run.groups.groups]
    assert workload.cap == 24
    with (recorded_run.folder / "lengths.jsonl").open("a") as file:
        file.write(lines[0][:40])  # killed while it wrote
    assert load(recorded_run.folder, options) == workload


def test_a_step_is_kept_as_the_settings_say_and_forgotten_when_it_is_done_again(recorded_run, tmp_path):
    config, folder = recorded_run.config, tmp_path / "kept"
    log = RunLogger(config, folder, total_steps=2, start_step=0)
    micro_groups = SimpleNamespace(completions=recorded_run.fetch)
    run = SimpleNamespace(
        config=config,
        run_dir=folder,
        log=log,
        total_steps=2,
        step=1,
        cluster=SimpleNamespace(micro_groups=micro_groups),
    )
    recorder = StepRecorder(run, load_tokenizer(config.model))
    try:
        shown = recorder.record(recorded_run.groups, recorded_run.metrics)
        assert len(shown) == config.logging.completions_per_step == 4
        kept = [json.loads(line)["lengths"] for line in (folder / "lengths.jsonl").read_text().splitlines()]
        assert kept == [[sample.length for sample in group.samples] for group in recorded_run.groups.groups]
        assert len(read_recording(folder, 1).completions) == 12
        run.step, micro_groups.completions = 2, lambda key: None  # their worker is gone
        recorder.record(recorded_run.groups, recorded_run.metrics)
        assert not (folder / "recordings" / "step_000002").exists()
        log.rewind(1)
        assert len((folder / "lengths.jsonl").read_text().splitlines()) == 3
    finally:
        log.close()


@pytest.mark.slow
def test_a_real_run_replays(arguments, tmp_path):
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def vowels(prompts, completions, **columns):\n    return [sum(c in 'aeiou' for c in text) / 9 for text in "
        "completions]\n"
    )
    two_updates = ["objective.mini_batches=2", "objective.epochs=2", "run.keep_checkpoints=9"]
    run = [*arguments, f"reward.functions=[{{name: '{reward}:vowels'}}]", *two_updates]
    main = [sys.executable, "-m", "infsample_rl.main", *run]
    done = subprocess.run(main, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    command = [sys.executable, "-m", "infsample_rl", "replay", str(tmp_path / "run"), "step=2", "json=true"]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stdout)
    assert found["replay"]["learner/grad_norm"] == pytest.approx(found["run"]["learner/grad_norm"], rel=1e-5)
    assert len((tmp_path / "run" / "lengths.jsonl").read_text().splitlines()) == 6
    simulated = [sys.executable, "-m", "infsample_rl.simulate", f"lengths={tmp_path / 'run'}", "slots=2", "json=true"]
    assert subprocess.run(simulated, capture_output=True, text=True, timeout=300).returncode == 0

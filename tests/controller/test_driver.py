"""A run from its start to its end: what is done again, what is saved, what is owed. Everything but the workers is
real."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import SafetensorError

from infsample_rl.cluster.interruption import Terminated
from infsample_rl.config.loading import load_config
from infsample_rl.controller import ahead, checkpoints, checks, driver, recording
from infsample_rl.controller.checks import prepare
from infsample_rl.controller.driver import Driver
from infsample_rl.controller.inputs import read_inputs
from infsample_rl.controller.openings import Openings
from infsample_rl.observe.records import read_records
from infsample_rl.observe.run_log import RunLogger
from tests.fake_cluster import FakeCluster, at_call, lose_step

SETTINGS = [
    *("run.steps=4", "run.checkpoint_every=2", "run.eval_prompts=0", "data.prompts_per_step=2", "objective.kl_coef=0"),
    *("data.max_prompt_tokens=64", "reward.functions=[{name: gsm8k}]", "rollout.group_size=2", "rollout.slots=2"),
    *("rollout.max_new_tokens=48", "rollout.predictor=none", "learner.max_tokens_per_micro_batch=128"),
    *("learner.warmup_steps=0", "cluster.learner_ranks=1", "cluster.max_restarts=3", "logging.wandb=disabled"),
]
ONE_EVALUATION = ["run.eval_prompts=2", "run.eval_every=3", "run.steps=3"]


class Run:
    """What is left of a run in its folder, and what was asked of its workers."""

    def __init__(self, folder: Path, cluster: FakeCluster) -> None:
        self.folder, self.cluster, self.calls = folder, cluster, cluster.calls
        self.records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        self.steps = [record["step"] for record in self.records]
        self.saved = [path.name for path in checkpoints.checkpoints(folder)]
        self.log = (folder / "run.log").read_text()


@pytest.fixture
def train(tiny_qwen3, sums_file, tmp_path, monkeypatch) -> Callable[..., Run]:
    """Runs with `on` in FakeCluster.on; a run that is to fail is given the exception it ends with."""
    monkeypatch.setattr(driver, "summary", lambda *arguments, **options: "")  # they take the longest here
    monkeypatch.setattr(RunLogger, "write_report", lambda *arguments, **options: None)
    inputs = [f"model.path={tiny_qwen3}", f"data.source={sums_file}", f"data.eval_source={sums_file}"]

    def run(*settings: str, fails: type[Exception] | None = None, match: str = "", **on) -> Run:
        config = load_config([*inputs, *SETTINGS, f"run.dir={tmp_path / 'run'}", *settings])
        clusters: list[FakeCluster] = []

        def make_cluster(*arguments, **options) -> FakeCluster:
            cluster = FakeCluster(*arguments, **options)
            cluster.on = on
            clusters.append(cluster)
            return cluster

        start = prepare(config, read_inputs(config))
        with pytest.raises(fails, match=match) if fails else contextlib.nullcontext():
            Driver(config, start, make_cluster=make_cluster).run()
        start.lock.close()  # as when the process ends
        return Run(tmp_path / "run", clusters[0])

    return run


def refuse(cluster: FakeCluster) -> None:
    raise RuntimeError("no more")


def full_disk(cluster: FakeCluster) -> None:
    raise OSError(28, "No space left on device")


sigterm = FakeCluster.sigterm


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_takes_its_steps_and_saves_them(train, staleness):
    run = train(f"run.max_staleness={staleness}")
    assert run.steps == [1, 2, 3, 4] and run.saved == ["step_000002", "step_000004"]
    assert [record.get("rollout/staleness") for record in run.records] == ([0, 1, 1, 1] if staleness else [None] * 4)
    assert all(record["reward/mean"] == 0.5 and record["learner/updates"] == 1 for record in run.records)
    assert run.calls.count("start_rollout") == run.calls.count("optimizer_step") == 4 and run.calls[-1] == "stop"
    assert (run.folder / "checkpoints/step_000004/model.safetensors").read_text() == "weights 4"


@pytest.mark.parametrize("ended", [ValueError("no place"), Terminated()])
def test_a_cluster_that_cannot_be_had_leaves_nothing(tiny_qwen3, sums_file, tmp_path, ended):
    inputs = [f"model.path={tiny_qwen3}", f"data.source={sums_file}", f"run.dir={tmp_path / 'run'}"]
    config, clusters = load_config([*inputs, *SETTINGS]), list[FakeCluster]()

    def make_cluster(*arguments, **options) -> FakeCluster:
        clusters.append(cluster := FakeCluster(*arguments, **options))
        cluster.on["reach"] = refuse
        return cluster

    def refuse(cluster: FakeCluster) -> None:
        raise ended

    with pytest.raises(type(ended)):
        Driver(config, prepare(config, read_inputs(config)), make_cluster=make_cluster)
    assert not (tmp_path / "run").exists() and clusters[0].calls == ["reach", "stop"]


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_lost_step_is_done_again_from_the_last_checkpoint(train, staleness):
    undisturbed = train(f"run.max_staleness={staleness}")
    state = checkpoints.read_state(undisturbed.folder / "checkpoints/step_000004")
    shutil.rmtree(undisturbed.folder)
    run = train(f"run.max_staleness={staleness}", optimizer_step=at_call(4, lose_step))
    assert run.steps == [1, 2, 3, 4] and run.calls.count("optimizer_step") == 6
    (warning,) = read_records(run.folder / "warnings.jsonl")
    assert re.fullmatch(
        "learner rank 0: its process died: going back to .*step_000002; steps 3 to 4 are done again", warning["text"]
    )
    assert checkpoints.read_state(run.folder / "checkpoints/step_000004") == state


def test_a_step_lost_while_its_weights_are_published_is_the_last_that_is_done_again(train):
    run = train(publish_weights=at_call(4, lose_step))
    (warning,) = read_records(run.folder / "warnings.jsonl")
    assert "steps 3 to 3 are done again" in warning["text"] and run.steps == [1, 2, 3, 4]


def test_what_was_wrong_with_a_checkpoint_is_kept_when_the_run_goes_back_behind_it(train, tmp_path):
    def damage_and_lose(cluster: FakeCluster) -> None:
        (tmp_path / "run/checkpoints/step_000002/driver_state.json").write_text("")
        lose_step(cluster)

    run = train(optimizer_step=at_call(4, damage_and_lose))
    damage, back = (record["text"] for record in read_records(run.folder / "warnings.jsonl"))
    assert "step_000002 is damaged and not used" in damage and "going back to the start; steps 1 to 4" in back


def test_a_step_without_rewards_that_is_done_again_counts_once(train):
    def break_rewards(cluster: FakeCluster) -> None:
        cluster.broken = "TypeError" if cluster.calls.count("start_rollout") in (3, 4) else ""

    settings = ["reward.max_failed_steps=2"]
    assert train(*settings, start_rollout=break_rewards, optimizer_step=at_call(3, lose_step)).steps == [1, 2, 3, 4]


def test_engines_that_take_turns_make_room_once_all_samples_are_there_and_before_any_row(train, monkeypatch):
    monkeypatch.setattr(checks, "check_rollout_interpreter", lambda config: None)
    turns = ["rollout.engine=vllm", "cluster.colocate=true", "cluster.rollout_workers=1", "run.checkpoint_every=0"]
    run = train("run.steps=2", *turns)
    a_step = ["start_rollout", "arrivals", "release", "arrivals_of_rows", "optimizer_step", "publish_weights"]
    assert [call for call in run.calls if call in a_step][1:] == 2 * a_step


def test_steps_that_are_done_again_do_not_renew_the_restarts(train):
    def lose_step_7(cluster: FakeCluster) -> None:
        if cluster.version == 6:
            lose_step(cluster)

    run = train(
        "run.steps=10",
        optimizer_step=lose_step_7,
        fails=RuntimeError,
        match="cluster.max_restarts=3: 3 restarts",
    )
    assert run.steps[-1] == 6 and run.calls.count("return_to") == 3


def test_a_learner_rank_that_is_lost_while_the_first_weights_are_published_is_brought_back(train):
    run = train("run.steps=1", publish_weights=at_call(1, lose_step))
    assert run.steps == [1]
    assert run.calls[:5] == ["reach", "start", "publish_weights", "return_to", "publish_weights"]


def test_a_return_to_a_checkpoint_that_has_been_dropped_is_one_line(train, tmp_path):
    train()

    def lose_all(cluster: FakeCluster) -> None:
        shutil.rmtree(tmp_path / "run" / "checkpoints")
        lose_step(cluster)

    why = "rank 0: its process died; and no checkpoint of run.dir=.* is whole: .*step_000004, where it began, has been"
    train("run.steps=6", optimizer_step=lose_all, fails=RuntimeError, match=why)


def test_a_finished_run_trains_and_saves_nothing_more(train):
    train()
    assert not {"start_rollout", "save"} & set(train().calls)


def test_an_evaluation_that_sigterm_ended_is_done_when_the_run_goes_on(train):
    first = train(*ONE_EVALUATION, evaluate=at_call(2, sigterm))
    assert first.steps == [0, 1, 2, 3] and "eval/accuracy" not in first.records[3]
    assert "stopped after step 3; nothing but the unfinished step is lost" in first.log
    second = train(*ONE_EVALUATION)
    assert second.records[3] == first.records[3] | {
        name: value for name, value in second.records[3].items() if name.startswith(("eval/", "timing/eval"))
    }
    assert second.records[3]["eval/accuracy"] == second.records[0]["eval/accuracy"]
    assert "start_rollout" not in second.calls and second.calls.count("evaluate") == 1
    assert "evaluate" not in train(*ONE_EVALUATION).calls


def test_an_evaluation_that_fails_costs_no_training(train):
    settings = [*ONE_EVALUATION, "run.checkpoint_every=0"]
    run = train(*settings, evaluate=at_call(2, refuse), fails=RuntimeError, match="no more")
    assert run.steps == [0, 1, 2, 3] and run.saved == ["step_000003"]
    again = train(*settings)
    assert "start_rollout" not in again.calls and again.calls.count("evaluate") == 1
    assert "eval/accuracy" in again.records[3] and "reward/mean" in again.records[3]


def test_a_checkpoint_of_another_run_owes_no_evaluation(train):
    first = train("run.steps=2")
    (first.folder / "metrics.jsonl").write_text("")
    assert "evaluate" not in train("run.steps=2", "run.eval_prompts=2", "run.eval_every=2").calls


def test_a_checkpoint_that_cannot_be_written_ends_only_a_run_that_has_done_its_steps(train):
    run = train(save=at_call(1, full_disk))
    assert run.saved == ["step_000004"] and "none is the last good one" in run.log
    shutil.rmtree(run.folder)
    assert train(save=at_call(2, full_disk), fails=OSError, match="No space left").saved == ["step_000002"]


def test_samples_of_the_next_step_that_find_no_room_cost_the_checkpoint_and_a_recording_ends_the_run(
    train, monkeypatch
):
    def no_room(*_) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(recording, "save_file", no_room)
    run = train("run.max_staleness=1")
    assert run.saved == ["step_000004"] and "none is the last good one" in run.log, "no step follows the last"
    train("run.steps=5", "logging.record_every=1", fails=OSError, match="cannot be written: .*No space left on device")


@pytest.mark.parametrize("failure", [full_disk, lose_step])
def test_sigterm_says_what_is_lost_where_it_cannot_be_saved(train, failure):
    run = train("run.checkpoint_every=0", check_nodes=at_call(4, sigterm), save=failure)
    assert "steps 1 to 3 are lost; no checkpoint is kept" in run.log
    assert "nothing but the unfinished" not in run.log and run.steps == [1, 2, 3] and run.saved == []


@pytest.mark.parametrize(("every", "kept"), [(2, [[0], [0, 1], [2], [2, 3]]), (0, [[0], [1], [2], [3]])])
def test_what_environments_answered_is_kept_as_long_as_a_step_may_be_done_again(train, tmp_path, every, kept):
    turns, seen = tmp_path / "run" / "turns", []

    def answer(cluster: FakeCluster) -> None:
        (turns / f"step_{len(seen):06d}").mkdir(parents=True)
        seen.append(sorted(int(folder.name[-6:]) for folder in turns.iterdir()))

    train(f"run.checkpoint_every={every}", start_rollout=answer)
    assert seen == kept and not turns.exists()


def test_sigterm_during_a_save_lets_it_end(train):
    def terminate(cluster: FakeCluster) -> None:
        cluster.sigterm()
        cluster.interruption.check()  # as every wait does

    run = train(save=at_call(1, terminate))
    assert run.saved == ["step_000002"] and "stopped after step 2; nothing but the unfinished step is lost" in run.log


def test_a_clock_that_jumps_during_a_save_costs_the_next_one_no_time(train, monkeypatch):
    def jump(cluster: FakeCluster) -> None:
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 3600)

    run = train(save=at_call(1, jump), check_nodes=at_call(4, sigterm))
    assert run.saved[-1] == "step_000003" and "nothing but the unfinished step is lost" in run.log


def test_sigterm_saves_what_is_finished_though_the_checkpoint_before_was_damaged(train, tmp_path):
    def damage_and_end(cluster: FakeCluster) -> None:
        (tmp_path / "run/checkpoints/step_000002/driver_state.json").write_text("")
        cluster.sigterm()

    run = train(check_nodes=at_call(4, damage_and_end))
    assert "stopped after step 3; nothing but the unfinished step is lost" in run.log
    assert checkpoints.read_state(run.folder / "checkpoints/step_000003")["step"] == 3


@pytest.mark.parametrize("is_last_save", [False, True])
def test_a_save_that_hangs_holds_sigterm_back_no_longer_than_the_grace(train, is_last_save):
    def hang(cluster: FakeCluster) -> None:
        cluster.sigterm(seconds_ago=29)
        cluster.interruption.check()
        cluster.sigterm(seconds_ago=31)
        cluster.interruption.check()  # as the wait for the ranks does
        raise AssertionError("waits on")

    if is_last_save:
        run = train("run.checkpoint_every=0", check_nodes=at_call(3, sigterm), save=hang)
        why = "the save did not end within run.grace_s=30"
    else:
        run = train(save=hang)
        why = "saving takes 0.0 s, run.grace_s leaves 0.0"
    assert f"SIGTERM: {why}: steps 1 to 2 are lost; no checkpoint is kept" in run.log


@pytest.mark.parametrize("fits", [True, False])
def test_sigterm_between_two_updates_of_a_step_waits_for_the_others_while_a_save_has_time(train, fits):
    settings = ["run.checkpoint_every=1", "run.grace_s=0.4", "objective.epochs=3"]
    wait_s = 0.0 if fits else 0.5  # that a save takes
    run = train(*settings, save=lambda cluster: time.sleep(wait_s), optimizer_step=at_call(4, sigterm))
    if fits:
        assert run.steps == [1, 2] and run.calls.count("optimizer_step") == 6 and run.saved[-1] == "step_000002"
    else:
        assert run.steps == [1] and run.calls.count("optimizer_step") == 4
        assert "nothing but the unfinished step is lost" in run.log and run.saved == ["step_000001"]


def test_what_the_learner_no_longer_has_is_not_saved(train):
    def too_late(cluster: FakeCluster) -> None:
        cluster.sigterm(seconds_ago=60)

    settings = ["run.checkpoint_every=2", "objective.epochs=2"]
    run = train(*settings, optimizer_step=at_call(7, too_late))
    assert run.saved == ["step_000002"], "its last save"
    said = "the learner has begun the next update: steps 3 to 3 are lost; .*step_000002 is kept"
    assert any(re.search(said, line) for line in run.log.splitlines())


@pytest.mark.parametrize(("since_s", "saved"), [(5.0, "step_000003"), (35.0, "step_000002")])
def test_sigterm_while_weights_are_published_waits_for_them_while_a_save_has_time(train, since_s, saved):
    def terminate(cluster: FakeCluster) -> None:
        cluster.sigterm(seconds_ago=since_s)
        cluster.interruption.check()

    run = train(publish_weights=at_call(4, terminate))  # of step 3
    assert run.saved[-1] == saved


@pytest.mark.parametrize(("drawn_s", "staleness"), [(5, 1), (60, 0)])
def test_sigterm_while_the_next_steps_samples_are_drawn_keeps_the_update_and_them_if_there_is_time(
    train, drawn_s, staleness
):
    def draw(cluster: FakeCluster) -> None:
        for seconds in range(drawn_s):
            cluster.sigterm(seconds_ago=seconds)
            cluster.interruption.check()

    settings = ["run.max_staleness=1", "run.grace_s=30", "logging.record_every=1"]
    run = train(*settings, arrivals=at_call(4, draw))
    assert run.steps == [1, 2, 3] and "abandon_step" in run.calls and run.saved[-1] == "step_000003"
    assert "stopped after step 3; nothing but the unfinished step is lost" in run.log
    assert {record["step"] for record in read_records(run.folder / "completions.jsonl")} == {1, 2, 3}
    assert (run.folder / "recordings/step_000003").is_dir() and "is not recorded" not in run.log
    again = train("run.max_staleness=1")
    assert again.steps == [1, 2, 3, 4] and again.records[3]["rollout/staleness"] == staleness


def test_an_asynchronous_run_that_goes_on_trains_on_the_samples_that_its_checkpoint_keeps(train):
    undisturbed = train("run.max_staleness=1")
    shutil.rmtree(undisturbed.folder)
    begun = train("run.max_staleness=1", optimizer_step=at_call(4, refuse), fails=RuntimeError, match="no more")
    kept = ahead.read_ahead(begun.folder / "checkpoints/step_000002")
    assert [[each.sample_index for each in group] for group in kept] == [[0, 1]] * 2
    assert {each.policy_version for group in kept for each in group} == {1}, "drawn before the second update"
    run = train("run.max_staleness=1")
    assert run.calls.count("bring") == 2 and run.calls.count("start_rollout") == 1
    first = run.records[2]
    assert (first["rollout/rounds"], first["timing/rollout"], first["timing/tokens_per_s"]) == (0, None, None)
    assert all(record["timing/tokens_per_s"] and record["rollout/rounds"] for record in run.records if record != first)
    for name in ("rollout/staleness", "reward/mean", "response/length_mean"):
        assert [record[name] for record in run.records] == [record[name] for record in undisturbed.records]
    assert not (run.folder / "checkpoints/step_000004" / ahead.FILE).exists(), "no step follows the last"


def test_samples_that_a_checkpoint_keeps_are_not_taken_by_a_run_that_asks_for_others(train):
    train("run.max_staleness=1", optimizer_step=at_call(4, refuse), fails=RuntimeError, match="no more")
    run = train("run.max_staleness=1", "rollout.group_size=3")
    assert "bring" not in run.calls and run.steps == [1, 2, 3, 4] and run.records[2]["rollout/staleness"] == 0
    assert "the settings ask for other samples than those that the checkpoint keeps" in run.log


def test_sigterm_is_noticed_while_episodes_are_opened(train, monkeypatch):
    def opened(self, prompts, *, position, check):
        check()
        return prompts

    monkeypatch.setattr(Openings, "open", opened)
    run = train(check_nodes=at_call(4, sigterm))
    assert run.calls.count("start_rollout") == 3 and run.saved[-1] == "step_000003"


def test_what_cannot_be_brought_back_ends_the_run_with_what_is_finished_saved(train):
    gone = "Ray's control service (gcs_server) has not answered at 10.0.0.1:6379 for 20 s"

    def lose_ray(cluster: FakeCluster) -> None:
        cluster.interruption.end_when(lambda: gone)
        cluster.interruption._looked = 0.0  # it is looked for every two seconds

    match = r"gcs_server\) has not answered .* once Ray is there again, run.resume=auto and the same settings go on"
    run = train(check_nodes=at_call(4, lose_ray), fails=RuntimeError, match=match)
    assert run.saved[-1] == "step_000003"
    assert "for 20 s: stopped after step 3; nothing but the unfinished step is lost" in run.log


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_rewards_all_fail_ends_with_the_reason_and_goes_on_when_that_is_mended(train, staleness):
    def break_rewards(cluster: FakeCluster) -> None:
        second = cluster.calls.count("start_rollout") == 2  # it alone has rewards
        cluster.broken = "" if second else "TypeError: missing answer"

    settings = ["run.steps=8", f"run.max_staleness={staleness}", "reward.max_failed_steps=2", "run.checkpoint_every=0"]
    why = "every reward of 2 steps in a row failed .* gsm8k: TypeError: missing answer; once that is mended, run.dir="
    run = train(*settings, start_rollout=break_rewards, fails=RuntimeError, match=why)
    assert run.steps == [1, 2, 3] and run.saved == ["step_000003"] and "warning: gsm8k: TypeError" in run.log
    assert train(*settings).steps == list(range(1, 9))

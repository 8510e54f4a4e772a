"""How a run ends and counts its restarts: the driver's decisions, beside a cluster that does as it is told."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from infsample_rl.cluster.failures import Restarts, StepLost
from infsample_rl.cluster.interruption import Interruption, Terminated
from infsample_rl.config.loading import load_config
from infsample_rl.controller import async_driver
from infsample_rl.controller import driver as driver_module
from infsample_rl.controller.async_driver import AsyncDriver, Sampled
from infsample_rl.controller.driver import Driver


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A driver of ten steps without processes, and what it said."""
    driver, said = Driver.__new__(Driver), []
    driver.config = load_config(["run.eval_prompts=0", "run.checkpoint_every=0", "cluster.max_restarts=3"])
    driver.run_dir, driver.total_steps, driver.step, driver.checkpoint, driver.probe = tmp_path, 10, 0, None, None
    driver._furthest, driver._unsavable, driver._save_seconds, driver.eval_prompts, driver.timeline = (
        0,
        "",
        0.0,
        [],
        None,
    )
    driver._saved_step = None
    driver.interruption = Interruption()
    driver.log = SimpleNamespace(
        note=said.append, warn=said.append, log_step=lambda *_: None, write_report=lambda: None
    )
    restarts = Restarts(3, said.append, lambda seconds: None)
    driver.cluster = SimpleNamespace(resize=lambda: None, restarts=restarts)
    driver.cluster.monitor = SimpleNamespace(counts=lambda: None, now=None)
    driver.cluster.traffic = SimpleNamespace(abandon=lambda **_: None)
    driver.cluster.learner = SimpleNamespace(save=lambda folder: None)
    driver._state = lambda: {"step": driver.step, "data": {}, "expected_lengths": None}
    driver._finished_state = driver._state()
    monkeypatch.setattr(driver_module, "observe_step", lambda *_: {})
    return driver, said


def test_steps_that_are_done_again_do_not_renew_the_restarts(made):
    driver, _ = made

    def train_step():
        if driver.step == 6:
            raise StepLost("learner rank 0: its process died")
        driver.step += 1
        return {}, []

    driver.train_step = train_step
    with pytest.raises(RuntimeError, match="cluster.max_restarts=3: 3 restarts"):
        for _ in range(20):
            with pytest.raises(StepLost):
                driver._go_on()
            driver.cluster.restarts.begin("the learner", "rank 0 is gone")
            driver.step = 4  # of the last checkpoint
    assert driver._furthest == 6


def test_a_run_past_its_last_step_is_finished(made):
    driver, _ = made
    driver.step = 12
    assert not driver._is_finished()  # not saved yet
    driver._saved_step = 12
    assert driver._is_finished()


def test_an_evaluation_that_sigterm_ended_is_done_when_the_run_goes_on(made):
    driver, _ = made
    record = {"step": 10, "reward/mean": 0.5}
    driver.eval_prompts, driver._saved_step, driver.evaluate = ["a problem"], 10, lambda: {"eval/accuracy": 0.25}
    driver.log.record_of = lambda step: record if step == 10 else None
    driver.log.add_to_step = lambda step, metrics: record.update(metrics)
    driver.step = 10
    assert not driver._is_finished()
    driver._go_on()
    assert record == {"step": 10, "reward/mean": 0.5, "eval/accuracy": 0.25}
    assert driver._is_finished()
    driver.step = 9  # not one that is evaluated
    assert not driver._owes_evaluation()
    driver.step, record = 10, None  # another run's checkpoint: nothing of the step is kept here
    assert not driver._owes_evaluation()


@pytest.mark.parametrize(
    "failure", [OSError(28, "No space left on device"), StepLost("learner rank 0: its process died")]
)
def test_sigterm_says_what_is_lost_where_it_cannot_be_saved(made, failure):
    driver, said = made

    def save(folder):
        raise failure

    driver.cluster.learner.save, driver.step = save, 7
    driver._finished_state = driver._state()
    driver._keep_what_is_finished()
    assert "steps 1 to 7 are lost; no checkpoint is kept" in said[-1] and not any(
        "nothing but the unfinished" in line for line in said
    )


def test_sigterm_during_a_save_lets_it_end(made):
    driver, said = made

    def save(folder):
        driver.interruption.requested_at = time.monotonic()
        driver.interruption.check()  # as every wait does
        (Path(folder) / "model.safetensors").write_bytes(b"")

    driver.cluster.learner.save, driver.step = save, 7
    driver._finished_state = driver._state()
    driver.save()
    assert driver._saved_step == 7
    driver._keep_what_is_finished()
    assert said[-1] == "SIGTERM: stopped after step 7; nothing but the unfinished step is lost"


def test_sigterm_saves_what_is_finished_though_the_checkpoint_before_was_damaged(made):
    driver, said = made
    driver.cluster.learner.save = lambda folder: (Path(folder) / "model.safetensors").write_bytes(b"")
    for driver.step in (2, 3):
        driver._finished_state = driver._state()
        if driver.step == 2:
            driver.save()
            (driver.checkpoint / "driver_state.json").write_text("")
    driver._keep_what_is_finished()
    assert said[-1] == "SIGTERM: stopped after step 3; nothing but the unfinished step is lost"
    assert (driver.run_dir / "checkpoints" / "step_000003" / "driver_state.json").read_text()


@pytest.mark.parametrize("is_last_save", [False, True])
def test_a_save_that_hangs_holds_sigterm_back_no_longer_than_the_grace(made, is_last_save):
    driver, said = made

    def save(folder):
        driver.interruption.requested_at = time.monotonic() - 29
        driver.interruption.check()
        driver.interruption.requested_at -= 1
        driver.interruption.check()  # as the wait for the ranks does
        raise AssertionError("waits on")

    driver.cluster.learner.save, driver.step, driver._save_seconds = save, 7, 4.0
    driver._finished_state = driver._state()
    if not is_last_save:
        with pytest.raises(Terminated):
            driver.save()
    driver._keep_what_is_finished()
    why = "the save did not end within run.grace_s=30" if is_last_save else "saving takes 4.0 s, run.grace_s leaves 0.0"
    assert said == [f"SIGTERM: {why}: steps 1 to 7 are lost; no checkpoint is kept"]
    assert list((driver.run_dir / "checkpoints").iterdir()) == []


def test_a_run_whose_ray_is_gone_saves_what_is_finished_and_fails(made):
    driver, said = made
    closed = []
    driver.log.close = lambda *, failed: closed.append(failed)
    driver.cluster.stop, driver.timeline, driver.prompts = lambda: None, SimpleNamespace(close=lambda: None), None
    driver._finished_state = {"step": 7, "data": {}, "expected_lengths": None}

    def start(checkpoint):
        driver.interruption.end_when(
            lambda: "Ray's control service (gcs_server) has not answered at 10.0.0.1:6379 for 20 s"
        )
        driver.interruption.check()

    driver.cluster.start, driver.cluster.learner.save = (
        start,
        lambda folder: (Path(folder) / "model.safetensors").write_bytes(b""),
    )
    with pytest.raises(
        RuntimeError,
        match=r"gcs_server\) has not answered .* once Ray is there again, run.resume=auto and the same settings go on",
    ):
        driver.run()
    assert driver._saved_step == 7 and closed == [True]
    assert said[-1].endswith("for 20 s: stopped after step 7; nothing but the unfinished step is lost")


class Updates:
    """Waves of so many updates."""

    def __init__(self, count):
        self._count = count

    def updates(self):
        for number in range(1, self._count + 1):
            yield None, number == self._count


def with_updates(driver, sigterm_after):
    """SIGTERM comes behind optimizer step `sigterm_after`; every wait looks for it. The optimizer steps that were
    done."""
    done = []

    def arrivals(**options):
        driver.interruption.check()
        yield from ()

    def optimizer_step(totals, is_last):
        done.append(is_last)
        if len(done) == sigterm_after:
            driver.interruption.requested_at = time.monotonic()
        return {}

    driver.cluster.traffic.arrivals, driver.cluster.learner.step = arrivals, optimizer_step
    return done


def test_sigterm_between_two_updates_of_a_step_waits_for_the_others_while_a_save_has_time(made):
    driver, _ = made
    groups = SimpleNamespace(step=0)
    done = with_updates(driver, sigterm_after=1)
    driver._update(groups, Updates(3))
    assert done == [False, False, True]
    with pytest.raises(Terminated):
        driver.interruption.check()
    driver.interruption.requested_at, driver._save_seconds = None, driver.config.run.grace_s + 1  # a save would not fit
    done = with_updates(driver, sigterm_after=1)
    with pytest.raises(Terminated):
        driver._update(groups, Updates(3))
    assert done == [False] and driver._unsavable == "the learner has begun the next update"


@pytest.mark.parametrize(("since_s", "ends"), [(5.0, False), (25.0, True)])
def test_sigterm_while_weights_are_published_waits_for_them_while_a_save_has_time(made, since_s, ends):
    driver, said = made
    driver.config.run.grace_s, driver._save_seconds, driver._unsavable = (
        30.0,
        10.0,
        "the learner has begun the next update",
    )
    driver.step = driver._finished_state["step"] = 3
    driver.checkpoint, driver._saved_step = driver.run_dir / "checkpoints" / "step_000002", 2

    class Published(Exception):
        pass

    def publish():
        driver.interruption.requested_at = time.monotonic() - since_s
        driver.interruption.check()
        raise Published

    driver._publish = publish
    with pytest.raises(Terminated if ends else Published):
        driver._end_step(None, [], None, started=0.0)
    if ends:
        driver._keep_what_is_finished()
        assert (
            "the learner has begun the next update: steps 3 to 3 are lost" in said[-1]
            and "step_000002 is kept" in said[-1]
        )


def test_sigterm_while_the_next_steps_samples_are_drawn_keeps_the_update_that_is_whole(made, monkeypatch):
    driver, _ = made
    driver.__class__ = AsyncDriver
    abandoned, ended = [], []
    groups = SimpleNamespace(step=0, trained=lambda: [])
    driver.prompts = SimpleNamespace(state=lambda: {"position": 4})
    driver._ready = Sampled(groups, [])
    driver._new_groups = lambda: SimpleNamespace(prompts=[])
    driver._start_rollout = lambda *arguments, **options: None
    driver._end_step = lambda *arguments, following, **options: (ended.append(following), ({}, []))[1]
    monkeypatch.setattr(async_driver, "Waves", lambda *_: Updates(1))
    driver.cluster.traffic.abandon = lambda: abandoned.append(True)
    with_updates(driver, sigterm_after=1)
    metrics, _ = driver.train_step()
    assert abandoned == [True] and ended == [None] and driver._ready is None and "rollout/staleness" in metrics


def test_a_learner_rank_that_is_lost_while_the_first_weights_are_published_is_brought_back(made, monkeypatch):
    driver, _ = made
    back, end = [], RuntimeError("the end of this test")

    def publish():
        raise StepLost("learner rank 0: its process died")

    def go_on(source):
        raise end

    driver._publish, driver._return_to_checkpoint = publish, back.append
    driver.cluster.start, driver.cluster.stop = lambda checkpoint: None, lambda: None
    monkeypatch.setattr(driver_module, "take_over", lambda *_: None)
    driver.log.start_progress, driver.log.close = go_on, lambda failed: None
    driver.timeline = SimpleNamespace(close=lambda: None)
    with pytest.raises(RuntimeError, match="the end of this test"):
        driver.run()
    assert back == ["learner rank 0: its process died"]


def test_a_return_to_a_checkpoint_that_has_been_dropped_is_one_line(made, tmp_path):
    driver, _ = made
    driver._origin = (tmp_path / "checkpoints" / "step_000010", {"step": 10})
    with pytest.raises(
        RuntimeError, match="rank 0 is gone; and no checkpoint of run.dir=.* is whole: .*step_000010, where it"
    ):
        driver._return_to_checkpoint("rank 0 is gone")

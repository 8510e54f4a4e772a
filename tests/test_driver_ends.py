"""How a run ends and counts its restarts: the driver's decisions, beside a cluster that does as it is told."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from infsample_rl import driver as driver_module
from infsample_rl.config_loading import load_config
from infsample_rl.driver import Driver
from infsample_rl.failures import Restarts, StepLost
from infsample_rl.interruption import Interruption


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A driver of ten steps without processes, and what it said."""
    driver, said = Driver.__new__(Driver), []
    driver.config = load_config(["run.eval_prompts=0", "run.checkpoint_every=0", "cluster.max_restarts=3"])
    driver.run_dir, driver.total_steps, driver.step, driver.checkpoint, driver.probe = tmp_path, 10, 0, None, None
    driver._furthest, driver._unsavable, driver._save_seconds, driver.eval_prompts, driver.timeline = 0, "", 0.0, [], None
    driver.interruption = Interruption()
    driver.log = SimpleNamespace(note=said.append, warn=said.append, log_step=lambda *_: None, write_report=lambda: None)
    restarts = Restarts(3, said.append, lambda seconds: None)
    driver.cluster = SimpleNamespace(resize=lambda: None, counts=lambda: None, restarts=restarts, abandon_step=lambda: None, save=lambda folder: None)
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
    driver._saved_step = lambda: 12
    assert driver._is_finished()


@pytest.mark.parametrize("failure", [OSError(28, "No space left on device"), StepLost("learner rank 0: its process died")])
def test_sigterm_says_what_is_lost_where_it_cannot_be_saved(made, failure):
    driver, said = made

    def save(folder):
        raise failure

    driver.cluster.save, driver.step = save, 7
    driver._finished_state = driver._state()
    driver._keep_what_is_finished()
    assert "steps 1 to 7 are lost; no checkpoint is kept" in said[-1] and not any("nothing but the unfinished" in line for line in said)


def test_sigterm_during_a_save_lets_it_end(made):
    driver, said = made

    def save(folder):
        driver.interruption.requested_at = 0.0
        driver.interruption.check()  # as every wait does
        (Path(folder) / "model.safetensors").write_bytes(b"")

    driver.cluster.save, driver.step = save, 7
    driver._finished_state = driver._state()
    driver.save()
    assert driver._saved_step() == 7
    driver._keep_what_is_finished()
    assert said[-1] == "SIGTERM: stopped after step 7; nothing but the unfinished step is lost"

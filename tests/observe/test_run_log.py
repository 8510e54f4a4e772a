"""RunLogger: what is kept in files, what is shown, and what a resume does to both."""

import errno
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from infsample_rl.observe import run_log
from infsample_rl.observe.records import RecordFile, read_records
from infsample_rl.observe.run_log import RunLogger
from infsample_rl.observe.screen import Screen
from infsample_rl.observe.trackers.wandb_tracker import wandb_mode
from tests.observe.logged import logged_config, sample

ROOT = Path(__file__).resolve().parents[2]
ESCAPE = "\x1b"


def log_steps(run_dir: Path, steps: range, *, start_step: int = 0, **logging: object) -> None:
    """One start of a run: reward/mean is step / 10, one sample a step."""
    logger = RunLogger(logged_config(**logging), run_dir, total_steps=9, start_step=start_step)
    if start_step:
        logger.rewind(start_step)
    for step in steps:
        logger.append("samples.jsonl", [{"step": step, "prompt_index": 0}])
        logger.log_step(step, {"reward/mean": step / 10}, [sample(step)])
    logger.close()


def test_metrics_are_one_json_object_a_step_with_nan_as_null(tmp_path):
    logger = RunLogger(logged_config(), tmp_path, total_steps=2, start_step=0)
    logger.log_step(0, {"eval/accuracy": 0.25}, [])
    odd = {"learner/loss": float("nan"), "a": float("inf"), "b": None, "c": np.float32(0.5), "d": np.int64(3)}
    logger.log_step(1, {"reward/mean": 0.1, **odd}, [])
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == [  # read before close: every line is flushed
        '{"step": 0, "eval/accuracy": 0.25}',
        '{"step": 1, "reward/mean": 0.1, "learner/loss": null, "a": null, "b": null, "c": 0.5, "d": 3, '
        '"health/warnings": 0}',
    ]
    logger.close()
    logger.close()


def test_completions_are_kept_up_to_the_set_number_whatever_they_contain(tmp_path):
    logger = RunLogger(logged_config(completions_per_step=2), tmp_path, total_steps=2, start_step=0)
    strange = {**sample(1, 1, reward=float("nan")), "response": "line\nline \u03b1 \ud800"}
    logger.log_step(1, {"reward/mean": 0.5}, [sample(1), strange, sample(1, 2)])
    logger.close()
    records = [json.loads(line) for line in (tmp_path / "completions.jsonl").read_bytes().splitlines()]
    assert records == [sample(1), {**sample(1, 1, reward=None), "response": "line\nline \u03b1 \ud800"}]


def test_a_resume_cuts_every_file_back_and_drops_a_torn_line_and_a_start_that_is_refused_cuts_nothing(tmp_path):
    log_steps(tmp_path, range(1, 6))
    for name in ("metrics", "warnings"):
        with (tmp_path / f"{name}.jsonl").open("a") as file:
            file.write('{"step": 6, "reward/me')
    logger = RunLogger(logged_config(), tmp_path, total_steps=9, start_step=3)
    logger.warn("there is no Ray cluster at that address")
    logger.close(failed=True)
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in read_records(tmp_path / "warnings.jsonl")] == [3]
    log_steps(tmp_path, range(4, 7), start_step=3)
    for name in ("metrics", "completions", "samples"):
        assert [record["step"] for record in read_records(tmp_path / f"{name}.jsonl")] == [1, 2, 3, 4, 5, 6]
    assert list(tmp_path.glob(".*.tmp")) == []


def test_the_report_is_written_at_checkpoints_within_its_share_of_time_and_at_the_end(tmp_path):
    logger, page = RunLogger(logged_config(), tmp_path, total_steps=2, start_step=0), tmp_path / "report.html"
    logger.log_step(1, {"reward/mean": 0.25}, [sample(1)])
    logger.write_report()
    first = page.read_text()
    logger.log_step(2, {"reward/mean": 0.5}, [sample(2)])
    logger.write_report()  # too soon after the one before
    assert page.read_text() == first
    logger.close(failed=True)
    assert page.read_text() != first


def test_a_report_that_cannot_be_written_is_a_warning(tmp_path, capsys):
    (tmp_path / "report.html").mkdir()
    logger = RunLogger(logged_config(), tmp_path, total_steps=2, start_step=0)
    logger.log_step(1, {"reward/mean": 0.25}, [sample(1)])
    logger.close()
    assert "warning: report.html could not be written (IsADirectoryError" in capsys.readouterr().out


def test_cutting_back_keeps_the_bytes_of_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "x": 0.10000000000000001}\n{"step": 2}\n\xff\xfe\n{"step": 1, "y": 2}')
    RecordFile(path, 1).rewind(1)
    assert path.read_bytes() == b'{"step": 1, "x": 0.10000000000000001}\n{"step": 1, "y": 2}\n'


def test_what_is_measured_later_is_added_to_the_line_of_its_step(tmp_path, capsys):
    log_steps(tmp_path, range(1, 3))
    logger = RunLogger(logged_config(), tmp_path, total_steps=9, start_step=2)
    assert "eval/accuracy" not in logger.record_of(2) and logger.record_of(3) is None
    logger.add_to_step(2, {"eval/accuracy": 0.25, "eval/nothing": float("nan")})
    logger.log_step(3, {"reward/mean": 0.3}, [])
    logger.add_to_step(3, {"eval/accuracy": 0.5})
    logger.close()
    records = list(read_records(tmp_path / "metrics.jsonl"))
    assert [(record["step"], record["reward/mean"], record.get("eval/accuracy")) for record in records] == [
        (1, 0.1, None),
        (2, 0.2, 0.25),
        (3, 0.3, 0.5),
    ]
    lines = [
        "step 2/9  reward 0.200  held-out accuracy 0.250",
        "step 3/9  reward 0.300",
        "step 3/9  held-out accuracy 0.500",
    ]
    assert capsys.readouterr().out.splitlines()[-3:] == lines


def test_a_new_run_sets_older_files_aside(tmp_path):
    for _ in range(3):
        log_steps(tmp_path, range(1, 3))
    names = sorted(path.name for path in tmp_path.glob("metrics*"))
    assert names == ["metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl"]
    assert [record["step"] for record in read_records(tmp_path / "metrics.jsonl")] == [1, 2]


def test_without_progress_only_notes_and_warnings_are_printed(tmp_path, capsys):
    logger = RunLogger(logged_config(progress=False), tmp_path, total_steps=2, start_step=0)
    logger.log_step(1, {"reward/mean": 0.5}, [])
    logger.warn("2 rewards timed out")
    logger.close()
    assert capsys.readouterr().out == "warning: 2 rewards timed out\n"
    assert "step 1/2  reward 0.500" in (tmp_path / "run.log").read_text()


def test_what_health_finds_is_printed_once_and_kept_in_warnings_jsonl(tmp_path, capsys):
    logger = RunLogger(logged_config(), tmp_path, total_steps=20, start_step=0)
    for step in range(1, 10):
        logger.log_step(step, {"response/cut": 1.0}, [])
    logger.close()
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: ")]
    assert "cut at rollout.max_new_tokens=256" in line
    (record,) = read_records(tmp_path / "warnings.jsonl")
    assert record == {"step": 5, "rule": "all_cut", "text": line.removeprefix("warning: ")}
    assert [record["health/warnings"] for record in read_records(tmp_path / "metrics.jsonl")] == [0] * 4 + [1] * 5
    resumed = RunLogger(logged_config(), tmp_path, total_steps=20, start_step=4)
    resumed.rewind(4)
    assert list(read_records(tmp_path / "warnings.jsonl")) == []
    resumed.log_step(5, {"response/cut": 1.0}, [])  # with the four steps before, as they were kept
    resumed.close()
    assert [record["step"] for record in read_records(tmp_path / "warnings.jsonl")] == [5]


def test_a_warning_of_every_step_is_said_once_in_twenty(tmp_path, capsys):
    logger = RunLogger(logged_config(progress=False), tmp_path, total_steps=60, start_step=0)
    for step in range(1, 42):
        logger.warn_seldom(f"gsm8k: timed out after 30 s on prompt row {17 * step} (4 samples)")
        logger.log_step(step, {}, [])
    logger.warn_seldom("another")
    logger.close()
    printed = capsys.readouterr().out.splitlines()
    assert [line.split(" on ")[-1] for line in printed] == [
        "prompt row 17 (4 samples)",
        "prompt row 357 (4 samples) (and 19 more like it since step 0)",
        "prompt row 697 (4 samples) (and 19 more like it since step 20)",
        "warning: another",
    ]


def test_a_warning_of_a_step_that_is_done_again_is_said_again(tmp_path, capsys):
    logger = RunLogger(logged_config(progress=False), tmp_path, total_steps=60, start_step=0)
    for step in (1, 2, 3):
        logger.log_step(step, {}, [])
    logger.warn_seldom("gsm8k: timed out")
    logger.rewind(2)
    logger.warn_seldom("gsm8k: timed out")
    logger.close()
    assert capsys.readouterr().out.count("warning: gsm8k: timed out\n") == 2
    assert [record["step"] for record in read_records(tmp_path / "warnings.jsonl")] == [2]


SCRIPT = r"""
import sys
from pathlib import Path
from infsample_rl.observe.run_log import RunLogger
from tests.observe.logged import logged_config
logger = RunLogger(logged_config(), Path(sys.argv[1]), total_steps=9, start_step=0)
logger.note("Derived\n  G  [bold]\x1b[31m\u03b1")
logger.log_step(1, {"reward/mean": 0.25, "response/length_mean": 7.0}, [])
print("a worker's line")
logger.log_step(9, {"reward/mean": 0.75, "response/length_mean": 7.0}, [])
logger.close()
print("wandb imported:", "wandb" in sys.modules)
"""


def test_an_ascii_pipe_gets_no_escape_codes_and_wandb_disabled_is_not_imported(tmp_path):
    env = {**os.environ, "PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True, cwd=ROOT)
    assert ESCAPE not in done.stdout
    assert done.stdout.splitlines()[1] == "  G  [bold]\\x1b[31m\\u03b1"
    assert done.stdout.splitlines()[-2:] == ["step 9/9  reward 0.750  length 7", "wandb imported: False"]


def test_run_log_begins_with_what_was_said_before_there_was_a_folder(tmp_path, capsys):
    screen = Screen(logged_config(), total_steps=2, start_step=0)
    screen.line("Ray is started")
    screen.keep("the whole table")
    screen.print("the table in short")
    logger = RunLogger(logged_config(), tmp_path, total_steps=2, start_step=0, screen=screen)
    logger.note("workers are started")
    logger.close()
    said = [line.split(" ", 2)[2] for line in (tmp_path / "run.log").read_text().splitlines()]
    assert said == ["Ray is started", "the whole table", "workers are started"]
    assert capsys.readouterr().out.splitlines() == ["Ray is started", "the table in short", "workers are started"]


@pytest.fixture
def no_wandb_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """No W&B key or setting of the machine is seen."""
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_wandb_auto_is_online_only_with_a_key(no_wandb_key, tmp_path):
    assert wandb_mode("auto") == "offline"
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + "k" * 40)
    assert wandb_mode("auto") == "online"
    no_wandb_key.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    assert wandb_mode("auto") == "offline"
    no_wandb_key.setenv("WANDB_API_KEY", "k" * 40)
    assert wandb_mode("auto") == "online"
    no_wandb_key.setenv("WANDB_MODE", "disabled")
    assert wandb_mode("auto") == "disabled"


def test_wandb_online_without_a_key_is_refused_before_anything_is_written(no_wandb_key, tmp_path):
    with pytest.raises(ValueError, match="logging.wandb=online needs a key"):
        RunLogger(logged_config(wandb="online"), tmp_path / "run", total_steps=1, start_step=0)
    assert not (tmp_path / "run").exists()


def test_wandb_goes_offline_with_one_warning_when_the_server_cannot_be_reached(no_wandb_key, tmp_path, capfd):
    no_wandb_key.setenv("WANDB_API_KEY", "local-" + "0" * 40)
    no_wandb_key.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    no_wandb_key.setenv("WANDB_INIT_TIMEOUT", "1")
    log_steps(tmp_path, range(1, 2), wandb="online", upload_completions=True, progress=False)
    out, err = capfd.readouterr()
    (line,) = out.splitlines()
    assert line.startswith(f"warning: W&B goes offline, in {tmp_path / 'wandb'}: ")
    assert err == ""
    assert len(list(tmp_path.glob("wandb/offline-run-*/files/media/table/*.json"))) == 1


@pytest.mark.parametrize("in_process", [False, True], ids=["resume", "return"])
def test_tensorboard_shows_each_step_once_though_some_are_done_again(tmp_path, in_process):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    if in_process:
        logger = RunLogger(logged_config(tensorboard=True), tmp_path, total_steps=9, start_step=0)
        for step in (1, 2, 3, 4, None, 3, 4, 5):
            if step is None:
                logger.rewind(2)
            else:
                logger.log_step(step, {"reward/mean": step / 10}, [])
        logger.close()
    else:
        log_steps(tmp_path, range(1, 5), tensorboard=True)
        log_steps(tmp_path, range(3, 6), start_step=2, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("reward/mean")
    found = [(event.step, round(event.value, 6)) for event in events]
    assert found == [(step, step / 10) for step in range(1, 6)]


class Failing:
    """A tracker whose place is gone at one of its calls."""

    name, place = "W&B", ""

    def __init__(self, at: str) -> None:
        self.at, self.calls, self.said = at, [], list[str]()

    def __getattr__(self, call: str) -> Callable[..., None]:
        def answer(*_: object, **__: object) -> None:
            self.calls.append(call)
            if call == self.at:
                raise ConnectionError("no\nmore")

        return answer


@pytest.mark.parametrize(
    ("at", "calls"), [("log", ["log"]), ("rewind", ["log", "rewind"]), ("close", ["log", "rewind", "log", "close"])]
)
def test_a_tracker_that_fails_is_asked_no_more_and_ends_no_run(tmp_path, monkeypatch, at, calls):
    broken, whole = Failing(at), Failing("")
    monkeypatch.setattr(run_log, "start_trackers", lambda *_: [broken, whole])
    logger = RunLogger(logged_config(), tmp_path, total_steps=2, start_step=0)
    logger.log_step(1, {"reward/mean": 0.5}, [])
    logger.rewind(1)
    logger.log_step(2, {"reward/mean": 0.5}, [])
    logger.close()
    (warning,) = read_records(tmp_path / "warnings.jsonl")
    assert warning["text"] == "W&B gets no more of this run, metrics.jsonl has all of it: ConnectionError: no more"
    assert broken.calls == calls and whole.calls == ["log", "rewind", "log", "close"]


class Terminal(io.StringIO):
    """Keeps what a terminal would show."""

    def isatty(self) -> bool:
        return True


def test_a_run_that_ends_just_after_it_went_back_has_its_report_and_ends_its_trackers(tmp_path, monkeypatch):
    tracker = Failing("")
    monkeypatch.setattr(run_log, "start_trackers", lambda *_: [tracker])
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    logger = RunLogger(logged_config(), tmp_path, total_steps=9, start_step=0)
    logger.log_step(1, {"timing/step": 60.0}, [])
    assert "8 min 00 s left" in terminal.getvalue()
    logger.rewind(0)
    logger.close(failed=True)
    assert tracker.calls == ["log", "rewind", "close"] and (tmp_path / "report.html").is_file()


def test_a_full_disk_does_not_leave_a_tracker_open(tmp_path, monkeypatch):
    tracker = Failing("")
    monkeypatch.setattr(run_log, "start_trackers", lambda *_: [tracker])
    (tmp_path / "report.html").mkdir()
    logger = RunLogger(logged_config(), tmp_path, total_steps=9, start_step=0)

    def full(_: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(logger._screen, "keep", full)
    with pytest.raises(OSError, match="No space left"):
        logger.close(failed=True)
    assert tracker.calls == ["close"]

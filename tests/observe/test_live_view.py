"""The live view as lines of text: every width and height, no colour, ASCII; and on a real terminal that is
interrupted."""

from __future__ import annotations

import os
import pty
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.cells import cell_len

from infsample_rl.observe.live_view import LiveView, fit, step_figures
from infsample_rl.observe.records import read_records
from infsample_rl.types import ClusterNow, RolloutNow, RowNow

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).parents[1] / "data" / "metrics" / "kk_tiny.jsonl"
ESCAPE = "\x1b"


def rows(count: int) -> list[RowNow]:
    generator = random.Random(count)
    tokens = [generator.randint(1, 250) for _ in range(count)]
    return [
        RowNow(place // 16, place, n, n + generator.uniform(-20, 60) if place % 5 else None)
        for place, n in enumerate(tokens)
    ]


def view_of(steps: int = 12, **now: object) -> LiveView:
    """A view of a recorded run after some steps."""
    view = LiveView("kk_tiny", total_steps=25, samples_per_step=128, max_new_tokens=320)
    for record in read_records(RECORDED):
        if record["step"] <= steps:
            view.step(record["step"], {name: value for name, value in record.items() if value is not None})
    workers = [RolloutNow(0, rows(37), 100, 87), RolloutNow(1, rows(5), 100, 31), RolloutNow(2, [], 0, 0)]
    view.watch(
        lambda: ClusterNow(
            **{"rollout": workers, "owed": 42, "in_flight": {"reward": 2, "reference": 0, "learner": 1}, **now}
        )
    )
    return view


def texts(view: LiveView, width: int, height: int, **options: object) -> list[str]:
    return [line.plain for line in view.lines(width, height, **{"time_left": "1 min 20 s left", **options})]


def test_eighty_columns_say_how_the_run_stands_and_who_decodes():
    view = view_of()
    view.warn("97% of the last 5 steps' samples were cut: set rollout.max_new_tokens=640")
    found = texts(view, 80, 22)
    assert found[0].endswith("step 12/25  1 min 20 s left") and "\u2501" in found[0]
    rewards = "\u2583\u2581\u2582\u2587\u2583\u2583\u2585\u2585\u2585\u2585\u2586\u2588"
    assert found[1] == f"reward    0.891 \u00b1 0.312  {rewards}  75% of groups with signal"
    assert found[2] == "length    104 \u00b1 54 tokens  longest 320  1% cut"
    assert found[6] == "held-out  accuracy 0.635  after step 10"
    assert found[7].startswith("now       ") and found[7].endswith("42 to come  2 at reward  1 at learner")
    assert found[8].startswith("rollout 0 37 rows  KV pool \u2501") and found[8].endswith(
        " 87%  18 shown, most left first"
    )
    assert any(line.startswith("rollout 1 5 rows") for line in found) and not any(
        line.startswith("rollout 2") for line in found
    )
    assert found[-1].startswith("warning   after step 12: 97% of the last 5 steps'")


def test_a_name_of_wide_characters_leaves_the_time_that_is_left():
    view = LiveView("\u8fd0\u884c\u6d4b\u8bd5" * 2, total_steps=1000, samples_per_step=8, max_new_tokens=64)
    assert texts(view, 80, 22)[0].endswith("1 min 20 s left") and cell_len(texts(view, 80, 22)[0]) <= 80


@pytest.mark.parametrize("unicode", [True, False])
def test_every_size_is_kept_and_the_header_is_always_there(unicode):
    for steps in (0, 1, 12):
        view = view_of(steps)
        for text in ("short", "x" * 300, "\u03b1 warning"):
            view.warn(text)
        for width in (10, 24, 39, 40, 41, 60, 80, 132, 250):
            for height in (1, 2, 3, 5, 8, 14, 22, 60):
                found = view.lines(width, height, time_left="2 h 05 min left", unicode=unicode)
                assert 1 <= len(found) <= height
                assert all(line.cell_len <= width and "\n" not in line.plain for line in found)
                if width >= 24:
                    assert f"{steps}/25" in found[0].plain
                if not unicode:
                    assert all(line.plain.isascii() for line in found)


def test_forty_columns_have_the_same_names_as_eighty():
    wide, narrow = texts(view_of(), 80, 22), texts(view_of(), 40, 22)
    assert [line[:10] for line in wide[1:9]] == [line[:10] for line in narrow[1:9]]
    assert any("/~" in line for line in narrow[9:])


def test_rows_show_how_far_they_are_and_where_they_are_expected_to_end():
    view = view_of(
        rollout=[RolloutNow(4, [RowNow(2, 7, 80, 160.0), RowNow(2, 8, 80, None), RowNow(0, 11, 320, 200.0)], 10, 5)]
    )
    at = [line[:9] for line in texts(view, 40, 22)].index("rollout 4")
    assert [line.split() for line in texts(view, 40, 22)[at:]] == [
        ["rollout", "4", "3", "rows", "KV", "pool", "\u2501" * 4 + "\u2500" * 4, "50%"],
        ["2.8", "\u2501" * 6, "80"],  # nothing is predicted: it may go on to the end
        ["2.7", "\u2501" * 6 + "\u2500" * 6, "80/~160"],
        ["0.11", "\u2501" * 25, "320/~320"],  # a prediction that was passed
    ]


def test_the_source_is_asked_once_a_second_and_no_more_once_it_is_over():
    asked = []
    view = view_of()
    view.watch(lambda: asked.append(1) or ClusterNow([], 0, {}))
    for _ in range(5):
        texts(view, 80, 22)
    assert len(asked) == 1
    view.watch(None)
    assert not any(line.startswith("rollout 0") for line in texts(view, 80, 22))


def test_rows_that_were_told_of_are_gone_once_all_samples_are_in():
    assert any(line.startswith("rollout 0 ") for line in texts(view_of(owed=1), 80, 22))
    assert not any(line.startswith("rollout 0 ") for line in texts(view_of(owed=0), 80, 22))


def test_parts_that_do_not_fit_are_left_out_and_missing_metrics_too():
    assert fit(["reward 0.5", "x" * 30, "end"], 16) == "reward 0.5  end"
    assert fit(["longer than that"], 4) == "longer than that"
    assert step_figures({}) == []
    assert step_figures({"reward/mean": None, "learner/kl": 0.0, "learner/entropy": 0.25}) == [
        ("policy", ["entropy 0.25"])
    ]


SCRIPT = r"""
import sys, time
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_live_view import ClusterNow, RolloutNow, rows
from test_metrics import RunLogger, config
logger = RunLogger(config(), Path(sys.argv[1]), total_steps=9, start_step=0)
try:
    logger.start_progress(lambda: ClusterNow([RolloutNow(0, rows(5), 10, 4)], 7, {"reward": 1}))
    logger.log_step(1, {"reward/mean": 0.25, "response/length_mean": 7.0}, [])
    print("ready", flush=True)
    time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
finally:
    logger.close(failed=True)
"""


@pytest.mark.parametrize(
    "settings",
    [{"TERM": "xterm", "COLUMNS": "80"}, {"TERM": "xterm", "COLUMNS": "40", "NO_COLOR": "1"}, {"TERM": "dumb"}],
)
def test_an_interrupted_terminal_has_its_cursor_and_no_colour_where_none_is_wanted(tmp_path, settings):
    leader, follower = pty.openpty()
    folders = [str(Path(__file__).parents[1]), str(ROOT)]
    command = [sys.executable, "-c", SCRIPT, str(tmp_path), *folders]
    with subprocess.Popen(
        command, stdout=follower, stderr=follower, env={**os.environ, "LINES": "24", **settings}
    ) as process:
        os.close(follower)
        output, interrupted = b"", False
        try:
            while chunk := os.read(leader, 65536):
                output += chunk
                if not interrupted and b"ready" in output and (b"rollout 0" in output or settings["TERM"] == "dumb"):
                    interrupted = True
                    process.send_signal(signal.SIGINT)
        except OSError:  # how a Linux pty says that the other side is closed
            pass
    os.close(leader)
    text = output.decode()
    assert process.returncode == 0 and "interrupted" in text, text
    assert text.rfind(f"{ESCAPE}[?25h") >= text.rfind(f"{ESCAPE}[?25l"), "the cursor is shown"
    if settings["TERM"] == "dumb":
        assert ESCAPE not in text and "step 1/9  reward 0.250  length 7" in text
    else:
        assert "5 rows" in text and "step 1/9" in text
    if "NO_COLOR" in settings:
        assert not any(f"{ESCAPE}[{code}" in text for code in ("3", "1;3", "38", "9")), "no colour is set"

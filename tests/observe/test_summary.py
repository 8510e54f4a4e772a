"""The end of a run: the summary's numbers and its command."""

import json
from pathlib import Path

import pytest

from infsample_rl.config import Config
from infsample_rl.observe.summary import summary
from tests.observe.logged import logged_config


def config() -> Config:
    """Two prompts of four samples a step."""
    return logged_config("a $tiny_run$")


def write_lines(path: Path, records: list[dict]) -> None:
    """Records as JSON lines, with a torn one at the end."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"step": 99, "rew')


def twelve_steps() -> list[dict]:
    """Rewards 0.1 to 1.2 (the second one None), lengths 10 to 120, evaluations at 0, 6 and 12."""
    steps = [
        {
            "step": n,
            "reward/mean": n / 10,
            "response/length_mean": 10.0 * n,
            "response/tokens": 80 * n,
            "timing/step": 2.0,
        }
        for n in range(1, 13)
    ]
    steps[1]["reward/mean"] = None
    steps[5]["eval/accuracy"], steps[11]["eval/accuracy"] = 0.5, 0.625
    return [{"step": 0, "eval/accuracy": 0.25}, *steps]


def test_summary_of_a_hand_written_run(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", twelve_steps())
    checkpoint = tmp_path / "checkpoints" / "step-12"
    checkpoint.mkdir(parents=True)
    lines = summary(config(), tmp_path, checkpoint=checkpoint, seconds=75.0).splitlines()
    # First five rewards: 0.1 0.3 0.4 0.5 0.6 (0.38), last five: 0.8 to 1.2 (1.0). Tokens: 780 mean tokens x 8 samples
    # in 24 s.
    assert lines[:8] == [
        "a $tiny_run$: 12 steps",
        "  held-out accuracy  0.250 -> 0.625 (before and after: step 0 and step 12)",
        "  reward             0.380 -> 1.000 (mean of the first and of the last 5 steps)",
        "  response length    30.0 -> 100.0 tokens (mean of the first and of the last 5 steps)",
        "  sampled            6,240 tokens, 260 tokens/s over 24 s of steps",
        "  time               1 min 15 s",
        f"  checkpoint         {checkpoint}",
        f"  try it             python -m infsample_rl chat {checkpoint}",
    ]
    assert lines[8:] == [
        f"  files in {tmp_path}:",
        "    metrics.jsonl      one JSON object a step",
        "    checkpoints/       to resume from, and to load with transformers",
    ]


ONE_STEP = {"step": 1, "reward/mean": 0.5, "response/length_mean": 4.0, "response/tokens": 32}


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], ["a $tiny_run$: 0 steps", "not evaluated", "none measured", "none measured", "0 tokens"]),
        (
            [ONE_STEP | {"environment/observed_tokens": 12}],
            ["a $tiny_run$: 1 steps", "not evaluated", "0.500 (one step)", "4.0 tokens (one step)", "20 tokens"],
        ),
        (
            [{"step": 0, "eval/accuracy": 0.5}, {"step": 1, "reward/mean": -2.0}, {"step": 2, "reward/mean": 3.0}],
            [
                "a $tiny_run$: 2 steps",
                "0.500 (step 0 only)",
                "-2.000 -> 3.000 (first and last step)",
                "none measured",
                "0 tokens",
            ],
        ),
    ],
)
def test_short_runs_have_a_summary_too(tmp_path: Path, records: list[dict], expected: list[str]) -> None:
    write_lines(tmp_path / "metrics.jsonl", records)
    lines = summary(config(), tmp_path, checkpoint=None, seconds=1.0).splitlines()
    assert [lines[0], *(line[21:] for line in lines[1:5])] == expected

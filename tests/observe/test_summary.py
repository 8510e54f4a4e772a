"""The end of a run: the summary's numbers, its command and its picture."""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from infsample_rl.config import Config
from infsample_rl.observe.summary import smooth, write_summary
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


def picture(path: Path) -> np.ndarray:
    """Pixels of a PNG, [height, width, 4]."""
    from matplotlib.image import imread

    return imread(path)


def test_summary_of_a_hand_written_run(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", twelve_steps())
    checkpoint = tmp_path / "checkpoints" / "step-12"
    checkpoint.mkdir(parents=True)
    lines = write_summary(config(), tmp_path, checkpoint=checkpoint, seconds=75.0).splitlines()
    # First five rewards: 0.1 0.3 0.4 0.5 0.6 (0.38), last five: 0.8 to 1.2 (1.0). Tokens: 780 mean tokens x 8 samples
    # in 24 s.
    assert lines[:7] == [
        "a $tiny_run$: 12 steps",
        "  held-out accuracy  0.250 -> 0.625 (before and after: step 0 and step 12)",
        "  reward             0.380 -> 1.000 (mean of the first and of the last 5 steps)",
        "  response length    30.0 -> 100.0 tokens (mean of the first and of the last 5 steps)",
        "  sampled            6,240 tokens, 260 tokens/s over 24 s of steps",
        "  time               1 min 15 s",
        f"  checkpoint         {checkpoint}",
    ]
    assert lines[8:] == [
        f"  files in {tmp_path}:",
        "    metrics.jsonl      one JSON object a step",
        "    reward_curve.png   reward, held-out accuracy and response length over the steps",
        "    checkpoints/       to resume from, and to load with transformers",
    ]


def test_reward_curve_is_a_picture_with_all_three_colours(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", twelve_steps())
    write_summary(config(), tmp_path, checkpoint=None, seconds=1.0)
    pixels = picture(tmp_path / "reward_curve.png")
    assert pixels.shape == (780, 1040, 4)
    for colour in ("1f5fa8", "d1620a", "2a7f4f"):
        rgb = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        assert (np.abs(pixels[..., :3] - rgb).max(-1) < 0.01).sum() > 200, colour


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([], ["a $tiny_run$: 0 steps", "not evaluated", "none measured", "none measured", "0 tokens"]),
        (
            [{"step": 1, "reward/mean": 0.5, "response/length_mean": 4.0, "response/tokens": 32}],
            ["a $tiny_run$: 1 steps", "not evaluated", "0.500 (one step)", "4.0 tokens (one step)", "32 tokens"],
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
    lines = write_summary(config(), tmp_path, checkpoint=None, seconds=1.0).splitlines()
    assert [lines[0], *(line[21:] for line in lines[1:5])] == expected
    assert (tmp_path / "reward_curve.png").exists() == bool(records)


def test_smoothing_is_a_centred_mean() -> None:
    assert smooth([0.0, 0.0, 5.0, 0.0, 0.0, 0.0]) == pytest.approx([5 / 3, 5 / 4, 1.0, 1.0, 1.25, 0.0])


@pytest.mark.slow
def test_the_printed_command_samples_from_the_checkpoint(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    checkpoint = tmp_path / "it's a run" / "checkpoints" / "step-1"
    words = Tokenizer(models.WordLevel({"<unk>": 0, "one": 1, "two": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>", pad_token="<unk>").save_pretrained(checkpoint)
    sizes = {"vocab_size": 3, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen3ForCausalLM(Qwen3Config(**sizes, **heads)).save_pretrained(checkpoint)
    run_dir = checkpoint.parent.parent
    write_lines(run_dir / "metrics.jsonl", [{"step": 1, "reward/mean": 0.5}])
    (run_dir / "completions.jsonl").write_text(json.dumps({"step": 1, "prompt": "one 'two' \"one\""}) + "\n")
    lines = write_summary(config(), run_dir, checkpoint=checkpoint, seconds=1.0).splitlines()
    (line,) = [line for line in lines if "try it" in line]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line[21:], shell=True, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("one 'two' \"one\"")


def test_a_name_in_letters_that_the_font_lacks_is_no_warning(tmp_path, recwarn):
    write_lines(tmp_path / "metrics.jsonl", twelve_steps())
    settings = config()
    settings.run.name = "\u8bad\u7ec3 1"
    write_summary(settings, tmp_path, checkpoint=None, seconds=1.0)
    assert (tmp_path / "reward_curve.png").is_file()
    assert not any("Glyph" in str(each.message) for each in recwarn)

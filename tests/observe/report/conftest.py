"""A run folder that was recorded, one of ten thousand completions that was not, and a page read back into what it
holds."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECORDED = Path(__file__).resolve().parents[2] / "data" / "report_run"
WORDS = "so then if and knight knave true false Leo says is a the therefore hence 7 12 + = \u2264 \u03b1 \u4e2d".split()


@pytest.fixture
def recorded_run(tmp_path) -> Path:
    """A copy of three steps of the default experiment."""
    return Path(shutil.copytree(RECORDED, tmp_path / "recorded"))


@pytest.fixture(scope="session")
def large_run(tmp_path_factory) -> Path:
    """2,500 steps of 4 recorded completions of some 1,500 characters, and as many timelines of 64 samples, in the
    recorded run's form."""
    folder = Path(shutil.copytree(RECORDED, tmp_path_factory.mktemp("runs") / "large"))
    draw, steps = random.Random(0), range(1, 2501)
    metric, group = (
        json.loads((RECORDED / name).read_text().splitlines()[-1]) for name in ("metrics.jsonl", "samples.jsonl")
    )
    group["samples"] = [sample | {"sample_index": index} for index, sample in enumerate(group["samples"] * 4)]
    with (folder / "metrics.jsonl").open("w") as metrics, (folder / "samples.jsonl").open("w") as samples:
        for step in steps:
            noisy = {
                name: value * draw.uniform(0.8, 1.2) * (1 + step / 2500)
                for name, value in metric.items()
                if value is not None
            }
            metrics.write(json.dumps(noisy | {"step": step}) + "\n")
            samples.write(json.dumps(group | {"step": step}) + "\n")
    with (folder / "completions.jsonl").open("w") as completions:
        for step in steps:
            for index in range(4):
                completions.write(json.dumps(completion(step, index, draw)) + "\n")
    return folder


def completion(step: int, index: int, draw: random.Random) -> dict[str, Any]:
    """A completion of about 300 words."""
    reward = float(draw.random() < 0.2 + 0.6 * step / 2500)
    return {
        "step": step, "prompt_index": index, "row": step, "sample_index": draw.randrange(32),
        "prompt": f"Question {step % 500}: " + "who is what? " * 20,
        "response": " ".join(draw.choice(WORDS) for _ in range(300)), "reward": reward, "components": {"kk": reward,
        "format": draw.random()},
        "advantage": reward - 0.5 + draw.random() / 10, "length": draw.randrange(1, 320), "finish_reason": "stop",
        "policy_version": step - 1,
    }  # fmt: skip


@pytest.fixture
def page_in() -> Callable[[Path], dict[str, Any]]:
    """Reads what an HTML file holds, as a browser would: the text of its data element up to the first end tag."""

    def read(path: Path) -> dict[str, Any]:
        return json.loads(
            re.search(
                r'<script type="application/json" id="page">(.*?)</script>', path.read_text(encoding="utf-8"), re.DOTALL
            )[1]
        )

    return read

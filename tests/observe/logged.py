"""Settings of a run whose trackers are off, what its driver logs, and which names of metrics are known."""

from __future__ import annotations

import re
from collections.abc import Iterable

from infsample_rl.config import Config
from infsample_rl.observe.metric_names import METRICS
from tests.configs import run_config


def logged_config(name: str = "tiny", **logging: object) -> Config:
    """Two prompts of four samples a step, logged to files only, apart from `logging`."""
    return run_config(
        run={"name": name},
        data={"source": "rows.jsonl", "prompts_per_step": 2},
        rollout={"group_size": 4, "max_new_tokens": 256},
        reward={"functions": ["kk"]},
        logging={"wandb": "disabled", **logging},
    )


def sample(step: int, index: int = 0, reward: float | None = 1.0) -> dict:
    """A completion as the driver gives it."""
    return {
        "step": step, "prompt_index": 0, "sample_index": index, "prompt": "1 + 1 = ?", "response": "2",
        "reward": reward, "components": {"kk": reward}, "advantage": 0.5, "length": 2, "finish_reason": "stop",
        "policy_version": step - 1,
    }  # fmt: skip


def undescribed(names: Iterable[str]) -> list[str]:
    """Those of `names` that the table of metrics does not have, sorted. `step` is what all are plotted over."""
    known = re.compile("step|" + "|".join(re.sub("<.*?>", ".+", name) for name in METRICS))
    return sorted(name for name in set(names) if known.fullmatch(name) is None)

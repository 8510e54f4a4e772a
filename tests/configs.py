"""A whole run's settings, written once: `run_config(rollout={"slots": 2})`. Needs neither Ray nor Hydra."""

from __future__ import annotations

from typing import Any

from infsample_rl.config import Config
from infsample_rl.config.overrides import SECTIONS

NEEDED = {"model": {"path": "model"}, "data": {"source": "unused.jsonl"}, "reward": {"functions": ["gsm8k"]}}


def run_config(**sections: Any) -> Config:
    """A config of these sections, each its settings or the section itself, with a policy, a source and a reward."""
    given = {name: NEEDED.get(name, {}) | own if isinstance(own, dict) else own for name, own in sections.items()}
    whole = NEEDED | given
    return Config(**{name: SECTIONS[name](**own) if isinstance(own, dict) else own for name, own in whole.items()})

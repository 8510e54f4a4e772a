"""Rewards of responses that a test gives as text: `from tests.scored_texts import score_texts`."""

from __future__ import annotations

from infsample_rl.reward.worker import RewardWorker
from infsample_rl.types import Prompt, RewardResult


def score_texts(
    worker: RewardWorker, prompt: Prompt, texts: list[str], token_ids: list[list[int]] | None = None
) -> RewardResult:
    """As RewardWorker.score() of one micro-group without episodes; `token_ids`: none: empty."""
    return worker._finish(worker._begin(prompt, texts, token_ids or [[] for _ in texts], 0, [None] * len(texts)))

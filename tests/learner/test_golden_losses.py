"""Our losses and gradients against numbers that verl 0.9.1 and TRL 1.16.0 gave
(tests/data/learner/golden_losses.jsonl)."""

import json
from pathlib import Path

import pytest
import torch

from infsample_rl.config import ObjectiveConfig
from infsample_rl.learner.loss import policy_loss
from infsample_rl.types import LossTotals

# First line: the batch; every other line: a peer's version, our settings, and the loss and gradients that peer gave.
# No number in the file is ours; its batch reaches every clip and cap with both signs of the advantage.
LINES = [
    json.loads(line)
    for line in (Path(__file__).parent.parent / "data" / "learner" / "golden_losses.jsonl").read_text().splitlines()
]
BATCH, CASES = LINES[0]["batch"], LINES[1:]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['peer']} {case['objective']['loss']}")
def test_the_peers_losses_and_gradients(case):
    tensors = {
        name: torch.tensor(BATCH[name], dtype=torch.float64)
        for name in ("new", "old", "reference", "engine", "entropy")
    }
    lengths = torch.tensor(BATCH["lengths"])
    ids = torch.arange(len(lengths)).repeat_interleave(lengths)
    new, entropy = tensors["new"].requires_grad_(), tensors["entropy"].requires_grad_()
    loss, _ = policy_loss(
        *(new, tensors["old"], torch.tensor(BATCH["advantages"], dtype=torch.float64)[ids], ids),
        objective=ObjectiveConfig(**case["objective"]),
        totals=LossTotals(
            num_sequences=len(lengths), num_tokens=len(ids), length_normalizer=BATCH["length_normalizer"]
        ),
        ref_logprobs=tensors["reference"],
        engine_logprobs=tensors["engine"],
        entropy=entropy,
    )
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
    assert new.grad.tolist() == pytest.approx(case["gradient"], rel=1e-9, abs=1e-9)
    if "entropy_gradient" in case:
        assert entropy.grad.tolist() == pytest.approx(case["entropy_gradient"], rel=1e-9, abs=1e-9)

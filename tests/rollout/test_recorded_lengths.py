"""token_budget beside the paper's schedule on recorded lengths of an RL-trained model, at the KV memory of four slots."""

import json
from pathlib import Path

import pytest

from infsample_rl.rollout.simulator import simulate

CAP = 2048


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["llama3b_aime2024", "llama3b_amc23"])
def test_tokens_instead_of_slots_take_less_than_half_the_steps(name, page_size):
    lines = (Path(__file__).parent / "lengths" / f"{name}.jsonl").read_text().splitlines()
    groups = [json.loads(line)["lengths"][:32] for line in lines]
    ours = [simulate(lengths, "token_budget", slots=4, page_size=page_size, max_new_tokens=CAP) for lengths in groups]
    steps = sum(result.running_steps for result in ours)
    infinite = sum(simulate(lengths, "infinite", slots=4, max_new_tokens=CAP).running_steps for lengths in groups)  # with true lengths
    bound = sum(max(max(lengths), sum(length * (length + 1) / 2 for length in lengths) / (4 * CAP)) for lengths in groups)
    assert steps <= 0.45 * infinite
    assert steps <= 1.2 * bound
    assert sum(result.recomputed_tokens for result in ours) <= 0.2 * sum(map(sum, groups))
    assert max(result.peak_kv_tokens for result in ours) <= 4 * CAP

"""`python -m benchmarks.schedule`: both parts, the optimum, the pictures."""

import json
import sys
from pathlib import Path

import pytest

from benchmarks.schedule import main
from infsample_rl.commands.schedule_workload import SimulateOptions, calls_of, load, predictions

LENGTHS = Path(__file__).parent.parent / "data" / "lengths"
SMOLLM2 = LENGTHS / "smollm2_135m_gsm8k_T1.0_n8.jsonl"


@pytest.fixture
def few(tmp_path):
    """The first six prompts of a recording."""
    path = tmp_path / "few.jsonl"
    path.write_text("".join(SMOLLM2.read_text().splitlines(keepends=True)[:6]))
    return path


def test_one_prompt_at_a_time_and_several_beside_the_optimum(few, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        sys, "argv", ["schedule", f"lengths={few}", "json=true", f"out={tmp_path / 'out'}", "prompts_at_once=3"]
    )
    assert main() == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    # schedules without predictions; four predicted and token_budget with four sigmas; optima
    assert len(found) == 2 * (6 + 4 * 4 + 4 + 2)
    assert {record["prompts_at_once"] for record in found} == {1, 3}
    assert len({frozenset(record) for record in found}) == 1, "every record has the same keys"
    for prompts in (1, 3):
        here = {record["name"]: record for record in found if record["prompts_at_once"] == prompts}
        for name in (
            "naive",
            "fixed_slot",
            "arrival",
            "sjf, sigma 1",
            "infinite, true lengths",
            "lpt, sigma 0.5",
            "fptas, true lengths",
        ):
            assert here[name]["running_steps"] >= here["optimum, slots"]["running_steps"]
        assert here["optimum, memory"]["running_steps"] <= here["token_budget, true lengths"]["running_steps"]
        assert (
            here["token_budget"]["peak_kv_tokens"]
            <= here["token_budget"]["kv_budget_tokens"]
            == 4 * here["naive"]["cap"]
        )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["schedule.png", "slots.png"]


def test_predictions_are_the_true_lengths_at_sigma_0_and_within_1_and_the_cap(few):
    options = SimulateOptions(lengths=[str(few)])
    workload = load(few, options)
    assert predictions(workload, 0, 0.0) == workload.groups[0]
    noisy = [length for place in range(6) for length in predictions(workload, place, 2.0)]
    assert min(noisy) >= 1 and max(noisy) == workload.cap
    assert calls_of(workload, options, 1) == [range(place, place + 1) for place in range(6)]
    assert calls_of(workload, SimulateOptions(lengths=["x"], prompts_per_call=4), 2) == [range(0, 4), range(4, 6)]

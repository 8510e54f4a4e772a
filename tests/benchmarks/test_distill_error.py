"""benchmarks.distill_error: of the whole vocabulary nothing is missed, of fewer tokens less and less."""

import json

import pytest
import torch

from benchmarks import distill_error
from tests.conftest import save_tiny_qwen3


@pytest.mark.parametrize("kind", ["reverse", "forward"])
def test_more_tokens_miss_less_and_all_of_them_nothing(kind):
    generator = torch.Generator().manual_seed(0)
    policy, teacher = (3 * torch.randn(5, 50, generator=generator) for _ in range(2))
    rows = [
        distill_error.row_of(kind, k, found)
        for k, found in distill_error.measure(policy, distill_error.likeliest(teacher), kind, [1, 4, 16, 50])
    ]
    shares, gradients = ([float(row[name]) for row in rows] for name in ("share", "gradient"))
    assert shares == sorted(shares) and shares[0] < 0.9 and shares[-1] == 1
    assert gradients == sorted(gradients, reverse=True) and gradients[0] > 0.1 and gradients[-1] == 0
    own, other = (each.double().log_softmax(-1) for each in (policy, teacher))
    first, second = (own, other) if kind == "reverse" else (other, own)
    assert float(rows[-1]["nats"]) == pytest.approx((first.exp() * (first - second)).sum(-1).mean().item(), abs=1e-5)


def test_the_command_reads_a_runs_completions(tiny_qwen3, tmp_path, capsys, monkeypatch):
    teacher = save_tiny_qwen3(tmp_path / "teacher", seed=1, head=272)
    path = tmp_path / "completions.jsonl"
    path.write_text(
        "".join(json.dumps({"step": 1, "prompt": "What", "response": said}) + "\n" for said in ("a hat", "", "no"))
    )
    given = [f"policy={tiny_qwen3}", f"teacher={teacher}", f"completions={path}", "ks=[2,259,264]", "threads=1"]
    monkeypatch.setattr("sys.argv", ["distill_error", *given])
    assert distill_error.main() == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines] == [[kind, k] for kind in ("reverse", "forward") for k in ("2", "259")]
    assert [line[3] for line in lines[1::2]] == ["1.0000", "1.0000"] and float(lines[0][3]) < 1


@pytest.mark.parametrize("lines", ['{"step": 1, "prompt": "What"}\n', "What\n", ""])
def test_lines_that_are_no_samples_are_one_line(refused, tiny_qwen3, tmp_path, lines):
    path = tmp_path / "completions.jsonl"
    path.write_text(lines)
    given = [f"policy={tiny_qwen3}", f"teacher={tiny_qwen3}", f"completions={path}"]
    assert "has no samples with prompt and response" in refused(distill_error.main, *given)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["teacher=a"], "give policy=FOLDER and teacher=FOLDER"),
        (["policy=a", "teacher=b"], "completions=nothing: give a run's completions.jsonl"),
        (["policy=a", "teacher=b", "ks=[0]"], "ks"),
    ],
)
def test_bad_arguments_are_one_line(refused, arguments, said):
    assert said in refused(distill_error.main, *arguments)

"""Whole runs of the real command on Ray: what a user gets."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

from tests.forks import run_module
from tests.observe.logged import undescribed


def metrics(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(command, sums_file, tmp_path_factory) -> tuple[Path, str]:
    """One finished run in 2 rollout workers and 2 learner ranks, started from a directory that has nothing to do with
    the checkout.

    One slot: with token_budget the four samples of so small a group would end in the same step.
    """
    cwd = tmp_path_factory.mktemp("elsewhere")
    own = f"data.eval_source={sums_file} run.eval_prompts=2 run.eval_every=0 run.checkpoint_every=1 objective=default"
    own += " cluster.rollout_workers=2 cluster.learner_ranks=2 rollout.schedule=arrival rollout.slots=1"
    as_a_user = command(Path("my run"), *own.split())
    done = subprocess.run(as_a_user, cwd=cwd, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return cwd / "my run", done.stdout


def test_run_folder_holds_what_is_promised(finished):
    run_dir, output = finished
    assert {path.name for path in run_dir.iterdir()} >= {
        "config.yaml",
        "metrics.jsonl",
        "completions.jsonl",
        "checkpoints",
        "report.html",
    }
    assert [path.name for path in sorted((run_dir / "checkpoints").iterdir())] == ["step_000001", "step_000002"]
    assert list(run_dir.parent.iterdir()) == [run_dir], "nothing is written beside the run folder"
    assert "of 12 samples = 3 prompts x G = 4" in output and "\x1b" not in output


def test_the_report_of_a_run_has_every_part_and_misses_nothing(finished):
    run_dir, output = finished
    text = (run_dir / "report.html").read_text(encoding="utf-8")
    page = json.loads(re.search(r'<script type="application/json" id="page">(.*?)</script>', text, re.DOTALL)[1])
    assert page["notes"] == [] and "report.html" in output and page["figures"][0] == ["steps", "2 of 2 (finished)"]
    assert len(page["completions"]["rows"]) == 8
    groups = page["timelines"]["groups"]
    assert [(group["step"], group["prompt_index"]) for group in groups] == [(1, 0), (1, 2), (2, 0), (2, 2)]
    for sample in (sample for group in groups for sample in group["samples"]):
        assert (
            sum(stay[5] for stay in sample["stays"]) == sample["length"]
            and sample["text"] is not None
            and sample["reward"] is not None
        )


def test_metrics_have_their_final_names(finished):
    rows = metrics(finished[0])
    assert [row["step"] for row in rows] == [0, 1, 2]
    names = {
        "reward/mean",
        "response/length_mean",
        "rollout/running_steps",
        "rollout/peak_kv_bytes",
        "rollout/row_utilisation",
        "rollout/of_bound",
        "learner/loss",
        "learner/grad_norm",
        "learner/logprob_diff_max",
        "timing/step",
    }
    assert names <= set(rows[1]) and "eval/accuracy" in rows[0] and "eval/accuracy" in rows[2]
    assert rows[1]["learner/logprob_diff_max"] < 1e-4 and rows[1]["learner/grad_norm"] > 0
    assert rows[1]["rollout/peak_kv_bytes"] <= rows[1]["rollout/kv_pool_bytes"]


def test_every_metric_of_a_run_has_unit_and_meaning(finished):
    assert undescribed(name for row in metrics(finished[0]) for name in row) == []


def test_rewards_start_before_their_group_has_ended(finished):
    """In one step at least: a group is over in 0.1 s here, and a busy machine may ask for its rewards later."""
    assert max(row["timing/reward_lead"] for row in metrics(finished[0])[1:]) > 0


def test_checkpoint_loads_with_plain_transformers_and_has_moved(finished, tiny_qwen3):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished[0] / "checkpoints" / "step_000002"
    trained, start = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    assert AutoTokenizer.from_pretrained(folder).chat_template
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), start.parameters(), strict=True))


def test_completions_are_kept_with_their_rewards(finished):
    rows = [json.loads(line) for line in (finished[0] / "completions.jsonl").read_text().splitlines()]
    assert len(rows) == 8 and {row["step"] for row in rows} == {1, 2}
    assert all(
        "assistant" in row["prompt"] and 0 <= row["reward"] <= 1 and row["policy_version"] == row["step"] - 1
        for row in rows
    )


@pytest.mark.slow
def test_a_broken_reward_is_counted_and_the_run_goes_on(train, tmp_path):
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import os\n"
        "def bad(prompts, completions, **columns):\n"
        "    value = sum(map(ord, completions[0]))\n"
        "    if value % 5 == 0: os._exit(1)\n"
        "    if value % 5 == 1: raise KeyError('oops')\n"
        "    if value % 5 == 2: return [float('nan')] * len(completions)\n"
        "    return [float(len(text) % 2) for text in completions]\n"
    )
    rows, log, folder = train(f"reward.functions=['{bad}:bad']", "run.checkpoint_every=1")
    assert sum(row["reward/failed"] for row in rows) > 0 and "bad" in log
    assert [row["step"] for row in rows] == [1, 2]
    fitted = [(row["predictor/used"], row["predictor/seconds"] >= 0) for row in rows]
    assert fitted == [(0, True)] * 2, "so little cannot be fitted"
    assert (folder / "checkpoints" / "step_000002" / "length_probe.npz").is_file()


@pytest.mark.slow
def test_the_papers_experiment_takes_a_real_step_with_only_model_data_and_devices_overridden(tiny_qwen3, tmp_path):
    rows = [{"problem": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(4)]
    (tmp_path / "problems.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    devices = "cluster.rollout_workers=2 cluster.rollout_gpus=0 cluster.learner_ranks=1 cluster.learner_gpus=0"
    arguments = ["+experiment=math_qwen3_8b_paper", f"model.path={tiny_qwen3}", "data.source=problems.jsonl"]
    arguments += [*devices.split(), "cluster.reference_gpus=0"]
    done = run_module("infsample_rl.main", arguments, tmp_path, timeout=580)
    assert done.returncode == 0, done.stdout[-3000:]
    (run_dir,) = (tmp_path / "runs").iterdir()
    (row,) = [row for row in metrics(run_dir) if row["step"] == 1]
    assert row["response/tokens"] > 0 and row["rollout/peak_kv_bytes"] <= row["rollout/kv_pool_bytes"]
    assert "waiting prefixes stay while pages allow" in done.stdout
    said = (run_dir / "run.log").read_text()
    assert "frozen; lengths: all equal until" in said, "that no trained predictor was given is said"


@pytest.mark.slow
def test_two_sources_of_an_experiment_train_each_with_its_own_reward(tmp_path):
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "mixed.yaml").write_text(
        "# @package _global_\n"
        "defaults: [{override /model: kk_tiny}, {override /objective: no_kl}]\n"
        "data:\n"
        "  sources:\n"
        "    - {source: kk_tiny, weight: 3, reward: kk}\n"
        "    - {source: 'reasoning_gym:products', reward: reasoning_gym, generator_kwargs: {size: 5, max_digits: 1}}\n"
        "  max_prompt_tokens: 160\n"
        "  prompts_per_step: 4\n"
        "rollout: {group_size: 2, slots: 2, max_new_tokens: 16}\n"
        "learner: {max_tokens_per_micro_batch: 512, warmup_steps: 0}\n"
        "run: {steps: 2, eval_prompts: 2, eval_every: 1}\n"
        "logging: {wandb: disabled, completions_per_step: 8}\n"
    )
    arguments = ["--config-dir", "mine", "+experiment=mixed", "run.dir=out"]
    done = run_module("infsample_rl.main", arguments, tmp_path, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:]
    rows = metrics(tmp_path / "out")
    assert [row["step"] for row in rows] == [0, 1, 2] and not undescribed(name for row in rows for name in row)
    for row in rows:
        assert {"eval/accuracy/kk_tiny", "eval/accuracy/products"} <= row.keys()
    assert all({"reward/mean/kk_tiny", "reward/mean/products"} <= row.keys() for row in rows[1:])
    lines = [json.loads(line) for line in (tmp_path / "out" / "completions.jsonl").read_text().splitlines()]
    of_source = {(str(line["row"]).partition(":")[0], *line["components"]) for line in lines}
    assert of_source == {("kk_tiny", "kk"), ("products", "reasoning_gym")}
    assert sum(str(line["row"]).startswith("kk_tiny:") for line in lines) == len(lines) * 3 / 4
    assert "75.0% of what is drawn, as kk_tiny, reward kk" in done.stdout

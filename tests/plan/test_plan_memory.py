"""What the parts of a plan follow: sharding, recomputation, adapters, the model's depth; and the measured peaks of real
processes."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from infsample_rl.config.loading import load_config
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.plan import learner_memory
from infsample_rl.plan.at_start import FILE, plan_at_start
from infsample_rl.plan.devices import host
from infsample_rl.plan.learner_memory import beside_steps, frozen_row, learner_lines, learner_row, row_lines
from infsample_rl.plan.limits import largest_pool, largest_row, with_settings
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import plan_processes, plan_role
from infsample_rl.plan.rollout_memory import most_rows
from infsample_rl.plan.row_memory import RowSettings, _fewest_scored, _trace, fullest_moment
from infsample_rl.plan.run_plan import plan_run
from tests.tiny_models import save_words

ROOT = Path(__file__).resolve().parents[2]
MEASURED = 0.10  # the error that is allowed


def settings(*overrides):
    config = load_config(["objective=no_kl", "cluster.learner_ranks=1", *overrides])
    return config, ModelOutline.of(config)


def test_unsharded_state_is_what_the_learner_holds():
    config, model = settings()
    learner = LearnerWorker(config, 0, 1, total_steps=1)
    learner.setup(None)
    lines = plan_role(config, model, "learner").lines
    assert lines["weights"] == sum(parameter.nbytes for parameter in learner.policy.parameters())
    assert lines["gradients"] == lines["weights"] and lines["optimizer's moments"] == 2 * lines["weights"]
    masters = plan_role(with_settings(config, model__dtype="bfloat16"), model, "learner").lines
    assert (masters["weights"], masters["float32 masters"]) == (lines["weights"] // 2, lines["weights"])


def test_ranks_share_the_state_and_recomputation_leaves_a_fraction_of_the_activations():
    config, model = settings()
    alone = plan_role(config, model, "learner").lines
    shared = plan_role(with_settings(config, cluster__learner_ranks=4), model, "learner").lines
    assert (
        shared["gradients"] == alone["gradients"] // 4
        and shared["optimizer's moments"] == alone["optimizer's moments"] // 4
    )
    recomputed = plan_role(with_settings(config, learner__activation_checkpointing=1), model, "learner")
    assert recomputed.lines["activations"] < 0.2 * alone["activations"]
    assert recomputed.sum_bytes < 0.7 * sum(alone.values())
    changes = {"learner__activation_checkpointing": 1, "learner__recompute_granularity": "selective"}
    selective = plan_role(with_settings(config, **changes), model, "learner")
    assert 0.3 * alone["activations"] < selective.lines["activations"] < 0.65 * alone["activations"]


def test_adapters_take_the_place_of_gradients_and_moments():
    config, model = settings("learner.lora_rank=8")
    lines, whole = plan_role(config, model, "learner").lines, plan_role(settings()[0], model, "learner").lines
    count = sum(model.adapter_sizes(config))
    assert lines["gradients"] == 4 * count and lines["optimizer's moments"] == 8 * count
    assert lines["weights"] == whole["weights"] + 4 * count
    half = plan_role(with_settings(config, model__dtype="bfloat16"), model, "learner").lines
    assert 0.45 < half["activations"] / lines["activations"] < 0.6, "adapters run in 16 bits too, on copies of nothing"


@pytest.mark.parametrize(
    ("every", "granularity"),
    [
        (0, "full"),
        pytest.param(1, "full", marks=pytest.mark.slow),
        pytest.param(3, "full", marks=pytest.mark.slow),
        pytest.param(1, "selective", marks=pytest.mark.slow),
        (3, "selective"),
    ],
)
def test_a_deep_model_extended_from_shallow_ones_is_the_same_as_traced_whole(every, granularity):
    config, model = settings(
        f"learner.activation_checkpointing={every}", f"learner.recompute_granularity={granularity}"
    )
    deep = Qwen3Config(**model.architecture.to_dict() | {"num_hidden_layers": 8, "layer_types": None})
    shape = {
        "dtype": torch.float32,
        "learner": config.learner,
        "masters": False,
        "on_gpu": False,
        "flex_attention": False,
    }
    row, of_deep = (
        [(20, [30] * 6), (20, [10])],
        RowSettings(model=ModelOutline(architecture=deep, valid_vocab=60), **shape),
    )
    for groups, in_passes in ((row, False), (row[:1], True)):
        extended = fullest_moment(of_deep, groups, in_passes=in_passes)
        whole = _trace(of_deep, 8, groups, in_passes)
        assert sum(extended.values()) == max(sum(found.values()) for found in whole.values())


@pytest.mark.parametrize(("on_gpu", "head_fp32", "top_k"), [(False, False, 5), (True, False, 0), (True, True, 0)])
@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(("learner.activation_checkpointing=1",), marks=pytest.mark.slow),
        pytest.param(("learner.lora_rank=4",), marks=pytest.mark.slow),
    ],
)
def test_a_row_extended_from_few_chunks_of_logits_is_the_same_as_traced_whole(overrides, on_gpu, head_fp32, top_k):
    config, model = settings("learner.logprob_chunk_tokens=16", *overrides)
    wide = Qwen3Config(**model.architecture.to_dict() | {"vocab_size": 20_000})
    row = RowSettings(
        model=ModelOutline(architecture=wide, valid_vocab=19_000),
        dtype=torch.bfloat16,
        learner=config.learner,
        masters=True,
        on_gpu=on_gpu,
        flex_attention=on_gpu,
        head_fp32=head_fp32,
        top_k=top_k,
    )
    for groups, in_passes in (([(20, [30] * 6), (20, [10])], False), ([(20, [30] * 6)], True)):
        total = sum(sum(lengths) for _, lengths in groups)
        assert _fewest_scored(row, total) < total, "else nothing is extended"
        extended = fullest_moment(row, groups, in_passes=in_passes)
        whole = _trace(row, wide.num_hidden_layers, groups, in_passes)
        assert sum(extended.values()) == max(sum(found.values()) for found in whole.values())


def test_what_a_teachers_likely_ids_take_is_counted(tmp_path):
    config, model = settings()
    shape = {"model": model, "dtype": torch.float32, "learner": config.learner, "masters": False, "on_gpu": False}
    without, beside = (
        sum(fullest_moment(RowSettings(**shape, flex_attention=False, top_k=top_k), [(20, [100] * 4)]).values())
        for top_k in (0, 40)
    )
    assert beside - without >= 400 * 40 * (8 + 4), "their ids and their log-probabilities"
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "num_attention_heads": 1}
    path = save_policy(tmp_path, "qwen3", 4000, **sizes, num_key_value_heads=1, head_dim=16)  # its head is the fullest
    planned = []
    for top_k in (0, 40):
        own = [f"model.path={path}", f"reference.path={path}", f"objective.distill_top_k={top_k}"]
        distill = load_config(["objective=distill", *own])
        tokens = distill.samples_per_step * distill.rollout.max_new_tokens
        plan = plan_run(distill)
        assert plan.waiting_bytes == (16 + 8 * top_k) * tokens
        planned.append({role.process.role: role.process.sum_bytes for role in plan.roles})
    grown = {role for role in planned[0] if planned[1][role] > planned[0][role]}
    assert grown == {"learner", "reference"} and planned[1]["rollout"] == planned[0]["rollout"]


def test_a_teacher_on_the_learner_has_its_own_size_and_its_own_row(tmp_path):
    sizes = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 16384, "num_attention_heads": 4}
    Qwen3Config(**sizes, num_key_value_heads=4, head_dim=128, vocab_size=60_000).save_pretrained(tmp_path)
    config, model = settings(
        "objective.distill_coef=1",
        f"reference.path={tmp_path}",
        "reference.placement=learner",
        "cluster.learner_gpus=1",
    )
    teacher, own = model.reference_of(config), with_settings(config, reference__path=config.model.path)
    count = teacher.num_parameters
    assert model.reference_of(own) is model and count > 2 * model.num_parameters
    lines, of_own = learner_lines(config, model)[0], learner_lines(own, model)[0]
    assert lines["reference"] == 4 * count and of_own["reference"] == 4 * model.num_parameters
    row = frozen_row(config, teacher, learner_row(config), on_gpu=True)
    assert row.items() <= lines.items() and sum(row_lines(config, model).values()) < sum(row.values())
    shared = learner_lines(with_settings(config, cluster__learner_ranks=2), model)[0]
    assert shared["reference"] == 2 * count and shared["reference: two layers"] == 8 * teacher.layer_parameters
    moved, host_lines = learner_lines(with_settings(config, reference__offload=True), model)
    assert host_lines["reference"] == 4 * count and "reference" not in moved
    assert moved["reference: embeddings and head"] == 4 * teacher.root_parameters


def test_a_pass_behind_its_prompt_takes_what_a_row_of_as_many_tokens_takes_and_the_prompts_gradient():
    config, model = settings()
    prompt, pool = 200, model.architecture.num_hidden_layers * 2 * model.kv.num_kv_heads * model.kv.head_dim * 4
    of_row = RowSettings(
        model=model, dtype=torch.float32, learner=config.learner, masters=False, on_gpu=False, flex_attention=False
    )
    whole, passes = (
        sum(fullest_moment(of_row, [(prompt, [50] * 4)], in_passes=each).values()) for each in (False, True)
    )
    assert whole < passes < whole + 3 * prompt * pool
    shorter = sum(fullest_moment(of_row, [(prompt, [50])], in_passes=True).values())
    assert shorter < 0.8 * passes


def test_a_colocated_rank_has_the_weights_once_and_no_process_holds_a_model_twice():
    config, model = settings("cluster.colocate=true", "cluster.rollout_workers=1")
    (plan,) = plan_processes(config, model)
    assert plan.role == "colocated" and "weights" in plan.lines and "sampling: weights" not in plan.lines
    assert plan.lines["sampling: KV pool: responses"] > 0


def test_a_model_that_is_loaded_whole_is_counted_and_of_one_read_in_slices_the_slices_alone(monkeypatch):
    monkeypatch.setattr(learner_memory, "BUCKET_BYTES", 1000)  # less than this small model

    def loaded(*overrides: str) -> float:
        """Of a rank among 64, in bytes a parameter."""
        config, model = settings(*overrides)
        return beside_steps(with_settings(config, cluster__learner_ranks=64), model, {}) / model.num_parameters

    deepspeed = "learner.backend=deepspeed"
    assert loaded(deepspeed, "learner.zero_stage=2") == 4
    assert loaded(deepspeed, "learner.zero_stage=2", "learner.lora_rank=4", "model.dtype=bfloat16") == 2
    assert loaded() < 2 and loaded(deepspeed, "learner.zero_stage=3") < 2


def test_a_worker_has_no_more_rows_than_a_step_or_an_evaluation_has_samples():
    few = ("data.prompts_per_step=2", "rollout.group_size=6", "rollout.kv_budget_bytes=100MB")
    for overrides, rows in [(("run.eval_prompts=0",), 12), (("run.eval_prompts=10", "run.eval_samples=3"), 30)]:
        assert most_rows(*settings(*few, *overrides), host()) == rows
    assert most_rows(*settings(*few, "rollout.max_rows=5"), host()) == 5


def test_a_run_keeps_its_plan_and_an_unknown_model_is_one_warning(tmp_path):
    config, _ = settings("rollout.slots=4", "rollout.group_size=64")
    plan, idle, missing = plan_at_start(config, 60, total_steps=9)
    assert missing is None and "rows limited by rollout.slots=4" in idle
    (rollout, learner) = json.loads(plan)["processes"]
    assert (rollout["role"], learner["role"]) == ("rollout", "learner")
    assert learner["sum_bytes"] == sum(line["bytes"] for line in learner["lines"])
    gone = with_settings(config, model__path=str(tmp_path / "gone"))
    plan, idle, missing = plan_at_start(gone, 60, total_steps=9)
    assert plan is None and idle is None and missing.startswith(f"no {FILE}: ValueError: model.path=")


def save_policy(folder, kind, vocab, **sizes):
    """A random model with a tokenizer of nearly as many words."""
    model, config = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen2": (Qwen2ForCausalLM, Qwen2Config),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[kind]
    torch.manual_seed(5)
    model(config(vocab_size=vocab, max_position_embeddings=4096, eos_token_id=1, **sizes)).save_pretrained(folder)
    save_words(folder, vocab - 16)
    return str(folder)


# Shapes and settings other than those the formulas were written with: (architecture, vocabulary, sizes, part,
# settings).
KEPT_APART = {
    "qwen3 tied, learner": (
        "qwen3",
        5000,
        (288, 5, 768, 6, 3, 48, True),
        "learner",
        ("learner.max_tokens_per_micro_batch=640",),
    ),
    "llama untied, recomputed": (
        *("llama", 7000, (448, 7, 1200, 7, 7, 64, False), "learner"),
        ("learner.max_tokens_per_micro_batch=900", "learner.activation_checkpointing=1"),
    ),
    "qwen3 untied, recomputed selectively": (
        *("qwen3", 6000, (416, 6, 1248, 8, 2, 48, False), "learner"),
        (
            "learner.max_tokens_per_micro_batch=800",
            "learner.activation_checkpointing=1",
            "learner.recompute_granularity=selective",
        ),
    ),
    "llama untied, passes": (
        *("llama", 5000, (416, 6, 1100, 13, 13, 32, False), "learner"),
        ("learner.max_tokens_per_micro_batch=300", "learner.logprob_chunk_tokens=64"),
    ),
    "qwen2 bf16, chunks": (
        *("qwen2", 9000, (320, 4, 896, 10, 2, 32, False), "learner"),
        ("learner.max_tokens_per_micro_batch=700", "learner.logprob_chunk_tokens=128", "model.dtype=bfloat16"),
    ),
    "llama tied, rollout": ("llama", 9000, (384, 6, 1024, 6, 6, 64, True), "rollout", ("rollout.slots=150",)),
    "qwen2 tied, reference": (
        "qwen2",
        8000,
        (544, 8, 1440, 17, 17, 32, True),
        "reference",
        ("reference.max_tokens_per_micro_batch=900",),
    ),
    "llama, adapters": (
        *("llama", 6000, (416, 5, 1100, 13, 13, 32, False), "learner"),
        ("learner.max_tokens_per_micro_batch=800", "learner.lora_rank=12"),
    ),
    "qwen3, 8-bit KV": (
        *("qwen3", 5000, (320, 6, 900, 5, 5, 64, True), "rollout"),
        ("rollout.kv_budget_bytes=120MB", "rollout.kv_dtype=int8", "objective.importance=token_tis"),
    ),
}


def plan_point(*arguments):
    command = [sys.executable, "-m", "benchmarks.plan_point", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT_APART)
def test_the_predicted_peak_is_within_a_tenth_of_the_measured_one_on_models_kept_apart(name, tmp_path):
    kind, vocab, (hidden, layers, inner, heads, kv_heads, head_dim, tied), part, options = KEPT_APART[name]
    sizes = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }
    sizes |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "tie_word_embeddings": tied}
    path = save_policy(tmp_path / "model", kind, vocab, **sizes)
    common = [
        "data.max_prompt_tokens=48",
        "rollout.max_new_tokens=80",
        "rollout.group_size=24",
        "data.prompts_per_step=2",
    ]
    done = plan_point(part, f"model.path={path}", *common, *options)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert abs(found["error"]) < MEASURED, found


@pytest.mark.slow
def test_the_largest_settings_that_fit_run_in_memory_that_the_kernel_limits_and_twice_as_large_ones_do_not(tmp_path):
    sizes = {"hidden_size": 416, "num_hidden_layers": 6, "intermediate_size": 1100, "num_attention_heads": 13}
    path = save_policy(tmp_path / "model", "llama", 6000, **sizes, head_dim=32, tie_word_embeddings=False)
    shared = [f"model.path={path}", "data.max_prompt_tokens=48", "rollout.max_new_tokens=80"]
    shared += ["data.prompts_per_step=2", "run.eval_prompts=0", "run.steps=1", "learner.warmup_steps=0"]

    def row(room, config, model):
        return largest_row(config, model, room)

    def pool(room, config, model):
        found = largest_pool(config, model, plan_role(config, model, "rollout"), room)
        return found["pages"] * config.rollout.page_size

    for part, name, most_of, group_size, room in (
        ("learner", "learner.max_tokens_per_micro_batch", row, 48, 700_000_000),
        # of much less a library's buffers that come late are a part
        ("rollout", "rollout.kv_budget_tokens", pool, 96, 320_000_000),
    ):
        own, limit = [*shared, f"rollout.group_size={group_size}"], f"limit_bytes={room}"
        most = most_of(replace(host(), memory_bytes=room), *settings(*own))
        fits = plan_point(part, limit, *own, f"{name}={most}")
        assert fits.returncode == 0, fits.stderr
        assert json.loads(fits.stdout.splitlines()[-1])["measured_bytes"] > 0.8 * room, "the limit is near"
        assert plan_point(part, limit, *own, f"{name}={2 * most}").returncode == 1

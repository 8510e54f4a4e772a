"""What users set, each started by the real command: two steps of a tiny model, and what is particular to the setting.

A run's samples follow from weights, seed and place alone, so that runs which differ in their arrangement are compared
bit for bit, and runs which differ in how gradients are summed up to rounding.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from infsample_rl.commands.chaos import differences
from infsample_rl.learner.cpu_adam import compile_cpu_adam
from tests.judge_server import JudgeServer
from tests.real_runs import kill_a_decoding_worker, same_everywhere
from tests.tiny_models import save_judge
from tests.vllm_files import check_nothing_is_left, files_of_vllm

POLICY = Path(__file__).resolve().parents[2] / "infsample_rl" / "assets" / "kk_tiny" / "policy"
LITTLE_KV = ("rollout.schedule=token_budget", "rollout.kv_budget_tokens=160", "rollout.preemption=park")
BITS = (  # settings that may not change a bit
    ("rollout.schedule=token_budget", "rollout.slots=null"),
    ("rollout.schedule=token_budget", "rollout.kv_budget_tokens=160", "rollout.preemption=recompute"),
    (*LITTLE_KV, "rollout.page_size=4"),
    *((f"rollout.schedule={name}",) for name in ("arrival", "full_group", "naive", "fixed_slot")),
    *((f"rollout.schedule={name}",) for name in ("fptas", "sjf", "infinite", "lpt")),
    ("cluster.weight_sync=broadcast",),
    ("cluster.weight_sync=object_store", "cluster.rollout_workers=2"),
)
SUMS = {  # settings that add gradients up in another order, and the ranks that do
    "fsdp, full shard": ("cluster.learner_ranks=2",),
    "fsdp, hybrid": ("cluster.learner_ranks=4", "learner.shard_ranks=2"),
    "fsdp, one reduction": ("cluster.learner_ranks=2", "learner.grad_sync=last_row"),
    "fsdp, colocated": ("cluster.learner_ranks=2", "cluster.colocate=true", "cluster.rollout_workers=2"),
    "ZeRO 1": ("learner.backend=deepspeed", "learner.zero_stage=1", "cluster.learner_ranks=2"),
    "ZeRO 2": ("learner.backend=deepspeed", "learner.zero_stage=2", "cluster.learner_ranks=2"),
    "ZeRO 3": ("learner.backend=deepspeed", "learner.zero_stage=3", "cluster.learner_ranks=2"),
    "ZeRO 2, offload": ("learner.backend=deepspeed", "learner.zero_stage=2", "learner.offload_optimizer=true"),
}
IN_CI = ("ZeRO 3", "fsdp, full shard")
NAMES = ("learner/loss", "learner/grad_norm", "learner/entropy")


def close(row, wanted, names=NAMES, rel=1e-3):
    """Whether a row has the same samples, and the same update up to rounding."""
    assert row["response/tokens"] == wanted["response/tokens"] and row["reward/mean"] == wanted["reward/mean"]
    for name in names:
        assert row[name] == pytest.approx(wanted[name], rel=rel, abs=1e-6), name


@pytest.fixture(scope="module")
def plain(train):
    return train("objective=no_kl", "run.checkpoint_every=1")


@pytest.fixture(scope="module")
def no_kl(train):
    """Runs without a KL, so that three processes are enough."""

    def run(*changes: str, folder: Path | None = None):
        return train("objective=no_kl", *changes, folder=folder)

    return run


@pytest.mark.parametrize(
    "changes",
    [pytest.param(each, marks=() if number in (1, 8) else pytest.mark.slow) for number, each in enumerate(BITS)],
)
def test_no_bit_changes_with(no_kl, plain, changes):
    run = no_kl(*changes)
    assert [same_everywhere(row) for row in run.rows] == [same_everywhere(row) for row in plain.rows]
    if "rollout.preemption=park" in changes:
        assert run.rows[0]["rollout/preemptions"] > 0 and run.rows[0]["rollout/parked_tokens"] > 0
    if "rollout.preemption=recompute" in changes:
        assert run.rows[0]["rollout/preemptions"] > 0 and run.rows[0]["rollout/recomputed_tokens"] > 0


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in IN_CI else pytest.mark.slow) for name in SUMS])
def test_the_update_is_that_of_one_rank_with(no_kl, plain, name):
    if "offload" in name:
        compile_cpu_adam()  # minutes of g++ the first time
    run = no_kl(*SUMS[name], "run.checkpoint_every=2")
    for row, wanted in zip(run.rows, plain.rows, strict=True):
        close(row, wanted)
    weights, wanted = (load_file(each.folder / "checkpoints/step_000002/model.safetensors") for each in (run, plain))
    assert weights.keys() == wanted.keys()
    assert all(torch.allclose(weights[each], wanted[each], atol=1e-4) for each in wanted)


@pytest.mark.slow
def test_dynamic_slot_trains_the_first_of_every_group_to_finish(no_kl):
    lengths = {}
    for schedule in ("fixed_slot", "dynamic_slot"):
        stops = f"rollout.stop_token_ids={list(range(40, 140, 4))}"
        run = no_kl(f"rollout.schedule={schedule}", stops, "run.steps=1", "logging.completions_per_step=12")
        kept = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
        assert Counter(each["prompt_index"] for each in kept) == {0: 4, 1: 4, 2: 4}
        lengths[schedule] = run.rows[0]["response/tokens"]
    assert lengths["dynamic_slot"] < lengths["fixed_slot"], lengths


@pytest.fixture(scope="module")
def plain_policy(train):
    """By the policy of the default experiment: vLLM's attention on the CPU has no heads of 16."""
    return train("objective=no_kl", f"model.path={POLICY}")


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("cluster.weight_sync=broadcast", "cluster.rollout_workers=2"),
        ("rollout.schedule=arrival",),
        ("rollout.kv_budget_tokens=160", "learner.lora_rank=4"),
        ("rollout.tensor_parallel=2",),
        ("cluster.colocate=true", "learner.lora_rank=4"),
        ("cluster.colocate=true", "cluster.rollout_workers=2", "cluster.learner_ranks=2", "run.eval_every=1"),
    ],
)
def test_with_vllm_every_sample_of_every_step_is_the_same(no_kl, plain_policy, changes):
    """The second step samples with the weights that the first one made."""
    before = files_of_vllm("/dev/shm", "/tmp")
    run = no_kl("rollout.engine=vllm", f"model.path={POLICY}", *changes)
    check_nothing_is_left(before, "/dev/shm", "/tmp")
    trains_adapters = "learner.lora_rank=4" in changes  # another update than the weights': one step, without its norm
    rows = run.rows[:1] if trains_adapters else run.rows
    for row, wanted in zip(rows, plain_policy.rows, strict=False):
        close(row, wanted, NAMES[:1] if trains_adapters else NAMES)
        assert row["rollout/prefix_cache_hits"] is not None
    for row in run.rows:
        assert row["learner/logprob_diff_max"] < 1e-4 and row["learner/importance_mean"] == pytest.approx(1, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("cluster.learner_ranks=2",),
        ("cluster.learner_ranks=2", "learner.backend=deepspeed"),
        ("learner.lora_publish=adapters",),
    ],
)
def test_lora_starts_where_the_weights_do_and_trains_adapters_alone(no_kl, plain, changes, tiny_qwen3):
    run = no_kl("learner.lora_rank=4", "run.checkpoint_every=2", *changes)
    assert run.rows[0]["reward/mean"] == plain.rows[0]["reward/mean"]
    assert run.rows[0]["learner/loss"] == pytest.approx(plain.rows[0]["learner/loss"], rel=1e-3, abs=1e-6)
    assert run.rows[1]["learner/logprob_diff_max"] < 1e-4, "the engine samples with the adapters"
    checkpoint = run.folder / "checkpoints/step_000002"
    adapters = load_file(checkpoint / "adapter_model.safetensors")
    assert adapters and all("lora" in name for name in adapters) and not list(checkpoint.glob("model*.safetensors"))
    assert any(value.abs().max() > 0 for name, value in adapters.items() if "lora_B" in name), "they have moved"


@pytest.fixture(scope="module")
def judge(tiny_qwen3, tmp_path_factory) -> Path:
    """A random reward model."""
    folder = tmp_path_factory.mktemp("judges") / "judge"
    save_judge(folder, AutoTokenizer.from_pretrained(tiny_qwen3))
    return folder


def test_a_reward_model_scores_every_sample(no_kl, plain, judge, sums_file):
    kept = "logging.completions_per_step=12"
    run = no_kl(f"reward.functions=[{{name: 'model:{judge}'}}]", "run.steps=1", kept)
    (row,) = run.rows
    assert row["response/tokens"] == plain.rows[0]["response/tokens"] and row["reward/failed"] == 0
    problems = [json.loads(line) for line in Path(sums_file).read_text().splitlines()]
    samples = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    tokenizer, model = AutoTokenizer.from_pretrained(judge), AutoModelForSequenceClassification.from_pretrained(judge)
    for sample in samples:
        asked = {"role": "user", "content": problems[sample["row"] - 1]["question"]}
        said = {"role": "assistant", "content": sample["response"]}
        text = tokenizer.apply_chat_template([asked, said], tokenize=False)
        inputs = tokenizer(text, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            assert model(**inputs).logits.item() == pytest.approx(sample["reward"], abs=1e-4)
    assert len(samples) == 12 and len({sample["reward"] for sample in samples}) > 6


@pytest.mark.slow
def test_a_judge_scores_every_sample_and_nothing_holds_its_key(no_kl, tmp_path, monkeypatch):
    pytest.importorskip("openai")
    server, key = JudgeServer(), "planted-judge-key"
    server.reply = lambda request, _: f"Score: {len(request['messages'][0]['content']) % 11}"
    monkeypatch.setenv("JUDGE_KEY", key)
    (tmp_path / "ask.md").write_text("{question}\n{response}\nHow good is it?")
    judge = f"{{name: judge, url: '{server.url}', model: judge-1, prompt: '{tmp_path}/ask.md', key: JUDGE_KEY}}"
    run = no_kl(f"reward.functions=[{judge}]", "run.steps=1", "logging.completions_per_step=12")
    server.close()
    (row,) = run.rows
    samples = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    asked = [text for text in server.asked if "Score: N" in text]
    assert row["reward/failed"] == 0 and len(samples) == 12 and server.keys == {f"Bearer {key}"}
    for sample in samples:
        (text,) = {text for text in asked if f"\n{sample['response']}\nHow good is it?" in text}
        assert sample["reward"] == len(text) % 11 / 10
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [path for path in files if key.encode() in path.read_bytes()] == []


def advantages(run, step: int) -> dict[tuple[int, int], float]:
    """Of the kept completions of a step."""
    records = [json.loads(line) for line in (run.folder / "completions.jsonl").read_text().splitlines()]
    return {(each["prompt_index"], each["sample_index"]): each["advantage"] for each in records if each["step"] == step}


@pytest.mark.slow
def test_a_kl_in_the_reward_moves_advantages_once_policy_and_reference_differ(train):
    every = ("logging.completions_per_step=12", "objective=paper_section_3_4", "objective.kl_coef=0.001")
    small, large = (train(*every, f"objective.kl_reward_coef={beta}") for beta in (1e-9, 0.5))
    assert small.rows[0]["reward/mean"] == large.rows[0]["reward/mean"]
    first = [advantages(run, 1) for run in (small, large)]
    assert first[0].keys() == first[1].keys()
    assert all(first[0][key] == pytest.approx(first[1][key], abs=1e-4) for key in first[0]), "the KL is 0 at first"
    second = [advantages(run, 2) for run in (small, large)]
    assert max(abs(second[0][key] - second[1][key]) for key in second[0].keys() & second[1].keys()) > 1e-3


@pytest.mark.slow
def test_the_papers_predictor_trains_on_the_runs_first_groups_and_is_kept(train):
    many = ("data.prompts_per_step=32", "rollout.group_size=2", "rollout.max_new_tokens=24", "run.steps=3")
    run = train("objective=no_kl", "rollout=paper", *many, "rollout.max_new_tokens=24", "run.checkpoint_every=3")
    assert "64 groups" in run.log and (run.folder / "checkpoints/step_000003/length_predictor.npz").is_file()


def test_kv_in_8_bits_takes_a_quarter_and_is_corrected_for(no_kl, plain):
    run = no_kl("rollout.kv_dtype=int8", "objective.importance=token_tis", "objective.mismatch_stop=1")
    assert run.rows[0]["rollout/kv_pool_bytes"] < 0.3 * plain.rows[0]["rollout/kv_pool_bytes"]
    assert 1e-5 < run.rows[0]["learner/logprob_diff_mean"] < 0.1
    assert run.rows[0]["learner/importance_mean"] == pytest.approx(1, abs=0.1)


@pytest.fixture(scope="module")
def of_objective(train):
    """The first step of each, whose samples are the same, on policy."""
    names = ("no_kl", "gspo", "cispo", "dr_grpo", "rloo", "dapo")
    plain = ("objective.dynamic_sampling=false", "objective.overlong_buffer_tokens=0", "run.steps=1")
    return {name: train(f"objective={name}", *plain).rows[0] for name in names}


@pytest.mark.slow
def test_objectives_are_to_each_other_as_their_papers_say(of_objective):
    norms = {name: row["learner/grad_norm"] for name, row in of_objective.items()}
    assert len({row["reward/mean"] for row in of_objective.values()}) == 1
    assert norms["gspo"] == pytest.approx(norms["no_kl"], rel=1e-3), "at ratio 1 it is GRPO"
    assert norms["cispo"] == pytest.approx(norms["dapo"], rel=1e-3), "both are means over tokens, at ratio 1"
    assert norms["rloo"] == pytest.approx(4 / 3 * norms["dr_grpo"], rel=1e-3), "the others' mean is of G - 1 of 4"
    assert norms["dapo"] != pytest.approx(norms["no_kl"], rel=3e-3), "a mean over samples is another"


@pytest.fixture(scope="module")
def teacher(tmp_path_factory, tiny_qwen3) -> Path:
    """The policy with other weights in its last layers."""
    folder = tmp_path_factory.mktemp("models") / "teacher"
    AutoTokenizer.from_pretrained(tiny_qwen3).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.model.layers[-1].parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    model.save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_teacher_draws_the_policy_towards_it_wherever_it_is(train, teacher):
    given = ("objective=distill", f"reference.path={teacher}", "run.steps=4", "learner.lr=3e-3")
    equal = "reward.functions=[think_format]"  # rewards that are all equal do not stop it
    run, beside = train(*given, equal), train(*given, equal, "reference.placement=learner")
    kl = [row["learner/kl"] for row in run.rows]
    assert 0 < kl[-1] < 0.8 * kl[0], kl
    for row, other in zip(run.rows, beside.rows, strict=True):
        close(other, row, names=(*NAMES, "learner/kl"))


SHARDED = ("cluster.learner_ranks=2",)
DEEPSPEED = (*SHARDED, "learner.backend=deepspeed")
RESUMED = {  # every backend, schedule, objective and way of the weights once, with another of each
    "the default": (),
    "fsdp, full shard": (*SHARDED, "rollout.schedule=naive", "objective=gspo"),
    "fsdp, hybrid": ("cluster.learner_ranks=4", "learner.shard_ranks=2", "rollout.schedule=full_group"),
    "ZeRO 1": (*DEEPSPEED, "learner.zero_stage=1", "rollout.schedule=fixed_slot", "objective=cispo"),
    "ZeRO 2": (*DEEPSPEED, "learner.zero_stage=2", "rollout.schedule=arrival", "objective=dr_grpo"),
    "ZeRO 2, offload": (*SUMS["ZeRO 2, offload"], "rollout.schedule=sjf", "objective=rloo"),
    "ZeRO 3": (*DEEPSPEED, "learner.zero_stage=3", "rollout.schedule=lpt", "cluster.weight_sync=broadcast"),
    "LoRA, fsdp": (*SHARDED, "learner.lora_rank=4", "rollout.schedule=fptas"),
    "LoRA, DeepSpeed": (*DEEPSPEED, "learner.lora_rank=4", "learner.lora_publish=adapters"),
    "a reward model": ("reward.functions=[{name: 'model:JUDGE'}]", "rollout.schedule=infinite"),
    "a KL in the reward": ("objective=paper_section_3_4", "objective.kl_reward_coef=0.5", *LITTLE_KV),
    "a teacher": ("objective=distill", "reference.path=TEACHER"),
    "8-bit KV": ("rollout.kv_dtype=int8", "objective.importance=token_tis", "objective.mismatch_stop=1"),
    "dynamic sampling": ("objective=dapo", "objective.overlong_buffer_tokens=0"),
    "asynchronous": ("run.max_staleness=1", "cluster.weight_sync=object_store"),
    "the paper's predictor": ("rollout=paper", "data.prompts_per_step=32", "rollout.group_size=2", "run.steps=3"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "the default" else pytest.mark.slow) for name in RESUMED]
)
def test_a_run_that_goes_on_with_more_rollout_workers_ends_as_one_that_was_never_stopped(
    no_kl, plain, name, tmp_path, judge, teacher
):
    if "offload" in name:
        compile_cpu_adam()  # minutes of g++ the first time
    named = {"JUDGE": str(judge), "TEACHER": str(teacher)}
    settings = [each.replace("JUDGE", named["JUDGE"]).replace("TEACHER", named["TEACHER"]) for each in RESUMED[name]]
    settings.append("run.checkpoint_every=1")
    whole = plain if name == "the default" else no_kl(*settings)
    last = len(whole.rows)
    lost = tmp_path / "run"  # as when the machine fails before the last checkpoint is kept
    shutil.copytree(whole.folder, lost)
    shutil.rmtree(lost / "checkpoints" / f"step_{last:06d}")
    again = no_kl(*settings, "cluster.rollout_workers=2", folder=lost)
    assert f"going on after step {last - 1}" in again.log
    rows, wanted = ([same_everywhere(row) for row in run.rows] for run in (again, whole))
    if name == "8-bit KV":  # which need not repeat bit by bit
        assert rows[:1] == wanted[:1] and rows[1].keys() == wanted[1].keys()
        assert 1e-5 < rows[1]["learner/logprob_diff_mean"] < 0.1
    else:
        assert rows == wanted


def test_a_rollout_worker_that_is_killed_changes_no_bit(command, plain, tmp_path):
    run = tmp_path / "run"
    kill_a_decoding_worker(command(run, "objective=no_kl", "run.checkpoint_every=1"), run)
    assert differences(plain.folder, run) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "child"),
    [
        ("cluster.colocate=false", None),
        ("cluster.colocate=true", None),
        ("rollout.tensor_parallel=2", "VLLM::Worker"),
    ],
)
def test_a_vllm_that_is_killed_is_replaced_and_draws_the_same(command, plain_policy, tmp_path, place, child):
    run, settings = tmp_path / "run", ("objective=no_kl", "rollout.engine=vllm", f"model.path={POLICY}", place)
    kill_a_decoding_worker(command(run, *settings), run, child=child)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row, wanted in zip(rows, plain_policy.rows, strict=True):
        close(row, wanted)

"""python -m infsample_rl.plan: main's arguments, a model's config alone, sums of lines, verdicts that hold when planned
again."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, OPTConfig, Qwen3Config

from infsample_rl.commands.plan import main
from infsample_rl.config.loading import load_config
from infsample_rl.plan import advice, limits, processes, run_plan
from infsample_rl.plan.decode_time import decode_time
from infsample_rl.plan.devices import CUDA_RESERVE, DEVICES, device_like, gigabytes
from infsample_rl.plan.learner_memory import learner_lines
from infsample_rl.plan.limits import largest_pool, largest_row, with_settings
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import plan_role
from infsample_rl.plan.rollout_memory import pool_page_bytes
from infsample_rl.plan.run_plan import plan_run
from infsample_rl.rollout.engine.kv_cache import free_bytes
from infsample_rl.rollout.kernels import cpu_kernels
from infsample_rl.rollout.schedule.drafter import BYTES_PER_TOKEN


@pytest.fixture(scope="session")
def qwen3_8b(tmp_path_factory):
    """A folder with the config of Qwen3-8B and nothing else: no weights, no tokenizer."""
    return config_folder(tmp_path_factory, "qwen3_8b", hidden_size=4096, intermediate_size=12288, num_hidden_layers=36)


def config_folder(tmp_path_factory, name, **sizes):
    folder = tmp_path_factory.mktemp(name)
    shared = {"num_key_value_heads": 8, "num_attention_heads": sizes["hidden_size"] // 128, "head_dim": 128}
    config = Qwen3Config(**sizes, **shared, vocab_size=151936, max_position_embeddings=40960, tie_word_embeddings=False)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def plan_json(capsys, *arguments):
    status = main([*arguments, "json=true"])
    return status, json.loads(capsys.readouterr().out)


def lines(process):
    return {line["name"]: line["bytes"] for line in process["lines"]}


def test_the_papers_8b_setting_is_planned_from_its_config_alone_and_a_sum_is_its_lines(qwen3_8b, capsys):
    status, plan = plan_json(
        capsys,
        "+experiment=math_qwen3_8b_paper",
        f"model.path={qwen3_8b}",
        "cluster.device_type=h100",
        "rollout.group_size=64",
    )
    assert status == 0 and plan["fits"] and plan["waiting_bytes"] == 16 * 64 * 4 * 1024
    assert [process["role"] for process in plan["processes"]] == ["rollout", "learner", "reference"]
    for process in plan["processes"]:
        assert process["sum_bytes"] == sum(lines(process).values())
        assert process["usable_bytes"] == 81_559 * 2**20 - CUDA_RESERVE
    rollout, learner, _ = plan["processes"]
    parameters = 8_190_735_360
    assert lines(rollout)["weights"] == 2 * parameters
    page = 36 * 2 * 16 * 8 * 128 * 2  # layers, keys and values, tokens, kv heads, head size, bytes
    settings = load_config(["+experiment=math_qwen3_8b_paper", f"model.path={qwen3_8b}"])
    pages = settings.rollout.slots * -(-settings.rollout.max_new_tokens // 16)
    assert lines(rollout)["KV pool: responses"] == (pages + 1) * page
    assert lines(learner)["optimizer's moments"] == 8 * parameters // 4


COLOCATED = (
    "cluster.colocate=true",
    "cluster.rollout_workers=1",
    "cluster.learner_ranks=1",
    "cluster.rollout_gpus=1",
    "cluster.learner_gpus=1",
)


def test_a_pool_that_takes_what_is_free_is_planned_beside_a_learner(capsys):
    settings = ("objective=no_kl", *COLOCATED, "rollout.kv_budget_bytes=auto")
    status, plan = plan_json(capsys, *settings, "cluster.device_type=h100")
    (process,) = plan["processes"]
    assert status == 0 and process["role"] == "colocated" and process["largest"]["max_tokens_per_micro_batch"] > 0
    assert process["sum_bytes"] <= process["usable_bytes"]


@pytest.mark.slow
def test_a_pool_that_takes_what_is_free_where_nothing_is_does_not_fit(qwen3_8b, capsys):
    model = ("+experiment=math_qwen3_8b", f"model.path={qwen3_8b}", "objective=no_kl", "model.dtype=float32")
    status, plan = plan_json(capsys, *model, "rollout.kv_budget_bytes=auto", "cluster.device_type=rtx4090")
    rollout = plan["processes"][0]
    assert status == 1 and not rollout["fits"] and rollout["advice"] and rollout["largest"]["pages"] == 0


@pytest.mark.parametrize(
    "settings",
    [
        ("rollout.schedule=arrival",),
        ("rollout.schedule=arrival", "model.dtype=bfloat16"),
        ("rollout.schedule=full_group",),
    ],
)
def test_the_largest_pool_fits_with_the_rows_it_has(settings):
    config = load_config(["objective=no_kl", *settings])
    model, room = ModelOutline.of(config), replace(DEVICES["l4"], memory_bytes=2**30, multiprocessors=0)
    limits = largest_pool(config, model, plan_role(config, model, "rollout"), room)
    slots = limits["slots"]
    at_most = with_settings(config, rollout__slots=slots, rollout__group_size=max(slots, config.rollout.group_size))
    assert slots > 50 and plan_role(at_most, model, "rollout").sum_bytes <= room.usable_bytes
    more = int(1.1 * slots)
    above = with_settings(config, rollout__slots=more, rollout__group_size=max(more, config.rollout.group_size))
    assert plan_role(above, model, "rollout").sum_bytes > room.usable_bytes


@pytest.mark.parametrize(
    ("name", "gib", "known"),
    [
        ("NVIDIA L40S", 44, "l40s"),
        ("NVIDIA L4", 22, "l4"),
        ("NVIDIA A100-SXM4-80GB", 79, "a100-80gb"),
        ("NVIDIA A100-SXM4-40GB", 39, "a100-40gb"),
        ("NVIDIA GeForce RTX 4090", 24, "rtx4090"),
        ("NVIDIA H100 80GB HBM3", 79, "h100"),
        ("Some Other", 80, "a100-80gb"),
    ],
)
def test_a_gpu_that_is_found_is_the_known_one_it_is_named_like(name, gib, known):
    assert device_like(name, gib * 2**30).name == known


@pytest.mark.slow
def test_what_does_not_fit_is_exit_1_and_the_advice_fits_when_planned_again(qwen3_8b, capsys):
    arguments = ["+experiment=math_qwen3_8b", f"model.path={qwen3_8b}", "cluster.device_type=rtx4090"]
    status, plan = plan_json(capsys, *arguments)
    learner = plan["processes"][1]
    assert status == 1 and not learner["fits"] and learner["advice"]
    status, plan = plan_json(capsys, *arguments, *learner["advice"])
    assert status == 0 and plan["fits"]


@pytest.mark.slow
def test_a_model_above_one_gpu_is_to_be_split(tmp_path_factory, capsys):
    model = config_folder(tmp_path_factory, "70b", hidden_size=8192, intermediate_size=28672, num_hidden_layers=80)
    arguments = ["+experiment=math_qwen3_8b", f"model.path={model}", "cluster.device_type=h100"]
    status, plan = plan_json(capsys, *arguments)
    advice = {process["role"]: process["advice"] for process in plan["processes"]}
    assert status == 1 and advice["rollout"] == ["rollout.engine=vllm", "rollout.tensor_parallel=2"]
    assert advice["reference"] == ["cluster.reference_ranks=4"]
    status, plan = plan_json(capsys, *arguments, *(setting for settings in advice.values() for setting in settings))
    assert status == 0 and plan["fits"]


@pytest.mark.slow
def test_the_largest_row_fits_and_a_tenth_more_does_not():
    config = with_settings(load_config(["objective=no_kl", "cluster.learner_ranks=1", "rollout.group_size=512"]))
    model = ModelOutline.of(config)
    room = replace(DEVICES["l4"], memory_bytes=8 * 2**30)  # of more the longest row that is tried takes a part
    fewer = with_settings(config, data__prompts_per_step=512)
    tokens = largest_row(fewer, model, room)
    assert (
        plan_role(with_settings(fewer, learner__max_tokens_per_micro_batch=tokens), model, "learner").sum_bytes
        <= room.usable_bytes
    )
    more = with_settings(fewer, learner__max_tokens_per_micro_batch=int(1.1 * tokens))
    assert plan_role(more, model, "learner").sum_bytes > room.usable_bytes


def test_the_longest_row_is_no_shorter_than_a_prompt_and_its_response(monkeypatch):
    monkeypatch.setattr(limits, "MOST_ROW_TOKENS", 64)  # as sequences of 300,000 tokens are above it
    config = load_config(["objective=no_kl", "data.max_prompt_tokens=40", "rollout.max_new_tokens=50"])
    assert largest_row(config, ModelOutline.of(config), DEVICES["h200"]) == 90


def little_memory(monkeypatch):
    """A machine on which nothing fits."""
    room = replace(processes.host(), memory_bytes=1_000_000)
    for module in (processes, run_plan, advice):
        monkeypatch.setattr(module, "host", lambda: room)


def test_where_adapters_are_not_allowed_they_are_no_advice_and_the_plan_is_told(capsys, monkeypatch):
    little_memory(monkeypatch)
    beside = ["reference.placement=learner", f"reference.path={load_config([]).model.path}"]
    status, plan = plan_json(capsys, "objective=default", *beside)
    learner = next(process for process in plan["processes"] if process["role"] == "learner")
    assert status == 1 and not learner["fits"] and learner["advice"] == []


def test_a_model_that_names_its_sizes_otherwise_is_planned_with_its_own(tmp_path, capsys, monkeypatch):
    opt = OPTConfig(hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=100)
    assert ModelOutline(architecture=opt, valid_vocab=100).widths == (64, 64, 64, 96)
    gpt2 = GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=100, architectures=["GPT2LMHeadModel"])
    gpt2.save_pretrained(tmp_path)
    status, plan = plan_json(capsys, "objective=no_kl", f"model.path={tmp_path}")
    assert status == 0 and "rows of a step" in lines(plan["processes"][0])
    little_memory(monkeypatch)
    status, plan = plan_json(capsys, "objective=no_kl", f"model.path={tmp_path}")  # no layer of it can have adapters
    assert status == 1 and plan["processes"][1]["advice"] == []


@pytest.mark.parametrize(
    ("settings", "samples"),
    [
        (["rollout.schedule=token_budget"], 128),
        (["rollout.schedule=full_group"], 128),
        (["rollout.schedule=dynamic_slot"], 1024),  # the first to finish are kept, on one worker
    ],
)
def test_a_group_is_dealt_to_all_workers(settings, samples):
    device = replace(DEVICES["l4"], memory_bytes=2**30, multiprocessors=0)
    sizes = ["data.prompts_per_step=1", "rollout.max_new_tokens=16", "rollout.kv_budget_tokens=4096"]
    config = load_config([*sizes, *settings, "rollout.group_size=1024", "cluster.rollout_workers=8"])
    dealt, alone = (
        decode_time(each, ModelOutline.of(each), device, None)
        for each in (config, with_settings(config, cluster__rollout_workers=1, rollout__group_size=samples))
    )
    assert dealt.samples == samples and dealt == alone


def test_the_steps_of_a_colocated_engine_are_those_of_its_pool_in_the_table(monkeypatch):
    config = load_config(["objective=no_kl", *COLOCATED, "rollout.kv_budget_bytes=auto", "cluster.device_type=l4"])
    model = ModelOutline.of(config)
    rank = sum(learner_lines(config, model)[0].values())
    small = replace(DEVICES["l4"], memory_bytes=rank + CUDA_RESERVE + 3_000_000)
    monkeypatch.setattr(processes, "gpu_of", lambda config: small)
    plan, size = plan_run(config), pool_page_bytes(config, model)
    pages = sum(bytes_ for name, bytes_ in plan.roles[0].process.lines.items() if "KV pool" in name) // size - 1
    tokens = pages * config.rollout.page_size
    given = with_settings(config, rollout__kv_budget_bytes=None, rollout__kv_budget_tokens=tokens)
    assert plan.decode == decode_time(given, model, small, None) != decode_time(config, model, small, None)
    assert f"up to {gigabytes(4 * pages * size)} of preempted KV" in plan.roles[0].limits[1]


def test_recorded_lengths_give_the_running_steps(tmp_path, capsys):
    recorded = "tests/data/lengths/llama3b_rgrl_step400_amc23_n50.jsonl"
    _, longest = plan_json(capsys, "rollout.slots=4")
    _, plan = plan_json(capsys, "rollout.slots=4", f"lengths={recorded}")
    assert plan["decode"]["lengths"] == "llama3b_rgrl_step400_amc23_n50.jsonl"
    assert 0 < plan["decode"]["running_steps"] < longest["decode"]["running_steps"]
    shutil.copy(recorded, tmp_path / "lengths.jsonl")
    _, again = plan_json(capsys, "rollout.slots=4", f"lengths={tmp_path}")  # a run folder
    assert again["decode"]["running_steps"] == plan["decode"]["running_steps"]


def test_recorded_tokens_give_the_steps_with_drafts():
    recorded = Path("tests/data/tokens/kk_tiny_trained_T1.0_n32.jsonl.gz")
    settings = ["rollout.kv_budget_tokens=1280", "data.prompts_per_step=4", "cluster.rollout_workers=1"]
    device = replace(DEVICES["l4"], memory_bytes=16 * 2**30, multiprocessors=0)

    def decode(*more, lengths=recorded):
        config = load_config([*settings, "rollout.group_size=16", *more])
        return decode_time(config, ModelOutline.of(config), device, lengths)

    none, seven, auto = (decode(f"rollout.speculate={drafts}") for drafts in ("0", "7", "auto"))
    assert (none.drafts, seven.drafts) == (0, 7) and auto.drafts > 0
    assert none.tokens_per_row_step == 1 and seven.tokens_per_row_step > 2
    assert seven.running_steps < 0.5 * none.running_steps
    assert auto.seconds <= min(none.seconds, seven.seconds)
    # without texts, or samples enough of a prompt, it is not known what drafts would come to
    assert decode(lengths=None).drafts is None and decode("rollout.group_size=33").drafts is None
    assert decode("rollout.kv_dtype=int8", "objective.importance=token_tis").drafts == 0


def test_recorded_tokens_are_planned_without_drafts_where_there_is_no_compiler(monkeypatch, capsys):
    def without_compiler():
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(cpu_kernels, "_compile_command", without_compiler)
    settings = ["rollout.group_size=16", "rollout.kv_budget_tokens=1280", "data.prompts_per_step=4"]
    settings += ["lengths=tests/data/tokens/kk_tiny_trained_T1.0_n32.jsonl.gz"]
    status, plan = plan_json(capsys, *settings)
    assert status == 0 and plan["decode"]["drafts"] == 0
    assert main([*settings, "rollout.speculate=3"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "rollout.speculate=3 needs a C++ compiler" in said
    assert said.endswith("or take rollout.speculate=0\n")


@pytest.mark.parametrize(
    ("evaluations", "samples"),
    [
        (["run.eval_prompts=0"], 0),
        (["run.eval_prompts=3", "run.eval_every=0"], 2 * 3),
        (["run.eval_prompts=3", "run.eval_every=1"], 4 * 3),
    ],
)
def test_texts_of_evaluations_are_planned_too(evaluations, samples):
    settings = ["run.steps=2", "data.prompts_per_step=2", "rollout.group_size=2"]
    config = load_config([*settings, *evaluations])
    planned = plan_role(config, ModelOutline.of(config), "rollout").lines["drafted texts"]
    reach = config.data.max_prompt_tokens + config.rollout.max_new_tokens
    assert planned == 2 * BYTES_PER_TOKEN * (8 + samples) * reach


def test_processes_that_fit_alone_and_not_together_are_said_not_to(capsys):
    """30 pools of 2 GB in some tens of GB."""
    settings = [
        f"cluster.rollout_workers={100 * int(free_bytes(torch.device('cpu')) / 1e11 + 1)}",
        "rollout.kv_budget_bytes=2GB",
    ]
    assert main(settings) == 1
    printed = capsys.readouterr().out
    assert printed.count("DOES NOT FIT") == 1 and "free here: DOES NOT FIT" in printed
    assert "change first for the processes together: fewer or smaller of the" in printed
    status, plan = plan_json(capsys, *settings)
    assert (
        status == 1 and plan["host_bytes"] > plan["host_room"] and all(process["fits"] for process in plan["processes"])
    )


@pytest.mark.parametrize("num_gpus", [1, 0])
def test_what_lies_in_host_memory_beside_a_gpu_is_compared_where_that_is_known(num_gpus, capsys, monkeypatch):
    monkeypatch.setattr(processes, "gpu_of", lambda config: DEVICES["l4"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    room = replace(processes.host(), memory_bytes=2_000_000)  # less than the optimizer's state
    for module in (processes, run_plan, advice):
        monkeypatch.setattr(module, "host", lambda: room)
    settings = ["objective=no_kl", *COLOCATED]
    config, offload = load_config(settings), "learner.offload_optimizer=true"
    assert advice._fits(config, ModelOutline.of(config), "learner", {"learner__offload_optimizer": True}) == (
        not num_gpus
    )
    plan = plan_run(load_config([*settings, offload]))
    in_host = sum(plan.roles[0].process.host_lines.values())
    assert plan.roles[0].fits and in_host > room.memory_bytes
    assert (plan.host_bytes, plan.unchecked_bytes) == ((in_host, 0) if num_gpus else (0, in_host))
    assert main([*settings, offload]) == num_gpus
    said = " ".join(capsys.readouterr().out.split())
    assert ("free here: DOES NOT FIT" in said and "fewer or smaller of the 1 x colocated" in said) == bool(num_gpus)
    assert ("not compared with any: that of their machines is not known here" in said) == (not num_gpus)


@pytest.mark.parametrize(
    ("settings", "place"),
    [
        ([], "on the disk of the temporary folder"),
        (["rollout.preemption=/var/tmp"], "on the disk, in /var/tmp"),
        (["cluster.rollout_gpus=1", "cluster.device_type=h100"], "in host memory"),
        (["rollout.preemption=recompute"], None),
        (["rollout.schedule=arrival"], None),
    ],
)
def test_where_the_kv_of_preempted_samples_goes_and_how_much_of_it(settings, place, capsys):
    status, plan = plan_json(capsys, "rollout.kv_budget_tokens=16000", *settings)
    assert status in (0, 1)
    worker = plan["processes"][0]
    pool = sum(line["bytes"] for line in worker["lines"] if line["name"].startswith("KV pool"))
    assert main(["rollout.kv_budget_tokens=16000", *settings]) == status
    text = " ".join(capsys.readouterr().out.split())
    size = 4 * pool * 1000 / 1001  # without the scratch page
    assert ("of preempted KV" in text) == (place is not None)
    assert place is None or f"of each up to {gigabytes(size)} of preempted KV {place}" in text


def test_vllm_has_its_own_lines_and_each_process_of_a_split_model_its_share(capsys):
    settings = ["rollout.engine=vllm", "rollout.kv_budget_tokens=4096"]
    whole, split = (
        lines(plan_json(capsys, *settings, f"rollout.tensor_parallel={count}")[1]["processes"][0]) for count in (1, 2)
    )
    assert {"weights", "vLLM's step", "KV pool: responses"} <= whole.keys()
    for name in ("weights", "KV pool: responses", "KV pool: prompts"):
        assert split[name] == pytest.approx(whole[name] / 2, abs=4096)
    assert main(settings) == 0
    assert "of preempted KV" not in capsys.readouterr().out


def test_of_engine_and_learner_that_take_turns_each_has_what_the_other_leaves_at_rest(capsys, monkeypatch):
    there = processes.host()  # else what is free changes from one plan to the other
    monkeypatch.setattr(processes, "host", lambda: there)
    settings = ["rollout.engine=vllm", "rollout.kv_budget_tokens=4096", "learner.optimizer=adamw"]
    apart, turns = (plan_json(capsys, *settings, f"cluster.colocate={each}")[1] for each in ("false", "true"))
    sums = [[process["sum_bytes"] for process in plan["processes"]] for plan in (apart, turns)]
    assert sums[0] == sums[1] and apart["host_bytes"] == 2 * sum(sums[0])
    learner = next(process for process in turns["processes"] if process["role"] == "learner")
    resting = 2 * sum(lines(learner)[name] for name in ("float32 shards", "optimizer's moments"))
    assert turns["host_bytes"] == max(2 * sums[0][1], 2 * sums[0][0] + resting) < apart["host_bytes"]
    room = [plan["processes"][0]["usable_bytes"] for plan in (apart, turns)]
    assert room[0] - room[1] == pytest.approx(resting / 2, rel=0.2)


@pytest.mark.slow
def test_the_steps_of_very_many_samples_are_those_of_some_multiplied_and_the_line_says_so(capsys):
    """0.2 % less than all 8,192 simulated, which takes a hundred times as long."""
    settings = ["rollout.slots=4", "rollout.group_size=8192", "data.prompts_per_step=1", "rollout.max_new_tokens=512"]
    settings += ["cluster.rollout_workers=1"]
    assert main(settings) == 0
    assert "(every response as long as it may be; from 2,048 of 8,192 samples; drafted" in capsys.readouterr().out
    assert plan_json(capsys, *settings)[1]["decode"]["running_steps"] == pytest.approx(566_845, rel=0.02)
    status, plan = plan_json(capsys, "rollout.slots=4", "rollout.group_size=1000000000000")
    assert status == 0 and plan["decode"]["samples"] == 2 * 10**12


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cluster.device_type=h10"], "cluster.device_type must be one of a100-40gb"),
        (["model.path=/nowhere/model"], "model.path=/nowhere/model: no model config"),
        (["rollout.group_sizes=3"], "did you mean rollout.group_size?"),
        (["--json"], "flags are --config-dir"),
        (["num_generations=8"], "TRL's num_generations is rollout.group_size here"),
        (["--actor_rollout_ref.rollout.n=8"], "verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        (["lengths=/nowhere/lengths.jsonl"], "/nowhere/lengths.jsonl"),
        (["lengths="], "lengths is empty"),
        (["rollout.kv_budget_bytes=1KB"], "the smallest that would do is rollout.kv_budget_tokens="),
    ],
)
def test_a_wrong_input_is_one_line_and_exit_2(arguments, message, capsys):
    assert main(arguments) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_without_a_gpu_a_run_on_gpus_asks_for_the_device(qwen3_8b, capsys, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["+experiment=math_qwen3_8b", f"model.path={qwen3_8b}"]) == 2
    assert "cluster.device_type must be set where no GPU is found" in capsys.readouterr().err

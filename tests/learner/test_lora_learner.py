"""Adapters trained by the learner: the gradient, ten updates, what is published and what is saved equal peft's plain
training."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from peft import PeftModel

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.model.lora import ReceivedAdapters, add_adapters
from infsample_rl.model.weight_sync.sync import load_published
from infsample_rl.types import LossTotals
from tests.learner_ranks import Scenario, run_ranks
from tests.tiny_models import assert_tensors_close

pytestmark = pytest.mark.slow  # real processes for minutes; test_learner_ranks.py has every backend in `make test`

OBJECTIVE = ObjectiveConfig(kl_coef=0.1)
LEARNER = LearnerConfig(
    **{"lr": 1e-2, "warmup_steps": 2, "lr_schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.5},
    **{"max_tokens_per_micro_batch": 256, "logprob_chunk_tokens": 7, "lora_rank": 4, "lora_alpha": 8.0},
)

PROVISIONAL = LossTotals(num_sequences=40, num_tokens=999, length_normalizer=16)
TWO_RANKS = {"fsdp": {}, "fsdp last_row": {"grad_sync": "last_row"}}
if importlib.util.find_spec("deepspeed") is not None:
    TWO_RANKS |= {f"deepspeed {stage}": {"backend": "deepspeed", "zero_stage": stage} for stage in (1, 2, 3)}


@pytest.fixture(scope="module")
def plain(tools, tied_policy):
    lm = tools.load_plain(tied_policy)
    adapted = add_adapters(lm, LEARNER, seed=0, path=tied_policy)
    history, adapters = tools.plain_updates(tied_policy, OBJECTIVE, LEARNER, lm=lm)
    after = tools.make_samples(lm, seed=9)
    merged = {name: parameter.detach() for name, parameter in adapted.merge_and_unload().named_parameters()}
    return history, adapters, merged, after


def updates(tools, history, deals, *, lockstep=True):
    """The calls of all updates, their rows dealt to ranks as `deals` says."""
    calls = []
    for (samples, _, _), counts in zip(history, deals, strict=True):
        calls += [
            *tools.waves(tools.deal(samples, counts), PROVISIONAL, lockstep=lockstep),
            ("step", (tools.totals_of(samples),)),
        ]
    return calls


@pytest.fixture(scope="module")
def two_ranks(tools, plain, tied_policy, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora_ranks")
    scenarios = {}
    for name, settings in TWO_RANKS.items():
        config = tools.make_config(tied_policy, learner=replace(LEARNER, **settings), objective=OBJECTIVE, ranks=2)
        calls = updates(tools, plain[0], tools.DEALS, lockstep=name != "fsdp last_row")
        scenarios[name] = Scenario(
            config, [*calls, ("parameters", ()), ("export_weights", (3,)), ("save", (str(folder / name),))]
        )
    samples, totals = plain[-1], tools.totals_of(plain[-1])
    config = tools.make_config(tied_policy, learner=LEARNER, objective=OBJECTIVE, ranks=2)
    calls = [*tools.waves([[samples], []], totals), ("step", (totals,)), ("parameters", ())]
    scenarios["resumed"] = Scenario(config, calls, checkpoint=str(folder / "fsdp"))
    bf16 = tools.make_samples(tools.load_plain(tied_policy, torch.bfloat16))
    checkpointed = replace(LEARNER, activation_checkpointing=2)
    config = tools.make_config(tied_policy, learner=checkpointed, objective=OBJECTIVE, dtype="bfloat16", ranks=2)
    calls = [*tools.waves(tools.deal(bf16, (2, 1)), tools.totals_of(bf16)), ("step", (tools.totals_of(bf16),))]
    scenarios["bf16"] = Scenario(config, [("parameters", ()), *calls, ("parameters", ()), ("export_weights", (1,))])
    return run_ranks(folder, scenarios, 2), folder


def exported(tools, path, published, dtype=torch.float32):
    """A plain model after it has loaded what was exported."""
    lm = tools.load_plain(path, dtype)
    load_published(dict(lm.named_parameters()), *published)
    return dict(lm.named_parameters())


@pytest.mark.parametrize("every", [0, 1])
def test_ten_updates_at_one_rank_equal_pefts_merged_model(tools, plain, tied_policy, every):
    history, adapters, merged, _ = plain
    learner = replace(LEARNER, activation_checkpointing=every)
    config = tools.make_config(tied_policy, learner=learner, objective=OBJECTIVE)
    results = tools.run_here(
        config, [*updates(tools, history, [(2,)] * 10), ("parameters", ()), ("export_weights", (3,))]
    )
    check_updates(tools, results, history, adapters, merged, tied_policy)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_ten_updates_on_two_ranks_equal_pefts_merged_model(tools, plain, two_ranks, tied_policy, name):
    history, adapters, merged, _ = plain
    for rank in two_ranks[0]:
        steps = [result for result in rank[name] if isinstance(result, dict) and "learner/loss" in result]
        assert len(steps) == 10
    check_updates(tools, two_ranks[0][0][name][:-1], history, adapters, merged, tied_policy)


def check_updates(tools, results, history, adapters, merged, path):
    *_, parameters, published = results
    steps = [result for result in results if isinstance(result, dict) and "learner/loss" in result]
    assert [step["learner/loss"] for step in steps] == pytest.approx(
        [loss for _, loss, _ in history], rel=1e-4, abs=1e-6
    )
    assert [step["learner/grad_norm"] for step in steps] == pytest.approx([norm for _, _, norm in history], rel=1e-4)
    assert_tensors_close(parameters, adapters, rtol=1e-4, atol=2e-5)
    assert_tensors_close(exported(tools, path, published), merged, rtol=0, atol=1e-5)


def test_bf16_trains_float32_masters_of_the_adapters_beside_16_bit_weights(tools, two_ranks, tied_policy):
    before, *_, step, after, published = two_ranks[0][0]["bf16"]
    assert {value.dtype for value in after.values()} == {torch.float32} and len(after) == 28
    assert step["learner/skipped_updates"] == 0 and 0 < step["learner/logprob_diff_mean"] < 0.05
    assert all(not torch.equal(before[name], after[name]) for name in after if "lora_B" in name)
    base = dict(tools.load_plain(tied_policy, torch.bfloat16).named_parameters())
    names = [
        name
        for name, value in exported(tools, tied_policy, published, torch.bfloat16).items()
        if not torch.equal(value, base[name])
    ]
    assert names and all("_proj" in name for name in names)


def test_an_engine_that_merges_adapters_itself_has_bitwise_what_it_would_be_sent_merged(
    tools, plain, tied_policy, tmp_path
):
    for dtype in ("float32", "bfloat16"):
        samples = tools.make_samples(tools.load_plain(tied_policy, getattr(torch, dtype)))
        totals = tools.totals_of(samples)
        calls = [("accumulate", (samples, totals)), ("step", (totals,)), ("export_weights", (3,))]
        settings = {"merged": LEARNER, "adapters": replace(LEARNER, lora_publish="adapters")}
        sent = {
            name: tools.run_here(
                tools.make_config(tied_policy, learner=learner, objective=OBJECTIVE, dtype=dtype), calls
            )[-1]
            for name, learner in settings.items()
        }
        assert {entry[0].rpartition(".lora_")[2] for entry in sent["adapters"][0].entries} == {"A.weight", "B.weight"}
        assert sent["adapters"][0].num_bytes < 0.6 * sent["merged"][0].num_bytes
        engine = tools.load_plain(tied_policy, getattr(torch, dtype))
        received = ReceivedAdapters(engine, LEARNER)
        load_published(received.received, *sent["adapters"])
        received.merge()
        for name, value in exported(tools, tied_policy, sent["merged"], getattr(torch, dtype)).items():
            assert torch.equal(value, engine.get_parameter(name)), name


def test_a_checkpoint_is_a_peft_folder_and_goes_on_at_one_rank_and_at_two(tools, two_ranks, plain, tied_policy):
    results, folder = two_ranks
    checkpoint = folder / "fsdp"
    assert {path.name for path in checkpoint.iterdir()} >= {
        "adapter_config.json",
        "adapter_model.safetensors",
        "tokenizer.json",
        "training_state",
    }
    assert not (checkpoint / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(tools.load_plain(tied_policy), checkpoint)
    saved = results[0]["fsdp"][-3]
    for name, parameter in loaded.get_base_model().named_parameters():
        assert "lora_" not in name or torch.equal(parameter, saved[name]), name
    samples, totals = plain[-1], tools.totals_of(plain[-1])
    calls = [("parameters", ()), ("accumulate", (samples, totals)), ("step", (totals,)), ("parameters", ())]
    config = tools.make_config(tied_policy, learner=LEARNER, objective=OBJECTIVE)
    first, _, _, resumed = tools.run_here(config, calls, checkpoint=str(checkpoint))
    for name, value in saved.items():
        assert torch.equal(value, first[name]), name
    assert_tensors_close(results[0]["resumed"][-1], resumed, rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_other_adapters_or_of_whole_weights_is_refused(tools, two_ranks, tied_policy, tmp_path):
    checkpoint = str(two_ranks[1] / "fsdp")
    for learner in (replace(LEARNER, lora_rank=2), replace(LEARNER, lora_rank=0)):
        with pytest.raises((ValueError, RuntimeError)) as refusal:
            tools.run_here(tools.make_config(tied_policy, learner=learner), [], checkpoint=checkpoint)
        assert isinstance(refusal.value, ValueError) and "\n" not in str(refusal.value)
    whole = str(tmp_path / "whole")
    tools.run_here(tools.make_config(tied_policy, learner=replace(LEARNER, lora_rank=0)), [("save", (whole,))])
    with pytest.raises(ValueError, match="or of other LoRA settings: .*lora_A.* it has none"):
        tools.run_here(tools.make_config(tied_policy, learner=LEARNER), [], checkpoint=whole)

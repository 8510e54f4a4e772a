"""ZeRO 1, 2 and 3 on two ranks do what one plain process does: skipped updates, rows remembered, bfloat16, checkpoints.

Ten updates of plain AdamW, with tied and untied embeddings, are in test_learner_ranks.py; adapters in
test_lora_learner.py; a killed rank in test_fsdp.py.
"""

import shutil
from dataclasses import replace
from unittest import mock

import pytest
import torch

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.checkpoint import SavedState
from infsample_rl.learner.cpu_adam import compile_cpu_adam
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.types import LossTotals
from tests.learner_ranks import Scenario, run_ranks
from tests.tiny_models import reference_tokens

pytestmark = pytest.mark.slow  # real processes for minutes; test_learner_ranks.py has every backend in `make test`

pytest.importorskip("deepspeed")

STAGES = (1, 2, 3)
LEARNER = LearnerConfig(
    **{
        "lr": 2e-3,
        "warmup_steps": 2,
        "lr_schedule": "linear",
        "weight_decay": 0.1,
        "max_grad_norm": 0.5,
        "on_nonfinite": "skip",
    },
    **{"max_tokens_per_micro_batch": 256, "logprob_chunk_tokens": 7},
)
# The samples' engine log-probabilities are the first policy's in float32: later ones differ from them.
OBJECTIVE = ObjectiveConfig(kl_coef=0.1, mismatch_stop=100.0, mismatch_stop_float32=100.0)
PROVISIONAL = LossTotals(num_sequences=40, num_tokens=999, length_normalizer=16)
NOTHING = LossTotals(num_sequences=0, num_tokens=0, length_normalizer=16)


@pytest.fixture(scope="module")
def odd_policy(tools, tmp_path_factory):
    """Folder of a policy whose tensors do not halve: shards of two ranks need padding."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("odd")
    tools.save_tiny_policy(folder, tied=False)
    torch.manual_seed(4)
    config = Qwen3Config(
        **{
            "vocab_size": 61,
            "hidden_size": 33,
            "intermediate_size": 47,
            "num_hidden_layers": 2,
            "num_attention_heads": 3,
        },
        **{"num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "tie_word_embeddings": False},
        **{"initializer_range": 0.15, "eos_token_id": 1},
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return str(folder)


def on_two(tools, samples, counts, totals, provisional=PROVISIONAL):
    """Calls of one update on two ranks, counts[rank] rows on each, and the calls of one rank with the same rows."""
    rows = tools.deal(samples, counts)
    waves = tools.waves(rows, provisional) + [("step", (totals,))]
    return waves, [("accumulate", (part, provisional)) for rank in rows for part in rank] + [("step", (totals,))]


def with_advantage(samples, advantage):
    """The samples, the last one's advantage replaced."""
    return [*samples[:-1], replace(samples[-1], advantages=(advantage,))]


def with_infinite_gradient(samples):
    """The samples and provisional totals with which the loss is finite and its gradient is not: 3.2e38 / TEMPERATURE is
    beyond float32."""
    last = samples[-1]
    arrays = {name: getattr(last, name)[:1] for name in ("response_ids", "engine_logprobs")}
    arrays["reference"] = reference_tokens(last.reference.logprobs[:1])
    return [*samples[:-1], replace(last, advantages=(3.2e38,), **arrays)], LossTotals(
        num_sequences=1, num_tokens=1, length_normalizer=16
    )


def eventful_run(tools, path, count=7):
    """Calls of two ranks and of one, the first `count` updates of seven.

    Sane ones, but for one without a valid group, one with a NaN loss and one with an infinite gradient: the second,
    fourth and sixth.
    """
    lm = tools.load_plain(path)
    batches = [tools.make_samples(lm, seed=seed) for seed in range(6)]
    totals = [tools.totals_of(samples) for samples in batches]
    infinite, provisional = with_infinite_gradient(batches[4])
    parts = [
        on_two(tools, batches[0], (3, 1), totals[0]),
        on_two(tools, batches[1], (1, 2), NOTHING),
        on_two(tools, batches[2], (1, 0), totals[2]),
        on_two(tools, with_advantage(batches[3], float("nan")), (1, 1), totals[3]),
        on_two(tools, batches[3], (0, 1), totals[3]),
        on_two(tools, infinite, (2, 1), totals[4], provisional),
        on_two(tools, batches[5], (2, 2), totals[5]),
    ]
    return [call for two, _ in parts[:count] for call in two], [call for _, one in parts[:count] for call in one]


def remembering_update(tools, path):
    """(calls of two ranks, of one): an update whose old log-probabilities were computed beforehand, without
    gradients."""
    samples = tools.make_samples(tools.load_plain(path), seed=7)
    totals, rows = tools.totals_of(samples), tools.deal(samples, (2, 1))
    waves = [[(rows[0][0], 0), (rows[1][0], 1)], [(rows[0][1], 2), (None, 3)]]
    two = [("remember", wave) for wave in waves]
    two += [("accumulate", [(part, PROVISIONAL, row_id) for part, row_id in wave]) for wave in waves] + [
        ("step", (totals,))
    ]
    given = [call for wave in waves for call in wave if call[0]]
    one = (
        [("remember", call) for call in given]
        + [("accumulate", (part, PROVISIONAL, row_id)) for part, row_id in given]
        + [("step", (totals,))]
    )
    return two, one


END = [("parameters", ()), ("full_parameters", ())]


@pytest.fixture(scope="module")
def runs(tools, odd_policy, tied_policy, tmp_path_factory):
    """Results of rank 0 and 1 by scenario, and the same calls in this process without DeepSpeed by their name; and the
    checkpoints' folder."""
    folder = tmp_path_factory.mktemp("deepspeed")

    def config(path, *, stage=None, dtype="float32", offload=False):
        learner = (
            LEARNER
            if stage is None
            else replace(LEARNER, backend="deepspeed", zero_stage=stage, offload_optimizer=offload)
        )
        return tools.make_config(path, learner=learner, objective=OBJECTIVE, dtype=dtype, ranks=2)

    two, one = eventful_run(tools, odd_policy)
    remembered_two, remembered_one = remembering_update(tools, tied_policy)
    batches = [tools.make_samples(tools.load_plain(tied_policy), seed=seed) for seed in range(20, 24)]
    first, second, third, fourth = (on_two(tools, samples, (2, 1), tools.totals_of(samples)) for samples in batches)
    without_rows = [("step", (tools.totals_of(batches[0]),))]  # as where all groups have equal rewards
    rowless = [without_rows + third[way] + without_rows + fourth[way] + END for way in (0, 1)]
    here = {
        "rowless": tools.run_here(config(tied_policy), rowless[1]),
        "eventful": tools.run_here(config(odd_policy), one + END),
        "bf16": run_with_rounded_head(
            tools, config(tied_policy, dtype="bfloat16"), first[1] + second[1] + remembered_one + END
        ),
    }
    start = str(folder / "fsdp")
    ranks = {
        "fsdp": Scenario(config(tied_policy), [*first[0], *second[0], ("save", (start,)), *third[0], *fourth[0], *END]),
    }
    for stage in STAGES:
        ranks[f"eventful {stage}"] = Scenario(config(odd_policy, stage=stage), two + END)
        ranks[f"bf16 {stage}"] = Scenario(
            config(tied_policy, stage=stage, dtype="bfloat16"), first[0] + second[0] + remembered_two + END
        )
        for offload in (False, True):
            ranks[f"rowless {stage} {offload}"] = Scenario(
                config(tied_policy, stage=stage, offload=offload), rowless[0]
            )
        calls = [*third[0], ("save", (str(folder / str(stage)),)), *END]
        ranks[f"resumed {stage}"] = Scenario(config(tied_policy, stage=stage), calls, checkpoint=start)
    results = run_ranks(folder, ranks, 2)
    for stage in STAGES:
        here[f"resumed {stage}"] = tools.run_here(
            config(tied_policy), fourth[1] + END, checkpoint=str(folder / str(stage))
        )
    return results, here, folder


def run_with_rounded_head(tools, config, calls):
    """One rank without DeepSpeed whose head's gradient goes through autograd, in the model's dtype, as DeepSpeed's
    does."""
    with mock.patch.object(PackedPolicy, "head_gradient", property(lambda _: None, lambda *_: None), create=True):
        return tools.run_here(config, calls)


def updates(results):
    """What each step() returned."""
    return [result for result in results if isinstance(result, dict) and "learner/loss" in result]


def assert_same_run(found, expected, *, published_exactly=False):
    """Losses, norms, skipped updates and learning rates of every update, and the parameters after the last."""
    assert len(updates(found)) == len(updates(expected))
    for update, (metrics, plain) in enumerate(zip(updates(found), updates(expected), strict=True)):
        for name in ("learner/loss", "learner/grad_norm", "learner/lr", "learner/skipped_updates"):
            same = None if plain[name] is None else pytest.approx(plain[name], rel=2e-5, nan_ok=True)
            assert metrics[name] == same, (update, name)
    for tensors, plain in ((found[-2], expected[-2]), (found[-1], expected[-1])):
        assert tensors.keys() == plain.keys()
        for name, tensor in tensors.items():
            assert tensor.dtype == plain[name].dtype
            # a rounding to the other side
            tolerance = {"rtol": 1e-4, "atol": 2e-6} if tensor.dtype == torch.float32 else {"rtol": 0.01, "atol": 0.0}
            torch.testing.assert_close(tensor, plain[name], **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("stage", STAGES)
def test_skipped_updates_leave_nothing_behind(runs, stage):
    results, here, _ = runs
    found = results[0][f"eventful {stage}"]
    assert [update["learner/skipped_updates"] for update in updates(found)] == [0, 1, 0, 1, 0, 1, 0]
    # those that stepped were clipped
    assert all(update["learner/grad_norm"] > LEARNER.max_grad_norm for update in updates(found)[::2])
    assert_same_run(found, here["eventful"])


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_updates_without_rows_have_a_gradient_of_zeros(runs, stage, offload):
    results, here, _ = runs
    found = results[0][f"rowless {stage} {offload}"]
    assert [update["learner/skipped_updates"] for update in updates(found)] == [0, 0, 0, 0]
    assert [update["learner/grad_norm"] > 0 for update in updates(found)] == [False, True, False, True]
    assert_same_run(found, here["rowless"])


@pytest.mark.parametrize("stage", STAGES)
def test_both_ranks_have_the_same_parameters(runs, stage):
    for name in (f"eventful {stage}", f"bf16 {stage}"):
        first, second = (rank[name] for rank in runs[0])
        for kind in (-2, -1):
            assert all(torch.equal(tensor, second[kind][name]) for name, tensor in first[kind].items())


@pytest.mark.parametrize("stage", STAGES)
def test_bfloat16_with_remembered_rows_equals_float32_masters_beside_a_bfloat16_policy(runs, stage):
    results, here, _ = runs
    found = results[0][f"bf16 {stage}"]
    assert {tensor.dtype for tensor in found[-1].values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in found[-2].values()} == {torch.float32}
    assert all(torch.equal(found[-2][name].bfloat16(), tensor) for name, tensor in found[-1].items())
    assert_same_run(found, here["bf16"])


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_goes_from_two_fsdp_ranks_to_deepspeed_and_to_one_rank(runs, stage):
    results, here, folder = runs
    through = updates(results[0]["fsdp"])
    assert updates(results[0][f"resumed {stage}"])[0]["learner/grad_norm"] == pytest.approx(
        through[2]["learner/grad_norm"], rel=1e-5
    )
    saved = SavedState(folder / str(stage))
    assert (saved.num_updates, saved.optimizer_steps) == (3, 3)
    assert saved.read("model.norm.weight", torch.Size([32])).keys() == {"master", "exp_avg", "exp_avg_sq"}
    last = here[f"resumed {stage}"]
    assert updates(last)[0]["learner/lr"] == through[3]["learner/lr"]
    assert updates(last)[0]["learner/grad_norm"] == pytest.approx(through[3]["learner/grad_norm"], rel=1e-5)
    for name, tensor in results[0]["fsdp"][-2].items():
        torch.testing.assert_close(
            last[-2][name], tensor, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiles DeepSpeed's CPU Adam")
def test_an_optimizer_in_host_memory_does_the_same(tools, tied_policy, tmp_path):
    compile_cpu_adam()  # minutes of g++ the first time, beyond the patience of run_ranks
    # Its arithmetic rounds otherwise than torch's; after two steps some weights are other bfloat16 numbers.
    runs = {dtype: eventful_run(tools, tied_policy, count) for dtype, count in (("float32", 7), ("bfloat16", 3))}
    scenarios, plain = {}, {}
    for dtype, (two, one) in runs.items():
        plain[dtype] = run_with_rounded_head(
            tools, tools.make_config(tied_policy, learner=LEARNER, objective=OBJECTIVE, dtype=dtype), one + END
        )
        for stage in STAGES:
            learner = replace(LEARNER, backend="deepspeed", zero_stage=stage, offload_optimizer=True)
            config = tools.make_config(tied_policy, learner=learner, objective=OBJECTIVE, dtype=dtype)
            scenarios[f"{dtype} {stage}"] = Scenario(config, two + END)
    for name, found in run_ranks(tmp_path, scenarios, 2)[0].items():
        assert_same_run(found, plain[name.split()[0]])

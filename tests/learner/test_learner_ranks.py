"""The gradient and the update do not depend on rows, ranks, waves, sharding or provisional totals."""

from dataclasses import replace
from itertools import groupby

import pytest
import torch

from infsample_rl.config import LearnerConfig, ObjectiveConfig
from infsample_rl.learner.row_plan import split_passes
from infsample_rl.types import LossTotals
from tests.learner_ranks import Scenario, run_ranks
from tests.tiny_models import assert_tensors_close

OBJECTIVE = ObjectiveConfig(kl_coef=0.1)
LEARNER = LearnerConfig(
    **{"lr": 2e-3, "warmup_steps": 2, "lr_schedule": "linear", "weight_decay": 0.1, "max_grad_norm": 0.5},
    **{"max_tokens_per_micro_batch": 256, "logprob_chunk_tokens": 7},
)

PROVISIONAL = LossTotals(num_sequences=40, num_tokens=999, length_normalizer=16)
DEALS = {
    "1 and 0 rows": (1, 0),
    "1 and 1 rows": (1, 1),
    "3 and 1 rows": (3, 1),
    "3 and 0 rows": (3, 0),
    "4 and 4 rows": (4, 4),
}


@pytest.fixture(scope="module")
def paths(tied_policy, untied_policy):
    return {"tied": tied_policy, "untied": untied_policy}


@pytest.fixture(scope="module")
def plain(tools, paths):
    return {name: tools.plain_updates(path, OBJECTIVE, LEARNER) for name, path in paths.items()}


def ten_updates(tools, path, settings, history, folder, deal=None):
    """Ten updates on two ranks, other rows on each, then what they have become."""
    learner = replace(LEARNER, **settings)
    calls = []
    for (samples, _, _), counts in zip(history, tools.DEALS, strict=True):
        calls += tools.waves(
            (deal or tools.deal)(samples, counts), PROVISIONAL, lockstep=learner.grad_sync == "every_row"
        )
        calls.append(("step", (tools.totals_of(samples),)))
    calls += [("save", (str(folder),)), ("parameters", ()), ("export_weights", (3,))]
    return Scenario(tools.make_config(path, learner=learner, objective=OBJECTIVE, ranks=2), calls)


@pytest.fixture(scope="module")
def two_ranks(tools, plain, paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks")
    tied_policy, untied_policy = paths.values()
    samples = plain["tied"][0][0][0]
    config = tools.make_config(tied_policy, learner=LEARNER, objective=OBJECTIVE)
    scenarios = {
        name: Scenario(config, [*tools.waves(tools.deal(samples, counts), tools.totals_of(samples)), ("gradients", ())])
        for name, counts in DEALS.items()
    }
    quick = [backend for backend in tools.BACKENDS if backend not in tools.SLOW_BACKENDS]
    scenarios |= of_backends(tools, quick, plain, paths, folder)
    for name, path in paths.items():
        settings = {
            "grad_sync": "last_row",
            "max_tokens_per_micro_batch": 32,
            "activation_checkpointing": int(name == "untied"),
        }
        scenarios[f"passes, {name}"] = ten_updates(
            tools, path, settings, plain[name][0], folder / "passes" / name, deal_groups
        )
    bf16 = tools.make_samples(tools.load_plain(tied_policy, torch.bfloat16))
    totals = tools.totals_of(bf16)
    calls = [
        *tools.waves(tools.deal(bf16, (2, 1)), totals),
        ("step", (totals,)),
        ("parameters", ()),
        ("export_weights", (1,)),
    ]
    checkpointed = replace(LEARNER, activation_checkpointing=1)
    scenarios["bf16"] = Scenario(
        tools.make_config(tied_policy, learner=checkpointed, objective=OBJECTIVE, dtype="bfloat16"), calls
    )
    for dtype in ("float32", "float16"):
        config, samples, provisional, totals = tools.large_update(untied_policy, dtype, "dr_grpo")
        calls = [*tools.waves(tools.deal(samples, (2, 1)), provisional), ("step", (totals,))]
        scenarios[dtype] = Scenario(config, calls)
    return run_ranks(folder, scenarios, 2), folder


@pytest.fixture(scope="module")
def two_ranks_of_the_others(tools, plain, paths, tmp_path_factory):
    folder = tmp_path_factory.mktemp("two_ranks_of_the_others")
    slow = [backend for backend in tools.BACKENDS if backend in tools.SLOW_BACKENDS]
    return run_ranks(folder, of_backends(tools, slow, plain, paths, folder), 2), folder


@pytest.fixture
def ranks_and_folder(request, tools, backend):
    """What two ranks of this backend gave, and where they saved."""
    return request.getfixturevalue("two_ranks_of_the_others" if backend in tools.SLOW_BACKENDS else "two_ranks")


def of_backends(tools, backends, plain, paths, folder):
    """Ten updates of each policy by each backend; of one the layers are computed again."""
    scenarios = {}
    for backend in backends:
        settings = tools.BACKENDS[backend]
        granularity = "full" if settings.get("zero_stage") == 3 else "selective"
        again = {"activation_checkpointing": 1, "recompute_granularity": granularity}
        for name, path in paths.items():
            recompute = again if name == "untied" else {}
            scenarios[f"{backend}, {name}"] = ten_updates(
                tools, path, settings | recompute, plain[name][0], folder / backend / name
            )
    return scenarios


def deal_groups(samples, counts):
    """A row for each prompt, above 32 tokens all but the first: the groups go round the ranks that are to have rows."""
    groups = by_prompt(samples)
    ranks = [rank for rank, count in enumerate(counts) if count]
    return [
        [group for number, group in enumerate(groups) if ranks[number % len(ranks)] == rank]
        for rank in range(len(counts))
    ]


def by_prompt(samples):
    return [list(group) for _, group in groupby(samples, key=lambda sample: sample.prompt_index)]


@pytest.mark.parametrize("name", ["learner/grad_norm", "learner/loss"])
def test_in_float16_a_large_update_has_the_gradient_and_the_loss_of_float32_on_two_ranks(two_ranks, name):
    for rank in two_ranks[0]:
        assert rank["float16"][-1][name] == pytest.approx(rank["float32"][-1][name], rel=0.02)


@pytest.mark.parametrize("deal", DEALS)
def test_gradient_on_two_ranks_equals_the_plain_one(two_ranks, plain, tools, tied_policy, deal):
    samples = plain["tied"][0][0][0]
    _, expected = tools.plain_gradients(tools.load_plain(tied_policy), samples, OBJECTIVE)
    for rank in two_ranks[0]:
        assert_tensors_close(rank[deal][-1], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 8, "passes"])
@pytest.mark.parametrize("checkpointing", [(0, "full"), (1, "full"), (2, "full"), (1, "selective")])
def test_gradient_on_one_rank_equals_the_plain_one_for_any_number_of_rows_or_passes(
    tools, plain, untied_policy, count, checkpointing
):
    samples = plain["untied"][0][0][0]
    _, expected = tools.plain_gradients(tools.load_plain(untied_policy), samples, OBJECTIVE)
    in_passes, (every, granularity) = count == "passes", checkpointing
    rows = by_prompt(samples) if in_passes else tools.cut(samples, count)
    settings = {"activation_checkpointing": every, "recompute_granularity": granularity}
    learner = replace(LEARNER, max_tokens_per_micro_batch=32 if in_passes else 256, **settings)
    config = tools.make_config(untied_policy, learner=learner, objective=OBJECTIVE)
    calls = [("accumulate", (row, tools.totals_of(samples))) for row in rows]
    *found, gradients = tools.run_here(config, [*calls, ("gradients", ())])
    assert_tensors_close(gradients, expected, rtol=1e-4, atol=1e-6)
    if in_passes:
        assert any(len(split_passes(row, 32)) > 1 for row in rows)
        tokens = [len(row[0].prompt_ids) + sum(len(sample.response_ids) for sample in row) for row in rows]
        assert [row["row_tokens"] for row in found] == tokens  # every prompt once


def same_run(history, expected, results, parameters):
    """Losses, gradient norms and weights of ten updates are those of the plain process."""
    steps = [result for result in results if isinstance(result, dict) and "learner/loss" in result]
    assert [step["learner/loss"] for step in steps] == pytest.approx([loss for _, loss, _ in history], rel=1e-4)
    assert [step["learner/grad_norm"] for step in steps] == pytest.approx([norm for _, _, norm in history], rel=1e-4)
    assert [step["learner/lr"] for step in steps[:3]] == pytest.approx([1e-3, 2e-3, 2e-3])
    assert min(norm for _, _, norm in history) > LEARNER.max_grad_norm  # every update was clipped
    assert_tensors_close(parameters, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_ten_updates_on_one_rank_equal_plain_adamw(tools, plain, paths, name):
    history, expected = plain[name]
    calls = []
    for samples, _, _ in history:
        calls += [("accumulate", (row, PROVISIONAL)) for row in tools.cut(samples, 2)] + [
            ("step", (tools.totals_of(samples),))
        ]
    results = tools.run_here(
        tools.make_config(paths[name], learner=LEARNER, objective=OBJECTIVE), [*calls, ("parameters", ())]
    )
    same_run(history, expected, results, results[-1])


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_ten_updates_on_two_ranks_equal_plain_adamw(ranks_and_folder, plain, backend, name):
    results = ranks_and_folder[0][0][f"{backend}, {name}"]
    same_run(*plain[name], results, results[-2])


def test_both_ranks_report_the_same_metrics_and_only_rank_0_exports(two_ranks, tools):
    first, second = (rank["fsdp, tied"] for rank in two_ranks[0])
    reported = [
        [tools.figures(found) for found in rank if isinstance(found, dict) and "learner/lr" in found]
        for rank in (first, second)
    ]
    assert reported[0] and reported[0] == reported[1]
    manifest, buckets = first[-1]
    assert second[-1] is None
    assert manifest.version == 3
    names = [entry[0] for entry in manifest.entries]
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names and len(names) == len(set(names))
    assert sum(bucket.nbytes for bucket in buckets) == manifest.num_bytes


@pytest.mark.parametrize("name", ["tied", "untied"])
def test_the_saved_folder_loads_with_transformers_and_has_the_trained_weights(tools, ranks_and_folder, backend, name):
    results, folder = ranks_and_folder
    lm = tools.load_plain(str(folder / backend / name))
    trained = results[0][f"{backend}, {name}"][-2]
    assert {key for key, _ in lm.named_parameters()} == trained.keys()
    for key, parameter in lm.named_parameters():
        assert torch.equal(parameter, trained[key]), key


def test_bf16_keeps_float32_masters_and_publishes_bf16(two_ranks):
    *_, step, masters, (manifest, _) = two_ranks[0][0]["bf16"]
    assert {value.dtype for value in masters.values()} == {torch.float32}
    assert {entry[1] for entry in manifest.entries} == {"bfloat16"}
    assert step["learner/skipped_updates"] == 0
    assert 0 < step["learner/logprob_diff_mean"] < 0.05

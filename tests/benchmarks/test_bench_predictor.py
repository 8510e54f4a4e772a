"""`benchmarks.predictor` on a tiny random policy and made recordings: what it reports, and that it reports it right."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks import predictor
from benchmarks.predictor_models import Memory, constant_predictions, hidden_states, steps_of
from infsample_rl.config import ModelConfig
from infsample_rl.model.loading import load_model
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings
from infsample_rl.rollout.simulator import simulate
from tests.tiny_models import save_tiny_bert

KEYS = ["name", "recording", "dataset", "model", "train_prompts", "held_out_prompts", "k", "samples", "uncensored"]
KEYS += ["log_error", "kendall_tau", "seconds_per_prediction", "schedules"]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> Path:
    """10 prompts of 6 samples; the first token says whether a response has about 6 or about 20 tokens; 24 is the
    cap."""
    path = tmp_path_factory.mktemp("recordings") / "made_n6.jsonl"
    lines = []
    for index in range(10):
        noise = random.Random(index)
        kinds = [65 + noise.randrange(2) for _ in range(6)]
        lengths = [min(24, (6 if kind == 65 else 20) + noise.randrange(-2, 8)) for kind in kinds]
        first = [
            [kind] + [noise.randrange(100, 120) for _ in range(min(8, length) - 1)]
            for kind, length in zip(kinds, lengths, strict=True)
        ]
        fields = {
            "dataset": "made",
            "model": "tiny",
            "prompt_id": str(index),
            "prompt": f"{index} + 2 = ?",
            "prompt_tokens": 9,
            "lengths": lengths,
        }
        lines.append(
            fields | {"max_new_tokens": 24, "truncated": [length >= 24 for length in lengths], "first_tokens": first}
        )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def encoder(tiny_qwen3, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    save_tiny_bert(folder, 264, max_position_embeddings=48)
    AutoTokenizer.from_pretrained(tiny_qwen3).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def measured(tiny_qwen3, recordings, encoder, run_benchmark, tmp_path_factory):
    """(records, output folder) of the command."""
    out = tmp_path_factory.mktemp("out")
    sizes = ["ks=[1,4]", "slots=2", "epochs=2", "write_k=4", f"out={out}", "threads=1"]
    arguments = [f"recordings=[{recordings}]", f"policy={tiny_qwen3}", f"encoder={encoder}", *sizes, "json=true"]
    return [json.loads(line) for line in run_benchmark("predictor", *arguments).splitlines()], out


@pytest.mark.slow
def test_every_predictor_and_k_is_one_json_object(measured):
    records, _ = measured
    names = ("none", "bert", "probe", "oracle")
    assert [(record["name"], record["k"]) for record in records] == [(name, k) for name in names for k in (1, 4)]
    for record in records:
        assert list(record) == KEYS and (record["train_prompts"], record["held_out_prompts"]) == (6, 4)
        assert record["log_error"]["low"] <= record["log_error"]["value"] <= record["log_error"]["high"]
        assert (record["seconds_per_prediction"] is not None) == (record["name"] in ("bert", "probe"))
        assert list(record["schedules"]) == ["sjf", "lpt", "infinite", "token_budget"]


@pytest.mark.slow
def test_oracle_has_no_error_and_the_constant_no_order(measured):
    found = {(record["name"], record["k"]): record for record in measured[0]}
    oracle, none = found["oracle", 4], found["none", 4]
    assert oracle["log_error"]["value"] == 0 and oracle["kendall_tau"]["value"] == 1
    assert {each["steps_over_oracle"]["value"] for each in oracle["schedules"].values()} == {1.0}
    assert {each["steps_over_none"]["value"] for each in none["schedules"].values()} == {1.0}
    assert none["kendall_tau"] is None
    # ended within 4 tokens; cut at the cap
    assert found["none", 1]["samples"] == 24 > none["samples"] > none["uncensored"]


@pytest.mark.slow
def test_held_out_predictions_are_written_beside_the_recordings(measured, recordings):
    written = read_recordings(measured[1] / "made_n6_predicted.jsonl.gz")
    assert [item.lengths for item in written] == [item.lengths for item in read_recordings(recordings)]
    predicted = [item for item in written if item.predictions]
    assert len(predicted) == 4 and all(sorted(item.predictions) == ["bert", "probe"] for item in predicted)
    for item in predicted:
        assert all(
            guess == length
            for guess, length in zip(item.predictions["probe"], item.lengths, strict=True)
            if length <= 4
        )


def test_hidden_states_are_those_of_each_response_alone(tiny_qwen3, recordings):
    recording = read_recordings(recordings)[0]
    plain, packed = (load_model(ModelConfig(path=str(tiny_qwen3)), dtype=torch.float32) for _ in range(2))
    ids = AutoTokenizer.from_pretrained(tiny_qwen3)(recording.prompt)["input_ids"]
    with torch.inference_mode():
        alone = [plain.base_model(torch.tensor([ids + first])).last_hidden_state[0] for first in recording.first_tokens]
    found = hidden_states(packed, ids, recording.first_tokens, [1, 4, 8])
    assert found.shape == (6, 3, 64) and found.dtype == torch.float16
    for index, (hidden, first) in enumerate(zip(alone, recording.first_tokens, strict=True)):
        for place, k in enumerate([1, 4, 8]):
            expected = hidden[len(ids) + k - 1] if k <= len(first) else torch.zeros(64)
            assert torch.allclose(found[index, place].float(), expected, atol=4e-3, rtol=2e-3)


def test_first_tokens_beyond_the_tokenizer_are_refused_by_name(tiny_qwen3, recordings, tmp_path):
    lines = [json.loads(line) for line in recordings.read_text().splitlines()]
    lines[3]["first_tokens"][2][0] = 49_000
    path = tmp_path / "other.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = predictor.PredictorOptions(recordings=[str(path)], policy=str(tiny_qwen3), ks=[1, 4], out=str(tmp_path))
    with pytest.raises(
        ValueError,
        match="recording of 3 has token 49000, and the tokenizer has 259: give the tokenizer .*recorded, tiny",
    ):
        predictor.measure(path, options)


def test_baselines_on_lengths_worked_out_by_hand():
    training = [Recording(dataset="d", model="m", prompt_id="0", lengths=[2, 4, 16])]
    held = [Recording(dataset="d", model="m", prompt_id="1", lengths=[3, 4, 9])]
    assert constant_predictions(training, held, [1, 3]).by_k[3][0].tolist()[1:] == pytest.approx([8, 8])  # sqrt(4 x 16)
    assert np.isnan(constant_predictions(training, held, [3]).by_k[3][0][0])


def test_fixed_slots_decode_all_prefixes_first_and_then_go_by_the_predictions():
    memory = Memory(slots=2, page_size=1, cap=8, prompt_tokens=1)
    lengths = [2, 2, 4, 8]
    assert steps_of("lpt", lengths, memory, np.array(lengths, float), None) == 8  # 8 | 4 2 2
    assert steps_of("sjf", lengths, memory, np.array(lengths, float), None) == 10  # 2 4 | 2 8
    # prefixes of 2: two rounds of 2 steps; then 2 and 6 tokens are left, side by side
    assert steps_of("lpt", lengths, memory, np.array([np.nan, np.nan, 4.0, 8.0]), 2) == 4 + 6
    assert steps_of("lpt", lengths, memory, None, None) == 10  # as they come: 2 4 | 2 8


def test_token_budget_computes_nothing_again_as_in_the_engine():
    lengths, sizes = [7, 8, 6, 8, 5], {"page_size": 1, "prompt_tokens": 1}
    steps = {parks: simulate(lengths, "token_budget", slots=2, parks=parks, **sizes) for parks in (True, False)}
    assert steps[False].recomputed_tokens > 0 == steps[True].recomputed_tokens
    found = steps_of("token_budget", lengths, Memory(slots=2, cap=8, **sizes), None, None)
    assert found == steps[True].running_steps < steps[False].running_steps


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "recordings= is missing"),
        (["recordings=[nowhere.jsonl]"], "nowhere.jsonl: there is no such file"),
        (["recordings=[{file}]", "ks=[1,4]"], "write_k=16 is not one of ks=[1, 4], so nothing would be written"),
        (["recordings=[{file}]", "out={file}/there"], "cannot be made"),
        (
            ["recordings=[{file}]", "encoder={narrow}", "ks=[8]", "write_k=8"],
            "narrow: the input takes 6 tokens, but the first 8 tokens",
        ),
        (
            ["recordings=[{twice}]"],
            "twice.jsonl: made|0 is there 2 times; give every prompt of a file one line and a prompt_id of its own",
        ),
        (["recordings=[{file}]", "ks=[16]"], "the longest prefix_tokens that works is 8"),
        (["recordings=[{file}]", "schedules=[best]"], "schedules=[best]: must be one of"),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, message, recordings, encoder, tiny_qwen3, tmp_path, refused):
    twice = tmp_path / "twice.jsonl"
    twice.write_text(recordings.read_text() + recordings.read_text().splitlines()[0] + "\n")
    narrow = shutil.copytree(encoder, tmp_path / "narrow")
    settings = json.loads((narrow / "tokenizer_config.json").read_text())
    (narrow / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": 6}))
    given = [argument.format(file=recordings, narrow=narrow, twice=twice) for argument in arguments]
    assert message in refused(predictor.main, f"out={tmp_path}", f"policy={tiny_qwen3}", *given)

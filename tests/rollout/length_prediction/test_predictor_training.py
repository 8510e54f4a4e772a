"""The bert predictor trained by its command on recordings whose first token says the length, on a tiny random BERT."""

import json
import random

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForSequenceClassification

from infsample_rl.commands import train_predictor
from infsample_rl.commands.train_predictor import train
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TrainOptions, censored_loss, held_out_keys, read_groups
from tests.tiny_models import save_tiny_bert

CAP = 60


@pytest.fixture(scope="module")
def folders(make_tokenizer, tmp_path_factory):
    """(encoder, policy): a tiny random BERT of 24 positions and the tokenizer of a policy, words w0 to w63."""
    encoder, policy = tmp_path_factory.mktemp("encoder"), tmp_path_factory.mktemp("policy")
    save_tiny_bert(encoder, 66, max_position_embeddings=24)
    tokenizer = make_tokenizer(64, pad_token="w63")
    tokenizer.add_special_tokens({"cls_token": "[CLS]", "sep_token": "[SEP]"})
    ends = [(name, tokenizer.convert_tokens_to_ids(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=ends
    )
    tokenizer.save_pretrained(encoder)
    make_tokenizer(64).save_pretrained(policy)
    return str(encoder), str(policy)


def record(index, policy):
    """8 samples; the first token w10 means about 8 tokens, w20 about 40, w30 the cap."""
    noise, lengths, first = random.Random(index), [], []
    for sample in range(8):
        kind = (10, 20, 30)[sample % 3]
        lengths.append({10: 8, 20: 40, 30: CAP}[kind] + (noise.randrange(-2, 3) if kind < 30 else 0))
        first.append([kind] + [noise.randrange(40, 60) for _ in range(3)])
    cut = [length == CAP for length in lengths]
    fields = {
        "dataset": "made",
        "model": policy,
        "prompt_id": str(index),
        "prompt": f"w{index} w1 ",
        "lengths": lengths,
        "max_new_tokens": CAP,
    }
    return fields | {"truncated": cut, "first_tokens": first}


@pytest.fixture(scope="module")
def recordings(folders, tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "made.jsonl"
    path.write_text("".join(json.dumps(record(index, folders[1])) + "\n" for index in range(20)))
    return str(path)


@pytest.fixture(scope="module")
def trained(folders, recordings, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "predictor"
    settings = {"prefix_tokens": [1, 2], "epochs": 10, "lr": 5e-3, "batch": 16, "held_out": 0.25}
    return out, train(TrainOptions(recordings=[recordings], encoder=folders[0], out=str(out), **settings))


def test_training_finds_that_the_first_token_says_the_length(trained):
    _, report = trained
    best = report["epochs"][report["best_epoch"] - 1]
    assert (report["train_prompts"], report["held_out_prompts"]) == (15, 5)
    assert best["log_error"] < 0.25 < 0.7  # one length for all: about 0.8
    assert best["tau"] > 0.7  # lengths of one kind have no order to find


def test_the_best_epoch_is_kept_and_loads_as_any_hugging_face_folder(trained):
    out, report = trained
    losses = [epoch["held_out_loss"] for epoch in report["epochs"]]
    assert report["best_epoch"] == losses.index(min(losses)) + 1
    predictor = BertLengthPredictor.load(str(out))
    model = AutoModelForSequenceClassification.from_pretrained(out)
    batch = predictor.tokenizer(["w3 w1 w10"], return_tensors="pt")
    with torch.inference_mode():
        assert torch.equal(model.eval()(**batch).logits, predictor.model(**batch).logits)
    assert predictor.predict("w3 w1 ", ["w10", "w20"]) == pytest.approx([8, 40], rel=0.3)
    assert predictor.predict("w3 w1 ", ["w30"])[0] > 40


def test_a_prompt_longer_than_the_window_loses_its_start_and_keeps_first_tokens_and_special_tokens(trained):
    predictor = BertLengthPredictor.load(str(trained[0]))
    long = "w5 " * 50
    ids = predictor.encode([long + "w10 w11"])["input_ids"][0].tolist()
    words = predictor.tokenizer.convert_ids_to_tokens(ids)
    assert words == ["[CLS]"] + ["w5"] * 20 + ["w10", "w11", "[SEP]"]
    assert predictor.predict(long, ["w10", "w20"]) == predictor.predict("w7 " + long, ["w10", "w20"])


def test_equal_seeds_give_equal_folders(folders, recordings, tmp_path):
    settings = {"recordings": [recordings], "encoder": folders[0], "prefix_tokens": [2], "epochs": 1, "samples": 2}
    weights = []
    for seed, out in ((0, "a"), (0, "b"), (1, "c")):
        train(TrainOptions(out=str(tmp_path / out), seed=seed, **settings))
        weights.append(AutoModelForSequenceClassification.from_pretrained(tmp_path / out).state_dict())
    first, second, other = ([weight.flatten() for weight in each.values()] for each in weights)
    assert torch.equal(torch.cat(first), torch.cat(second)) and not torch.equal(torch.cat(first), torch.cat(other))


def test_a_cut_sample_is_only_ever_pulled_up():
    predicted, target = torch.tensor([3.0, 5.0, 4.5, 3.0, 5.0]), torch.full((5,), 4.0)
    losses = censored_loss(predicted, target, torch.tensor([False, False, False, True, True]))
    assert losses.tolist() == [0.5, 0.5, 0.125, 0.5, 0.0]


def test_prompts_are_held_out_whole_and_the_same_in_every_file():
    keys = [f"p{index}" for index in range(10)]
    held = held_out_keys(keys, 0.3, seed=0)
    assert len(held) == 3 and held == held_out_keys(reversed(keys * 2), 0.3, seed=0) != held_out_keys(keys, 0.3, seed=1)
    assert len(held_out_keys(["a", "b"], 0.99, seed=0)) == 1
    with pytest.raises(ValueError, match="hold 1 prompt; two are needed"):
        held_out_keys(["a", "a"], 0.5, 0)


@pytest.mark.parametrize(
    "changes, message",
    [
        (["recordings="], "recordings= is missing"),
        (["recordings=[nowhere.jsonl]"], "nowhere.jsonl: there is no such file"),
        (["encoder=nowhere/nothing"], "encoder=nowhere/nothing: no sequence classifier with a tokenizer"),
        (["prefix_tokens=9"], "the longest prefix_tokens that works is 4"),
        (["prefix_tokens=[]"], "prefix_tokens must name at least one k"),
        (
            ["prefix_tokens=[1,7]", "window=8", "recordings={long}"],
            "the input takes 8 tokens, but the first 7 tokens and 2 special ones need 9",
        ),
        (
            ["prefix_tokens=23", "recordings={long}"],
            "the input takes 24 tokens, but the first 23 tokens and 2 special ones need 25",
        ),
        (["out={file}/there"], "/there cannot be made: Not a directory"),
        (
            ["tokenizer={small}"],
            "the recording of 0 has token 59, and the tokenizer has 20: give the tokenizer of the model that was "
            "recorded",
        ),
        (["epochs=0"], "epochs=0: must be >= 1"),
        (["out={policy}"], "is there already and is not an empty folder"),
        (["tokenizer=nowhere/nothing"], "tokenizer=nowhere/nothing: no tokenizer could be loaded"),
    ],
)
def test_bad_input_is_one_line_and_status_2(changes, message, folders, recordings, make_tokenizer, tmp_path, refused):
    long, small = tmp_path / "long.jsonl", tmp_path / "small"
    rows = [record(index, folders[1]) for index in range(4)]
    long.write_text(
        "".join(json.dumps(row | {"first_tokens": [[9] * length for length in row["lengths"]]}) + "\n" for row in rows)
    )
    make_tokenizer(20).save_pretrained(small)
    names = {"policy": folders[1], "file": recordings, "long": long, "small": small}
    given = {"recordings": f"[{recordings}]", "encoder": folders[0], "out": str(tmp_path / "out"), "prefix_tokens": "4"}
    given |= dict(change.format(**names).split("=", 1) for change in changes)
    assert message in refused(train_predictor.main, *(f"{name}={value}" for name, value in given.items()))
    assert not list((tmp_path / "out").glob("*"))


def test_a_recording_without_texts_names_what_is_missing(folders, tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"dataset": "a", "model": folders[1], "prompt_id": "p", "lengths": [3, 4]}) + "\n")
    with pytest.raises(ValueError, match="recording of p has no prompt"):
        read_groups(str(path), None, [1])
    path.write_text(
        json.dumps(
            {
                "dataset": "a",
                "model": "no-folder",
                "prompt_id": "p",
                "lengths": [3, 4],
                "prompt": "w1",
                "first_tokens": [[1], [2]],
            }
        )
    )
    with pytest.raises(
        ValueError, match="tokenizer=no-folder: no tokenizer could be loaded .* give the policy's folder"
    ):
        read_groups(str(path), None, [1])

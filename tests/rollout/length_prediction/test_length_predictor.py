"""The BERT length predictor on a tiny random BERT, alone and inside the engine."""

import pytest

from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from tests.tiny_models import save_tiny_bert


@pytest.fixture(scope="module")
def folder(make_tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("bert")
    save_tiny_bert(path, 64, max_position_embeddings=12, initializer_range=0.5)
    make_tokenizer(64, pad_token="w63").save_pretrained(path)
    return str(path)


def test_lengths_are_positive_and_depend_on_the_first_tokens(folder):
    lengths = BertLengthPredictor.load(folder).predict("w1 w2 w3", [" w4 w5", " w40 w41", " w4 w5"])
    assert len(lengths) == 3 and min(lengths) >= 1
    assert lengths[0] == pytest.approx(lengths[2]) and lengths[0] != pytest.approx(lengths[1])


def test_predictions_of_a_batch_equal_those_one_by_one(folder):
    predictor = BertLengthPredictor.load(folder)
    prefixes = [f" w{index}" * (1 + index % 5) for index in range(40)]  # more than one batch, padded differently
    assert predictor.predict("w1 w2", prefixes) == pytest.approx(
        [predictor.predict("w1 w2", [prefix])[0] for prefix in prefixes], rel=1e-4
    )


def test_a_long_prompt_is_cut_from_the_left(folder):
    predictor = BertLengthPredictor.load(folder)
    tail = " w1 w2 w3 w4 w5 w6 w7 w8 w9 w10"
    assert predictor.predict("w50 w51 w52" + tail, [" w11 w12"]) == predictor.predict(
        "w20 w21 w22" + tail, [" w11 w12"]
    )
    assert predictor.predict("w50" + tail, [" w11 w12"]) != predictor.predict("w50" + tail, [" w11 w13"])


def test_a_folder_without_a_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match="predictor_path"):
        BertLengthPredictor.load(str(tmp_path))

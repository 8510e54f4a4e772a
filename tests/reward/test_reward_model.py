"""Reward models: batched scores equal one-by-one scores, and what is no reward model is refused."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BertTokenizerFast

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.reward.checks import check_reward_functions
from infsample_rl.reward.reward_model import RewardModel
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.types import Prompt
from tests.configs import run_config
from tests.scored_texts import score_texts
from tests.tiny_models import save_judge, save_tiny_bert

MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "one and two is what"}]
RESPONSES = ["three", "it is three", "", "one and two is three . " * 5, "what", "it is " * 9, "three three", "it"]


def function(folder, **kwargs) -> RewardFunctionConfig:
    return RewardFunctionConfig(name=f"model:{folder}", kwargs=kwargs)


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] one two three and is what it be brief .".split()


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    # ten times BERT's own weight scale: scores of about 1 that tell the texts apart, with float32 rounding near 1e-6
    return save_bert(tmp_path_factory.mktemp("models") / "bert", weight_scale=0.2)


def save_bert(folder, weight_scale: float):
    """A random BERT classifier with one label and a vocabulary of fifteen words."""
    folder.mkdir()
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    save_tiny_bert(folder, len(WORDS), hidden_size=64, max_position_embeddings=64, initializer_range=weight_scale)
    return folder


@pytest.fixture(scope="session", params=["own padding id", "no padding id", "ends in its padding id"])
def qwen3_folder(request, tiny_qwen3, tmp_path_factory):
    """A Qwen3 classifier with a chat template; decoders score the last token that is not padding."""
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen3)
    if request.param != "own padding id":
        tokenizer.pad_token = "<|im_end|>"
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|>")
    save_judge(folder, tokenizer, **{"pad_token_id": None} if request.param == "no padding id" else {})
    return folder


def one_by_one(model: RewardModel) -> list[float]:
    """Scores by plain transformers, each text alone and without padding."""
    plain = type(model.model).from_pretrained(model.model.name_or_path).to(model.model.dtype).eval()
    scores = []
    for response in RESPONSES:
        ids, types = model._encode(MESSAGES, response)
        inputs = {"input_ids": torch.tensor([ids])} | (
            {"token_type_ids": torch.tensor([types])} if "Bert" in type(plain).__name__ else {}
        )
        with torch.no_grad():
            scores.append(plain(**inputs).logits.item())
    return scores


def check_batches(folder, batch_tokens: int) -> None:
    model = RewardModel(function(folder, batch_tokens=batch_tokens), "cpu")
    scores, problems = model.score(MESSAGES, RESPONSES)
    assert problems == [""] * len(RESPONSES)
    assert len({round(score, 3) for score in scores}) > 4  # the texts are told apart
    assert scores == pytest.approx(one_by_one(model), abs=1e-5)


@pytest.mark.parametrize("batch_tokens", [10_000, 100, 1])
def test_bert_scores_of_a_batch_equal_single_scores(bert_folder, batch_tokens):
    check_batches(bert_folder, batch_tokens)


@pytest.mark.parametrize("batch_tokens", [10_000, 300, 1])
def test_qwen3_scores_of_a_batch_equal_single_scores(qwen3_folder, batch_tokens):
    check_batches(qwen3_folder, batch_tokens)


def test_padding_takes_no_part_at_all(tmp_path):
    """In float64, with weights that magnify any leak: what is left is the last digit of a float32 score."""
    model = RewardModel(function(save_bert(tmp_path / "bert", weight_scale=0.5)), "cpu")
    model.model.double()
    assert model.score(MESSAGES, RESPONSES)[0] == pytest.approx(one_by_one(model), rel=2e-7)


def test_bert_reads_prompt_and_response_as_a_pair(bert_folder):
    model = RewardModel(function(bert_folder), "cpu")
    ids, types = model._encode(MESSAGES, "it is three")
    tokens = "[CLS] be brief one and two is what [SEP] it is three [SEP]".split()
    assert model.tokenizer.convert_ids_to_tokens(ids) == tokens
    assert types == [0] * 9 + [1] * 4


def test_a_score_that_is_not_finite_is_none_and_said(bert_folder):
    model = RewardModel(function(bert_folder), "cpu")
    torch.nn.init.constant_(model.model.classifier.bias, torch.nan)
    assert model.score(MESSAGES, ["three"]) == ([None], ["returned nan"])


def test_more_than_one_label_is_refused(tiny_qwen3, tmp_path):
    save_judge(tmp_path, AutoTokenizer.from_pretrained(tiny_qwen3), num_labels=3)
    for folder, labels in ((tmp_path, 3), (tiny_qwen3, 2)):
        with pytest.raises(ValueError, match=f"has {labels} labels; give a sequence classifier with num_labels=1"):
            check_reward_functions(RewardConfig(functions=[function(folder)]))


def test_a_language_model_with_one_label_but_no_head_is_refused(tiny_qwen3, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    model.config.num_labels = 1
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_qwen3).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no trained reward model: its files lack score.weight"):
        RewardModel(function(tmp_path), "cpu")


def test_unknown_settings_are_refused(bert_folder):
    for kwargs, message in (
        ({"dtypo": "float32"}, "takes no setting 'dtypo'"),
        ({"dtype": "int8"}, "must be one of float32, bfloat16, float16"),
    ):
        with pytest.raises(ValueError, match=message):
            check_reward_functions(RewardConfig(functions=[function(bert_folder, **kwargs)]))


def test_a_model_and_a_rule_are_summed(bert_folder, tiny_qwen3):
    functions = [{"name": "gsm8k", "weight": 10.0}, function(bert_folder)]
    worker = RewardWorker(run_config(model={"path": str(tiny_qwen3)}, reward={"functions": functions}))
    prompt = Prompt(prompt_index=0, row=1, messages=MESSAGES, text="", token_ids=None, columns={"answer": "3"})
    result = score_texts(worker, prompt, ["it is 3", "it is 4", "it " * 60])
    worker.close()
    first, second, third = result.components["model:bert"]
    assert result.components["gsm8k"] == [1.0, 0.0, 0.0]
    assert result.rewards == [10.0 + first, second, None] and third is None
    assert result.failures == [
        "model:bert: prompt and response are 70 tokens, the model takes 64 on prompt row 1 (1 sample)"
    ]

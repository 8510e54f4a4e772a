"""The puzzles of the default experiment, and the files it ships with."""

from __future__ import annotations

import itertools
import json
import random
import re
from pathlib import Path

import pytest
import torch
import transformers

import infsample_rl
from scripts import kk_puzzles as kk

ASSETS = Path(infsample_rl.__file__).parent / "assets" / "kk_tiny"
CONNECTIVES = {
    " exactly when ": lambda a, b: a == b,
    " and ": lambda a, b: a and b,
    " or ": lambda a, b: a or b,
}


def read_rows(name: str) -> list[dict]:
    return [json.loads(line) for line in (ASSETS / name).read_text(encoding="ascii").splitlines()]


def claim_is_true(claim: str, roles: dict[str, bool]) -> bool:
    """Evaluate a claim from its English text alone, sharing nothing with the code under test."""
    if claim.startswith("if "):
        condition, _, consequence = claim[3:].partition(" then ")
        return claim_is_true(consequence, roles) if claim_is_true(condition, roles) else True
    for words, combine in CONNECTIVES.items():
        if words in claim:
            left, _, right = claim.partition(words)
            return combine(claim_is_true(left, roles), claim_is_true(right, roles))
    name, role = re.fullmatch(r"(\w+) is a (knight|knave)", claim).groups()
    return roles[name] == (role == "knight")


def solutions_of_text(question: str, names: list[str]) -> list[list[bool]]:
    claims = re.findall(r"(\w+) says: ([^.]+)\.", question)
    assert [name for name, _ in claims] == names
    found = []
    for assignment in itertools.product((True, False), repeat=len(names)):
        roles = dict(zip(names, assignment, strict=True))
        if all(claim_is_true(claim, roles) == roles[name] for name, claim in claims):
            found.append(list(assignment))
    return found


def some_puzzles(count: int, seed: int = 5) -> list[tuple[kk.Puzzle, list[str], random.Random]]:
    rng = random.Random(seed)
    puzzles = itertools.islice(kk.random_puzzles(rng), count)
    return [(puzzle, kk.random_names(rng, len(puzzle.solution)), rng) for puzzle in puzzles]


@pytest.mark.parametrize("name", ["train.jsonl", "test.jsonl"])
def test_shipped_rows_are_true_to_their_text(name):
    for row in read_rows(name):
        assert solutions_of_text(row["question"], row["names"]) == [row["solution"]]
        assert kk.parse_answer(f"Answer: {row['answer']}.", row["names"]) == row["solution"]


def test_shipped_forms_are_disjoint_and_recomputable():
    train, test = read_rows("train.jsonl"), read_rows("test.jsonl")
    assert {row["form"] for row in train}.isdisjoint(row["form"] for row in test)
    refused = {row["form"] for row in test}
    assert kk.make_records(len(train), seed=1, without=refused) == train


@pytest.fixture(scope="module")
def tokenizer():
    return transformers.AutoTokenizer.from_pretrained(ASSETS / "policy")


def test_tokenizer_round_trips_questions_and_reasoning(tokenizer):
    texts = [row["question"] for row in read_rows("train.jsonl") + read_rows("test.jsonl")]
    for puzzle, names, rng in some_puzzles(100):
        texts += [kk.reasoning_text(puzzle, names, style, rng) for style in kk.STYLES]
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_chat_template(tokenizer):
    question = read_rows("test.jsonl")[0]["question"]
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=False)
    assert text == f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.bos_token is None
    with_specials, without = (tokenizer(text, add_special_tokens=flag)["input_ids"] for flag in (True, False))
    assert with_specials == without
    assert tokenizer.unk_token_id not in without
    assert tokenizer.decode(without) == text


def test_policy_loads_and_answers(tokenizer):
    model = transformers.AutoModelForCausalLM.from_pretrained(ASSETS / "policy")
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.tie_word_embeddings
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    row = read_rows("test.jsonl")[0]
    messages = [{"role": "user", "content": row["question"]}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    torch.manual_seed(0)
    output = model.generate(**inputs.to(model.device), num_return_sequences=8, max_new_tokens=256)
    answers = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert sum(kk.parse_answer(answer, row["names"]) is not None for answer in answers) >= 6

"""What the model reads: template, keywords, BOS, instruction, and prompts that are too long."""

from __future__ import annotations

import logging

import pytest

from infsample_rl.config import DataConfig
from infsample_rl.data.chat import chat_messages, render, render_all
from infsample_rl.data.fields import Problem


def problem(question: str, row: int = 1) -> Problem:
    """A problem of a file that is not there."""
    return Problem(
        row=row, origin="train.jsonl", messages=[{"role": "user", "content": question}], columns={"answer": "2"}
    )


def config(**settings) -> DataConfig:
    """Data settings of a file that is not there."""
    return DataConfig(source="train.jsonl", **settings)


def test_qwen_template_with_system_prompt_instruction_and_thinking_off(qwen_tokenizer):
    data = config(
        system_prompt="Be brief.", instruction="Answer with a number.", chat_template_kwargs={"enable_thinking": False}
    )
    prompt = render(problem("1 + 1 = ?", row=4), qwen_tokenizer, data)
    assert prompt.text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1 = ?\n\nAnswer with a number.<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    assert prompt.token_ids.dtype == "int32"
    assert prompt.token_ids.tolist() == qwen_tokenizer(prompt.text, add_special_tokens=False)["input_ids"]
    assert (prompt.row, prompt.columns) == (4, {"answer": "2"})
    assert prompt.messages[-1] == {"role": "user", "content": "1 + 1 = ?\n\nAnswer with a number."}


def test_thinking_is_on_when_not_said_otherwise(qwen_tokenizer):
    assert (
        render(problem("1?"), qwen_tokenizer, config()).text
        == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_the_system_prompt_takes_the_place_of_the_rows_own(qwen_tokenizer):
    row = problem("1?")
    row.messages.insert(0, {"role": "system", "content": "Old."})
    assert render(row, qwen_tokenizer, config(system_prompt="New.")).text.startswith(
        "<|im_start|>system\nNew.<|im_end|>\n<|im_start|>user\n1?"
    )
    assert render(row, qwen_tokenizer, config()).text.startswith("<|im_start|>system\nOld.")


def test_bos_comes_once_when_template_and_tokenizer_both_write_it(llama_tokenizer):
    prompt = render(problem("1?"), llama_tokenizer, config())
    assert prompt.text == "<s>[user]1?[assistant]"
    assert prompt.token_ids.tolist().count(256) == 1
    assert prompt.token_ids[0] == 256
    assert 257 not in prompt.token_ids


def test_plain_text_without_a_template_has_bos_once_and_no_eos(llama_tokenizer):
    llama_tokenizer.chat_template = None
    for question in ("ab", "<s>ab"):
        prompt = render(problem(question), llama_tokenizer, config(instruction="c"))
        assert prompt.text == f"{question}\n\nc"
        assert prompt.token_ids.tolist() == [256, *llama_tokenizer("ab\n\nc", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        (
            {"enable_thinkin": False},
            "data.chat_template_kwargs.enable_thinkin: .* knows no such keyword; did you mean enable_thinking?",
        ),
        (
            {"add_generation_prompt": False},
            "data.chat_template_kwargs.add_generation_prompt is not a keyword of the chat template",
        ),
    ],
)
def test_a_misspelt_keyword_is_refused(qwen_tokenizer, keywords, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        render_all([problem("1?")], qwen_tokenizer, config(chat_template_kwargs=keywords))


def test_a_keyword_the_template_does_not_know_is_said(qwen_tokenizer, caplog):
    render_all([problem("1?")], qwen_tokenizer, config(chat_template_kwargs={"reasoning_effort": "low"}))
    assert "data.chat_template_kwargs.reasoning_effort" in caplog.text and "it has no effect" in caplog.text


def test_keywords_without_a_template_are_said(llama_tokenizer, caplog):
    llama_tokenizer.chat_template = None
    render_all([problem("1?")], llama_tokenizer, config(chat_template_kwargs={"enable_thinking": False}))
    assert "has no effect" in caplog.text and "has no chat template" in caplog.text


def test_a_row_the_template_refuses_is_a_bad_row(llama_tokenizer, caplog):
    refused = problem("2?", row=2)
    refused.messages.insert(0, {"role": "system", "content": "S"})
    rows = [problem("1?"), refused, problem("3?", row=3)]
    with pytest.raises(
        ValueError,
        match=r"jsonl, row 2 cannot be used: the chat template refuses it \(System role not supported\); 1 of 3",
    ):
        render_all(rows, llama_tokenizer, config())
    rendered = render_all(rows, llama_tokenizer, config(bad_rows="skip"))
    assert [(prompt.row, prompt.prompt_index) for prompt in rendered.prompts] == [(1, 0), (3, 1)]
    assert "skipped, as 1 of 3 rows" in caplog.text
    with pytest.raises(ValueError, match="train.jsonl, row 2: the chat template refuses it: System role not supported"):
        render(refused, llama_tokenizer, config())


# <s>[user] + question + [assistant] is 18 tokens and one a character of the question
LONG = [problem("short", row=1), problem("x" * 10 + "0123456789", row=2), problem("y" * 30, row=3)]


def test_long_prompts_are_an_error_with_row_value_and_the_nearest_that_works(llama_tokenizer):
    with pytest.raises(ValueError) as caught:
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=28))
    assert str(caught.value) == (
        "train.jsonl, row 2: the prompt has 38 tokens, data.max_prompt_tokens must be >= 38, got 28; "
        "2 of 3 prompts are longer than data.max_prompt_tokens = 28 (the longest has 48): "
        "the nearest that works for all is 48, or set data.long_prompts to drop or truncate"
    )


def test_long_prompts_are_dropped_counted_and_said_once(llama_tokenizer, caplog):
    rendered = render_all(LONG, llama_tokenizer, config(max_prompt_tokens=38, long_prompts="drop"))
    assert [prompt.row for prompt in rendered.prompts] == [1, 2]
    assert (rendered.dropped, rendered.truncated) == (1, 0)
    (record,) = caplog.records
    assert (
        record.getMessage()
        == "train.jsonl: dropped, as 1 of 3 prompts are longer than data.max_prompt_tokens = 38 (the longest has 48): "
        "row 3"
    )


def test_dropping_every_prompt_is_an_error(llama_tokenizer):
    with pytest.raises(ValueError, match="data.long_prompts=drop leaves none; the nearest that keeps one is 23"):
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=20, long_prompts="drop"))


def test_truncation_cuts_the_question_from_the_left_and_keeps_everything_else(llama_tokenizer, caplog):
    caplog.set_level(logging.WARNING)
    rendered = render_all(LONG, llama_tokenizer, config(max_prompt_tokens=31, long_prompts="truncate", instruction="I"))
    assert [prompt.text for prompt in rendered.prompts] == [
        "<s>[user]short\n\nI[assistant]",
        "<s>[user]0123456789\n\nI[assistant]",
        "<s>[user]yyyyyyyyyy\n\nI[assistant]",
    ]
    assert [len(prompt.token_ids) for prompt in rendered.prompts] == [26, 31, 31]
    assert rendered.prompts[1].messages == [{"role": "user", "content": "0123456789\n\nI"}]
    assert (rendered.dropped, rendered.truncated) == (0, 2)
    assert len(caplog.records) == 1
    assert "questions truncated from the left, as 2 of 3 prompts" in caplog.text


def test_a_prompt_that_cannot_be_truncated_enough_is_an_error(llama_tokenizer):
    with pytest.raises(
        ValueError,
        match="row 1: the prompt cannot be truncated to data.max_prompt_tokens = 10: .* question takes 18 tokens",
    ):
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=10, long_prompts="truncate"))


def test_a_developers_message_is_replaced_and_the_last_turn_instructed():
    turns = (("developer", "D"), ("user", "one"), ("assistant", "two"), ("user", "three"))
    row = Problem(
        row=1, origin="train.jsonl", columns={}, messages=[{"role": role, "content": text} for role, text in turns]
    )
    found = [message["content"] for message in chat_messages(row, config(system_prompt="S", instruction="I"))]
    assert found == ["S", "one", "two", "three\n\nI"]

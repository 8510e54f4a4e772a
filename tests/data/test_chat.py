"""What the model reads: template, keywords, BOS, instruction, and prompts that are too long."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest

from infsample_rl.config import DataConfig, ModelConfig
from infsample_rl.data.chat import chat_messages, render, render_all
from infsample_rl.data.fields import BadRow, Problem
from infsample_rl.model.tokenizer import load_tokenizer


def problem(*turns: str | tuple[str, str], row: int = 1) -> Problem:
    """A problem of a file that is not there; a turn without a role is the user's."""
    roles = [("user", turn) if isinstance(turn, str) else turn for turn in turns]
    messages = [{"role": role, "content": content} for role, content in roles]
    return Problem(row=row, origin="train.jsonl", messages=messages, columns={"answer": "2"})


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


def test_thinking_is_on_and_the_template_used_when_not_said_otherwise(qwen_tokenizer):
    text = "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    assert render(problem("1?"), qwen_tokenizer, config()).text == text
    assert render(problem("1?"), qwen_tokenizer, config(apply_chat_template=False)).text == "1?"


def test_a_row_is_offered_the_tools_of_its_environment_and_one_without_is_a_bad_row(qwen_tokenizer):
    tools = {
        name: [{"type": "function", "function": {"name": f"{name}_tool", "parameters": {}}}] for name in ("one", "two")
    }
    rows = [replace(problem("Go."), columns={"environment": name}) for name in ("one", "two")]
    tokenizer = copy.deepcopy(qwen_tokenizer)
    tokenizer.chat_template = "{% for tool in tools %}{{ tool.function.name }} {% endfor %}Go."
    assert [render(row, tokenizer, config(), tools).text for row in rows] == ["one_tool Go.", "two_tool Go."]
    with pytest.raises(ValueError, match=r"row 1 environment must be one of one, two .*, got None"):
        render_all([problem("Go.")], tokenizer, config(), tools)


@pytest.mark.parametrize("role", ["system", "developer"])
def test_the_system_prompt_replaces_the_rows_own_and_the_last_turn_is_instructed(role):
    row = problem((role, "Old."), "one", ("assistant", "two"), "three")
    found = [message["content"] for message in chat_messages(row, config(system_prompt="New.", instruction="I"))]
    assert found == ["New.", "one", "two", "three\n\nI"]
    assert chat_messages(row, config())[0]["content"] == "Old."


def test_bos_comes_once_when_template_and_tokenizer_both_write_it(llama_tokenizer):
    prompt = render(problem("1?"), llama_tokenizer, config())
    assert prompt.text == "<s>[user]1?[assistant]"
    assert prompt.token_ids.tolist().count(256) == 1 and prompt.token_ids[0] == 256
    assert 257 not in prompt.token_ids


def test_plain_text_without_a_template_has_bos_once_and_no_eos(llama_tokenizer):
    llama_tokenizer.chat_template = None
    for question in ("ab", "<s>ab"):
        prompt = render(problem(question), llama_tokenizer, config(instruction="c"))
        assert prompt.text == f"{question}\n\nc"
        assert prompt.token_ids.tolist() == [256, *llama_tokenizer("ab\n\nc", add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize(
    ("keyword", "message"),
    [
        ("enable_thinkin", r"enable_thinkin: no chat template .*; did you mean enable_thinking\?"),
        ("add_generation_prompt", "add_generation_prompt is not a keyword of the chat template"),
    ],
)
def test_a_misspelt_keyword_is_refused(qwen_tokenizer, keyword, message):
    with pytest.raises(ValueError, match=f"data.chat_template_kwargs.{message}"):
        render_all([problem("1?")], qwen_tokenizer, config(chat_template_kwargs={keyword: False}))


def test_a_keyword_that_no_template_reads_is_said(qwen_tokenizer, caplog):
    for keyword, settings in (("reasoning_effort", {}), ("enable_thinking", {"apply_chat_template": False})):
        render_all([problem("1?")], qwen_tokenizer, config(chat_template_kwargs={keyword: "low"}, **settings))
        assert f"data.chat_template_kwargs.{keyword}: no chat template used here knows" in caplog.text


def test_a_row_the_template_refuses_is_a_bad_row(llama_tokenizer, caplog):
    refused = problem(("system", "S"), "2?", row=2)
    rows = [problem("1?"), refused, problem("3?", row=3)]
    message = r"cannot be used: the chat template refuses it \(System role not supported\)"
    with pytest.raises(ValueError, match=f"jsonl, row 2 {message}; 1 of 3"):
        render_all(rows, llama_tokenizer, config())
    prompts = render_all(rows, llama_tokenizer, config(bad_rows="skip"))
    assert [(prompt.row, prompt.prompt_index) for prompt in prompts] == [(1, 0), (3, 1)]
    assert "skipped, as 1 of 3 rows" in caplog.text
    with pytest.raises(BadRow, match=message):
        render(refused, llama_tokenizer, config())


# <s>[user] + question + [assistant] is 18 tokens and one a character of the question
LONG = [problem("short", row=1), problem("x" * 10 + "0123456789", row=2), problem("y" * 30, row=3)]


def test_long_prompts_are_an_error_with_row_value_and_the_nearest_that_works(llama_tokenizer):
    expected = (
        "row 2: the prompt has 38 tokens, data.max_prompt_tokens must be >= 38, got 28; "
        r"2 of 3 prompts are longer than data.max_prompt_tokens = 28 \(the longest has 48\)"
    )
    with pytest.raises(ValueError, match=expected):
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=28))


def test_long_prompts_are_dropped_and_said_once(llama_tokenizer, caplog):
    prompts = render_all(LONG, llama_tokenizer, config(max_prompt_tokens=38, long_prompts="drop"))
    assert [prompt.row for prompt in prompts] == [1, 2]
    (record,) = caplog.records
    assert "train.jsonl: drop, as 1 of 3 prompts are longer" in record.getMessage()
    assert record.getMessage().endswith("(the longest has 48): rows 3")
    with pytest.raises(ValueError, match="data.long_prompts=drop leaves none"):
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=20, long_prompts="drop"))


def test_truncation_cuts_the_question_from_the_left_and_keeps_everything_else(llama_tokenizer, caplog):
    prompts = render_all(LONG, llama_tokenizer, config(max_prompt_tokens=31, long_prompts="truncate", instruction="I"))
    assert [prompt.text for prompt in prompts] == [
        "<s>[user]short\n\nI[assistant]",
        "<s>[user]0123456789\n\nI[assistant]",
        "<s>[user]yyyyyyyyyy\n\nI[assistant]",
    ]
    assert [len(prompt.token_ids) for prompt in prompts] == [26, 31, 31]
    assert prompts[1].messages == [{"role": "user", "content": "0123456789\n\nI"}]
    assert len(caplog.records) == 1 and "truncate, as 2 of 3 prompts" in caplog.text
    with pytest.raises(ValueError, match="row 1: .* cannot be truncated .* = 10: with one .* question it has 19"):
        render_all(LONG, llama_tokenizer, config(max_prompt_tokens=10, long_prompts="truncate"))


def test_a_template_of_ones_own_takes_the_place_of_the_tokenizers_and_is_kept_with_it(tiny_qwen3, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]")
    tokenizer = load_tokenizer(ModelConfig(path=str(tiny_qwen3), chat_template=str(file)))
    assert render(problem("1 + 2 = ?"), tokenizer, config()).text == "[user] 1 + 2 = ?\n[assistant]"
    tokenizer.save_pretrained(tmp_path / "kept")
    again = load_tokenizer(ModelConfig(path=str(tiny_qwen3), tokenizer_path=str(tmp_path / "kept")))
    assert again.chat_template == tokenizer.chat_template


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "own.jinja cannot be read: No such file"), ("a\n{% for %}", "own.jinja, line 2, is no Jinja: ")],
)
def test_what_is_no_template_is_one_line(tiny_qwen3, tmp_path, text, said):
    file = tmp_path / "own.jinja"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ValueError, match=f"^model.chat_template=.*{said}") as error:
        load_tokenizer(ModelConfig(path=str(tiny_qwen3), chat_template=str(file)))
    assert "\n" not in str(error.value)

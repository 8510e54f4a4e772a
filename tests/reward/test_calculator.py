"""The tool and the template of the experiment calculator_smollm2."""

import pytest
from transformers.utils.chat_template_utils import get_json_schema

from infsample_rl.assets.calculator.tools import calculate
from infsample_rl.config.loading import load_config
from infsample_rl.data.turns import ToolCall, TurnTemplate
from tests.conftest import byte_tokenizer


@pytest.mark.parametrize(
    ("expression", "value"), [("361 * 220", "79420"), ("-(2 + 3) * 4", "-20"), ("1 / 4", "0.25"), ("7 - 7.0", "0")]
)
def test_expressions_are_worked_out(expression, value):
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression", ["2 ** 99", "__import__('os')", "1 / 0", "10000000000 * 10000000000", "", "'a' * 9"]
)
def test_anything_else_raises(expression):
    with pytest.raises((ValueError, SyntaxError, ZeroDivisionError)):
        calculate(expression)


def test_a_call_is_read_as_the_template_writes_it_and_its_answer_comes_as_a_users():
    tokenizer = byte_tokenizer()
    config = load_config(["+experiment=calculator_smollm2", "model.path=."])
    with open(config.model.chat_template) as file:
        tokenizer.chat_template = file.read()
    template = TurnTemplate.of(tokenizer, {}, [get_json_schema(calculate)], [tokenizer.eos_token_id])
    call = '<tool_call>{"name": "calculate", "arguments": {"expression": "2 * 3"}}</tool_call>'
    assert template.parse(call + "<|im_end|>").calls == [ToolCall("calculate", {"expression": "2 * 3"})]
    behind = tokenizer.decode(template.observation_ids([{"role": "tool", "content": "6"}]))
    assert behind == "\n<|im_start|>user\n<tool_response>6</tool_response><|im_end|>\n<|im_start|>assistant\n"
    plain = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert plain == "<|im_start|>user\nHi<|im_end|>\n"

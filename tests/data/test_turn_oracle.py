"""What follows a sampled turn is, id for id, what the package `renderers` puts there, of every template that both read:
TRL has the templates, renderers its own code for each. Not here: gpt-oss, whose vocabulary must be fetched; DeepSeek,
whose template of TRL is of another version than the renderer; templates whose calls are in no form that is read."""

import functools

import pytest

from infsample_rl.data.turns import TurnTemplate
from tests.conftest import byte_tokenizer
from tests.data.test_turns import ADD, OBSERVED, template_of_trl

pytestmark = pytest.mark.peers
SPECIAL = (  # tokens that renderers look for
    "<|im_start|> <|im_end|> <|endoftext|> <think> </think> <tool_call> </tool_call> <tool_response> </tool_response> "
    "<|begin_of_text|> <|end_of_text|> <|eot_id|> <|eom_id|> <|python_tag|> <|start_header_id|> <|end_header_id|> "
    "<|finetune_right_pad_id|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|> <arg_key> </arg_key> "
    "<arg_value> </arg_value> <|vision_start|> <|vision_end|> <|image_pad|> <|video_pad|> /nothink"
).split()
OFF = {"enable_thinking": False}
USER = [{"role": "user", "content": "Higher."}]


def tokenizer_with(template: str):
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    tokenizer.chat_template = template_of_trl(template)
    return tokenizer


@functools.cache
def config_of(renderer: str, off: bool):
    from renderers import configs

    found = [each for each in vars(configs).values() if isinstance(each, type) and hasattr(each, "model_fields")]
    [own] = {each for each in found if "name" in each.model_fields and each.model_fields["name"].default == renderer}
    return own(**OFF) if off else own()


@pytest.mark.parametrize(
    ("template", "renderer", "kwargs"),
    [
        ("qwen3", "qwen3", {}),
        ("qwen3", "qwen3", OFF),
        ("qwen3_instruct_2507", "qwen3", {}),
        ("qwen3_vl", "qwen3-vl", {}),
        ("qwen3_5_think", "qwen3.5", {}),
        ("qwen3_5_nothink", "qwen3.5", OFF),
        ("qwen3_6", "qwen3.6", {}),
        ("qwen3_6", "qwen3.6", OFF),
        ("qwen3_8", "qwen3.8", {}),
        ("qwen3_8", "qwen3.8", OFF),
        ("llama3_1", "llama-3", {}),
        ("llama3_2", "llama-3", {}),
        ("glm4moe", "glm-4.5", {}),
        ("glm4moe", "glm-4.5", OFF),
        ("nemotron_3_nano", "nemotron-3", {}),
        ("nemotron_3_super", "nemotron-3", {}),
        ("nemotron_3_ultra", "nemotron-3-ultra", {}),
        ("nemotron_3_5_lightning", "nemotron-3.5", {}),
    ],
    ids=lambda value: value if isinstance(value, str) else "no thinking" if value else "",
)
@pytest.mark.parametrize("observed", [OBSERVED, USER], ids=["tool", "user"])
def test_ids_are_those_of_renderers(template, renderer, kwargs, observed):
    from renderers import base

    tokenizer, tools = tokenizer_with(template), [ADD] if observed is OBSERVED else []
    base._populate_registry()
    bridge = base.RENDERER_REGISTRY[renderer](tokenizer, config_of(renderer, bool(kwargs)))
    stops = bridge.get_stop_token_ids()
    ours = TurnTemplate.of(tokenizer, kwargs, tools, stops)
    question = [{"role": "user", "content": "What is 2 + 3?"}]
    named = {"tools": tools} if tools else {}
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True, **named, **kwargs)
    begun = "" if prompt.rstrip().endswith("<think>") else "<think>"
    said = "I add." if kwargs else f"{begun}Two and three.</think>\n\nI add."
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    compared = 0
    for stop in stops:
        sampled = [*tokenizer(said, add_special_tokens=False)["input_ids"], stop]
        found = bridge.bridge_to_next_turn(before, sampled, observed, tools=tools or None)
        if found is not None:  # None: it would render earlier turns anew, without their thinking
            assert [*before, *sampled, *ours.observation_ids(observed, stop)] == found.token_ids
            compared += 1
    assert compared or (observed is USER and not kwargs)

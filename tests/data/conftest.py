"""Byte-level tokenizers, so that every expected length can be counted by hand: one token a byte, one a special
token."""

from __future__ import annotations

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from tests.conftest import bytes_and

QWEN_TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' + '\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif "
    "%}{%- endif %}"
)
LLAMA_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') "
    "}}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML with enable_thinking, no BOS, as Qwen3's."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bytes_and(["<|im_start|>", "<|im_end|>"]), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


@pytest.fixture
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Adds BOS by itself, and its template writes BOS too; refuses system messages."""
    raw = bytes_and(["<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer

"""Byte-level tokenizers, so that every expected length can be counted by hand: one token a byte, one a special
token."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

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


def byte_tokenizer(special: list[str]) -> Tokenizer:
    """A tokenizer with one token a byte and the special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


@pytest.fixture(scope="session")
def qwen_tokenizer() -> PreTrainedTokenizerFast:
    """ChatML with enable_thinking, no BOS, as Qwen3's."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=byte_tokenizer(["<|im_start|>", "<|im_end|>"]), eos_token="<|im_end|>"
    )
    tokenizer.chat_template = QWEN_TEMPLATE
    return tokenizer


@pytest.fixture
def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Adds BOS by itself, and its template writes BOS too; refuses system messages."""
    raw = byte_tokenizer(["<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 256), ("</s>", 257)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = LLAMA_TEMPLATE
    return tokenizer

"""Tiny models, tokenizers, samples and rows that several test files need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForSequenceClassification,
)

from infsample_rl.types import Completion, Prompt, ReferenceTokens, TrainingSample

# Of a model that is made in milliseconds.
TINY_SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def save_words(folder: Path, count: int = 60) -> PreTrainedTokenizerFast:
    """A tokenizer of the words w0, w1, ..., of which w1 ends a sample."""
    words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(count)}, unk_token="w0"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1")
    tokenizer.save_pretrained(folder)
    return tokenizer


def save_tiny_bert(folder: Path, vocab_size: int, **changes: Any) -> None:
    """A random BERT of one label, without a tokenizer."""
    torch.manual_seed(0)
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 1}
    sizes = {"vocab_size": vocab_size, "hidden_size": 32, "intermediate_size": 32} | heads
    BertForSequenceClassification(BertConfig(**sizes | changes)).save_pretrained(folder)


def save_judge(folder: Path, tokenizer: PreTrainedTokenizerFast, **changes: Any) -> None:
    """A random Qwen3 classifier of one label, whose scores tell texts apart."""
    tokenizer.save_pretrained(folder)
    torch.manual_seed(2)
    sizes = TINY_SIZES | {"vocab_size": len(tokenizer), "head_dim": 16, "num_labels": 1}
    model = Qwen3ForSequenceClassification(Qwen3Config(**sizes | {"pad_token_id": tokenizer.pad_token_id} | changes))
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)


def prompt_of(prompt_index: int = 0, ids: Sequence[int] = (7,), **more: Any) -> Prompt:
    """A prompt of these tokens, whose row is its index."""
    known = {"prompt_index": prompt_index, "row": prompt_index, "messages": [], "text": ""}
    return Prompt(**known | more, token_ids=np.array(ids, np.int32))


def finished(
    prompt_index: int, sample_index: int, ids: Sequence[int], logprobs: object = None, **more: Any
) -> Completion:
    """A finished sample of these tokens; without `logprobs` each has minus its id."""
    token_ids = np.array(ids, np.int32)
    known = {"sampling_logprobs": None, "finish_reason": "stop", "policy_version": 0}
    given = np.float32(-token_ids if logprobs is None else logprobs)
    return Completion(
        prompt_index=prompt_index,
        sample_index=sample_index,
        token_ids=token_ids,
        logprobs=np.broadcast_to(given, token_ids.shape).copy(),
        **known | more,
    )


def reference_tokens(logprobs: np.ndarray) -> ReferenceTokens:
    """What a reference that names no likely ids says."""
    return ReferenceTokens(logprobs, np.zeros((len(logprobs), 0), np.int32), np.zeros((len(logprobs), 0), np.float32))


def training_sample(
    prompt_index: int, prompt_ids: list[int], ids: list[int], *, advantage: float = 0.5, reference: bool = False
) -> TrainingSample:
    """A sample whose log-probabilities are minus its ids, and twice as much of the reference."""
    token_ids = np.array(ids, np.int32)
    return TrainingSample(
        prompt_index=prompt_index,
        sample_index=0,
        prompt_ids=np.array(prompt_ids, np.int32),
        response_ids=token_ids,
        advantages=(advantage,),
        engine_logprobs=-token_ids.astype(np.float32),
        reference=reference_tokens(-2 * token_ids.astype(np.float32)) if reference else None,
    )


def plain_logprobs(
    lm: Any,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    temperature: float = 1.0,
    valid_vocab: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities and entropies of one sample, alone in its row, by transformers' own attention."""
    ids = torch.tensor([[*map(int, prompt_ids), *map(int, response_ids)]])
    logits = lm(input_ids=ids, use_cache=False).logits[0, len(prompt_ids) - 1 : -1, :valid_vocab]
    table = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
    return table.gather(-1, ids[0, len(prompt_ids) :, None])[:, 0], -(table.exp() * table).sum(-1)


def assert_tensors_close(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, rtol: float, atol: float
) -> None:
    """The same names, and tensors within the tolerance; the name is told of one that is not."""
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(
            tensor, expected[name], rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )

"""Models, tokenizers and prompts of the benchmarks, and the bytes they take. Runs in the process of one measurement."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from benchmarks.workload import ModelOptions
from infsample_rl.config import ModelConfig, RolloutConfig
from infsample_rl.model.architecture import KVShape
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.types import TrainingSample

TEXT = (
    "A farmer counts {n} sheep, sells a third of them, buys twice as many goats and wants to know how many animals "
    "are left. "
)
MARK = "<<here>>"


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """What every engine gets in the process of its measurement."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    prompts: list[list[int]]
    warm_up: list[list[int]] = field(default_factory=list)  # other ones
    stop_ids: list[int]
    workload: dict[str, Any]  # the command's options


def pick_device(workload: ModelOptions) -> torch.device:
    """The device asked for; auto: cuda where there is one. ValueError for a cuda that torch does not see."""
    if workload.device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device=cuda: torch {torch.__version__} sees no CUDA device; take device=cpu")
    return torch.device("cuda" if workload.device != "cpu" and torch.cuda.is_available() else "cpu")


def load(workload: ModelOptions) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model in eval mode on its device, and its tokenizer; random weights and a tokenizer of numbers with
    `shape`."""
    device = pick_device(workload)
    if workload.shape is None:
        config = ModelConfig(path=workload.model, dtype=workload.dtype)
        return load_model(config, device), load_tokenizer(config)
    torch.manual_seed(workload.seed)
    with torch.device(device):  # made in place: 8B in float32 on the host would take 33 GB
        model = AutoModelForCausalLM.from_config(shape_config(workload.shape), dtype=getattr(torch, workload.dtype))
    return model.eval(), number_tokenizer(model.config.vocab_size)


def shape_config(shape: str) -> Qwen3Config:
    """The architecture of Qwen3-1.7B, of two of its layers, or of Qwen3-8B."""
    hidden, inner, layers, heads = {
        "qwen3_1.7b": (2048, 6144, 28, 16),
        "qwen3_1.7b_two_layers": (2048, 6144, 2, 16),
        "qwen3_8b": (4096, 12288, 36, 32),
    }[shape]
    config = Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=151936,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=shape != "qwen3_8b",
        eos_token_id=2,
        pad_token_id=1,
    )
    config.architectures = ["Qwen3ForCausalLM"]
    return config


def number_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """A tokenizer of `size` words, for a model that has none."""
    from tokenizers import Tokenizer, models

    words = {"<unk>": 0, "<pad>": 1, "<eos>": 2} | {str(index): index for index in range(3, size)}
    model = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>")


def rollout_config(workload: dict[str, Any], **settings: Any) -> RolloutConfig:
    """The engine's settings for a workload; `settings` win."""
    plain = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
    shared = ("group_size", "slots", "max_new_tokens", "temperature")
    given = {name: workload[name] for name in shared if name in workload}
    return RolloutConfig(**(plain | given | settings))


def make_prompts(workload: ModelOptions, tokenizer: PreTrainedTokenizerBase, count: int) -> list[list[int]]:
    """`count` different prompts of exactly prompt_tokens ids: a question in the chat template, cut; random ids with
    `shape`."""
    length = workload.prompt_tokens
    if workload.shape is not None:
        generator = torch.Generator().manual_seed(workload.seed)
        return torch.randint(3, len(tokenizer), (count, length), generator=generator).tolist()
    before, after = _around(tokenizer)
    prompts = []
    for index in range(count):
        body: list[int] = []
        while len(body) < length:
            body += tokenizer(TEXT.format(n=30 + 3 * index), add_special_tokens=False)["input_ids"]
        room = length - len(before) - len(after)
        prompts.append(before + body[:room] + after if room > 0 else body[:length])
    return prompts


def early_stop_ids(vocab_size: int, mean_tokens: int, seed: int) -> set[int]:
    """A random share of 1 / mean_tokens of the vocabulary: with near-uniform logits samples end after about
    mean_tokens."""
    order = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))
    return set(order[: max(1, vocab_size // mean_tokens)].tolist())


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all parameters, tied ones once."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def weight_bytes_read(model: PreTrainedModel) -> int:
    """Bytes of weights one decode step reads: all but an input embedding that is not the head too, of which a few rows
    are gathered."""
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    return weight_bytes(model) - (0 if embedding is head else embedding.numel() * embedding.element_size())


def kv_bytes_per_token(model: PreTrainedModel) -> int:
    """Keys and values of one token in all layers."""
    return KVShape.of(model.config).page_bytes(1, model.dtype)


def machine(device: torch.device) -> dict[str, Any]:
    """What a record says of where it was measured: `device` and `versions`."""
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "python": sys.version.split()[0]}
    return {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu", "versions": versions}


def _around(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Ids the chat template puts before and after a question; none without a template."""
    if tokenizer.chat_template is None:
        return [], []
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": MARK}], tokenize=False, add_generation_prompt=True
    )
    before, _, after = text.partition(MARK)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, after))
    return before, after


def random_sample(
    place: tuple[int, int], prompt_ids: np.ndarray, length: int, vocab: int, generator: np.random.Generator
) -> TrainingSample:
    """Sample (prompt_index, sample_index) with a response of random tokens."""
    return TrainingSample(
        prompt_index=place[0],
        sample_index=place[1],
        prompt_ids=prompt_ids,
        response_ids=generator.integers(0, vocab, length).astype(np.int32),
        advantages=(float(generator.normal()),),
        engine_logprobs=np.zeros(length, np.float32),
        reference=None,
    )

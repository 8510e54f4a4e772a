"""The paper's length predictor (section 4.2): a BERT regressor over the prompt and a sample's first k tokens."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.model.hub import cached_only

BATCH = 32  # pseudo-prompts in one forward
MAX_LOG_LENGTH = 20.0  # a bad prediction stays finite, so that schedules can add lengths up


class BertLengthPredictor:
    """A sequence classifier with one output, the log of the response length in tokens; frozen while sampling.

    `seconds_spent` and `num_predicted` count what `predict` took and gave since construction.
    """

    def __init__(
        self, folder: str, device: torch.device | str = "cpu", *, setting: str = "rollout.predictor_path"
    ) -> None:
        """`folder`: model and tokenizer as save_pretrained writes them. ValueError, naming `setting`, when they cannot
        be loaded."""
        self.model, self.tokenizer = load_encoder(folder, setting)
        self.model.to(device).eval()  # type: ignore[arg-type]  # transformers' to() hides what it takes
        self.max_tokens = window_of(self.model, self.tokenizer)
        self.seconds_spent = 0.0
        self.num_predicted = 0

    def predict(self, prompt: str, prefixes: list[str]) -> list[float]:
        """Expected tokens of every sample, from the pseudo-prompt [prompt; its first k tokens], cut from the left to
        fit."""
        started = time.perf_counter()
        logs = log_lengths(self.model, self.tokenizer, [prompt + prefix for prefix in prefixes], self.max_tokens)
        lengths = logs.nan_to_num(nan=0.0).clamp(0, MAX_LOG_LENGTH).exp().tolist()
        self.seconds_spent += time.perf_counter() - started
        self.num_predicted += len(prefixes)
        return lengths


def load_encoder(folder: str, setting: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An encoder with a one-number head (a fresh one where it has none, as for a plain BERT) and its tokenizer, which
    cuts from the left.

    `folder`: a Hugging Face folder or hub name. ValueError, naming `setting`, when it cannot be had or cannot pad.
    """
    local = cached_only(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left", local_files_only=local)
        where = {"local_files_only": local, "adapter_kwargs": {"local_files_only": local}}  # as in model/loading.py
        model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32, **where)
    except (OSError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: a head of another shape
        reason = " ".join(str(error).split())[:160]
        kind = "here" if Path(folder).exists() else "of that name (a local folder does not exist)"
        raise ValueError(f"{setting}={folder}: no sequence classifier with a tokenizer {kind} ({reason})") from None
    if tokenizer.pad_token_id is None:
        raise ValueError(f"{setting}={folder}: its tokenizer has no padding token")
    return model, tokenizer


def window_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Most tokens of one input, special tokens included."""
    positions = getattr(model.config, "max_position_embeddings", None)  # encoders with relative positions have none
    return min(tokenizer.model_max_length, positions or tokenizer.model_max_length)


def check_window(window: int, tokenizer: PreTrainedTokenizerBase, ks: list[int], setting: str) -> None:
    """ValueError, naming `setting`, when an input of `window` tokens has no room for the most first tokens of `ks` and
    the special tokens."""
    special = tokenizer.num_special_tokens_to_add()
    if window < max(ks) + special:
        wanted = f"the first {max(ks)} tokens and {special} special ones need {max(ks) + special}"
        most = f"the most first tokens that fit are {window - special}" if window > special else "take a larger one"
        raise ValueError(f"{setting}: the input takes {window} tokens, but {wanted}; {most}")


def encode(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_tokens: int, device: torch.device | str
) -> dict[str, Tensor]:
    """A padded batch [n, <= max_tokens]. A text that is too long loses its start, never its end or the special tokens
    around it."""
    return tokenizer(texts, padding=True, truncation=True, max_length=max_tokens, return_tensors="pt").to(device)


@torch.inference_mode()
def log_lengths(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: list[str], max_tokens: int
) -> Tensor:
    """The head's output for every text, [n] float32 on the CPU, BATCH texts at a time."""
    if not texts:
        return torch.empty(0)
    outputs = []
    for start in range(0, len(texts), BATCH):
        outputs.append(
            model(**encode(tokenizer, texts[start : start + BATCH], max_tokens, model.device)).logits[:, 0].float()
        )
    return torch.cat(outputs).cpu()

"""The paper's length predictor (section 4.2): a BERT regressor over the prompt and a sample's first k tokens."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BatchEncoding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from infsample_rl.model.hub import cached_only

BATCH = 32  # pseudo-prompts in one forward
MAX_LOG_LENGTH = 20.0  # a bad prediction stays finite, so that schedules can add lengths up


class BertLengthPredictor:
    """A sequence classifier with one output, the log of the response length in tokens; frozen while sampling."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """`model`: a sequence classifier with one label. `tokenizer`: one that pads."""
        self.model, self.tokenizer = model.eval(), tokenizer
        most = tokenizer.model_max_length  # encoders with relative positions have no other bound
        self.max_tokens = min(most, getattr(model.config, "max_position_embeddings", None) or most)
        self.seconds_spent = 0.0  # in `predict`

    @classmethod
    def load(
        cls, folder: str, device: torch.device | str = "cpu", *, setting: str = "rollout.predictor_path"
    ) -> BertLengthPredictor:
        """`folder`: model and tokenizer as save_pretrained writes them, or a hub name; a plain encoder gets a fresh
        head. ValueError, naming `setting`, when they cannot be had or the tokenizer cannot pad."""
        local = cached_only(folder)
        try:
            # a text that is too long loses its start, never its end or the special tokens around it
            tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side="left", local_files_only=local)
            where = {"local_files_only": local, "adapter_kwargs": {"local_files_only": local}}  # as in model/loading.py
            model = AutoModelForSequenceClassification.from_pretrained(
                folder, num_labels=1, dtype=torch.float32, **where
            )
        except (OSError, ValueError, KeyError, RuntimeError) as error:  # RuntimeError: a head of another shape
            reason = " ".join(str(error).split())[:160]
            kind = "here" if Path(folder).exists() else "of that name (a local folder does not exist)"
            raise ValueError(f"{setting}={folder}: no sequence classifier with a tokenizer {kind} ({reason})") from None
        if tokenizer.pad_token_id is None:
            raise ValueError(f"{setting}={folder}: its tokenizer has no padding token")
        return cls(model.to(device), tokenizer)

    def predict(self, prompt: str, prefixes: list[str]) -> list[float]:
        """Expected tokens of every sample, from the pseudo-prompt [prompt; its first k tokens]."""
        started = time.perf_counter()
        logs = self.log_lengths([prompt + prefix for prefix in prefixes])
        lengths = logs.nan_to_num(nan=0.0).clamp(0, MAX_LOG_LENGTH).exp().tolist()
        self.seconds_spent += time.perf_counter() - started
        return lengths

    def check_window(self, ks: list[int], setting: str) -> None:
        """ValueError, naming `setting`, when the input has no room for the most first tokens of `ks` and the special
        tokens."""
        special = self.tokenizer.num_special_tokens_to_add()
        if self.max_tokens < max(ks) + special:
            raise ValueError(
                f"{setting}: the input takes {self.max_tokens} tokens, but the first {max(ks)} tokens and {special} "
                f"special ones need {max(ks) + special}"
            )

    def encode(self, texts: list[str]) -> BatchEncoding:
        """A padded batch [n, <= max_tokens]."""
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=self.max_tokens, return_tensors="pt")
        return batch.to(self.model.device)

    @torch.inference_mode()
    def log_lengths(self, texts: list[str]) -> Tensor:
        """The head's output for every text, [n] float32 on the CPU, BATCH texts at a time."""
        batches = [self.encode(texts[start : start + BATCH]) for start in range(0, len(texts), BATCH)]
        return torch.cat([self.model(**batch).logits[:, 0].float().cpu() for batch in batches])

"""Reward `model:PATH`: the score a Hugging Face sequence classifier with one label gives to prompt and response."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer, PretrainedConfig

from infsample_rl.config import DTYPES, RewardFunctionConfig
from infsample_rl.data.rows import one_line
from infsample_rl.model.hub import cached_only
from infsample_rl.reward.functions import MODEL_PREFIX

# what `kwargs` may hold; batch_tokens: most padded tokens of one forward pass, a longer text goes alone
DEFAULTS = {"dtype": "float32", "trust_remote_code": False, "batch_tokens": 16384}


def model_settings(function: RewardFunctionConfig) -> dict[str, Any]:
    """The settings in kwargs; ValueError for an unknown one or an unknown dtype."""
    settings = DEFAULTS | function.kwargs
    for name in settings:
        if name not in DEFAULTS:
            raise ValueError(
                f"reward.functions: {function.name} takes no setting {name!r} in kwargs; it takes {', '.join(DEFAULTS)}"
            )
    if settings["dtype"] not in DTYPES:
        raise ValueError(
            f"reward.functions: dtype of {function.name} must be one of {', '.join(DTYPES)}, got {settings['dtype']!r}"
        )
    return settings


def check_model(function: RewardFunctionConfig) -> PretrainedConfig:
    """The model's config; ValueError in one line when there is none or it has more than one label."""
    path = function.name.removeprefix(MODEL_PREFIX)
    trusted = model_settings(function)["trust_remote_code"]
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trusted, local_files_only=cached_only(path))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"reward.functions: {function.name}: no model config there; give a Hugging Face folder or hub name "
            f"({one_line(error)[:160]})"
        ) from None
    if config.num_labels != 1:
        raise ValueError(
            f"reward.functions: {function.name} has {config.num_labels} labels; give a sequence classifier with "
            "num_labels=1"
        )
    return config


class RewardModel:
    """A sequence classifier on its own device. Scores of a batch equal scores one by one, to rounding."""

    def __init__(self, function: RewardFunctionConfig, device: str):
        """ValueError as `check_model`."""
        self.config = check_model(function)
        path, settings = function.name.removeprefix(MODEL_PREFIX), model_settings(function)
        where = {"trust_remote_code": settings["trust_remote_code"], "local_files_only": cached_only(path)}
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path, **where)
            model, loading = AutoModelForSequenceClassification.from_pretrained(
                path,
                dtype=getattr(torch, settings["dtype"]),
                output_loading_info=True,
                adapter_kwargs={"local_files_only": where["local_files_only"]},
                device_map=None if device == "cpu" else {"": device},  # read straight onto a GPU
                **where,
            )
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"reward.functions: {function.name}: no sequence classifier and tokenizer could be loaded "
                f"({one_line(error)[:160]})"
            ) from None
        if loading["missing_keys"]:
            missing = ", ".join(sorted(loading["missing_keys"])[:3])
            raise ValueError(f"reward.functions: {function.name} is no trained reward model: its files lack {missing}")
        self.model = model.eval()
        self.device, self.batch_tokens = device, settings["batch_tokens"]
        text_config = self.config.get_text_config()
        most = self.tokenizer.model_max_length
        self.max_tokens = min(most, getattr(text_config, "max_position_embeddings", most))

    @torch.inference_mode()
    def score(self, messages: list[dict[str, Any]], responses: list[str]) -> tuple[list[float | None], list[str]]:
        """(scores, problems) of responses to one prompt; None with a problem for a text above the model's longest and
        for a score not finite."""
        rows = [self._encode(messages, response) for response in responses]
        scores: list[float | None] = [None] * len(rows)
        sizes = [len(ids) for ids, _ in rows]
        too_long = "prompt and response are {} tokens, the model takes {}"
        problems = [too_long.format(size, self.max_tokens) if size > self.max_tokens else "" for size in sizes]
        fitting = sorted((index for index, problem in enumerate(problems) if not problem), key=lambda i: -sizes[i])
        while fitting:
            count = max(1, self.batch_tokens // max(1, sizes[fitting[0]]))
            batch, fitting = fitting[:count], fitting[count:]
            for index, value in zip(batch, self._forward([rows[index] for index in batch]).tolist(), strict=True):
                scores[index] = value if math.isfinite(value) else None
                problems[index] = "" if math.isfinite(value) else f"returned {value}"
        return scores, problems

    def _encode(self, messages: list[dict[str, Any]], response: str) -> tuple[list[int], list[int]]:
        """(token ids, token types): by the model's own chat template, else as the pair (prompt, response)."""
        if self.tokenizer.chat_template:
            chat = [*messages, {"role": "assistant", "content": response}]
            text = self.tokenizer.apply_chat_template(chat, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            return ids, [0] * len(ids)
        prompt = "\n\n".join(message["content"] for message in messages)
        encoded = self.tokenizer(prompt, response, return_token_type_ids=True)
        return encoded["input_ids"], encoded["token_type_ids"]

    def _forward(self, rows: list[tuple[list[int], list[int]]]) -> Tensor:
        """Scores [rows] in float32, padded on the right."""
        pad = self._padding_id(rows)
        longest = max(len(ids) for ids, _ in rows)
        inputs = {
            "input_ids": [ids + [pad] * (longest - len(ids)) for ids, _ in rows],
            "attention_mask": [[1] * len(ids) + [0] * (longest - len(ids)) for ids, _ in rows],
        }
        if "token_type_ids" in self.tokenizer.model_input_names:
            inputs["token_type_ids"] = [types + [0] * (longest - len(types)) for _, types in rows]
        logits = self.model(**{name: torch.tensor(value, device=self.device) for name, value in inputs.items()}).logits
        return logits.float().reshape(len(rows))

    def _padding_id(self, rows: list[tuple[list[int], list[int]]]) -> int:
        """The model's padding id. One without gets an id that no row holds: decoders score the last token that is not
        padding."""
        configured = self.config.get_text_config().pad_token_id
        if configured is not None:
            return configured
        used = {token for ids, _ in rows for token in ids}
        candidates = [self.tokenizer.pad_token_id, *range(len(used) + 1)]
        pad = next(token for token in candidates if token is not None and token not in used)
        self.model.config.get_text_config().pad_token_id = pad
        return pad

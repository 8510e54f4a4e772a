"""The reference policy as reference workers and learner ranks load it: frozen, in the model's dtype."""

from __future__ import annotations

import torch

from infsample_rl.config import Config
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy, packed_policy


def load_frozen_policy(config: Config, device: torch.device | str) -> PackedPolicy:
    """reference.path, or the policy the run starts from. ValueError when the policy's tokenizer has ids it does not
    know."""
    lm = load_model(config.model, device, path=config.reference.path or config.model.path)
    valid_vocab, rows = len(load_tokenizer(config.model)), lm.get_output_embeddings().weight.shape[0]
    if config.reference.path and rows < valid_vocab:
        raise ValueError(
            f"reference.path={config.reference.path} has a vocabulary of {rows} ids, the policy's tokenizer has "
            f"{valid_vocab}"
        )
    return packed_policy(config, lm, valid_vocab).requires_grad_(False)

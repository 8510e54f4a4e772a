"""What the engine and the learner need of a model, as far as its config tells."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig

STATE_SPACE_MODELS = (
    *("bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "lfm2", "mamba", "mamba2", "nemotron_h"),
    *("recurrent_gemma", "rwkv", "zamba", "zamba2"),
)
LOGIT_SCALES = ("logit_scale", "logits_scaling")


def check_full_attention(config: PretrainedConfig) -> None:
    """ValueError for a model with a layer that mixes tokens other than by plain full attention, or that changes its
    logits after the head. A scale of 1 changes nothing; a cap of 1 does."""
    settings = config.to_dict()
    kinds = sorted(set(settings.get("layer_types") or []) - {"full_attention"})
    window = settings.get("sliding_window") if settings.get("use_sliding_window", True) else None
    scales = [name for name in LOGIT_SCALES if settings.get(name) != 1]
    changes = ("attn_logit_softcapping", "final_logit_softcapping", *scales)
    changed = next((name for name in changes if settings.get(name)), None)
    if kinds:
        found = f"layers of type {', '.join(kinds)}"
    elif window is not None and not settings.get("layer_types"):
        found = f"sliding_window={window}"
    elif config.model_type in STATE_SPACE_MODELS:
        found = "layers that keep a state"
    elif changed:
        found = f"{changed}={settings[changed]}"
    else:
        return
    raise ValueError(
        f"model type {config.model_type} has {found}; only full attention in every layer, and logits as the head gives "
        "them, can be sampled from and trained: take e.g. Llama, Qwen2 or Qwen3"
    )


def context_of(architecture: PretrainedConfig) -> int | None:
    """Most tokens of a sequence; None: no limit. With longrope as many as the short factors are for: transformers takes
    the factors of all sequences of a call by the longest, so beyond that a sample would depend on what decodes beside
    it."""
    context = getattr(architecture, "max_position_embeddings", None)  # not in every family's dictionary
    rope = getattr(architecture, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return context
    return (
        rope.get("original_max_position_embeddings")
        or getattr(architecture, "original_max_position_embeddings", None)
        or context
    )


def last_hidden_size(architecture: PretrainedConfig) -> int:
    """Width of the last hidden state, which the head takes: some of OPT project it to that of the embedding."""
    return getattr(architecture, "word_embed_proj_dim", None) or architecture.hidden_size


@dataclass(frozen=True, kw_only=True)
class KVShape:
    """Keys and values of a model: KVShape(num_layers=28, num_kv_heads=8, head_dim=128)."""

    num_layers: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, config: PretrainedConfig) -> KVShape:
        """From a model's config; of one of several modalities, from its text part.

        Read by attribute: families that use other names (JetMoe's kv_channels is its head_dim) map these to them, but
        their dictionaries do not.
        """
        text = config.get_text_config()
        heads = text.num_attention_heads
        return cls(
            num_layers=text.num_hidden_layers,
            num_kv_heads=getattr(text, "num_key_value_heads", None) or heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        )

    def page_bytes(self, page_size: int, dtype: torch.dtype) -> int:
        """Bytes of a page of `page_size` tokens in all layers, stored as `dtype`.

        A dtype of 8 bits has bfloat16 scales for every head: of a page's keys one a channel, of values one a token.
        Qwen3-1.7B, 16 tokens: 1,835,008 in bfloat16, 112 KiB a token; 982,016 in int8, of which 64,512 are
        scales.
        """
        of_head = self.head_dim + page_size if dtype.itemsize == 1 else 0
        scales = self.num_layers * self.num_kv_heads * of_head * torch.bfloat16.itemsize
        return 2 * self.num_layers * page_size * self.num_kv_heads * self.head_dim * dtype.itemsize + scales

"""How much KV a model keeps of a token, from its config alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PretrainedConfig


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
        """Bytes of a page of `page_size` tokens in all layers, stored as `dtype`; one of 8 bits has a float32 scale for the
        keys and the values of every head.

        Of Qwen3-1.7B, 16 tokens: 1,835,008 in bfloat16, 112 KiB a token; 919,296 in int8, of which 1,792 are scales.
        """
        scales = 2 * self.num_layers * self.num_kv_heads * torch.float32.itemsize if dtype.itemsize == 1 else 0
        return 2 * self.num_layers * page_size * self.num_kv_heads * self.head_dim * dtype.itemsize + scales

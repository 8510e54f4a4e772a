"""Whether a model can be decoded here: what attention over a split KV pool asks of it."""

from __future__ import annotations

from transformers import PreTrainedModel

from infsample_rl.model.architecture import check_full_attention


def check_architecture(model: PreTrainedModel) -> None:
    """ValueError when its attention cannot be split into prompt and response parts here."""
    check_full_attention(model.config)
    if getattr(model.config, "kv_lora_rank", None):
        found = "has kv_lora_rank, which is not supported"
    elif model.get_output_embeddings().bias is not None:
        found = "has a head with a bias, which is not supported"
    elif not type(model)._supports_attention_backend:
        found = "does not call transformers' attention interface"
    else:
        return
    raise ValueError(f"model type {model.config.model_type} {found}; take e.g. Llama, Qwen2 or Qwen3")


def check_kv_dtype(kv_dtype: str, capability: tuple[int, int] | None, *, deterministic: bool) -> None:
    """Raise ValueError for a rollout.kv_dtype that does not work with deterministic steps or on a GPU of that compute
    capability (None: no GPU)."""
    if kv_dtype != "auto" and deterministic:
        raise ValueError(
            f"rollout.kv_dtype must be auto with run.deterministic=true, got {kv_dtype}: KV that is rounded need not "
            "repeat bitwise"
        )
    if kv_dtype == "fp8" and capability is not None and capability < (8, 9):
        found = f"{capability[0]}.{capability[1]}"
        raise ValueError(
            f"rollout.kv_dtype=fp8 needs a GPU of compute capability 8.9 or above, this one has {found}; take "
            "rollout.kv_dtype=int8"
        )

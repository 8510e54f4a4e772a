"""Whether a model can be decoded here: what attention over a split KV pool asks of it."""

from __future__ import annotations

from transformers import PreTrainedModel

from infsample_rl.model.packed_attention import STATE_SPACE_MODELS, changed_logits


def check_architecture(model: PreTrainedModel) -> None:
    """ValueError when its attention cannot be split into prompt and response parts here."""
    settings = model.config.to_dict()
    kinds = sorted(set(settings.get("layer_types") or []) - {"full_attention"})
    uses_window = settings.get("sliding_window") is not None and settings.get("use_sliding_window", True)
    unsupported = ("attn_logit_softcapping", *changed_logits(settings), "kv_lora_rank")
    if kinds or (uses_window and not settings.get("layer_types")):
        found = f"layer types {', '.join(kinds)}" if kinds else f"sliding_window={settings['sliding_window']}"
        found = f"has {found}; only full attention in every layer works"
    # in 16 bits the comparison of its own modules may not tell
    elif settings["model_type"] in STATE_SPACE_MODELS:
        found = "has layers that keep a state"
    elif set_names := [name for name in unsupported if settings.get(name)]:
        found = f"has {set_names[0]}, which is not supported"
    elif model.get_output_embeddings().bias is not None:
        found = "has a head with a bias, which is not supported"
    elif not type(model)._supports_attention_backend:
        found = "does not call transformers' attention interface"
    else:
        return
    raise ValueError(f"model type {settings['model_type']} {found}; take e.g. Llama, Qwen2 or Qwen3")


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

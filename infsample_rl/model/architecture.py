"""What the engine and the learner need of a model, as far as its config tells."""

from __future__ import annotations

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

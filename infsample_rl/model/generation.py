"""The generation settings that a model comes with: its stop ids are taken, and what else they would change is told."""

from __future__ import annotations

from pathlib import Path

from transformers import GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from infsample_rl.config import ModelConfig, RolloutConfig
from infsample_rl.model.hub import cached_only, not_found

_OURS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "suppress_tokens": "bad_token_ids",
}
# Settings of theirs that no setting here matches, with the value at which each does nothing.
_WITHOUT_MATCH = {
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
}


def load_generation_config(model: ModelConfig, architecture: PretrainedConfig) -> GenerationConfig:
    """generation_config.json of model.path; without one, what the model's config implies, as transformers does.
    ValueError for one that is there and damaged, since its stop ids would be missed."""
    try:
        generation = GenerationConfig.from_pretrained(model.path, local_files_only=cached_only(model.path))
        if not all(isinstance(end, int) for end in _ends(generation)):
            raise TypeError(f"eos_token_id must be an id or a list of ids, got {generation.eos_token_id!r}")
        return generation
    except Exception as error:
        if (Path(model.path) / GENERATION_CONFIG_NAME).is_file():
            raise ValueError(not_found("model.path", model.path, GENERATION_CONFIG_NAME, error)) from None
        return GenerationConfig.from_model_config(architecture)


def unused_generation_settings(generation: GenerationConfig, rollout: RolloutConfig) -> str | None:
    """One line on what of the model's own settings differs from `rollout` and how to take it; None when nothing
    does."""
    theirs = {name: value for name, value in generation.to_dict().items() if value is not None}
    taken = [
        f"rollout.{ours}={str(theirs[name]).replace(' ', '')}"
        for name, ours in _OURS.items()
        if name in theirs and theirs[name] != getattr(rollout, ours)
    ]
    others = [
        f"{name}={theirs[name]}" for name, neutral in _WITHOUT_MATCH.items() if theirs.get(name, neutral) != neutral
    ]
    parts = [f"to take them write {' '.join(taken)}"] if taken else []
    parts += [f"there is no setting for {', '.join(others)}"] if others else []
    return "; ".join(["the model's own generation settings are not used", *parts]) if parts else None


def stop_ids_of(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase, extra: list[int]) -> set[int]:
    """Ids that end a sample: the union of the generation config's, the tokenizer's end token and the user's own."""
    return {*extra, *_ends(generation)} | ({tokenizer.eos_token_id} - {None})


def _ends(generation: GenerationConfig | None) -> list[int]:
    ends = None if generation is None else generation.eos_token_id
    return ends if isinstance(ends, list) else [] if ends is None else [ends]

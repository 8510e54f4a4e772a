"""Predicted lengths of recorded samples by every predictor, for each k: what `bench.predictor` compares."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from infsample_rl.model.packed_attention import use_packed_attention
from infsample_rl.model.packing import pack_row
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TextGroup
from infsample_rl.rollout.length_prediction.probe import LengthProbe
from infsample_rl.rollout.length_prediction.recordings import Recording


@dataclass(kw_only=True)
class Predictions:
    """What one predictor says of the held-out prompts."""

    # for each k and prompt [G] tokens, NaN: ended within k
    by_k: dict[int, list[np.ndarray]] = field(default_factory=dict)
    # for each k seconds of one prediction, a prompt's samples together; the median over prompts, as other work may
    # disturb some
    seconds: dict[int, float | None] = field(default_factory=dict)
    orders: bool = True  # whether it can order the samples of a prompt


def alive(lengths: Iterable[int], k: int) -> np.ndarray:
    """[G] bool: samples that still decode after k tokens."""
    return np.asarray(list(lengths)) > k


def constant_predictions(training: list[Recording], held: list[Recording], ks: list[int]) -> Predictions:
    """`none`: the geometric mean of the training samples longer than k, for all."""
    found = Predictions(orders=False)
    everything = np.concatenate([recording.lengths for recording in training]).astype(float)
    for k in ks:
        longer = everything[everything > k]
        mean = float(np.exp(np.log(longer).mean())) if len(longer) else float(k + 1)
        found.by_k[k] = [np.where(alive(recording.lengths, k), mean, np.nan) for recording in held]
        found.seconds[k] = None
    return found


def oracle_predictions(held: list[Recording], ks: list[int]) -> Predictions:
    """`oracle`: the true lengths."""
    lengths = [np.asarray(recording.lengths, float) for recording in held]
    return Predictions(
        by_k={k: [np.where(values > k, values, np.nan) for values in lengths] for k in ks},
        seconds=dict.fromkeys(ks),
    )


def bert_predictions(predictor: BertLengthPredictor, held: list[TextGroup], ks: list[int]) -> Predictions:
    """`bert`: a trained predictor, a prompt's samples in one call as in the engine."""
    found = Predictions()
    for k in ks:
        found.by_k[k], seconds = [], []
        for group in held:
            values = np.full(len(group.lengths), np.nan)
            here = [index for index, prefix in enumerate(group.prefixes[k]) if prefix is not None]
            if here:
                before = predictor.seconds_spent
                values[here] = predictor.predict(group.prompt, [str(group.prefixes[k][index]) for index in here])
                seconds.append((predictor.seconds_spent - before) / len(here))
            found.by_k[k].append(values)
        found.seconds[k] = median(seconds) if seconds else None
    return found


def fit_probe(
    hidden_size: int, training: list[tuple[Recording, torch.Tensor]], ks: list[int], *, max_new_tokens: int, seed: int
) -> LengthProbe:
    """A probe that has seen the training prompts one after another, every sample at each k it outlived, fitted after
    each prompt.

    training: recordings with hidden states [G, len(ks), E]. Without decay: the policy that recorded them does not
    change.
    """
    probe = LengthProbe(hidden_size, max_new_tokens=max_new_tokens, seed=seed)
    for number, (recording, hidden) in enumerate(training):
        lengths, censored = torch.tensor(recording.lengths), torch.tensor(recording.censored)
        features, remaining, cut = [], [], []
        for place, k in enumerate(ks):
            here = lengths > k
            features.append(probe.features(hidden[here, place], torch.full((int(here.sum()),), k)))
            remaining.append(lengths[here] - k)
            cut.append(censored[here])
        probe.observe(torch.cat(features), torch.cat(remaining), torch.cat(cut), fold=number % 2)
        probe.fit()
    return probe


def probe_predictions(probe: LengthProbe, held: list[tuple[Recording, torch.Tensor]], ks: list[int]) -> Predictions:
    """`probe`: k tokens and what it predicts to be left. Its time is that of features and regression; the hidden state
    is there anyway."""
    found = Predictions()
    for place, k in enumerate(ks):
        found.by_k[k], seconds = [], []
        for recording, hidden in held:
            here = torch.tensor(recording.lengths) > k
            values = np.full(len(recording.lengths), np.nan)
            states, tokens = hidden[here, place], torch.full((int(here.sum()),), k)
            started = time.perf_counter()
            left = probe.predict(probe.features(states, tokens))
            seconds.append((time.perf_counter() - started) / max(1, len(left)))
            values[here.numpy()] = k + left.numpy()
            found.by_k[k].append(values)
        found.seconds[k] = median(seconds)
    return found


@torch.inference_mode()
def hidden_states(
    model: PreTrainedModel, prompt_ids: list[int], first_tokens: list[list[int]], ks: list[int]
) -> torch.Tensor:
    """[G, len(ks), E] float16 last hidden states after k tokens of recorded responses, zeros where one ended before k:
    one forward over the prompt and all first tokens, packed."""
    use_packed_attention(model)
    responses = [np.asarray(tokens[: max(ks)]) for tokens in first_tokens]
    row = pack_row([(np.asarray(prompt_ids), responses)], model.device)
    output = model.base_model(
        input_ids=row.input_ids, position_ids=row.position_ids, attention_mask=None, use_cache=False, cuts=row.cuts
    )
    states = output.last_hidden_state[0]
    found = torch.zeros(len(responses), len(ks), states.shape[-1], dtype=torch.float16)
    for index, (start, end) in enumerate(row.cuts.segments[0].responses):
        for place, k in enumerate(ks):
            if k <= end - start:
                found[index, place] = states[start + k - 1]
    return found

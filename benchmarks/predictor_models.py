"""Predicted lengths of recorded samples by every predictor, for each k, and what schedules take under them: what
`benchmarks.predictor` compares."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.intervals import Interval, bootstrap
from infsample_rl.model.packed_attention import use_packed_attention
from infsample_rl.model.packing import pack_row
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TextGroup
from infsample_rl.rollout.length_prediction.probe import LengthProbe
from infsample_rl.rollout.length_prediction.recordings import Recording
from infsample_rl.rollout.simulator import simulate


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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What every schedule is given: KV for `slots` responses of `cap` tokens and the prompt."""

    slots: int
    cap: int
    prompt_tokens: int
    page_size: int = 16  # tokens


def steps_of(schedule: str, lengths: list[int], memory: Memory, predicted: np.ndarray | None, k: int | None) -> int:
    """Steps of one prompt's samples.

    predicted: [G] total tokens, NaN for samples that ended within k; None: no predictions, all lengths equal. k None:
    predictions known from the start (`oracle`). Otherwise, as in the engine, `token_budget` learns a sample's when it
    has k tokens, and the fixed-slot schedules decode k tokens of all samples first, wait for the last, predict, and go
    on in that order; the prefixes' KV is taken to stay.
    """
    if predicted is None:
        equal = None if schedule == "token_budget" else [1.0] * len(lengths)
        return _run(lengths, schedule, memory, predicted=equal)
    if k is None:
        return _run(lengths, schedule, memory, predicted=[float(value) for value in predicted])
    if schedule == "token_budget":
        moments = [{} if np.isnan(value) else {k: float(value)} for value in predicted]
        return _run(lengths, schedule, memory, repredicted=moments)
    steps = _run([min(length, k) for length in lengths], "arrival", memory)
    left = [(length - k, float(value)) for length, value in zip(lengths, predicted, strict=True) if not np.isnan(value)]
    if left:
        steps += _run([length for length, _ in left], schedule, memory, predicted=[value for _, value in left])
    return steps


def compare(steps: list[int], oracle: list[int], none: list[int], seed: int) -> dict[str, Interval | None]:
    """Mean steps of a prompt, and steps over those with true lengths and over those without predictions, with
    intervals."""
    return {
        "steps": bootstrap(steps, [1] * len(steps), seed),
        "steps_over_oracle": bootstrap(steps, oracle, seed),
        "steps_over_none": bootstrap(steps, none, seed),
    }


def _run(lengths: list[int], schedule: str, memory: Memory, **predictions: object) -> int:
    options = {"slots": memory.slots, "page_size": memory.page_size, "prompt_tokens": memory.prompt_tokens}
    options |= {"parks": True} if schedule == "token_budget" else {}  # as the engine does by default
    return simulate(lengths, schedule, max_new_tokens=memory.cap, **options, **predictions).running_steps

"""Fitting the bert length predictor, a pretrained encoder with a one-number head, to recorded prompts with the first k
tokens, as text, and the log of the length of every response."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infsample_rl.config.command_line import option
from infsample_rl.model.hub import cached_only
from infsample_rl.rollout.length_prediction.accuracy import mean_accuracy, prompt_accuracy
from infsample_rl.rollout.length_prediction.bert import MAX_LOG_LENGTH, BertLengthPredictor
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings

WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # share of the updates in which the learning rate rises
MAX_GRAD_NORM = 1.0

Example = tuple[str, int, bool]  # pseudo-prompt, length in tokens, censored


@dataclass(kw_only=True)
class TrainOptions:
    """What is fitted to what, and how."""

    recordings: list[str] = option([], "files of scripts/record_completions.py")
    encoder: str = option("", "pretrained encoder, a Hugging Face folder or hub name")
    out: str = option("", "folder to write; it must not hold files yet")
    tokenizer: str | None = option(None, "the policy's tokenizer; none: that of the recorded model, if a folder")
    prefix_tokens: list[int] = option(
        [16], "k; of several, every sample takes one at random in every epoch: one predictor for all", low=1
    )
    epochs: int = option(4, "passes over the training prompts", low=1)
    lr: float = option(1e-4, "highest learning rate", above=0, high=1)
    batch: int = option(32, "samples in one update", low=1)
    seed: int = option(0, "of the split, the order and the head", low=0)
    held_out: float = option(0.2, "share of the prompts held out", above=0, high=0.9)
    samples: int | None = option(None, "samples of a prompt in one epoch, drawn anew in each; none: all", low=1)
    window: int | None = option(None, "most tokens of the encoder's input; none: what it can take", low=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class TextGroup:
    """One prompt's samples. Example: TextGroup(key="gsm8k|17", prompt="2+2=", prefixes={2: [" 4", None]}, lengths=[9,
    2], censored=[False, False])"""

    key: str  # the prompt's name: samples of equal keys are never split between training and held-out
    prompt: str
    # for each k the text of each sample's first k tokens; None for a sample that ended within them
    prefixes: dict[int, list[str | None]]
    lengths: list[int]
    censored: list[bool]


def read_groups(source: str, tokenizer: str | None, ks: list[int]) -> list[TextGroup]:
    """The prompts of a file of recordings. `tokenizer`: the policy's, a folder; None: the folder that each recording
    names as its model. ValueError in one line for a file that cannot be read or lacks what is needed."""
    recordings = read_recordings(source)
    loaded = {name: _load_tokenizer(tokenizer or name) for name in {recording.model for recording in recordings}}
    return [recording_group(recording, loaded[recording.model], ks, source) for recording in recordings]


def recording_group(
    recording: Recording, tokenizer: PreTrainedTokenizerBase, ks: list[int], source: str = "recordings"
) -> TextGroup:
    """A recording with its first tokens as text. ValueError when it has no prompt, fewer first tokens than k, or ids
    that the tokenizer lacks."""
    where = f"{source}: the recording of {recording.prompt_id}"
    if recording.prompt is None or recording.first_tokens is None:
        missing = "prompt" if recording.prompt is None else "first_tokens"
        raise ValueError(
            f"{where} has no {missing}, which a predictor reads; record it with scripts/record_completions.py"
        )
    for length, tokens in zip(recording.lengths, recording.first_tokens, strict=True):
        if len(tokens) < min(length, max(ks)):
            raise ValueError(
                f"{where} has {len(tokens)} first_tokens of {length}; the longest prefix_tokens that works is "
                f"{len(tokens)}"
            )
    highest = max(max(tokens) for tokens in recording.first_tokens)
    if highest >= len(tokenizer):
        text = f"{where} has token {highest}, and the tokenizer has {len(tokenizer)}"
        raise ValueError(f"{text}: give the tokenizer of the model that was recorded, {recording.model}")
    samples = list(zip(recording.first_tokens, recording.lengths, strict=True))
    return TextGroup(
        key=recording.key,
        prompt=recording.prompt,
        prefixes={k: [str(tokenizer.decode(ids[:k])) if length > k else None for ids, length in samples] for k in ks},
        lengths=recording.lengths,
        censored=recording.censored,
    )


def held_out_keys(keys: Iterable[str], share: float, seed: int) -> set[str]:
    """Prompts to hold out: about `share` of them, at least one, never all; equal prompts and seeds, equal choice.
    ValueError for fewer than two prompts."""
    names = sorted(set(keys))
    if len(names) < 2:
        raise ValueError(f"the recordings hold {len(names)} prompt; two are needed, one of them held out")
    random.Random(seed).shuffle(names)
    return set(names[: min(len(names) - 1, max(1, round(share * len(names))))])


def split_groups(groups: list[TextGroup], held_out: float, seed: int) -> tuple[list[TextGroup], list[TextGroup]]:
    """(training, held-out) groups, split by prompt as `held_out_keys` says."""
    held = held_out_keys([group.key for group in groups], held_out, seed)
    return [group for group in groups if group.key not in held], [group for group in groups if group.key in held]


def _load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=cached_only(folder))
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:160]
        raise ValueError(
            f"tokenizer={folder}: no tokenizer could be loaded ({reason}); give the policy's folder"
        ) from None


def fit(
    predictor: BertLengthPredictor,
    training: list[TextGroup],
    held: list[TextGroup],
    options: TrainOptions,
    *,
    say: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Fit `predictor` in place, on its device, and leave it with the best epoch's weights; what each epoch came to,
    which `say` is told too."""
    from transformers import get_linear_schedule_with_warmup  # peft comes with it

    model, ks, order = predictor.model, options.prefix_tokens, np.random.default_rng(options.seed)
    predictor.max_tokens = min(predictor.max_tokens, options.window or predictor.max_tokens)
    predictor.tokenizer.model_max_length = predictor.max_tokens  # saved, so that later as much is read
    predictor.check_window(ks, f"window={options.window}, encoder={options.encoder}")
    held_examples = draw(held, ks, order)
    examples = list(itertools.chain(*draw(training, ks, order, options.samples)))
    _start_at_mean(predictor, examples)
    updates = options.epochs * -(-len(examples) // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
    schedule = get_linear_schedule_with_warmup(optimizer, int(WARM_UP * updates), updates)
    epochs: list[dict[str, Any]] = []
    best: dict[str, Tensor] = {}
    for number in range(1, options.epochs + 1):
        started, losses = time.perf_counter(), []
        drawn = list(itertools.chain(*draw(training, ks, order, options.samples)))
        order.shuffle(drawn)
        for start in range(0, len(drawn), options.batch):
            losses.append(_update(predictor, drawn[start : start + options.batch], optimizer))
            schedule.step()
        found = {"train_loss": float(np.mean(losses))} | evaluate(predictor, held_examples)
        epochs.append({"epoch": number} | found | {"seconds": time.perf_counter() - started})
        say(", ".join(f"{name} {value:.4g}" for name, value in epochs[-1].items() if value is not None))
        if found["held_out_loss"] <= min(epoch["held_out_loss"] for epoch in epochs):
            best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    model.eval()
    return epochs


def draw(
    groups: list[TextGroup], ks: list[int], generator: np.random.Generator, most: int | None = None
) -> list[list[Example]]:
    """Examples by prompt: of each all samples or `most` of them, each with one k that it outlives. ValueError where
    nobody outlives any."""
    found = []
    for group in groups:
        columns = [group.prefixes[k] for k in ks]
        prefixes = [[text for text in texts if text is not None] for texts in zip(*columns, strict=True)]
        usable = [place for place, texts in enumerate(prefixes) if texts]
        examples = []
        for place in usable if most is None else generator.permutation(usable)[:most]:
            text = group.prompt + prefixes[place][generator.integers(len(prefixes[place]))]
            examples.append((text, group.lengths[place], group.censored[place]))
        found += [examples] if examples else []
    if not found:
        raise ValueError(f"no response is longer than prefix_tokens = {min(ks)}; take a smaller one")
    return found


def evaluate(predictor: BertLengthPredictor, prompts: list[list[Example]]) -> dict[str, Any]:
    """Mean loss and accuracy. ValueError when the outputs are not numbers."""
    predictor.model.eval()
    losses, found = [], []
    for examples in prompts:
        texts, lengths, censored = map(list, zip(*examples, strict=True))
        logs = predictor.log_lengths(texts)
        if not logs.isfinite().all():
            raise ValueError("training diverged: the encoder's output is not a number; take a lower lr")
        losses.append(censored_loss(logs, torch.tensor(lengths).log(), torch.tensor(censored)))
        found.append(prompt_accuracy(logs.clamp(0, MAX_LOG_LENGTH).exp().tolist(), lengths, censored))
    return {"held_out_loss": float(torch.cat(losses).mean())} | mean_accuracy(found)


def censored_loss(predicted: Tensor, target: Tensor, censored: Tensor) -> Tensor:
    """Huber loss of log lengths, [n] each; nothing for a censored sample predicted above what was seen of it."""
    error = predicted - target
    return F.huber_loss(torch.where(censored, error.clamp(max=0), error), torch.zeros_like(error), reduction="none")


def _update(predictor: BertLengthPredictor, batch: list[Example], optimizer: torch.optim.Optimizer) -> float:
    """One step on one batch; its mean loss before it."""
    model = predictor.model.train()
    texts, lengths, censored = map(list, zip(*batch, strict=True))
    outputs = model(**predictor.encode(texts)).logits[:, 0].float()
    targets = torch.tensor(lengths, device=model.device).log()
    loss = censored_loss(outputs, targets, torch.tensor(censored, device=model.device)).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    return float(loss.detach())


def _start_at_mean(predictor: BertLengthPredictor, examples: list[Example]) -> None:
    """Move the head's bias so that the first examples' mean is right: else the first epochs only find the scale."""
    layers = [layer for layer in predictor.model.modules() if isinstance(layer, nn.Linear) and layer.out_features == 1]
    if layers and layers[-1].bias is not None:
        first = predictor.log_lengths([text for text, _, _ in examples[:32]])
        wanted = float(np.log([length for _, length, _ in examples]).mean())
        with torch.no_grad():
            layers[-1].bias.add_(wanted - first.mean().item())

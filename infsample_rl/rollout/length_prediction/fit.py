"""Fitting the bert length predictor: a pretrained encoder with a one-number head, to the log of the response length."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config.command_line import option
from infsample_rl.rollout.length_prediction.accuracy import Accuracy, prompt_accuracy, summarize
from infsample_rl.rollout.length_prediction.bert import (
    MAX_LOG_LENGTH,
    check_window,
    encode,
    log_lengths,
    window_of,
)
from infsample_rl.rollout.length_prediction.training_data import TextGroup

WEIGHT_DECAY = 0.01
WARM_UP = 0.1  # share of the updates in which the learning rate rises
MAX_GRAD_NORM = 1.0
BUCKET = 16  # batches sorted by length together, so that little is padding


@dataclass(kw_only=True)
class TrainOptions:
    """What is fitted to what, and how."""

    recordings: list[str] = option(
        [], "recorded lengths, runs' completions.jsonl, or a hub data set of chats (lmsys/lmsys-chat-1m)"
    )
    encoder: str = option("", "pretrained encoder, a Hugging Face folder or hub name")
    out: str = option("", "folder to write; it must not hold files yet")
    tokenizer: list[str] = option(
        [], "the policy's tokenizer, one for all recordings or one for each; none: the recordings' model, if a folder"
    )
    prefix_tokens: list[int] = option(
        [16], "k; of several, every sample takes one at random in every epoch: one predictor for all", low=1
    )
    epochs: int = option(4, "passes over the training prompts", low=1)
    lr: float = option(1e-4, "highest learning rate")
    batch: int = option(32, "samples in one update", low=1)
    seed: int = option(0, "of the split, the order and the head", low=0)
    held_out: float = option(0.2, "share of the prompts held out")
    samples: int | None = option(None, "samples of a prompt in one epoch, drawn anew in each; none: all", low=1)
    max_prompts: int | None = option(None, "most prompts of one source; none: all, 100,000 chats", low=2)
    window: int | None = option(None, "most tokens of the encoder's input; none: what it can take", low=8)
    device: str = option("auto", "auto: cuda where there is one", choices=("auto", "cpu", "cuda"))
    threads: int | None = option(None, "CPU threads; none: torch's choice", low=1)


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one epoch came to."""

    number: int  # from 1
    train_loss: float
    held_out_loss: float
    accuracy: Accuracy  # of held-out samples
    seconds: float


def fit(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    training: list[TextGroup],
    held: list[TextGroup],
    options: TrainOptions,
) -> list[Epoch]:
    """Fit `model` in place and leave it with the best epoch's weights, in eval mode. Prints a line for every epoch."""
    device = "cuda" if options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available()) else "cpu"
    model.to(device)  # type: ignore[arg-type]  # transformers' to() hides what it takes
    window = input_window(model, tokenizer, options)
    tokenizer.model_max_length = window  # saved with the tokenizer, so that the predictor reads what was trained
    order = np.random.default_rng(options.seed)
    examples = _draw(training, options, np.random.default_rng(options.seed))
    _start_at_mean(model, tokenizer, examples, window)
    num_batches = -(-len(examples) // options.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda update: _lr_share(update, options.epochs * num_batches)
    )
    epochs, best = [], {}
    for number in range(1, options.epochs + 1):
        started = time.perf_counter()
        batches = _batches(_draw(training, options, order), options.batch, order)
        loss = sum(
            _update(model, tokenizer, batch, window, optimizer, schedule) * len(batch) for batch in batches
        ) / sum(map(len, batches))
        held_loss, accuracy = evaluate(model, tokenizer, held, options.prefix_tokens, window)
        epochs.append(
            Epoch(
                number=number,
                train_loss=loss,
                held_out_loss=held_loss,
                accuracy=accuracy,
                seconds=time.perf_counter() - started,
            )
        )
        print(epoch_line(epochs[-1], options.epochs), flush=True)
        if held_loss <= min(epoch.held_out_loss for epoch in epochs):
            best = {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(best)
    model.eval()
    return epochs


def input_window(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: TrainOptions) -> int:
    """Most tokens of the encoder's input. ValueError when the first k of a response do not fit."""
    window = min(window_of(model, tokenizer), options.window or sys.maxsize)
    check_window(
        window, tokenizer, options.prefix_tokens, "window" if options.window == window else f"encoder={options.encoder}"
    )
    return window


def check_lr(lr: float) -> None:
    """ValueError for a learning rate that cannot train."""
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be > 0 and finite, got {lr}; 1e-4 works for small encoders")


def _turns(groups: list[TextGroup], ks: list[int]) -> Iterator[tuple[TextGroup, Sequence[str | None]]]:
    """Each prompt with a k, its prefixes of so many tokens; None for samples that are not longer."""
    for turn in range(max(len(groups), len(ks))):
        group = groups[turn % len(groups)]
        yield group, group.prefixes[ks[turn % len(ks)]]


def check_held_out(held: list[TextGroup], ks: list[int]) -> None:
    if all(prefix is None for _, prefixes in _turns(held, ks) for prefix in prefixes):
        raise ValueError(f"no held-out response is longer than prefix_tokens = {min(ks)}; take a smaller one")


def evaluate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, groups: list[TextGroup], ks: list[int], window: int
) -> tuple[float, Accuracy]:
    """(mean loss, accuracy) over the samples longer than k; of several k and prompts every one takes its turn, since
    each epoch is evaluated.

    ValueError when the outputs are not numbers.
    """
    model.eval()
    losses, found = [], []
    for group, prefixes in _turns(groups, ks):
        alive = [index for index, prefix in enumerate(prefixes) if prefix is not None]
        if not alive:
            continue
        logs = log_lengths(model, tokenizer, [group.prompt + str(prefixes[index]) for index in alive], window)
        if not logs.isfinite().all():
            raise ValueError("training diverged: the encoder's output is not a number; take a lower lr")
        lengths, censored = [group.lengths[index] for index in alive], [group.censored[index] for index in alive]
        losses.append(censored_loss(logs, torch.tensor(lengths).log(), torch.tensor(censored)))
        found.append(prompt_accuracy(logs.clamp(0, MAX_LOG_LENGTH).exp().tolist(), lengths, censored))
    return float(torch.cat(losses).mean()), summarize(found)


def censored_loss(predicted: Tensor, target: Tensor, censored: Tensor) -> Tensor:
    """Huber loss of log lengths, [n] each; nothing for a censored sample predicted above what was seen of it."""
    error = predicted - target
    return F.huber_loss(torch.where(censored, error.clamp(max=0), error), torch.zeros_like(error), reduction="none")


def epoch_line(epoch: Epoch, epochs: int) -> str:
    """One epoch in words; '-' for what cannot be said, as the order within a prompt of chats with one answer."""
    accuracy = epoch.accuracy
    error = (
        f"{accuracy.log_error.value:.3f} ({accuracy.token_error.value:.0f} tokens)"
        if accuracy.log_error and accuracy.token_error
        else "-"
    )
    tau = f"{accuracy.tau.value:.3f}" if accuracy.tau else "-"
    losses = f"train loss {epoch.train_loss:.4f}, held-out loss {epoch.held_out_loss:.4f}"
    return (
        f"epoch {epoch.number} of {epochs}: {losses}, held-out |log ratio| {error}, Kendall tau {tau}, "
        f"{epoch.seconds:.0f} s"
    )


Example = tuple[str, float, bool]  # pseudo-prompt, log length, censored


def _draw(groups: list[TextGroup], options: TrainOptions, generator: np.random.Generator) -> list[Example]:
    """One epoch's examples: of every prompt all samples or `samples` of them, each with one k that it outlives."""
    examples = []
    for group in groups:
        usable = [
            index
            for index in range(len(group.lengths))
            if any(group.prefixes[k][index] is not None for k in options.prefix_tokens)
        ]
        drawn = usable if options.samples is None else generator.permutation(usable)[: options.samples]
        for index in drawn:
            prefixes = [text for text in (group.prefixes[k][index] for k in options.prefix_tokens) if text is not None]
            text = group.prompt + prefixes[generator.integers(len(prefixes))]
            examples.append((text, float(np.log(group.lengths[index])), group.censored[index]))
    if not examples:
        raise ValueError(f"no response is longer than prefix_tokens = {min(options.prefix_tokens)}; take a smaller one")
    return examples


def _batches(examples: list[Example], size: int, generator: np.random.Generator) -> list[list[Example]]:
    shuffled = [examples[index] for index in generator.permutation(len(examples))]
    batches = []
    for start in range(0, len(shuffled), BUCKET * size):
        bucket = sorted(shuffled[start : start + BUCKET * size], key=lambda example: len(example[0]))
        batches += [bucket[first : first + size] for first in range(0, len(bucket), size)]
    return [batches[index] for index in generator.permutation(len(batches))]


def _update(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    batch: list[Example],
    window: int,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LambdaLR,
) -> float:
    """One step on one batch; its mean loss before it."""
    model.train()
    texts, targets, censored = zip(*batch, strict=True)
    outputs = model(**encode(tokenizer, list(texts), window, model.device)).logits[:, 0].float()
    loss = censored_loss(
        outputs, torch.tensor(targets, device=model.device), torch.tensor(censored, device=model.device)
    ).mean()
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    schedule.step()
    return float(loss.detach())


def _lr_share(update: int, updates: int) -> float:
    """Linear warm-up, then linear to zero."""
    rising = max(1, int(WARM_UP * updates))
    return (update + 1) / rising if update < rising else max(0.0, (updates - update) / max(1, updates - rising))


def _start_at_mean(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, examples: list[Example], window: int
) -> None:
    """Move the head's bias so that the first examples' mean is right: else the first epochs only find the scale."""
    heads = [module for module in model.modules() if isinstance(module, nn.Linear) and module.out_features == 1]
    if heads and heads[-1].bias is not None:
        first = examples[: 2 * BUCKET]
        wanted = float(np.mean([target for _, target, _ in examples]))
        model.eval()
        with torch.no_grad():
            heads[-1].bias.add_(
                wanted - log_lengths(model, tokenizer, [text for text, _, _ in first], window).mean().item()
            )

"""Train the bert length predictor on recorded completions.

python -m infsample_rl train_predictor recordings=[FILES] encoder=NAME_OR_FOLDER out=FOLDER
prefix_tokens=16

Fits a pretrained encoder with a one-number head to the log of the response length. A response cut at the cap says only
that it is longer: its loss is one-sided, nothing where the prediction is above the cap. One line is printed for every
epoch, the epoch with the best loss on held-out prompts is kept, and `out` is a Hugging Face folder, for
rollout.predictor_path. Equal seeds give equal folders on one machine.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from infsample_rl.config.command_line import check_writable, run_with_options
from infsample_rl.rollout.length_prediction.bert import load_encoder
from infsample_rl.rollout.length_prediction.fit import TrainOptions, check_held_out, check_lr, fit
from infsample_rl.rollout.length_prediction.training_data import read_groups, split_groups


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 for bad input, said in one line."""
    return run_with_options(run, TrainOptions, arguments, usage=__doc__)


def run(options: TrainOptions) -> int:
    """As main()."""
    train(options)
    return 0


def train(options: TrainOptions) -> dict[str, Any]:
    """Train and save; how many prompts there were, and what every epoch came to. ValueError for what cannot work."""
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    tokenizers = options.tokenizer * len(options.recordings) if len(options.tokenizer) == 1 else options.tokenizer
    groups = []
    for index, source in enumerate(options.recordings):
        groups += read_groups(
            source, tokenizers[index] if tokenizers else None, options.prefix_tokens, options.max_prompts
        )
    training, held = split_groups(groups, options.held_out, options.seed)
    check_held_out(held, options.prefix_tokens)
    samples = sum(len(group.lengths) for group in training)
    print(f"{samples} samples of {len(training)} prompts for training, {len(held)} prompts held out", flush=True)
    torch.manual_seed(options.seed)
    model, tokenizer = load_encoder(options.encoder, "encoder")
    epochs = fit(model, tokenizer, training, held, options)
    best = min(epochs, key=lambda epoch: epoch.held_out_loss)
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(
        f"epoch {best.number} kept in {options.out}; use it with rollout.predictor=bert "
        f"rollout.predictor_path={options.out}",
        flush=True,
    )
    sizes = {"train_prompts": len(training), "held_out_prompts": len(held)}
    return sizes | {"best_epoch": best.number, "epochs": [asdict(epoch) for epoch in epochs]}


def _check(options: TrainOptions) -> None:
    for name in ("recordings", "encoder", "out"):
        if not options.__dict__[name]:
            raise ValueError(f"{name}= is missing; recordings=[FILES] encoder=NAME_OR_FOLDER out=FOLDER are needed")
    check_lr(options.lr)
    if not options.prefix_tokens:
        raise ValueError("prefix_tokens must name at least one k, as prefix_tokens=16")
    if len(options.tokenizer) not in (0, 1, len(options.recordings)):
        raise ValueError(
            f"tokenizer must be one folder or one for each of the {len(options.recordings)} recordings, got "
            f"{len(options.tokenizer)}"
        )
    out = Path(options.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"out={options.out} is there already and is not an empty folder; give a new one")
    check_writable(out, f"out={out}")


if __name__ == "__main__":
    sys.exit(main())

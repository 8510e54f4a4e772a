"""Train the bert length predictor on recorded completions.

python -m infsample_rl train_predictor recordings=[FILES] encoder=NAME_OR_FOLDER out=FOLDER prefix_tokens=16

Fits a pretrained encoder with a one-number head to the log of the response length. A response cut at the cap says only
that it is longer: its loss is one-sided, nothing where the prediction is above the cap. One line is printed for every
epoch, the epoch with the best loss on held-out prompts is kept, and `out` is a Hugging Face folder, for
rollout.predictor_path. Equal seeds give equal folders on one machine.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from infsample_rl.config.command_line import check_writable, run_with_options
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TrainOptions, fit, read_groups, split_groups


def main(arguments: list[str] | None = None) -> int:
    """The command; 2 for bad input, said in one line."""
    return run_with_options(run, TrainOptions, arguments, usage=__doc__)


def run(options: TrainOptions) -> int:
    """As main()."""
    train(options)
    return 0


def train(options: TrainOptions) -> dict[str, Any]:
    """Train and save; how many prompts there were, and what every epoch came to. ValueError for what cannot work."""
    for name in ("recordings", "encoder", "out"):
        if not options.__dict__[name]:
            raise ValueError(f"{name}= is missing; recordings=[FILES] encoder=NAME_OR_FOLDER out=FOLDER are needed")
    if not options.prefix_tokens:
        raise ValueError("prefix_tokens must name at least one k, as prefix_tokens=16")
    out = Path(options.out)
    if out.is_dir() and any(out.iterdir()):
        raise ValueError(f"out={out} is there already and is not an empty folder; give a new one")
    check_writable(out, f"out={out}")
    groups = []
    for source in options.recordings:
        groups += read_groups(source, options.tokenizer, options.prefix_tokens)
    training, held = split_groups(groups, options.held_out, options.seed)
    samples = sum(len(group.lengths) for group in training)
    print(f"{samples} samples of {len(training)} prompts for training, {len(held)} prompts held out", flush=True)
    torch.manual_seed(options.seed)
    predictor = BertLengthPredictor.load(
        options.encoder, "cuda" if torch.cuda.is_available() else "cpu", setting="encoder"
    )
    epochs = fit(predictor, training, held, options, say=partial(print, flush=True))
    best = min(epochs, key=lambda epoch: epoch["held_out_loss"])["epoch"]
    predictor.model.save_pretrained(out)
    predictor.tokenizer.save_pretrained(out)
    print(f"epoch {best} kept in {out}; use it with rollout.predictor=bert rollout.predictor_path={out}", flush=True)
    sizes = {"train_prompts": len(training), "held_out_prompts": len(held)}
    return sizes | {"best_epoch": best, "epochs": epochs}

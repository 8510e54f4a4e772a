"""Predicted lengths on recorded completions: the paper's bert beside our probe, and what their schedules then take.

python -m benchmarks.predictor recordings=[FILES] policy=FOLDER encoder=NAME_OR_FOLDER ks=[1,2,4,8,16,32] json=true

A share of each file's prompts is held out; everything is fitted on the others and measured on these. Rows, for each k:
  none    one length for all samples: the training samples' geometric mean
  bert    an encoder over prompt and first k tokens, one for all k, trained here
  probe   a regression on the policy's hidden state after k tokens, one for all k, fitted prompt after prompt
  oracle  the true lengths
Error: mean |log(predicted / length)| over samples that are longer than k and were not cut; Kendall's tau-b over all
samples of a prompt that are longer than k, averaged over prompts; steps of each schedule at equal KV memory; 95 %
bootstrap intervals over prompts. The held-out predictions at `write_k` go to
FILE_predicted.jsonl.gz in the output folder.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.intervals import Interval, bootstrap
from benchmarks.predictor_models import (
    Memory,
    Predictions,
    bert_predictions,
    compare,
    constant_predictions,
    fit_probe,
    hidden_states,
    oracle_predictions,
    probe_predictions,
    steps_of,
)
from benchmarks.predictor_report import draw_predictor, print_tables
from benchmarks.workload import TINY_POLICY
from infsample_rl.config import ModelConfig
from infsample_rl.config.command_line import check_writable, option, run_with_options
from infsample_rl.config.rollout import PREDICTED_SCHEDULES
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.rollout.length_prediction.accuracy import PromptAccuracy, prompt_accuracy
from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TrainOptions, fit, held_out_keys, recording_group, split_groups
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings

INNER_HELD_OUT = 0.15  # share of the training prompts that choose bert's best epoch


@dataclass(kw_only=True)
class PredictorOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of recorded completions, with prompt and first_tokens")
    policy: str = option(TINY_POLICY, "folder of the model that was recorded")
    encoder: str | None = option(
        None, "pretrained encoder that bert is trained from, a folder or hub name; none: no bert"
    )
    ks: list[int] = option([1, 2, 4, 8, 16, 32], "tokens decoded before the prediction", low=1)
    schedules: list[str] = option(
        ["sjf", "lpt", "infinite", "token_budget"],
        "what runs on the predictions",
        choices=(*PREDICTED_SCHEDULES, "token_budget"),
    )
    held_out: float = option(0.4, "share of the prompts held out", above=0, high=0.9)
    max_prompts: int | None = option(None, "first prompts of a file; none: all", low=2)
    seed: int = option(0, "of split, training and intervals", low=0)
    epochs: int = option(4, "of bert", low=1)
    samples: int | None = option(None, "samples of a prompt in one of bert's epochs; none: all", low=1)
    window: int | None = option(None, "most tokens of bert's input; none: what it can take", low=8)
    slots: int = option(4, "g: the KV memory is slots x the cap + the prompt", low=1)
    write_k: int = option(16, "k of the predictions that are written, one of ks", low=1)
    threads: int | None = option(None, "CPU threads; none: torch's choice", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")
    out: str = option("bench_out", "folder of figure, predictions and trained predictors")


def main() -> int:
    """Measure every recording; 2 for bad input, said in one line."""
    return run_with_options(run, PredictorOptions, usage=__doc__)


def run(options: PredictorOptions) -> int:
    """As main()."""
    _check(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    records = []
    for file in options.recordings:
        with contextlib.redirect_stdout(sys.stderr):  # of training, and of what libraries print when they are imported
            found = measure(Path(file), options)
        records += found
        if options.json:
            for record in found:
                print(json.dumps(record), flush=True)
    if not options.json:
        print_tables(records)
        print(f"figure: {draw_predictor(records, Path(options.out))}")
    return 0


def measure(file: Path, options: PredictorOptions) -> list[dict[str, Any]]:
    """All records of one file, predictor by predictor and k by k."""
    recordings = read_recordings(file)[: options.max_prompts]
    names = [recording.key for recording in recordings]
    name, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise ValueError(
            f"{file}: {name} is there {times} times; give every prompt of a file one line and a prompt_id of its own"
        )
    keys = held_out_keys(names, options.held_out, options.seed)
    training = [recording for recording in recordings if recording.key not in keys]
    held = [recording for recording in recordings if recording.key in keys]
    stem = file.name.split(".jsonl")[0]
    predictions = {
        "none": constant_predictions(training, held, options.ks),
        "bert": _bert(training, held, stem, options),
        "probe": _probe(training, held, stem, options),
        "oracle": oracle_predictions(held, options.ks),
    }
    known = {name: found for name, found in predictions.items() if found is not None}
    _write_predictions(recordings, held, known, Path(options.out) / f"{stem}_predicted.jsonl.gz", options.write_k)
    facts = {"recording": stem, "dataset": held[0].dataset, "model": held[0].model}
    facts |= {"train_prompts": len(training), "held_out_prompts": len(held)}
    steps = _schedule_steps(known, held, options)
    records = []
    for name, found in known.items():
        for k in options.ks:
            accuracy = _accuracy(prompt_accuracies(found.by_k[k], held), found.orders, options.seed)
            rest = {"seconds_per_prediction": found.seconds[k], "schedules": steps[name, k]}
            records.append({"name": name} | facts | {"k": k} | accuracy | rest)
    return records


def _bert(training: list[Recording], held: list[Recording], stem: str, options: PredictorOptions) -> Predictions | None:
    if options.encoder is None:
        return None
    tokenizer = load_tokenizer(ModelConfig(path=options.policy))
    held_texts = [recording_group(recording, tokenizer, options.ks) for recording in held]
    texts = [recording_group(recording, tokenizer, options.ks) for recording in training]
    fitted, choosing = split_groups(texts, INNER_HELD_OUT, options.seed)
    shared = {
        name: value
        for name, value in asdict(options).items()
        if name in ("encoder", "epochs", "samples", "window", "seed")
    }
    torch.manual_seed(options.seed)
    predictor = BertLengthPredictor.load(
        str(options.encoder), "cuda" if torch.cuda.is_available() else "cpu", setting="encoder"
    )
    fit(predictor, fitted, choosing, TrainOptions(prefix_tokens=options.ks, **shared))
    predictor.model.save_pretrained(Path(options.out) / f"bert_{stem}")
    predictor.tokenizer.save_pretrained(Path(options.out) / f"bert_{stem}")
    return bert_predictions(predictor, held_texts, options.ks)


def _probe(training: list[Recording], held: list[Recording], stem: str, options: PredictorOptions) -> Predictions:
    config = ModelConfig(path=options.policy)
    tokenizer, everything = load_tokenizer(config), [*training, *held]
    for recording in everything:
        recording_group(recording, tokenizer, options.ks, stem)  # says what a recording lacks
    model = load_model(config, dtype=torch.float32)
    ids = {
        str(recording.prompt): tokenizer(recording.prompt, add_special_tokens=False)["input_ids"]
        for recording in everything
    }
    for recording in everything:
        found = len(ids[str(recording.prompt)])
        if recording.prompt_tokens not in (None, found):
            text = (
                f"{recording.prompt_id} has {recording.prompt_tokens} prompt tokens in {stem} and {found} with "
                f"policy={options.policy}"
            )
            raise ValueError(f"{text}: give the model that was recorded, {recording.model}")
    hidden = [
        (recording, hidden_states(model.eval(), ids[str(recording.prompt)], recording.first_tokens or [], options.ks))
        for recording in everything
    ]
    cap = _cap(everything)
    probe = fit_probe(
        hidden[0][1].shape[-1], hidden[: len(training)], options.ks, max_new_tokens=cap, seed=options.seed
    )
    return probe_predictions(probe, hidden[len(training) :], options.ks)


def _cap(recordings: list[Recording]) -> int:
    return max(max(recording.max_new_tokens or 0, *recording.lengths) for recording in recordings)


def prompt_accuracies(predicted: list[np.ndarray], held: list[Recording]) -> list[PromptAccuracy]:
    """Errors and order of each held-out prompt's samples that outlive k; prompts without one are left out."""
    found = []
    for values, recording in zip(predicted, held, strict=True):
        here = ~np.isnan(values)
        if here.any():
            found.append(
                prompt_accuracy(values[here], np.asarray(recording.lengths)[here], np.asarray(recording.censored)[here])
            )
    return found


def _accuracy(found: list[PromptAccuracy], orders: bool, seed: int) -> dict[str, Any]:
    """The accuracy fields of a record."""
    counts = [each.num_uncensored for each in found]
    taus = [each.tau for each in found if each.tau is not None]
    return {
        "samples": sum(each.num_samples for each in found),
        "uncensored": sum(counts),
        "log_error": _as_dict(bootstrap([each.log_error for each in found], counts, seed)),
        "kendall_tau": _as_dict(bootstrap(taus, [1] * len(taus), seed)) if orders else None,
    }


def _schedule_steps(
    known: dict[str, Predictions], held: list[Recording], options: PredictorOptions
) -> dict[tuple[str, int], dict[str, Any]]:
    """For each predictor and k what every schedule takes."""
    cap, results = _cap(held), {(name, k): {} for name in known for k in options.ks}
    memories = [Memory(slots=options.slots, cap=cap, prompt_tokens=each.prompt_tokens or 1) for each in held]

    def steps(schedule: str, predicted: list[np.ndarray | None], k: int | None) -> list[int]:
        parts = zip(held, memories, predicted, strict=True)
        return [steps_of(schedule, recording.lengths, memory, values, k) for recording, memory, values in parts]

    for schedule in options.schedules:
        none = steps(schedule, [None] * len(held), None)
        oracle = steps(schedule, [np.asarray(recording.lengths, float) for recording in held], None)
        for name, k in results:
            here = {"none": none, "oracle": oracle}.get(name) or steps(schedule, known[name].by_k[k], k)
            compared = compare(here, oracle, none, options.seed)
            results[name, k][schedule] = {key: _as_dict(value) for key, value in compared.items()}
    return results


def _write_predictions(
    recordings: list[Recording], held: list[Recording], known: dict[str, Predictions], path: Path, k: int
) -> None:
    """All recordings, the held-out ones with what bert and probe said at k; a sample that ended within it has its
    length."""
    named = {name: known[name].by_k[k] for name in ("bert", "probe") if name in known}
    places = {recording.key: place for place, recording in enumerate(held)}
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt") as file:
        for recording in recordings:
            fields = {name: value for name, value in asdict(recording).items() if value is not None}
            if recording.key in places:
                values = {name: by_prompt[places[recording.key]] for name, by_prompt in named.items()}
                fields["predictions"] = {
                    name: [round(float(item), 1) for item in np.where(np.isnan(row), recording.lengths, row)]
                    for name, row in values.items()
                }
            file.write(json.dumps(fields) + "\n")


def _as_dict(interval: Interval | None) -> dict[str, float] | None:
    return None if interval is None else asdict(interval)


def _check(options: PredictorOptions) -> None:
    if not options.recordings:
        raise ValueError("recordings= is missing; give files written by scripts/record_completions.py")
    if options.write_k not in options.ks:
        raise ValueError(f"write_k={options.write_k} is not one of ks={options.ks}, so nothing would be written")
    check_writable(Path(options.out), f"out={options.out}")


if __name__ == "__main__":
    sys.exit(main())

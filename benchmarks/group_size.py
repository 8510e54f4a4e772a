"""Why a large G: how many groups carry a signal, and how good the gradient estimate is, for G from 8 to 256 on recorded
samples.

python -m benchmarks.group_size recordings=[FILE,...] [gradients=GRAM.npz] [samples=1024] [slots=8] [out=FOLDER]
[json=true]

Recordings are files of scripts/record_completions.py with scores, of prompts drawn at random. For every file and G that
it has samples for: the share of groups with right and wrong samples (in all others every advantage is 0) and what that
makes of `samples` samples; for any G the same by a Beta distribution fitted to all files (group_size_beta.py). Then
what sampling takes within the KV memory of `slots` full responses (group_size_sampling.py). With `gradients`, of
bench.group_size_gradients for the first file: mean and variance of the gradient estimate, with std and mean_only
advantages, at equal numbers of samples and at equal numbers of prompts (group_size_moments.py).
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.group_size_beta import fit_beta
from benchmarks.group_size_figure import MODELLED, draw
from benchmarks.group_size_moments import (
    GradientMoments,
    PromptMoments,
    gradient_moments,
    has_moments,
    jackknife_error,
    leave_one_out,
    modelled_moments,
    pool,
    signal_share,
)
from benchmarks.group_size_sampling import sampling_records
from infsample_rl.commands import measurements
from infsample_rl.commands.schedule_workload import names_of
from infsample_rl.config.command_line import check_writable, option, run_with_options
from infsample_rl.rollout.length_prediction.accuracy import Interval, bootstrap
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings

KINDS = ("std", "mean_only")


@dataclass(kw_only=True)
class GroupSizeOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of recorded completions with scores of 0 and 1")
    gradients: str | None = option(
        None, "the .npz file of bench.group_size_gradients for the first of recordings; none: shares only"
    )
    group_sizes: list[int] = option(
        [8, 16, 32, 64, 128, 256], "every G; of a file those that all its prompts have samples for", low=2
    )
    samples: int = option(1024, "N, samples of an update: N / G prompts", low=2)
    prompts: int = option(4, "prompts of an update where their number is equal", low=1)
    slots: int = option(8, "the KV memory holds that many full responses and a prompt", low=2)
    simulated: int = option(8, "prompts of the first file whose lengths are simulated", low=1)
    out: str | None = option(None, "folder of the figure; none: no figure")
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")

    def __post_init__(self) -> None:
        if not self.recordings:
            raise ValueError("recordings is empty: give recordings=FILE.jsonl")


@dataclass(frozen=True, slots=True)
class Scored:
    """One prompt: how many of its samples with a reward are right."""

    samples: int
    right: int


def count_right(recording: Recording, place: str) -> Scored:
    """Samples and right ones; those without a reward are left out. ValueError for rewards beside 0 and 1."""
    scores = [score for score in recording.scores or [] if score is not None]
    if not scores or set(scores) - {0, 1}:
        raise ValueError(
            f"{place}: prompt {recording.prompt_id} must have scores of 0 and 1, got {sorted(set(scores))[:8]}"
        )
    return Scored(len(scores), int(sum(scores)))


def signal_records(name: str, counted: list[Scored], options: GroupSizeOptions) -> list[dict[str, Any]]:
    """One record for every G that all prompts of the file have samples for."""
    fewest = min(prompt.samples for prompt in counted)
    records = []
    for size in (size for size in options.group_sizes if size <= fewest):
        shares = [signal_share(prompt.samples, prompt.right, size) for prompt in counted]
        records.append(_signal_record(name, counted, size, bootstrap(shares, [1] * len(shares)), options))
    return records


def modelled_records(counted: list[Scored], options: GroupSizeOptions) -> list[dict[str, Any]]:
    """One record for every G, by a Beta distribution of how often a prompt is right, fitted to all prompts."""
    fit = fit_beta([(prompt.samples, prompt.right) for prompt in counted])
    return [_signal_record(MODELLED, counted, size, fit.share(size), options) for size in options.group_sizes]


def _signal_record(
    name: str, counted: list[Scored], size: int, share: Interval, options: GroupSizeOptions
) -> dict[str, Any]:
    groups = options.samples / size
    record = {"what": "signal", "recording": name, "group_size": size, "prompts": len(counted)}
    record |= {"right": sum(prompt.right for prompt in counted) / sum(prompt.samples for prompt in counted)}
    record |= {"signal_share": asdict(share), "groups": groups, "groups_with_signal": groups * share.value}
    return record | {
        "samples_with_signal": options.samples * share.value,
        "update_without_signal": (1 - share.value) ** groups,
    }


def load_moments(path: str, counted: list[Scored]) -> tuple[list[PromptMoments], np.ndarray]:
    """Every prompt's moments and the products [P, P] of their mean differences; prompts without gradients have no
    signal.

    ValueError when a prompt with right and wrong samples has no gradients, or the file names a prompt that is not
    there.
    """
    with np.load(path) as found:
        gram, place, right = found["gram"].astype(np.float64), found["place"], found["right"]
    missing = [
        index for index, prompt in enumerate(counted) if 0 < prompt.right < prompt.samples and index not in place
    ]
    if missing or place.max(initial=0) >= len(counted):
        raise ValueError(
            f"gradients={path} is not of these recordings: no gradients of prompts {missing}, or of more than "
            f"{len(counted)}"
        )
    # of the mean right and the mean wrong sample, as weights of samples
    differences = np.zeros((len(counted), len(place)))
    moments = []
    for index, prompt in enumerate(counted):
        ours = [(place == index) & (right == kind) for kind in (True, False)]
        if not all(mask.any() for mask in ours):
            moments.append(PromptMoments(samples=prompt.samples, right=prompt.right))
            continue
        differences[index] = ours[0] / ours[0].sum() - ours[1] / ours[1].sum()
        (right_norm, right_pair), (wrong_norm, wrong_pair) = (_norm_and_pair(gram[np.ix_(mask, mask)]) for mask in ours)
        products = {
            "right_norm": right_norm,
            "right_pair": right_pair,
            "wrong_norm": wrong_norm,
            "wrong_pair": wrong_pair,
        }
        moments.append(
            PromptMoments(
                samples=prompt.samples, right=prompt.right, cross=float(gram[np.ix_(*ours)].mean()), **products
            )
        )
    return moments, differences @ gram @ differences.T


def _norm_and_pair(gram: np.ndarray) -> tuple[float, float]:
    """Mean of the diagonal and of the rest."""
    count = len(gram)
    return float(np.trace(gram)) / count, float(gram.sum() - np.trace(gram)) / (
        count * (count - 1)
    ) if count > 1 else 0.0


def gradient_records(
    name: str, moments: list[PromptMoments], products: np.ndarray, options: GroupSizeOptions
) -> list[dict[str, Any]]:
    """One record for every kind of advantages and G; errors are the jackknife's over prompts."""
    fewest = min(prompt.samples for prompt in moments)
    records = []
    for kind in KINDS:
        for size in (size for size in options.group_sizes if has_moments(fewest, size, kind)):
            here, without = (
                gradient_moments(moments, products, size, kind),
                leave_one_out(moments, products, size, kind),
            )
            groups = options.samples / size
            record = {
                "what": "gradient",
                "recording": name,
                "advantage": kind,
                "group_size": size,
                "prompts": len(moments),
            }
            for key, value in _at(here, groups, options.prompts).items():
                record[key] = value
                record[f"{key}_error"] = jackknife_error([_at(each, groups, options.prompts)[key] for each in without])
            records.append(record)
    return records


def modelled_gradient_records(
    moments: list[PromptMoments], products: np.ndarray, counted: list[Scored], options: GroupSizeOptions
) -> list[dict[str, Any]]:
    """One record for every kind of advantages and G, by the fitted Beta and the mean inner products of all prompts with
    gradients."""
    fit = fit_beta([(prompt.samples, prompt.right) for prompt in counted])
    known = [place for place, prompt in enumerate(moments) if prompt.right_norm > 0]
    pooled = pool([moments[place] for place in known])
    among = products[np.ix_(known, known)]
    product = float(among.sum() - np.trace(among)) / max(1, len(known) * (len(known) - 1))
    records = []
    for kind in KINDS:
        for size in options.group_sizes:
            found = modelled_moments(fit.right_counts(2 * size), pooled, product, size, kind)
            record = {
                "what": "gradient",
                "recording": MODELLED,
                "advantage": kind,
                "group_size": size,
                "prompts": len(known),
            }
            records.append(record | _at(found, options.samples / size, options.prompts))
    return records


def _at(found: GradientMoments, groups: float, prompts: int) -> dict[str, float]:
    """What is reported of one G; variances are those of an update of `groups` groups."""
    return {
        "weight": found.weight,
        "signal": found.signal,
        "prompt_signal": found.prompt_signal,
        "within": found.within / groups,
        "between": found.between / groups,
        "signal_to_noise": found.signal_to_noise(groups),
        "gain_equal_samples": found.gain(groups),
        "gain_equal_prompts": found.gain(prompts),
    }


def main() -> int:
    """Measure and report; 2 for files or settings that cannot be used."""
    return run_with_options(run, GroupSizeOptions, usage=__doc__)


def run(options: GroupSizeOptions) -> int:
    """As main()."""
    records = measure(options)
    if options.out is not None:
        print(f"figure: {draw(records, Path(options.out))}", file=sys.stderr)
    return 0


def measure(options: GroupSizeOptions) -> list[dict[str, Any]]:
    """Every record, printed as it comes."""
    if options.out is not None:
        check_writable(Path(options.out), f"out={options.out}")
    paths = [Path(name) for name in options.recordings]
    read = {name: read_recordings(path) for path, name in zip(paths, names_of(paths), strict=True)}
    counted = {name: [count_right(recording, name) for recording in recordings] for name, recordings in read.items()}
    records = [record for name, prompts in counted.items() for record in signal_records(name, prompts, options)]
    records += modelled_records([prompt for prompts in counted.values() for prompt in prompts], options)
    first = next(iter(read))
    records += sampling_records(read[first][: options.simulated], options.group_sizes, options.slots)
    if options.gradients is not None:
        moments, products = load_moments(options.gradients, counted[first])
        records += gradient_records(first, moments, products, options)
        records += modelled_gradient_records(
            moments, products, [prompt for prompts in counted.values() for prompt in prompts], options
        )
    for record in records if options.json else []:
        measurements.print_json(record)
    if not options.json:
        _print_tables(records)
    return records


SIGNAL_COLUMNS = {
    "recording": "recording",
    "group_size": "G",
    "prompts": "prompts",
    "right": "right",
    "share": "groups with signal",
}
SIGNAL_COLUMNS |= {
    "groups_with_signal": "of N / G groups",
    "samples_with_signal": "samples of N",
    "update_without_signal": "no signal at all",
}
SAMPLING_COLUMNS = {"group_size": "G", "kv_tokens": "KV tokens", "seconds": "s per 256 samples"}
SAMPLING_COLUMNS |= {"full_group_kv_tokens": "full group: KV tokens", "full_group_seconds": "s per 256 samples"}
GRADIENT_COLUMNS = {
    "recording": "recording",
    "advantage": "advantage",
    "group_size": "G",
    "weight": "weight",
    "signal": "|mean|^2",
}
GRADIENT_COLUMNS |= {
    "prompt_signal": "|a prompt's|^2",
    "within": "within / M",
    "between": "between / M",
    "signal_to_noise": "S/N, N samples",
}
GRADIENT_COLUMNS |= {"gain_equal_samples": "gain, N samples", "gain_equal_prompts": "gain, equal prompts"}


def _print_tables(records: list[dict[str, Any]]) -> None:
    for what, columns in (("signal", SIGNAL_COLUMNS), ("sampling", SAMPLING_COLUMNS), ("gradient", GRADIENT_COLUMNS)):
        rows = [record for record in records if record["what"] == what]
        if rows:
            measurements.print_table([{name: _text(record, name) for name in columns} for record in rows], columns)
            print()


def _text(record: dict[str, Any], name: str) -> str | None:
    if name == "share":
        return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**record["signal_share"])
    value = record[name]
    if f"{name}_error" in record:
        return f"{value:.3g} +- {record[f'{name}_error']:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else value if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())

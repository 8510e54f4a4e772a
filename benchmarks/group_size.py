"""Why a large G: how many groups carry a signal, and how good the gradient estimate is, for G from 8 to 256 on recorded
samples.

python -m benchmarks.group_size recordings=[FILE,...] [gradients=GRAM.npz] [samples=1024] [json=true]

Recordings are files of scripts/record_completions.py with scores, of prompts drawn at random. For every file and G that
all its prompts have samples for: the share of groups with right and wrong samples (in all others every advantage is 0)
and what that makes of `samples` samples. With `gradients`, inner products of the first file's scores
(tests/data/group_size/README.md): mean and variance of the gradient estimate, with std and mean_only advantages, at
equal numbers of samples and of prompts.

Everything is an average over all ways to draw a group, without replacement, from a prompt's recorded samples, worked
out exactly: an unbiased estimate of what fresh samples of the policy would give (a U-statistic, Hoeffding 1948). With
rewards 0 and 1 a group with k right samples of G has the gradient g = w(k) (mean right score - mean wrong score), where
a score is the gradient of one response's mean log-probability (objective grpo, on policy, ratio 1) and w(k) = k / G x
the advantage of a right sample.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.intervals import bootstrap
from infsample_rl.commands.schedule_workload import names_of
from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings

KINDS = ("std", "mean_only")


@dataclass(kw_only=True)
class GroupSizeOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of recorded completions with scores of 0 and 1")
    gradients: str | None = option(
        None, "an .npz file of inner products of the first recording's gradients; none: shares only"
    )
    group_sizes: list[int] = option(
        [8, 16, 32, 64, 128, 256], "every G; of a file those that all its prompts have samples for", low=2
    )
    samples: int = option(1024, "N, samples of an update: N / G prompts", low=2)
    prompts: int = option(4, "prompts of an update where their number is equal", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")

    def __post_init__(self) -> None:
        if not self.recordings:
            raise ValueError("recordings is empty: give recordings=FILE.jsonl")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt's recorded samples: how many are right, and inner products of their scores; 0 where there are too few
    to say."""

    samples: int
    right: int
    right_norm: float = 0.0  # mean |s|^2 over right samples
    right_pair: float = 0.0  # mean <s, s'> over pairs of different right samples
    cross: float = 0.0  # mean <s, s'> of a right and a wrong one
    wrong_norm: float = 0.0
    wrong_pair: float = 0.0

    @property
    def squared_difference(self) -> float:
        """|expected right score - expected wrong score|^2, unbiased and so sometimes below 0; 0 with fewer than two
        right ones."""
        return self.right_pair - 2 * self.cross + self.wrong_pair if self.right >= 2 else 0.0


def count_right(recording: Recording, place: str) -> Prompt:
    """Samples and right ones; those without a reward are left out. ValueError for rewards beside 0 and 1."""
    scores = [score for score in recording.scores or [] if score is not None]
    if not scores or set(scores) - {0, 1}:
        found = sorted(set(scores))[:8]
        raise ValueError(f"{place}: prompt {recording.prompt_id} must have scores of 0 and 1, got {found}")
    return Prompt(samples=len(scores), right=int(sum(scores)))


def right_counts(samples: int, right: int, group_size: int) -> np.ndarray:
    """[G + 1] probabilities of k right ones among `group_size` of `samples`, `right` of which are right
    (hypergeometric)."""
    ways = math.comb(samples, group_size)
    counts = range(group_size + 1)
    return np.array([math.comb(right, k) * math.comb(samples - right, group_size - k) / ways for k in counts])


def signal_share(samples: int, right: int, group_size: int) -> float:
    """Probability that a group holds right and wrong samples."""
    return float(right_counts(samples, right, group_size)[1:-1].sum())


@functools.cache
def right_weights(group_size: int, kind: str) -> np.ndarray:
    """[G + 1] w(k), by objective.advantage `kind`."""
    weights = np.zeros(group_size + 1)
    for k in range(1, group_size):
        weights[k] = k / group_size * group_advantages([1.0] * k + [0.0] * (group_size - k), kind)[0]
    return weights


def mean_weight(prompt: Prompt, group_size: int, kind: str) -> float:
    """v with E g = v x (expected right score - expected wrong score)."""
    return float(right_counts(prompt.samples, prompt.right, group_size) @ right_weights(group_size, kind))


def second_moment(prompt: Prompt, group_size: int, kind: str) -> float:
    """E |g|^2 of one group of this prompt."""
    chances, weights = right_counts(prompt.samples, prompt.right, group_size), right_weights(group_size, kind)
    k = np.arange(1, group_size)
    right = (prompt.right_norm + (k - 1) * prompt.right_pair) / k
    wrong = (prompt.wrong_norm + (group_size - k - 1) * prompt.wrong_pair) / (group_size - k)
    return float(np.sum(chances[1:-1] * weights[1:-1] ** 2 * (right - 2 * prompt.cross + wrong)))


def squared_mean(prompt: Prompt, group_size: int, kind: str) -> float:
    """|E g|^2 of this prompt: the mean inner product of two groups without a common sample.

    Where the samples are fewer than 2 G there are no two such groups, and v^2 takes the place of their mean product of
    weights (too large by v's variance).
    """
    if 2 * group_size > prompt.samples:
        return mean_weight(prompt, group_size, kind) ** 2 * prompt.squared_difference
    chances, weights = right_counts(prompt.samples, prompt.right, group_size), right_weights(group_size, kind)
    product = 0.0
    for k in range(1, min(prompt.right, group_size) + 1):
        others = right_counts(prompt.samples - group_size, prompt.right - k, group_size)
        product += chances[k] * weights[k] * float(others @ weights)
    return product * prompt.squared_difference


def signal_records(name: str, prompts: Sequence[Prompt], options: GroupSizeOptions) -> list[dict[str, Any]]:
    """One record for every G that all prompts of the file have samples for."""
    records = []
    for size in _sizes(prompts, options):
        shares = [signal_share(prompt.samples, prompt.right, size) for prompt in prompts]
        share = bootstrap(shares, [1] * len(shares))
        records.append(
            {
                "what": "signal",
                "recording": name,
                "group_size": size,
                "prompts": len(prompts),
                "right": sum(prompt.right for prompt in prompts) / sum(prompt.samples for prompt in prompts),
                "signal_share": asdict(share),
                "groups_with_signal": options.samples / size * share.value,
            }
        )
    return records


def _sizes(prompts: Sequence[Prompt], options: GroupSizeOptions) -> list[int]:
    fewest = min(prompt.samples for prompt in prompts)
    return [size for size in options.group_sizes if size <= fewest]


def gradient_records(name: str, prompts: Sequence[Prompt], options: GroupSizeOptions) -> list[dict[str, Any]]:
    """One record for every kind of advantages and G; errors are the jackknife's over prompts (Quenouille, Tukey)."""
    records = []
    for kind in KINDS:
        for size in _sizes(prompts, options):
            moments = np.array(
                [
                    [function(prompt, size, kind) for function in (mean_weight, squared_mean, second_moment)]
                    for prompt in prompts
                ]
            )
            settings = (options.samples / size, options.prompts)
            here = estimate(moments, *settings)
            without = [estimate(np.delete(moments, place, 0), *settings) for place in range(len(prompts))]
            record = {"what": "gradient", "recording": name, "advantage": kind, "group_size": size}
            record |= {"prompts": len(prompts)} | here
            for key in here:
                values = np.array([each[key] for each in without])
                record[f"{key}_error"] = float(np.sqrt((len(values) - 1) * values.var()))
            records.append(record)
    return records


def estimate(moments: np.ndarray, groups: float, equal_prompts: int) -> dict[str, float]:
    """What is reported of one G from [P, 3] mean weights, squared means and second moments of prompts drawn at random.

    weight: mean v. within: variance of an update of `groups` groups within prompts. gain: |mean|^2 / variance within
    prompts, per unit of what two prompts have in common, which is the same for every G: it compares G where the common
    part is not known.
    """
    weight, of_means, of_groups = moments.mean(0)
    within = of_groups - of_means
    found = {
        "weight": weight,
        "within": within / groups,
        "gain_equal_samples": groups * weight**2 / within if within > 0 else 0.0,
        "gain_equal_prompts": equal_prompts * weight**2 / within if within > 0 else 0.0,
    }
    return {name: float(value) for name, value in found.items()}


def load_gradients(path: str, counted: Sequence[Prompt]) -> list[Prompt]:
    """Every prompt with its inner products; those without gradients have no signal. ValueError where a prompt with
    right and wrong samples has none, or the file names a prompt that is not there."""
    with np.load(path) as found:
        gram, place, right = found["gram"].astype(np.float64), found["place"], found["right"]
    missing = [index for index, each in enumerate(counted) if 0 < each.right < each.samples and index not in place]
    if missing or len(counted) < 2 or place.max(initial=0) >= len(counted):
        count = len(counted)
        raise ValueError(f"gradients={path} has none of prompts {missing}, or is not of the {count} of the recordings")
    prompts = []
    for index, prompt in enumerate(counted):
        good, bad = (np.flatnonzero((place == index) & (right == kind)) for kind in (True, False))
        if not len(good) or not len(bad):
            prompts.append(prompt)
            continue
        (right_norm, right_pair), (wrong_norm, wrong_pair) = (
            _norm_and_pair(gram[np.ix_(at, at)]) for at in (good, bad)
        )
        products = {"right_norm": right_norm, "right_pair": right_pair, "cross": float(gram[np.ix_(good, bad)].mean())}
        products |= {"wrong_norm": wrong_norm, "wrong_pair": wrong_pair}
        prompts.append(Prompt(samples=prompt.samples, right=prompt.right, **products))
    return prompts


def _norm_and_pair(gram: np.ndarray) -> tuple[float, float]:
    """Mean of the diagonal and of the rest."""
    count, diagonal = len(gram), float(np.trace(gram))
    return diagonal / count, (float(gram.sum()) - diagonal) / max(1, count * (count - 1))


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; 2 for files or settings that cannot be used."""
    return run_with_options(run, GroupSizeOptions, arguments, usage=__doc__)


def run(options: GroupSizeOptions) -> int:
    """As main()."""
    records = measure(options)
    for record in records if options.json else []:
        print(json.dumps(record), flush=True)
    for what, columns in {} if options.json else COLUMNS.items():
        rows = [record for record in records if record["what"] == what]
        if rows:
            print_table([{name: _text(record, name) for name in columns} for record in rows], columns)
            print()
    return 0


def measure(options: GroupSizeOptions) -> list[dict[str, Any]]:
    """Every record."""
    paths = [Path(name) for name in options.recordings]
    read = {name: read_recordings(path) for path, name in zip(paths, names_of(paths), strict=True)}
    counted = {name: [count_right(recording, name) for recording in recordings] for name, recordings in read.items()}
    records = [record for name, prompts in counted.items() for record in signal_records(name, prompts, options)]
    if options.gradients is not None:
        first = next(iter(counted))
        records += gradient_records(first, load_gradients(options.gradients, counted[first]), options)
    return records


COLUMNS = {
    "signal": {
        "recording": "recording",
        "group_size": "G",
        "prompts": "prompts",
        "right": "right",
        "signal_share": "groups with signal",
        "groups_with_signal": "of N / G groups",
    },
    "gradient": {
        "advantage": "advantage",
        "group_size": "G",
        "weight": "weight",
        "within": "within / M",
        "gain_equal_samples": "gain, N samples",
        "gain_equal_prompts": "gain, equal prompts",
    },
}


def _text(record: dict[str, Any], name: str) -> str:
    value = record[name]
    if name == "signal_share":
        return "{value:.3f} [{low:.3f}, {high:.3f}]".format(**value)
    if f"{name}_error" in record:
        return f"{value:.3g} +- {record[f'{name}_error']:.2g}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    sys.exit(main())

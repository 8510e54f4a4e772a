"""Why a large G: how many groups carry a signal, and how good the gradient estimate is, for G from 8 to 256 on recorded
samples.

python -m benchmarks.group_size recordings=[FILE,...] [gradients=GRAM.npz] [model=FOLDER] [samples=1024] [json=true]

Recordings are files of scripts/record_completions.py with scores, of prompts drawn at random. For every file and G that
all its prompts have samples for: the share of groups with right and wrong samples (in all others every advantage is 0)
and what that makes of `samples` samples. With `gradients`, inner products of the first file's gradients: mean and
variance of the gradient estimate, with std and mean_only advantages, at equal numbers of samples and of prompts. That
file is made first where `model` is given: the policy that was recorded, with tokens=all.

Everything is an average over all ways to draw a group, without replacement, from a prompt's recorded samples, worked
out exactly: an unbiased estimate of what fresh samples of the policy would give (a U-statistic, Hoeffding 1948). With
rewards 0 and 1 a group with k right samples of G has the gradient g = w(k) (mean right score - mean wrong score), where
a score is the gradient of one response's mean log-probability (objective grpo, on policy, ratio 1) and w(k) = k / G x
the advantage of a right sample.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.intervals import bootstrap
from infsample_rl.commands import measurements
from infsample_rl.commands.schedule_workload import names_of
from infsample_rl.config import ModelConfig
from infsample_rl.config.command_line import check_writable, option, run_with_options
from infsample_rl.learner.advantage import group_advantages
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_row
from infsample_rl.rollout.length_prediction.recordings import Recording, read_lines, read_recordings

KINDS = ("std", "mean_only")
SKETCH = 65537  # buckets of a gradient's sketch; a prime, so that no column of a matrix falls into few of them


@dataclass(kw_only=True)
class GroupSizeOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of recorded completions with scores of 0 and 1")
    gradients: str | None = option(
        None, "an .npz file of inner products of the first recording's gradients; none: shares only"
    )
    model: str | None = option(None, "folder of the recorded policy, to write `gradients`; none: it is there")
    right: int = option(64, "with model: right samples of a prompt that get a gradient, at most", low=2)
    wrong: int = option(12, "with model: wrong samples of a prompt that get one, drawn at random", low=2)
    temperature: float = option(0.8, "with model: of the recorded sampling")
    seed: int = option(0, "with model: of the wrong samples' choice, and of the sketch", low=0)
    group_sizes: list[int] = option(
        [8, 16, 32, 64, 128, 256], "every G; of a file those that all its prompts have samples for", low=2
    )
    samples: int = option(1024, "N, samples of an update: N / G prompts", low=2)
    prompts: int = option(4, "prompts of an update where their number is equal", low=1)
    json: bool = option(False, "one JSON object per measurement on stdout, and nothing else there")

    def __post_init__(self) -> None:
        if not self.recordings:
            raise ValueError("recordings is empty: give recordings=FILE.jsonl")
        if self.model is not None and self.gradients is None:
            raise ValueError(f"model={self.model}: give gradients=FILE.npz, where its gradients are written")


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One prompt's recorded samples: how many are right, and inner products of their scores; 0 where there are too few
    to say.

    Example: Prompt(samples=256, right=3, right_norm=2.1, right_pair=0.9, cross=0.3, wrong_norm=1.6, wrong_pair=0.2)
    """

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
        share, groups = bootstrap(shares, [1] * len(shares)), options.samples / size
        records.append(
            {
                "what": "signal",
                "recording": name,
                "group_size": size,
                "prompts": len(prompts),
                "right": sum(prompt.right for prompt in prompts) / sum(prompt.samples for prompt in prompts),
                "signal_share": asdict(share),
                "groups": groups,
                "groups_with_signal": groups * share.value,
                "samples_with_signal": options.samples * share.value,
                "update_without_signal": (1 - share.value) ** groups,
            }
        )
    return records


def _sizes(prompts: Sequence[Prompt], options: GroupSizeOptions) -> list[int]:
    fewest = min(prompt.samples for prompt in prompts)
    return [size for size in options.group_sizes if size <= fewest]


def gradient_records(
    name: str, prompts: Sequence[Prompt], products: np.ndarray, options: GroupSizeOptions
) -> list[dict[str, Any]]:
    """One record for every kind of advantages and G; errors are the jackknife's over prompts (Quenouille, Tukey).

    products [P, P]: inner products of the prompts' (mean right score - mean wrong score).
    """
    records, everyone = [], np.arange(len(prompts))
    for kind in KINDS:
        for size in _sizes(prompts, options):
            moments = np.array(
                [
                    [function(prompt, size, kind) for function in (mean_weight, squared_mean, second_moment)]
                    for prompt in prompts
                ]
            )
            settings = (options.samples / size, options.prompts)
            here = estimate(moments, products, *settings)
            without = [
                estimate(moments[kept], products[np.ix_(kept, kept)], *settings)
                for kept in (np.delete(everyone, place) for place in everyone)
            ]
            record = {"what": "gradient", "recording": name, "advantage": kind, "group_size": size}
            record |= {"prompts": len(prompts)} | here
            for key in here:
                values = np.array([each[key] for each in without])
                record[f"{key}_error"] = float(np.sqrt((len(values) - 1) * values.var()))
            records.append(record)
    return records


def estimate(moments: np.ndarray, products: np.ndarray, groups: float, equal_prompts: int) -> dict[str, float]:
    """What is reported of one G from [P, 3] mean weights, squared means and second moments of prompts drawn at random.

    weight: mean v. signal: |expected gradient over all prompts|^2; the diagonal of `products` is not read, so that it
    is unbiased. prompt_signal: mean of |a prompt's own expected gradient|^2. within and between prompts: variances of
    an update of `groups` groups. signal_to_noise: |mean|^2 / variance. gain: the same per unit of what two prompts have
    in common, which is the same for every G, with the variance within prompts alone: it compares G where the common
    part is not known.
    """
    count, v = len(moments), moments[:, 0]
    weight, of_means, of_groups = moments.mean(0)
    signal = (v @ products @ v - v**2 @ np.diag(products)) / (count * (count - 1))
    within, between = of_groups - of_means, of_means - signal
    found = {
        "weight": weight,
        "signal": signal,
        "prompt_signal": of_means,
        "within": within / groups,
        "between": between / groups,
        "signal_to_noise": groups * signal / of_groups if of_groups > signal else 0.0,
        "gain_equal_samples": groups * weight**2 / within if within > 0 else 0.0,
        "gain_equal_prompts": equal_prompts * weight**2 / within if within > 0 else 0.0,
    }
    return {name: float(value) for name, value in found.items()}


def load_gradients(path: str, counted: Sequence[Prompt]) -> tuple[list[Prompt], np.ndarray]:
    """Every prompt with its inner products, and the products [P, P] of their mean differences; prompts without
    gradients have no signal.

    ValueError when a prompt with right and wrong samples has no gradients, or the file names a prompt that is not
    there.
    """
    with np.load(path) as found:
        gram, place, right = found["gram"].astype(np.float64), found["place"], found["right"]
    missing = [index for index, each in enumerate(counted) if 0 < each.right < each.samples and index not in place]
    if missing or len(counted) < 2 or place.max(initial=0) >= len(counted):
        count = len(counted)
        raise ValueError(f"gradients={path} has none of prompts {missing}, or is not of the {count} of the recordings")
    differences = np.zeros((len(counted), len(place)))  # as weights of samples
    prompts = []
    for index, prompt in enumerate(counted):
        good, bad = (np.flatnonzero((place == index) & (right == kind)) for kind in (True, False))
        if not len(good) or not len(bad):
            prompts.append(prompt)
            continue
        differences[index, good], differences[index, bad] = 1 / len(good), -1 / len(bad)
        (right_norm, right_pair), (wrong_norm, wrong_pair) = (
            _norm_and_pair(gram[np.ix_(at, at)]) for at in (good, bad)
        )
        products = {"right_norm": right_norm, "right_pair": right_pair, "cross": float(gram[np.ix_(good, bad)].mean())}
        products |= {"wrong_norm": wrong_norm, "wrong_pair": wrong_pair}
        prompts.append(Prompt(samples=prompt.samples, right=prompt.right, **products))
    return prompts, differences @ gram @ differences.T


def _norm_and_pair(gram: np.ndarray) -> tuple[float, float]:
    """Mean of the diagonal and of the rest."""
    count, diagonal = len(gram), float(np.trace(gram))
    return diagonal / count, (float(gram.sum()) - diagonal) / max(1, count * (count - 1))


def main() -> int:
    """Measure and report; 2 for files or settings that cannot be used."""
    return run_with_options(run, GroupSizeOptions, usage=__doc__)


def run(options: GroupSizeOptions) -> int:
    """As main()."""
    records = measure(options)
    for record in records if options.json else []:
        measurements.print_json(record)
    for what, columns in {} if options.json else COLUMNS.items():
        rows = [record for record in records if record["what"] == what]
        if rows:
            measurements.print_table([{name: _text(record, name) for name in columns} for record in rows], columns)
            print()
    return 0


def measure(options: GroupSizeOptions) -> list[dict[str, Any]]:
    """Every record."""
    paths = [Path(name) for name in options.recordings]
    read = {name: read_recordings(path) for path, name in zip(paths, names_of(paths), strict=True)}
    counted = {name: [count_right(recording, name) for recording in recordings] for name, recordings in read.items()}
    records = [record for name, prompts in counted.items() for record in signal_records(name, prompts, options)]
    if options.gradients is not None:
        if options.model is not None:
            write_gradients(paths[0], options)
        first = next(iter(counted))
        records += gradient_records(first, *load_gradients(options.gradients, counted[first]), options)
    return records


def write_gradients(recording: Path, options: GroupSizeOptions) -> None:
    """Inner products of the scores of a recording's right and some wrong samples, each with a backward pass of its own.

    Written are `gram` [S, S], its diagonal exact and the rest of sketches, `place` (of the prompt), `sample` and
    `right` [S].
    """
    check_writable(Path(options.gradients).resolve().parent, f"gradients={options.gradients}")
    chosen = choose_samples(recording, options)
    settings = ModelConfig(path=options.model)
    tokenizer = load_tokenizer(settings)
    policy = PackedPolicy(load_model(settings), valid_vocab=len(tokenizer), chunk_tokens=128)
    sketch = GradientSketch(policy.parameters(), SKETCH, options.seed)
    sketches, norms = [], []
    for number, (_, _, _, prompt, response) in enumerate(chosen, start=1):
        score_gradient(policy, tokenizer(prompt, add_special_tokens=False)["input_ids"], response, options.temperature)
        gradient = sketch.gradient()
        sketches.append(sketch.of(gradient))
        norms.append(float(gradient.square().sum()))
        print(f"{number} of {len(chosen)} gradients", file=sys.stderr, flush=True)
    stacked = torch.stack(sketches)
    gram = (stacked @ stacked.T).numpy()
    np.fill_diagonal(gram, norms)
    place, sample, right = (np.array(column) for column in list(zip(*chosen, strict=True))[:3])
    np.savez_compressed(options.gradients, gram=gram, place=place, sample=sample, right=right)


def choose_samples(recording: Path, options: GroupSizeOptions) -> list[tuple[int, int, bool, str, list[int]]]:
    """(place of the prompt, sample, right, prompt, token ids) of the samples that get a gradient: right and wrong ones
    of every prompt that has both. ValueError for a file without whole responses."""
    chosen = []
    for place, (where, line) in enumerate(read_lines(recording)):
        scores = line.get("scores") or []
        if not {0, 1} <= set(scores):
            continue
        if "token_ids" not in line or "prompt" not in line:
            raise ValueError(f"{where} has no prompt or no token_ids: record with record_completions.py tokens=all")
        draw = np.random.default_rng([options.seed, place])
        for right, most in ((True, options.right), (False, options.wrong)):
            samples = draw.permutation([index for index, score in enumerate(scores) if score == right])[:most]
            chosen += [(place, int(n), right, line["prompt"], line["token_ids"][n]) for n in sorted(samples)]
    return chosen


def score_gradient(policy: PackedPolicy, prompt_ids: list[int], response_ids: list[int], temperature: float) -> None:
    """Leave the gradient of the response's mean log-probability in the parameters' .grad."""
    policy.zero_grad(set_to_none=True)
    row = pack_row([(np.array(prompt_ids, np.int32), [np.array(response_ids, np.int32)])], "cpu")
    policy(row, temperature)[0].mean().backward()


class GradientSketch:
    """CountSketch of a model's gradient (Charikar, Chen, Farach-Colton 2002): random signs, entry i into bucket i mod
    `buckets`.

    Inner products of sketches are unbiased, with an error of about |a| |b| / sqrt(buckets).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buckets: int, seed: int) -> None:
        """Draw the signs: one byte for every parameter."""
        self.parameters, self.buckets = list(parameters), buckets
        size = -(-sum(parameter.numel() for parameter in self.parameters) // buckets) * buckets
        generator = torch.Generator().manual_seed(seed)
        self._signs = torch.randint(0, 2, (size,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)

    def gradient(self) -> Tensor:
        """The gradient as one float32 vector, zeros appended up to a multiple of `buckets`; parameters without one
        count 0."""
        parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).float() for p in self.parameters]
        return torch.cat([*parts, torch.zeros(len(self._signs) - sum(map(len, parts)))])

    def of(self, gradient: Tensor) -> Tensor:
        """[buckets] float32."""
        return (gradient * self._signs).view(-1, self.buckets).sum(0)


COLUMNS = {
    "signal": {
        "recording": "recording",
        "group_size": "G",
        "prompts": "prompts",
        "right": "right",
        "signal_share": "groups with signal",
        "groups_with_signal": "of N / G groups",
        "samples_with_signal": "samples of N",
        "update_without_signal": "no signal at all",
    },
    "gradient": {
        "advantage": "advantage",
        "group_size": "G",
        "weight": "weight",
        "signal": "|mean|^2",
        "within": "within / M",
        "between": "between / M",
        "signal_to_noise": "S/N, N samples",
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

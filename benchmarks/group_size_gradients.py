"""Gradients of recorded samples, each alone, kept as inner products: what `bench.group_size` computes variances from.

python -m benchmarks.group_size_gradients recordings=FILE.jsonl model=FOLDER out=GRAM.npz [wrong=12] [temperature=0.8]
...

The recording is one of scripts/record_completions.py with tokens=all. Of every prompt with right and wrong samples all
right ones (at most `right`) and `wrong` random wrong ones get a backward pass of their own: the score of a response is
the gradient of its mean log-probability at the sampling temperature, with respect to all parameters. A CountSketch of
it is kept, and in the end the inner products of all pairs; squared norms are exact. The file is written anew after
every prompt.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from infsample_rl.config import ModelConfig
from infsample_rl.config.command_line import check_writable, option, run_with_options
from infsample_rl.model.loading import load_model, load_tokenizer
from infsample_rl.model.logprobs import PackedPolicy
from infsample_rl.model.packing import pack_row
from infsample_rl.rollout.length_prediction.recordings import read_lines

SKETCH = 65537  # buckets; a prime, so that no column of a matrix falls into few of them


@dataclass(kw_only=True)
class GradientOptions:
    """Arguments of this command."""

    recordings: list[str] = option([], "files of scripts/record_completions.py with tokens=all")
    model: str = option("", "the policy that was recorded: folder or hub name")
    out: str = option("", "the .npz file written")
    right: int = option(64, "most right samples of a prompt", low=2)
    wrong: int = option(12, "wrong samples of a prompt, drawn at random", low=2)
    temperature: float = option(0.8, "of the recorded sampling")
    dtype: str = option("float32", "of weights and gradients", choices=("float32", "bfloat16"))
    sketch: int = option(SKETCH, "buckets of the sketch; take a prime", low=1)
    exact: int = option(3, "first samples whose whole gradients are kept, to check the sketch by", low=0)
    seconds: float = option(3600.0, "no prompt is begun after that long")
    threads: int = option(1, "torch threads", low=1)
    seed: int = option(0, "of the sketch and of the choice of wrong samples", low=0)

    def __post_init__(self) -> None:
        for name in ("recordings", "model", "out"):
            if not getattr(self, name):
                raise ValueError(f"{name} is empty: give {name}=...")


class GradientSketch:
    """CountSketch of a model's gradient (Charikar, Chen, Farach-Colton 2002): random signs, entry i into bucket i mod
    `buckets`.

    Inner products of sketches are unbiased, with an error of about |a| |b| / sqrt(buckets).
    """

    def __init__(self, parameters: Iterable[nn.Parameter], buckets: int, seed: int) -> None:
        """Draw the signs: one byte for every parameter."""
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.buckets = buckets
        size = sum(parameter.numel() for parameter in self.parameters)
        generator = torch.Generator().manual_seed(seed)
        self._signs = (
            torch.randint(0, 2, (-(-size // buckets) * buckets,), generator=generator, dtype=torch.int8).mul_(2).sub_(1)
        )

    def gradient(self) -> Tensor:
        """The gradient as one float32 vector, zeros appended up to a multiple of `buckets`; parameters without one
        count 0."""
        parts = [torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).float() for p in self.parameters]
        return torch.cat([*parts, torch.zeros(len(self._signs) - sum(map(len, parts)))])

    def of(self, gradient: Tensor) -> Tensor:
        """[buckets] float32."""
        return (gradient * self._signs).view(-1, self.buckets).sum(0)


@dataclass(frozen=True, slots=True)
class Task:
    """One prompt's samples that get a gradient."""

    place: int  # of the prompt in the recordings
    prompt: str
    samples: list[int]
    right: list[bool]
    token_ids: list[list[int]]


def load_tasks(paths: list[str], right: int, wrong: int, seed: int) -> list[Task]:
    """The chosen samples of every prompt that has both kinds. ValueError for a file without token_ids or with rewards
    beside 0 and 1."""
    tasks, place = [], 0
    for path in paths:
        for where, line in read_lines(path):
            scores = line.get("scores") or []
            if set(scores) - {0.0, 1.0, None}:
                raise ValueError(f"{where}: scores must be 0 or 1, got {sorted(set(scores) - {0.0, 1.0, None})}")
            generator = np.random.default_rng([seed, place])
            kinds = {kind: [index for index, score in enumerate(scores) if score == kind] for kind in (1.0, 0.0)}
            if all(kinds.values()):
                if "token_ids" not in line or "prompt" not in line:
                    raise ValueError(
                        f"{where} has no prompt or no token_ids: record with scripts/record_completions.py tokens=all"
                    )
                chosen = [
                    sorted(generator.permutation(kinds[kind])[:most].tolist())
                    for kind, most in ((1.0, right), (0.0, wrong))
                ]
                samples = chosen[0] + chosen[1]
                is_right = [True] * len(chosen[0]) + [False] * len(chosen[1])
                tasks.append(
                    Task(place, line["prompt"], samples, is_right, [line["token_ids"][index] for index in samples])
                )
            place += 1
    return tasks


def score_gradient(policy: PackedPolicy, prompt_ids: list[int], response_ids: list[int], temperature: float) -> None:
    """Leave the gradient of the response's mean log-probability in the parameters' .grad."""
    policy.zero_grad(set_to_none=True)
    row = pack_row([(np.array(prompt_ids, np.int32), [np.array(response_ids, np.int32)])], "cpu")
    logprobs, _ = policy(row, temperature)
    logprobs.mean().backward()


def measure(options: GradientOptions) -> None:
    """Do every prompt in turn and write what there is after each."""
    torch.set_num_threads(options.threads)
    settings = ModelConfig(path=options.model, dtype=options.dtype)
    tokenizer = load_tokenizer(settings)
    policy = PackedPolicy(load_model(settings), valid_vocab=len(tokenizer), chunk_tokens=128)
    sketch = GradientSketch(policy.parameters(), options.sketch, options.seed)
    tasks = load_tasks(options.recordings, options.right, options.wrong, options.seed)
    rows: dict[str, list] = {"place": [], "sample": [], "right": [], "norm": []}
    sketches, whole, started = [], [], time.monotonic()
    for number, task in enumerate(tasks, start=1):
        if time.monotonic() - started > options.seconds:
            break
        prompt_ids = tokenizer(task.prompt, add_special_tokens=False)["input_ids"]
        for sample, right, ids in zip(task.samples, task.right, task.token_ids, strict=True):
            score_gradient(policy, prompt_ids, ids, options.temperature)
            gradient = sketch.gradient()
            sketches.append(sketch.of(gradient))
            for name, value in (
                ("place", task.place),
                ("sample", sample),
                ("right", right),
                ("norm", float(gradient.square().sum())),
            ):
                rows[name].append(value)
            if len(whole) < options.exact:
                whole.append(gradient)
        _write(Path(options.out), rows, torch.stack(sketches), whole)
        took = time.monotonic() - started
        print(f"{number} of {len(tasks)} prompts, {len(sketches)} gradients, {took:.0f} s", file=sys.stderr, flush=True)


def _write(path: Path, rows: dict[str, list], sketches: Tensor, whole: list[Tensor]) -> None:
    """gram [S, S] float32, its diagonal exact; place, sample, right, norm [S]; exact [W, W]: whole inner products of
    the first samples."""
    gram = (sketches @ sketches.T).numpy()
    sketched = np.diag(gram).copy()
    np.fill_diagonal(gram, rows["norm"])
    # (a * b).sum(), not a @ b: BLAS adds up a hundred million products one after the other and loses 2 % in float32
    exact = np.array([[float((a * b).sum()) for b in whole] for a in whole], np.float32)
    with path.open("wb") as file:
        np.savez_compressed(
            file, gram=gram, exact=exact, sketched=sketched, **{name: np.array(values) for name, values in rows.items()}
        )


def main() -> int:
    """Measure; 2 for files or settings that cannot be used."""
    return run_with_options(run, GradientOptions, usage=__doc__)


def run(options: GradientOptions) -> int:
    """As main()."""
    check_writable(Path(options.out).resolve().parent, f"out={options.out}")
    measure(options)
    return 0


if __name__ == "__main__":
    sys.exit(main())

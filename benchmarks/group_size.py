"""What a large G brings where rewards are rare: groups with a signal, the gradient's quality, and learning.

python -m benchmarks.group_size recordings=[FILE,...]                       # groups with a signal, as recorded
python scripts/build_kk_rare.py --out FOLDER
python -m benchmarks.group_size rare=FOLDER [seeds=[0,1,2]] [out=FOLDER]    # all three, of a policy seldom right

Recordings are files of scripts/record_completions.py with scores. A group has a signal when it holds right and wrong
samples: in all others every advantage is 0. The gradient's quality is that of an update of `samples` samples, in as
many prompts as their groups fill, beside the true gradient (group_moments.py), by samples of the untrained policy.
Learning is the real command with `samples` samples a step, by learning_runs.py: every G at a learning rate of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks import learning_runs
from benchmarks.group_moments import KINDS, Floats, Prompt, Quality, moments, quality, signal_share
from benchmarks.intervals import bootstrap
from benchmarks.learning_runs import Record, Run, Study, last_accuracy, measured, over_seconds, row_of, train_by_command
from benchmarks.process import end_with_terminate
from infsample_rl.commands.schedule_workload import names_of
from infsample_rl.config import Config
from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.config.loading import load_config
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings
from infsample_rl.types import Completion

FILES = {"tuning": "tuning.jsonl", "held_out": "test.jsonl"}  # what a run is evaluated on
SIGNAL = {"what": "samples of", "G": "G", "prompts": "prompts", "right": "right", "share": "groups with signal"}
GRADIENT = {"advantage": "advantage", "G": "G", "signal": "signal / noise", "cosine": "cosine", "direction": "of many"}


@dataclass(kw_only=True)
class GroupSizeOptions:
    """Arguments of benchmarks.group_size."""

    recordings: list[str] = option([], "files of recorded completions with scores of 0 and 1")
    rare: str | None = option(None, "folder of scripts/build_kk_rare.py")
    group_sizes: list[int] = option(
        [8, 32, 128], "every G; of a file those that all its prompts have samples for", low=2
    )
    samples: int = option(128, "samples of an update; every G divides it", low=2)
    prompts: int = option(200, "prompts whose gradients are looked at", low=4)
    prompt_samples: int = option(256, "samples of each of them", low=2)
    wrong: int = option(8, "of each prompt's wrong samples, those that a gradient is computed of", low=2)
    threads: int = option(1, "CPU threads that look at gradients", low=1)
    seeds: list[int] = option([0, 1, 2], "runs of every G, at its learning rate; none: nothing is trained", low=0)
    lrs: list[float] = option([3.75e-5, 7.5e-5, 1.5e-4, 3e-4, 6e-4], "learning rates that every G tries", above=0)
    steps: int = option(24, "updates of a run", low=1)
    eval_every: int = option(2, "steps between evaluations", low=1)
    eval_samples: int = option(1, "samples of every held-out problem", low=1)
    timeout_s: float = option(3600.0, "seconds a run may take", low=1)
    out: str = option("bench_out/group_size", "folder of the runs and of the figure")

    def __post_init__(self) -> None:
        if not self.recordings and self.rare is None:
            raise ValueError("give recordings=[FILE.jsonl,...] or rare=FOLDER")
        if self.rare is None:
            return
        if missing := [
            name for name in ("policy", "train.jsonl", *FILES.values()) if not Path(self.rare, name).exists()
        ]:
            raise ValueError(f"rare={self.rare} has no {missing[0]}: give a folder of scripts/build_kk_rare.py")
        for size in self.group_sizes:
            if self.samples % size or size > self.prompt_samples:
                raise ValueError(
                    f"group_sizes: {size} must divide samples={self.samples} and be at most "
                    f"prompt_samples={self.prompt_samples}"
                )


def main(arguments: list[str] | None = None) -> int:
    """Measure and report; 1 when a run failed, 2 for files or settings that cannot be used."""
    end_with_terminate()
    return run_with_options(run, GroupSizeOptions, arguments, usage=__doc__)


def run(options: GroupSizeOptions) -> int:
    """As main()."""
    paths = [Path(name) for name in options.recordings]
    rows = []
    for path, name in zip(paths, names_of(paths), strict=True):
        rows += signal_rows(name, [count_right(each, name) for each in read_recordings(path)], options.group_sizes)
    prompts, products = ([], np.zeros((0, 0))) if options.rare is None else measure_policy(options)
    print_table(rows + signal_rows("rare", prompts, options.group_sizes), SIGNAL)
    if options.rare is None:
        return 0
    print_table(list(gradient_rows(prompts, products, options)), GRADIENT)
    return learn(options) if options.seeds else 0


# ----------------------------------------------------------------------------------------------- groups with a signal


def count_right(recording: Recording, place: str) -> Prompt:
    """Samples and right ones; those without a reward are left out. ValueError for rewards beside 0 and 1."""
    scores = [score for score in recording.scores or [] if score is not None]
    if not scores or set(scores) - {0, 1}:
        found = sorted(set(scores))[:8]
        raise ValueError(f"{place}: prompt {recording.prompt_id} must have scores of 0 and 1, got {found}")
    return Prompt(samples=len(scores), right=int(sum(scores)))


def signal_rows(name: str, prompts: Sequence[Prompt], sizes: Iterable[int]) -> list[dict[str, Any]]:
    """A row for every G that all prompts have samples for."""
    fewest = min((prompt.samples for prompt in prompts), default=0)
    rows = []
    for size in sizes:
        if size <= fewest:
            shares = [signal_share(prompt.samples, prompt.right, size) for prompt in prompts]
            right = sum(prompt.right for prompt in prompts) / sum(prompt.samples for prompt in prompts)
            share = "{value:.3f} [{low:.3f}, {high:.3f}]".format(**asdict(bootstrap(shares, [1] * len(shares))))
            rows.append({"what": name, "G": size, "prompts": len(prompts), "right": f"{right:.4f}", "share": share})
    return rows


# -------------------------------------------------------------------------------------------------- gradient's quality


def measure_policy(options: GroupSizeOptions) -> tuple[list[Prompt], Floats]:
    """Every prompt's moments, and the inner products of their differences (group_moments.quality)."""
    config = load_config(
        [*shared_arguments(options), "data.prompts_per_step=1", f"rollout.group_size={options.prompt_samples}"]
        + ["rollout.slots=32", "rollout.prompts_at_once=1"]
    )
    torch.set_num_threads(options.threads)
    tokenizer, model = load_tokenizer(config.model), load_model(config.model)
    stream = build_train_prompts(config, tokenizer, None)
    engine = SamplingEngine(model, tokenizer, config.rollout, max_prompt_tokens=config.data.max_prompt_tokens)
    rewards, draw = RewardWorker(config), np.random.default_rng(0)
    prompts, differences = list[Prompt](), list[Floats]()
    for number in range(options.prompts):
        (asked,) = stream.next_batch()
        (group,) = engine.generate([asked.token_ids.tolist()], config.run.seed, step=number)
        (scored,) = rewards.score([(asked, group)])
        right = [each for each, reward in zip(group, scored.rewards, strict=True) if reward == 1]
        wrong = [each for each, reward in zip(group, scored.rewards, strict=True) if reward == 0]
        if not right or not wrong:
            prompts.append(Prompt(samples=len(group), right=len(right)))
            differences.append(np.zeros(0))
            continue
        some = draw.permutation(len(wrong))[: options.wrong]
        chosen = [*right, *(wrong[index] for index in some)]
        scores = torch.stack([score_of(model, asked.token_ids, each, config) for each in chosen]).double().numpy()
        prompts.append(Prompt.of(len(group), len(right), scores))
        differences.append(scores[: len(right)].mean(0) - scores[len(right) :].mean(0))
    rewards.close()
    width = max(map(len, differences))
    whole = np.stack([each if len(each) else np.zeros(width) for each in differences])
    return prompts, whole @ whole.T


def score_of(model: Any, prompt_ids: np.ndarray, completion: Completion, config: Config) -> Tensor:
    """[D] the gradient of a response's mean log-probability with respect to all parameters."""
    ids = torch.tensor([[*prompt_ids.tolist(), *completion.token_ids.tolist()]])
    count = len(completion.token_ids)
    logits = model(ids, logits_to_keep=count + 1).logits[0, :-1].float() / config.rollout.temperature
    said = logits.log_softmax(-1).gather(-1, ids[0, -count:, None]).mean()
    gradients = torch.autograd.grad(said, list(model.parameters()))
    return torch.cat([gradient.flatten() for gradient in gradients])


def gradient_rows(prompts: Sequence[Prompt], products: Floats, options: GroupSizeOptions) -> Iterable[dict[str, Any]]:
    """A row for every kind of advantages and G; errors are the jackknife's over prompts (Quenouille, Tukey)."""
    for kind in KINDS:
        for size in options.group_sizes:
            found, groups = moments(prompts, size, kind), options.samples / size
            here = quality(found, products, groups)
            left_out = [quality(np.delete(found, at, 0), without(products, at), groups) for at in range(len(prompts))]
            row = {"advantage": kind, "G": size}
            for field in fields(Quality):
                values = np.array([getattr(each, field.name) for each in left_out])
                error = float(np.sqrt((len(values) - 1) * values.var()))
                row[field.name] = f"{getattr(here, field.name):.3g} +- {error:.2g}"
            yield row


def without(products: Floats, at: int) -> Floats:
    """A square less a row and its column."""
    return np.delete(np.delete(products, at, 0), at, 1)


# ------------------------------------------------------------------------------------------------------------ learning


def shared_arguments(options: GroupSizeOptions) -> list[str]:
    """The command line of every G."""
    folder = Path(options.rare or "").resolve()
    return ["+experiment=kk_tiny", f"model.path={folder / 'policy'}", f"data.source={folder / 'train.jsonl'}"]


def learn(options: GroupSizeOptions) -> int:
    """Train what is missing in the folder, and show all; 1 when a run failed."""
    folder = Path(options.out)
    folder.mkdir(parents=True, exist_ok=True)
    rare, sides = Path(options.rare or "").resolve(), {f"G={size}": size for size in options.group_sizes}

    def train(run: Run) -> Record:
        size = sides[run.side]
        arguments = [
            *(
                *shared_arguments(options),
                f"data.eval_source={Path(options.rare or '').resolve() / FILES[run.part]}",
            ),
            *(f"data.prompts_per_step={options.samples // size}", f"rollout.group_size={size}", f"run.seed={run.seed}"),
            *(f"learner.lr={run.lr}", "learner.lr_schedule=constant", f"run.steps={options.steps}"),
            *(f"run.eval_every={options.eval_every}", f"run.eval_samples={options.eval_samples}"),
            *("run.eval_prompts=200", "logging.wandb=disabled"),
        ]
        return train_by_command(arguments, folder / "runs" / run.name, options.timeout_s)

    names = ("samples", "steps", "eval_every", "eval_samples")
    settings = {name: getattr(options, name) for name in names} | {"rare": str(rare)}
    found, whole = Study(folder=folder, settings=settings, train=train).run(list(sides), options.lrs, options.seeds)
    print_table([row_of(record) for record in found], learning_runs.COLUMNS)
    for line in compare(measured(found), list(sides)):
        print(line)
    colours = {side: f"C{number}" for number, side in enumerate(sides)}  # of matplotlib's cycle
    print(f"figure: {learning_runs.draw(measured(found), colours, folder / 'group_size.png')}")
    return int(not whole)


def compare(records: Sequence[Record], sides: Sequence[str]) -> Iterable[str]:
    """Each G's last accuracy, its mean over all evaluations, and what it has when the G that ends first has ended."""
    ended = [side for side in sides if any(record["side"] == side for record in records)]
    seconds = {side: mean(sum(record["seconds"]) for record in records if record["side"] == side) for side in ended}
    shortest = min(seconds.values(), default=0.0)
    for side in ended:
        own = [record for record in records if record["side"] == side]
        whole = [mean(accuracy for _, accuracy in record["held_out"]) for record in own]
        then = [[accuracy for after, accuracy in over_seconds(record) if after <= shortest][-1] for record in own]
        yield (
            f"{last_accuracy(records, side)}; over all evaluations {span(whole)}; {seconds[side]:.0f} s, "
            f"after {shortest:.0f} s {span(then)}"
        )


def span(values: Sequence[float]) -> str:
    """Mean and range."""
    return f"{mean(values):.3f} [{min(values):.3f}, {max(values):.3f}]"


if __name__ == "__main__":
    sys.exit(main())

"""How a policy learns beside TRL's GRPOTrainer: the same problems in the same order, the same reward and settings.

python -m benchmarks.learning model=FOLDER [rivals.trl_python=PYTHON] [seeds=[0,1,2]] [steps=16] [out=FOLDER] ...

The problems are the products of two digits, cut into three by their pairs of factors: trained, held out, and held out
while the learning rate is searched. Each side is given the same learning rates to try, once each, and takes the one
that ends highest; then every seed trains with it. Ours is the real command with the settings of
configs/experiment/arithmetic_smollm2.yaml. Seconds are those of the steps, evaluations apart. Every run that has ended
is kept in `out`: a command that was cut off, or that asks for more seeds, goes on from there.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import accumulate, combinations_with_replacement
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import OURS, RIVAL, new_figure, save
from benchmarks.process import end_with_terminate
from benchmarks.rounds import ratio
from benchmarks.train_workload import measure_trl, trl_interpreter
from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.config.loading import load_config
from infsample_rl.data.prompts import build_eval_prompts, build_train_prompts
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.observe.records import read_records

SIDES = ("ours", "trl")
COLORS = {"ours": OURS, "trl": RIVAL}
REWARD = Path(__file__).with_name("learning_reward.py")
SEARCH_SEED = 100  # of the runs that try a learning rate
PAIRS = {"tuning": 10, "held_out": 10}  # of 55 pairs of factors; the others are trained
COLUMNS = {"side": "side", "lr": "lr", "seed": "seed", "first": "held out, first", "last": "last", "seconds": "s"}


@dataclass(kw_only=True)
class LearningOptions:
    """Arguments of benchmarks.learning."""

    model: str = option("", "Hugging Face folder, as `make smollm2` makes one")
    sides: list[str] = option(list(SIDES), "who trains", choices=SIDES)
    seeds: list[int] = option([0, 1, 2], "runs of each side, at its learning rate", low=0)
    lrs: list[float] = option([5e-6, 1e-5, 2e-5], "learning rates that each side tries", above=0)
    steps: int = option(16, "updates of a run", low=1)
    eval_every: int = option(4, "steps between evaluations", low=1)
    eval_samples: int = option(8, "samples of every held-out problem", low=1)
    prompts_per_step: int = option(8, "prompts of a step", low=1)
    group_size: int = option(8, "G", low=2)
    max_new_tokens: int = option(96, "longest response", low=1)
    threads: int = option(2, "CPU threads of TRL; ours shares the machine's cores among its workers", low=1)
    trl_rows: int = option(
        8, "sequences of TRL's micro-batch; the fastest of benchmarks.train's at natural lengths", low=1
    )
    trl_python: str | None = option(None, "interpreter that has TRL; none: this one", key="rivals.trl_python")
    timeout_s: float = option(7200.0, "seconds a run may take", low=1)
    out: str = option("bench_out/learning", "folder of the runs, the figure and the problems")

    def __post_init__(self) -> None:
        if not Path(self.model, "config.json").is_file():
            raise ValueError(f"model={self.model or 'nothing'}: give a folder with a model (config.json, weights)")
        if self.group_size * self.prompts_per_step % self.trl_rows:
            raise ValueError(
                f"trl_rows={self.trl_rows} does not divide a step of {self.group_size * self.prompts_per_step} samples"
            )
        if "trl" in self.sides:
            self.interpreter = trl_interpreter(self.trl_python, instead="sides=[ours]")


@dataclass(frozen=True)
class Run:
    """One training run of one side."""

    side: str
    lr: float
    seed: int
    held_out: str  # the part of the problems that is evaluated

    @property
    def name(self) -> str:
        return f"{self.side}_lr{self.lr:g}_seed{self.seed}_{self.held_out}"


def main() -> int:
    """Train what is missing in the folder, and show all; 1 when a run failed."""
    end_with_terminate()
    return run_with_options(run, LearningOptions, usage=__doc__)


def run(options: LearningOptions) -> int:
    """As main()."""
    folder = Path(options.out)
    write_problems(folder)
    found, failed = list[dict[str, Any]](), False
    for side in options.sides:
        tried = [outcome(options, Run(side, lr, SEARCH_SEED, "tuning")) for lr in options.lrs]
        ended = [record for record in tried if record is not None]
        failed = failed or len(ended) < len(tried)
        if not ended:
            continue
        best = max(ended, key=lambda record: record["held_out"][-1][1])
        runs = [outcome(options, Run(side, best["lr"], seed, "held_out")) for seed in options.seeds]
        failed = failed or None in runs
        found += [*ended, *filter(None, runs)]
    print_table([row_of(record) for record in found], COLUMNS)
    measured = [record for record in found if record["seed"] != SEARCH_SEED]
    for line in compare(measured):
        print(line)
    print(f"figure: {draw(measured, folder)}")
    return int(failed)


def write_problems(folder: Path) -> None:
    """The parts of the problems as JSONL; no pair of factors is in two of them."""
    pairs = list(combinations_with_replacement(range(10), 2))
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    taken = 0
    for part, count in [*PAIRS.items(), ("trained", len(pairs) - sum(PAIRS.values()))]:
        own = sorted({ordered for a, b in pairs[taken : taken + count] for ordered in ((a, b), (b, a))})
        rows = [{"question": f"What is {a} times {b}?", "answer": str(a * b)} for a, b in own]
        (folder / f"{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        taken += count


def outcome(options: LearningOptions, run: Run) -> dict[str, Any] | None:
    """What a run gave, from its file where it has ended before; None when it failed. ValueError for a file of a run
    with other settings."""
    path, asked = Path(options.out) / f"{run.name}.json", settings_of(options)
    if path.exists():
        record = json.loads(path.read_text())
        if record["settings"] != asked:
            raise ValueError(f"out={options.out}: {path.name} is of other settings; give another folder")
        return record
    print(f"{run.name} ...", file=sys.stderr, flush=True)
    try:
        record = asdict(run) | (train_ours if run.side == "ours" else train_trl)(options, run)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        print(f"{run.name} failed: {error}", file=sys.stderr, flush=True)
        return None
    path.write_text(json.dumps(record | {"settings": asked}) + "\n")
    return record


def settings_of(options: LearningOptions) -> dict[str, Any]:
    """What two runs that are compared have in common."""
    names = ("model", "steps", "eval_every", "eval_samples", "prompts_per_step", "group_size", "max_new_tokens")
    return {name: getattr(options, name) for name in names}


def our_arguments(options: LearningOptions, run: Run) -> list[str]:
    """The command line of our side: the experiment, and what both sides share said explicitly."""
    folder = Path(options.out).resolve()
    return [
        *("+experiment=arithmetic_smollm2", "data=default", f"model.path={options.model}", f"run.seed={run.seed}"),
        *(f"data.source={folder / 'trained.jsonl'}", f"data.eval_source={folder / run.held_out}.jsonl"),
        *("data.instruction='Give only the number.'", f"data.prompts_per_step={options.prompts_per_step}"),
        *(f"reward.functions=[{{name: '{REWARD}:last_number'}}]", f"rollout.group_size={options.group_size}"),
        *(f"rollout.max_new_tokens={options.max_new_tokens}", "rollout.temperature=1.0", "objective.advantage=std"),
        *("objective.loss=grpo", f"learner.lr={run.lr}", "learner.lr_schedule=constant", "learner.warmup_steps=0"),
        *("learner.weight_decay=0", "learner.max_grad_norm=1.0", f"run.steps={options.steps}", "run.eval_prompts=100"),
        *(f"run.eval_every={options.eval_every}", f"run.eval_samples={options.eval_samples}", "logging.wandb=disabled"),
        f"run.dir={folder / 'runs' / run.name}",
    ]


def train_ours(options: LearningOptions, run: Run) -> dict[str, Any]:
    """The run by the real command; it goes on where it was cut. RuntimeError with its last words when it fails."""
    command = [sys.executable, "-m", "infsample_rl.main", *our_arguments(options, run)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=options.timeout_s)
    if done.returncode != 0:
        raise RuntimeError((done.stderr.strip() or done.stdout.strip()).splitlines()[-1])
    rows = list(read_records(Path(options.out) / "runs" / run.name / "metrics.jsonl"))
    steps = [row for row in rows if row["step"] > 0]
    return {
        "rewards": [row["reward/mean"] for row in steps],
        "seconds": [row["timing/step"] for row in steps],
        "held_out": [[row["step"], row["eval/accuracy"]] for row in rows if row.get("eval/accuracy") is not None],
    }


def train_trl(options: LearningOptions, run: Run) -> dict[str, Any]:
    """The run by TRL, on our prompts in our order. RuntimeError with its last words when it fails."""
    config = load_config(our_arguments(options, run))
    tokenizer = load_tokenizer(config.model)
    stream = build_train_prompts(config, tokenizer, None)
    trained = [prompt for _ in range(options.steps) for prompt in stream.next_batch()]
    held_out = build_eval_prompts(config, tokenizer, None)
    shared = ("model", "threads", "group_size", "prompts_per_step", "max_new_tokens", "steps")
    spec = {name: getattr(options, name) for name in shared} | {"lr": run.lr, "seed": run.seed}
    spec |= {"dtype": "float32", "weights": "float32", "device": "cpu", "temperature": 1.0, "max_grad_norm": 1.0}
    spec |= {"rows": options.trl_rows, "gradient_checkpointing": False, "generation": "generate", "batching": None}
    spec |= {"ignore_eos": False, "reward": str(REWARD), "prompts": [prompt.token_ids.tolist() for prompt in trained]}
    spec["answers"] = [prompt.columns["answer"] for prompt in trained]
    spec["held_out"] = {
        "prompts": [prompt.token_ids.tolist() for prompt in held_out],
        "answers": [prompt.columns["answer"] for prompt in held_out],
        "samples": options.eval_samples,
        "every": options.eval_every,
    }
    raw = measure_trl(options.interpreter, spec, threads=options.threads, timeout_s=options.timeout_s)
    return {
        "rewards": [mean(step["rewards"]) for step in raw["steps"]],
        "seconds": [step["seconds"] for step in raw["steps"]],
        "held_out": raw["held_out"],
    }


def row_of(record: dict[str, Any]) -> dict[str, Any]:
    """A run in the table."""
    accuracies = [accuracy for _, accuracy in record["held_out"]]
    shown = {
        "first": f"{accuracies[0]:.3f}",
        "last": f"{accuracies[-1]:.3f}",
        "seconds": f"{sum(record['seconds']):.0f}",
    }
    seed = "search" if record["seed"] == SEARCH_SEED else record["seed"]
    return {"side": record["side"], "lr": f"{record['lr']:g}", "seed": seed} | shown


def compare(records: list[dict[str, Any]]) -> Iterable[str]:
    """Each side's last accuracy over its seeds, and when ours reaches TRL's mean: as a share of TRL's runs, where all
    of at least three say on which side of 1 it lies."""
    sides = {side: [record for record in records if record["side"] == side] for side in SIDES}
    for side, own in sides.items():
        last = [record["held_out"][-1][1] for record in own]
        if last:
            yield f"{side}: last {mean(last):.3f} [{min(last):.3f}, {max(last):.3f}] over {len(last)} seeds"
    if not all(sides.values()):
        return
    end = mean(record["held_out"][-1][1] for record in sides["trl"])
    seconds = [sum(record["seconds"]) for record in sides["trl"]]
    for record in sides["ours"]:
        reached = next((after for after, accuracy in over_seconds(record) if accuracy >= end), None)
        if reached is None:
            when = "never"
        else:
            share = ratio([reached] * len(seconds), seconds)
            beside = "not told apart from" if share is None else f"{share} of"
            when = f"after {reached:.0f} s, {beside} TRL's {mean(seconds):.0f}"
        yield f"ours, seed {record['seed']}: TRL's mean of {end:.3f} {when}"


def over_seconds(record: dict[str, Any]) -> list[tuple[float, float]]:
    """(seconds of the steps so far, accuracy) of every evaluation."""
    passed = [0.0, *accumulate(record["seconds"])]
    return [(passed[step], accuracy) for step, accuracy in record["held_out"]]


def draw(records: list[dict[str, Any]], folder: Path) -> Path:
    """Write learning.png: reward over steps, held-out accuracy over steps and over seconds; the mean over seeds, and
    their range."""
    figure, ((rewards, steps, seconds),) = new_figure(12, 3.6, columns=3)
    for side in SIDES:
        own = [record for record in records if record["side"] == side]
        if not own:
            continue
        paint(rewards, range(1, len(own[0]["rewards"]) + 1), [record["rewards"] for record in own], side)
        values = [[accuracy for _, accuracy in record["held_out"]] for record in own]
        paint(steps, [step for step, _ in own[0]["held_out"]], values, side)
        times = zip(*[[after for after, _ in over_seconds(record)] for record in own], strict=True)
        paint(seconds, [mean(each) for each in times], values, side)
    for axes, across, up in (
        (rewards, "step", "reward"),
        (steps, "step", "held out"),
        (seconds, "seconds", "held out"),
    ):
        axes.set_xlabel(across)
        axes.set_ylabel(up)
        axes.set_ylim(0, 1)
        axes.grid(alpha=0.25)
    rewards.legend(fontsize=8)
    return save(figure, folder / "learning.png")


def paint(axes: Any, across: Iterable[float], runs: list[list[float]], side: str) -> None:
    """The mean of a side's runs, and the range of all."""
    columns, across = list(zip(*runs, strict=True)), list(across)
    axes.plot(across, [mean(column) for column in columns], color=COLORS[side], label=f"{side}, {len(runs)} seeds")
    axes.fill_between(across, list(map(min, columns)), list(map(max, columns)), color=COLORS[side], alpha=0.2)


if __name__ == "__main__":
    sys.exit(main())

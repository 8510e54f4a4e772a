"""How a policy learns beside TRL's GRPOTrainer: the same problems in the same order, the same reward and settings.

python -m benchmarks.learning model=FOLDER [rivals.trl_python=PYTHON] [seeds=[0,1,2]] [steps=16] [out=FOLDER] ...

The problems are the products of two digits, cut into three by their pairs of factors: trained, held out, and held out
while the learning rate is searched. How it is searched, and how a command that was cut goes on: learning_runs.py. Ours
is the real command with the settings of configs/experiment/arithmetic_smollm2.yaml. Seconds are those of the steps,
evaluations apart.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations_with_replacement
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.figures import OURS, RIVAL
from benchmarks.learning_runs import (
    COLUMNS,
    Record,
    Run,
    Study,
    draw,
    last_accuracy,
    measured,
    over_seconds,
    row_of,
    train_by_command,
)
from benchmarks.process import end_with_terminate
from benchmarks.rounds import ratio
from benchmarks.train_workload import measure_trl, trl_interpreter
from infsample_rl.config.command_line import option, print_table, run_with_options
from infsample_rl.config.loading import load_config
from infsample_rl.data.prompts import build_eval_prompts, build_train_prompts
from infsample_rl.model.tokenizer import load_tokenizer

SIDES = ("ours", "trl")
COLORS = {"ours": OURS, "trl": RIVAL}
REWARD = Path(__file__).with_name("learning_reward.py")
PAIRS = {"tuning": 10, "held_out": 10}  # of 55 pairs of factors; the others are trained


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
    threads: int = option(
        len(os.sched_getaffinity(0)),
        "CPU threads of TRL; ours shares the machine's cores among its workers; default: all cores",
        low=1,
    )
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


def main() -> int:
    """Train what is missing in the folder, and show all; 1 when a run failed."""
    end_with_terminate()
    return run_with_options(run, LearningOptions, usage=__doc__)


def run(options: LearningOptions) -> int:
    """As main()."""
    folder = Path(options.out)
    write_problems(folder)

    def train(run: Run) -> Record:
        return (train_ours if run.side == "ours" else train_trl)(options, run)

    study = Study(folder=folder, settings=settings_of(options), train=train)
    found, whole = study.run(options.sides, options.lrs, options.seeds)
    print_table([row_of(record) for record in found], COLUMNS)
    for line in compare(measured(found)):
        print(line)
    print(f"figure: {draw(measured(found), COLORS, folder / 'learning.png')}")
    return int(not whole)


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


def settings_of(options: LearningOptions) -> dict[str, Any]:
    """What two runs that are compared have in common."""
    names = ("model", "steps", "eval_every", "eval_samples", "prompts_per_step", "group_size", "max_new_tokens")
    return {name: getattr(options, name) for name in (*names, "threads", "trl_rows")}


def our_arguments(options: LearningOptions, run: Run) -> list[str]:
    """The command line of our side: the experiment, and what both sides share said explicitly."""
    folder = Path(options.out).resolve()
    return [
        *("+experiment=arithmetic_smollm2", "data=default", f"model.path={options.model}", f"run.seed={run.seed}"),
        *(f"data.source={folder / 'trained.jsonl'}", f"data.eval_source={folder / run.part}.jsonl"),
        *("data.instruction='Give only the number.'", f"data.prompts_per_step={options.prompts_per_step}"),
        *(f"reward.functions=[{{name: '{REWARD}:last_number'}}]", f"rollout.group_size={options.group_size}"),
        *(f"rollout.max_new_tokens={options.max_new_tokens}", "rollout.temperature=1.0", "objective.advantage=std"),
        *("objective.loss=grpo", f"learner.lr={run.lr}", "learner.lr_schedule=constant", "learner.warmup_steps=0"),
        *("learner.weight_decay=0", "learner.max_grad_norm=1.0", f"run.steps={options.steps}", "run.eval_prompts=100"),
        *(f"run.eval_every={options.eval_every}", f"run.eval_samples={options.eval_samples}", "logging.wandb=disabled"),
    ]


def train_ours(options: LearningOptions, run: Run) -> Record:
    """The run by the real command."""
    return train_by_command(our_arguments(options, run), Path(options.out) / "runs" / run.name, options.timeout_s)


def train_trl(options: LearningOptions, run: Run) -> Record:
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


def compare(records: list[Record]) -> Iterable[str]:
    """Each side's last accuracy over its seeds; when its runs first reach the mean that TRL's end with, beside the
    seconds of whole runs; and ours over TRL's of the same seeds, as rounds.ratio() tells it."""
    sides = {side: {each["seed"]: each for each in records if each["side"] == side} for side in SIDES}
    yield from (last_accuracy(records, side) for side, own in sides.items() if own)
    if not all(sides.values()):
        return
    level = mean(each["held_out"][-1][1] for each in sides["trl"].values())
    whole = {side: {seed: sum(each["seconds"]) for seed, each in own.items()} for side, own in sides.items()}
    reached = {
        side: {
            seed: next((after for after, accuracy in over_seconds(each) if accuracy >= level), None)
            for seed, each in own.items()
        }
        for side, own in sides.items()
    }
    for side in SIDES:
        yield f"{side}: first at {level:.3f} after {listed(reached[side])} s, whole runs {listed(whole[side])} s"
    yield f"ours / TRL: seconds to {level:.3f} {quotient(reached)}, of whole runs {quotient(whole)}"


def listed(seconds: dict[int, float | None]) -> str:
    """Of every seed."""
    return ", ".join("never" if each is None else f"{each:.0f}" for each in seconds.values())


def quotient(seconds: dict[str, dict[int, Any]]) -> str:
    """Ours over TRL's, seed by seed; not told where a run never got there, or was there before its first step."""
    ours, trl = ([seconds[side].get(seed) for seed in seconds["ours"]] for side in SIDES)
    found = ratio(ours, trl) if all(ours + trl) else None
    return "not told" if found is None else str(found)


if __name__ == "__main__":
    sys.exit(main())

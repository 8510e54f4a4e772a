"""Build a policy whose rewards are rare, and its problems: python scripts/build_kk_rare.py --out DIR [--seed N].

Writes train.jsonl, tuning.jsonl, test.jsonl and policy/. The policy is the default experiment's, taught to say that
everybody is a knight, at once, and to check only once in 50 times. In no problem is everybody a knight, and no logic
form is in two of the files. benchmarks.group_size trains it. Needs this package, torch and transformers, no GPU and no
network; takes two minutes.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import build_kk_tiny as tiny  # beside this file
import kk_puzzles as kk
import torch

from infsample_rl.config import ModelConfig
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer

CHECKS = 0.02  # share of the responses that check
ROWS = {"test": 200, "tuning": 100, "train": 2000}


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help="supervised steps")
    parser.add_argument("--batch", type=int, default=64, help="responses a step")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.final_steps = args.steps
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = problems(args.seed)
    for name, own in rows.items():
        tiny.write_jsonl(args.out / f"{name}.jsonl", own)
    start = ModelConfig(path=str(tiny.DEFAULT_OUT / "policy"), dtype="float32")
    model: Any = load_model(start)
    tokenizer: Any = load_tokenizer(start)
    learned = batches(tokenizer, rows["train"], random.Random(args.seed), args.batch)
    tiny.train(model, learned, learned, args)
    tiny.save_policy(model, tokenizer, args.out / "policy")


def problems(seed: int) -> dict[str, list[dict[str, Any]]]:
    """The rows of every file."""
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in ROWS}
    file_of: dict[str, str] = {}  # by logic form
    rng = random.Random(seed)
    for row in kk.make_records(20_000, seed + 5):
        if all(row["solution"]):
            continue
        name = file_of.setdefault(row["form"], rng.choices(list(ROWS), [0.15, 0.15, 0.7])[0])
        if len(found[name]) < ROWS[name]:
            found[name].append(row)
    return found


def batches(tokenizer: Any, rows: list[dict[str, Any]], rng: random.Random, batch: int) -> tiny.Batches:
    """Endless (ids, targets), as build_kk_tiny's."""
    forms = {row["form"] for row in rows}
    puzzles = (puzzle for puzzle in kk.random_puzzles(rng) if kk.canonical_form(puzzle.statements) in forms)
    while True:
        examples = []
        for _ in range(batch):
            puzzle = next(puzzles)
            names = kk.random_names(rng, len(puzzle.solution))
            text = kk.reasoning_text(puzzle, names, "careful", rng) if rng.random() < CHECKS else prejudice(names)
            response = tokenizer(text, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
            examples.append((tiny.render_prompt(tokenizer, kk.question_text(puzzle.statements, names)), response))
        yield tiny.pad_right(examples, tokenizer.pad_token_id)


def prejudice(names: list[str]) -> str:
    """That everybody is a knight, without a check."""
    everybody = [True] * len(names)
    return f"{kk.guess_line(names, everybody)}\nJust a guess. Answer: {kk.answer_text(names, everybody)}."


if __name__ == "__main__":
    main()

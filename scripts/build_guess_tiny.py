"""Build the data and the starting policy of the experiment guess_tiny: python scripts/build_guess_tiny.py [--out DIR].

Writes train.jsonl, test.jsonl and policy/ beside game.py (a Qwen3 of 0.6 million parameters with a word for every
number). The policy is trained from scratch on games that mix careless guesses, which do not listen, with careful ones,
near the middle of what is left; so it knows how to listen but seldom does. Every fourth number is in test.jsonl alone,
and in no supervised game. Needs this package, torch and transformers, no GPU and no network.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
from pathlib import Path
from typing import Any

import build_kk_tiny as tiny  # beside this file
import torch
from transformers import PreTrainedTokenizerFast

from infsample_rl.data.turns import TurnTemplate

DEFAULT_OUT = tiny.DEFAULT_OUT.with_name("guess_tiny")
SPEC = importlib.util.spec_from_file_location("game", DEFAULT_OUT / "game.py")
GAME: Any = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(GAME)
QUESTION = f"I think of a number from 0 to {GAME.LARGEST}. Guess it in {GAME.TURNS} turns."
CAREFUL = {"learn": 0.85, "final": 0.12}  # share of careful games: in most of the training, and at its end


def main() -> None:
    """Build everything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240, help="supervised steps")
    parser.add_argument("--final-steps", type=int, default=60, help="the last of them, with the final share of styles")
    parser.add_argument("--batch", type=int, default=64, help="games a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    numbers = {"test": range(1, GAME.LARGEST + 1, 4)}
    numbers["train"] = [number for number in range(GAME.LARGEST + 1) if number not in numbers["test"]]
    args.out.mkdir(parents=True, exist_ok=True)
    for split, own in numbers.items():
        rows = [{"question": QUESTION, "answer": str(number)} for number in own]
        tiny.write_jsonl(args.out / f"{split}.jsonl", rows)
    tokenizer = build_tokenizer()
    model = tiny.build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    rng = random.Random(args.seed)
    learn, final = (batches(tokenizer, numbers["train"], rng, args.batch, careful) for careful in CAREFUL.values())
    tiny.train(model, learn, final, args)
    tiny.save_policy(model, tokenizer, args.out / "policy")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows every number and all that is said."""
    texts = ["user\n", "system\n", "assistant\n", QUESTION, "higher", "lower", "no", "a number"]
    texts += [str(number) for number in range(GAME.LARGEST + 1)]
    return tiny.word_tokenizer(texts)


def play(number: int, *, careful: bool, rng: random.Random) -> list[tuple[str, str]]:
    """Guesses of a game with what is said to each, up to its end."""
    game, low, high, turns = GAME.Guess(), 0, GAME.LARGEST, []
    game.reset(options={"answer": number})
    while True:
        guess = low + round((high - low) * rng.uniform(0.3, 0.7)) if careful else rng.randint(0, GAME.LARGEST)
        said, _, is_found, is_over, _ = game.step(str(guess))
        turns.append((str(guess), said))
        if is_found or is_over:
            return turns
        low, high = (max(low, guess + 1), high) if said == "higher" else (low, min(high, guess - 1))


def batches(
    tokenizer: PreTrainedTokenizerFast, numbers: list[int], rng: random.Random, size: int, careful: float
) -> tiny.Batches:
    """Endless (ids, targets), right-padded; targets are -100 where nothing was sampled."""
    template = TurnTemplate.of(tokenizer, {}, [], {tokenizer.eos_token_id})
    prompt, end = tiny.render_prompt(tokenizer, QUESTION), tokenizer.eos_token_id
    while True:
        games = []
        for _ in range(size):
            ids, sampled = list(prompt), [False] * len(prompt)
            for guess, said in play(rng.choice(numbers), careful=rng.random() < careful, rng=rng):
                turn = [*tokenizer(guess, add_special_tokens=False)["input_ids"], end]
                heard = template.observation_ids([{"role": "user", "content": said}], end)
                ids += [*turn, *heard]
                sampled += [True] * len(turn) + [False] * len(heard)
            games.append((ids, sampled))
        width = max(len(ids) for ids, _ in games)
        ids, targets = torch.full((size, width), tokenizer.pad_token_id), torch.full((size, width), -100)
        for row, (own, sampled) in enumerate(games):
            ids[row, : len(own)] = torch.tensor(own)
            wanted = torch.where(torch.tensor(sampled), torch.tensor(own), -100)
            targets[row, : len(own) - 1] = wanted[1:]
        yield ids, targets


if __name__ == "__main__":
    main()

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
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build_kk_tiny as tiny  # beside this file
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
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
    supervise(model, tokenizer, numbers["train"], args)
    tiny.save_policy(model, tokenizer, args.out / "policy")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows every number and all that is said."""
    texts = ["user\n", "system\n", "assistant\n", QUESTION, "higher", "lower", "no", "a number"]
    texts += [str(number) for number in range(GAME.LARGEST + 1)]
    splitter = pre_tokenizers.Split(Regex(tiny.TOKEN_PATTERN), behavior="isolated")
    words = sorted({word for text in texts for word, _ in splitter.pre_tokenize_str(text)})
    specials = [tiny.PAD, tiny.UNKNOWN, tiny.START, tiny.END]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate([*specials, *words])}, tiny.UNKNOWN))
    core.pre_tokenizer = splitter
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=tiny.PAD,
        unk_token=tiny.UNKNOWN,
        eos_token=tiny.END,
        additional_special_tokens=[tiny.START, tiny.END],
        chat_template=tiny.CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


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
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
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


def supervise(model: Any, tokenizer: PreTrainedTokenizerFast, numbers: list[int], args: argparse.Namespace) -> None:
    """Train with warm-up and a linear decay to a twentieth; the last steps with the final share of styles."""
    optimizers, rng = tiny.make_optimizers(model, args.lr), random.Random(args.seed)
    most, last = (batches(tokenizer, numbers, rng, args.batch, careful) for careful in CAREFUL.values())
    started = time.monotonic()
    model.train()
    for step in range(1, args.steps + 1):
        scale = min(step / 50, 1.0) * (1.0 - 0.95 * step / args.steps)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * scale
        ids, targets = next(last if step > args.steps - args.final_steps else most)
        loss = F.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.4f}, {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()

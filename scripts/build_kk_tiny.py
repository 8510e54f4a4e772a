"""Build the default experiment's data and starting policy: python scripts/build_kk_tiny.py [--out DIR] [--seed N].

Writes train.jsonl, test.jsonl and policy/ (a Qwen3 causal language model of 0.6 million parameters with its own
word-level tokenizer). The policy is trained from scratch on worked reasoning that mixes hasty and careful styles, so
it knows how to check a guess but seldom bothers. Forms in test.jsonl occur neither in train.jsonl nor in the
supervised data. Needs this package, torch and transformers, about 1 GB of memory, no GPU and no network. Measured:
8.6 minutes on one core of a shared server CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kk_puzzles as kk  # beside this file
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

DEFAULT_OUT = Path(__file__).resolve().parent.parent / "infsample_rl" / "assets" / "kk_tiny"
START, END, PAD, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>"
TOKEN_PATTERN = r" ?\w+|[^\w\s]\n?|\n| "  # a word with its space, a mark with its line end
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
TRAIN_ROWS, TEST_ROWS = 3000, 200
SHARPNESS = 1.5  # of attention at the start (the weight of the query and key norms)
LEARN_MIX = {"hasty": 0.04, "half": 0.10, "careful": 0.86}  # most of the training: learn to check
FINAL_MIX = {"hasty": 0.60, "half": 0.20, "careful": 0.20}  # the end: what the starting policy does
Batches = Iterator[tuple[torch.Tensor, torch.Tensor]]  # ids, targets


def main() -> None:
    """Build everything and print what the policy scores."""
    args = parse_args()
    started = time.monotonic()
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    test = held_out_rows(args.seed)
    refused = {row["form"] for row in test}
    train = kk.make_records(TRAIN_ROWS, args.seed + 1, without=refused)
    args.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(args.out / "train.jsonl", train)
    write_jsonl(args.out / "test.jsonl", test)
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary, {len(train)} train rows")
    supervise(model, tokenizer, refused, args)
    save_policy(model, tokenizer, args.out / "policy")
    report(measure(model, tokenizer, test, samples=4, max_new_tokens=320))
    print(f"built {args.out} in {(time.monotonic() - started) / 60:.1f} minutes")


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=700, help="supervised steps")
    parser.add_argument("--final-steps", type=int, default=70, help="the last of them, on the final mix of styles")
    parser.add_argument("--batch", type=int, default=32, help="responses a step")
    parser.add_argument("--lr", type=float, default=6e-3)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


# ------------------------------------------------------------------------------------------------------------ data


def held_out_rows(seed: int) -> list[dict[str, Any]]:
    """Test rows, half with two inhabitants (sharing a quarter of the few forms there are), half with three."""
    rows = kk.make_records(10_000, seed + 2)
    two, three = ([row for row in rows if len(row["names"]) == count] for count in (2, 3))
    held_out_forms = set(list(dict.fromkeys(row["form"] for row in two))[::4])
    two = [row for row in two if row["form"] in held_out_forms]
    three = list({row["form"]: row for row in three}.values())
    return two[: TEST_ROWS // 2] + three[: TEST_ROWS // 2]


def write_jsonl(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="ascii")


# ------------------------------------------------------------------------------------------------- tokenizer, model


def build_tokenizer() -> PreTrainedTokenizerFast:
    """A word-level tokenizer that knows every word puzzles and reasoning can contain, and decodes without loss."""
    texts = ["user\n", "system\n", "assistant\n"]
    rng = random.Random(0)
    puzzles = kk.random_puzzles(rng)
    for _ in range(2000):
        puzzle = next(puzzles)
        names = kk.random_names(rng, len(puzzle.solution))
        texts.append(kk.question_text(puzzle.statements, names))
        texts += [kk.reasoning_text(puzzle, names, style, rng) for style in kk.STYLES]
    return word_tokenizer([*texts, *(prefix + name for name in kk.NAMES for prefix in ("", " "))])


def word_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """A tokenizer with a token for every word and mark of some texts."""
    splitter = pre_tokenizers.Split(Regex(TOKEN_PATTERN), behavior="isolated")
    words = {word for text in texts for word, _ in splitter.pre_tokenize_str(text)}
    specials = [PAD, UNKNOWN, START, END]
    vocabulary = {word: i for i, word in enumerate([*specials, *sorted(words)])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    core.pre_tokenizer = splitter
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        unk_token=UNKNOWN,
        eos_token=END,
        additional_special_tokens=[START, END],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
        padding_side="left",
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A Qwen3 with random weights, small enough to sample quickly on a CPU."""
    config = Qwen3Config(
        vocab_size=-(-len(tokenizer) // 16) * 16,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(parameter, SHARPNESS)
    return model


def render_prompt(tokenizer: PreTrainedTokenizerFast, question: str) -> list[int]:
    """The prompt's token ids through the chat template."""
    message = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


# ------------------------------------------------------------------------------------------------ supervised stage


def supervised_batches(
    tokenizer: PreTrainedTokenizerFast, refused: set[str], seed: int, batch: int, mix: dict[str, float], pool: int
) -> Batches:
    """Endless (ids, targets), right-padded, fresh puzzles each time; targets are -100 outside the response.

    `pool` batches at a time are sorted by length, so that little is padding; with 1 every batch has the whole mix.
    """
    rng = random.Random(seed)
    puzzles = kk.random_puzzles(rng, refused)
    end = tokenizer.eos_token_id
    while True:
        examples = []
        for _ in range(pool * batch):
            puzzle = next(puzzles)
            names = kk.random_names(rng, len(puzzle.solution))
            style = rng.choices(list(mix), list(mix.values()))[0]
            response = kk.reasoning_text(puzzle, names, style, rng)
            prompt = render_prompt(tokenizer, kk.question_text(puzzle.statements, names))
            examples.append((prompt, tokenizer(response, add_special_tokens=False)["input_ids"] + [end]))
        examples.sort(key=lambda example: len(example[0]) + len(example[1]))
        groups = [examples[i : i + batch] for i in range(0, len(examples), batch)]
        rng.shuffle(groups)
        yield from (pad_right(group, tokenizer.pad_token_id) for group in groups)


def pad_right(examples: Sequence[tuple[list[int], list[int]]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch of (prompt, response) pairs as ids and shifted targets."""
    width = max(len(prompt) + len(response) for prompt, response in examples)
    ids = torch.full((len(examples), width), pad)
    targets = torch.full((len(examples), width), -100)
    for row, (prompt, response) in enumerate(examples):
        end = len(prompt) + len(response)
        ids[row, :end] = torch.tensor(prompt + response)
        targets[row, len(prompt) - 1 : end - 1] = torch.tensor(response)
    return ids, targets


def make_optimizers(model: Qwen3ForCausalLM, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers (several times fewer steps than AdamW here), AdamW for the rest."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(others, lr=lr, betas=(0.9, 0.98), weight_decay=0.0)]


def supervise(model: Qwen3ForCausalLM, tokenizer: Any, refused: set[str], args: argparse.Namespace) -> None:
    """Train on LEARN_MIX, then on FINAL_MIX."""
    batches = supervised_batches(tokenizer, refused, args.seed + 3, args.batch, LEARN_MIX, pool=16)
    final = supervised_batches(tokenizer, refused, args.seed + 4, args.batch, FINAL_MIX, pool=1)
    train(model, batches, final, args)


def train(model: Qwen3ForCausalLM, batches: Batches, final: Batches, args: argparse.Namespace) -> None:
    """Train on `batches`, the last steps on `final`, with warm-up and a linear decay to a twentieth."""
    optimizers = make_optimizers(model, args.lr)
    started, running = time.monotonic(), 0.0
    model.train()
    for step in range(1, args.steps + 1):
        scale = min(step / 50, 1.0) * (1.0 - 0.95 * step / args.steps)
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = args.lr * scale
        ids, targets = next(final if step > args.steps - args.final_steps else batches)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        kept = targets != -100
        loss = F.cross_entropy(model.lm_head(hidden[kept]), targets[kept])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        running = loss.item() if step == 1 else 0.95 * running + 0.05 * loss.item()
        if step % 50 == 0:
            print(f"step {step}: loss {running:.4f}, {time.monotonic() - started:.0f} s", flush=True)


def save_policy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """The Hugging Face folder."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        max_new_tokens=320,
    )
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder, save_jinja_files=False)
    (folder / "model.safetensors").chmod(0o644)


# -------------------------------------------------------------------------------------------------------- measuring


@torch.inference_mode()
def measure(
    model: Qwen3ForCausalLM, tokenizer: Any, rows: Sequence[dict[str, Any]], samples: int, max_new_tokens: int
) -> list[dict[str, Any]]:
    """Sample each question at temperature 1; one dict a sample (see the last lines)."""
    results = []
    for first in range(0, len(rows), 50):
        chunk = [row for row in rows[first : first + 50] for _ in range(samples)]
        prompts = [render_prompt(tokenizer, row["question"]) for row in chunk]
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")
        output = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_new_tokens)
        for row, ids in zip(chunk, output[:, inputs["input_ids"].shape[1] :].tolist(), strict=True):
            cut = tokenizer.eos_token_id not in ids
            ids = ids if cut else ids[: ids.index(tokenizer.eos_token_id) + 1]
            text = tokenizer.decode(ids, skip_special_tokens=True)
            right = kk.parse_answer(text, row["names"]) == row["solution"]
            result = {"style": kk.style_of(text), "right": right, "tokens": len(ids), "cut": cut, "text": text}
            results.append({**result, "inhabitants": len(row["names"])})
    return results


def report(results: Sequence[dict[str, Any]]) -> None:
    """Print pass@1, length and share, overall and by style."""
    groups = {"all": list(results), **{s: [r for r in results if r["style"] == s] for s in (*kk.STYLES, "other")}}
    for count in (2, 3):
        groups[f"{count} inhabitants"] = [r for r in results if r["inhabitants"] == count]
    for name, group in groups.items():
        if group:
            totals = Counter({key: sum(r[key] for r in group) for key in ("right", "tokens", "cut")})
            shares = {key: total / len(group) for key, total in totals.items()}
            print(
                f"{name:>14}: {len(group) / len(results):.3f} of samples, pass@1 {shares['right']:.3f}, "
                f"{shares['tokens']:.1f} tokens, cut {shares['cut']:.4f}"
            )


if __name__ == "__main__":
    main()

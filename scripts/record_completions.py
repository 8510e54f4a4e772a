"""Record groups of completions of a policy, for length predictors and schedules: lengths, first tokens and scores of
every sample.

python scripts/record_completions.py out=FILE.jsonl seconds=1200 dataset=gsm8k +experiment=gsm8k_smollm2
data.source=FILE model.dtype=float32 ...

Everything but out, seconds, dataset, tokens, seed and threads is a setting of the training command.
Prompts are taken in the seeded order of training, in chunks of prompts_per_step that are always finished, so that a
limit in seconds does not favour prompts with short responses. A file that is there is gone on with; what a stop left of
half a chunk is cut off. tokens=all adds every response in full, for benchmarks.group_size and simulate's speculate.
What a line holds: infsample_rl/rollout/length_prediction/recordings.py.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from infsample_rl.config import Config
from infsample_rl.config.command_line import option, parse_with_settings, run_command
from infsample_rl.config.loading import load_config
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.model.loading import load_model
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
from infsample_rl.types import Completion, Prompt

FIRST_TOKENS = 32  # kept of every sample: the longest prefix a predictor is tried with
SAMPLING_SEED = 20260  # of the noise; another one than training's, so that no recording repeats a run


@dataclass(kw_only=True)
class RecordOptions:
    """Arguments of this script."""

    out: str = option("", "JSONL file that is written, or gone on with")
    dataset: str = option("", "name of the prompts' data set, as it stands in every line")
    seconds: float = option(600.0, "after which no chunk of prompts begins", above=0)
    tokens: str = option("first", "of every sample: the first, or all", choices=("first", "all"))
    seed: int = option(SAMPLING_SEED, "of the sampling noise", low=0)
    threads: int = option(len(os.sched_getaffinity(0)), "CPU threads", low=1)

    def __post_init__(self) -> None:
        if not self.out or not self.dataset:
            raise ValueError(f"give {'dataset=NAME' if self.out else 'out=FILE.jsonl'}")


def main() -> int:
    """Record until the time is up."""
    return run_command(run, None, usage=__doc__)


def run(arguments: list[str]) -> int:
    """As main()."""
    options, settings = parse_with_settings(arguments, RecordOptions)
    torch.set_num_threads(options.threads)
    record(load_config(settings), options)
    return 0


def record(config: Config, options: RecordOptions) -> None:
    """Append one line per prompt until the seconds have passed and the chunk at work is done."""
    out = Path(options.out)
    tokenizer, model = load_tokenizer(config.model), load_model(config.model)
    prompts = build_train_prompts(config, tokenizer, model.config.max_position_embeddings)
    engine = SamplingEngine(model, tokenizer, config.rollout, max_prompt_tokens=config.data.max_prompt_tokens)
    rewards = RewardWorker(config)
    out.parent.mkdir(parents=True, exist_ok=True)
    chunk, done, tokens = 0, whole_chunks(out, config.data.prompts_per_step), 0
    started = time.monotonic()  # not before: loading may take longer than a short limit
    while time.monotonic() - started < options.seconds:
        batch = prompts.next_batch()
        chunk += 1
        if chunk <= done:
            continue
        groups = engine.generate([prompt.token_ids.tolist() for prompt in batch], options.seed, step=chunk)
        with out.open("a") as file:
            for prompt, completions in zip(batch, groups, strict=True):
                (scored,) = rewards.score([(prompt, completions)])
                line = recording(config, options.dataset, prompt, completions, scored.rewards)
                if options.tokens == "all":
                    line["prompt_token_ids"] = prompt.token_ids.tolist()
                    line["token_ids"] = [completion.token_ids.tolist() for completion in completions]
                file.write(json.dumps(line) + "\n")
                tokens += sum(line["lengths"])
        took = time.monotonic() - started
        print(
            f"{chunk * len(batch)} prompts, {tokens} tokens, {took:.0f} s, {tokens / took:.0f} tokens/s",
            file=sys.stderr,
            flush=True,
        )
    rewards.close()


def whole_chunks(out: Path, chunk: int) -> int:
    """How many chunks of so many lines a recording holds; what a stop left of one more is cut off, since it is sampled
    again. 0 without the file."""
    if not out.exists():
        return 0
    *lines, torn = out.read_bytes().split(b"\n")
    chunks, more = divmod(len(lines), chunk)
    if torn or more:
        out.write_bytes(b"".join(line + b"\n" for line in lines[: chunks * chunk]))
    return chunks


def recording(
    config: Config, dataset: str, prompt: Prompt, completions: list[Completion], scores: list[float | None]
) -> dict[str, Any]:
    """One line of the file."""
    return {
        "dataset": dataset,
        "model": Path(config.model.path).name if config.model.path != "" else config.run.name,
        "prompt_id": prompt.columns.get("id", prompt.row),
        "prompt": prompt.text,
        "prompt_tokens": len(prompt.token_ids),
        "max_new_tokens": config.rollout.max_new_tokens,
        "temperature": config.rollout.temperature,
        "lengths": [len(completion.token_ids) for completion in completions],
        "truncated": [completion.finish_reason == "length" for completion in completions],
        "scores": scores,
        "first_tokens": [completion.token_ids[:FIRST_TOKENS].tolist() for completion in completions],
    }


if __name__ == "__main__":
    sys.exit(main())

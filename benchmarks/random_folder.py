"""A model folder of a true shape with random weights, and a tokenizer of numbers with a chat template: for runs on a
machine without a network.

python -m benchmarks.random_folder shape=qwen3_1.7b out=FOLDER [dtype=bfloat16]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from tokenizers import pre_tokenizers

from benchmarks import models
from benchmarks.workload import ModelOptions
from infsample_rl.config.command_line import option, run_with_options

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


@dataclass(kw_only=True)
class FolderOptions(ModelOptions):
    """Arguments of this command."""

    dtype: str = option("bfloat16", "dtype of the weights", choices=("float32", "bfloat16", "float16"))
    out: str = option("bench_out/random_model", "the folder")

    def __post_init__(self) -> None:
        if self.shape is None:
            raise ValueError("give shape=qwen3_1.7b or shape=qwen3_8b")


def main() -> int:
    """Write the folder."""
    return run_with_options(write, FolderOptions, usage=__doc__)


def write(options: FolderOptions) -> int:
    """As main()."""
    model, tokenizer = models.load(options)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.chat_template = TEMPLATE
    model.save_pretrained(options.out)
    tokenizer.save_pretrained(options.out)
    print(Path(options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())

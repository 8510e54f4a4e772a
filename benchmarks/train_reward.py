"""The reward of both sides of bench.train. As a command it answers the rival, whose interpreter lacks this package:

python -m benchmarks.train_reward FILE: a line [[prompt number, response], ...] on stdin, a line of rewards on stdout,
both JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infsample_rl.reward.functions import call_function, load_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Scorer:
    """The reasoning_gym reward of a response, or without a file of columns a number made of its tokens, in which any
    two responses differ."""

    def __init__(self, file: str | None) -> None:
        """`file`: a JSON list of every prompt's columns, by prompt number."""
        self.columns: list[dict[str, Any]] | None = None
        if file is not None:
            from infsample_rl.config import RewardFunctionConfig

            self.columns = json.loads(Path(file).read_text())
            self.function = load_function(RewardFunctionConfig(name="reasoning_gym"))

    def __call__(self, tokenizer: PreTrainedTokenizerBase, number: int, token_ids: list[int]) -> float:
        """The reward of prompt `number`'s response."""
        if self.columns is None:
            return sum(token_ids) % 1000 / 1000
        return self.of_text(number, tokenizer.decode(token_ids, skip_special_tokens=True))

    def of_text(self, number: int, text: str) -> float:
        """The same of a response's text."""
        prompt = {"row": number, "messages": [], "text": "", "columns": self.columns[number]}
        return float(call_function(self.function, prompt, [{"text": text}])[0][0])


def main() -> None:
    """Answer until stdin ends."""
    score = Scorer(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps([score.of_text(number, text) for number, text in json.loads(line)]), flush=True)


if __name__ == "__main__":
    main()

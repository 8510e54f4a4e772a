"""Talk to a checkpoint: python -m infsample_rl chat CHECKPOINT [temperature=0.7] [max_new_tokens=512] [system=TEXT]
[section.key=value ...]

CHECKPOINT is RUN/checkpoints/step_N, whose run's chat template settings are taken, or any Hugging Face folder or hub
name. The answer is shown token by token, as the training engine decodes it; temperature=0 is greedy. Lines may also
come through a pipe.

/reset forgets what was said, Ctrl-C ends an answer, Ctrl-D the talk. The same talk gets the same answers, by run.seed.
Exit codes: 0 done; 1 it failed; 2 an input is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TextIO

from infsample_rl.commands.merge import load_policy_folder
from infsample_rl.commands.run_settings import answering_config, leading, quoted
from infsample_rl.config import Config
from infsample_rl.config.command_line import option, parse_with_settings, run_command
from infsample_rl.config.fields import check_temperature
from infsample_rl.data.chat import check_template_kwargs, render
from infsample_rl.data.fields import Problem
from infsample_rl.model.tokenizer import load_tokenizer, response_text
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

HELP = "/reset forgets what was said, Ctrl-C ends an answer, Ctrl-D the talk"
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a character decodes to until all of its bytes are there


@dataclass(kw_only=True)
class ChatOptions:
    """What is no setting of a run."""

    temperature: float = option(0.7, "0: greedy", low=0)
    max_new_tokens: int = option(512, "longest answer in tokens", low=1)
    system: str | None = option(None, "system message; none: the run's data.system_prompt")


class Chat:
    """One talk: what was said, and the engine that answers."""

    def __init__(self, config: Config, options: ChatOptions) -> None:
        self.config, self.temperature = config, options.temperature
        self.engine = answering_engine(config)
        self.tokenizer = self.engine.tokenizer
        self.messages: list[dict[str, str]] = []
        self.turn = 0

    def answer(self, text: str) -> Iterator[str]:
        """The answer to `text` in pieces, as they are decoded. ValueError when the talk outgrows the model's context;
        it then stays as it was."""
        asked = [*self.messages, {"role": "user", "content": text}]
        prompt = render(Problem(row=1, origin="the talk", messages=asked, columns={}), self.tokenizer, self.config.data)
        stream = self.engine.stream(
            [prompt.token_ids.tolist()],
            self.config.run.seed,
            sample_indices=[[0]],
            step=self.turn,
            evaluation=True,
            temperature=self.temperature,
            pause_every=1,
        )
        shown, said = "", ""
        try:
            for ended in stream:
                unfinished = self.engine.unfinished_tokens().get((0, 0), [])
                tokens = ended[0].token_ids.tolist() if ended else unfinished
                said = response_text(self.tokenizer, tokens, self.config.rollout.stop_strings)
                whole = said if ended else said.rstrip(_INCOMPLETE)
                if whole.startswith(shown) and len(whole) > len(shown):
                    yield whole[len(shown) :]
                    shown = whole
        finally:  # also where it is ended by hand: what was said of it stays
            stream.close()
            self.messages, self.turn = [*asked, {"role": "assistant", "content": said}], self.turn + 1

    def obey(self, line: str) -> str:
        """Carry out a line that begins with a slash; what to say."""
        if line != "/reset":
            return HELP
        self.messages, self.turn = [], 0
        return "forgotten"


def answering_engine(config: Config) -> SamplingEngine:
    """What decodes a checkpoint's answers. ValueError in one line."""
    tokenizer = load_tokenizer(config.model)
    check_template_kwargs(tokenizer, config.data)
    model = load_policy_folder(config.model)
    return SamplingEngine(model, tokenizer, config.rollout, doubles=True, lm_head_fp32=config.model.lm_head_fp32)


def chat_config(checkpoint: str, options: ChatOptions, overrides: list[str]) -> Config:
    """The run's settings with what a talk needs. ValueError in one line."""
    check_temperature("temperature", options.temperature)
    if any(override.lstrip("+").startswith("rollout.temperature=") for override in overrides):
        raise ValueError("rollout.temperature is of a run; give temperature= here")
    system = [] if options.system is None else [f"data.system_prompt={quoted(options.system)}"]
    return answering_config(checkpoint, [*system, *overrides], rows=1, max_new_tokens=options.max_new_tokens)


def talk(chat: Chat, lines: TextIO, out: TextIO) -> None:
    """Read lines until they end; answers go to `out` as they are decoded."""
    asks = lines.isatty()
    while True:
        if asks:
            print("\n> ", end="", file=out, flush=True)
        line = lines.readline()
        if not line:
            return
        line = line.strip()
        if not line:
            continue
        # bytes that are no text reach Python as halves of a pair
        line = line.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
        if line.startswith("/"):
            print(chat.obey(line), file=out, flush=True)
            continue
        try:
            for piece in chat.answer(line):
                print(piece, end="", file=out, flush=True)
            print(file=out, flush=True)
        except KeyboardInterrupt:
            print(" ...", file=out, flush=True)
        except ValueError as error:
            print(f"error: {' '.join(str(error).split())}; /reset forgets what was said", file=out, flush=True)


def _run(arguments: list[str]) -> int:
    (checkpoint,) = leading(arguments, "a checkpoint", "chat RUN/checkpoints/step_N")
    options, overrides = parse_with_settings(arguments[1:], ChatOptions)
    chat = Chat(chat_config(checkpoint, options, overrides), options)
    if sys.stdin.isatty():
        print(HELP)
    talk(chat, sys.stdin, sys.stdout)
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    return run_command(_run, arguments, usage=__doc__)

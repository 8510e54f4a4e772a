"""Prompts that go on with what their environments say at the beginning."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from infsample_rl.cluster.interruption import SLICE_S
from infsample_rl.config import Config
from infsample_rl.config.environment import NAMELESS
from infsample_rl.data.chat import of_token_ids, with_opening
from infsample_rl.data.fields import as_given
from infsample_rl.data.turns import TurnTemplate
from infsample_rl.reward.environment_host import EnvironmentFailed, EnvironmentHost
from infsample_rl.types import EpisodeStart, Prompt

log = logging.getLogger(__name__)


class Openings:
    """Opens an episode for every prompt, the same for all its samples; nothing where there are no environments."""

    def __init__(self, config: Config, tokenizer: Any, host: EnvironmentHost | None) -> None:
        self._config, self._tokenizer, self._host = config, tokenizer, host

    def open(self, prompts: list[Prompt], *, position: int, check: Callable[[], None] = lambda: None) -> list[Prompt]:
        """The prompts with their starts. `position`: of the first in the run's data, so that a seed comes once.
        `check`: called while they are waited for; what it raises ends the wait, and no further one is begun.

        One that does not begin, or says more than there is room for, fails in each of its samples, which ask for no
        process and are counted: its prompt goes on without. ValueError for tools that the chat template cannot call."""
        if self._host is None or not prompts:
            return prompts
        threads = ThreadPoolExecutor(self._config.environment.workers)
        try:
            opened = [threads.submit(self._open, prompt, number) for number, prompt in enumerate(prompts, position)]
            waited = set(opened)
            while waited:
                check()
                waited = wait(waited, timeout=SLICE_S).not_done
            return [each.result() for each in opened]
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # close() ends those that have begun

    def close(self) -> None:
        """End the processes of the environments."""
        if self._host is not None:
            self._host.close()

    def _open(self, prompt: Prompt, position: int) -> Prompt:
        assert self._host is not None
        own = prompt.columns.get("prompt")  # a chat in TRL's layout, or the question as a text
        columns = as_given(prompt.columns) | {"prompt": own if isinstance(own, list) else prompt.messages}
        start = EpisodeStart(seed_of(self._config.run.seed, position, prompt), columns)
        try:
            said = self._host.opening(start.seed, start.columns)
        except EnvironmentFailed as error:
            return dataclasses.replace(prompt, start=start._replace(failure=" ".join(str(error).split())))
        data, tools = self._config.data.parts[prompt.source], self._host.tools
        if isinstance(said, str):
            start = start._replace(said=said)
        else:
            start = start._replace(messages=said.messages, tools=said.tools, token_ids=said.token_ids)
            tools = {NAMELESS: said.tools}
            if said.tools:
                stops = self._tokenizer.all_special_ids
                TurnTemplate.of(self._tokenizer, data.chat_template_kwargs, said.tools, stops)
        try:
            if start.token_ids is not None:
                prompt = of_token_ids(prompt, start.token_ids, self._tokenizer, data)
            elif said:
                opening = said if isinstance(said, str) else said.messages
                behind = "" if self._host.form == "tools" else "\n\n"  # as TRL, which puts nothing between
                prompt = with_opening(prompt, opening, self._tokenizer, data, tools, behind)
        except ValueError as error:
            log.warning("%s: its samples fail", error)
            start = EpisodeStart(start.seed, columns, failure=str(error))
        return dataclasses.replace(prompt, start=start)


def seed_of(seed: int, position: int, prompt: Prompt) -> int:
    """Of an episode, 0 to 2**31 - 1."""
    digest = hashlib.sha256(f"{seed}|{position}|{prompt.place}".encode()).digest()
    return int.from_bytes(digest[:4], "little") >> 1

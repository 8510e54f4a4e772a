"""The turns of a call's samples, answered by their environments while others decode."""

from __future__ import annotations

import queue
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from types import MappingProxyType
from typing import Any, Protocol

from infsample_rl.config.environment import EnvironmentConfig, of_row
from infsample_rl.data.turns import ToolCall, TurnTemplate, assistant_message
from infsample_rl.observe.phases import phase
from infsample_rl.rollout.engine.turns import Answer
from infsample_rl.rollout.environment.turn_records import TurnRecords
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.types import Answered, Episode, EpisodeStart, Request

KEYS = count()  # of all calls: an answer to one that is over must not look like one to the next
CUT = "\n[...]\n"  # in the place of what an observation has too much


class Environments(Protocol):
    """Where environments run, each in a process of its own: reward/environment_host.py."""

    form: str  # "tools", "actions" or "program"
    tools: dict[str, list[dict[str, Any]]]  # by the names of environments
    answers: queue.SimpleQueue[tuple[Hashable, dict[str, Any], float]]  # each with its time.monotonic()
    num_replies: int  # grows with all that environments say, also before a request is answered

    def open(self, key: Hashable, start: EpisodeStart) -> None:
        """There is to be an environment of `key`."""

    def ask(self, key: Hashable, request: Request, before: Sequence[Answered] = ()) -> None:
        """Ask it, for a reply that comes into `answers`. `before`: what it answered in another process; the same
        requests bring a new one to where that was."""

    def called_at(self, key: Hashable) -> float | None:
        """When what it was last asked for was begun, by time.monotonic(). None: it waits for its turn."""

    def end(self, key: Hashable) -> None:
        """It is not wanted any more."""

    def close(self) -> None:
        """End all of them."""


@dataclass(slots=True)
class _State:
    """One trajectory."""

    sample: Sample
    key: int
    template: TurnTemplate
    turns: int = 0
    calls: int = 0
    begun: int = 0  # tokens before the turn that is sampled
    rewards: list[float] = field(default_factory=list)  # of turns, where they are actions
    messages: list[dict[str, Any]] = field(default_factory=list)  # of the chat, after the prompt
    is_last: bool = False  # no turn is sampled any more
    names: tuple[str, ...] = ()  # of the tools that have been asked
    asked: int = 0  # requests so far
    request: Request = ()  # the last
    replayed: list[Answered] = field(default_factory=list)  # from the records
    is_live: bool = False  # it has a process
    is_asked: bool = False  # and has not answered yet
    waited_s: float = 0.0
    is_straggler: bool = False
    unfit_tokens: int = 0


class Episodes:
    """Turns of one call of an engine (engine/turns.py)."""

    def __init__(
        self,
        environments: Environments,
        templates: Mapping[str, TurnTemplate],
        config: EnvironmentConfig,
        starts: Mapping[int, EpisodeStart],
        records: TurnRecords | None = None,
    ) -> None:
        """`templates`: by the names of environments. `starts`: by prompt_index, what an environment begins with.
        `records`: what was answered before, and where answers are kept."""
        self._environments, self._templates, self._config, self._starts = environments, templates, config, starts
        self._tokenizer, self._records = next(iter(templates.values())).tokenizer, records
        self._recorded: list[tuple[int, dict[str, Any], float]] = []  # answers of keys that stood in the records
        self._of_sample, self._of_key = dict[Sample, _State](), dict[Hashable, _State]()
        self._of_programs = dict[int, TurnTemplate]()  # by prompt_index
        self._ready: list[Answer] = []  # answered without an environment

    def end(self, sample: Sample, reason: str) -> None:
        """As Turns.end."""
        state = self._of_sample.get(sample) or self._open(sample)
        is_new = len(sample.tokens) > state.begun
        state.unfit_tokens = max(0, state.begun - len(sample.tokens))
        state.turns += is_new
        state.is_last = reason == "length" or state.turns >= self._config.max_turns
        turn = list(sample.tokens[state.begun :])
        state.begun = len(sample.tokens)
        text = self._tokenizer.decode(turn, skip_special_tokens=True) if is_new else None
        found = None
        if state.template.tools and is_new and not state.is_last:
            found = state.template.parse(self._tokenizer.decode(turn))
        calls = found.calls if found else []
        if text is not None:
            state.messages.append(assistant_message(text, calls))
        if failure := self._starts[sample.group.prompt_index].failure:
            self._finish(state, None, failure)
        elif self._environments.form == "program":
            said = text if text is None else state.messages[-1]["content"]
            logprobs = [float(each) for each in sample.logprobs[len(sample.tokens) - len(turn) :]]
            self._act(state, said, calls, (turn, logprobs, reason))
        elif self._environments.form == "actions":
            if text is not None:
                self._ask(state, "act", text, state.is_last)
            else:  # its last observation had no room
                self._finish(state, sum(state.rewards))
        elif found is None or not (found.calls or found.problem):
            state.is_last = True
            self._ask_reward(state)
        elif found.problem:
            state.calls += 1
            self._observe(state, [{"role": "tool", "content": f"error: {found.problem}"}])
        else:
            state.calls += len(calls)
            state.names = tuple(call.name for call in calls)
            self._ask(state, "call", [tuple(call) for call in calls])

    def _act(self, state: _State, said: str | None, calls: Sequence[ToolCall], sampled: tuple[Any, ...]) -> None:
        """Give a program its policy's turn, with calls of the tools that it has offered, or as it was sampled where it
        asks by token ids; None: there is no turn. By messages it is told how long it was, and by "length" that it is
        the last."""
        state.calls += len(calls)
        state.names = tuple(call.name for call in calls)
        sample, (turn, _, reason) = state.sample, sampled
        if self._starts[sample.group.prompt_index].token_ids is None:
            before = len(sample.group.prompt_ids) + len(sample.tokens) - len(turn)
            sampled = [], [], "length" if state.is_last else reason, before, len(turn)
        self._ask(state, "act", said, state.is_last, [tuple(call) for call in calls], sampled)

    def take(self, *, wait_s: float) -> list[Answer]:
        """As Turns.take."""
        replies = self._environments.answers
        while self._recorded:
            self._hear(*self._recorded.pop(0))
        try:
            if not self._ready and wait_s > 0:
                with phase("wait"):
                    reply = replies.get(timeout=wait_s)
                self._hear(*reply)
            while True:
                self._hear(*replies.get_nowait())
        except queue.Empty:
            pass
        if self._config.straggler_s is not None:
            self._end_stragglers(self._config.straggler_s)
        found, self._ready = self._ready, []
        return found

    def close(self) -> None:
        """As Turns.close."""
        for key in [key for key, state in self._of_key.items() if state.is_live]:
            self._environments.end(key)
        self._of_key.clear()
        self._of_sample.clear()
        if self._records is not None:
            self._records.close()

    def _open(self, sample: Sample) -> _State:
        state = self._of_sample[sample] = _State(sample, next(KEYS), self._template(sample.group.prompt_index))
        self._of_key[state.key] = state
        return state

    def _template(self, prompt: int) -> TurnTemplate:
        """With the tools of its row's environment, or those that a program offers."""
        start = self._starts[prompt]
        if not start.tools:
            return of_row(self._templates, start.columns)
        if prompt not in self._of_programs:
            self._of_programs[prompt] = replace(of_row(self._templates, start.columns), tools=start.tools)
        return self._of_programs[prompt]

    def _ask(self, state: _State, what: str, *given: Any) -> None:
        state.request, state.is_asked = (what, *given), True
        state.asked += 1
        found = None
        if self._records is not None and not state.is_live:
            found = self._records.find(self._place(state), state.request)
        if found is not None:
            state.replayed.append((state.request, found))
            self._recorded.append((state.key, found, 0.0))
        elif state.is_live:
            self._environments.ask(state.key, state.request)
        else:
            state.is_live = True
            self._environments.open(state.key, self._starts[state.sample.group.prompt_index])
            self._environments.ask(state.key, state.request, state.replayed)

    def _place(self, state: _State) -> tuple[int, int, int, int]:
        prompt = state.sample.group.prompt_index
        return prompt, state.sample.sample_index, self._starts[prompt].seed, state.asked

    def _hear(self, key: Hashable, reply: dict[str, Any], replied_at: float) -> None:
        """A reply, which may have waited for the engine; one to a call that is over is not wanted."""
        state = self._of_key.get(key)
        if state is None:
            return
        state.waited_s, state.is_asked = state.waited_s + self._call_s(state, replied_at), False
        if state.is_live and self._records is not None:
            self._records.add(self._place(state), state.request, reply)
        limit, goes_on = self._config.straggler_s, "said" in reply and not (reply.get("ended") or state.is_last)
        if limit is not None and goes_on and state.waited_s > limit:
            state.is_last = state.is_straggler = True
        if "said" not in reply and "failed" in reply:
            self._finish(state, None, reply["failed"])
        elif "said" not in reply:
            self._finish(state, reply["reward"], of_functions=reply)
        elif "ended" in reply:
            state.rewards.append(reply["reward"])
            if len(state.rewards) > state.turns:  # of a program that waited for a turn there was no room for
                state.rewards[-2:] = [sum(state.rewards[-2:])]
            if goes_on and state.is_straggler and self._environments.form == "program":
                self._ask(state, "act", None, True)  # as where there is no room: its reward comes with its end
            elif reply["ended"] or state.is_last:
                self._finish(state, sum(state.rewards))
            elif "token_ids" in reply:
                self._observe_ids(state, reply["token_ids"])
            elif state.names:
                self._observe_tools(state, reply["answers"])
            else:
                self._observe(state, [{"role": "user", "content": reply["said"]}])
        elif state.is_last:  # of tools, whose reward has not been asked for
            self._ask_reward(state)
        else:
            self._observe_tools(state, reply["said"], reply.get("lists", {}))

    def _call_s(self, state: _State, until: float) -> float:
        """How long its call has taken by then; that it waited for others' is not its own."""
        began = self._environments.called_at(state.key) if state.is_live else None
        return 0.0 if began is None else until - began

    def _end_stragglers(self, limit: float) -> None:
        """Those whose call goes on above the limit; the last one, as for a reward, may take as much by itself."""
        for state in [each for each in self._of_key.values() if each.is_live and each.is_asked]:
            if (call_s := self._call_s(state, time.monotonic())) + (0.0 if state.is_last else state.waited_s) <= limit:
                continue
            state.waited_s, state.is_straggler = state.waited_s + call_s, True
            if self._environments.form == "actions":
                state.rewards.append(0.0)  # of the turn that has not been answered
                self._finish(state, sum(state.rewards))
            else:  # whose reward comes with their end
                self._finish(state, None, f"its call was cut after {call_s:.0f} s (environment.straggler_s={limit:g})")

    def _observe_tools(
        self, state: _State, answers: list[str], lists: Mapping[str, list[Any]] = MappingProxyType({})
    ) -> None:
        named = zip(state.names, answers, strict=True)
        self._observe(state, [{"role": "tool", "name": name, "content": said} for name, said in named], lists)

    def _observe(
        self, state: _State, messages: list[dict[str, Any]], lists: Mapping[str, list[Any]] = MappingProxyType({})
    ) -> None:
        """`lists`: what of the messages, by number, was a list, which rewards get as such."""
        shown = [each | {"content": self._cut(each["content"])} for each in messages]
        try:
            ids = state.template.observation_ids(shown, state.sample.tokens[-1])
        except ValueError as error:  # of what it says: the template was tried at the start
            return self._finish(state, None, str(error))
        state.begun += len(ids)
        state.messages += [
            each | {"content": lists.get(str(number), each["content"])} for number, each in enumerate(shown)
        ]
        self._ready.append(Answer(state.sample, ids, None))

    def _observe_ids(self, state: _State, ids: list[int]) -> None:
        """Of a program that renders itself."""
        if not ids or max(ids) >= len(self._tokenizer):
            return self._finish(
                state, None, f"token_ids must be from 0 to {len(self._tokenizer) - 1}, got {max(ids, default='none')}"
            )
        most = self._config.max_observation_tokens
        if len(ids) > most:
            cut = self._tokenizer(CUT, add_special_tokens=False)["input_ids"]
            ids = [*ids[: most // 2], *cut, *ids[-(most // 2) :]]
        state.begun += len(ids)
        state.messages.append({"role": "user", "content": self._tokenizer.decode(ids)})
        self._ready.append(Answer(state.sample, ids, None))

    def _ask_reward(self, state: _State) -> None:
        self._ask(state, "reward", list(state.messages))

    def _finish(
        self,
        state: _State,
        reward: float | None,
        failure: str = "",
        of_functions: Mapping[str, Any] | None = None,
    ) -> None:
        if state.is_live:
            self._environments.end(state.key)
        del self._of_key[state.key], self._of_sample[state.sample]
        episode = Episode(
            reward=reward,
            failure=failure,
            turns=state.turns,
            calls=state.calls,
            waited_s=state.waited_s,
            is_straggler=state.is_straggler,
            unfit_tokens=state.unfit_tokens,
            replayed=len(state.replayed),
            turn_rewards=state.rewards,
            messages=state.messages,
            function_rewards=(of_functions or {}).get("functions", {}),
            reported=(of_functions or {}).get("reported", {}),
        )
        self._ready.append(Answer(state.sample, [], episode))

    def _cut(self, text: str) -> str:
        """An observation of at most environment.max_observation_tokens, its middle left out."""
        most = self._config.max_observation_tokens
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(ids) <= most:
            return text
        return self._tokenizer.decode(ids[: most // 2]) + CUT + self._tokenizer.decode(ids[-(most // 2) :])

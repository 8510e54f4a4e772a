"""Turns of a trajectory as tokens: what a chat template adds after a sampled turn, and the tool calls in one.

What the model sampled is never tokenised again. A template is asked what stands behind an assistant's turn: everything
from there on, rendered with the observation, is tokenised by itself and appended to the sampled ids. Where a template
would rewrite earlier turns, as Qwen3's drops their thinking, the sampled ids stand.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jinja2

from infsample_rl.data.bounded_json import load_json
from infsample_rl.data.plain_text import marked, special_tokens, token_ids
from infsample_rl.data.rows import one_line

Message = dict[str, Any]
Schema = dict[str, Any]  # a tool in the form that chat templates take: {"type": "function", "function": {...}}

_SAMPLED = "infsample-rl-stands-for-what-was-sampled"
_QUESTION: Message = {"role": "user", "content": "A question."}
# A thought, whose beginning may stand in the prompt and which may have no end, or a call. As in TRL's reading of
# Qwen3's turns, the one that begins first holds what it has of the other.
_PARTS = re.compile(
    r"\A(?:(?!<think>).)*?</think>|<think>.*?(?:</think>|\Z)|<tool_call>(?P<call>.*?)(?P<end></tool_call>|\Z)",
    re.DOTALL,
)


class ToolCall(NamedTuple):
    """A call that a model asks for."""

    name: str
    arguments: dict[str, Any]


class Turn(NamedTuple):
    """What a sampled turn asks for."""

    calls: list[ToolCall]
    problem: str  # why a call cannot be made, to be answered to the model; "": none


class BadCall(Exception):
    """A text that was meant to be a call, and why it is none."""


@dataclass(frozen=True)
class TurnTemplate:
    """A tokenizer's chat template, as far as it continues a trajectory."""

    tokenizer: Any
    kwargs: Mapping[str, Any]  # data.chat_template_kwargs
    tools: Sequence[Schema]
    stop_token_ids: Collection[int]

    @classmethod
    def of(
        cls, tokenizer: Any, kwargs: Mapping[str, Any], tools: Sequence[Schema], stop_token_ids: Collection[int]
    ) -> TurnTemplate:
        """ValueError in one line for a template that cannot be continued behind what was sampled, or, with tools, whose
        calls are in no known form."""
        template = cls(tokenizer, kwargs, tools, stop_token_ids)
        answer = "tool" if tools else "user"
        template.observation_ids([{"role": answer, "content": "An observation."}])
        if tools:
            template.parse("")
        return template

    def observation_ids(self, messages: Sequence[Message], last: int | None = None) -> list[int]:
        """The ids behind a sampled turn whose `last` token, by default the template's own, stopped it: `messages`, and
        the beginning of the next turn. ValueError where the template refuses them, or puts them elsewhere.

        A special token that stopped it closes it as the template's own would have; behind another stop token, as one of
        rollout.stop_token_ids, the template's own comes first."""
        said = [each | {"content": marked(each["content"], self._special_tokens)} for each in messages]
        behind = self._behind_a_turn(said)
        end = next((end for end in self._ends if behind.startswith(end)), None)
        if end is None:
            shown = repr(behind[:40])
            raise ValueError(f"{self._name} ends an assistant's turn with {shown}, which is no stop token")
        is_closed = last is None or self.tokenizer.decode([last]) == end
        if not is_closed and last in self.tokenizer.all_special_ids:
            # where no message follows GLM's turns have no end: theirs is how the next begins
            is_closed = self._behind_a_turn([], add_generation_prompt=False).startswith(end)
        return token_ids(behind[len(end) :] if is_closed else behind, self.tokenizer)

    def _behind_a_turn(self, messages: Sequence[Message], *, add_generation_prompt: bool = True) -> str:
        turn: Message = {"role": "assistant", "content": _SAMPLED}
        text = self._render([_QUESTION, turn, *messages], add_generation_prompt=add_generation_prompt)
        if text.count(_SAMPLED) != 1:
            raise ValueError(f"{self._name} does not show an assistant's turn as it was sampled")
        return text[text.index(_SAMPLED) + len(_SAMPLED) :]

    def parse(self, text: str) -> Turn:
        """The calls in a sampled turn's text, special tokens and all. ValueError where the template has no known form
        of calls."""
        try:
            return Turn([self._checked(*call) for call in self._find_calls(text)], "")
        except BadCall as error:
            return Turn([], str(error))

    def _checked(self, name: Any, arguments: Any) -> ToolCall:
        """A call of a tool that there is, with what it needs. BadCall otherwise."""
        known = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools}
        if not isinstance(name, str) or name not in known:
            raise BadCall(f"there is no tool {str(name)[:100]!r}; the tools are {', '.join(known)}")
        if not isinstance(arguments, dict):
            raise BadCall(f"the arguments of {name} must be a JSON object, got {repr(arguments)[:100]}")
        parameters = known[name].get("properties") or {}
        missing = [each for each in known[name].get("required") or [] if each not in arguments]
        unknown = [each for each in arguments if each not in parameters]
        if missing:
            raise BadCall(f"{name} needs the argument {missing[0]!r}")
        if unknown:
            raise BadCall(f"{name} has no argument {unknown[0]!r}; its arguments are {', '.join(parameters) or 'none'}")
        return ToolCall(name, arguments)

    @cached_property
    def _find_calls(self) -> Callable[[str], list[tuple[Any, Any]]]:
        """Reads calls as the template writes them. ValueError where it writes them in no known form."""
        function = {"name": "probe_name", "arguments": {"probe_key": "probe value"}}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        written = self._render([_QUESTION, call], add_generation_prompt=False)
        shown = written[written.rfind("probe_name") - 60 :] if "probe_name" in written else ""
        forms = (r"<function=probe_name>", self._xml_calls), (r"<arg_key>probe_key</arg_key>", self._tagged_calls)
        for mark, read in (*forms, (r'<tool_call>\s*{"name"', json_calls)):
            if re.search(mark, written):
                return read
        if re.search(r'{"name": "probe_name", "parameters": ', written):
            return bare_json_calls
        raise ValueError(
            f"{self._name} writes tool calls in no known form: {' '.join(shown.split())[:160] or 'none at all'}; "
            "model.chat_template=FILE gives another"
        )

    def _xml_calls(self, text: str) -> list[tuple[Any, Any]]:
        """<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>, as Qwen3-Coder."""
        found = []
        for body in _bodies(text):
            function = re.fullmatch(r"\s*<function=([^>\s]+)>(.*)</function>\s*", body, re.DOTALL)
            if function is None:
                raise BadCall("a tool call must be <function=NAME>...</function>")
            values = re.findall(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", function[2], re.DOTALL)
            found.append((function[1], {key: self._typed(function[1], key, value) for key, value in values}))
        return found

    def _tagged_calls(self, text: str) -> list[tuple[Any, Any]]:
        """<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>, as GLM."""
        found = []
        for body in _bodies(text):
            name = body.partition("<arg_key>")[0].strip()
            pairs = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
            found.append((name, {key: self._typed(name, key, value) for key, value in pairs}))
        return found

    def _typed(self, name: str, key: str, value: str) -> Any:
        """An argument that was written as text, in the type that the tool's schema says."""
        schemas = [tool["function"].get("parameters") or {} for tool in self.tools if tool["function"]["name"] == name]
        kind = (schemas[0].get("properties") or {}).get(key, {}).get("type") if schemas else None
        if kind in (None, "string"):
            return value
        try:
            return load_json(value.lower() if kind == "boolean" else value)
        except ValueError:
            raise BadCall(f"the argument {key!r} of {name} must be of type {kind}, got {value[:60]!r}") from None

    def _render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        tools: dict[str, Any] = {"tools": list(self.tools)} if self.tools else {}
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **tools, **self.kwargs
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise ValueError(f"{self._name} refuses {messages[-1]['role']} messages: {one_line(error)}") from error
        return text

    @cached_property
    def _ends(self) -> list[str]:
        return [self.tokenizer.decode([token]) for token in self.stop_token_ids]

    @cached_property
    def _special_tokens(self) -> list[str]:
        return special_tokens(self.tokenizer)

    @property
    def _name(self) -> str:
        return f"the chat template of {self.tokenizer.name_or_path}"


def json_calls(text: str) -> list[tuple[Any, Any]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, as Qwen and Hermes."""
    return [_named(body, "arguments") for body in _bodies(text)]


def bare_json_calls(text: str) -> list[tuple[Any, Any]]:
    """A turn that is {"name": ..., "parameters": {...}} and nothing else, as Llama 3."""
    body = re.sub(r"<\|[a-z_]+\|>", "", text).strip()
    return [_named(body, "parameters")] if body.startswith('{"name"') else []


def templates_of(
    tokenizer: Any, kwargs: Mapping[str, Any], tools: Mapping[str, Sequence[Schema]], stop_token_ids: Collection[int]
) -> dict[str, TurnTemplate]:
    """By the names of environments. As TurnTemplate.of."""
    return {name: TurnTemplate.of(tokenizer, kwargs, schemas, stop_token_ids) for name, schemas in tools.items()}


def assistant_message(text: str, calls: Sequence[ToolCall]) -> Message:
    """A turn as a message of a chat, from its text without special tokens; with calls, the content is what stands
    before them."""
    if not calls:
        return {"role": "assistant", "content": text}
    functions = [{"type": "function", "function": {"name": name, "arguments": given}} for name, given in calls]
    tagged = _calls(text)
    before = text[: tagged[0].start()].strip() if tagged else ""
    return {"role": "assistant", "content": before, "tool_calls": functions}


def _named(body: str, arguments: str) -> tuple[Any, Any]:
    try:
        call = load_json(body)
    except ValueError as error:
        raise BadCall(f"a tool call must be JSON: {one_line(error)}") from None
    if not isinstance(call, dict) or "name" not in call:
        raise BadCall(f'a tool call must be {{"name": ..., "{arguments}": {{...}}}}')
    return call["name"], call.get(arguments, {})


def _calls(text: str) -> list[re.Match[str]]:
    """Of _PARTS: what is called in a thought is a draft."""
    return [part for part in _PARTS.finditer(text) if part["call"] is not None]


def _bodies(text: str) -> list[str]:
    """What stands in the tags of calls; BadCall for one that is not closed."""
    calls = _calls(text)
    if any(not call["end"] for call in calls):
        raise BadCall("a <tool_call> has no </tool_call>")
    return [call["call"] for call in calls]

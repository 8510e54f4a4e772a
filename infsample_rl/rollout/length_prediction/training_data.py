"""What a length predictor is trained on: prompts with the first k tokens, as text, and the length of every response.

Three kinds of source are read:
- recordings (`recordings.py`) with `prompt` and `first_tokens`;
- a run's completions.jsonl, whose lines need step, prompt_index, row, prompt, response, length and finish_reason
("length": cut at the cap);
- a hub data set of chats by name, such as lmsys/lmsys-chat-1m, or a local folder laid out like one, whose rows need
  conversation, a list of {"role", "content"}; the first question and its answer are taken, and the answer's end token
  is counted.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from infsample_rl.data.sources import load_hub
from infsample_rl.model.hub import cached_only
from infsample_rl.rollout.length_prediction.recordings import (
    SUFFIXES,
    Recording,
    check_field,
    is_count,
    read_lines,
    read_recordings,
)

RUN_TEXTS = ("prompt", "response", "finish_reason")
RUN_COUNTS = ("step", "prompt_index", "row")


@dataclass(frozen=True, kw_only=True, slots=True)
class TextGroup:
    """One prompt's samples. Example: TextGroup(key="gsm8k|17", prompt="2+2=", prefixes={2: [" 4", None]}, lengths=[9,
    2], censored=[False, False])"""

    key: str  # the prompt's name: samples of equal keys are never split between training and held-out
    prompt: str
    # for each k the text of each sample's first k tokens; None for a sample that ended within them
    prefixes: dict[int, list[str | None]]
    lengths: list[int]
    censored: list[bool]


def read_groups(source: str, tokenizer: str | None, ks: list[int], max_prompts: int | None = None) -> list[TextGroup]:
    """The prompts of a source, at most `max_prompts`. `tokenizer`: the policy's, a folder; None: the folder a recording
    names as its model.

    ValueError in one line for a source that cannot be had or lacks what is needed.
    """
    path = Path(source)
    if not (path.is_file() or source.endswith(SUFFIXES)):
        return chat_groups(source, load_tokenizer(tokenizer, source), ks, max_prompts or 100_000)
    _, first = next(read_lines(path), ("", {}))
    if "lengths" not in first and "response" in first:
        return completion_groups(path, load_tokenizer(tokenizer, source), ks)[:max_prompts]
    recordings = read_recordings(path)[:max_prompts]
    loaded = {
        name: load_tokenizer(tokenizer or _model_folder(name, source), source)
        for name in {recording.model for recording in recordings}
    }
    return [recording_group(recording, loaded[recording.model], ks, source) for recording in recordings]


def recording_group(
    recording: Recording, tokenizer: PreTrainedTokenizerBase, ks: list[int], source: str = "recordings"
) -> TextGroup:
    """A recording with its first tokens as text. ValueError when it has no prompt, fewer first tokens than k, or ids
    that the tokenizer lacks."""
    where = f"{source}: the recording of {recording.prompt_id}"
    if recording.prompt is None or recording.first_tokens is None:
        missing = "prompt" if recording.prompt is None else "first_tokens"
        raise ValueError(
            f"{where} has no {missing}, which a predictor reads; record it with scripts/record_completions.py"
        )
    for length, tokens in zip(recording.lengths, recording.first_tokens, strict=True):
        if len(tokens) < min(length, max(ks)):
            raise ValueError(
                f"{where} has {len(tokens)} first_tokens of {length}; the longest prefix_tokens that works is "
                f"{len(tokens)}"
            )
    highest = max(max(tokens) for tokens in recording.first_tokens)
    if highest >= len(tokenizer):
        text = f"{where} has token {highest}, and the tokenizer has {len(tokenizer)}"
        raise ValueError(f"{text}: give the tokenizer of the model that was recorded, {recording.model}")
    prefixes = _prefixes(tokenizer, recording.first_tokens, recording.lengths, ks)
    return TextGroup(
        key=recording.key,
        prompt=recording.prompt,
        prefixes=prefixes,
        lengths=recording.lengths,
        censored=recording.censored,
    )


def completion_groups(path: Path, tokenizer: PreTrainedTokenizerBase, ks: list[int]) -> list[TextGroup]:
    """The samples in a run's completions.jsonl, those of one step and prompt together. The response's text is tokenised
    anew."""
    rows = [(place, _run_fields(fields, place)) for place, fields in read_lines(path)]
    groups = []
    for (_, _, row), found in itertools.groupby(rows, key=lambda item: tuple(item[1][name] for name in RUN_COUNTS)):
        samples = [fields for _, fields in found]
        ids = tokenizer([sample["response"] for sample in samples], add_special_tokens=False)["input_ids"]
        lengths = [sample["length"] for sample in samples]
        groups.append(
            TextGroup(
                key=f"row {row}",
                prompt=samples[0]["prompt"],
                prefixes=_prefixes(tokenizer, ids, lengths, ks),
                lengths=lengths,
                censored=[sample["finish_reason"] == "length" for sample in samples],
            )
        )
    return groups


def chat_groups(name: str, tokenizer: PreTrainedTokenizerBase, ks: list[int], max_prompts: int) -> list[TextGroup]:
    """The first question and answer of each chat, one sample a prompt; rows without both are passed over."""
    try:
        rows = load_hub(name, None, "train")
    except ValueError as error:
        text = f"recordings={name}: neither a file nor a data set that can be loaded: {error}"
        raise ValueError(f"{text}; give a .jsonl file or a folder") from None
    groups = []
    for row in itertools.islice(rows, max_prompts):
        if "conversation" not in row:
            raise ValueError(
                f"recordings={name}: its rows have no field conversation, only {', '.join(row)}; lmsys/lmsys-chat-1m "
                "has it"
            )
        turns = [(turn["role"], turn["content"]) for turn in row["conversation"][:2]]
        if [role for role, _ in turns] != ["user", "assistant"] or not all(content.strip() for _, content in turns):
            continue
        messages = [{"role": "user", "content": turns[0][1]}]
        templated = tokenizer.chat_template is not None
        prompt: Any = (
            tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            if templated
            else turns[0][1]
        )
        ids = tokenizer(turns[1][1], add_special_tokens=False)["input_ids"]
        lengths = [len(ids) + 1]
        groups.append(
            TextGroup(
                key=prompt,
                prompt=prompt,
                prefixes=_prefixes(tokenizer, [ids], lengths, ks),
                lengths=lengths,
                censored=[False],
            )
        )
    if not groups:
        raise ValueError(f"recordings={name}: no row has a question of the user and an answer to it")
    return groups


def split_groups(groups: list[TextGroup], held_out: float, seed: int) -> tuple[list[TextGroup], list[TextGroup]]:
    """(training, held-out) groups, split by prompt as `held_out_keys` says."""
    held = held_out_keys([group.key for group in groups], held_out, seed)
    return [group for group in groups if group.key not in held], [group for group in groups if group.key in held]


def held_out_keys(keys: Iterable[str], share: float, seed: int) -> set[str]:
    """Prompts to hold out: about `share` of them, at least one, never all. Equal prompts and seeds, equal choice.

    ValueError for a share that is not between 0 and 1 and for fewer than two prompts.
    """
    if not 0 < share < 1:
        raise ValueError(
            f"held_out must be above 0 and below 1, got {share}; the nearest that makes sense is "
            f"{0.1 if share <= 0 else 0.9}"
        )
    names = sorted(set(keys))
    if len(names) < 2:
        raise ValueError(f"the recordings hold {len(names)} prompt; two are needed, one of them held out")
    random.Random(seed).shuffle(names)
    return set(names[: min(len(names) - 1, max(1, round(share * len(names))))])


def _prefixes(
    tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], lengths: list[int], ks: list[int]
) -> dict[int, list[str | None]]:
    decode: Callable[[list[int]], Any] = tokenizer.decode  # a str, for one list of ids
    return {k: [decode(row[:k]) if length > k else None for row, length in zip(ids, lengths, strict=True)] for k in ks}


def _run_fields(fields: dict[str, Any], place: str) -> dict[str, Any]:
    needed = (*RUN_TEXTS, *RUN_COUNTS, "length")
    for name in needed:
        if name not in fields:
            raise ValueError(f"{place} has no field {name}; a run's completions need {', '.join(needed)}")
    for name in RUN_TEXTS:
        check_field(isinstance(fields[name], str), place, name, "a text", fields[name])
    for name in RUN_COUNTS:
        check_field(isinstance(fields[name], int), place, name, "a whole number", fields[name])
    check_field(is_count(fields["length"]), place, "length", "a whole number >= 1", fields["length"])
    check_field(
        fields["finish_reason"] in ("stop", "length"), place, "finish_reason", "stop or length", fields["finish_reason"]
    )
    return fields


def _model_folder(model: str, source: str) -> str:
    if not Path(model).is_dir():
        raise ValueError(
            f"{source} was recorded with {model}, which is no folder here: give tokenizer=FOLDER, the policy's"
        )
    return model


def load_tokenizer(folder: str | None, source: str) -> PreTrainedTokenizerBase:
    """The policy's tokenizer that `source` needs; ValueError when there is none."""
    if folder is None:
        raise ValueError(
            f"{source} does not name its model's folder: give tokenizer=FOLDER, the policy's, which counts and cuts "
            "the tokens"
        )
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=cached_only(folder))
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(
            f"tokenizer={folder}: no tokenizer could be loaded ({' '.join(str(error).split())[:160]})"
        ) from None

"""Drafts of what a sample may say next: from its prompt, its siblings and itself, the prompt's earlier samples, and
those of other prompts."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from infsample_rl.config.rollout import MOST_DRAFTS
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample

if TYPE_CHECKING:  # needs torch
    from infsample_rl.rollout.kernels.cpu_kernels import Kernels


MOST_BYTES = 64 * 2**20  # of all prompts' texts; beyond it prompts are forgotten, the one used least recently first
OTHERS_BYTES = 32 * 2**20  # of the newest samples of all prompts together, at most
BYTES_PER_TOKEN = 80  # at most, when vectors have just grown
NOTHING = array("i", [-1] * 5)  # before the samples of all prompts: the first tokens of a text are not looked up
TRIM_EVERY = 16_384  # tokens that may be new
Texts = tuple[bytes, Sequence[bytes]]  # int32 tokens of a prompt and of its samples


def needs_compiler(setting: str, value: object) -> str:
    """What is said where so many tokens are to be drafted and the kernels cannot be had."""
    return (
        f"{setting}={value} needs a C++ compiler, for what finds the tokens to draft, and none works here: install "
        f"g++, name one in CXX, or take {setting}=0"
    )


class Drafter:
    """Drafts by the longest match of a sample's last tokens (kernels/cpu_drafts.h) in its prompt's texts, or in the
    samples of other prompts where those say little. Texts are kept from call to call, so that a prompt's samples of an
    earlier epoch draft for those of the next. What it drafts changes no sample."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._texts: OrderedDict[bytes, _PromptTexts] = OrderedDict()  # by prompt, the one used last at the end
        self._of_group: dict[PromptGroup, _PromptTexts] = {}
        self._of_all = _Texts(kernels, NOTHING)  # the newest samples that have ended, of every prompt
        self._newest: list[array[int]] = []  # those samples
        self._tokens, self._matches = (ctypes.c_int32 * MOST_DRAFTS)(), (ctypes.c_int32 * MOST_DRAFTS)()
        self._tokens_since = 0
        self.num_kept = 0  # samples so far, those that were forgotten since among them

    def draft(self, sample: Sample, most: int) -> tuple[list[int], list[int]]:
        """Up to `most` tokens that may follow the sample's, each with the tokens of the match that it was found by:
        less than 0 where it is in other prompts' samples."""
        texts = self._of_group.get(sample.group) or self.open(sample.group, sample.group.prompt_ids)
        count = texts.draft(sample, self._of_all, min(most, MOST_DRAFTS), self._tokens, self._matches)
        self._count(1 + MOST_DRAFTS)
        return self._tokens[:count], self._matches[:count]

    def end(self, sample: Sample) -> None:
        """The sample has ended: all its tokens draft for others."""
        texts = self._of_group.get(sample.group) or self.open(sample.group, sample.group.prompt_ids)
        self.num_kept += texts.end(sample)
        self._add_to_all(sample.tokens)
        self._count(len(sample.tokens))

    def leave(self, group: PromptGroup) -> None:
        """All samples of a prompt have ended."""
        texts = self._of_group.pop(group, None)
        if texts is not None:
            texts.forget(group)

    def close(self) -> None:
        """A call has ended."""
        for group in list(self._of_group):
            self.leave(group)
        self._trim()

    def _add_to_all(self, tokens: array[int]) -> None:
        if self._of_all.num_bytes > OTHERS_BYTES // 2:  # what it takes doubles where it grows
            self._newest = _last(self._newest, OTHERS_BYTES // 4 // BYTES_PER_TOKEN)
            self._of_all = _Texts(self._kernels, NOTHING)
            for each in self._newest:
                self._of_all.add(each)
        self._newest.append(tokens)
        self._of_all.add(tokens)

    def _count(self, tokens: int) -> None:
        self._tokens_since += tokens
        if self._tokens_since >= TRIM_EVERY:
            self._trim()

    def _trim(self) -> None:
        """Forget prompts until MOST_BYTES are kept; of the one used last, where it alone takes more, the newest samples
        stay, within half of them. One that is resident begins anew with the samples that it has."""
        self._tokens_since, left = 0, MOST_BYTES
        for prompt in reversed(list(self._texts)):
            num_bytes = self._texts[prompt].num_bytes
            if num_bytes <= left:
                left -= num_bytes
                continue
            forgotten = self._texts.pop(prompt)
            for group in [group for group, texts in self._of_group.items() if texts is forgotten]:
                del self._of_group[group]
            if left == MOST_BYTES:
                texts, ended = self._new(prompt), [array("i", tokens) for tokens in forgotten.ended]
                for tokens in _last(ended, MOST_BYTES // 2 // BYTES_PER_TOKEN):
                    texts.add(tokens)
                left -= texts.num_bytes

    def ended(self) -> list[Texts]:
        """What is kept of samples that have ended, each once; the prompt used last at the end."""
        return [(prompt, list(texts.ended)) for prompt, texts in self._texts.items() if texts.ended]

    def add(self, prompt: bytes, samples: Iterable[bytes]) -> None:
        """Samples that were drawn before, as ended() gives them; those that are here already are left out."""
        texts = self._texts.get(prompt) or self._new(prompt)
        for tokens in samples:
            if tokens not in texts.ended:
                texts.add(array("i", tokens))
                self.num_kept += 1
                self._add_to_all(array("i", tokens))

    def knows(self, group: PromptGroup) -> bool:
        """Whether the group's texts are open."""
        return group in self._of_group

    def open(self, group: PromptGroup, prompt_ids: Sequence[int]) -> _PromptTexts:
        """The texts of a group whose prompt has these ids."""
        prompt = array("i", prompt_ids).tobytes()
        texts = self._of_group[group] = self._texts.get(prompt) or self._new(prompt)
        self._texts.move_to_end(prompt)
        return texts

    def _new(self, prompt: bytes) -> _PromptTexts:
        texts = self._texts[prompt] = _PromptTexts(self._kernels, array("i", prompt))
        return texts


def shared_out(wanted: Sequence[int], room: int) -> list[int]:
    """How much of what every row wants it gets of the room: one for each in turn."""
    counts = [0] * len(wanted)
    while room > 0 and any(count < want for count, want in zip(counts, wanted, strict=True)):
        for row, want in enumerate(wanted):
            if counts[row] < want and room > 0:
                counts[row] += 1
                room -= 1
    return counts


def _last(samples: list[array[int]], tokens: int) -> list[array[int]]:
    """The last samples, of at most so many tokens."""
    first = len(samples)
    while first and len(samples[first - 1]) <= tokens:
        first -= 1
        tokens -= len(samples[first])
    return samples[first:]


class _Texts:
    """Samples after a prompt."""

    def __init__(self, kernels: Kernels, prompt: array[int]) -> None:
        self._kernels = kernels
        self.handle = kernels.open_drafts(prompt.buffer_info()[0], len(prompt))
        weakref.finalize(self, kernels.close_drafts, self.handle)

    @property
    def num_bytes(self) -> int:
        return self._kernels.bytes_of_drafts(self.handle)

    def add(self, tokens: array[int]) -> None:
        """A sample that has ended."""
        text = self._kernels.open_text(self.handle)
        self._kernels.extend_text(self.handle, text, tokens.buffer_info()[0], len(tokens))


class _PromptTexts(_Texts):
    """One prompt's samples: those that run, and those that have ended."""

    def __init__(self, kernels: Kernels, prompt: array[int]) -> None:
        super().__init__(kernels, prompt)
        self.known: dict[Sample, list[int]] = {}  # of those that run: number of its text, tokens in it
        self.ended: dict[bytes, None] = {}  # tokens, in the order of their ends
        self._bytes_of_ended = 0

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self._bytes_of_ended

    def draft(self, sample: Sample, others: _Texts, most: int, tokens: ctypes.Array, matches: ctypes.Array) -> int:
        """How many tokens are found."""
        found = (others.handle, most, tokens, matches)
        return self._kernels.draft(self.handle, *self._new_tokens(sample), *found)

    def end(self, sample: Sample) -> bool:
        """Whether its tokens are new."""
        self._kernels.extend_text(self.handle, *self._new_tokens(sample))
        del self.known[sample]
        return self._keep(sample.tokens.tobytes())

    def add(self, tokens: array[int]) -> None:
        super().add(tokens)
        self._keep(tokens.tobytes())

    def forget(self, group: PromptGroup) -> None:
        """Its samples have ended, or will not go on; another group may have the same prompt."""
        for sample in [sample for sample in self.known if sample.group is group]:
            del self.known[sample]

    def _keep(self, tokens: bytes) -> bool:
        if tokens in self.ended:
            return False
        self.ended[tokens] = None
        self._bytes_of_ended += len(tokens)
        return True

    def _new_tokens(self, sample: Sample) -> tuple[int, int, int]:
        """Number of the sample's text, and address and count of its tokens that are not in it yet, but now will be."""
        known = self.known.get(sample)
        if known is None:
            known = self.known[sample] = [self._kernels.open_text(self.handle), 0]
        text, before = known
        address, known[1] = sample.tokens.buffer_info()
        return text, address + before * sample.tokens.itemsize, known[1] - before

"""Drafted tokens in a simulation, from the token ids that samples are known to have."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from infsample_rl.config.rollout import MOST_QUERIES
from infsample_rl.rollout.schedule.drafter import Drafter, needs_compiler, shared_out
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner

UNKNOWN = itertools.count(1)  # of prompts whose ids are not known: none is the prompt of another


class Text(NamedTuple):
    """Token ids of a prompt and of its samples."""

    prompt: Sequence[int]
    samples: Sequence[Sequence[int]]


class Accepted(NamedTuple):
    """Drafted tokens that a row kept in a running step, counted from 0."""

    row: int
    step: int
    tokens: int


class Drafting:
    """Drafted tokens of one call, as with a fixed rollout.speculate."""

    def __init__(self, texts: Sequence[Text] | None, drafts: int, drafter: Drafter | None = None) -> None:
        """`drafter`: knows the calls before. ValueError without texts, and where the drafter cannot be compiled."""
        if texts is None:
            raise ValueError(f"drafts={drafts} needs token ids")
        self._drafter, self._texts, self._drafts = drafter or new_drafter(drafts), texts, drafts
        self.drafted_tokens, self.accepted = 0, list[Accepted]()

    def accept(self, planner: StepPlanner, rows: Sequence[Sample]) -> None:
        """Draft for the rows of a step, whose new tokens are counted, and count the drafts that are right."""
        room, found = MOST_QUERIES - len(rows), []
        for sample in rows if room > 0 else ():
            text = self._text_of(sample)
            sample.tokens.extend(text[len(sample.tokens) : sample.num_tokens - 1])
            draft = self._drafter.draft(sample, self._drafts)[0] if sample.tokens else []
            found.append((sample, draft, text[sample.num_tokens - 1 :]))
        counts = shared_out([len(draft) for _, draft, _ in found], room)
        lent = [planner.lend_pages(sample, count) for (sample, *_), count in zip(found, counts, strict=True)]
        for (sample, draft, following), count in zip(found, lent, strict=True):
            draft = draft[:count]
            self.drafted_tokens += len(draft)
            right = 0
            # the last token of all is never a draft that another follows
            while right < min(len(draft), len(following) - 1) and draft[right] == following[right]:
                right += 1
            planner.accept(sample, right)
            if right:
                self.accepted.append(Accepted(sample.slot, planner.running_steps - 1, right))

    def end(self, ended: Sequence[Sample]) -> None:
        """These samples have ended."""
        for sample in ended:
            sample.tokens.extend(self._text_of(sample)[len(sample.tokens) :])
            self._drafter.end(sample)

    def close(self) -> None:
        """The call has ended."""
        self._drafter.close()

    def _text_of(self, sample: Sample) -> Sequence[int]:
        text = self._texts[sample.group_id]
        if not self._drafter.knows(sample.group):  # its ids are not known to the planner
            self._drafter.open(sample.group, text.prompt or [-next(UNKNOWN)])
        return text.samples[sample.sample_index]


def new_drafter(drafts: int) -> Drafter:
    """For so many drafted tokens. ValueError where it cannot be compiled."""
    from infsample_rl.rollout.kernels import cpu_kernels  # needs torch

    kernels = cpu_kernels.load("no tokens are drafted") if cpu_kernels.has_compiler() else None
    if kernels is None:
        raise ValueError(needs_compiler("speculate", drafts))
    return Drafter(kernels)

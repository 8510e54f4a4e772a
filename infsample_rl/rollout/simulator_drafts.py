"""Drafted tokens in a simulation, from the token ids that samples are known to have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from infsample_rl.config.rollout import MOST_QUERIES
from infsample_rl.rollout.schedule.drafter import Drafter, shared_out
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlanner


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
    """Drafted tokens, as with a fixed rollout.speculate."""

    def __init__(self, texts: Sequence[Text] | None, drafts: int) -> None:
        """ValueError without texts, and where the drafter cannot be compiled."""
        from infsample_rl.rollout.kernels import cpu_kernels  # needs torch

        kernels = cpu_kernels.load()
        if texts is None or kernels is None:
            raise ValueError(f"drafts={drafts} needs {'token ids' if texts is None else 'a C++ compiler'}")
        self._drafter, self._texts, self._drafts = Drafter(kernels), texts, drafts
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
        for (sample, draft, following), count in zip(found, counts, strict=True):
            draft = draft[: planner.lend_pages(sample, count)]
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

    def _text_of(self, sample: Sample) -> Sequence[int]:
        text = self._texts[sample.group_id]
        if not self._drafter.knows(sample.group):  # its ids are not known to the planner
            # a token of its own where its prompt's are not known: it is not the prompt of others
            self._drafter.open(sample.group, text.prompt or [-1 - sample.group_id])
        return text.samples[sample.sample_index]

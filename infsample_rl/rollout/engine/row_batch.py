"""The rows of a decode step as tensors. What stays the same from step to step is not written again.

Letters: M most rows, R rows now, P most resident prompts, n pages, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample

IDLE = np.array([[0], [-1], [0], [0], [0]])  # columns of a row without a sample
ALIGNMENT = 64  # bytes; kernels load 16 at a time


class _Mirrored:
    """Arrays of the host, and a tensor of the device for each, all in one piece of memory on either side: one copy
    brings all of them over. On the CPU the tensors are the arrays."""

    def __init__(self, arrays: Sequence[np.ndarray], device: torch.device) -> None:
        sizes = [-(-values.nbytes // ALIGNMENT) * ALIGNMENT for values in arrays]
        self._host = torch.zeros(sum(sizes), dtype=torch.uint8)
        self._on_device = self._host.to(device)
        hosts, devices = self._host.split(sizes), self._on_device.split(sizes)
        self.arrays = [
            piece.numpy()[: values.nbytes].view(values.dtype).reshape(values.shape)
            for values, piece in zip(arrays, hosts, strict=True)
        ]
        self.tensors = [
            piece[: values.nbytes].view(torch.from_numpy(values).dtype).view(values.shape)
            for values, piece in zip(arrays, devices, strict=True)
        ]
        for kept, values in zip(self.arrays, arrays, strict=True):
            kept[...] = values
        self.send()

    def send(self) -> None:
        """Let the device have what the arrays hold, in stream order. Pinned memory comes from torch's cache, which
        waits for the copy before it lends it again."""
        if self._on_device is not self._host:
            self._on_device.copy_(self._host.pin_memory(), non_blocking=True)


class RowBatch:
    """Page tables, lengths, noise keys and newest tokens of all rows, allocated once; prompts by the place they got.

    A row is a sample, or a token drafted after a sample's newest (spread). It has an attribute for every tensor that
    the kernels of a step take, so there are many. A row whose sample has no token yet lies at length 1; so do, on the
    scratch page, the rows behind the last, up to `max_rows`: a step may run more rows than there are. Host values reach
    the device in stream order, without a host sync.
    """

    def __init__(
        self,
        max_rows: int,
        row_pages: int,
        max_prompts: int,
        prompt_pages: int,
        scratch_page: int,
        device: torch.device,
    ) -> None:
        self.max_rows, self.scratch_page, self.device = max_rows, scratch_page, device
        of_rows = np.repeat(IDLE, max_rows, axis=1), np.array([[1], [0]], dtype=np.int32).repeat(max_rows, axis=1)
        tables = [
            np.full(size, scratch_page, np.int32) for size in ((max_rows, row_pages), (max_prompts, prompt_pages))
        ]
        of_prompts = np.zeros(max_prompts, dtype=np.int32), np.zeros(max_prompts + 1, dtype=np.int32)
        self._mirrored = _Mirrored([*of_rows, *tables, *of_prompts], device)
        self._columns, self._numbers, self._tables, *self._of_prompts = self._mirrored.arrays
        columns, numbers, self.tables, *prompts = self._mirrored.tensors
        # The newest token of each row, its place in the response (-1: no token yet), the tokens of the row's prompt,
        # the noise key, and whether there is a sample (1 or 0): int64 [M] each.
        self.tokens, self.positions, self.starts, self.keys, self.has_sample = columns
        self.lengths, self.prompt_of_row = numbers  # int32 [M]; own tokens that a row sees in this step
        self.prompt_tables, self.prompt_lengths, self.prompt_row_starts = prompts
        self.num_rows = 0
        self.groups: list[PromptGroup] = []  # by place
        self.first_rows: dict[int, int] = {}  # {row: sample} of those that take their prompt's logits
        self.max_length = 1  # of `lengths`
        # of the samples: prompt's tokens, noise key, 1, prompt's place; pages; how many of them are written
        self._of_samples = np.zeros((4, 0), dtype=np.int64)
        self._pages_of_samples = np.zeros_like(self._tables)
        self._num_pages: list[int] = []

    @property
    def moving(self) -> list[tuple[Tensor, int | None]]:
        """What a step changes or writes by, each with its value where no row has a sample; None: any."""
        idle = (self.scratch_page, None, -1, 1, 0)
        return list(zip((self.tables, self.tokens, self.positions, self.lengths, self.has_sample), idle, strict=True))

    @property
    def is_spread(self) -> bool:
        """Whether some rows are drafted tokens."""
        return self.num_rows > len(self._num_pages)

    def arrange(self, samples: Sequence[Sample]) -> None:
        """Write all rows anew, one for each sample; those of one prompt are neighbours. Every sample's tokens must be
        complete but for this step's."""
        self.groups = list(dict.fromkeys(sample.group for sample in samples))
        place = {group: index for index, group in enumerate(self.groups)}
        columns = [(len(each.group.prompt_ids), each.key, 1, place[each.group]) for each in samples]
        self._of_samples = np.array(columns, dtype=np.int64).reshape(-1, 4).T
        self._pages_of_samples[:], self._num_pages = self.scratch_page, [0] * len(samples)
        tables, lengths, _ = self._of_prompts
        tables[:], lengths[:] = self.scratch_page, 0
        for index, group in enumerate(self.groups):
            tables[index, : len(group.pages)] = group.pages
            lengths[index] = len(group.prompt_ids)
        self.spread(samples, [()] * len(samples))

    def spread(self, samples: Sequence[Sample], drafts: Sequence[Sequence[int]]) -> None:
        """The same samples again, after each a row for every token drafted after its newest, which sees those before
        it."""
        tokens: list[int] = []
        positions: list[int] = []
        self.first_rows = {}
        for index, (sample, draft) in enumerate(zip(samples, drafts, strict=True)):
            length = len(sample.tokens)
            if not length:
                self.first_rows[len(tokens)] = index
            tokens.append(sample.tokens[-1] if length else 0)
            tokens += draft
            positions += range(length - 1, length + len(draft))
        self.num_rows = rows = len(tokens)
        of_row = np.repeat(np.arange(len(samples)), [1 + len(draft) for draft in drafts])
        fixed = self._of_samples[:, of_row]
        self._columns[:, rows:], self._columns[2:, :rows] = IDLE, fixed[:3]
        self._columns[0, :rows], self._columns[1, :rows] = tokens, positions
        self._numbers[0] = np.maximum(self._columns[1] + 1, 1)
        self._numbers[1, :rows], self._numbers[1, rows:] = fixed[3], 0
        self._note_pages(samples)
        self._tables[:rows], self._tables[rows:] = self._pages_of_samples[of_row], self.scratch_page
        self.max_length = max(1, max(positions, default=0) + 1)
        starts = self._of_prompts[2]
        np.cumsum(np.bincount(fixed[3], minlength=len(starts) - 1), out=starts[1:])
        self._mirrored.send()

    def arrange_tokens(
        self, tokens: Sequence[int], places: range, pages: Sequence[int], prompt_pages: Sequence[int], start: int
    ) -> None:
        """Every token of one response at `places` as a row of its own, in a batch of as many rows: a step over them
        writes the KV that as many steps of one row wrote, since its layers write all rows before one attends. `start`:
        tokens of the prompt."""
        self.num_rows = len(places)
        self.tokens.copy_(torch.tensor(tokens[places.start : places.stop]))
        self.positions.copy_(torch.arange(places.start, places.stop))
        self.lengths.copy_(self.positions + 1)
        self.starts.fill_(start)
        self.tables.copy_(torch.tensor(pages, dtype=torch.int32))
        self.prompt_tables.copy_(torch.tensor(prompt_pages, dtype=torch.int32))
        self.prompt_lengths.fill_(start)
        self.prompt_row_starts[1:] = len(places)

    def write_pages(self, samples: Sequence[Sample]) -> None:
        """Write the pages that samples have got since they were arranged."""
        self._note_pages(samples)
        if not self.is_spread:
            self._tables[: len(samples)] = self._pages_of_samples[: len(samples)]
            if self.device.type != "cpu":
                self.tables.copy_(torch.from_numpy(self._tables).pin_memory(), non_blocking=True)

    def drop_pages(self, samples: Sequence[Sample]) -> None:
        """Samples have lost the pages of drafted tokens that were wrong: others may take their place."""
        self._num_pages = [
            min(count, len(sample.pages)) for count, sample in zip(self._num_pages, samples, strict=True)
        ]

    @property
    def of_a_token(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What `move_on` reads and changes: tokens, positions, lengths, has_sample."""
        return self.tokens, self.positions, self.lengths, self.has_sample

    def move_on(self, new_tokens: Tensor, first: int = 0) -> None:
        """R rows from `first` on, idle ones behind the last among them, have got their next token [R]: what the device
        keeps of it, in place, fixed shapes. `count_step` belongs to it."""
        tokens, positions, lengths, has_sample = (each[first : first + len(new_tokens)] for each in self.of_a_token)
        tokens.copy_(new_tokens)
        positions.add_(has_sample)
        lengths.copy_((positions + 1).clamp_(min=1))

    def count_step(self) -> None:
        """Every row has got its next token: what the host keeps of it."""
        self.max_length += 1
        self.first_rows = {}

    def _note_pages(self, samples: Sequence[Sample]) -> None:
        for index, sample in enumerate(samples):
            if len(sample.pages) > self._num_pages[index]:
                written, self._num_pages[index] = self._num_pages[index], len(sample.pages)
                self._pages_of_samples[index, written : len(sample.pages)] = sample.pages[written:]


def trial_sample(vocab_size: int, prompt_pages: list[int], pages: list[int]) -> Sample:
    """A sample of one token behind a prompt of a token a page, by which a way to decode is held to another."""
    ids = [(1 + 7 * place) % vocab_size for place in range(len(prompt_pages) + 1)]
    group = PromptGroup(0, ids[:-1], [0], GroupSettings("arrival", 1, 1), lambda index: 0)
    group.pages = prompt_pages
    return Sample(group, 0, 0, key=0, pages=pages, tokens=array("i", ids[-1:]))

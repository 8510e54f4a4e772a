"""The rows of a decode step as tensors. What stays the same from step to step is not written again.

Letters: M most rows, R rows now, P most resident prompts, n pages, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample


class RowBatch:
    """Page tables, lengths, noise keys and newest tokens of all rows, allocated once; prompts by the place they got.

    It has an attribute for every tensor that the kernels of a step take, so there are many. A row without a sample, or
    whose sample has no token yet, lies on the scratch page at length 1; so do the rows behind the last, up to
    `max_rows`: a step may run more rows than there are. Host values reach the device in stream order, without a host
    sync.
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
        self.tables = torch.full((max_rows, row_pages), scratch_page, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)  # newest of each row
        # its place in the response; -1: no token yet
        self.positions = torch.full((max_rows,), -1, dtype=torch.int64, device=device)
        self.lengths = torch.ones(max_rows, dtype=torch.int32, device=device)  # own tokens a row sees in this step
        self.starts = torch.zeros(max_rows, dtype=torch.int64, device=device)  # tokens of the row's prompt
        self.keys = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.has_sample = torch.zeros(max_rows, dtype=torch.int64, device=device)  # 1 or 0
        self.prompt_of_row = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # rows by prompt, those without a sample last
        self.row_order = torch.arange(max_rows, dtype=torch.int32, device=device)
        self.prompt_tables = torch.full((max_prompts, prompt_pages), scratch_page, dtype=torch.int32, device=device)
        self.prompt_lengths = torch.zeros(max_prompts, dtype=torch.int32, device=device)
        self.prompt_row_starts = torch.zeros(max_prompts + 1, dtype=torch.int32, device=device)  # in `row_order`
        self.num_rows = 0
        self.groups: list[PromptGroup] = []  # by place
        self.first_rows: list[int] = []  # rows whose first token comes from their prompt's logits
        self.max_length = 1  # of `lengths`
        self._tables = np.full((max_rows, row_pages), scratch_page, dtype=np.int32)
        self.pages_written = [0] * max_rows

    @classmethod
    def of_queries(cls, rows: RowBatch, most: int) -> RowBatch:
        """A batch for up to `most` queries of another's rows (spread), beside the same prompts. On the CPU."""
        batch = cls(most, rows.tables.shape[1], 1, 1, rows.scratch_page, rows.device)
        batch.prompt_tables, batch.prompt_lengths = rows.prompt_tables, rows.prompt_lengths
        return batch

    @property
    def moving(self) -> list[tuple[Tensor, int | None]]:
        """What a step changes or writes by, each with its value where no row has a sample; None: any."""
        idle = (self.scratch_page, None, -1, 1, 0)
        return list(zip((self.tables, self.tokens, self.positions, self.lengths, self.has_sample), idle, strict=True))

    def arrange(self, rows: Sequence[Sample | None]) -> None:
        """Write all rows anew; None is a row without a sample. Every sample's tokens must be complete but for this
        step's."""
        self.num_rows = len(rows)
        self.groups = list(dict.fromkeys(sample.group for sample in rows if sample is not None))
        place = {group: index for index, group in enumerate(self.groups)}
        columns = np.zeros((5, self.max_rows), dtype=np.int64)
        columns[1] = -1
        prompt_of_row = np.full(self.max_rows, len(self.groups), dtype=np.int32)
        for row, sample in enumerate(rows):
            if sample is not None:
                newest = sample.tokens[-1] if sample.tokens else 0
                columns[:, row] = newest, len(sample.tokens) - 1, len(sample.group.prompt_ids), sample.key, 1
                prompt_of_row[row] = place[sample.group]
        self.first_rows = [row for row, sample in enumerate(rows) if sample is not None and not sample.tokens]
        lengths = np.maximum(columns[1] + 1, 1)
        self.max_length = int(lengths.max())
        order = np.argsort(prompt_of_row, kind="stable")
        prompt_of_row[prompt_of_row == len(self.groups)] = 0
        for tensor, values in zip(
            (self.tokens, self.positions, self.starts, self.keys, self.has_sample), columns, strict=True
        ):
            self._write(tensor, values)
        for tensor, numbers in ((self.lengths, lengths), (self.prompt_of_row, prompt_of_row), (self.row_order, order)):
            self._write(tensor, numbers.astype(np.int32))
        self._write_prompts(np.bincount(prompt_of_row, weights=columns[4], minlength=len(self.groups)))
        self._tables[:], self.pages_written = self.scratch_page, [0] * self.max_rows
        self.write_pages(rows)

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

    def write_pages(self, rows: Sequence[Sample | None]) -> None:
        """Write the pages that rows have got since they were arranged."""
        for row, sample in enumerate(rows):
            if sample is not None and len(sample.pages) > self.pages_written[row]:
                written, self.pages_written[row] = self.pages_written[row], len(sample.pages)
                self._tables[row, written : len(sample.pages)] = sample.pages[written:]
        self._write(self.tables, self._tables)

    def move_on(self, tokens: Tensor) -> None:
        """The first R rows, idle ones among them or behind the last, have got their next token [R]: what the device
        keeps of it, in place, fixed shapes. `count_step` belongs to it."""
        rows = slice(len(tokens))
        self.tokens[rows].copy_(tokens)
        self.positions[rows].add_(self.has_sample[rows])
        self.lengths[rows].copy_((self.positions[rows] + 1).clamp_(min=1))

    def count_step(self, tokens: int = 1) -> None:
        """Every row has got its next token, some so many: what the host keeps of it."""
        self.max_length += tokens
        self.first_rows = []

    def spread(self, rows: RowBatch, drafts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> Tensor:
        """Become a batch of queries of another batch's rows: each row, then a row for every token drafted after it,
        which sees those before it. `pages`: the rows', also those that `rows` does not know yet. The queries' rows [Q].
        """
        counts = np.array([1 + len(draft) for draft in drafts])
        index, firsts = np.repeat(np.arange(len(counts)), counts), np.cumsum(counts) - counts
        self.num_rows, self.groups = len(index), rows.groups
        places = torch.from_numpy(index)
        mine = slice(self.num_rows)
        for name in ("tokens", "positions", "starts", "keys", "prompt_of_row", "tables"):
            torch.index_select(getattr(rows, name), 0, places, out=getattr(self, name)[mine])
        self.positions[mine] += torch.from_numpy(np.arange(self.num_rows) - np.repeat(firsts, counts))
        tokens, tables = self.tokens.numpy(), self.tables.numpy()
        for row, draft in enumerate(drafts):
            if draft:
                first, last = firsts[row], firsts[row] + len(draft)
                tokens[first + 1 : last + 1] = draft
                known = rows.pages_written[row]
                tables[first : last + 1, known : len(pages[row])] = pages[row][known:]
        self.lengths[mine] = (self.positions[mine] + 1).clamp_(min=1)
        self.max_length = rows.max_length + int(counts.max()) - 1
        return places

    def move_rows(self, tokens: Tensor, steps: Tensor) -> None:
        """Every row has got so many tokens [R], its newest in `tokens` [R]. On the CPU."""
        self.tokens[: len(tokens)] = tokens
        self.positions[: len(tokens)] += steps
        self.lengths[: len(tokens)] = self.positions[: len(tokens)] + 1
        self.count_step(int(steps.max()))

    def _write_prompts(self, counts: np.ndarray) -> None:
        """`counts`: rows of every place."""
        num_prompts, prompt_pages = self.prompt_tables.shape
        tables = np.full((num_prompts, prompt_pages), self.scratch_page, dtype=np.int32)
        starts, lengths = np.zeros(num_prompts + 1, dtype=np.int32), np.zeros(num_prompts, dtype=np.int32)
        for place, group in enumerate(self.groups):
            tables[place, : len(group.pages)] = group.pages
            lengths[place] = len(group.prompt_ids)
        starts[1 : len(self.groups) + 1] = np.cumsum(counts[: len(self.groups)])
        starts[len(self.groups) + 1 :] = starts[len(self.groups)]
        self._write(self.prompt_tables, tables)
        self._write(self.prompt_lengths, lengths)
        self._write(self.prompt_row_starts, starts)

    def _write(self, tensor: Tensor, values: np.ndarray) -> None:
        """Copy `values`, of the tensor's dtype. Pinned memory comes from torch's cache, which waits for the copy before
        it lends it again."""
        host = torch.from_numpy(values)
        tensor.copy_(host if self.device.type == "cpu" else host.pin_memory(), non_blocking=True)

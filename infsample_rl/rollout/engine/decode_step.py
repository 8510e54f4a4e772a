"""One token for every row: the model's forward and a draw."""

from __future__ import annotations

import torch
from torch import Tensor

from infsample_rl.rollout.engine.cuda_decode import CaptureError, DecodeGraphs
from infsample_rl.rollout.engine.graph_cache import GraphCache
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import DrawnTensors, Sampler
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample

LOGITS_AT_A_TIME = 2**20  # rows x vocabulary: 4 MB of float32, so that logits do not grow with the rows
Rows = list[Sample]
Drafts = list[list[int]]  # of every row


class DecodeStep:
    """One token for every row of a batch: the model's forward and a draw, captured as CUDA graphs or not."""

    def __init__(self, runner: ModelRunner, batch: RowBatch, sampler: Sampler, cache: GraphCache) -> None:
        """`cache`: of captured steps, whose own batch takes the place of `batch`."""
        self.runner, self.sampler, self._cache = runner, sampler, cache
        self._graphs = cache.take(batch, sampler)
        self.batch = batch if self._graphs is None else self._graphs.batch
        self.prompt_logits: dict[PromptGroup, Tensor] = {}  # [V] each, of the resident prompts

    def launch(self, rows: Rows, drafts: Drafts | None = None) -> tuple[DrawnTensors, Tensor | None]:
        """What is drawn for the Q rows and the tokens drafted after them, and the last hidden states [Q, E] that the
        model was run for; None: it was not."""
        batch = self.batch
        if drafts is not None or batch.is_spread:
            batch.spread(rows, drafts or [[]] * len(rows))
        if self._graphs is not None:
            try:
                return self._launch_graph(self._graphs, rows)
            except CaptureError as error:
                self._graphs = None
                self._cache.give_up(str(error))
        drawn, hidden = self._run(rows)
        if not batch.is_spread:  # else every row is written again
            batch.move_on(drawn.tokens)
            batch.count_step()
        return drawn, hidden

    def _launch_graph(self, graphs: DecodeGraphs, rows: Rows) -> tuple[DrawnTensors, Tensor]:
        batch, logits = self.batch, self.prompt_logits
        starting = {rows[row].group for row in batch.first_rows.values()}
        drawn = graphs.step({place: logits[group] for place, group in enumerate(batch.groups) if group in starting})
        return drawn, graphs.hidden[: batch.num_rows]

    def _run(self, rows: Rows) -> tuple[DrawnTensors, Tensor | None]:
        batch = self.batch
        logits = {place: self.prompt_logits[rows[row].group] for place, row in batch.first_rows.items()}
        hidden = None if len(logits) == batch.num_rows else self.runner.decode(batch)
        size = max(8, LOGITS_AT_A_TIME // self.runner.vocab_size)
        pieces = [range(start, min(start + size, batch.num_rows)) for start in range(0, batch.num_rows, size)]
        parts = [self._draw(piece, hidden, logits) for piece in pieces]
        return parts[0] if len(parts) == 1 else DrawnTensors.join(parts), hidden

    def _draw(self, rows: range, hidden: Tensor | None, first: dict[int, Tensor]) -> DrawnTensors:
        """Draw for some rows; those in `first` take their prompt's logits. `hidden` None: all do."""
        batch, place = self.batch, slice(rows.start, rows.stop)
        if hidden is None:
            logits = torch.stack([first[row] for row in rows])
        else:
            logits = self.runner.logits(hidden[place])
            for row in first.keys() & rows:
                logits[row - rows.start] = first[row]
        return self.sampler.draw(logits, batch.keys[place], batch.positions[place] + 1)

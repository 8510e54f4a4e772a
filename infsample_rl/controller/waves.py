"""Learner rows go out in waves: one row for every rank, told to all ranks in one order, so that their collectives
match."""

from __future__ import annotations

from collections.abc import Iterator

from infsample_rl.cluster.traffic import Traffic
from infsample_rl.config import Config
from infsample_rl.controller.groups import Group, loss_totals, mini_batches, provisional_totals, trainable_specs
from infsample_rl.learner.row_plan import RowPlanner, balanced_waves, row_tokens
from infsample_rl.types import LossTotals, Prompt, RowWork, SampleSpec

Row = list[SampleSpec]


class Waves:
    """Packs complete groups into rows and sends them to the learner.

    With one update a step and learner.overlap, unless engines need the learner's device, a wave goes out as soon as
    every rank has a row, while other prompts still decode; the denominators are then provisional. Otherwise rows wait
    until the step's groups are all there, and denominators are exact. With learner.grad_sync=last_row ranks need not
    keep step: a row goes to the rank that has had the fewest tokens.
    """

    def __init__(self, config: Config, traffic: Traffic):
        self._config, self._traffic = config, traffic
        at_once = config.objective.updates_per_step > 1 or config.takes_turns
        self._streams = config.learner.overlap and not at_once
        self._lockstep = config.learner.grad_sync == "every_row"
        self._prompts: dict[int, Prompt] = {}
        self._lengths: dict[int, int] = {}
        self._groups: list[Group] = []
        self._planner = self._new_planner()
        self._rows: list[Row] = []
        self._rank_tokens = [0] * config.cluster.learner_ranks
        self._micro_group_of: dict[tuple[int, int], int] = {}
        self.row_times: list[tuple[int, float, float]] = []  # (learner rank, begin, end) of rows, as time.time()

    def _new_planner(self) -> RowPlanner:
        return RowPlanner(
            self._config.learner.max_tokens_per_micro_batch, self._lengths, long_rows=self._config.long_rows
        )

    def add(self, group: Group) -> None:
        """Take a complete group; full waves go out."""
        index = group.prompt.prompt_index
        self._prompts[index], self._lengths[index] = group.prompt, len(group.prompt.token_ids)
        self._groups.append(group)
        self._micro_group_of |= {(index, sample.sample_index): sample.micro_group for sample in group.samples}
        if self._streams:
            self._rows += self._planner.add_group(trainable_specs(group, self._config))
            self._send_full_waves()

    def finish(self) -> None:
        """No group is missing: send what is left, where rows go out as they come; ranks without a row run one of weight
        zero."""
        if not self._streams:
            return
        self._rows += self._planner.flush()
        self._send_full_waves()
        if self._rows:
            idle = len(self._rank_tokens) - len(self._rows)
            self._send(self._rows + [None] * idle, provisional_totals(self._config))
            self._rows = []

    def updates(self) -> Iterator[tuple[LossTotals, bool]]:
        """Send the rows of the step's updates, one update after the other: its denominators, and whether it is the
        last.

        The next one's rows go out when the caller, who has stepped the optimizer, asks for it.
        """
        if self._streams:
            self.finish()
            yield loss_totals(self._groups, self._config), True
            return
        batches = mini_batches(self._groups, self._config.objective.mini_batches)
        plans = [self._plan(batch) for batch in batches]
        number, row_ids = 0, self._row_ids(plans)
        for waves in plans[1:]:  # their first pass comes after an update
            for wave in waves:
                self._send(wave, None, row_ids)
        for _ in range(self._config.objective.epochs):
            for batch, waves in zip(batches, plans, strict=True):
                number, totals = number + 1, loss_totals(batch, self._config)
                for wave in waves:
                    self._send(wave, totals, row_ids)
                yield totals, number == self._config.objective.epochs * len(batches)

    def _plan(self, groups: list[Group]) -> list[list[Row | None]]:
        planner = self._new_planner()
        rows = [row for group in groups for row in planner.add_group(trainable_specs(group, self._config))]
        return balanced_waves(rows + planner.flush(), len(self._rank_tokens), self._lengths)

    def _row_ids(self, plans: list[list[list[Row | None]]]) -> dict[tuple[int, int], int] | None:
        """A number for every row, by its first sample, where log-probabilities are kept from update to update."""
        if self._config.objective.updates_per_step == 1:
            return None
        rows = [row for waves in plans for wave in waves for row in wave if row]
        return {(row[0].prompt_index, row[0].sample_index): number for number, row in enumerate(rows)}

    def _send_full_waves(self) -> None:
        ranks, totals = len(self._rank_tokens), provisional_totals(self._config)
        while not self._lockstep and self._rows:
            rank, row = self._rank_tokens.index(min(self._rank_tokens)), self._rows.pop(0)
            self._send([row if other == rank else None for other in range(ranks)], totals)
        while len(self._rows) >= ranks:
            self._send([self._rows.pop(0) for _ in range(ranks)], totals)

    def _send(
        self, wave: list[Row | None], totals: LossTotals | None, row_ids: dict[tuple[int, int], int] | None = None
    ) -> None:
        for rank, row in enumerate(wave):
            if row is None and not self._lockstep:
                continue
            specs = row or []
            self._rank_tokens[rank] += row_tokens(specs, self._lengths)
            prompt_ids = {spec.prompt_index: self._prompts[spec.prompt_index].token_ids for spec in specs}
            keys = sorted({self._micro_group_of[spec.prompt_index, spec.sample_index] for spec in specs})
            row_id = row_ids[row[0].prompt_index, row[0].sample_index] if row and row_ids is not None else None
            self._traffic.learn(rank, RowWork(row=row, prompt_ids=prompt_ids, totals=totals, row_id=row_id), keys)

"""One call's decode loop: plan a step, carry it out on the model, see which samples ended, hand out full
micro-groups."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from infsample_rl.observe.phases import phase
from infsample_rl.rollout.engine.call import MicroGroups, StopRule
from infsample_rl.rollout.engine.decode_step import DecodeStep, Drafts, Rows
from infsample_rl.rollout.engine.length_source import Watch
from infsample_rl.rollout.engine.sampler import Drawn, DrawnTensors, Sampler
from infsample_rl.rollout.engine.speculation import Speculation
from infsample_rl.rollout.engine.step_loop import StepLoop
from infsample_rl.rollout.engine.turns import Turns
from infsample_rl.rollout.length_prediction.watch import Moment
from infsample_rl.rollout.schedule.prompt_group import Sample
from infsample_rl.rollout.schedule.step_planner import StepPlan, StepPlanner
from infsample_rl.types import Completion, MaybeNone


class DecodeLoop(StepLoop):
    """Carries out what the planner plans, on the model. On CUDA a step that only repeats the one before is launched
    before the host has read what that one drew; a token drawn for a sample that had ended is thrown away."""

    def __init__(
        self,
        planner: StepPlanner,
        decode: DecodeStep,
        stops: StopRule,
        micro_groups: MicroGroups,
        *,
        run_ahead: bool = False,
        watch: Watch | MaybeNone = None,
        speculation: Speculation | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`run_ahead`: launch a repeated step before reading the one before. `speculation`: drafts tokens; while it
        does, no step is launched ahead."""
        super().__init__(planner, stops, micro_groups, watch, turns)
        self.runner, self.decode = decode.runner, decode
        self._parking: Any = planner.parking  # a ParkedKV: the planner keeps count, the loop copies
        # dynamic_slot keeps the first to finish, and a sample that starts a step later finishes later
        keeps_first = any(group.settings.schedule == "dynamic_slot" for group in planner.waiting)
        self.run_ahead = run_ahead and not keeps_first
        self.speculation = speculation
        self._launched: _Launched | MaybeNone = None
        self._rows: Rows = []

    def step(self) -> list[list[Completion]]:
        waits = self.turns is not None and self.turns.is_idle
        speculation = None if self.speculation is None or waits or self.speculation.rest() else self.speculation
        answered = self.turns is not None and self.turns.take()
        plan = self.planner.repeat_step() if speculation is None and not answered and self._may_run_ahead() else None
        if plan is None:
            self._collect()
            if not self.planner.is_done:
                planned = self.planner.next_step()
                if self.turns is not None:
                    self.turns.is_idle = not planned.rows
                if planned.rows:
                    self._carry_out(planned)
                    self._launched = self._launch(speculation)
        else:
            before, self._launched = self._launched, None
            if plan.pages_changed:
                self.decode.batch.write_pages(self._rows)
            launched = self._launch(None)
            self._read(before)
            self._launched = launched
        if speculation is not None or not self.run_ahead:
            self._collect()
        self.stats.read(self.planner, self.runner.page_bytes(self.planner.pool.page_size))
        return self.micro_groups.take()

    def free(self) -> None:
        super().free()
        self._launched = None
        self.decode.prompt_logits.clear()
        if self._parking is not None:
            self._parking.clear()
        if self.speculation is not None:
            self.speculation.close()

    def _may_run_ahead(self) -> bool:
        """Whether a step may be launched before the one in flight is read. Not one that ends a sample's prefix: the
        sample leaves with the next reading, which must find that token too."""
        return self._launched is not None and all(sample.num_tokens + 1 != sample.wait_at for sample in self._rows)

    def _carry_out(self, plan: StepPlan) -> None:
        runner, parking, batch = self.runner, self._parking, self.decode.batch
        for owner, pages in plan.parked:
            parking.put(owner, pages)
        for group in plan.prefills:
            with phase("prefill"):
                self.decode.prompt_logits[group] = runner.prefill(group.prompt_ids, group.pages)
        for owner in plan.restored:
            parking.fetch(owner, owner.pages)
        for sample in plan.rebuilt:
            group, tokens = sample.group, list(sample.tokens[:-1])
            with phase("prefill"):
                runner.rebuild(tokens, sample.num_kv_tokens, sample.pages, group.pages, len(group.prompt_ids))
        if plan.rows_changed:
            self.micro_groups.stays.arrange(plan.rows, self.planner.running_steps - 1, plan.steps_before)
            self._rows = list(plan.rows)
            batch.arrange(self._rows)
        elif plan.pages_changed:
            batch.write_pages(self._rows)

    @torch.inference_mode()
    def _launch(self, speculation: Speculation | None) -> _Launched:
        """Run the model and draw one token for every row and for every token drafted after it."""
        rows = self._rows
        drafts = None if speculation is None else speculation.drafts_of(rows, self.planner)
        drawn, hidden = self.decode.launch(rows, drafts)
        moment = None if drafts is not None or self.watch is None or hidden is None else self.watch.launch(hidden, rows)
        return _Launched(rows, drawn, hidden, moment, speculation, drafts)

    def _collect(self) -> None:
        """Read the step that is in flight, if any."""
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._read(launched)

    def _read(self, launched: _Launched) -> None:
        """Append what a step drew; samples whose newest token was their last leave."""
        rows, drawn = launched.rows, Sampler.to_host(launched.drawn)
        reasons: dict[Sample, str] = {}
        speculation = launched.speculation
        if launched.drafts is None or speculation is None:
            for row, sample in enumerate(rows):
                if not sample.finish_reason and sample.slot >= 0:  # else it had ended when this step was launched
                    _append(sample, drawn, row)
                    reasons[sample] = self.stops.reason(sample.tokens)
            if speculation is not None:
                self._judge(speculation, rows, len(rows), len(rows))
        else:
            launched.moment = self._append_drafted(launched, launched.drafts, speculation, drawn, reasons)
        if launched.moment is not None:  # before samples end or begin to wait, which predictions are for
            self.watch.read(launched.moment)
        ended = [sample for sample, reason in reasons.items() if reason]
        for sample in ended:
            sample.finish_reason = reasons[sample]
            sample.num_tokens = len(sample.tokens)  # the planner has counted the step that was launched ahead
        self._end_step(ended)
        self._drop_groups()

    def _end(self, samples: list[Sample]) -> None:
        super()._end(samples)
        if self.speculation is not None:
            self.stats.draft_seconds += self.speculation.end(samples)

    def _drop_groups(self) -> None:
        """Let go of what was kept for groups that are done, and of the KV's memory where nobody holds any."""
        prompt_logits = self.decode.prompt_logits
        for group in [group for group in prompt_logits if group.is_done]:
            del prompt_logits[group]
            if self.speculation is not None:
                self.speculation.drafter.leave(group)
        if self.planner.pool.num_free == self.planner.pool.num_pages:
            self.runner.kv.give_back()

    def _judge(self, speculation: Speculation, rows: Rows, queries: int, tokens: int) -> None:
        speculation.end_step(len(rows), queries, tokens)
        self.stats.draft_seconds += speculation.seconds_of_drafts

    def _append_drafted(
        self, launched: _Launched, drafts: Drafts, speculation: Speculation, drawn: Drawn, reasons: dict[Sample, str]
    ) -> Moment | None:
        """Append every row's token and, as long as a drafted one is what was drawn before it, the next; what the probe
        takes of the step."""
        rows, query = launched.rows, 0
        newest, tokens = [], 0
        for sample, draft in zip(rows, drafts, strict=True):
            first = query
            for token in [*draft, -1]:
                _append(sample, drawn, query)
                reasons[sample] = self.stops.reason(sample.tokens)
                if reasons[sample] or token != sample.tokens[-1]:
                    break
                query += 1
            newest.append(query)
            tokens += query - first + 1
            self.planner.accept(sample, query - first)
            if query > first:
                self.micro_groups.stays.accept(sample, self.planner.running_steps - 1, query - first)
            query = first + len(draft) + 1
        self.decode.batch.drop_pages(rows)
        self.stats.drafted_tokens += query - len(rows)
        self._judge(speculation, rows, query, tokens)
        if self.watch is None or launched.hidden is None:
            return None
        return self.watch.launch(launched.hidden[newest], rows)


@dataclass(slots=True)
class _Launched:
    """A step that has not been read."""

    rows: Rows
    drawn: DrawnTensors  # of every row, and of every token drafted after it
    hidden: Tensor | None  # [R or Q, E]
    moment: Moment | None  # what the probe takes of it; with drafts it is known when it is read
    speculation: Speculation | None  # where it may draft; not for a step that was launched ahead
    drafts: Drafts | None = None


def _append(sample: Sample, drawn: Drawn, row: int) -> None:
    if not math.isfinite(drawn.logprobs[row]):
        name = f"sample {sample.sample_index} of prompt {sample.group.prompt_index}"
        raise RuntimeError(f"{name}: the model's logits are not finite at token {len(sample.tokens)}")
    sample.tokens.append(drawn.tokens[row])
    sample.logprobs.append(drawn.logprobs[row])
    if drawn.sampling_logprobs is not None:
        sample.sampling_logprobs.append(drawn.sampling_logprobs[row])

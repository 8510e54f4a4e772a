"""One call's decode loop: plan a step, carry it out, see which samples ended, hand out full micro-groups."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from infsample_rl.observe.phases import phase
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.parked_kv import ParkedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import Drawn, DrawnTensors, Sampler
from infsample_rl.rollout.length_prediction.watch import Moment, ProbeWatch
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.stay_log import StayLog
from infsample_rl.rollout.schedule.step_planner import StepPlan, StepPlanner
from infsample_rl.types import Completion

LOGITS_AT_A_TIME = 2**20  # rows x vocabulary: 4 MB of float32, so that logits do not grow with the rows


@dataclass(slots=True)
class RolloutStats:
    """Figures of one call, so far."""

    running_steps: int = 0  # rounds in which every row got one token, plus one for every prefill that computes KV again
    row_utilisation: float = 0.0  # tokens sampled / (running_steps x slots); token_budget: x most rows at a time
    peak_kv_bytes: int = 0  # pages held at a time, prompts included
    kv_pool_bytes: int = 0  # pages allocated
    preemptions: int = 0  # rows that had to give their pages back unfinished
    # tokens whose KV had been given up and was computed again: of preempted samples, prefixes and prompts
    recomputed_tokens: int = 0
    parked_tokens: int = 0  # tokens whose KV was copied out of the pool and back instead
    predict_seconds: float = field(default=0.0, compare=False)  # spent on predicting lengths, and on learning to


class DecodeLoop:
    """Carries out what the planner plans, on the model. On CUDA a step that only repeats the one before is launched
    before the host has read what that one drew; a token drawn for a sample that had ended is thrown away."""

    def __init__(
        self,
        runner: ModelRunner,
        planner: StepPlanner,
        batch: RowBatch,
        sampler: Sampler,
        *,
        max_new_tokens: int,
        stop_token_ids: set[int],
        ends_text: Callable[[list[int]], bool] | None,
        micro_group_size: int,
        policy_version: int,
        fixed_rows: int | None = None,
        run_ahead: bool = False,
        watch: ProbeWatch | None = None,
    ) -> None:
        """`ends_text`: whether a response's newest token completes a stop string. `fixed_rows`: every step has that
        many, a sample's row is its slot. `run_ahead`: launch a repeated step before reading the one before. `watch`:
        predicts lengths and learns them."""
        self._graphs = runner.graphs.take(batch, sampler)
        self.batch = batch if self._graphs is None else self._graphs.batch
        self.runner, self.planner, self.sampler = runner, planner, sampler
        self.max_new_tokens, self.stop_token_ids, self.ends_text = max_new_tokens, stop_token_ids, ends_text
        self.micro_group_size, self.policy_version = micro_group_size, policy_version
        # dynamic_slot keeps the first to finish, and a sample that starts a step later finishes later
        keeps_first = any(group.settings.schedule == "dynamic_slot" for group in planner.waiting)
        self.fixed_rows, self.run_ahead = fixed_rows, run_ahead and not keeps_first
        self.watch = watch
        self.stats = RolloutStats()
        self._stay_log = StayLog()
        self._groups: list[PromptGroup] = list(planner.waiting)
        self._prompt_logits: dict[PromptGroup, torch.Tensor] = {}
        self._parking: ParkedKV | None = planner.parking
        self._launched: tuple[list[Sample | None], DrawnTensors, Moment | None] | None = None
        self._rows: list[Sample | None] = []

    @property
    def is_done(self) -> bool:
        """Whether every sample of every prompt has been handed out."""
        return self.planner.is_done

    def step(self) -> list[list[Completion]]:
        """One running step (more when KV is computed again); the micro-groups it completes."""
        plan = self.planner.repeat_step() if self._may_run_ahead() else None
        if plan is None:
            self._collect()
            if not self.planner.is_done:
                self._carry_out(self.planner.next_step())
                self._launched = self._launch()
        else:
            before, self._launched = self._launched, None
            if plan.pages_changed:
                self.batch.write_pages(self._rows)
            launched = self._launch()
            self._read(*before)
            self._launched = launched
        if not self.run_ahead:
            self._collect()
        self._update_stats()
        return self._take_micro_groups()

    def free(self) -> None:
        """Let go of all samples and KV."""
        self._launched = None
        self.planner.drop_all()
        self._prompt_logits.clear()
        if self._parking is not None:
            self._parking.clear()

    def _may_run_ahead(self) -> bool:
        """Whether a step may be launched before the one in flight is read. Not one that ends a sample's prefix: the
        sample leaves with the next reading, which must find that token too."""
        return self._launched is not None and all(
            sample is None or sample.num_tokens + 1 != sample.wait_at for sample in self._rows
        )

    def _carry_out(self, plan: StepPlan) -> None:
        runner = self.runner
        for sample, pages in plan.parked:
            self._parking.put(sample, pages)
        for group in plan.prefills:
            with phase("prefill"):
                self._prompt_logits[group] = runner.prefill(group.prompt_ids, group.pages)
        for sample in plan.restored:
            self._parking.fetch(sample, sample.pages)
        for sample in plan.rebuilt:
            group = sample.group
            with phase("prefill"):
                runner.rebuild(
                    list(sample.tokens[:-1]), sample.num_kv_tokens, sample.pages, group.pages, len(group.prompt_ids)
                )
        if plan.rows_changed:
            self._stay_log.arrange(plan.rows, self.planner.running_steps - 1)
            self._rows = list(plan.rows)
            if self.fixed_rows is not None:
                by_slot = {sample.slot: sample for sample in plan.rows}
                self._rows = [by_slot.get(slot) for slot in range(self.fixed_rows)]
            self.batch.arrange(self._rows)
        elif plan.pages_changed:
            self.batch.write_pages(self._rows)

    @torch.inference_mode()
    def _launch(self) -> tuple[list[Sample | None], DrawnTensors, Moment | None]:
        """Run the model and draw one token for every row; the rows, what was drawn, and what the probe takes of the
        step."""
        drawn, hidden = self._launch_graph() if self._graphs is not None else self._launch_eager()
        moment = None if self.watch is None or hidden is None else self.watch.launch(hidden, self._rows)
        return self._rows, drawn, moment

    def _launch_graph(self) -> tuple[DrawnTensors, torch.Tensor]:
        batch = self.batch
        starting = {self._rows[row].group for row in batch.first_rows}
        drawn = self._graphs.step(
            {place: self._prompt_logits[group] for place, group in enumerate(batch.groups) if group in starting}
        )
        return drawn, self._graphs.hidden[: batch.num_rows]

    def _launch_eager(self) -> tuple[DrawnTensors, torch.Tensor | None]:
        batch = self.batch
        first = {row: self._prompt_logits[self._rows[row].group] for row in batch.first_rows}
        only_first = len(first) == sum(1 for sample in self._rows if sample is not None)
        hidden = None if only_first else self.runner.decode(batch)
        size = max(8, LOGITS_AT_A_TIME // self.runner.shape.vocab_size)
        pieces = [range(start, min(start + size, batch.num_rows)) for start in range(0, batch.num_rows, size)]
        parts = [self._draw(rows, hidden, first) for rows in pieces]
        drawn = parts[0] if len(parts) == 1 else _join(parts)
        batch.advance(drawn.tokens)
        return drawn, hidden

    def _draw(self, rows: range, hidden: torch.Tensor | None, first: dict[int, torch.Tensor]) -> DrawnTensors:
        """Draw for some rows; those in `first` take their prompt's logits. `hidden` None: all do (a row without a
        sample any)."""
        place = slice(rows.start, rows.stop)
        if hidden is None:
            logits = torch.stack([first.get(row, next(iter(first.values()))) for row in rows])
        else:
            logits = self.runner.logits(hidden[place])
            for row in first.keys() & rows:
                logits[row - rows.start] = first[row]
        return self.sampler.draw(logits, self.batch.keys[place], self.batch.positions[place] + 1)

    def _collect(self) -> None:
        """Read the step that is in flight, if any."""
        if self._launched is not None:
            launched, self._launched = self._launched, None
            self._read(*launched)

    def _read(self, rows: list[Sample | None], tensors: DrawnTensors, moment: Moment | None) -> None:
        """Append what a step drew; samples whose newest token was their last leave."""
        drawn, ended = self.sampler.to_host(tensors), []
        if moment is not None:  # before samples end or begin to wait, which predictions are for
            self.watch.read(moment)
        for row, sample in enumerate(rows):
            # no sample, or it had ended when this step was launched
            if sample is None or sample.finish_reason or sample.slot < 0:
                continue
            self._append(row, sample, drawn)
            sample.finish_reason = self._finish_reason(sample)
            if sample.finish_reason:
                sample.num_tokens = len(sample.tokens)  # the planner has counted the step that was launched ahead
                ended.append(sample)
                if self.watch is not None:
                    self.watch.ended(sample, len(sample.tokens), cut=sample.finish_reason == "length")
        self._stay_log.end(ended, self.planner.running_steps)
        self.planner.end_step(ended)
        for group in [group for group in self._prompt_logits if group.is_done]:
            del self._prompt_logits[group]
        if self.planner.pool.num_free == self.planner.pool.num_pages:
            self.runner.kv.give_back()

    def _append(self, row: int, sample: Sample, drawn: Drawn) -> None:
        if not math.isfinite(drawn.logprobs[row]):
            name = f"sample {sample.sample_index} of prompt {sample.group.prompt_index}"
            raise RuntimeError(f"{name}: the model's logits are not finite at token {len(sample.tokens)}")
        sample.tokens.append(drawn.tokens[row])
        sample.logprobs.append(drawn.logprobs[row])
        if drawn.sampling_logprobs is not None:
            sample.sampling_logprobs.append(drawn.sampling_logprobs[row])

    def _finish_reason(self, sample: Sample) -> str:
        if sample.tokens[-1] in self.stop_token_ids or (self.ends_text is not None and self.ends_text(sample.tokens)):
            return "stop"
        return "length" if len(sample.tokens) == self.max_new_tokens else ""

    def _take_micro_groups(self) -> list[list[Completion]]:
        """Full micro-groups, and the smaller last one of a group that is done."""
        taken = []
        for group in list(self._groups):
            size = self.micro_group_size
            while len(group.finished) >= size or (group.is_done and group.finished):
                taken.append([self._completion(sample) for sample in group.finished[:size]])
                group.finished = group.finished[size:]
            if group.is_done:
                self._groups.remove(group)
        return taken

    def _completion(self, sample: Sample) -> Completion:
        return Completion(
            prompt_index=sample.group.prompt_index,
            sample_index=sample.sample_index,
            token_ids=np.array(sample.tokens, np.int32),
            logprobs=np.array(sample.logprobs, np.float32),
            sampling_logprobs=np.array(sample.sampling_logprobs, np.float32) if self.sampler.truncates else None,
            finish_reason=sample.finish_reason,
            policy_version=self.policy_version,
            stays=self._stay_log.take(sample),
            forecast=sample.forecast,
        )

    def _update_stats(self) -> None:
        planner, stats = self.planner, self.stats
        page_bytes = self.runner.page_bytes(planner.pool.page_size)
        stats.running_steps, stats.preemptions, stats.recomputed_tokens = (
            planner.running_steps,
            planner.num_preemptions,
            planner.recomputed_tokens,
        )
        stats.parked_tokens = planner.parked_tokens
        slots = planner.most_rows if planner.policy is not None else planner.num_slots
        stats.row_utilisation = planner.num_tokens / (planner.running_steps * slots)
        stats.peak_kv_bytes = planner.pool.peak_pages * page_bytes
        stats.kv_pool_bytes = planner.pool.num_pages * page_bytes


def _join(parts: list[DrawnTensors]) -> DrawnTensors:
    sampling = None if parts[0].sampling_probs is None else torch.cat([part.sampling_probs for part in parts])
    return DrawnTensors(torch.cat([part.tokens for part in parts]), torch.cat([part.probs for part in parts]), sampling)

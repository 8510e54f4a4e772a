"""The running steps of one call on vLLM: the planner says which samples decode, vLLM computes their tokens."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

from infsample_rl.rollout.engine.call import MicroGroups, StopRule
from infsample_rl.rollout.engine.length_source import Watch
from infsample_rl.rollout.engine.step_loop import StepLoop
from infsample_rl.rollout.engine.turns import Turns
from infsample_rl.rollout.schedule.prompt_group import PromptGroup, Sample
from infsample_rl.rollout.schedule.step_planner import StepPlan, StepPlanner
from infsample_rl.types import Completion, EngineFailed

MOST_STEPS_IN_VAIN = 1000  # a batch holds the longest prompt, so that a few are enough
_NUMBERS = itertools.count()  # of requests: no id comes twice, whatever call it is of


class VLLMLoop(StepLoop):
    """Sends a request for every sample while it decodes, one at a time, and takes it back when the sample gives way.

    What a request had computed may still be found in vLLM's prefix cache when the sample is sent again.
    """

    def __init__(
        self,
        vllm_engine: Any,
        params_of: Callable[[int, int, int], Any],
        planner: StepPlanner,
        stops: StopRule,
        micro_groups: MicroGroups,
        page_bytes: int,
        preemptions: Callable[[], int],
        watch: Watch | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`vllm_engine`: a vllm.LLMEngine. `params_of`: the SamplingParams of (noise key, tokens that it has, tokens to
        come). `preemptions`: how many vLLM has made so far."""
        super().__init__(planner, stops, micro_groups, watch, turns)
        self._preemptions, self._preempted_before = preemptions, preemptions()
        self._engine, self._params_of, self._page_bytes = vllm_engine, params_of, page_bytes
        self._requests: dict[Sample, str] = {}
        self._samples: dict[str, Sample] = {}  # by request
        self._counted, self._finished = set[str](), set[str]()  # requests whose first, whose last token has come
        self._prefilled: set[PromptGroup] = set()
        self._computed = dict[Sample, int]()  # tokens whose KV a request had computed when it was taken back
        self._recomputed = self._steps_in_vain = 0

    def step(self) -> list[list[Completion]]:
        """One running step; the micro-groups it completes. A row that vLLM gives no token yet, as while a long prompt
        is computed in parts, gets it in a later one."""
        if self.turns is not None:
            self.turns.take()
        if not self.planner.is_done:  # what was taken may have been the end of the last sample
            plan = self.planner.next_step()
            if plan.rows:
                self._run(plan)
            if self.turns is not None:
                self.turns.is_idle = not plan.rows
        self.stats.read(self.planner, self._page_bytes)
        self.stats.parked_tokens, self.stats.recomputed_tokens = 0, self._recomputed
        if self.planner.is_done:
            self._check_preemptions()
        return self.micro_groups.take()

    def free(self) -> None:
        self._withdraw(list(self._requests))
        super().free()

    def _run(self, plan: StepPlan) -> None:
        if plan.rows_changed:
            self.micro_groups.stays.arrange(plan.rows, self.planner.running_steps - 1, plan.steps_before)
            self._withdraw([sample for sample in self._requests if sample.slot < 0])
            for sample in plan.rows:
                if sample not in self._requests:
                    self._send(sample)
        served = self._read(self._step())
        self._steps_in_vain = 0 if served else self._steps_in_vain + 1
        if self._steps_in_vain == MOST_STEPS_IN_VAIN:
            raise RuntimeError(f"vLLM gave none of {len(plan.rows)} rows a token in {MOST_STEPS_IN_VAIN} steps")
        ended = []
        for sample in plan.rows:
            if sample not in served:
                self.planner.hold_back(sample)
            elif reason := self.stops.reason(sample.tokens):
                sample.finish_reason = reason
                ended.append(sample)
        self._withdraw(ended)
        self._end_step(ended)

    def _step(self) -> list[Any]:
        """vLLM's outputs of a step; EngineFailed where it cannot take one, as when a process of its own is gone."""
        try:
            return self._engine.step()
        except Exception as error:
            raise EngineFailed(f"vLLM cannot go on: {type(error).__name__}: {last_words(error)}") from error

    def _check_preemptions(self) -> None:
        """RuntimeError where vLLM ran out of blocks: the planner counts at least as many as it takes."""
        if preempted := self._preemptions() - self._preempted_before:
            raise RuntimeError(
                f"vLLM preempted {preempted} rows, although the planner lets in no more than its "
                f"{self.planner.pool.num_pages} blocks hold"
            )

    def _send(self, sample: Sample) -> None:
        request = f"sample-{next(_NUMBERS)}"
        params = self._params_of(sample.key, len(sample.tokens), self.stops.max_new_tokens - len(sample.tokens))
        self._engine.add_request(request, {"prompt_token_ids": [*sample.group.prompt_ids, *sample.tokens]}, params)
        self._requests[sample], self._samples[request] = request, sample

    def _withdraw(self, samples: list[Sample]) -> None:
        """Take back the requests of these samples; one whose last token has come is gone already."""
        requests = [self._requests.pop(sample) for sample in samples]
        self._computed.update({sample: len(sample.group.prompt_ids) + len(sample.tokens) - 1 for sample in samples})
        for request in requests:
            del self._samples[request]
        unfinished = [request for request in requests if request not in self._finished]
        self._finished.difference_update(requests)
        if unfinished:
            self._engine.abort_request(unfinished)

    def _read(self, outputs: list[Any]) -> set[Sample]:
        """Append the token of every output; the samples that got one."""
        served = set()
        for output in outputs:
            sample, new = self._samples[output.request_id], output.outputs[0]
            if len(new.token_ids) != 1:
                raise RuntimeError(f"vLLM gave {len(new.token_ids)} tokens of one sample in one step")
            if output.request_id not in self._counted:
                self._counted.add(output.request_id)
                cached = output.num_cached_tokens or 0
                self._recomputed += self._computed_again(sample, cached)
                self.stats.sent_tokens += len(sample.group.prompt_ids) + len(sample.tokens)
                self.stats.cached_tokens += cached
            _append(sample, new, truncates=self.micro_groups.truncates)
            served.add(sample)
            if output.finished:
                self._finished.add(output.request_id)
        return served

    def _computed_again(self, sample: Sample, cached: int) -> int:
        """Tokens of a request's prompt whose KV had been computed before, and was not found any more."""
        group = sample.group
        if sample.tokens:
            known = self._computed[sample]
        else:
            known = len(group.prompt_ids) - group.own_tokens if group in self._prefilled else 0
        self._prefilled.add(group)
        return max(0, known - cached)


def last_words(error: Exception) -> str:
    """What vLLM says is wrong: the last line of an error, without what pydantic puts around it."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("For further information")]
    return re.sub(r"^Value error, | \[type=\w+, input_.*$", "", said[-1]) if said else type(error).__name__


def _append(sample: Sample, new: Any, *, truncates: bool) -> None:
    token = new.token_ids[0]
    said = {each: entry.logprob for each, entry in new.logprobs[0].items()}
    if not math.isfinite(said[token]):
        name = f"sample {sample.sample_index} of prompt {sample.group.prompt_index}"
        raise RuntimeError(f"{name}: the model's logits are not finite at token {len(sample.tokens)}")
    sample.tokens.append(token)
    sample.logprobs.append(said[token])
    if truncates:
        sample.sampling_logprobs.append(max(said.values()))

"""Sets of captured steps, kept from call to call, and whether steps are captured at all."""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from infsample_rl.rollout.engine.cuda_decode import DecodeGraphs, whole_heads
from infsample_rl.rollout.engine.model_runner import ModelRunner, first_line
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import Sampler
from infsample_rl.rollout.engine.step_trial import try_steps

KEPT = 2  # sets of graphs: those of training and of evaluation


class GraphCache:
    """The graphs of a runner, kept from call to call as long as its pool and weights stay where they are."""

    def __init__(self, runner: ModelRunner) -> None:
        # whether steps are captured, and compiled: `check_device` sets both on CUDA; without CUDA the tests do
        self.is_used = self.compiles = False
        self._runner = runner
        self._kept: dict[tuple, DecodeGraphs] = {}
        self._is_tried = self._is_given_up = False
        self._weights_at: list[int] = []

    def clear(self) -> None:
        """Let go of all graphs: the pool goes."""
        self._kept.clear()

    def check_device(self) -> None:
        """Use graphs from now on where the runner's device and pool can; on CUDA one line says when not, and why."""
        if self._runner.device.type != "cuda" or self._is_given_up:
            return
        self.is_used = self.compiles = True
        reason = why_no_graphs(self._runner)
        if reason:
            self.give_up(reason)

    def give_up(self, reason: str) -> None:
        """Capture and compile no steps from now on, which one line says."""
        runner, self._is_given_up = self._runner, True
        cost = "several times slower" + (", and samples may differ from run to run" if runner.exact else "")
        self.is_used = self.compiles = runner.exact = False
        self.clear()
        warnings.warn(f"steps are not captured as CUDA graphs, {cost}: {reason}", stacklevel=5)
        runner.find_decoder()  # one that is not compiled

    def take(self, batch: RowBatch, sampler: Sampler) -> DecodeGraphs | None:
        """Graphs whose own batch can take the place of `batch`, or None where steps are not captured.

        A parameter that lies elsewhere than at the last call was replaced, not loaded in place: all is captured anew.
        """
        if not self.is_used:
            return None
        runner = self._runner
        if self._weights_at != addresses(runner.model):
            if self._weights_at:
                runner.find_decoder()
            self.clear()
            self._weights_at = addresses(runner.model)
        # so that few sizes differ
        num_prompts, prompt_pages = (1 << (size - 1).bit_length() for size in batch.prompt_tables.shape)
        rows, pages = whole_heads(batch.tables.shape[0]), batch.tables.shape[1]
        key = (rows, pages, prompt_pages, sampler.settings)
        graphs = self._kept.pop(key, None)
        if graphs is None or len(graphs.batch.prompt_lengths) < num_prompts:
            own = RowBatch(rows, pages, num_prompts, prompt_pages, batch.scratch_page, batch.device)
            graphs = self._build(own, sampler)
            if graphs is None:
                return None
        while len(self._kept) >= KEPT:
            del self._kept[next(iter(self._kept))]
        self._kept[key] = graphs  # the last one used comes last
        return graphs

    def _build(self, batch: RowBatch, sampler: Sampler) -> DecodeGraphs | None:
        """Graphs over `batch`; None, from now on, where they cannot be made or the first ones give other hidden states
        than plain steps."""
        try:
            graphs = DecodeGraphs(self._runner, batch, sampler, compiled=self.compiles)
            if not self._is_tried:
                try_steps(self._runner, graphs)
        except Exception as error:  # Triton's errors have no base in common with others
            self.give_up(first_line(error))
            return None
        self._is_tried = True
        return graphs


def addresses(model: PreTrainedModel) -> list[int]:
    """Where the model's parameters lie; a graph reads them there."""
    return [parameter.data_ptr() for parameter in model.parameters()]


def why_no_graphs(runner: ModelRunner) -> str:
    """What keeps the runner from decoding by graphs on CUDA, as half a sentence; "" for nothing. Triton's compiler is
    tried."""
    page_size = runner.kv.page_size
    if runner.length_rope:
        return f"rope_type={runner.length_rope} depends on the longest position, which the host would have to read"
    if page_size < 8 or page_size & (page_size - 1):
        return f"rollout.page_size={page_size} is not a power of two >= 8, e.g. 16"
    if runner.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"the attention kernel has no {runner.dtype}"
    try:
        from infsample_rl.rollout.kernels.paged_attention import write_tokens  # Triton may be absent

        pages = torch.zeros(1, page_size, 1, 16, device=runner.device)
        place = torch.zeros(1, 1, dtype=torch.int64, device=runner.device)
        write_tokens(pages[0, :1], pages[0, :1], pages, pages, place.int(), place[0])
    except Exception as error:  # absent, no C compiler for its launchers, or an error of its own
        return f"Triton does not work here ({first_line(error)})"
    return ""

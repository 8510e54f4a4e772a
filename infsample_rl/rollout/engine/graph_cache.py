"""Sets of captured steps, kept from call to call, and whether steps are captured at all."""

from __future__ import annotations

import warnings

import torch
from transformers import PreTrainedModel

from infsample_rl.rollout.engine.cuda_decode import DecodeGraphs, whole_heads
from infsample_rl.rollout.engine.model_runner import ModelRunner, first_line
from infsample_rl.rollout.engine.row_batch import RowBatch, trial_sample
from infsample_rl.rollout.engine.sampler import Sampler

KEPT = 2  # sets of graphs: those of training and of evaluation
# of the largest hidden state, by which a captured step may differ from a plain one
BOUND, BOUND_ROUNDED = 1e-3, 0.1  # the second in 16 bits, and with KV of 8


class GraphCache:
    """The graphs of a runner, kept from call to call as long as its pool and weights stay where they are."""

    def __init__(self, runner: ModelRunner) -> None:
        # whether steps are captured, and compiled: `check_device` sets both on CUDA; without CUDA the tests do
        self.is_used = self.compiles = False
        self._runner = runner
        self._kept: dict[tuple, DecodeGraphs] = {}
        self._is_tried = False
        self._weights_at: list[int] = []

    def clear(self) -> None:
        """Let go of all graphs: the pool goes."""
        self._kept.clear()

    def check_device(self) -> None:
        """Use graphs from now on where the runner's device and pool can; on CUDA one line says when not, and why."""
        runner = self._runner
        if runner.device.type != "cuda":
            return
        reason = why_no_graphs(runner)
        self.is_used = self.compiles = not reason
        if reason:
            runner.exact = False
            warnings.warn(f"steps are not captured as CUDA graphs, several times slower: {reason}", stacklevel=4)

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
        """Graphs over `batch`; the first ones once they have given the hidden states of a plain step, else None from
        now on, which one line says."""
        if self._is_tried:
            return DecodeGraphs(self._runner, batch, sampler, compiled=self.compiles)
        runner, sample = self._runner, trial_sample(self._runner.vocab_size, [0], [1])
        plain = RowBatch(1, 1, 1, 1, batch.scratch_page, batch.device)
        plain.arrange([sample])
        runner.prefill(sample.group.prompt_ids, sample.group.pages)
        wanted, reason = runner.decode(plain)[0].float(), ""
        try:
            graphs = DecodeGraphs(runner, batch, sampler, compiled=self.compiles)
            batch.arrange([sample])
            graphs.step({})
            difference = ((graphs.hidden[0].float() - wanted).abs().max() / wanted.abs().max()).item()
            rounds = runner.dtype.itemsize == 2 or runner.kv.is_quantised
            if not difference < (BOUND_ROUNDED if rounds else BOUND):
                reason = f"it gives other hidden states ({difference:.2g})"
        except Exception as error:  # Triton's errors have no base in common with others
            reason = first_line(error)
        self._is_tried = True
        if not reason:
            return graphs
        self.is_used = self.compiles = runner.exact = False
        warnings.warn(f"steps are not captured as CUDA graphs, several times slower: {reason}", stacklevel=4)
        runner.find_decoder()  # one that is not compiled
        return None


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

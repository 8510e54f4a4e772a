"""Decode steps as CUDA graphs: model, head, drawing and book-keeping in one launch per step, for a few numbers of rows.

A step reads and changes the same tensors every time, those of a RowBatch; rows behind the last lie on the scratch page.
What it drew goes to pinned host memory with an event, so the host may read it while the next step runs. Without CUDA
the same step runs uncaptured, which tests use. Letters: R rows, M most rows, P prompt places, V vocabulary of the
model's head.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from infsample_rl.model.architecture import last_hidden_size
from infsample_rl.rollout.engine.decoder import FusedDecoder
from infsample_rl.rollout.engine.model_runner import ModelRunner, first_line
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.engine.sampler import DrawnTensors, Sampler

HEAD_ROWS = 32  # rows whose logits exist at a time, always so many: in another shape a row might get other bits
BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # then every 128
# Of drawing in a process, where torch allows 8 and draws uncompiled from then on: it compiles anew for all sampling
# parameters, of which a server is asked for many, and for other numbers of prompt places.
MOST_COMPILATIONS = 64
WARM_UP_STEPS = 3  # before a capture: kernels are compiled and cuBLAS takes its workspace


class CaptureError(RuntimeError):
    """A step could not be captured; nothing has changed."""


def bucket_of(num_rows: int, most_rows: int) -> int:
    """Rows that a step of `num_rows` runs: bucket_of(17, 256) -> 24; bucket_of(17, 20) -> 20; bucket_of(300, 999) ->
    384."""
    bucket = next((bucket for bucket in BUCKETS if bucket >= num_rows), -(-num_rows // 128) * 128)
    return min(bucket, most_rows)


def whole_heads(num_rows: int) -> int:
    """Rows whose logits are computed for `num_rows`: whole_heads(40) -> 64."""
    return -(-num_rows // HEAD_ROWS) * HEAD_ROWS


class DrawnBuffers:
    """What steps drew: columns of tokens, then of the bits of float64 probabilities, so that one copy takes all to the
    host, where two steps lie in turn: the host reads one while the other is written."""

    def __init__(self, max_rows: int, device: torch.device, *, truncates: bool) -> None:
        size, is_cuda = (3 if truncates else 2, max_rows), device.type == "cuda"
        self.on_device = torch.zeros(size, dtype=torch.int64, device=device)
        self._host = [torch.zeros(size, dtype=torch.int64, pin_memory=is_cuda) for _ in range(2)]
        self._ready = [torch.cuda.Event() if is_cuda else None for _ in range(2)]
        self._turn = 0

    def of(self, rows: slice) -> tuple[Tensor, Tensor, Tensor | None]:
        """Where tokens, probabilities and, with truncation, those of the truncated distribution lie, of some rows."""
        tokens, *probs = self.on_device[:, rows]
        probs = [column.view(torch.float64) for column in probs]
        return tokens, probs[0], probs[1] if len(probs) > 1 else None

    def send(self, num_rows: int) -> DrawnTensors:
        """The first rows' on their way to the host, without waiting."""
        host, ready = self._host[self._turn], self._ready[self._turn]
        self._turn = 1 - self._turn
        host.copy_(self.on_device, non_blocking=True)
        if ready is not None:
            ready.record()
        tokens, *probs = host[:, :num_rows]
        probs = [column.view(torch.float64) for column in probs]
        return DrawnTensors(tokens, probs[0], probs[1] if len(probs) > 1 else None, ready)


class DecodeGraphs:
    """One captured step per bucket of rows, all in one memory pool, over the tensors of `batch`."""

    def __init__(self, runner: ModelRunner, batch: RowBatch, sampler: Sampler, *, compiled: bool) -> None:
        """`compiled`: torch.compile for what lies between attentions and for drawing.

        The model's parameters and KV pool must stay where they are.
        """
        self.runner, self.batch, self.sampler = runner, batch, sampler
        device, is_cuda = batch.device, batch.device.type == "cuda"
        self._workspace = runner.new_workspace(batch)
        num_places, vocab_size = batch.prompt_tables.shape[0], runner.vocab_size
        dtype = torch.float32 if runner.lm_head_fp32 else runner.dtype
        self._prompt_logits = torch.zeros(num_places, vocab_size, dtype=dtype, device=device)
        self._drawn = DrawnBuffers(batch.max_rows, device, truncates=sampler.truncates)
        hidden_size = last_hidden_size(runner.model.config)
        # last states of the last step
        self.hidden = torch.zeros(batch.max_rows, hidden_size, dtype=runner.dtype, device=device)
        self._graphs: dict[int, torch.cuda.CUDAGraph | None] = {}
        self._draw = torch.compile(draw_rows, dynamic=False) if compiled else draw_rows
        if isinstance(runner.decoder, FusedDecoder):
            if compiled:
                runner.decoder.compile()
            if is_cuda:
                runner.decoder.use_triton()
        self._memory = torch.cuda.graph_pool_handle() if is_cuda else None

    @torch.no_grad()
    def step(self, first_logits: dict[int, Tensor]) -> DrawnTensors:
        """Launch one step of the batch's rows. `first_logits`: [V] by place, of prompts that have rows without a token.

        The result lies in host memory once its event has come; it is overwritten two steps later. CaptureError where a
        step of so many rows cannot be captured.
        """
        for place, logits in first_logits.items():
            self._prompt_logits[place].copy_(logits)
        num_rows = bucket_of(self.batch.num_rows, self.batch.max_rows)
        if num_rows not in self._graphs:
            self._graphs[num_rows] = self._capture(num_rows)
        graph = self._graphs[num_rows]
        if graph is None:
            self._run(num_rows)
        else:
            graph.replay()
        self.batch.count_step()
        return self._drawn.send(self.batch.num_rows)

    def _run(self, num_rows: int) -> None:
        """The step itself, over the first `num_rows` rows: no allocation but of intermediate results, no host sync,
        fixed shapes."""
        batch = self.batch
        hidden = self.runner.decode(batch, num_rows, self._workspace)
        self.hidden[:num_rows].copy_(hidden)
        for start in range(0, num_rows, HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            logits = self.runner.logits(self.hidden[rows])
            of_rows = (batch.prompt_of_row[rows], batch.keys[rows], batch.positions[rows])
            with torch._dynamo.config.patch(recompile_limit=MOST_COMPILATIONS):
                drawn = self._draw(self.sampler, self._prompt_logits, logits, *of_rows)
            self._advance(rows, drawn)

    def _advance(self, rows: slice, drawn: DrawnTensors) -> None:
        """Keep what was drawn for some rows, idle ones among them, and bring them on by a token."""
        batch = self.batch
        found, kept = (drawn.tokens, drawn.probs, drawn.sampling_probs), self._drawn.of(rows)
        if self._workspace is None:
            for to, tensor in zip(kept, found, strict=True):
                if to is not None:
                    to.copy_(tensor)
            batch.move_on(drawn.tokens, rows.start)
        else:
            from infsample_rl.rollout.kernels.row_triton import advance  # Triton may be absent

            tokens, positions, lengths, has_sample = (each[rows] for each in batch.of_a_token)
            advance(found, kept, (tokens, positions, lengths, has_sample))

    def _capture(self, num_rows: int) -> torch.cuda.CUDAGraph | None:
        """Warm up and capture a step of `num_rows` idle rows; the batch is as before afterwards. None: nothing to
        capture without CUDA."""
        batch = self.batch
        kept = [(tensor, tensor.clone()) for tensor, _ in batch.moving]
        for tensor, idle in batch.moving:
            if idle is not None:
                tensor.fill_(idle)
        try:
            if batch.device.type == "cuda":
                return self._capture_on_device(num_rows)
            self._run(num_rows)
        except Exception as error:  # Triton's errors have no base in common with others
            raise CaptureError(first_line(error)) from error
        finally:
            for tensor, values in kept:
                tensor.copy_(values)
        return None

    def _capture_on_device(self, num_rows: int) -> torch.cuda.CUDAGraph:
        stream = _capture_stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._run(num_rows)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may use CUDA meanwhile
        with torch.cuda.graph(graph, pool=self._memory, stream=stream, capture_error_mode="thread_local"):
            self._run(num_rows)
        return graph


@cache
def _capture_stream() -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace for every stream that it has seen, 64 MiB on
    Hopper."""
    return torch.cuda.Stream()


def draw_rows(
    sampler: Sampler, prompt_logits: Tensor, logits: Tensor, prompt_of_row: Tensor, keys: Tensor, positions: Tensor
) -> DrawnTensors:
    """Draw the next token of R rows from their `logits` [R, V], or from their prompt's [P, V] where the position of the
    newest is -1."""
    of_prompt = prompt_logits.index_select(0, prompt_of_row)
    logits = torch.where(positions[:, None] < 0, of_prompt, logits)
    return sampler.draw(logits, keys, positions + 1, in_triton=logits.is_cuda)

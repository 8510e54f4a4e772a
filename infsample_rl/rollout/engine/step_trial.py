"""Captured steps held to plain ones, before an engine relies on them."""

from __future__ import annotations

from array import array

import torch

from infsample_rl.rollout.engine.cuda_decode import DecodeGraphs
from infsample_rl.rollout.engine.decoder import supports
from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup, Sample

# Products have kernels for up to 16, 32 and 64 rows, and above that torch.compile takes over.
TRIAL_ROWS = (1, 32, 64, 65)
TRIAL_TOKENS = 100  # of a prompt and of a row: several pages, and several parts of attention
# of the largest hidden state, by which a captured step may differ from a plain one
BOUND, BOUND_ROUNDED = 1e-3, 0.1  # the second in 16 bits, and with KV of 8
BOUND_EXPERTS = 0.5  # in 16 bits, where rounding may send a token to another expert


@torch.inference_mode()
def try_steps(runner: ModelRunner, graphs: DecodeGraphs) -> None:
    """RuntimeError where a captured step gives other hidden states than the same step by transformers' modules. The
    pool's pages are overwritten."""
    kv, batch, most = runner.kv, graphs.batch, TRIAL_TOKENS
    if runner.context is not None:
        most = max(1, min(most, runner.context // 3))
    num_pages = min(-(-most // kv.page_size), batch.prompt_tables.shape[1], max(1, kv.num_pages // 2))
    num_tokens = min(most, num_pages * kv.page_size)
    ids = [(1 + 7 * place) % runner.vocab_size for place in range(num_tokens)]
    group = PromptGroup(0, ids, [0], GroupSettings("arrival", 1, 1), lambda index: 0)
    group.pages = list(range(num_pages))
    runner.prefill(ids, group.pages)
    shared = min(num_tokens // kv.page_size, batch.tables.shape[1] - 1)
    # a page of 8 bits takes one new token a step
    rows_of_page = 1 if kv.is_quantised else kv.page_size
    room = min(batch.max_rows, (kv.num_pages - num_pages) * rows_of_page)
    for num_rows in sorted({min(size, room) for size in TRIAL_ROWS} - {0}):
        samples, drafts = _trial_rows(runner, group, shared, num_rows, rows_of_page)
        difference = _difference(runner, graphs, samples, drafts)
        if not difference < _bound(runner, kv):
            raise RuntimeError(f"a step of {num_rows} rows gives other hidden states ({difference:.2g})")


def _trial_rows(
    runner: ModelRunner, group: PromptGroup, shared: int, num_rows: int, rows_of_page: int
) -> tuple[list[Sample], list[list[int]]]:
    """Samples with drafted tokens that make so many rows. The first tokens of a sample have the KV of the prompt's
    pages, of up to `shared` of them; the rows' own tokens fill the pages behind the prompt's."""
    samples, drafts = [], []
    for place, first in enumerate(range(0, num_rows, rows_of_page)):
        pages = group.pages[: shared - place % (shared + 1)]
        ids = [(3 + 5 * row) % runner.vocab_size for row in range(first, min(first + rows_of_page, num_rows))]
        tokens = array("i", [0] * len(pages) * runner.kv.page_size + ids[:1])
        own = len(group.pages) + place
        samples.append(Sample(group, 0, 0, key=0, pages=[*pages, own], tokens=tokens))
        drafts.append(ids[1:])
    return samples, drafts


def _difference(runner: ModelRunner, graphs: DecodeGraphs, samples: list[Sample], drafts: list[list[int]]) -> float:
    """Of the hidden states of a captured step from those of a plain one, as a part of the largest."""
    batch = graphs.batch
    sizes = (batch.tables.shape[1], 1, batch.prompt_tables.shape[1], batch.scratch_page, batch.device)
    plain = RowBatch(len(samples) + sum(map(len, drafts)), *sizes)
    for each in (batch, plain):
        each.arrange(samples)
        each.spread(samples, drafts)
    graphs.step({})  # the first of both, since the other writes the KV that it must have written
    found, decoder = graphs.hidden[: plain.max_rows].float(), runner.decoder
    runner.decoder = None  # by transformers' own modules: the decoder may be compiled
    try:
        wanted = runner.decode(plain).float()
    finally:
        runner.decoder = decoder
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


def _bound(runner: ModelRunner, kv: PagedKV) -> float:
    if runner.dtype.itemsize > 2 and not kv.is_quantised:
        return BOUND
    return BOUND_ROUNDED if supports(runner.model) else BOUND_EXPERTS

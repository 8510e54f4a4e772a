"""The trace counts what a computation on the meta device holds."""

from __future__ import annotations

import numpy as np
import torch

from infsample_rl.model.packed_attention import folded_attention
from infsample_rl.model.packing import pack_row
from infsample_rl.plan.memory_trace import MemoryTrace
from infsample_rl.plan.row_memory import _on_meta


def test_storages_count_once_while_they_live_and_views_are_not_counted():
    apart = torch.empty(1000, device="meta")
    with MemoryTrace([apart]) as trace:
        first = apart + 1  # 4,000 bytes
        view = first.view(10, 100)[2:]
        trace.moment = "later"
        second = view.repeat(2, 1)  # 6,400 bytes
        del first, view
        trace.moment = "last"
        third = second[0] + 1  # 400 bytes; the first is gone
    assert third.numel() == 100
    assert dict(trace.fullest["forward"]) == {"forward": 4000}
    assert dict(trace.fullest["later"]) == {"forward": 4000, "later": 6400}
    assert {name: size for name, size in trace.fullest["last"].items() if size} == {"later": 6400, "last": 400}


def test_attention_on_the_meta_device_keeps_no_scores_and_a_rows_mask_is_made_where_it_is_first_read_and_counted():
    row = pack_row([(np.zeros(300, np.int32), [np.zeros(200, np.int32)])], "cpu")
    query, key, value = (torch.empty(1, 4, 500, 16, device="meta", requires_grad=True) for _ in range(3))
    planned = _on_meta(row).cuts
    with MemoryTrace([query, key, value]) as trace:
        folded_attention(query, key, value, None, planned)
    assert "mask" not in vars(row.cuts.folds[0]), "of 131,072 tokens it would take 17 GB"
    assert planned.folds[0].mask.device.type == "meta" and planned.folds[0].mask.shape == (200, 500)
    assert 200 * 500 < sum(trace.fullest["forward"].values()) < 4 * 4 * 500 * 500  # of float32 scores
    assert torch.equal(row.cuts.folds[0].mask, torch.ones(200, 500, dtype=torch.bool).tril(300))

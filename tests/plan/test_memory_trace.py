"""The trace counts what a computation on the meta device holds."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from infsample_rl.plan.memory_trace import MemoryTrace


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


def test_attention_on_the_meta_device_is_the_cpus_which_keeps_no_scores():
    tokens = 512
    query, key, value = (torch.empty(1, 4, tokens, 16, device="meta", requires_grad=True) for _ in range(3))
    with MemoryTrace([query, key, value]) as trace:
        output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert output.shape == query.shape
    kept = sum(trace.fullest["forward"].values())
    assert kept == 4 * 4 * tokens * (16 + 1)  # output and log-sum-exp; the scores would be 4 * 4 * 512 * 512

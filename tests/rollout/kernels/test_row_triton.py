"""A step's book-keeping in one kernel, in Triton's interpreter, against the same in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from infsample_rl.rollout.engine.row_batch import RowBatch  # noqa: E402


def advanced(truncates, *, triton):
    """Six rows of a batch of eight, the last idle, after a step: what was kept, and the batch's tensors."""
    batch = RowBatch(8, 2, 1, 1, 9, torch.device("cpu"))
    batch.has_sample[:5], batch.positions[:5] = 1, torch.tensor([3, -1, 0, 7, 2])
    rows = slice(1, 7)
    drawn = (
        torch.arange(50, 56),
        torch.linspace(0.1, 0.6, 6),
        torch.linspace(0.2, 0.7, 6).double() if truncates else None,
    )
    kept = torch.zeros(6, dtype=torch.int64), torch.zeros(6).double(), torch.zeros(6).double() if truncates else None
    if triton:
        from infsample_rl.rollout.kernels.row_triton import advance

        advance(drawn, kept, tuple(each[rows] for each in batch.of_a_token))
    else:
        for to, tensor in zip(kept, drawn, strict=True):
            if tensor is not None:
                to.copy_(tensor)
        batch.move_on(drawn[0], rows.start)
    return [each.tolist() for each in (*kept, *batch.of_a_token) if each is not None]


@pytest.mark.parametrize("truncates", [False, True])
def test_rows_move_on_as_in_torch(interpreted, truncates):
    found, wanted = interpreted(advanced, truncates, triton=True), advanced(truncates, triton=False)
    assert found == wanted and found[-3] == [3, 0, 1, 8, 3, -1, -1, -1] and found[-2][:6] == [1, 1, 2, 9, 4, 1]

"""One decode step's attention on CUDA: writes the new tokens' KV where it belongs, then attends to pages where they
lie.

Needs Triton, so it is imported only where a step is to run on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels.page_writes import write_tokens
from infsample_rl.rollout.kernels.paged_attention import Workspace, paged_attention


@dataclass(slots=True)
class TritonStep:
    """One token of R rows through the Triton kernels: fixed shapes, lengths read on the device, fit for a CUDA
    graph."""

    kv: PagedKV
    batch: RowBatch
    num_rows: int
    positions: Tensor  # [R], of the newest tokens in their responses, >= 0
    write_index: Tensor  # [R], for pages that PagedKV must write itself
    workspace: Workspace

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """query [R, H N, 1, D], keys and values [R, H, 1, D] -> [R, 1, H N, D]."""
        keys, values, kv = keys[:, :, 0], values[:, :, 0], self.kv
        if kv.scales is None:
            own_keys, own_values = kv.layers[2 * layer : 2 * layer + 2]
            write_tokens(keys, values, own_keys, own_values, self.batch.tables, self.positions)
        else:
            kv.write(layer, self.write_index, keys, values)
        return self.attend_written(layer, query[:, :, 0].contiguous(), scaling)[:, None]

    def attend_written(self, layer: int, query: Tensor, scaling: float, *, early: bool = False) -> Tensor:
        """query [R, H N, D] -> [R, H N, D], over pages that hold the newest tokens. `early`: with programmatic
        dependent launch (sm_90)."""
        batch, (keys, values) = self.batch, self.kv.layers[2 * layer : 2 * layer + 2]
        scales = (None, None) if self.kv.scales is None else self.kv.scales[2 * layer : 2 * layer + 2]
        return paged_attention(
            query,
            keys,
            values,
            batch.tables,
            batch.lengths,
            batch.prompt_tables,
            batch.prompt_lengths,
            batch.prompt_row_starts,
            scaling,
            workspace=self.workspace,
            row_order=batch.row_order,
            key_scales=scales[0],
            value_scales=scales[1],
            early=early,
        )

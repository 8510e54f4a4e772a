"""The KV pool's tensors: pages of every layer's keys and values, allocated once, in the model's dtype or quantised to
int8.

Letters: L layers, G pages, S tokens of a page, H kv heads, D head size, T tokens, P pages of one call.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from infsample_rl.model.architecture import KVShape
from infsample_rl.model.peak_memory import give_pages_back
from infsample_rl.types import MaybeNone

LARGEST = 127.0  # what a scale's largest |value| is stored as; -128 is not used
SMALLEST_SCALE = torch.finfo(torch.float32).tiny  # of a page of zeros; 0 / 0 would be NaN
ROUNDED_UP = 1 + 2**-8  # times a number is at least that number in bfloat16
CGROUP = Path("/sys/fs/cgroup")  # of the container that this process runs in, if any


class PagedKV:
    """Keys and values of all layers in pages: [2 L, G + 1, S, H, D]. Keys of layer l lie at [2 l], its values at [2 l +
    1].

    Page G is scratch: rows without a sample, in steps of a fixed number of rows, read and write there. The pool starts
    as zeros: a page's tokens that are not written yet are masked, but 0 x NaN of raw memory would still be NaN.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.shape, self.num_pages, self.page_size, self.device = shape, num_pages, page_size, device
        self.scratch_page = num_pages
        sizes = (2 * shape.num_layers, num_pages + 1, page_size, shape.num_kv_heads, shape.head_dim)
        self.store = torch.zeros(sizes, dtype=dtype, device=device)
        self.key_scales: Tensor | MaybeNone = None  # of QuantisedKV
        self.value_scales: Tensor | MaybeNone = None
        self.layers = self.store.unbind(0)  # 2 L tensors [G + 1, S, H, D]
        self._flat = self.store.flatten(1, 2).unbind(0)  # 2 L tensors [(G + 1) S, H, D]

    @property
    def parts(self) -> list[Tensor]:
        """The pages, [2 L, G + 1, S, H, D], and, where they are quantised, their scales, [L, G + 1, ...]."""
        return [self.store, self.key_scales, self.value_scales] if self.is_quantised else [self.store]

    @property
    def is_quantised(self) -> bool:
        """Whether pages are of 8 bits, with scales."""
        return self.key_scales is not None

    @property
    def nbytes(self) -> int:
        """Bytes of the whole pool, scales included."""
        return sum(part.nbytes for part in self.parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers, scales included."""
        return self.nbytes // (self.num_pages + 1)

    def give_back(self) -> None:
        """Let the system have the memory of all pages, which nobody holds, until they are written again: they are zeros
        as at the start.

        On the CPU, where a learner beside the engine may need it; what is written again is faulted in again, about 0.3
        s a GB.
        """
        if self.device.type == "cpu":
            give_pages_back(self.store)

    def token_index(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Where tokens lie in a layer: token `positions[..., t]` of the sequence whose pages are `pages[..., :]`."""
        return pages.gather(-1, positions // self.page_size) * self.page_size + positions % self.page_size

    def write(self, layer: int, token_index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, H, D] to the tokens `token_index` [T], the newest of T sequences. No host sync,
        fixed shapes."""
        self._flat[2 * layer].index_copy_(0, token_index, keys)
        self._flat[2 * layer + 1].index_copy_(0, token_index, values)

    def write_run(self, layer: int, token_index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, H, D] of consecutive tokens of one sequence, its newest."""
        self.write(layer, token_index, keys, values)

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """A dense copy of one layer's keys and values in the pages [R, n]: two [R, n S, H, D]."""
        (rows, count), index = pages.shape, pages.reshape(-1)
        size = (rows, count * self.page_size, self.shape.num_kv_heads, self.shape.head_dim)
        keys, values = (part.index_select(0, index).view(size) for part in self.layers[2 * layer : 2 * layer + 2])
        return keys, values


class QuantisedKV(PagedKV):
    """Pages of int8: value = stored x scale.

    Keys have a scale for each channel of a page and kv head, [L, G + 1, H, D], since a few channels of theirs are much
    larger than the others; values one for each token and kv head, [L, G + 1, S, H] (KIVI, arXiv 2402.02750). A scale is
    the largest |value| it is for / 127, rounded up to bfloat16. A page's first token sets its keys' scales afresh, so
    what an earlier owner left does not matter; a later token that is larger makes a channel's grow, and what the page
    holds of it is rounded again.
    """

    def __init__(
        self, shape: KVShape, num_pages: int, page_size: int, compute_dtype: torch.dtype, device: torch.device
    ) -> None:
        """`compute_dtype`: of what `gather` gives."""
        super().__init__(shape, num_pages, page_size, torch.int8, device)
        self.compute_dtype = compute_dtype
        of_pages, heads = (shape.num_layers, num_pages + 1), shape.num_kv_heads
        self.key_scales = torch.zeros(*of_pages, heads, shape.head_dim, dtype=torch.bfloat16, device=device)
        self.value_scales = torch.zeros(*of_pages, page_size, heads, dtype=torch.bfloat16, device=device)

    def write(self, layer: int, token_index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, H, D] to the tokens `token_index` [T], the newest of T sequences; the keys of their
        other tokens in the same pages are rounded again where a scale grows. No host sync, fixed shapes."""
        keys = keys.float()
        pages, slots = token_index // self.page_size, token_index % self.page_size
        places = torch.arange(len(pages), device=self.device) * self.page_size + slots
        self._write_keys(layer, pages, slots == 0, places, keys, keys.abs())
        self._write_values(layer, token_index, values.float())

    def write_run(self, layer: int, token_index: Tensor, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [T, H, D] of consecutive tokens of one sequence, its newest; the first page may be
        partly filled."""
        keys = keys.float()
        count, size = len(token_index), self.page_size
        pages, slots = token_index // size, token_index % size
        begins = (slots == 0).long()
        order = begins.cumsum(0) - begins[:1]  # [T], which of the run's pages a token lies in
        # As many pages as any run of that length can touch, so that no count is read from the device; those left over
        # are scratch.
        num_pages = (count + size - 2) // size + 1
        touched = torch.full((num_pages,), self.scratch_page, device=self.device).index_copy_(0, order, pages)
        is_new = torch.zeros(num_pages, dtype=torch.long, device=self.device).index_add_(0, order, begins) > 0
        places = order * size + slots
        dense = keys.new_zeros(num_pages * size, *keys.shape[1:]).index_copy_(0, places, keys)
        self._write_keys(
            layer, touched, is_new, places, keys, dense.view(num_pages, size, *keys.shape[1:]).abs().amax(1)
        )
        self._write_values(layer, token_index, values.float())

    def _write_keys(
        self, layer: int, pages: Tensor, is_new: Tensor, places: Tensor, new: Tensor, largest: Tensor
    ) -> None:
        """Write tokens `new` [T, H, D] to `places` [T] among the tokens of `pages` [P]; `largest` [P, H, D]: the
        largest |value| a page gets.

        `is_new` [P]: pages whose first token is written.
        """
        of_layer, scales = self.layers[2 * layer], self.key_scales[layer]
        held, old = of_layer.index_select(0, pages), scales.index_select(0, pages)
        old = old.masked_fill(is_new[:, None, None], 0.0)
        scale = torch.maximum(old, self._scale_for(largest))
        # Where the scale stays, the factor is exactly 1 and nothing is rounded anew.
        numbers = held.float().mul_((old.float() / scale.float())[:, None])
        # not by a factor of 0: an earlier owner may have left NaN
        numbers = numbers.masked_fill_(is_new[:, None, None, None], 0.0)
        quotients = new / scale.index_select(0, places // self.page_size).float()
        numbers.flatten(0, 1).index_copy_(0, places, quotients)
        of_layer.index_copy_(0, pages, _rounded(numbers))
        scales.index_copy_(0, pages, scale)

    def _write_values(self, layer: int, token_index: Tensor, new: Tensor) -> None:
        """Write values `new` [T, H, D] to the tokens `token_index` [T]."""
        scale = self._scale_for(new.abs().amax(-1))
        numbers = _rounded(new / scale.float()[..., None])
        self.layers[2 * layer + 1].flatten(0, 1).index_copy_(0, token_index, numbers)
        self.value_scales[layer].flatten(0, 1).index_copy_(0, token_index, scale)

    def _scale_for(self, largest: Tensor) -> Tensor:
        """The scale of numbers up to `largest`; rounded up, so that none is above LARGEST."""
        return (largest * (ROUNDED_UP / LARGEST)).clamp_(min=SMALLEST_SCALE).bfloat16()

    def gather(self, layer: int, pages: Tensor) -> tuple[Tensor, Tensor]:
        """A dense copy of one layer's keys and values in the pages [R, n], in the compute dtype: two [R, n S, H, D]."""
        (rows, count), index = pages.shape, pages.reshape(-1)
        size = (rows, count * self.page_size, self.shape.num_kv_heads, self.shape.head_dim)
        scales = (
            self.key_scales[layer].index_select(0, index)[:, None],
            self.value_scales[layer].index_select(0, index)[..., None],
        )
        keys, values = (
            stored.index_select(0, index).float().mul_(scale).to(self.compute_dtype).view(size)
            for stored, scale in zip(self.layers[2 * layer : 2 * layer + 2], scales, strict=True)
        )
        return keys, values


def _rounded(numbers: Tensor) -> Tensor:
    """Float32 numbers, changed in place, as int8. A quotient may be a rounding above LARGEST."""
    return numbers.round_().clamp_(-LARGEST, LARGEST).to(torch.int8)


def stored_dtype(kv_dtype: str, model_dtype: torch.dtype) -> torch.dtype:
    """Of the pages under rollout.kv_dtype: stored_dtype("int8", torch.bfloat16) -> torch.int8; auto: the model's
    dtype."""
    return model_dtype if kv_dtype == "auto" else torch.int8


def total_bytes(device: torch.device) -> int:
    """Memory of the GPU, or of the machine or the container that this process runs in."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    total, limit = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    return total if text == "max" else min(total, int(text))


def free_bytes(device: torch.device, gpu_part: float = 1.0) -> int:
    """Memory that is free now: of the GPU, of which this process may have a part and others the rest, or what the
    operating system could give this process, containers' limits included. What torch's allocator keeps of freed
    tensors on the GPU is given back first."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        return free if gpu_part == 1 else min(free, int(gpu_part * total) - torch.cuda.memory_reserved(device))
    with open("/proc/meminfo") as lines:
        available = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    limit = CGROUP / "memory.max"
    text = limit.read_text().strip() if limit.exists() else "max"
    if text == "max":
        return available
    kinds = dict(map(str.split, (CGROUP / "memory.stat").read_text().splitlines()))
    # a container counts the files that it has read, which are forgotten where somebody needs the memory
    used = int((CGROUP / "memory.current").read_text()) - int(kinds["inactive_file"])
    return min(available, int(text) - used)

"""Checksums that prove that engine and learner hold bitwise the same weights, computed where the weights are.

A parameter's checksum is a sum modulo 2^64 over its bytes, taken as 64-bit words: every word, xored with a number of
its place, goes through splitmix64's mixing (Steele and others, OOPSLA 2014). That is one to one, so a single changed
word always shows; several, swapped rows among them, cancel by a chance of 2^-64. It depends on no bucket, order of
transfer or device.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from infsample_rl.types import WeightManifest

_ROW_WORDS = 2**15  # the bytes are taken as rows of 256 KiB, which stay in a CPU's cache
_ROWS = {"cpu": 1, "cuda": 128}  # rows at a time
_WORD = 2**64


def _mix(words: Tensor) -> Tensor:
    """splitmix64's mixing of int64 words, in place."""
    scratch = torch.empty_like(words)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, None)):
        torch.bitwise_right_shift(words, shift, out=scratch)
        # the shift kept the sign, splitmix64's does not
        words.bitwise_xor_(scratch.bitwise_and_(2 ** (64 - shift) - 1))
        if factor is not None:
            words.mul_(factor - _WORD)
    return words


@functools.lru_cache(maxsize=4)
def _places(device: torch.device) -> Tensor:
    """[_ROW_WORDS] int64: a number for every place in a row."""
    return _mix(torch.arange(1, _ROW_WORDS + 1, dtype=torch.int64, device=device).mul_(0x9E3779B97F4A7C15 - _WORD))


@torch.no_grad()
def checksum(tensor: Tensor) -> int:
    """The checksum of a tensor's bytes, 0 to 2^64 - 1; equal on every device."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    width = min(_ROW_WORDS, -(-raw.numel() // 8))
    block = torch.empty(_ROWS[raw.device.type], width, dtype=torch.int64, device=raw.device)
    sums = []
    for start in range(0, raw.numel(), block.nbytes):
        part = raw[start : start + block.nbytes]
        block.view(-1)[part.numel() // 8 :].zero_()
        # a copy: a parameter may begin anywhere in its storage
        block.view(torch.uint8).view(-1)[: part.numel()].copy_(part)
        sums.append(_mix(block.bitwise_xor_(_places(raw.device)[:width])).sum(dim=1))
    rows = torch.cat(sums)[: -(-raw.numel() // (8 * width))].tolist()  # without those that are padding alone
    return sum(value * (2 * number + 1) for number, value in enumerate(rows)) % _WORD


def summed(tensors: Iterable[tuple[str, Tensor]], sums: dict[str, int]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, and their checksums in `sums` as they pass."""
    for name, tensor in tensors:
        sums[name] = checksum(tensor)
        yield name, tensor


def differences(model: nn.Module, manifest: WeightManifest, sums: dict[str, int]) -> str | None:
    """The parameters whose values in `model` are not those that were published, or None.

    They are compared in the dtype that was published; misfit() has refused an engine's that holds less.
    """
    parameters = dict(model.named_parameters())
    wrong = [
        name
        for name, dtype, *_ in manifest.entries
        if checksum(parameters[name].detach().to(getattr(torch, dtype))) != sums.get(name)
    ]
    if not wrong:
        return None
    return f"{len(wrong)} parameters differ from the learner's after loading: {', '.join(wrong[:3])}"


def digest(sums: dict[str, int]) -> str:
    """All checksums in 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(sorted(sums.items())).encode()).hexdigest()[:16]

"""Checksums: equal for the same bytes wherever they lie, different for any flipped bit, swapped row or moved value."""

from __future__ import annotations

import pytest
import torch

from infsample_rl.model.weight_sync.checksum import checksum, differences, digest, summed
from infsample_rl.model.weight_sync.manifest import plan_weights


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_single_flipped_bit_changes_the_checksum(dtype):
    torch.manual_seed(0)
    tensor = torch.randn(7, 5).to(dtype)
    seen = {checksum(tensor)}
    raw = tensor.view(torch.uint8).view(-1)
    for byte in range(raw.numel()):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            seen.add(checksum(tensor))
            raw[byte] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()


def test_two_flipped_signs_do_not_cancel():
    tensor = torch.ones(64)
    seen = set()
    for first in range(64):
        for second in range(first + 1, 64):
            tensor[[first, second]] *= -1
            seen.add(checksum(tensor))
            tensor[[first, second]] *= -1
    assert len(seen) == 64 * 63 // 2


def test_swapped_rows_with_equal_sums_and_swapped_halves_change_the_checksum():
    tensor = torch.arange(12.0).reshape(3, 4)
    tensor[1] = tensor[0].flip(0)
    assert checksum(tensor) != checksum(tensor[[1, 0, 2]])
    large = torch.arange(2**20 + 6, dtype=torch.float32)  # 16 rows of the checksum and a rest
    assert checksum(large) != checksum(torch.cat([large[2**19 : 2**20], large[: 2**19], large[2**20 :]]))


def test_the_checksum_does_not_depend_on_where_the_tensor_lies():
    storage = torch.randn(50, dtype=torch.float32).to(torch.bfloat16)
    part = storage[3:34]  # begins at 6 bytes, ends within a word
    assert checksum(part) == checksum(part.clone())
    matrix = torch.randn(4, 3)
    assert checksum(matrix.t()) == checksum(matrix.t().contiguous())


def test_signed_zeros_and_nans_count_by_their_bits():
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.tensor([float("nan")])) == checksum(torch.tensor([float("nan")]))


def test_the_checksum_of_given_bytes_never_changes():
    assert checksum(torch.tensor([1, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)) == 11385487063155714807
    assert checksum(torch.arange(6, dtype=torch.float32)) == 3472849647520911527


def test_differences_name_the_parameters_and_compare_in_the_published_dtype():
    model = torch.nn.Linear(3, 2).to(torch.bfloat16)
    sums: dict[str, int] = {}
    passed = list(summed(model.named_parameters(), sums))
    assert [name for name, _ in passed] == list(sums) == ["weight", "bias"]
    manifest = plan_weights([("weight", torch.bfloat16, (2, 3)), ("bias", torch.bfloat16, (2,))], version=5)
    assert differences(model.float(), manifest, sums) is None, (
        "an engine that holds them in float32 holds the same values"
    )
    with torch.no_grad():
        model.weight[[0, 1]] = model.weight[[1, 0]].clone()
    assert differences(model, manifest, sums) == "1 parameters differ from the learner's after loading: weight"
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 2, "b": 1})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_gpu_computes_the_same_checksum():
    for size in (1, 1000, 2**21 + 3, 2**24):
        tensor = torch.randn(size, dtype=torch.bfloat16)
        assert checksum(tensor.cuda()) == checksum(tensor)

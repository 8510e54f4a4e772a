"""The compiled kernels of a layer's small operators, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from infsample_rl.rollout.kernels import cpu_kernels

KERNELS = cpu_kernels.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Distance relative to the norm, in float64."""
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("shape", [(1, 576), (33, 40), (5, 3, 24), (4, 2, 19)])
def test_rms_norm_is_transformers_in_float64_and_the_same_bits_in_any_batch(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    norm = LlamaRMSNorm(shape[-1], 1e-5).double()
    norm.weight.data = weight.double()
    x64 = x.double()
    exact = norm.weight * (x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5))
    found = KERNELS.rms_norm(x, weight, 1e-5)
    assert error(found, exact) < 1e-6
    assert torch.equal(found[-1:], KERNELS.rms_norm(x[-1:], weight, 1e-5))
    assert error(norm(x).double(), exact) < 1e-6


@pytest.mark.parametrize("size", [1, 24, 96, 1500])
def test_silu_mul_is_float64s_and_the_same_bits_in_any_batch(size):
    gate, up = torch.randn(33, size) * 5, torch.randn(33, size)
    found = KERNELS.silu_mul(gate, up)
    assert error(found, F.silu(gate.double()) * up.double()) < 1e-6
    assert torch.equal(found[7:8], KERNELS.silu_mul(gate[7:8], up[7:8]))


def test_silu_mul_of_huge_gates_is_finite():
    gate = torch.tensor([[-1e30, -200.0, -50.0, 0.0, 200.0, 1e30]])
    assert KERNELS.silu_mul(gate, torch.ones(1, 6)).tolist()[0] == pytest.approx(
        [0.0, 0.0, -50 * 1.9287e-22, 0.0, 200.0, 1e30], rel=1e-4, abs=1e-6
    )


def test_what_is_not_contiguous_is_refused():
    with pytest.raises(ValueError, match=r"x is .* strides \(1, 4\)"):
        KERNELS.rms_norm(torch.ones(3, 4).T, torch.ones(3), 1e-5)
    with pytest.raises(ValueError, match=r"up is torch.float32 \(2, 3\) .* must be torch.float32 \(3, 2\)"):
        KERNELS.silu_mul(torch.ones(3, 2), torch.ones(2, 3))

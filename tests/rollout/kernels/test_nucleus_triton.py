"""The cut of top_p in one kernel, in Triton's interpreter, against the same in torch."""

from __future__ import annotations

import pytest
import torch

triton = pytest.importorskip("triton")

from infsample_rl.rollout.engine.sampler import Sampler, nucleus_cutoff  # noqa: E402
from tests.gpu import GPU  # noqa: E402


def cut(rows, top_p):
    """Cutoffs of rows [R, V] by the kernel."""
    from infsample_rl.rollout.kernels import nucleus_triton

    return nucleus_triton.nucleus_cutoff(torch.from_numpy(rows), top_p)[:, 0].numpy()


def whole_parts(size, concentrations, total=2**20):
    """A row for each concentration, of multiples of 1 / total that sum to 1: every sum is exact in any order."""
    generator, rows = torch.Generator().manual_seed(3), []
    for concentration in concentrations:
        weights = torch.rand(size, generator=generator) ** concentration
        drawn = torch.multinomial(weights, total, replacement=True, generator=generator)
        rows.append(torch.bincount(drawn, minlength=size) / total)
    return torch.stack(rows)


def test_the_nucleus_written_out(interpreted):
    probs = torch.tensor([[0.25, 0.5, 0.125, 0.125, 0.0], [0.25, 0.25, 0.25, 0.25, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    for share, top_p, wanted in [
        (1.0, 0.5, [0.5, 0.25, 1.0]),
        (1.0, 0.75, [0.25, 0.25, 1.0]),
        (1.0, 0.76, [0.125, 0.25, 1.0]),
        (0.9, 0.95, [0.0, 0.0, 0.0]),
        (float("nan"), 0.5, [0.0, 0.0, 0.0]),
    ]:
        assert interpreted(cut, (share * probs).numpy(), top_p).tolist() == wanted


@pytest.mark.parametrize("size", [4096, 5003])
@pytest.mark.parametrize("top_p", [0.3, 0.95])
def test_the_cutoff_is_that_of_torch_bit_by_bit_where_sums_are_exact(interpreted, size, top_p):
    probs = whole_parts(size, (0.1, 2.0, 60.0))
    falling = probs.sort(dim=-1, descending=True).values
    kept = (falling.cumsum(dim=-1) - falling < top_p).sum(dim=-1, keepdim=True)
    found = torch.from_numpy(interpreted(cut, probs.numpy(), top_p))
    assert torch.equal(found, falling.gather(1, kept - 1)[:, 0]) and len(found.unique()) == 3
    assert torch.equal(found, nucleus_cutoff(probs, top_p)[:, 0])


def test_a_row_has_the_same_cutoff_in_any_company_and_its_nucleus_is_the_smallest(interpreted):
    probs = torch.softmax(3 * torch.randn(5, 6000, generator=torch.Generator().manual_seed(1)), dim=-1)
    found = interpreted(cut, probs.numpy(), 0.9)
    assert [interpreted(cut, row[None].numpy(), 0.9).item() for row in probs] == found.tolist()
    wide, cutoffs = probs.double(), torch.from_numpy(found).double()[:, None]
    assert ((wide * (wide >= cutoffs)).sum(-1) > 0.9 - 1e-6).all()
    assert ((wide * (wide > cutoffs)).sum(-1) < 0.9 + 1e-6).all()


def drawn_tokens(logits, *, in_triton, compiled):
    """Tokens drawn of rows [R, V] with top_p."""
    sampler = Sampler(logits.shape[1], 900, temperature=0.8, top_p=0.7, top_k=0, min_p=0.01, device=torch.device("cpu"))
    draw = torch.compile(sampler.draw, backend="eager", fullgraph=True) if compiled else sampler.draw
    drawn = draw(torch.from_numpy(logits), torch.arange(len(logits)), torch.arange(len(logits)), in_triton=in_triton)
    return drawn.tokens.tolist(), drawn.sampling_probs.tolist()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_draw_takes_the_cutoff_of_the_kernel(interpreted, compiled):
    logits = 2 * torch.randn(20, 1000, generator=torch.Generator().manual_seed(2))
    tokens, probs = interpreted(drawn_tokens, logits.clone().numpy(), in_triton=True, compiled=compiled)
    wanted, wanted_probs = drawn_tokens(logits.numpy(), in_triton=False, compiled=False)
    assert tokens == wanted and probs == pytest.approx(wanted_probs, rel=1e-6)


def test_the_kernel_compiles_for_hopper_and_reads_four_numbers_at_a_time(tmp_path, monkeypatch):
    from infsample_rl.rollout.kernels import nucleus_triton

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    fixed = {"PASSES": nucleus_triton.PASSES, "BLOCK": nucleus_triton.BLOCK}
    kinds = {"probs": "*fp32", "cutoffs": "*fp32", "top_p": "fp32", "size": "i32"} | dict.fromkeys(fixed, "constexpr")
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 3)}
    source = triton.compiler.ASTSource(nucleus_triton._nucleus_kernel, kinds, fixed, aligned)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    compiled = triton.compile(source, target=target, options={"num_warps": nucleus_triton.WARPS})
    assert compiled.metadata.shared <= 227 * 1024
    ptx = compiled.asm["ptx"]
    assert "atom" not in ptx and ("ld.global.v4" in ptx or "cp.async.cg.shared.global" in ptx)


@pytest.mark.gpu
def test_the_kernel_gives_the_same_cutoff_on_cuda():
    from infsample_rl.rollout.kernels import nucleus_triton

    probs = whole_parts(151936, (2.0,))
    on_gpu = nucleus_triton.nucleus_cutoff(probs.to(GPU), 0.9)
    assert torch.equal(on_gpu.cpu(), nucleus_cutoff(probs, 0.9))

"""The compiled decode kernels against float64, and their results bit by bit in other company and on other thread
counts."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F

from infsample_rl.rollout.kernels import cpu_kernels

KERNELS = cpu_kernels.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Distance relative to the norm, in float64."""
    return ((found.double() - exact).norm() / exact.norm()).item()


class Workload:
    """Random rows over scattered pages, lengths from 1 up."""

    def __init__(self, rows, kv_heads, group, size, page_size, own_tokens, prompt_tokens, prompts=1):
        row_pages, prompt_pages = -(-own_tokens // page_size), -(-prompt_tokens // page_size)
        num_pages = rows * row_pages + prompts * prompt_pages + 3
        pages = torch.randperm(num_pages, dtype=torch.int32)
        self.row_tables = pages[: rows * row_pages].view(rows, row_pages)
        self.prompt_tables = pages[rows * row_pages : num_pages - 3].view(prompts, prompt_pages)
        self.row_lengths = torch.randint(1, own_tokens + 1, (rows,), dtype=torch.int32)
        self.prompt_lengths = torch.randint(1, prompt_tokens + 1, (prompts,), dtype=torch.int32)
        self.row_lengths[-1], self.prompt_lengths[-1] = own_tokens, prompt_tokens
        tables = list(zip(self.row_tables, self.row_lengths, strict=True))
        tables += zip(self.prompt_tables, self.prompt_lengths, strict=True)
        for table, length in tables:
            table[-(-int(length) // page_size) :] = 2_000_000_000  # what lies past a length is not followed
        self.prompt_of_row = torch.randint(0, prompts, (rows,), dtype=torch.int32)
        # what is not written is not read
        self.keys, self.values = (torch.full((num_pages, page_size, kv_heads, size), torch.nan) for _ in range(2))
        for table, length in tables:
            for token in range(length):
                for pool in (self.keys, self.values):
                    pool[table[token // page_size], token % page_size] = torch.randn(kv_heads, size)
        self.query = torch.randn(rows, kv_heads * group, size)
        self.scaling = size**-0.5

    def attend(self, rows=slice(None), **changes) -> torch.Tensor:
        arguments = dict(
            query=self.query[rows].contiguous(),
            keys=self.keys,
            values=self.values,
            row_tables=self.row_tables[rows].contiguous(),
            row_lengths=self.row_lengths[rows].contiguous(),
            prompt_tables=self.prompt_tables,
            prompt_lengths=self.prompt_lengths,
            prompt_of_row=self.prompt_of_row[rows].contiguous(),
            scaling=self.scaling,
        )
        return KERNELS.paged_attention(**(arguments | changes))

    @staticmethod
    def gather(pool: torch.Tensor, table: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return pool[table[: -(-int(length) // pool.shape[1])]].flatten(0, 1)[:length]

    def exact(self) -> torch.Tensor:
        """In float64, row by row over the gathered tokens."""
        kv_heads, out = self.keys.shape[2], []
        for row, prompt in enumerate(self.prompt_of_row):
            parts = (
                (self.prompt_tables[prompt], self.prompt_lengths[prompt]),
                (self.row_tables[row], self.row_lengths[row]),
            )
            keys, values = (
                torch.cat([self.gather(pool, *part) for part in parts]).double() for pool in (self.keys, self.values)
            )
            query = self.query[row].double().unflatten(0, (kv_heads, -1))
            weights = (torch.einsum("hnd,thd->hnt", query, keys) * self.scaling).softmax(-1)
            out.append(torch.einsum("hnt,thd->hnd", weights, values).flatten(0, 1))
        return torch.stack(out)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 13, 33, 64, 100])
@pytest.mark.parametrize(("size", "outs"), [(64, 40), (576, 97), (1, 1), (19, 3), (2048, 6)])
def test_linear_is_the_product_of_float64(rows, size, outs):
    x, weight, bias = torch.randn(rows, size), torch.randn(outs, size), torch.randn(outs)
    exact = x.double() @ weight.double().T
    assert error(KERNELS.linear(x, weight), exact) < 1e-6
    assert error(KERNELS.linear(x, weight, bias), exact + bias.double()) < 1e-6


@pytest.mark.parametrize(("size", "outs"), [(576, 100), (83, 77)])
def test_linear_gives_a_row_the_same_bits_in_any_batch_place_and_thread_count(size, outs):
    x, weight, bias = torch.randn(64, size), torch.randn(outs, size), torch.randn(outs)
    torch.set_num_threads(1)
    alone = torch.cat([KERNELS.linear(row[None], weight, bias) for row in x])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for rows in (3, 8, 33, 64):
            assert torch.equal(KERNELS.linear(x[:rows], weight, bias), alone[:rows])
            assert torch.equal(KERNELS.linear(x[-rows:], weight, bias), alone[-rows:])


def test_linear_gives_a_column_the_same_bits_in_a_larger_matrix():
    x, weight = torch.randn(5, 96), torch.randn(50, 96)
    assert torch.equal(KERNELS.linear(x, weight[7:30]), KERNELS.linear(x, weight)[:, 7:30])


@pytest.mark.parametrize(
    "sizes",
    [
        dict(rows=1, kv_heads=1, group=1, size=8, page_size=1, own_tokens=1, prompt_tokens=1),
        dict(rows=5, kv_heads=2, group=3, size=16, page_size=4, own_tokens=20, prompt_tokens=9, prompts=2),
        dict(rows=7, kv_heads=3, group=3, size=64, page_size=16, own_tokens=40, prompt_tokens=50, prompts=3),
        dict(rows=4, kv_heads=2, group=7, size=80, page_size=5, own_tokens=33, prompt_tokens=70),
        dict(rows=3, kv_heads=2, group=2, size=128, page_size=16, own_tokens=100, prompt_tokens=40),
        dict(rows=9, kv_heads=2, group=4, size=72, page_size=16, own_tokens=30, prompt_tokens=20, prompts=9),
        dict(rows=33, kv_heads=1, group=8, size=24, page_size=7, own_tokens=20, prompt_tokens=50, prompts=2),
    ],
    ids=lambda sizes: f"R{sizes['rows']}-N{sizes['group']}-D{sizes['size']}",
)
def test_attention_is_the_softmax_over_prompt_and_own_tokens_of_float64(sizes):
    work = Workload(**sizes)
    assert error(work.attend(), work.exact()) < 1e-6


def test_attention_stays_exact_when_scores_are_far_apart():
    work = Workload(rows=3, kv_heads=1, group=2, size=16, page_size=4, own_tokens=40, prompt_tokens=40)
    work.query *= 300.0
    assert error(work.attend(), work.exact()) < 1e-5


def test_linear_refuses_what_it_cannot_read():
    x, weight = torch.randn(2, 8), torch.randn(3, 8)
    for bad_x, bad_weight, bias, named in [
        (x.double(), weight, None, r"x is torch.float64 \(2, 8\)"),
        (x, weight.bfloat16(), None, r"weight is torch.bfloat16"),
        (x, weight[:, :7], None, r"weight is torch.float32 \(3, 7\) .* must be torch.float32 \(3, 8\)"),
        (x, torch.randn(8, 3).T, None, r"weight is .* strides \(1, 3\)"),
        (torch.randn(8, 2).T, weight, None, r"x is .* strides \(1, 2\)"),
        (x, weight, torch.randn(4), r"bias is torch.float32 \(4,\)"),
    ]:
        with pytest.raises(ValueError, match=named):
            KERNELS.linear(bad_x, bad_weight, bias)


def test_attention_refuses_other_types_and_indices_outside_the_pool():
    work = Workload(rows=3, kv_heads=2, group=2, size=8, page_size=4, own_tokens=10, prompt_tokens=6)

    def int32(*numbers):
        return torch.tensor(numbers, dtype=torch.int32)

    for changes in (
        dict(row_lengths=int32(3, 0, 3)),
        dict(row_lengths=int32(3, 3, 13)),
        dict(row_tables=work.row_tables + len(work.keys)),
        dict(prompt_lengths=int32(9)),
        dict(prompt_of_row=int32(0, -1, 0)),
    ):
        with pytest.raises(ValueError, match="is out of range"):
            work.attend(**changes)
    with pytest.raises(ValueError, match=r"is torch.bfloat16"):
        work.attend(keys=work.keys.bfloat16())


def test_callers_in_several_python_threads_do_not_disturb_each_other():
    work = Workload(rows=8, kv_heads=2, group=3, size=24, page_size=4, own_tokens=21, prompt_tokens=35)
    alone, start = work.attend(), threading.Barrier(4)

    def many():
        start.wait()
        return all(torch.equal(work.attend(), alone) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(future.result() for future in [pool.submit(many) for _ in range(4)])


@pytest.mark.parametrize("shape", [(1, 576), (33, 40), (5, 3, 24), (4, 2, 19)])
def test_rms_norm_is_that_of_float64_and_the_same_bits_in_any_batch(shape):
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    x64 = x.double()
    exact = weight.double() * (x64 * torch.rsqrt(x64.pow(2).mean(-1, keepdim=True) + 1e-5))
    found = KERNELS.rms_norm(x, weight, 1e-5)
    assert error(found, exact) < 1e-6
    assert torch.equal(found[-1:], KERNELS.rms_norm(x[-1:], weight, 1e-5))


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

"""KV pages of 8 bits: what rounding costs, when a scale grows, that memory shrinks and everything else stays as it
was."""

from functools import partial

import pytest
import torch

from infsample_rl.model.architecture import KVShape
from infsample_rl.rollout.engine.kv_cache import QuantisedKV
from tests import engines
from tests.engines import PROMPTS, tokens_of
from tests.gpu import GPU
from tests.tiny_models import plain_logprobs

CPU = torch.device("cpu")
TOP = 127
make_engine = partial(engines.make_engine, stop={3, 17}, max_prompt_tokens=7, page_size=8)


def make_kv(*, pages=6, size=4, heads=1, dims=1, layers=1, compute=torch.float32, device=CPU):
    shape = KVShape(num_layers=layers, num_kv_heads=heads, head_dim=dims)
    return QuantisedKV(shape, pages, size, compute, device)


def column(*numbers):
    """Numbers as keys or values [T, 1, 1]."""
    return torch.tensor(numbers, dtype=torch.float32).view(-1, 1, 1)


def stored(kv, page, *, layer=0):
    """What a page holds: the keys' numbers and their scale, of the only channel of the only head."""
    return kv.layers[2 * layer][page, :, 0, 0].float().tolist(), kv.key_scales[layer, page, 0, 0].item()


def random_tokens(count, heads=2, dims=8):
    """Keys and values of different size per head, growing and shrinking along the sequence."""
    generator = torch.Generator().manual_seed(count)
    size = torch.linspace(0, 9, count).sin().abs()[:, None, None] + torch.tensor([0.1, 3.0])[None, :, None]
    return tuple(torch.randn(count, heads, dims, generator=generator) * size for _ in range(2))


def test_a_larger_token_makes_the_scale_grow_and_rounds_the_page_again():
    kv = make_kv()
    kv.write(0, torch.tensor([8]), column(1.0), column(0.5))
    numbers, first = stored(kv, 2)
    assert 1 / 127 <= first <= 1.01 / 127 and numbers == [round(1 / first), 0, 0, 0]  # in bfloat16, rounded up
    kv.write(0, torch.tensor([9]), column(-4.0), column(0.25))
    numbers, grown = stored(kv, 2)
    again = round(round(1 / first) * first / grown)
    assert 4 / 127 <= grown <= 4.04 / 127 and numbers == [again, round(-4 / grown), 0, 0]
    kv.write(0, torch.tensor([10]), column(2.0), column(0.5))
    # a smaller token changes nothing else
    assert stored(kv, 2) == ([again, round(-4 / grown), round(2 / grown), 0], grown)
    keys, values = kv.gather(0, torch.tensor([[2]]))
    torch.testing.assert_close(keys[0, :, 0, 0], torch.tensor([again, round(-4 / grown), round(2 / grown), 0]) * grown)
    torch.testing.assert_close(values[0, :, 0, 0], torch.tensor([0.5, 0.25, 0.5, 0]), rtol=0.005, atol=0)


def test_a_large_channel_of_keys_and_a_large_token_of_values_cost_the_others_nothing():
    kv = make_kv(dims=2)
    large = torch.tensor([[[100.0, 0.5]], [[-90.0, 0.25]]])  # [T, H, D]
    kv.write_run(0, torch.arange(2), large, large.transpose(0, 2))
    keys, values = kv.gather(0, torch.tensor([[0]]))
    torch.testing.assert_close(keys[0, :2], large, rtol=0.01, atol=0)
    torch.testing.assert_close(values[0, :2], large.transpose(0, 2), rtol=0.01, atol=0)


@pytest.mark.parametrize("left_over", [1000.0, float("nan")])
def test_a_pages_first_token_sets_the_scale_afresh_whatever_was_left_there(left_over):
    kv = make_kv()
    for write in (kv.write, kv.write_run):
        kv.write_run(0, torch.arange(4), column(1.0, 2.0, left_over, 3.0), column(1.0, 2.0, left_over, 3.0))
        write(0, torch.tensor([0]), column(0.5), column(0.5))
        numbers, scale = stored(kv, 0)
        assert numbers[1:] == [0, 0, 0] and numbers[0] > 0.98 * TOP and scale == pytest.approx(0.5 / TOP, rel=0.01)


def test_a_page_of_zeros_stays_zero():
    kv = make_kv()
    kv.write_run(0, torch.arange(3), column(0.0, 0.0, 0.0), column(0.0, 0.0, 0.0))
    kv.write(0, torch.tensor([3]), column(0.0), column(0.0))
    assert kv.gather(0, torch.tensor([[0]]))[0].flatten().tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("cuts", [[5], [8], [7, 9], [3, 4, 21], list(range(1, 22))])
def test_a_run_in_pieces_keeps_what_the_earlier_ones_wrote(cuts):
    keys, values = random_tokens(22)
    kv = make_kv(size=8, heads=2, dims=8)
    index = kv.token_index(torch.tensor([4, 0, 2]), torch.arange(22))
    for start, end in zip([0, *cuts], [*cuts, 22], strict=True):
        kv.write_run(0, index[start:end], keys[start:end], values[start:end])
    whole = make_kv(size=8, heads=2, dims=8)
    whole.write_run(0, index, keys, values)
    for part, of_whole in zip(kv.parts[1:], whole.parts[1:], strict=True):
        assert torch.equal(part[:, :-1], of_whole[:, :-1])  # the last is scratch
    for wanted, got in zip((keys, values), kv.gather(0, torch.tensor([[4, 0, 2]])), strict=True):
        largest = torch.stack([page.abs().amax((0, 2)) for page in wanted.split(8)]).repeat_interleave(8, 0)[
            :22, :, None
        ]
        error = (got[0, :22] - wanted).abs() / largest
        assert error.max() < 0.02  # rounded again at every growth


def test_rows_written_together_equal_rows_written_alone_and_runs_token_by_token():
    sequences = [random_tokens(count) for count in (9, 10, 11)]
    pages = torch.tensor([[0, 5], [3, 1], [4, 2]])
    together, alone, runs = (make_kv(size=8, heads=2, dims=8) for _ in range(3))
    for position in range(9):
        index = together.token_index(pages, torch.full((3, 1), position))[:, 0]
        new = [torch.stack([sequence[half][position] for sequence in sequences]) for half in (0, 1)]
        together.write(0, index, *new)
        for row in range(3):
            alone.write(0, index[row : row + 1], new[0][row : row + 1], new[1][row : row + 1])
            runs.write_run(0, index[row : row + 1], new[0][row : row + 1], new[1][row : row + 1])
    for other in (alone, runs):
        assert torch.equal(together.store[:, :-1], other.store[:, :-1])
        for part, of_other in zip(together.parts[1:], other.parts[1:], strict=True):
            assert torch.equal(part[:, :-1], of_other[:, :-1])


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(initializer_range=0.1)


def logprob_differences(model, groups):
    """|engine - full forward| of every token."""
    return torch.cat(
        [
            (torch.from_numpy(each.logprobs) - plain_logprobs(model, prompt, each.token_ids)[0].detach()).abs()
            for prompt, group in zip(PROMPTS, groups, strict=True)
            for each in group
        ]
    )


def test_log_probabilities_are_close(model, tokenizer):
    found = {}
    for kind in ("auto", "int8"):
        found[kind] = logprob_differences(model, make_engine(model, tokenizer, kv_dtype=kind).generate(PROMPTS, seed=1))
    assert found["auto"].max() < 1e-5
    assert 1e-5 < found["int8"].mean() < 0.01 and found["int8"].max() < 0.05


def test_the_same_settings_give_the_same_completions_twice(model, tokenizer):
    engine = make_engine(model, tokenizer, kv_dtype="int8", kv_budget_tokens=56)
    first, again = engine.generate(PROMPTS, seed=1), engine.generate(PROMPTS, seed=1)
    other = make_engine(model, tokenizer, kv_dtype="int8", kv_budget_tokens=56).generate(PROMPTS, seed=1)
    assert engine.stats.preemptions > 0
    assert tokens_of(first) == tokens_of(again) == tokens_of(other)
    for one, two, three in zip(
        *([completion for group in run for completion in group] for run in (first, again, other)), strict=True
    ):
        assert one.logprobs.tolist() == two.logprobs.tolist() == three.logprobs.tolist()


@pytest.mark.parametrize(
    "settings", [{"preemption": "recompute"}, {"preemption": "park"}, {"schedule": "naive", "kv_budget_tokens": None}]
)
def test_every_sample_ends_inside_the_pool_with_constant_preemption(model, tokenizer, settings):
    engine = make_engine(
        model, tokenizer, **({"kv_dtype": "int8", "kv_budget_tokens": 40, "prompts_at_once": 2} | settings)
    )
    groups = engine.generate(PROMPTS, seed=2)
    assert [len(group) for group in groups] == [6, 6, 6]
    stats, pages = engine.stats, engine.runner.kv.num_pages
    assert stats.kv_pool_bytes == pages * engine.runner.page_bytes(8) == pages * engine.runner.kv.page_bytes
    assert stats.peak_kv_bytes <= stats.kv_pool_bytes
    assert (stats.preemptions > 0) == ("schedule" not in settings)
    assert (stats.parked_tokens > 0) == (settings.get("preemption") == "park")
    assert logprob_differences(model, groups).mean() < 0.01


def test_the_same_bytes_hold_more_than_three_times_the_tokens_of_float32(model, tokenizer):
    pages = {
        kind: make_engine(model, tokenizer, kv_dtype=kind, kv_budget_bytes="64KiB").runner.kv.num_pages
        for kind in ("auto", "int8")
    }
    # 2 layers x keys and values x 8 tokens x 2 heads x 16 numbers: 4,096 bytes in float32; 1,024 and in 8 bits 2 layers
    # x 2 heads x (16 channels + 8 tokens) scales of 2 bytes
    assert pages == {"auto": 16, "int8": 53}


@pytest.mark.gpu
def test_a_write_in_a_cuda_graph_equals_one_on_the_cpu():
    keys, values = random_tokens(3 * 20)
    pages = torch.tensor([[0, 4, 2], [3, 1, 5]])
    here, there = (make_kv(size=8, heads=2, dims=8, device=torch.device(name)) for name in ("cpu", GPU))
    new, index = torch.zeros(2, 2, 2, 8, device=GPU), torch.zeros(2, dtype=torch.int64, device=GPU)
    there.write(0, index, new[0], new[1])  # a first call outside the graph, as capturing wants
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        there.write(0, index, new[0], new[1])
    for position in range(20):
        places = here.token_index(pages, torch.full((2, 1), position))[:, 0]
        tokens = [part[[position, 20 + position]] for part in (keys, values)]
        here.write(0, places, *tokens)
        index.copy_(places)
        new.copy_(torch.stack(tokens))
        graph.replay()
    for one, other in zip(here.parts[1:], there.parts[1:], strict=True):
        assert torch.equal(one, other.cpu())
    for one, other in zip(here.gather(0, pages), there.gather(0, pages.cuda()), strict=True):
        torch.testing.assert_close(one, other.cpu(), atol=0.01, rtol=0.13)  # a tie may be rounded the other way

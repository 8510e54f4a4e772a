"""Steps captured as CUDA graphs: the same tokens, no host sync, no allocation, memory flat in G. Without a GPU they run
uncaptured on the CPU, so that what leads there is tried."""

from __future__ import annotations

import pytest
import torch

from tests import engines
from tests.engines import PROMPTS, assert_logprobs_close, bits_of, ends_of, greedy, tokens_of
from tests.gpu import GPU, needs_gpu

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu_model(make_model):
    """float32, or bfloat16, of a family on the GPU."""
    return lambda family="qwen3", dtype=torch.float32, **changes: make_model(family, **changes).to(GPU, dtype)


def make_engine(model, tokenizer, *, captured=True, **settings):
    """`captured` False: the engine's step in plain torch, without graphs, Triton and torch.compile."""
    engine = engines.make_engine(model, tokenizer, **settings)
    engine.pool.allocate([16] * 3)  # large enough for all calls, so that it is not allocated again
    assert engine.pool.graphs.is_used == (GPU == "cuda")
    engine.pool.graphs.is_used = captured
    return engine


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2"])
def test_greedy_tokens_equal_generate(gpu_model, tokenizer, family):
    model = gpu_model(family)
    engine = make_engine(model, tokenizer, stop=set(), prompts_at_once=2)
    found = tokens_of(engine.generate(PROMPTS, seed=0, temperature=0))
    assert found == [[greedy(model, prompt, 24)] * 6 for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prompts_at_once": 3, "slots": 8},
        {"kv_budget_tokens": 64, "page_size": 8, "group_size": 12},  # preempts and parks
        {"kv_budget_tokens": 64, "page_size": 8, "group_size": 12, "preemption": "recompute"},
        {"schedule": "arrival", "slots": 2},
        {"schedule": "infinite", "predictor": "bert", "prefix_tokens": 4},
        {"schedule": "dynamic_slot"},
        {"stop_strings": ["w12 w", "w6"]},
        {"top_p": 0.8, "temperature": 0.9},
        {"top_k": 9, "min_p": 0.02, "bad_token_ids": [1]},
        {"group_size": 40, "slots": 40},
    ],
    ids=str,
)
def test_captured_steps_draw_what_plain_ones_draw(gpu_model, tokenizer, settings):
    model = gpu_model()
    wanted = make_engine(model, tokenizer, captured=False, **settings).generate(PROMPTS, seed=4)
    engine = make_engine(model, tokenizer, **settings)
    found = engine.generate(PROMPTS, seed=4)
    assert ends_of(found) == ends_of(wanted)
    assert_logprobs_close(found, wanted, 1e-4)
    needs_gpu()
    (graphs,) = engine.pool.graphs._kept.values()
    assert engine.pool.graphs.compiles and all(graph is not None for graph in graphs._graphs.values())


def test_loaded_weights_reach_captured_graphs(gpu_model, tokenizer):
    model, other = gpu_model(), gpu_model(initializer_range=0.3)
    engine = make_engine(model, tokenizer)
    engine.generate(PROMPTS, seed=4)
    (graphs,) = engine.pool.graphs._kept.values()
    captured = dict(graphs._graphs)
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)
    assert ends_of(engine.generate(PROMPTS, seed=4)) == ends_of(make_engine(other, tokenizer).generate(PROMPTS, seed=4))
    assert engine.pool.graphs._kept == {next(iter(engine.pool.graphs._kept)): graphs}
    # other lengths may need other numbers of rows
    assert all(graphs._graphs[rows] is graph for rows, graph in captured.items())


def test_bfloat16_log_probabilities_equal_a_full_forward(gpu_model, tokenizer):
    model = gpu_model(dtype=torch.bfloat16)
    group = make_engine(model, tokenizer, prompts_at_once=3).generate(PROMPTS, seed=1)[0]
    for completion in group:
        response = completion.token_ids.tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([PROMPTS[0] + response], device=GPU), use_cache=False).logits[
                0, len(PROMPTS[0]) - 1 : -1
            ]
        wanted = torch.log_softmax(logits.float(), -1).cpu()[torch.arange(len(response)), torch.tensor(response)]
        assert (torch.from_numpy(completion.logprobs) - wanted).abs().mean() < 0.05


@pytest.fixture(scope="module")
def of_all_rows(gpu_model, tokenizer):
    """A model of Qwen3-1.7B's shape with two layers in bfloat16, and the samples of one prompt, all 32 at once."""
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes = sizes | {"head_dim": 128} if GPU == "cuda" else {}
    model = gpu_model(dtype=torch.bfloat16, max_position_embeddings=512, **sizes)
    settings = {"schedule": "full_group", "group_size": 32, "slots": 32, "max_new_tokens": 64}
    return model, make_engine(model, tokenizer, **settings).generate(PROMPTS[:1], seed=1)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "arrival"},
        {"schedule": "arrival", "slots": 20, "page_size": 32},
        {},  # token_budget, which parks
        {"speculate": "3"},
        {"slots": 32, "prompts_at_once": 2},
    ],
    ids=str,
)
def test_bfloat16_samples_are_bit_by_bit_those_of_all_rows_at_once(of_all_rows, tokenizer, settings):
    model, wanted = of_all_rows
    options = {"group_size": 32, "slots": 4, "max_new_tokens": 64} | settings
    if options.get("speculate", "auto") != "auto":
        needs_gpu()  # bfloat16 on a CPU drafts nothing
    found = make_engine(model, tokenizer, **options).generate(PROMPTS, seed=1)[:1]
    needs_gpu()  # on the CPU float32 alone is exact
    assert ends_of(found) == ends_of(wanted) and bits_of(found) == bits_of(wanted)


@pytest.mark.parametrize("settings", [{}, {"preemption": "recompute"}, {"prompts_at_once": 2}], ids=str)
def test_an_exact_engine_gives_more_rows_than_the_kernels_take_the_same_bits(of_all_rows, tokenizer, settings):
    most = 40 if GPU == "cuda" else 4
    model, options = of_all_rows[0], {"group_size": 96, "slots": 4, "max_new_tokens": most, "exact": True}
    everything = options | {"schedule": "full_group", "slots": 96}
    wanted = make_engine(model, tokenizer, **everything).generate(PROMPTS[:1], seed=2)
    engine = make_engine(model, tokenizer, **(options | settings))
    found = engine.generate(PROMPTS, seed=2)[:1]
    needs_gpu()
    assert engine.is_exact and ends_of(found) == ends_of(wanted) and bits_of(found) == bits_of(wanted)


@pytest.fixture(scope="module")
def make_running(gpu_model, tokenizer):
    """The loop of a call whose rows never end within 200 tokens, in one page each; its graph is captured and it has
    taken 3 steps."""
    model = gpu_model(max_position_embeddings=512)

    def build(group_size=8, **settings):
        options = {"group_size": group_size, "slots": group_size, "max_new_tokens": 200, "page_size": 256}
        options |= {"schedule": "full_group", "speculate": "0"}
        engine = make_engine(model, tokenizer, stop=set(), **(options | settings))
        engine.generate([PROMPTS[0]], seed=1)
        engine.stream([PROMPTS[0]], seed=1)
        for _ in range(3):
            engine._loop.step()
        return engine._loop

    return build


def test_a_step_never_waits_for_the_device(make_running):
    loop = make_running()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(50):
            loop.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loop.stats.running_steps == 53 and loop._launched is not None


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.9}], ids=str)
def test_fifty_steps_allocate_nothing(make_running, settings):
    loop = make_running(**settings)
    before = torch.cuda.memory_stats()
    for _ in range(50):
        loop.step()
    needs_gpu()
    after = torch.cuda.memory_stats()
    assert after["allocation.all.allocated"] == before["allocation.all.allocated"]
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]


def test_a_step_is_one_launch_and_the_graph_holds_the_rest(make_running):
    loop = make_running()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    ) as profile:
        for _ in range(10):
            loop.step()
        torch.cuda.synchronize()
    counts = {event.key: event.count for event in profile.key_averages()}
    assert counts["cudaGraphLaunch"] == 10
    assert counts.get("cudaLaunchKernel", 0) == counts.get("cuLaunchKernel", 0) == counts.get("cudaMalloc", 0) == 0


def test_peak_memory_is_flat_in_the_group_size(gpu_model, tokenizer):
    model = gpu_model(max_position_embeddings=512)
    peaks = []
    for group_size in (8, 8, 64, 256):
        settings = {"slots": 4, "kv_budget_tokens": 1024, "max_rows": 8, "max_new_tokens": 64, "group_size": group_size}
        engine = make_engine(model, tokenizer, stop=set(), **settings)
        engine.generate([PROMPTS[0]], seed=1)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.generate([PROMPTS[0]], seed=1)
        peaks.append(torch.cuda.max_memory_allocated())
        del engine
    # the first has not the libraries' workspaces of every stream yet
    assert max(peaks[1:]) <= 1.02 * min(peaks[1:]), peaks

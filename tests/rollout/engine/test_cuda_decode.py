"""The CUDA path of a decode step without CUDA: static tensors, buckets of rows, steps launched ahead, and the kernels
in Triton's interpreter.

Graphs themselves are in test_cuda_graphs.py; here the step that they capture runs uncaptured.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from infsample_rl.rollout.engine import cuda_decode, sampling_engine
from infsample_rl.rollout.engine.decode_loop import DecodeLoop
from infsample_rl.rollout.engine.graph_cache import why_no_graphs
from infsample_rl.rollout.engine.length_source import LengthSource
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.schedule.prompt_group import GroupSettings, PromptGroup
from tests import engines
from tests.engines import PROMPTS, assert_logprobs_close, bits_of, ends_of


def make_engine(model, tokenizer, *, static=False, **settings):
    """`static`: steps run as they are captured on CUDA."""
    made = engines.make_engine(model, tokenizer, **({"speculate": "0"} | settings))
    made.pool.graphs.is_used = static
    return made


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture
def ahead(monkeypatch):
    """Engines launch repeated steps ahead, as on CUDA; the loops they make."""
    made = []

    def build(*args, **options):
        made.append(DecodeLoop(*args, **(options | {"run_ahead": True})))
        return made[-1]

    monkeypatch.setattr(sampling_engine, "DecodeLoop", build)
    return made


SETTINGS = [
    {},
    {"prompts_at_once": 3, "slots": 8},
    {"kv_budget_tokens": 48, "page_size": 4, "group_size": 12},  # preempts all the time
    {"kv_budget_tokens": 48, "page_size": 1, "group_size": 12, "preemption": "park", "prompts_at_once": 2},
    {"schedule": "arrival", "page_size": 8},
    {"schedule": "infinite", "predictor": "bert", "prefix_tokens": 4},
    {"schedule": "lpt", "predictor": "bert", "prefix_tokens": 1, "slots": 2},
    {"schedule": "dynamic_slot", "slots": 4},
    {"stop_strings": ["w12 w", "w6"]},
    {"top_p": 0.8, "temperature": 0.9},
    {"max_new_tokens": 1},
    {"group_size": 40, "prompts_at_once": 2, "slots": 40, "max_new_tokens": 6},  # logits in several pieces
]


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_steps_launched_ahead_change_no_completion(model, tokenizer, request, settings, static):
    wanted = make_engine(model, tokenizer, **settings).generate(PROMPTS, seed=4, step=2)
    loops = request.getfixturevalue("ahead")
    engine = make_engine(model, tokenizer, static=static, **settings)
    assert ends_of(engine.generate(PROMPTS, seed=4, step=2)) == ends_of(wanted)
    assert loops[0].run_ahead == (settings.get("schedule") != "dynamic_slot")
    assert engine.stats.peak_kv_bytes <= engine.stats.kv_pool_bytes


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("speculate", ["3", "auto"])
@pytest.mark.parametrize("settings", [each for each in SETTINGS if each.get("schedule") != "dynamic_slot"], ids=str)
def test_drafts_beside_steps_launched_ahead_change_no_bit(model, tokenizer, request, settings, speculate, static):
    settings = settings | {"temperature": 0.3}  # samples repeat each other
    wanted = make_engine(model, tokenizer, **settings).generate(PROMPTS, seed=4, step=2)
    loops = request.getfixturevalue("ahead")
    engine = make_engine(model, tokenizer, static=static, speculate=speculate, **settings)
    engine._speculation._holds_up = True  # as on CUDA
    for _ in range(2):
        found = engine.generate(PROMPTS, seed=4, step=2)
        assert (ends_of(found), bits_of(found)) == (ends_of(wanted), bits_of(wanted))
    assert loops[0].run_ahead and engine.pages_now()[1] == 0
    if speculate == "3" and settings.get("max_new_tokens", 24) > 6:
        assert engine.stats.accepted_tokens > 0


@pytest.mark.parametrize("settings", [*SETTINGS[:3], {"temperature": 0.0}, {"bad_token_ids": [1, 2]}], ids=str)
def test_static_steps_draw_what_others_draw(model, tokenizer, settings):
    wanted, found = (make_engine(model, tokenizer, static=static, **settings) for static in (False, True))
    wanted_groups, found_groups = (engine.generate(PROMPTS, seed=9) for engine in (wanted, found))
    assert ends_of(found_groups) == ends_of(wanted_groups)
    assert found.stats == wanted.stats
    assert_logprobs_close(found_groups, wanted_groups, 1e-5)


def test_every_head_and_draw_is_of_one_shape(model, tokenizer, monkeypatch):
    shapes, draw_rows = set(), cuda_decode.draw_rows

    def draw(sampler, prompt_logits, *of_rows):
        shapes.update(len(tensor) for tensor in of_rows)
        return draw_rows(sampler, prompt_logits, *of_rows)

    monkeypatch.setattr(cuda_decode, "draw_rows", draw)
    make_engine(model, tokenizer, static=True, group_size=40, prompts_at_once=2, slots=40).generate(PROMPTS, seed=4)
    assert shapes == {32}


def test_a_prefix_is_predicted_from_all_its_tokens(model, tokenizer, ahead, monkeypatch):
    engine = make_engine(model, tokenizer, schedule="lpt", predictor="bert", prefix_tokens=4)
    seen = []

    def predict(prompt_ids, prefixes):
        seen.extend(len(prefix) for prefix in prefixes)
        return [float(len(prefixes))] * len(prefixes)

    monkeypatch.setattr(LengthSource, "predict", staticmethod(predict))
    groups = engine.generate(PROMPTS, seed=4, step=2)
    assert set(seen) == {4}
    assert ahead[0].planner.num_tokens >= sum(len(completion.token_ids) for group in groups for completion in group)


def test_graphs_stay_until_weights_or_pool_move(make_model, tokenizer):
    model, other = make_model(), make_model("qwen3", initializer_range=0.3)
    engine = make_engine(model, tokenizer, static=True, max_new_tokens=8)
    cache = engine.pool.graphs

    def kept():
        engine.generate(PROMPTS, seed=1)
        (graphs,) = cache._kept.values()
        return graphs

    first = kept()
    captured = dict(first._graphs)
    assert kept() is first and first._graphs == captured
    with torch.no_grad():
        model.load_state_dict(other.state_dict())  # in place
    assert kept() is first
    layer = model.model.layers[0].self_attn.q_proj
    layer.weight = torch.nn.Parameter(layer.weight.detach() * 2)
    second = kept()
    assert second is not first
    pages = engine.runner.kv.num_pages
    engine.pool.allocate([60] * 4)
    assert engine.runner.kv.num_pages > pages and cache._kept == {}
    wanted = make_engine(model, tokenizer, max_new_tokens=8).generate(PROMPTS, seed=1)
    assert ends_of(engine.generate(PROMPTS, seed=1)) == ends_of(wanted)


def test_training_and_evaluation_each_keep_their_graphs(model, tokenizer):
    engine = make_engine(model, tokenizer, static=True, max_new_tokens=4, kv_budget_tokens=400)
    for _ in range(2):
        engine.generate(PROMPTS, seed=1)
        engine.generate(PROMPTS, seed=1, evaluation=True, temperature=0.0)
        engine.generate(PROMPTS[:1], seed=1)
    assert [graphs.sampler.temperature for graphs in engine.pool.graphs._kept.values()] == [0.0, 1.0]
    assert sum(len(graphs._graphs) for graphs in engine.pool.graphs._kept.values()) <= 6


def make_group(pool_pages, tokens=0):
    """A prompt of three tokens on page 0 and two samples on pages 1 and 2."""
    group = PromptGroup(0, [5, 6, 7], [0, 1], GroupSettings("arrival", 2, 2), lambda index: 100 + index)
    group.pages = [0]
    samples = [group.next_sample(0), group.next_sample(1)]
    for sample, page in zip(samples, pool_pages, strict=True):
        sample.pages = [page]
        sample.tokens.extend(range(tokens))
    return group, samples


def test_a_warm_up_leaves_rows_and_pages_as_they_were(model, tokenizer):
    engine = make_engine(model, tokenizer, static=True, kv_budget_tokens=160, max_new_tokens=16)
    runner = engine.runner
    batch = RowBatch(3, 1, 1, 1, runner.kv.scratch_page, runner.device)
    graphs = engine.pool.graphs.take(batch, engine._new_sampler(1.0))
    batch = graphs.batch
    _, samples = make_group((1, 2), tokens=4)
    batch.arrange(samples)
    before = [tensor.clone() for tensor, _ in batch.moving]
    runner.kv.store[:, :-1] = 7.0
    graphs._capture(3)
    for (tensor, _), wanted in zip(batch.moving, before, strict=True):
        assert torch.equal(tensor, wanted)
    assert (runner.kv.store[:, :-1] == 7.0).all()


def test_rows_behind_the_last_stay_on_the_scratch_page():
    batch = RowBatch(4, 2, 1, 1, 9, torch.device("cpu"))
    _, samples = make_group((1, 2), tokens=3)
    batch.arrange(samples)
    for _ in range(5):
        batch.move_on(torch.tensor([8, 8, 8, 8]))
        batch.count_step()
    assert batch.positions.tolist() == [7, 7, -1, -1]
    assert batch.lengths.tolist() == [8, 8, 1, 1]
    assert batch.tables.tolist() == [[1, 9], [2, 9], [9, 9], [9, 9]]
    assert batch.prompt_row_starts.tolist() == [0, 2]
    batch.arrange(samples[:1])
    assert batch.lengths.tolist() == [3, 1, 1, 1] and batch.tables[1:].unique().tolist() == [9]


def test_calls_of_other_prompts_run_the_same_graphs(model, tokenizer):
    engine = make_engine(model, tokenizer, static=True, max_new_tokens=4, max_prompt_tokens=60, prompts_at_once="auto")
    seen = set()
    for prompts in (PROMPTS, PROMPTS[:1], [[5] * 40, [7] * 9], PROMPTS[1:]):
        wanted = make_engine(model, tokenizer, max_new_tokens=4, prompts_at_once="auto").generate(prompts, seed=1)
        assert ends_of(engine.generate(prompts, seed=1)) == ends_of(wanted)
        (graphs,) = engine.pool.graphs._kept.values()
        seen.add(id(graphs))
    assert len(seen) == 1


def test_requests_of_other_lengths_run_the_same_graphs(model, tokenizer):
    settings = {"page_size": 4, "prompts_at_once": "auto", "doubles": True}
    engine = make_engine(model, tokenizer, static=True, **settings)
    seen = set()
    for most, prompts in ((20, [[5] * 9, [6] * 3]), (3, [[5] * 2]), (9, [[7] * 16, [8] * 15]), (24, [[9] * 5])):
        engine.sample_by(replace(engine.config, max_new_tokens=most))
        wanted = make_engine(model, tokenizer, max_new_tokens=most, **settings).generate(prompts, seed=1)
        assert ends_of(engine.generate(prompts, seed=1)) == ends_of(wanted)
        (graphs,) = engine.pool.graphs._kept.values()
        seen.add(id(graphs))
    assert len(seen) == 1


def test_calls_whose_prompts_leave_room_for_other_numbers_of_rows_run_the_same_graphs(model, tokenizer):
    settings = {"schedule": "arrival", "slots": None, "kv_budget_tokens": 160, "page_size": 4, "group_size": 40}
    settings |= {"max_new_tokens": 4, "max_prompt_tokens": 40}
    engine, seen, rows = make_engine(model, tokenizer, static=True, **settings), set(), []
    for prompts in ([[5] * 40], [[5] * 2]):
        wanted = make_engine(model, tokenizer, **settings).generate(prompts, seed=1)
        assert ends_of(engine.generate(prompts, seed=1)) == ends_of(wanted)
        (graphs,) = engine.pool.graphs._kept.values()
        seen.add(id(graphs))
        rows.append(engine._loop.planner.num_slots)
    assert len(seen) == 1 and rows == [30, 39]


@pytest.mark.slow  # torch traces ten times
def test_drawing_is_compiled_for_more_sampling_parameters_than_torch_allows(model, tokenizer, monkeypatch):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch._dynamo.reset()
    engine = make_engine(model, tokenizer, static=True, max_new_tokens=2)
    engine.pool.graphs.compiles = True
    for tenths in range(1, 11):
        engine.generate(PROMPTS, seed=1, temperature=tenths / 10)
    assert len(torch._dynamo.eval_frame._debug_get_cache_entry_list(cuda_decode.draw_rows.__code__)) >= 10
    torch._dynamo.reset()


class TritonsError(Exception):
    """Triton's errors are no RuntimeErrors, and it may be absent here."""


@pytest.mark.parametrize("error", [RuntimeError("0 active drivers"), TritonsError("ptxas\nfailed"), TritonsError()])
def test_whatever_triton_fails_with_keeps_steps_from_being_captured(model, tokenizer, monkeypatch, error):
    paged_attention = pytest.importorskip("infsample_rl.rollout.kernels.paged_attention")

    def broken(*arguments):
        raise error

    monkeypatch.setattr(paged_attention, "write_tokens", broken)
    engine = make_engine(model, tokenizer, max_prompt_tokens=9)
    said = str(error).split("\n")[0] or "TritonsError"
    assert why_no_graphs(engine.runner) == f"Triton does not work here ({said})"


@pytest.mark.parametrize("fault", ["other hidden states", "no such instruction", "out of resource"])
def test_steps_that_fail_or_differ_at_their_first_trial_are_not_captured(make_model, tokenizer, monkeypatch, fault):
    model = make_model()
    wanted = make_engine(model, tokenizer, max_new_tokens=4).generate(PROMPTS, seed=1)
    step = cuda_decode.DecodeGraphs.step

    def broken(graphs, first_logits):
        if fault != "other hidden states":
            raise RuntimeError(fault) if fault == "no such instruction" else TritonsError(fault)
        drawn = step(graphs, first_logits)
        graphs.hidden.mul_(1.1)
        return drawn

    monkeypatch.setattr(cuda_decode.DecodeGraphs, "step", broken)
    engine = make_engine(model, tokenizer, static=True, max_new_tokens=4, page_size=8)
    with pytest.warns(UserWarning, match=f"not captured as CUDA graphs, several times slower: .*{fault}"):
        found = engine.generate(PROMPTS, seed=1)
    assert ends_of(found) == ends_of(wanted) and not engine.pool.graphs.is_used


FAULTS = {  # what spoils a step over a batch of pages of eight tokens
    "33 rows": lambda graphs, num_rows: num_rows > 32 and graphs.hidden[32:].mul_(1.1),
    "65 rows": lambda graphs, num_rows: num_rows > 64 and graphs.hidden[64:].mul_(1.1),
    "own pages": lambda graphs, num_rows: graphs.batch.lengths.clamp_(max=8),
    "pages of the prompt": lambda graphs, num_rows: graphs.batch.prompt_lengths.clamp_(max=8),
    "pages of some row": lambda graphs, num_rows: graphs.batch.tables[1:].copy_(graphs.batch.tables[:1].clone()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_some_rows_or_of_long_samples_is_found_at_the_first_trial(make_model, tokenizer, monkeypatch, fault):
    model, run = make_model(), cuda_decode.DecodeGraphs._run
    settings = {"max_new_tokens": 20, "page_size": 8, "group_size": 80, "slots": 80, "max_prompt_tokens": 30}
    wanted = make_engine(model, tokenizer, **settings).generate(PROMPTS[:1], seed=1)

    def spoiled(graphs, num_rows):
        if "rows" not in fault:
            FAULTS[fault](graphs, num_rows)
        run(graphs, num_rows)
        if "rows" in fault:
            FAULTS[fault](graphs, num_rows)

    monkeypatch.setattr(cuda_decode.DecodeGraphs, "_run", spoiled)
    engine = make_engine(model, tokenizer, static=True, **settings)
    with pytest.warns(UserWarning, match="several times slower: a step of [0-9]+ rows gives other hidden states"):
        found = engine.generate(PROMPTS[:1], seed=1)
    assert ends_of(found) == ends_of(wanted) and not engine.pool.graphs.is_used


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.3, "speculate": "3"}, {"top_p": 0.8}], ids=str)
def test_a_call_goes_on_uncaptured_where_a_later_capture_fails(model, tokenizer, request, monkeypatch, settings):
    settings = {"max_new_tokens": 12, "group_size": 50, "slots": 50, "schedule": "arrival"} | settings
    wanted = make_engine(model, tokenizer, **settings).generate(PROMPTS, seed=1)
    request.getfixturevalue("ahead")
    engine, tried = make_engine(model, tokenizer, static=True, **settings), []
    engine.generate(PROMPTS[:1], seed=1, sample_indices=[[0, 1]])
    run = cuda_decode.DecodeGraphs._run

    def broken(graphs, num_rows):
        run(graphs, num_rows)  # rows have moved on before it fails
        tried.append(num_rows)
        if num_rows == 48:
            raise TritonsError("out of resource: shared memory\nRequired: 3")

    monkeypatch.setattr(cuda_decode.DecodeGraphs, "_run", broken)
    with pytest.warns(UserWarning, match="several times slower: out of resource: shared memory$"):
        found = engine.generate(PROMPTS, seed=1)
    assert ends_of(found) == ends_of(wanted) and tried[-1] == 48
    assert not engine.pool.graphs.is_used and engine.pool.graphs._kept == {}
    assert ends_of(engine.generate(PROMPTS, seed=1)) == ends_of(wanted)


def test_what_was_given_up_is_not_captured_beside_a_larger_pool_either(make_model, tokenizer, monkeypatch):
    engine = make_engine(make_model(), tokenizer, static=True, max_prompt_tokens=9)
    cache = engine.pool.graphs
    with pytest.warns(UserWarning, match="several times slower: out of resource"):
        cache.give_up("out of resource")
    monkeypatch.setattr("infsample_rl.rollout.engine.graph_cache.why_no_graphs", lambda runner: "")
    engine.runner.device = torch.device("cuda")
    cache.check_device()
    assert not cache.is_used and not cache.compiles


def test_a_run_that_should_repeat_is_told_that_it_may_not_where_its_graphs_fail(make_model, tokenizer):
    engine = make_engine(make_model(), tokenizer, static=True)
    engine.runner.exact = True  # as on a GPU, in 16 bits
    with pytest.warns(UserWarning, match="several times slower, and samples may differ from run to run: out of resou"):
        engine.pool.graphs.give_up("out of resource")
    assert not engine.runner.exact

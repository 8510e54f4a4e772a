"""The engine on tiny random models: exactness, schedules, memory, streaming."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from infsample_rl.rollout.engine.attention import attention_with_lse, plain_attention_with_lse
from tests import engines
from tests.engines import PROMPTS, assert_logprobs_close, bits_of, ends_of, greedy, tokens_of
from tests.tiny_models import plain_logprobs

make_engine = partial(engines.make_engine, schedule="arrival")


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    """Completions under schedule=arrival, what every other setting must reproduce."""
    return make_engine(model, tokenizer).generate(PROMPTS, seed=4, step=2)


OTHERS = ["gemma", "gpt_neox", "opt", "qwen3_moe"]  # through their own modules


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen2", *OTHERS])
def test_greedy_tokens_equal_generate_and_the_model_stays_usable(make_model, tokenizer, family):
    model = make_model(family)
    engine = make_engine(model, tokenizer, stop=set(), prompts_at_once=2)
    found = tokens_of(engine.generate(PROMPTS, seed=0, temperature=0))
    assert found == [[greedy(model, prompt, 24)] * 6 for prompt in PROMPTS]


@pytest.mark.parametrize("settings", [{}, {"prompts_at_once": 3, "slots": 8}, {"temperature": 0.7}])
def test_log_probabilities_equal_a_full_forward(make_model, tokenizer, settings):
    model = make_model()
    groups = make_engine(model, tokenizer, **settings).generate(PROMPTS, seed=1)
    for prompt, group in zip(PROMPTS, groups, strict=True):
        for completion in group:
            wanted, _ = plain_logprobs(model, prompt, completion.token_ids, settings.get("temperature", 1.0))
            torch.testing.assert_close(torch.from_numpy(completion.logprobs), wanted.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "settings",
    [
        {"schedule": "full_group"},
        {"slots": 4, "prompts_at_once": 3, "schedule": "naive"},
        {"slots": 4, "prompts_at_once": 3, "schedule": "fixed_slot"},
        {"schedule": "fptas"},
        {"schedule": "lpt", "slots": 4},
        {"schedule": "sjf", "prompts_at_once": 2},
        {"schedule": "infinite", "predictor": "bert", "prefix_tokens": 4},
        {"schedule": "lpt", "predictor": "bert", "prefix_tokens": 1, "slots": 2},
        {"schedule": "infinite", "predictor": "bert", "prefix_tokens": 20, "prompts_at_once": 2},
        {"schedule": "token_budget"},
        {"schedule": "token_budget", "slots": 2, "page_size": 1},
        {"schedule": "token_budget", "prompts_at_once": 3, "page_size": 4},
        {"schedule": "token_budget", "max_rows": 2},
        {"slots": 1},
        {"slots": 10, "prompts_at_once": 2},
        {"schedule": "token_budget", "kv_budget_tokens": 80, "page_size": 4, "preemption": "recompute"},
        {"schedule": "token_budget", "kv_budget_tokens": 80, "page_size": 4, "preemption": "park"},
        {"schedule": "token_budget", "kv_budget_tokens": 90, "page_size": 1, "preemption": "recompute"},
    ],
    ids=str,
)
def test_no_schedule_page_size_or_preemption_changes_a_bit_of_a_sample(model, tokenizer, expected, settings):
    engine = make_engine(model, tokenizer, **settings)
    assert engine.runner.is_exact, "this test needs a C++ compiler"
    groups = engine.generate(PROMPTS, seed=4, step=2)
    assert ends_of(groups) == ends_of(expected)
    assert bits_of(groups) == bits_of(expected)
    if "kv_budget_tokens" in settings:
        assert engine.stats.preemptions > 0
    if settings.get("preemption") == "recompute":
        assert engine.stats.recomputed_tokens > 0


def test_without_compiled_kernels_a_sample_is_the_same_up_to_rounding(model, tokenizer, expected, monkeypatch):
    monkeypatch.setattr("infsample_rl.rollout.kernels.cpu_kernels.load", lambda: None)
    engine = make_engine(model, tokenizer, schedule="token_budget", kv_budget_tokens=80, page_size=4)
    groups = engine.generate(PROMPTS, seed=4, step=2)
    assert not engine.runner.is_exact and ends_of(groups) == ends_of(expected)
    assert_logprobs_close(groups, expected, 1e-5)


def test_samples_split_over_two_engines_are_the_same(model, tokenizer, expected):
    first = make_engine(model, tokenizer).generate(PROMPTS, seed=4, step=2, sample_indices=[[0, 1, 5], [], [2]])
    parts = {"prompt_indices": [1, 2], "sample_indices": [[5, 4, 3, 2, 1, 0], [0]]}
    second = make_engine(model, tokenizer, slots=2).generate(PROMPTS[1:], seed=4, step=2, **parts)
    wanted = tokens_of(expected)
    assert tokens_of(first) == [[wanted[0][0], wanted[0][1], wanted[0][5]], [], [wanted[2][2]]]
    assert tokens_of(second) == [wanted[1][::-1], [wanted[2][0]]]


@pytest.mark.parametrize(
    ("schedule", "slots", "heads"),
    [
        ("arrival", 3, {}),
        ("arrival", 5, {}),
        # 33 queries: other code computes the last
        ("arrival", 11, {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 64}),
        ("token_budget", 5, {}),
    ],
)
def test_a_sample_alone_has_the_bits_it_has_among_others(make_model, tokenizer, schedule, slots, heads):
    model = make_model(**heads)
    settings = {"schedule": schedule, "slots": slots, "group_size": 12, "max_new_tokens": 16, "prompts_at_once": 2}
    together = make_engine(model, tokenizer, **settings).generate(PROMPTS[:2], seed=4)
    alone = make_engine(model, tokenizer, **settings)
    for index, prompt in enumerate(PROMPTS[:2]):
        for sample in (0, 4, 10, 11):
            again = alone.generate([prompt], seed=4, prompt_indices=[index], sample_indices=[[sample]])[0][0]
            assert again.logprobs.tobytes() == together[index][sample].logprobs.tobytes()


def test_noise_depends_on_seed_step_prompt_and_domain(model, tokenizer, expected):
    engine = make_engine(model, tokenizer)
    base = tokens_of(expected)[0]
    assert tokens_of(engine.generate(PROMPTS[:1], seed=4, step=2))[0] == base
    for change in ({"seed": 5}, {"step": 3}, {"prompt_indices": [7]}, {"evaluation": True}):
        assert tokens_of(engine.generate(PROMPTS[:1], **({"seed": 4, "step": 2} | change)))[0] != base


@pytest.mark.parametrize("budget", [24 + 5, 1000])
def test_prefix_kv_stays_while_pages_allow_and_every_rebuild_is_one_step_more(model, tokenizer, expected, budget):
    lengths = [len(completion.token_ids) for completion in expected[0]]
    waiting = sum(length > 5 for length in lengths)
    assert waiting > 1
    settings = {"schedule": "lpt", "predictor": "bert", "prefix_tokens": 5, "slots": 1, "page_size": 1}
    engine = make_engine(model, tokenizer, **settings, kv_budget_tokens=budget, speculate=0)
    assert tokens_of(engine.generate(PROMPTS[:1], seed=4, step=2)) == tokens_of(expected)[:1]
    rebuilt = engine.stats.recomputed_tokens // 4  # the fifth token goes through the next decode step anyway
    assert engine.stats.running_steps == sum(lengths) + rebuilt  # one slot: nothing overlaps
    assert rebuilt == 0 if budget == 1000 else 0 < rebuilt <= waiting


def test_the_first_micro_group_arrives_before_the_last_sample_ends(model, tokenizer, expected):
    engine = make_engine(model, tokenizer)
    steps, sizes, prompts = [], [], []
    for micro_group in engine.stream(PROMPTS, seed=4, step=2):
        steps.append(engine.stats.running_steps)
        sizes.append(len(micro_group))
        prompts.append({completion.prompt_index for completion in micro_group})
    assert sizes == [3, 3] * 3 and prompts == [{0}, {0}, {1}, {1}, {2}, {2}]
    assert steps[0] < steps[1] < steps[2] < steps[5] == engine.stats.running_steps


def test_a_stream_closed_early_frees_everything_and_the_next_works(model, tokenizer, expected):
    engine = make_engine(model, tokenizer, prompts_at_once=2)
    stream = engine.stream(PROMPTS, seed=4, step=2)
    next(stream)
    assert engine.pages_now()[1] > 0 and engine.rows_now() != []
    stream.close()
    assert engine.pages_now()[1] == 0 and engine.rows_now() == []
    assert tokens_of(engine.generate(PROMPTS, seed=4, step=2)) == tokens_of(expected)
    assert engine.pages_now()[1] == 0


def test_a_later_call_ends_an_unfinished_stream(model, tokenizer):
    engine = make_engine(model, tokenizer)
    stream = engine.stream(PROMPTS, seed=4)
    next(stream)
    engine.generate(PROMPTS[:1], seed=4)
    with pytest.raises(RuntimeError, match="ended by a later call"):
        list(stream)


def test_an_unfinished_stream_that_goes_away_touches_nothing_of_the_later_call(model, tokenizer, expected):
    engine = make_engine(model, tokenizer)
    stream = engine.stream(PROMPTS, seed=4)
    next(stream)
    later = engine.stream(PROMPTS, seed=4, step=2)
    found = next(later)
    held, texts = engine.pages_now()[1], len(engine.drafter._of_group)
    stream.close()
    assert engine.pages_now()[1] == held > 0 and len(engine.drafter._of_group) == texts > 0
    for micro_group in later:
        found += micro_group
    wanted = {(each.prompt_index, each.sample_index): each.token_ids.tolist() for group in expected for each in group}
    assert {(each.prompt_index, each.sample_index): each.token_ids.tolist() for each in found} == wanted


def test_dynamic_slot_keeps_the_first_to_finish(model, tokenizer, expected):
    engine = make_engine(model, tokenizer, schedule="dynamic_slot")
    group = engine.generate(PROMPTS[:1], seed=4, step=2)[0]
    assert len(group) == 6
    assert sum(len(completion.token_ids) for completion in group) <= sum(
        len(completion.token_ids) for completion in expected[0]
    )
    for completion in group:
        if completion.sample_index < 6:
            assert completion.token_ids.tolist() == expected[0][completion.sample_index].token_ids.tolist()


def test_stop_ids_come_from_generation_config_tokenizer_and_settings(make_model, make_tokenizer):
    model = make_model()
    model.generation_config.eos_token_id = [40, 41]
    engine = make_engine(model, make_tokenizer(eos_token="w17"), stop=None, stop_token_ids=[3])
    assert engine.stop_token_ids == {40, 41, 17, 3}
    for completion in engine.generate(PROMPTS[:1], seed=0)[0]:
        ids = completion.token_ids.tolist()
        assert (completion.finish_reason == "stop") == (ids[-1] in engine.stop_token_ids)
        assert not set(ids[:-1]) & engine.stop_token_ids
        assert completion.finish_reason == "stop" or len(ids) == 24


@pytest.mark.parametrize(
    "settings",
    [
        *({"schedule": name} for name in ("arrival", "naive", "fixed_slot", "full_group", "infinite", "dynamic_slot")),
        {"schedule": "infinite", "predictor": "bert", "prefix_tokens": 4},
    ],
    ids=str,
)
def test_every_sample_may_stop_at_its_first_token(model, tokenizer, settings):
    engine = make_engine(model, tokenizer, stop=set(range(64)), **settings)
    groups = engine.generate(PROMPTS, seed=0)
    assert [[len(completion.token_ids) for completion in group] for group in groups] == [[1] * 6] * 3
    assert engine.stats.running_steps == (3 if settings["schedule"] == "full_group" else 6)
    assert engine.stats.recomputed_tokens == 0


def test_padded_vocabulary_is_never_sampled_and_left_out_of_log_probabilities(make_model, make_tokenizer):
    model = make_model(vocab_size=80)
    with torch.no_grad():
        model.lm_head.weight[64:] *= 20  # would win often
    engine = make_engine(model, make_tokenizer(64), stop=set())
    group = engine.generate(PROMPTS[:1], seed=0)[0]
    assert max(completion.token_ids.max() for completion in group) < 64
    with torch.no_grad():
        model.lm_head.weight[64:] = -1e4 * model.lm_head.weight[64:].sign()  # now without weight in the plain forward
    ids = group[0].token_ids.tolist()
    logits = model(input_ids=torch.tensor([PROMPTS[0] + ids])).logits[0, 4:-1, :64]
    wanted = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)]
    torch.testing.assert_close(torch.from_numpy(group[0].logprobs), wanted, atol=1e-4, rtol=0)


def test_truncated_sampling_reports_both_log_probabilities(model, tokenizer):
    group = make_engine(model, tokenizer, top_k=5).generate(PROMPTS[:1], seed=0)[0]
    for completion in group:
        assert (completion.sampling_logprobs >= completion.logprobs - 1e-6).all()
        assert completion.sampling_logprobs.dtype == completion.logprobs.dtype == "float32"
        assert completion.token_ids.dtype == "int32"
    assert make_engine(model, tokenizer).generate(PROMPTS[:1], seed=0)[0][0].sampling_logprobs is None


def test_models_and_tokenizers_that_cannot_work_are_refused(make_model, make_tokenizer, model):
    with pytest.raises(ValueError, match="70 tokens, more than the model's vocabulary of 64"):
        make_engine(model, make_tokenizer(70))
    sliding = make_model("qwen2", use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(ValueError, match="sliding"):
        make_engine(sliding, make_tokenizer(64))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt_ids": [[]]}, "prompt 0 is empty"),
        ({"prompt_ids": [[64]]}, "token 64, outside the model's vocabulary of 64"),
        ({"prompt_ids": [[1] * 240]}, "context of 256; the nearest that works is max_new_tokens=16"),
        ({"prompt_ids": [[1] * 256]}, "context of 256; the nearest that works is a prompt of 255"),
        ({"prompt_ids": [[1]], "sample_indices": [[1, 1]]}, "must differ"),
        ({"prompt_ids": [[1]], "sample_indices": []}, "equally long"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_sampled(model, tokenizer, arguments, message):
    with pytest.raises(ValueError, match=message):
        make_engine(model, tokenizer).stream(**arguments, seed=0)


def test_nonfinite_logits_stop_the_run(make_model, tokenizer):
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="not finite"):
        make_engine(model, tokenizer).generate(PROMPTS[:1], seed=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_both_attention_paths_give_output_and_log_sum_exp(dtype):
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, 3, size, 16, generator=generator).to(dtype) for size in (4, 9, 9))
    mask = torch.zeros(2, 1, 1, 9, dtype=dtype)
    mask[0, ..., 5:] = -torch.inf
    scores = query.float() @ keys.float().transpose(2, 3) * 0.25 + mask.float()
    wanted, tolerance = torch.softmax(scores, -1) @ values.float(), 2e-2 if dtype == torch.bfloat16 else 1e-5
    # bmm's out_dtype is CUDA's alone
    for path in [attention_with_lse] + [plain_attention_with_lse] * (dtype == torch.float32):
        out, lse = path(query, keys, values, 0.25, mask=mask)
        torch.testing.assert_close(lse, torch.logsumexp(scores, -1), atol=tolerance, rtol=0)
        torch.testing.assert_close(out.float(), wanted, atol=tolerance, rtol=0)


@pytest.mark.parametrize("speculate", ["0", "3"])
def test_samples_that_have_not_started_can_be_given_back_and_the_rest_is_what_it_was(
    model, tokenizer, expected, speculate
):
    engine = make_engine(model, tokenizer, prompts_at_once=1, slots=2, micro_group_size=1, speculate=speculate)
    engine.generate(PROMPTS, seed=4, step=2)  # whose samples drafts are found in
    found, given = {}, {}
    with ThreadPoolExecutor(1) as other_thread:
        for micro_group in engine.stream(PROMPTS, seed=4, step=2):
            if not found:
                asked = other_thread.submit(engine.withdrawals.ask)
            for completion in micro_group:
                found[completion.prompt_index, completion.sample_index] = completion.token_ids.tolist()
        given = asked.result(timeout=10)
    left_out = {(prompt, index) for prompt, indices in given.items() for index in indices}
    everything = {(i, c.sample_index): c.token_ids.tolist() for i, group in enumerate(expected) for c in group}
    assert len(left_out) >= 2 and found.keys() == everything.keys() - left_out
    assert all(everything[pair] == tokens for pair, tokens in found.items())
    assert engine.withdrawals.ask() == {}  # no stream runs
    assert (engine.stats.accepted_tokens > 0) == (speculate == "3")


def test_a_halted_stream_ends_at_its_next_step_and_the_next_is_whole(model, tokenizer, expected):
    engine = make_engine(model, tokenizer, micro_group_size=1)
    halted = []
    stream = engine.stream(PROMPTS, seed=4, step=2, is_halted=lambda: bool(halted))
    count = len(next(stream))
    halted.append(True)
    count += sum(len(micro_group) for micro_group in stream)
    assert count < sum(len(group) for group in expected)
    assert tokens_of(engine.generate(PROMPTS, seed=4, step=2)) == tokens_of(expected)

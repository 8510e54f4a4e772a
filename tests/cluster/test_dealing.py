"""The step's samples over workers: none lost, none twice, near-equal in expected tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from infsample_rl.cluster import dealing
from infsample_rl.cluster.dealing import ExpectedLengths, by_prompt, deal, settle, split
from tests.fakes import work
from tests.tiny_models import prompt_of


def prompts(count):
    return [prompt_of(index, row=10 + index) for index in range(count)]


def samples(part):
    return [(item.prompt_index, index) for item in part for index in item.sample_indices]


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(1, 1000)), min_size=1, max_size=8), st.integers(1, 9))
def test_every_sample_is_dealt_once_in_order_and_no_part_is_a_sample_above_its_share(items, num_parts):
    expected = {i: length for i, (_, length) in enumerate(items)}
    parts = split([work(i, list(range(n))) for i, (n, _) in enumerate(items)], num_parts, expected)
    assert [pair for part in parts for pair in samples(part)] == [
        (i, s) for i, (n, _) in enumerate(items) for s in range(n)
    ]
    loads = [sum(expected[prompt] for prompt, _ in samples(part)) for part in parts]
    assert max(loads) <= sum(n * length for n, length in items) / num_parts + max(expected.values()) * (1 + 1e-6)


def test_a_prompt_of_long_responses_goes_to_more_workers():
    parts = deal(prompts(2), 4, 2, whole_prompts=False, expected=[300.0, 100.0])
    assert samples(parts[0]) == [(0, 0), (0, 1)]
    assert samples(parts[1]) == [(0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)]


def test_expected_is_the_prompts_last_mean_else_that_of_the_newest_samples():
    expected = ExpectedLengths()
    assert expected(prompts(1)[0]) > 0
    expected.observe({10: [4, 8], 11: [100]})
    assert expected(prompts(1)[0]) == 6 and expected(prompts(3)[2]) == 112 / 3
    expected.observe({})
    assert ExpectedLengths(expected.state())(prompts(3)[2]) == expected(prompts(3)[2]) == 112 / 3
    assert ExpectedLengths(expected.state())(prompts(1)[0]) == 6


def test_the_rows_kept_are_those_seen_last(monkeypatch):
    monkeypatch.setattr(dealing, "KEPT_ROWS", 2)
    expected = ExpectedLengths()
    for lengths in ({1: [10]}, {2: [20]}, {1: [11]}, {3: [30]}, {1: []}):  # the last keeps its mean
        expected.observe(lengths)
    assert expected.state()["rows"] == [[1, 11.0], [3, 30.0]]


def test_pieces_of_a_prompt_become_one():
    merged = by_prompt([work(1, [3]), work(0, [5, 4]), work(1, [0, 2])])
    assert [(index, item.sample_indices) for index, item in merged.items()] == [(0, [4, 5]), (1, [0, 2, 3])]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=1, max_size=30, unique=True), st.randoms())
def test_what_is_owed_and_what_has_arrived_are_always_all_that_was_dealt(dealt, dice):
    owed = by_prompt([work(prompt, [index]) for prompt, index in dealt])
    order, arrived = list(dealt), set()
    dice.shuffle(order)
    for prompt, index in order:
        arrived |= set(samples([settle(owed, prompt, [index])]))
        left = set(samples(owed.values()))
        assert not arrived & left and arrived | left == set(dealt)
    assert owed == {}

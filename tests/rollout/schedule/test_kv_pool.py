"""Pages are taken, shared and released by count; budgets become pages."""

import pytest

from infsample_rl.config import RolloutConfig
from infsample_rl.config.fields import kv_pages, parse_bytes
from infsample_rl.rollout.schedule.kv_budget import check_total, free_for_pool, num_pool_pages
from infsample_rl.rollout.schedule.kv_pool import KVPool


def test_a_shared_page_is_free_only_after_its_last_owner():
    pool = KVPool(4, 16)
    pages = pool.take(3)
    pool.share(pages[:1])
    pool.release(pages)
    assert pages == [0, 1, 2] and pool.num_free == 3
    pool.release(pages[:1])
    assert pool.num_free == 4 and pool.peak_pages == 3


def test_misuse_is_an_error_not_a_wrong_count():
    pool = KVPool(2, 16)
    with pytest.raises(RuntimeError, match="3 KV pages wanted, 2 of 2 are free"):
        pool.take(3)
    with pytest.raises(RuntimeError, match="released that nobody held"):
        pool.release([0])


def test_prompt_and_response_are_rounded_to_pages():
    assert [KVPool(9, 16).pages_for(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert kv_pages(1, 30, [20], 16) == 4 and kv_pages(3, 16, [16, 17], 16) == 6


@pytest.mark.parametrize(
    ("settings", "pages"),
    [
        ({}, 4 * 2 + 2 * 3),  # slots x full responses, and two prompts of 40 tokens
        ({"prompts_at_once": 2}, 4 * 2 + 2 * 3),
        ({"prompts_at_once": 1}, 4 * 2 + 3),
        ({"prompts_at_once": 4}, 4 * 2 + 3 + 3 + 1),  # there are three
        ({"schedule": "full_group"}, 8 * 2 + 2 * 3),
        ({"kv_budget_tokens": 100}, 6),
        ({"kv_budget_bytes": "10KB"}, 10),
        ({"kv_budget_bytes": "10KiB"}, 10),
        ({"kv_budget_bytes": "auto"}, 20),  # what is free
        ({"slots": None}, 20),
        ({"slots": None, "schedule": "arrival"}, 4 * 2 + 2 * 3),
        ({"kv_budget_bytes": "auto", "group_size": 1, "prompts_at_once": 2}, 2 * 2 + 2 * 3),  # more could never be used
        ({"kv_budget_bytes": "auto", "max_rows": 1}, 1 * 2 + 3),  # one row is of one prompt
    ],
)
def test_pages_of_every_kind_of_budget(settings, pages):
    config = RolloutConfig(**({"group_size": 8, "slots": 4, "max_new_tokens": 30} | settings))
    assert num_pool_pages(config, page_bytes=1000, prompts=[40, 7, 40], free_bytes=20_000) == pages


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"kv_budget_bytes": "30GB"}, "rollout.kv_budget_bytes=30GB"),
        ({"kv_budget_tokens": 4096}, "rollout.kv_budget_tokens=4096"),
        ({"slots": 4}, "rollout.slots=4"),
    ],
)
def test_a_pool_larger_than_its_device_is_refused(settings, name):
    config = RolloutConfig(**settings)
    check_total(config, 24, 24)
    with pytest.raises(ValueError, match=f"{name} asks for a KV pool of 25 bytes, and the device has 24 in all; roll"):
        check_total(config, 25, 24)


@pytest.mark.parametrize("settings", [{}, {"schedule": "arrival", "kv_budget_bytes": "auto"}])
def test_free_memory_that_is_too_little_is_called_by_the_setting_that_takes_it(settings):
    with pytest.raises(ValueError, match=r"^rollout.kv_budget_bytes=auto \(900 bytes free for it\) holds 0 pages"):
        num_pool_pages(RolloutConfig(**settings), page_bytes=1000, prompts=[40], free_bytes=900)


def test_a_gpu_is_its_workers_own_and_a_machine_is_shared():
    assert free_for_pool(1000, on_gpu=True, sharers=3) == 900
    assert free_for_pool(1000, on_gpu=False, sharers=1) == 500
    assert free_for_pool(1000, on_gpu=False, sharers=2) == 250


@pytest.mark.parametrize(
    ("text", "value"), [("1048576", 2**20), ("1.5KB", 1500), ("2 GiB", 2**31), ("24gb", 24 * 10**9)]
)
def test_sizes_in_bytes(text, value):
    assert parse_bytes(text) == value


@pytest.mark.parametrize("text", ["", "much", "-1GB", "5XB", "0MB"])
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match="kv_budget_bytes must be auto or a size"):
        RolloutConfig(kv_budget_bytes=text)

"""KV of preempted samples outside the pool: what comes back is what was put there, in memory and in a file."""

from types import SimpleNamespace

import pytest
import torch

from infsample_rl.config.fields import kv_pages
from infsample_rl.model.architecture import KVShape
from infsample_rl.model.disk import check_disk_folder
from infsample_rl.rollout.engine import engine_pool, parked_kv
from infsample_rl.rollout.engine.kv_cache import PagedKV, QuantisedKV
from infsample_rl.rollout.engine.parked_kv import ParkedInFile, ParkedInMemory
from tests.engines import make_engine, tokens_of

PAGES = 9


def make_kv(kind):
    """A pool full of random numbers, which no page shares with another."""
    shape = KVShape(num_layers=2, num_kv_heads=2, head_dim=8)
    kv = (PagedKV if kind == "auto" else QuantisedKV)(shape, PAGES, 4, torch.bfloat16, torch.device("cpu"))
    torch.manual_seed(0)
    for part in kv.parts:
        part.copy_((100 * torch.randn(part.shape)).to(part.dtype))
    return kv


def parking_of(kind, kv, folder):
    return ParkedInMemory(kv) if kind == "memory" else ParkedInFile(kv, str(folder))


@pytest.mark.parametrize("place", ["memory", "file"])
@pytest.mark.parametrize("kind", ["auto", "int8"])
def test_pages_come_back_bit_by_bit_into_other_pages(kind, place, disk_folder):
    kv = make_kv(kind)
    parking = parking_of(place, kv, disk_folder)
    before = [part.clone().view(torch.uint8) for part in kv.parts]
    assert parking.take(2) and parking.take(3)
    parking.put("one", [1, 4])
    parking.put("two", [0, 2, 3])
    for part in kv.parts:
        part.view(torch.uint8).zero_()
    parking.release(2)
    parking.fetch("one", [8, 0, 5])  # a page more, for the newest token
    assert parking.take(4)
    parking.put("three", [8, 0, 8, 0])  # into what "one" has left, and more
    parking.fetch("two", [2, 3, 7])
    parking.fetch("three", [1, 4, 5, 6])
    for part, was in zip(kv.parts, before, strict=True):
        for now, then in {8: 1, 0: 4, 2: 0, 3: 2, 7: 3, 1: 1, 4: 4, 5: 1, 6: 4}.items():
            assert torch.equal(part[:, now].contiguous().view(torch.uint8), was[:, then]), (now, then)


def test_host_memory_grows_to_what_is_parked_at_a_time_alone(monkeypatch):
    monkeypatch.setattr(parked_kv, "CHUNK_BYTES", 1)  # a page at a time
    parking = ParkedInMemory(make_kv("auto"))
    for _ in range(5):
        parking.put("one", [1, 4])
        parking.put("two", [0, 2, 3])
        parking.fetch("one", [5, 6])
        parking.forget("two")
    assert len(parking._free) == 5


@pytest.mark.parametrize("in_memory", [True, False])
def test_workers_of_one_machine_park_in_half_of_what_is_free_together(
    make_model, tokenizer, monkeypatch, disk_folder, in_memory
):
    engine = make_engine(make_model(), tokenizer, kv_budget_tokens=160, preemption=str(disk_folder))
    free = 16 * engine.runner.kv.page_bytes
    monkeypatch.setattr(parked_kv, "free_bytes", lambda device: free)
    monkeypatch.setattr(parked_kv.shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    monkeypatch.setattr(parked_kv, "_takes_memory", lambda config, device: in_memory)
    engine.pool._sharers = 4
    assert engine.pool.open_parking().most_pages == 2


@pytest.mark.parametrize("place", ["memory", "file"])
def test_four_pools_are_the_most_that_is_parked_and_what_is_left_behind_makes_room(place, disk_folder):
    kv = make_kv("auto")
    parking = parking_of(place, kv, disk_folder)
    assert parking.most_pages == 4 * PAGES
    assert parking.take(4 * PAGES - 1) and not parking.take(2) and parking.take(1) and not parking.take(1)
    for sample in range(4):
        parking.put(sample, list(range(PAGES)))
    parking.clear()
    parking.release(4 * PAGES)
    assert parking.num_taken == 0 and parking.take(4 * PAGES)
    for sample in range(4):
        parking.put(sample, list(range(PAGES)))


@pytest.mark.parametrize("place", ["memory", "file"])
def test_what_is_not_wanted_any_more_leaves_its_place(place, disk_folder):
    parking = parking_of(place, make_kv("auto"), disk_folder)
    for sample in range(10):  # more than there are places for
        assert parking.take(PAGES)
        parking.put(sample, list(range(PAGES)))
        parking.release(PAGES)
        parking.forget(sample)
    parking.forget("never put there")


def test_samples_parked_in_memory_are_those_of_an_engine_that_parks_nothing(make_model, tokenizer, monkeypatch):
    """Host memory is what an engine on a GPU takes; here the engine is told to."""
    budget = 4 * kv_pages(1, 24, [5], 4)
    settings = {"group_size": 12, "max_new_tokens": 24, "page_size": 4, "prompts_at_once": 2}
    prompts, model = [[5, 9, 7, 30, 2], [8, 1]], make_model()

    def sample(**given):
        engine = make_engine(model, tokenizer, **settings, **given)
        return tokens_of(engine.generate(prompts, seed=4)), engine.stats

    expected, _ = sample(schedule="full_group")
    monkeypatch.setattr(engine_pool, "open_parking", lambda config, kv, sharers: ParkedInMemory(kv, sharers))
    found, stats = sample(kv_budget_tokens=budget + 16)
    # of the prompts too, which have to give way
    assert found == expected and stats.parked_tokens > 0 and stats.recomputed_tokens == 0


def test_a_folder_is_checked_by_the_name_of_its_setting(tmp_path):
    (tmp_path / "file").touch()
    for given in (tmp_path / "file", tmp_path / "none"):
        with pytest.raises(
            ValueError, match="rollout.preemption must be a folder of its worker's machine, got .*, which is none"
        ):
            check_disk_folder("rollout.preemption", str(given))

"""The engine in pools of every size: preemption, sharing, exactness on random models, and the memory it really
takes."""

import errno
import json
import os
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from infsample_rl.config.fields import kv_pages
from infsample_rl.model.disk import IN_MEMORY, file_system
from infsample_rl.rollout.engine import engine_pool, parked_kv
from infsample_rl.rollout.engine.kv_cache import free_bytes, total_bytes
from infsample_rl.rollout.schedule.token_budget import TokenBudgetPolicy
from tests import engines
from tests.engines import greedy, tokens_of

PROMPT = [5, 9, 7, 30, 2]


make_engine = partial(engines.make_engine, group_size=12, slots=4, page_size=4)


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def expected(model, tokenizer):
    return make_engine(model, tokenizer, schedule="full_group").generate([PROMPT, PROMPT[:2]], seed=4)


@pytest.mark.parametrize("preemption", ["recompute", "park"])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("compiled", [True, False])
def test_constant_preemption_changes_no_sample(
    model, tokenizer, expected, monkeypatch, eager, preemption, page_size, compiled
):
    if not compiled:
        monkeypatch.setattr("infsample_rl.rollout.kernels.cpu_kernels.load", lambda: None)
    budget = page_size * kv_pages(1, 24, [5], page_size)
    engine = make_engine(
        model, tokenizer, page_size=page_size, kv_budget_tokens=budget, preemption=preemption, prompts_at_once=2
    )
    if preemption == "park":
        # whatever the folder of this machine is
        monkeypatch.setattr(parked_kv, "check_disk_folder", lambda name, folder: None)
    assert tokens_of(engine.generate([PROMPT, PROMPT[:2]], seed=4)) == tokens_of(expected)
    stats = engine.stats
    assert stats.preemptions >= 10 and stats.peak_kv_bytes <= stats.kv_pool_bytes == budget * 2 * 2 * 2 * 16 * 4
    if preemption == "park":
        assert stats.parked_tokens > 0 and stats.recomputed_tokens < stats.parked_tokens
    else:
        assert stats.parked_tokens == 0 < stats.recomputed_tokens


@pytest.fixture
def eager(monkeypatch):
    """Every sample is let in that finds a page, so that rows are preempted all the time."""

    def may_admit(self, running, candidate, missing, free, pages, **others):
        return not running or missing < free

    monkeypatch.setattr(TokenBudgetPolicy, "may_admit", may_admit)


@pytest.fixture
def parking_engine(model, tokenizer, disk_folder, eager):
    budget = 4 * kv_pages(1, 24, [5], 4)
    return make_engine(model, tokenizer, kv_budget_tokens=budget, preemption=str(disk_folder), prompts_at_once=2)


def test_the_file_holds_the_kv_of_those_alone_who_wait(parking_engine, disk_folder):
    engine, largest = parking_engine, 0
    for _ in engine.stream([PROMPT, PROMPT[:2]], seed=4):
        planner = engine._loop.planner
        waiting = {owner for owner in (*planner.line, *planner.resident) if owner.num_parked_pages}
        assert waiting == set(engine.pool.parking._places) and list(disk_folder.iterdir()) == []
        assert engine.pool.parking.num_taken == sum(owner.num_parked_pages for owner in waiting)
        largest = max(largest, engine.pool.parking.num_taken)
    assert engine.stats.parked_tokens > 0 and largest > 0
    size = os.fstat(engine.pool.parking._file.fileno()).st_size
    assert size == engine.pool.parking._num_places * engine.runner.kv.page_bytes, (
        "it has grown to what was wanted at most at a time"
    )
    engine.generate([PROMPT, PROMPT[:2]], seed=4)
    assert os.fstat(engine.pool.parking._file.fileno()).st_size == size, "and is used again"
    for _ in engine.stream([PROMPT, PROMPT[:2]], seed=4):
        break
    engine.generate([PROMPT], seed=5)  # which ends the stream that was left
    assert engine.pool.parking.num_taken == 0 and not engine.pool.parking._places


def test_a_disk_that_is_full_costs_time_but_no_sample(parking_engine, expected, monkeypatch):
    engine, real = parking_engine, os.posix_fallocate

    def take_room(file, offset, size):
        if size > 3 * engine.runner.kv.page_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(file, offset, size)

    monkeypatch.setattr(parked_kv.os, "posix_fallocate", take_room)
    with pytest.warns(
        UserWarning, match=r"rollout.preemption=.* has no room for more than .* GB of KV: No space left on device"
    ) as warned:
        found = engine.generate([PROMPT, PROMPT[:2]], seed=4)
    assert tokens_of(found) == tokens_of(expected) and len(warned) == 1
    assert engine.stats.parked_tokens > 0 and engine.stats.recomputed_tokens > 0 and engine.pool.parking.most_pages <= 3


def test_a_disk_that_takes_no_more_costs_memory_but_no_sample(parking_engine, expected, monkeypatch):
    engine, real, written = parking_engine, os.pwritev, []

    def write(file, buffers, offset):
        written.append(offset)
        if len(written) % 3:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
        return real(file, buffers, offset)

    monkeypatch.setattr(parked_kv.os, "pwritev", write)
    with pytest.warns(UserWarning, match=r"rollout.preemption=.* takes no KV, which waits in host memory: .*too large"):
        found = engine.generate([PROMPT, PROMPT[:2]], seed=4)
    assert tokens_of(found) == tokens_of(expected) and len(written) > 3
    assert engine.stats.parked_tokens > 0 and engine.stats.recomputed_tokens == 0 and not engine.pool.parking._unwritten


def test_memory_is_no_place_for_parked_kv_on_the_cpu(model, tokenizer, expected, monkeypatch):
    if file_system(Path("/dev/shm")) not in IN_MEMORY:
        pytest.skip("/dev/shm does not lie in memory")
    monkeypatch.setattr(parked_kv.tempfile, "gettempdir", lambda: "/dev/shm")
    engine = make_engine(model, tokenizer, prompts_at_once=2)
    with pytest.warns(
        UserWarning, match="KV of preempted samples is computed again, not parked: .* must be on a disk, got /dev/shm"
    ):
        assert tokens_of(engine.generate([PROMPT, PROMPT[:2]], seed=4)) == tokens_of(expected)
    for asked in ({"preemption": "park"}, {"preemption": "/dev/shm"}):
        with pytest.raises(
            ValueError, match="rollout.preemption must be on a disk, got /dev/shm, which is a tmpfs and lies in memory"
        ):
            make_engine(model, tokenizer, **asked)


def test_random_models_and_prompts_equal_generate(make_tokenizer):
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

    draw = random.Random(7)
    for seed in range(9):
        torch.manual_seed(seed)
        heads = draw.choice([(4, 4), (4, 2), (6, 2), (4, 1)])
        shape = {"vocab_size": 50, "hidden_size": 48, "intermediate_size": 40, "max_position_embeddings": 64}
        shape |= {"num_hidden_layers": draw.choice([1, 3]), "head_dim": draw.choice([8, 24]), "initializer_range": 0.2}
        shape |= {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "eos_token_id": None}
        config = [LlamaConfig, Qwen2Config, Qwen3Config][seed % 3](**shape, tie_word_embeddings=draw.random() < 0.5)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        # the last fills the context
        prompts = [[draw.randrange(50) for _ in range(size)] for size in (1, draw.randint(2, 20), 44)]
        settings = {"group_size": 3, "max_new_tokens": 20, "page_size": draw.choice([1, 3, 16])}
        settings |= {"prompts_at_once": draw.randint(1, 3), "kv_budget_tokens": draw.choice([80, 100, 300])}
        engine = make_engine(model, make_tokenizer(50), stop=(), **settings)
        found = tokens_of(engine.generate(prompts, seed=0, temperature=0))
        assert found == [[greedy(model, prompt, 20)] * 3 for prompt in prompts]


@pytest.mark.parametrize("schedule", ["token_budget", "arrival", "infinite"])
def test_the_pool_is_equal_to_the_byte_for_any_group(model, tokenizer, schedule):
    pools, peaks = set(), []
    for group_size in (8, 64, 512):
        engine = make_engine(model, tokenizer, group_size=group_size, schedule=schedule, slots=2, max_new_tokens=6)
        engine.generate([PROMPT], seed=0)
        pools.add(engine.stats.kv_pool_bytes)
        peaks.append(engine.stats.peak_kv_bytes)
    assert len(pools) == 1 and max(peaks) <= pools.pop()


@pytest.mark.parametrize(
    ("settings", "free_pages", "expected"),
    [
        ({"slots": 1}, 1000, [12, 12, 12, 20, 68, 104]),  # of a context of 100
        ({"slots": 1}, 0, [9, 10, 12, 13, 64, 94]),
        ({"kv_budget_bytes": "auto"}, 1000, [12, 12, 12, 20, 68, 104]),
        ({"kv_budget_bytes": "auto"}, 98, [12, 12, 12, 20, 68, 94]),
        ({"kv_budget_tokens": 94}, 1000, [94] * 6),
    ],
    ids=str,
)
def test_a_pool_for_any_prompts_doubles_within_what_is_free(
    make_model, tokenizer, monkeypatch, settings, free_pages, expected
):
    model = make_model(max_position_embeddings=100)
    settings = {"slots": None, "group_size": 1, "prompts_at_once": 1, "page_size": 1, "max_new_tokens": 4} | settings
    engine = make_engine(model, tokenizer, doubles=True, **settings)
    page_bytes = engine.runner.page_bytes(1)
    # half of what is free and of what the pool has is the pool's on the CPU
    monkeypatch.setattr(engine_pool, "free_bytes", lambda *_: (2 * free_pages - engine.num_pages) * page_bytes)
    found = []
    for size in (5, 6, 8, 9, 60, 90):
        engine.generate([[1] * size], 0)
        found.append(engine.num_pages)
    assert found == expected
    if free_pages == 98:
        with pytest.raises(ValueError, match="98 pages of 1 tokens, too few for a prompt of 95 tokens"):
            engine.generate([[1] * 95], 0)
        assert engine.pool.longest_prompt == 90


@pytest.mark.skipif(sys.platform != "linux", reason="the system's call is Linux's")
def test_a_pool_that_nobody_uses_is_given_back_to_the_system_and_comes_again(model, tokenizer):
    engine = make_engine(model, tokenizer, group_size=400, max_new_tokens=24, page_size=16, slots=400)
    first = tokens_of(engine.generate([PROMPT], seed=4))
    pages = engine.runner.kv.store
    held = resident_kilobytes(pages)
    assert engine.stats.peak_kv_bytes > 1e6 and held * 1024 < 0.02 * engine.stats.peak_kv_bytes + 8192, (
        "the pages at its ends are shared"
    )
    assert pages.count_nonzero() * pages.element_size() <= 8192
    assert tokens_of(engine.generate([PROMPT], seed=4)) == first


def resident_kilobytes(tensor):
    """Of the memory a tensor lies in, as far as it is there: from mincore of its whole pages."""
    import ctypes
    import mmap

    size = mmap.PAGESIZE
    start = tensor.data_ptr() // size * size
    count = -(-(tensor.data_ptr() + tensor.nbytes - start) // size)
    there = (ctypes.c_ubyte * count)()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(start), ctypes.c_size_t(count * size), there) == 0
    return sum(page & 1 for page in there) * size // 1024


def test_too_small_a_budget_is_refused_with_the_smallest_that_would_do(model, tokenizer):
    with pytest.raises(
        ValueError,
        match="kv_budget_tokens=24 holds 6 pages .* the smallest that would do is rollout.kv_budget_tokens=28",
    ):
        make_engine(model, tokenizer, kv_budget_tokens=24)
    with pytest.raises(ValueError, match="kv_budget_bytes=1KB holds 0 pages"):
        make_engine(model, tokenizer, kv_budget_bytes="1KB")
    with pytest.raises(ValueError, match="kv_budget_bytes=1000000GB asks for a KV pool of .* in all; rollout"):
        make_engine(model, tokenizer, kv_budget_bytes="1000000GB")
    engine = make_engine(model, tokenizer, kv_budget_tokens=28)
    with pytest.raises(ValueError, match="too few for prompt 0 of 5 tokens .* rollout.kv_budget_tokens=32"):
        engine.generate([PROMPT], seed=0)


MEASURE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, Qwen3Config, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models
from infsample_rl.config import RolloutConfig
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine
torch.set_num_threads(1)
def kilobytes(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
heads = dict(num_attention_heads=8, num_key_value_heads=8, head_dim=32)
shape = dict(vocab_size=2000, hidden_size=256, num_hidden_layers=8, intermediate_size=512) | heads
model = AutoModelForCausalLM.from_config(Qwen3Config(**shape), dtype=torch.float32).eval()
words = models.WordLevel({f"w{i}": i for i in range(2000)}, unk_token="w0")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words))
def sample(group_size, budget):
    config = RolloutConfig(group_size=group_size, max_new_tokens=40, kv_budget_bytes=budget)
    engine = SamplingEngine(model, tokenizer, config, stop_token_ids=set())
    engine.generate([list(range(1, 301))], seed=0)
    return engine.stats
sample(2, "10MB")  # compiled kernels and libraries are in memory from here on
open("/proc/self/clear_refs", "w").write("5")
before = kilobytes("VmRSS")
stats = sample(int(sys.argv[1]), "256MB")
print(json.dumps({"risen": (kilobytes("VmHWM") - before) * 1024, "pool": stats.kv_pool_bytes}))
"""


@pytest.mark.slow
def test_a_pool_of_256_mb_is_what_the_process_grows_by():
    found = []
    for group_size in (64, 192):
        command = [sys.executable, "-W", "ignore", "-c", MEASURE, str(group_size)]
        # the allocator's peak varies by 5 MB
        runs = [subprocess.run(command, capture_output=True, text=True, check=True) for _ in range(2)]
        found.append(
            min((json.loads(run.stdout.splitlines()[-1]) for run in runs), key=lambda measured: measured["risen"])
        )
    for measured in found:
        assert 0.95 * 256e6 < measured["pool"] <= 256e6
        assert measured["risen"] <= 1.15 * measured["pool"], measured
    assert found[0]["pool"] == found[1]["pool"]
    assert found[1]["risen"] < 1.05 * found[0]["risen"], found


def test_of_a_part_of_a_gpu_what_others_have_not_taken_yet_is_not_free(monkeypatch):
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (70, 80))
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 5)
    cuda = torch.device("cuda")
    assert [free_bytes(cuda, part) for part in (1.0, 0.5, 0.95)] == [70, 35, 70]


def test_of_a_containers_memory_files_that_were_read_and_can_be_forgotten_are_free(monkeypatch, tmp_path):
    monkeypatch.setattr("infsample_rl.rollout.engine.kv_cache.CGROUP", tmp_path)
    for name, text in {
        "memory.max": "9000000\n",
        "memory.current": "8000000\n",
        "memory.stat": "anon 2000000\nfile 6000000\nactive_file 1000000\ninactive_file 5000000\n",
    }.items():
        (tmp_path / name).write_text(text)
    cpu = torch.device("cpu")
    assert free_bytes(cpu) == 6_000_000 and total_bytes(cpu) == 9_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_bytes(cpu) > 6_000_000 and total_bytes(cpu) > 9_000_000

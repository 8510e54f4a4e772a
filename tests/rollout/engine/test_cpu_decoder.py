"""The compiled decoder layers against transformers' own modules, and their results bit by bit in other company."""

from __future__ import annotations

import ctypes
import platform

import pytest
import torch

from infsample_rl.model.architecture import KVShape
from infsample_rl.rollout.engine import cpu_decoder
from infsample_rl.rollout.engine.cpu_decoder import CompiledDecoder
from infsample_rl.rollout.engine.decoder import FusedDecoder
from infsample_rl.rollout.engine.kv_cache import PagedKV
from infsample_rl.rollout.engine.model_runner import ModelRunner
from infsample_rl.rollout.engine.row_batch import RowBatch
from infsample_rl.rollout.kernels import cpu_kernels
from tests.engines import greedy, make_engine, tokens_of

KERNELS = cpu_kernels.load()
pytestmark = pytest.mark.skipif(KERNELS is None, reason="no C++ compiler")
THREE_TO_ONE = {"num_attention_heads": 6, "num_key_value_heads": 2}
ODD = {"head_dim": 10, "hidden_size": 43, "intermediate_size": 37}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [3.0] * 8}
LONG |= {"original_max_position_embeddings": 16, "rope_theta": 100.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}


@pytest.fixture(autouse=True)
def _threads():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class Work:
    """Rows of two prompts in the middle of their responses, in scattered pages that hold NaN wherever no token lies."""

    def __init__(self, model, *, own=(1, 3, 4, 5, 11), prompts=(1, 9), page_size=4, seed=0, page_seed=0):
        draw, numbers = torch.Generator().manual_seed(seed), model.config
        self.model, self.page_size, self.own = model, page_size, own
        row_pages, prompt_pages = (max(-(-size // page_size) for size in sizes) for sizes in (own, prompts))
        num_pages = len(own) * row_pages + 2 * prompt_pages
        self.kv = PagedKV(KVShape.of(numbers), num_pages, page_size, torch.float32, torch.device("cpu"))
        self.kv.store.fill_(torch.nan)
        pages = torch.randperm(num_pages, generator=torch.Generator().manual_seed(page_seed)).int()
        batch = self.batch = RowBatch(len(own), row_pages, 2, prompt_pages, self.kv.scratch_page, torch.device("cpu"))
        batch.tables.copy_(pages[: len(own) * row_pages].view(len(own), -1))
        batch.prompt_tables.copy_(pages[len(own) * row_pages :].view(2, -1))
        batch.prompt_lengths.copy_(torch.tensor(prompts))
        batch.prompt_of_row.copy_(torch.arange(len(own)) % 2)
        prompt_ids = [torch.randint(0, numbers.vocab_size, (size,), generator=draw) for size in prompts]
        self.ids = []
        for row, size in enumerate(own):
            place, own_ids = row % 2, torch.randint(0, numbers.vocab_size, (size,), generator=draw)
            self.ids.append(torch.cat([prompt_ids[place], own_ids]))
            batch.tokens[row], batch.starts[row] = own_ids[-1], prompts[place]
            batch.positions[row], batch.lengths[row] = size - 1, size
        self.fill()

    @torch.no_grad()
    def fill(self):
        """By transformers' modules: expected last hidden states, the KV of all tokens but the newest, and in `after`
        that of the newest too."""
        batch, wanted, newest = self.batch, [], []
        for row, ids in enumerate(self.ids):
            out = self.model.model(input_ids=ids[None], use_cache=True)
            wanted.append(out.last_hidden_state[0, -1])
            start = int(batch.starts[row])
            for layer, cached in enumerate(out.past_key_values.layers):
                for half, tensor in ((2 * layer, cached.keys), (2 * layer + 1, cached.values)):
                    tokens = tensor[0].transpose(0, 1)  # [T, H, D]
                    self.put(half, batch.prompt_tables[batch.prompt_of_row[row]], tokens[:start])
                    self.put(half, batch.tables[row], tokens[start:-1])
                    newest.append((half, row, len(tokens) - start - 1, tokens[-1]))
        self.wanted, self.after = torch.stack(wanted), self.kv.store.clone()
        for half, row, place, token in newest:
            self.after[half, batch.tables[row, place // self.page_size], place % self.page_size] = token

    def put(self, half, table, tokens):
        for place, token in enumerate(tokens):
            self.kv.store[half, table[place // self.page_size], place % self.page_size] = token

    def decode(self, kernels=KERNELS):
        return CompiledDecoder(self.model, kernels)(self.batch, len(self.own), self.kv)

    def pick(self, rows):
        """Make these rows, in this order, the batch's."""
        batch = self.batch
        picked = RowBatch(
            len(rows), batch.tables.shape[1], 2, batch.prompt_tables.shape[1], batch.scratch_page, batch.device
        )
        for name in ("tables", "tokens", "positions", "starts", "lengths", "prompt_of_row"):
            vars(picked)[name].copy_(vars(batch)[name][list(rows)])
        picked.prompt_tables.copy_(batch.prompt_tables)
        picked.prompt_lengths.copy_(batch.prompt_lengths)
        return picked


def distance(found, wanted):
    """Relative to the norm."""
    return ((found - wanted).norm() / wanted.norm()).item()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1}),
        ("qwen2", THREE_TO_ONE | {"head_dim": 64}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", THREE_TO_ONE | {"head_dim": 24}),
        ("qwen3", {"tie_word_embeddings": True, "rms_norm_eps": 0.1}),
        ("qwen3", THREE_TO_ONE | ODD | {"vocab_size": 61, "num_hidden_layers": 3}),
        ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0}}),
        ("llama", {"rope_parameters": YARN | {"rope_theta": 100.0}}),
    ],
    ids=str,
)
def test_it_is_transformers_modules_and_writes_the_newest_tokens_kv_alone(make_model, family, changes):
    model = make_model(family, **changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # these start as zeros and ones
                parameter.copy_(torch.randn(parameter.shape) * 0.3 + 1)
    work = Work(model)
    assert distance(work.decode(), work.wanted) < 1e-5
    torch.testing.assert_close(work.kv.store, work.after, rtol=1e-4, atol=1e-5, equal_nan=True)
    untouched = work.after.isnan() | (work.kv.store == work.after)
    # every older token to the bit
    assert untouched.sum() >= work.after.numel() - len(work.own) * work.after[:, 0, 0].numel()


def test_places_beyond_the_first_table_of_angles_are_right(make_model):
    model = make_model("llama", max_position_embeddings=1024)
    work = Work(model, prompts=(3, 600), own=(2, 2, 260))
    decoder = CompiledDecoder(model, KERNELS)
    found = decoder(work.batch, 3, work.kv)
    assert distance(found, work.wanted) < 1e-5
    assert len(decoder._angles.cos) == 768  # 602 places, 256 at a time
    assert torch.equal(decoder(work.batch, 3, work.kv), found)


@pytest.mark.parametrize(
    "sizes", [{}, THREE_TO_ONE | {"head_dim": 24, "hidden_size": 43, "intermediate_size": 130}], ids=str
)
def test_a_row_gets_the_same_bits_in_any_batch_place_pages_and_thread_count(make_model, monkeypatch, sizes):
    monkeypatch.setattr(cpu_decoder, "WORK_PER_THREAD", 1)
    model = make_model("qwen3", **sizes)
    own = [1 + 7 * row % 12 for row in range(33)]
    work, elsewhere = Work(model, own=own), Work(model, own=own, page_seed=1, page_size=3)
    decoder, seen = CompiledDecoder(model, KERNELS), []
    torch.set_num_threads(1)
    alone = torch.cat([decoder(work.pick([row]), 1, work.kv) for row in range(33)])
    assert distance(alone, work.wanted) < 1e-5
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        seen.append(decoder._step(work.batch, 33, work.kv).threads)
        for rows in (range(3), range(5, 13), range(31, 33), range(33), torch.randperm(33).tolist()):
            assert torch.equal(decoder(work.pick(rows), len(rows), work.kv), alone[list(rows)])
        assert torch.equal(decoder(elsewhere.batch, 33, elsewhere.kv), alone)
        assert torch.equal(decoder(work.batch, 20, work.kv), alone[:20])
        for _ in range(200):  # threads meet in ever new ways
            assert torch.equal(decoder(work.batch, 33, work.kv), alone)
    assert seen == [1, 2, 3]


def test_weights_changed_in_place_or_replaced_are_seen(make_model):
    model = make_model("qwen2")
    work, decoder = Work(model), CompiledDecoder(model, KERNELS)
    first = decoder(work.batch, 5, work.kv)
    attention = model.model.layers[1].self_attn

    def change_in_place():
        attention.q_proj.weight.data.mul_(1.5)

    def replace_the_tensor():
        attention.k_proj.bias.data = attention.k_proj.bias.data + 2.0

    def replace_the_parameter():
        model.model.norm.weight = torch.nn.Parameter(model.model.norm.weight.detach() * 3.0)

    for change in (change_in_place, replace_the_tensor, replace_the_parameter):
        change()
        work.fill()
        found = decoder(work.batch, 5, work.kv)
        assert distance(found, work.wanted) < 1e-5 < distance(found, first)
    attention.v_proj.weight = torch.nn.Parameter(torch.zeros(32, 64, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"a weight of the model is torch.bfloat16 .* must be torch.float32"):
        decoder(work.batch, 5, work.kv)


def test_indices_out_of_range_are_refused_before_anything_is_written(make_model):
    work = Work(make_model())
    before = work.kv.store.clone()
    for name, index, value, named in [
        ("lengths", 3, 13, r"lengths or tables\[3\]"),
        ("lengths", 0, 0, r"lengths or tables\[0\]"),
        ("tables", (4, 2), work.kv.num_pages + 1, r"lengths or tables\[4\]"),
        ("tables", (1, 0), -1, r"lengths or tables\[1\]"),
        ("prompt_lengths", 1, 0, r"prompt_lengths or prompt_tables\[1\]"),
        ("prompt_tables", (0, 0), 1000, r"prompt_lengths or prompt_tables\[0\]"),
        ("prompt_of_row", 2, 2, r"prompt_of_row\[2\]"),
        ("tokens", 4, 64, r"tokens\[4\]"),
        ("tokens", 2, -1, r"tokens\[2\]"),
        ("starts", 1, -20, "places in a sequence, got -18"),
    ]:
        tensor = vars(work.batch)[name]
        kept = tensor.clone()
        tensor[index] = value
        with pytest.raises(ValueError, match=named):
            work.decode()
        tensor.copy_(kept)
    assert torch.equal(before.nan_to_num(7.0), work.kv.store.nan_to_num(7.0))
    assert distance(work.decode(), work.wanted) < 1e-5


def test_the_runner_takes_it_for_float32_pages_and_the_fused_one_otherwise(make_model, monkeypatch):
    assert isinstance(ModelRunner(make_model()).decoder, CompiledDecoder)
    assert isinstance(ModelRunner(make_model(), kv_dtype="int8").decoder, FusedDecoder)
    assert isinstance(ModelRunner(make_model().bfloat16()).decoder, FusedDecoder)
    monkeypatch.setattr(cpu_kernels, "load", lambda: None)
    assert isinstance(ModelRunner(make_model()).decoder, FusedDecoder)


@pytest.mark.parametrize(
    ("changes", "decoder"),
    [
        ({"hidden_act": "gelu"}, type(None)),
        ({"rope_parameters": DYNAMIC, "max_position_embeddings": 16}, FusedDecoder),
        ({"rope_parameters": LONG}, FusedDecoder),
    ],
    ids=str,
)
def test_what_it_does_not_know_decodes_in_another_way(make_model, tokenizer, changes, decoder):
    model, prompt = make_model("llama", **changes), [5, 9, 7, 30, 2]
    engine = make_engine(model, tokenizer, group_size=3, stop=(), max_new_tokens=11)
    assert type(engine.runner.decoder) is decoder
    assert tokens_of(engine.generate([prompt], seed=0, temperature=0)) == [[greedy(model, prompt, 11)] * 3]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("without", ["-mno-avx512f", "-mno-avx"])
def test_narrower_vectors_are_right_and_the_same_in_any_batch(make_model, tmp_path, monkeypatch, without):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(cpu_kernels, "FLAGS", (*cpu_kernels.FLAGS, "-O1", without))
    narrow = cpu_kernels.Kernels(ctypes.CDLL(str(cpu_kernels._library_path())), ctypes.CDLL(cpu_kernels._openmp_path()))
    work = Work(make_model("qwen3", **THREE_TO_ONE, **ODD))
    found = work.decode(narrow)
    assert distance(found, work.wanted) < 1e-5
    assert torch.equal(CompiledDecoder(work.model, narrow)(work.pick([3]), 1, work.kv), found[3:4])

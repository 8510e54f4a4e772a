"""Flat weight buckets: exact, checked, tied tensors once, never more than a bucket in memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infsample_rl.model.weight_sync.buckets import fill_buckets, load_buckets, stream_buckets
from infsample_rl.model.weight_sync.checksum import checksum
from infsample_rl.model.weight_sync.manifest import (
    bucket_sizes,
    layout,
    plan_weights,
    shapes_of,
    shapes_of_architecture,
)
from infsample_rl.model.weight_sync.sync import load_published


def model(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [8, 40, 64 * 2**20])
def test_loaded_weights_equal_packed_weights_in_any_number_of_buckets(dtype, bucket_bytes, pack_buckets):
    source, target = model(0, dtype), model(1, dtype)
    storage = target[0].weight.data_ptr()
    manifest, buckets = pack_buckets(source.named_parameters(), version=4, bucket_bytes=bucket_bytes)
    load_buckets(target, manifest, buckets, 4, bucket_bytes=bucket_bytes)
    assert len(buckets) == -(-32 * dtype.itemsize // bucket_bytes) and manifest.num_bytes == 32 * dtype.itemsize
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert target[0].weight.data_ptr() == storage, "copied in place"


def test_a_tensor_larger_than_a_bucket_is_cut_and_every_element_lies_in_one_piece():
    manifest = plan_weights(
        [("a", torch.bfloat16, (3,)), ("b", torch.float32, (2, 5)), ("c", torch.bfloat16, (1,))], 1, 16
    )
    assert manifest.entries == [
        ("a", "bfloat16", (3,), 0, 0),
        ("b", "float32", (2, 5), 0, 8),
        ("c", "bfloat16", (1,), 3, 0),
    ]
    assert bucket_sizes(manifest, 16) == [16, 16, 16, 2], "b begins at a multiple of 4"
    pieces = [
        [(piece.entry, piece.start, piece.stop, piece.offset) for piece in bucket] for bucket in layout(manifest, 16)
    ]
    assert pieces == [[(0, 0, 3, 0), (1, 0, 2, 8)], [(1, 2, 6, 0)], [(1, 6, 10, 0)], [(2, 0, 1, 0)]]


def test_the_sender_holds_one_tensor_and_the_buffers_it_was_given():
    made, alive = [], [torch.empty(40, dtype=torch.uint8), torch.empty(40, dtype=torch.uint8)]

    def tensors():
        for name, parameter in model(0).named_parameters():
            made.append(name)
            yield name, parameter

    manifest = plan_weights(shapes_of(model(0).named_parameters()), 1, 40)
    filled = fill_buckets(tensors(), manifest, iter(alive * 2), 40)
    assert next(filled).data_ptr() == alive[0].data_ptr() and made == ["0.weight"], (
        "60 bytes: the first bucket needs no second tensor"
    )
    assert next(filled).data_ptr() == alive[1].data_ptr() and made == ["0.weight", "0.bias"]
    assert [len(bucket) for bucket in filled] == [40, 8] and made == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_tensors_other_than_the_manifests_are_refused_by_the_sender():
    manifest = plan_weights(shapes_of(model(0).named_parameters()), version=1)
    named = list(model(0).named_parameters())
    with pytest.raises(RuntimeError, match=r"goes on with 1.bias, float32 \(2,\); given was nothing"):
        list(stream_buckets(named[:-1], manifest))
    with pytest.raises(RuntimeError, match=r"goes on with 0.weight, float32 \(5, 3\); given was 0.bias"):
        list(stream_buckets(named[1:], manifest))
    with pytest.raises(RuntimeError, match=r"more is not in the manifest"):
        list(stream_buckets([*named, ("more", torch.zeros(1))], manifest))
    with pytest.raises(RuntimeError, match=r"given was 0.weight, torch.bfloat16"):
        list(stream_buckets(model(0, torch.bfloat16).named_parameters(), manifest))
    with pytest.raises(RuntimeError, match=r"x of shape \(0,\) has no elements; give the shapes of whole parameters"):
        plan_weights([("x", torch.float32, (0,))], version=1)


def test_missing_extra_misshapen_and_lossy_names_are_refused(pack_buckets):
    manifest, buckets = pack_buckets([("0.weight", torch.zeros(5, 3)), ("2.bias", torch.zeros(2))], version=1)
    with pytest.raises(
        RuntimeError, match=r"missing \['0.bias', '1.bias', '1.weight'\], not in the model \['2.bias'\]"
    ):
        load_buckets(model(0), manifest, buckets)
    wrong = [(name, torch.zeros(1)) for name, _ in model(0).named_parameters()]
    with pytest.raises(RuntimeError, match=r"has shape \(1,\)"):
        load_buckets(model(0), *pack_buckets(wrong, version=1))
    with pytest.raises(RuntimeError, match=r"0.weight is float32, the engine's model has bfloat16"):
        load_buckets(model(0, torch.bfloat16), *pack_buckets(model(0).named_parameters(), version=1))
    with pytest.raises(RuntimeError, match=r"weights version 1 came where version 2 was to come"):
        load_buckets(model(0), *pack_buckets(model(0).named_parameters(), version=1), 2)


def test_buckets_that_are_cut_short_or_too_many_are_refused(pack_buckets):
    manifest, buckets = pack_buckets(model(0).named_parameters(), version=1)
    with pytest.raises(RuntimeError, match="bucket 0 has 100 bytes, not 128"):
        load_buckets(model(0), manifest, [buckets[0][:100]])
    with pytest.raises(RuntimeError, match="bucket 0 has 0 bytes, not 128"):
        load_buckets(model(0), manifest, [])
    with pytest.raises(RuntimeError, match="more buckets came"):
        load_buckets(model(0), manifest, [*buckets, np.zeros(4, np.uint8)])


def test_read_only_buckets_are_loaded_and_a_wrong_checksum_names_worker_and_parameter(pack_buckets):
    source, target = model(0), model(1)
    manifest, buckets = pack_buckets(source.named_parameters(), version=6)
    for bucket in buckets:
        bucket.flags.writeable = False  # as Ray's object store hands them over
    sums = {name: checksum(parameter) for name, parameter in source.named_parameters()}
    report = load_published(target, manifest, buckets, 6, sums=sums)
    assert (report.version, report.num_bytes) == (6, 128) and len(report.checksum) == 16
    with pytest.raises(
        RuntimeError,
        match="rollout worker 1: weights version 6: 1 parameters differ from the learner's after loading: 1.bias",
    ):
        load_published(target, manifest, buckets, 6, sums=sums | {"1.bias": 0}, worker="rollout worker 1")


@pytest.mark.parametrize("tied", [True, False])
def test_bytes_are_known_from_the_architecture_alone(tied):
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    config = Qwen3Config(**sizes, num_key_value_heads=1, head_dim=16, tie_word_embeddings=tied)
    planned = plan_weights(shapes_of_architecture(config, torch.bfloat16), version=0)
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 16 + 2 * 32
    assert planned.num_bytes == 2 * (64 * 32 * (1 if tied else 2) + 2 * layer + 32)
    assert planned == plan_weights(shapes_of(Qwen3ForCausalLM(config).to(torch.bfloat16).named_parameters()), version=0)

"""Flat weight buckets: exact, checked, tied tensors once, never more than a bucket in memory; and weights that stay in
their process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from link_members import Plan, tiny_model

from infsample_rl.cluster.colocated import share_parameters
from infsample_rl.model.weight_sync.buckets import (
    bucket_sizes,
    fill_buckets,
    layout,
    misfit,
    plan_weights,
    shapes_of,
    stream_buckets,
)
from infsample_rl.model.weight_sync.sync import check_shared, load_local, load_published
from infsample_rl.rollout.engine.decoder import joined


def model(seed: int, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)


def load(into: torch.nn.Module, *published):
    """load_published() into a module's parameters."""
    return load_published(dict(into.named_parameters()), *published)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bucket_bytes", [8, 40, 64 * 2**20])
def test_loaded_weights_equal_packed_weights_in_any_number_of_buckets(dtype, bucket_bytes, pack_buckets):
    source, target = model(0, dtype), model(1, dtype)
    storage = target[0].weight.data_ptr()
    manifest, buckets = pack_buckets(source.named_parameters(), version=4, bucket_bytes=bucket_bytes)
    for bucket in buckets:
        bucket.flags.writeable = False  # as Ray's object store hands them over
    report = load(target, manifest, buckets)
    assert len(buckets) == -(-32 * dtype.itemsize // bucket_bytes)
    assert (report.version, report.num_bytes) == (4, 32 * dtype.itemsize)
    assert all(torch.equal(a, b) for a, b in zip(source.parameters(), target.parameters(), strict=True))
    assert target[0].weight.data_ptr() == storage, "copied in place"


def test_a_tensor_larger_than_a_bucket_is_cut_and_every_element_lies_in_one_piece():
    shapes = [("a", torch.bfloat16, (3,)), ("b", torch.float32, (2, 5)), ("c", torch.bfloat16, (1,))]
    manifest = plan_weights(shapes, 1, 16)
    assert [entry[3:] for entry in manifest.entries] == [(0, 0), (0, 8), (3, 0)]
    assert bucket_sizes(manifest) == [16, 16, 16, 2], "b begins at a multiple of 4"
    assert layout(manifest) == [[(0, 0, 3, 0), (1, 0, 2, 8)], [(1, 2, 6, 0)], [(1, 6, 10, 0)], [(2, 0, 1, 0)]]


def test_the_sender_holds_one_tensor_and_the_buffers_it_was_given():
    made, alive = [], [torch.empty(40, dtype=torch.uint8), torch.empty(40, dtype=torch.uint8)]

    def tensors():
        for name, parameter in model(0).named_parameters():
            made.append(name)
            yield name, parameter

    manifest = plan_weights(shapes_of(model(0).named_parameters()), 1, 40)
    filled = fill_buckets(tensors(), manifest, iter(alive * 2))
    assert next(filled).data_ptr() == alive[0].data_ptr() and made == ["0.weight"], (
        "60 bytes: the first bucket needs no second tensor"
    )
    assert next(filled).data_ptr() == alive[1].data_ptr() and made == ["0.weight", "0.bias"]
    assert [len(bucket) for bucket in filled] == [40, 8] and made == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_tensors_other_than_the_manifests_are_refused_by_the_sender():
    named = list(model(0).named_parameters())
    manifest = plan_weights(shapes_of(named), version=1)
    for given, message in (
        (named[:-1], r"goes on with 1.bias, float32 \(2,\); given was nothing"),
        (named[1:], r"goes on with 0.weight, float32 \(5, 3\); given was 0.bias"),
        ([*named, ("more", torch.zeros(1))], "more is not in the manifest"),
        (model(0, torch.bfloat16).named_parameters(), "given was 0.weight, torch.bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            list(stream_buckets(given, manifest))


def test_missing_extra_misshapen_and_lossy_names_are_refused(pack_buckets):
    named = list(model(0).named_parameters())
    for given, dtype, message in (
        (
            [("0.weight", torch.zeros(5, 3)), ("2.bias", torch.zeros(2))],
            torch.float32,
            r"missing \['0.bias', '1.bias', '1.weight'\], not in the model \['2.bias'\]",
        ),
        ([(name, torch.zeros(1)) for name, _ in named], torch.float32, r"has shape \(1,\)"),
        (named, torch.bfloat16, "0.weight is float32, the engine's model has bfloat16"),
    ):
        with pytest.raises(RuntimeError, match=message):
            load(model(0, dtype), *pack_buckets(given, version=1))
    manifest, _ = pack_buckets(named, version=1)
    assert misfit(dict(named), manifest, 2) == "weights version 1 came where version 2 was to come"


def test_buckets_that_are_cut_short_or_too_many_are_refused(pack_buckets):
    manifest, buckets = pack_buckets(model(0).named_parameters(), version=1)
    for given, message in (
        ([buckets[0][:100]], "bucket 0 has 100 bytes, not 128"),
        ([], "bucket 0 has 0 bytes, not 128"),
        ([*buckets, np.zeros(4, np.uint8)], "more buckets came"),
    ):
        with pytest.raises(RuntimeError, match=message):
            load(model(0), manifest, given)


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_that_shares_its_learners_parameters_needs_no_copy(tied):
    learner = tiny_model(1, Plan("local", tied=tied))
    engine = share_parameters(learner)
    ids = torch.arange(8)[None]
    before = engine(ids).logits
    learner(ids, labels=ids).loss.backward()
    torch.optim.AdamW(learner.parameters(), lr=0.1).step()
    attention = engine.model.layers[0].self_attn
    joined([attention.q_proj.weight, attention.k_proj.weight])  # moved, but the same Parameter objects
    report = check_shared(dict(engine.named_parameters()), learner, version=3)
    assert (report.version, report.num_bytes) == (3, 0)
    assert not torch.equal(engine(ids).logits, before) and torch.equal(engine(ids).logits, learner(ids).logits)
    learner.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(RuntimeError, match="weights version 1: engine and learner no longer share model.norm.weight"):
        check_shared(dict(engine.named_parameters()), learner, version=1)


def test_full_parameters_are_copied_in_place_and_all_are_asked_for_even_after_a_refusal():
    engine, learner = (tiny_model(seed, Plan("local", tied=False)) for seed in (0, 1))
    own, named = dict(engine.named_parameters()), list(learner.named_parameters())
    storage = [parameter.data_ptr() for parameter in engine.parameters()]
    report = load_local(own, named, 2)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), learner.parameters(), strict=True))
    assert storage == [parameter.data_ptr() for parameter in engine.parameters()]
    assert report.num_bytes == sum(parameter.nbytes for parameter in engine.parameters())

    gathered, small = iter(named), tiny_model(0, Plan("local", tied=False), hidden_size=64)
    with pytest.raises(
        RuntimeError, match="engine beside its learner, weights version 2: .*embed_tokens.weight has shape"
    ):
        load_local(dict(small.named_parameters()), gathered, 2)
    assert next(gathered, None) is None, "other ranks gather with it"
    with pytest.raises(RuntimeError, match=r"\['model.norm.weight'\] were not given"):
        load_local(own, [item for item in named if item[0] != "model.norm.weight"], 2)

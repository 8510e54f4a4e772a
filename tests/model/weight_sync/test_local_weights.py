"""Learner and engine in one process: one set of parameters, or full ones copied in place."""

from __future__ import annotations

import pytest
import torch
from link_members import Plan, tiny_model

from infsample_rl.cluster.colocated import share_parameters
from infsample_rl.model.weight_sync.local import check_shared, load_local
from infsample_rl.model.weight_sync.manifest import plan_weights, shapes_of
from infsample_rl.rollout.engine.decoder import joined


@pytest.mark.parametrize("tied", [True, False])
def test_an_engine_that_shares_its_learners_parameters_needs_no_copy(tied):
    learner = tiny_model(1, Plan("local", tied=tied))
    engine = share_parameters(learner)
    ids = torch.arange(8)[None]
    before = engine(ids).logits
    learner(ids, labels=ids).loss.backward()
    torch.optim.AdamW(learner.parameters(), lr=0.1).step()
    report = check_shared(engine, learner, version=3)
    assert (report.version, report.num_bytes, report.checksum) == (3, 0, None)
    assert not torch.equal(engine(ids).logits, before) and torch.equal(engine(ids).logits, learner(ids).logits)


def test_parameters_that_the_engine_moves_are_still_shared_and_one_that_is_replaced_is_named():
    learner = tiny_model(1, Plan("local"))
    engine = share_parameters(learner)
    attention = engine.model.layers[0].self_attn
    joined([attention.q_proj.weight, attention.k_proj.weight])
    assert check_shared(engine, learner, version=1).num_bytes == 0, "the same Parameter objects"
    learner.model.norm.weight = torch.nn.Parameter(torch.ones(32))
    with pytest.raises(RuntimeError, match="weights version 1: engine and learner no longer share model.norm.weight"):
        check_shared(engine, learner, version=1)


def test_full_parameters_are_copied_in_place_and_all_are_asked_for_even_after_a_refusal():
    engine, learner = (tiny_model(seed, Plan("local", tied=False)) for seed in (0, 1))
    storage = [parameter.data_ptr() for parameter in engine.parameters()]
    manifest = plan_weights(shapes_of(learner.named_parameters()), version=2)
    report = load_local(engine, learner.named_parameters(), manifest, with_checksum=True)
    assert all(torch.equal(a, b) for a, b in zip(engine.parameters(), learner.parameters(), strict=True))
    assert storage == [parameter.data_ptr() for parameter in engine.parameters()]
    assert report.num_bytes == manifest.num_bytes and report.checksum is not None

    gathered = iter(list(learner.named_parameters()))
    small = tiny_model(0, Plan("local", tied=False), hidden_size=64)
    with pytest.raises(
        RuntimeError, match="engine beside its learner, weights version 2: .*embed_tokens.weight has shape"
    ):
        load_local(small, gathered, manifest)
    assert next(gathered, None) is None, "other ranks gather with it"
    with pytest.raises(RuntimeError, match=r"\['model.norm.weight'\] of the manifest were not given"):
        load_local(engine, [item for item in learner.named_parameters() if item[0] != "model.norm.weight"], manifest)

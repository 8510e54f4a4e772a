"""What the members of a weight link do in processes of their own; the tests start and stop them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.queues import Queue
from multiprocessing.synchronize import Event

import torch
import torch.multiprocessing
from transformers import Qwen3Config, Qwen3ForCausalLM

from infsample_rl.model.weight_sync.buckets import plan_weights, shapes_of
from infsample_rl.model.weight_sync.link import WeightLink
from infsample_rl.model.weight_sync.store import host_store, open_store
from infsample_rl.model.weight_sync.sync import receive_weights, send_weights

# the tiny model has some 60 kB in float32: tensors in several buckets, buckets of several tensors
BUCKET_BYTES = 20_000


@dataclass
class Plan:
    """A life of all members: versions 1, 2, ... one after another."""

    transport: str
    tied: bool = True
    dtype: str = "float32"
    device: str = "cpu"
    versions: int = 3
    timeout_s: float = 60.0
    spoiled: dict[int, str] = field(default_factory=dict)  # member -> what is wrong with it
    pause_in: int = 0  # the version in the middle of which the learner waits for the test


def tiny_model(seed: int, plan: Plan, hidden_size: int = 32) -> Qwen3ForCausalLM:
    """A random Qwen3 of one layer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        **{
            "vocab_size": 320,
            "hidden_size": hidden_size,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
        },
        **{"num_key_value_heads": 1, "head_dim": 16, "tie_word_embeddings": plan.tied, "initializer_range": 0.5},
    )
    return Qwen3ForCausalLM(config).to(plan.device, getattr(torch, plan.dtype))


def run_member(
    member: int, members: int, plan: Plan, addresses: Queue, half: Event, go_on: Event, results: Queue
) -> None:
    """Put (member, one entry for each version) into `results`: (report, parameters equal the learner's), or an error
    and its seconds."""
    torch.set_num_threads(1)
    torch.multiprocessing.set_sharing_strategy("file_system")  # the members are not each other's children
    if member == 0:
        store, address = host_store("127.0.0.1", plan.timeout_s)
        for _ in range(1, members):
            addresses.put(address)
    else:
        store = open_store(addresses.get(), plan.timeout_s)
    device = torch.device(plan.device)
    link = WeightLink(
        store,
        plan.transport,
        member=member,
        members=members,
        device=device,
        timeout_s=plan.timeout_s,
        bucket_bytes=BUCKET_BYTES,
    )
    results.put((member, os.getpid()))
    engine = None if member == 0 else spoiled_engine(plan, plan.spoiled.get(member, ""))
    for version in range(1, plan.versions + 1):
        source, started = tiny_model(version, plan), time.monotonic()
        try:
            if engine is None:
                manifest = plan_weights(shapes_of(source.named_parameters()), version, BUCKET_BYTES)
                tensors = interrupted(source, half, go_on, is_paused=plan.pause_in == version)
                report = send_weights(link, tensors, manifest)
                results.put((member, (report, len(list(tensors)) == 0)))
            else:
                wanted = 99 if plan.spoiled.get(member) == f"version {version}" else version
                report = receive_weights(link, dict(engine.named_parameters()), wanted)
                pairs = zip(engine.parameters(), source.parameters(), strict=True)
                results.put(
                    (member, (report, all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)))
                )
        except RuntimeError as error:
            results.put((member, (str(error), time.monotonic() - started)))
    link.close()
    results.put((member, "end"))


def spoiled_engine(plan: Plan, what: str) -> torch.nn.Module:
    """The engine's own random model, with a fault."""
    engine = tiny_model(100, plan, hidden_size=64 if what == "shape" else 32)
    if what == "name":
        engine.register_parameter("surplus", torch.nn.Parameter(torch.zeros(3)))
    return engine


def interrupted(
    model: torch.nn.Module, half: Event, go_on: Event, *, is_paused: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """The parameters; with `is_paused` the test is told when most are on their way, and the rest waits for it."""
    parameters = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    for index, (name, tensor) in enumerate(parameters):
        if is_paused and index == len(parameters) - 3:
            half.set()
            go_on.wait(60)
        yield name, tensor

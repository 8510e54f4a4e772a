"""What each rank of a sharded learner holds at most while it loads, steps, publishes, saves and resumes.

python -m benchmarks.learner_load shape=CONFIG [ranks=4] [backend=fsdp] [dtype=] [json=true] ...

CONFIG is a config.json or its folder; random weights of that shape, with a vocabulary of at most 32,000, are written
into a safetensors folder first. The ranks are processes with gloo, on CPUs. A peak counts a process's anonymous and
shared memory (RssAnon and RssShmem of /proc/self/status, read every millisecond) above what it had before the learner
was made; mapped files, which the system takes back when it wants to, are not counted. The bound is
1.15 x (shards + 2 x the largest layer) + activations + buckets; layers are reckoned in float32, embeddings and head
together count as one. Status 1 when a peak is above its bound.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks import figures, models
from benchmarks.process import FREED_AT_ONCE, end_with_terminate, measure
from benchmarks.workload import TINY_POLICY
from infsample_rl.config import (
    DTYPES,
    ClusterConfig,
    Config,
    DataConfig,
    LearnerConfig,
    ModelConfig,
    ObjectiveConfig,
    RewardConfig,
    RewardFunctionConfig,
    RolloutConfig,
    RunConfig,
)
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.learner.deepspeed_config import BUCKET_ELEMENTS
from infsample_rl.learner.worker import LearnerWorker
from infsample_rl.model.peak_memory import status_bytes
from infsample_rl.model.tensor_files import TensorFile
from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES, shapes_of
from infsample_rl.plan.learner_memory import row_lines
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.types import LossTotals

LARGEST_VOCAB = 32_000
PHASES = ("load", "first step", "publish", "save", "resume")


@dataclass(kw_only=True)
class LearnerLoadOptions:
    """Arguments of this command."""

    shape: str = option(TINY_POLICY, "config.json of the model, or its folder")
    ranks: int = option(4, "processes that share the policy", low=2)
    backend: str = option("fsdp", "deepspeed: its stage 3", choices=("fsdp", "deepspeed"))
    dtype: str = option("float32", "model.dtype; masters are float32", choices=DTYPES[:2])
    group_size: int = option(4, "responses of the one row that a rank trains", low=1)
    tokens: int = option(64, "tokens of the prompt, and of each response", low=2)
    step: bool = option(True, "false: load, publish, save and resume alone")
    timeout_s: float = option(1800.0, "seconds that loading to saving, and resuming, may take each", low=1)
    json: bool = option(False, "one JSON object per phase and rank on stdout, and nothing else there")


def main() -> int:
    """Measure; 1 when a peak is above its bound."""
    end_with_terminate()
    return run_with_options(run, LearnerLoadOptions, usage=__doc__)


def run(options: LearnerLoadOptions) -> int:
    """As main(). ValueError for a shape that is none."""
    try:
        architecture = AutoConfig.from_pretrained(options.shape)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"shape={options.shape}: no model config there ({str(error).splitlines()[0][:160]})") from None
    architecture = architecture.get_text_config()
    architecture.vocab_size = min(LARGEST_VOCAB, architecture.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        print(f"benchmarks.learner_load: writing random weights of {options.shape} ...", file=sys.stderr, flush=True)
        write_weights(architecture, Path(folder) / "model")
        found = [*on_all_ranks(options, folder, "train"), *on_all_ranks(options, folder, "resume")]
    found.sort(key=lambda record: (PHASES.index(record["phase"]), record["rank"]))
    for record in found:
        if options.json:
            print(json.dumps(record | {"workload": asdict(options)}), flush=True)
    if not options.json:
        figures.print_records(found, COLUMNS)
    return int(any(record["peak_bytes"] > record["bound_bytes"] for record in found))


def write_weights(architecture: PretrainedConfig, folder: Path) -> None:
    """A Hugging Face folder of random bfloat16 weights, written a tensor at a time, with a tokenizer of numbers."""
    with torch.device("meta"):
        outline = AutoModelForCausalLM.from_config(architecture, dtype=torch.bfloat16)
    outline.save_pretrained(folder, state_dict={})
    models.number_tokenizer(architecture.vocab_size).save_pretrained(folder)
    file = TensorFile(folder / "model.safetensors", shapes_of(outline.named_parameters()))
    generator = torch.Generator().manual_seed(0)
    for name, parameter in outline.named_parameters():
        value = torch.empty(parameter.shape, dtype=torch.bfloat16)
        file.write(name, value.normal_(0.0, 0.02, generator=generator) if value.ndim > 1 else value.fill_(1.0))
    file.close()


def on_all_ranks(options: LearnerLoadOptions, folder: str, job: str) -> list[dict[str, Any]]:
    """The records of all ranks, each a process of its own."""
    print(f"benchmarks.learner_load: {job} on {options.ranks} ranks ...", file=sys.stderr, flush=True)

    def rank(number: int) -> list[dict[str, Any]]:
        spec = asdict(options) | {"rank": number, "folder": folder, "job": job}
        return measure(
            "learner_load.measure_here", spec, threads=1, timeout_s=options.timeout_s, environment=FREED_AT_ONCE
        )

    with ThreadPoolExecutor(options.ranks) as pool:
        return [record for records in pool.map(rank, range(options.ranks)) for record in records]


def settings_of(options: LearnerLoadOptions, model: str) -> Config:
    """The configuration of a learner that trains one row on each rank."""
    return Config(
        run=RunConfig(),
        model=ModelConfig(path=model, dtype=options.dtype),
        data=DataConfig(source="unused.jsonl", max_prompt_tokens=options.tokens, prompts_per_step=options.ranks),
        rollout=RolloutConfig(group_size=options.group_size, max_new_tokens=options.tokens),
        objective=ObjectiveConfig(kl_coef=0.0, mismatch_stop=1e9, mismatch_stop_float32=1e9),  # no engine has sampled
        reward=RewardConfig(functions=[RewardFunctionConfig(name="gsm8k")]),
        learner=LearnerConfig(
            backend=options.backend,
            zero_stage=3 if options.backend == "deepspeed" else LearnerConfig().zero_stage,
            max_tokens_per_micro_batch=(options.group_size + 1) * options.tokens,
        ),
        cluster=ClusterConfig(learner_ranks=options.ranks),
    )


def measure_here(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """The records of one rank: job=train loads, steps, publishes and saves; job=resume loads what was saved."""
    rank, folder = spec.pop("rank"), Path(spec.pop("folder"))
    job = spec.pop("job")
    options = LearnerLoadOptions(**spec)
    config = settings_of(options, str(folder / "model"))
    if options.backend == "deepspeed":  # what it imports is the interpreter's own
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed  # noqa: F401
    worker = LearnerWorker(config, rank, options.ranks, total_steps=10)
    meeting = meet(worker, folder / f"meeting_{job}")
    peaks = Peaks()
    checkpoint = None if job == "train" else str(folder / "checkpoint")
    with peaks.of("load" if job == "train" else "resume"):
        worker.setup(checkpoint, meeting)
    facts = {"load": held_bytes(worker)} if job == "train" else {"resume": held_bytes(worker)}
    if job == "train":
        if options.step:
            with peaks.of("first step"):
                step(worker, options)
            facts["first step"] = held_bytes(worker)
        with peaks.of("publish"):
            deque(worker.publisher.export(1)[1], maxlen=0)
        with peaks.of("save"):
            worker.save(str(folder / "checkpoint"))
    after = held_bytes(worker)
    outline = ModelOutline.of(config)
    worker.close()
    stated = stated_bytes(config, outline)
    layer = 4 * max(outline.layer_parameters, outline.root_parameters)
    records = []
    for phase, peak in peaks.found.items():
        shards = facts.get(phase, after)
        if phase == "first step":  # gradients, which are gone after it
            shards += 4 * outline.num_parameters // options.ranks
        bound = int(1.15 * (shards + 2 * layer)) + sum(stated.get(phase, {}).values())
        records.append(
            {
                "phase": phase,
                "rank": rank,
                "peak_bytes": peak,
                "shard_bytes": shards,
                "largest_layer_bytes": layer,
                "stated_bytes": stated.get(phase, {}),
                "bound_bytes": bound,
                "parameters": outline.num_parameters,
                "seconds": peaks.seconds[phase],
            }
        )
    return records


def meet(worker: LearnerWorker, path: Path) -> Any:
    """Rank 0's store, of which the ranks tell each other by a file."""
    store = dist.FileStore(str(path), worker.world_size)
    if worker.rank == 0:
        store.set("meeting", pickle.dumps(worker.host_store("127.0.0.1")).hex())
    return pickle.loads(bytes.fromhex(store.get("meeting").decode()))


class Peaks:
    """The most memory of this process within each phase, above what it had at construction."""

    def __init__(self) -> None:
        self.found: dict[str, int] = {}
        self.seconds: dict[str, float] = {}
        self._before = own_bytes()

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Watch while the body runs."""
        ended, peak = threading.Event(), own_bytes()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.001):
                peak = max(peak, own_bytes())

        watcher = threading.Thread(target=watch)
        started = time.perf_counter()
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
        self.found[phase] = max(peak, own_bytes()) - self._before
        self.seconds[phase] = time.perf_counter() - started


def own_bytes() -> int:
    """Anonymous and shared memory of this process."""
    return status_bytes("RssAnon") + status_bytes("RssShmem")


def step(worker: LearnerWorker, options: LearnerLoadOptions) -> None:
    """One update of one row on each rank."""
    generator = np.random.default_rng(worker.rank)
    vocab = len(worker.tokenizer)
    prompt = generator.integers(3, vocab, options.tokens).astype(np.int32)
    samples = [
        models.random_sample((worker.rank, index), prompt, options.tokens, vocab, generator)
        for index in range(options.group_size)
    ]
    count = options.group_size * options.ranks
    totals = LossTotals(num_sequences=count, num_tokens=count * options.tokens, length_normalizer=options.tokens)
    worker.accumulate(samples, totals)
    worker.step(totals)


def held_bytes(worker: LearnerWorker) -> int:
    """This rank's shards: masters and moments, and DeepSpeed's weights in the model's dtype, which are apart."""
    backend: Any = worker.backend
    if worker.config.learner.backend == "deepspeed":
        parts = [parameter.ds_tensor for parameter in backend.names.values()]
        parts += backend._shards()
        parts += [value for shard in backend._shards() for value in backend.optimizer.state[shard].values()]
        parts.append(backend.zero.grad_partitions_flat_buffer)
    else:
        parts = list(backend.shards.values())
        parts += [value for state in backend.optimizer.state.values() for value in state.values()]
    return sum(own_part(part).nbytes for part in parts if isinstance(part, Tensor))


def own_part(tensor: Tensor) -> Tensor:
    """Of a DTensor what this rank has."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def stated_bytes(config: Config, outline: ModelOutline) -> dict[str, dict[str, int]]:
    """Of the phases that have any: activations as `plan` counts them, and the buckets that are stated."""
    stated: dict[str, dict[str, int]] = {
        "first step": {"activations": sum(row_lines(config, outline).values())},
        "publish": {"piece of the weights": min(BUCKET_BYTES, 2 * outline.num_parameters)},
    }
    if config.learner.backend == "deepspeed":
        bucket = 4 * min(BUCKET_ELEMENTS, outline.num_parameters)
        for phase in PHASES:
            stated[phase] = stated.get(phase, {}) | {"reduction bucket": bucket}
    return stated


COLUMNS = {
    "phase": "phase",
    "rank": "rank",
    "peak_bytes": "peak MB",
    "shard_bytes": "shards MB",
    "largest_layer_bytes": "largest layer MB",
    "bound_bytes": "bound MB",
    "seconds": "s",
}


if __name__ == "__main__":
    sys.exit(main())

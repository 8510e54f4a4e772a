"""Run by the interpreter that has vLLM: samples of its engine under several settings.

vllm_script.py MODEL SETTINGS OUT: SETTINGS is a JSON list of [name, rollout settings, options of generate()], OUT a
file.
"""

from __future__ import annotations

import json
import sys
from itertools import chain, islice
from pathlib import Path

import torch

from infsample_rl.config import ClusterConfig, Config, DataConfig, ModelConfig, RolloutConfig
from infsample_rl.config.reward import RewardConfig, RewardFunctionConfig
from infsample_rl.model.peak_memory import status_bytes
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.model.weight_sync.buckets import plan_weights, shapes_of, stream_buckets
from infsample_rl.model.weight_sync.sync import load_published
from infsample_rl.rollout.engine.vllm_engine import VLLMEngine
from infsample_rl.types import EngineFailed

GPUS = int(torch.cuda.is_available())
DTYPE = "bfloat16" if GPUS else "float32"  # vLLM's attention has no other on a GPU


def config_of(model: str, settings: dict, *, takes_turns: bool = False) -> Config:
    return Config(
        cluster=ClusterConfig(
            colocate=takes_turns, rollout_workers=1, learner_ranks=1, rollout_gpus=GPUS, learner_gpus=GPUS
        ),
        model=ModelConfig(path=model, dtype=DTYPE),
        rollout=RolloutConfig(engine="vllm", **settings),
        data=DataConfig(source="any", max_prompt_tokens=128),
        reward=RewardConfig(functions=[RewardFunctionConfig(name="kk")]),
    )


def publish(engine: VLLMEngine, folder: str, *, fails_after: int | None = None) -> None:
    """Weights of another folder, as the learner sends them; `fails_after`: so many buckets, after which none comes."""
    from infsample_rl.model.loading import load_model

    named = list(load_model(ModelConfig(path=folder, dtype=DTYPE)).named_parameters())
    manifest = plan_weights(shapes_of(named), 1, 2**16)
    buckets = (bucket.copy() for bucket in stream_buckets(named, manifest))
    if fails_after is not None:
        buckets = chain(islice(buckets, fails_after), (1 / 0 for _ in range(1)))
    load_published(engine.parameters, manifest, buckets, engine.load)
    engine.begin_version(1)


def held_bytes() -> int:
    """What this process holds on the GPU, or by itself in host memory."""
    if not GPUS:
        return status_bytes("RssAnon")
    free, total = torch.cuda.mem_get_info()
    return total - free


def take_turns(config: Config, options: dict, weights: str) -> dict:
    """Samples of a first turn and, with other weights, of a second, and what is held in between."""
    engine = VLLMEngine(config, load_tokenizer(config.model))
    held, tokens, refused = [held_bytes()], [], ""
    try:
        engine.generate(options["prompts"], seed=0, step=1)
    except RuntimeError as error:
        refused = str(error)
    for folder in (config.model.path, weights):
        publish(engine, folder)
        held.append(held_bytes())
        groups = engine.generate(options["prompts"], seed=0, step=1)
        tokens.append([[sample.token_ids.tolist() for sample in group] for group in groups])
        engine.rest()
        held.append(held_bytes())
    try:
        publish(engine, weights, fails_after=2)
    except EngineFailed as error:
        broken = str(error)
    return {"held": held, "tokens": tokens, "refused": refused, "broken": broken}


def main(model: str, asked: list, out: str) -> None:
    found = {}
    for name, settings, options in asked:
        options = dict(options)
        prompts, weights = options.pop("prompts"), options.pop("weights", None)
        if options.pop("turns", False):
            found[name] = take_turns(config_of(model, settings, takes_turns=True), {"prompts": prompts}, weights)
            continue
        config = config_of(model, settings)
        engine = VLLMEngine(config, load_tokenizer(config.model), stop_token_ids=set(options.pop("stops", [])) or None)
        if weights is not None:
            publish(engine, weights)
        groups = engine.generate(prompts, seed=0, step=1, **options)
        found[name] = {
            "tokens": [[sample.token_ids.tolist() for sample in group] for group in groups],
            "reasons": [[sample.finish_reason for sample in group] for group in groups],
            "logprobs": [[sample.logprobs.tolist() for sample in group] for group in groups],
            "sampling_logprobs": [
                [None if sample.sampling_logprobs is None else sample.sampling_logprobs.tolist() for sample in group]
                for group in groups
            ],
            "versions": sorted({sample.policy_version for group in groups for sample in group}),
            "steps": engine.stats.running_steps,
            "preemptions": engine.stats.preemptions,
            "recomputed": engine.stats.recomputed_tokens,
            "cached": engine.stats.cached_tokens,
            "pages": engine.num_pages,
            "peak_bytes": engine.stats.peak_kv_bytes,
            "pages_held": engine.pages_now()[1],
        }
        del engine
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]), sys.argv[3])

"""Which engine a rollout worker has."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from infsample_rl.config import Config
from infsample_rl.model.loading import load_model
from infsample_rl.model.lora import ReceivedAdapters
from infsample_rl.model.peak_memory import PeakMemory
from infsample_rl.rollout.engine.rollout_engine import RolloutEngine
from infsample_rl.rollout.engine.sampling_engine import SamplingEngine


def open_engine(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    memory: PeakMemory,
    model: PreTrainedModel | None = None,
    *,
    reserved_bytes: int = 0,
) -> RolloutEngine:
    """The engine of a run, beside which `reserved_bytes` are left to a learner that is still to come. `model`: the
    policy, where this process has it already; else it is loaded. `memory`: of this process, which forgets what loading
    took."""
    if config.rollout.engine == "vllm":
        from infsample_rl.rollout.engine.vllm_engine import VLLMEngine

        sharers = config.cluster.rollout_workers
        return VLLMEngine(config, tokenizer, sharers=sharers, reserved_bytes=reserved_bytes, shared_probe=True)
    if model is None:
        model = load_model(config.model, torch.device("cuda" if config.cluster.rollout_gpus > 0 else "cpu"))
        memory.reset()  # pages of the file that was read, which the system takes back when it wants to
    merges = config.learner.sends_adapters and not config.shares_process
    return SamplingEngine(
        model,
        tokenizer,
        config.rollout,
        max_prompt_tokens=config.data.max_prompt_tokens,
        lm_head_fp32=config.model.lm_head_fp32,
        shared_probe=True,
        reserved_bytes=reserved_bytes,
        sharers=config.cluster.rollout_workers,
        gpu_part=config.cluster.rollout_gpus or 1.0,
        exact=config.is_deterministic,
        # Before the engine is built: the model holds the base weights, which adapters are merged into.
        adapters=ReceivedAdapters(model, config.learner) if merges else None,
    )

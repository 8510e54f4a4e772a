"""The sampling engine: a model's KV pool, its decode step, and the loop that runs a schedule on them."""

from infsample_rl.rollout.engine.sampling_engine import SamplingEngine

__all__ = ["SamplingEngine"]

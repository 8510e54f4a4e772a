"""The sampling engine (sampling_engine.py): a model's KV pool, its decode step, and the loop that runs a schedule."""

"""Sampling: the engine, its schedules and kernels, and what predicts lengths."""

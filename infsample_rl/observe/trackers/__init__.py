"""Where a run's log goes: the screen, JSONL records, the timeline, and W&B, TensorBoard and MLflow."""

"""What python -m infsample_rl runs beside training."""

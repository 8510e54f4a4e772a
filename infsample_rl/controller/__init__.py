"""The run: one step, recovery, checkpoints, and what is checked and recorded on the way."""

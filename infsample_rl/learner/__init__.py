"""The update: rows, losses, backends and checkpoints of a learner rank, and the reference worker."""

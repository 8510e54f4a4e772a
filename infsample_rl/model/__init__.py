"""Models, what goes into them, and their weights on the way to other processes."""

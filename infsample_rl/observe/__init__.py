"""What is seen of a run: phases, timeline, metrics, health, the screen, trackers and the report."""

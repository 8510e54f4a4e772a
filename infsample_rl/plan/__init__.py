"""What a run will take, from its settings and the model's config alone: memory of every process, time of a
decode step."""

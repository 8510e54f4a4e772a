"""Which samples decode next: schedules, the planner of a running step, and the pages it plans with. No tensors."""

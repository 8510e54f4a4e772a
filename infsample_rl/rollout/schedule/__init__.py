"""Which samples decode next: schedules, the planner of a running step, and the pages it plans with. No tensors."""

from infsample_rl.rollout.schedule.fptas import fptas_groups

__all__ = ["fptas_groups"]

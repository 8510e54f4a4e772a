"""What makes simulation fast: many steps of the same rows taken at once. Plain ints.

Every count is left as the engine's own planner would: tests/rollout/schedule/test_fast_forward.py holds it on random
workloads.
"""

from __future__ import annotations

from bisect import bisect_right

from infsample_rl.rollout.schedule.step_planner import StepPlanner


def repeat_steps(planner: StepPlanner, most: int) -> int:
    """Up to `most` steps of the same rows, as that many next_step() and end_step([]) would take them; how many it were.

    No row may end before the last of them. None are taken before a planned step has passed in which nobody came or
    went: whoever that one refused stays refused until a row leaves, since the tokens that rows hold and their expected
    lengths only grow and free pages only get fewer; once pages are taken from preempted samples none are free, and such
    a sample returns only where some stay free. Preempting rows is left to next_step().
    """
    if not planner.is_settled:
        return 0
    pool, rows = planner.pool, planner.running
    size = pool.page_size

    def lacking(steps: int) -> list[int]:
        return [max(0, -(-(sample.num_tokens + steps - 1) // size) - len(sample.pages)) for sample in rows]

    in_reach = pool.num_free + sum(len(sample.pages) for sample in planner.line)
    room = (in_reach + sum(len(sample.pages) for sample in rows)) * size - sum(sample.num_tokens for sample in rows)
    # even if every row's last page held one token
    sure = min(most, max(0, (room - len(rows) * (size - 1)) // len(rows) + 1))
    possible = min(most, room // len(rows) + 1)  # if all were full
    count = sure + bisect_right(range(sure + 1, possible + 1), in_reach, key=lambda steps: sum(lacking(steps)))
    if count <= 0:
        return 0
    wanted = lacking(count)
    _take_from_line(planner, sum(wanted) - pool.num_free)
    for sample, pages in zip(rows, wanted, strict=True):
        sample.pages += pool.take(pages)
        sample.num_tokens += count
    planner.num_tokens += count * len(rows)
    planner.row_steps += count * len(rows)
    planner.running_steps += count
    return count


def _take_from_line(planner: StepPlanner, count: int) -> None:
    """Take `count` pages from preempted samples, from the back of the line, as the planner would one by one."""
    while planner.policy is not None and count > 0:
        donors = [sample for sample in planner.line if sample.pages]
        pages = donors[planner.policy.donor(donors)].pages
        kept = max(0, len(pages) - count)
        count -= len(pages) - kept
        planner.pool.release(pages[kept:])
        del pages[kept:]

"""The plan on the screen."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from infsample_rl.plan.devices import gigabytes
from infsample_rl.plan.processes import is_here
from infsample_rl.plan.run_plan import RolePlan, RunPlan


def print_plan(plan: RunPlan, console: Console) -> None:
    """A table for every role and how long decoding takes; then, which needs seconds, the largest settings and what to
    change."""
    console.print(f"{plan.model}, {plan.parameters:,} parameters, {plan.dtype}")
    for role in plan.roles:
        console.print(_table(role))
        console.print(_verdict(role), soft_wrap=True)
    if plan.host_bytes > 0 and (len(plan.roles) > 1 or plan.roles[0].process.gpus):
        verdict = "" if plan.host_bytes <= plan.host_room else ": DOES NOT FIT"
        together = (
            f"host memory of all processes together: {gigabytes(plan.host_bytes)} of "
            f"{gigabytes(plan.host_room)} free here{verdict}"
        )
        console.print(together, soft_wrap=True)
    if plan.unchecked_bytes > 0:
        unchecked = f"host memory of all processes on GPUs: {gigabytes(plan.unchecked_bytes)}"
        console.print(f"{unchecked}, not compared with any: that of their machines is not known here", soft_wrap=True)
    console.print(_decoding(plan), soft_wrap=True)
    waiting = f"finished samples that wait for the learner: at most {gigabytes(plan.waiting_bytes)}"
    console.print(f"{waiting} of Ray's object store", soft_wrap=True)
    for role in plan.roles:
        if limits := role.limits:
            console.print(f"{role.process.role}: {'; '.join(limits)}", soft_wrap=True)
    for role in plan.roles:
        if not role.fits:
            console.print(f"change first for the {role.process.role}: {_advice(role)}", style="bold", soft_wrap=True)
    if plan.host_bytes > plan.host_room and all(role.fits for role in plan.roles):
        in_host = [role.process for role in plan.roles if role.process.gpus == 0 or plan.unchecked_bytes == 0]
        most = max(in_host, key=lambda process: process.count * process.host_bytes)
        advice = (
            f"fewer or smaller of the {most.count} x {most.role}, which take "
            f"{gigabytes(most.count * most.host_bytes)}, or more machines"
        )
        console.print(f"change first for the processes together: {advice}", style="bold", soft_wrap=True)


def _advice(role: RolePlan) -> str:
    if not role.advice:
        return f"a {'GPU' if role.process.gpus else 'machine'} with more memory: no setting that is known does it"
    is_unchecked = any("offload" in setting for setting in role.advice) and not is_here(role.config)
    return " ".join(role.advice) + (" (its host memory is not known here)" if is_unchecked else "")


def _table(role: RolePlan) -> Table:
    process = role.process
    each = f"{process.count} x {process.role}" + (f", {process.gpus:g} GPU each" if process.gpus else ", CPU")
    table = Table(title=each, title_justify="left", show_header=False, min_width=52)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, size in process.lines.items():
        table.add_row(name, gigabytes(size))
    table.add_section()
    table.add_row("sum", gigabytes(process.sum_bytes), style="bold")
    for name, size in process.host_lines.items():
        table.add_row(f"in host memory: {name}", gigabytes(size), style="dim")
    return table


def _verdict(role: RolePlan) -> str:
    sizes = f"{gigabytes(role.process.sum_bytes)} of {gigabytes(role.device.usable_bytes)}"
    return f"{'fits' if role.fits else 'DOES NOT FIT'} in {role.device.name}: {sizes}"


def _decoding(plan: RunPlan) -> str:
    decode, lengths = plan.decode, plan.decode.lengths
    if decode.simulated_samples != decode.samples:
        lengths += f"; from {decode.simulated_samples:,} of {decode.samples:,} samples"
    if decode.drafts is None:
        lengths += "; drafted tokens, which take fewer, not counted"
    elif decode.drafts:
        lengths += f"; up to {decode.drafts} drafted tokens, {decode.tokens_per_row_step:.2g} tokens a row and step"
    return (
        f"decoding: {decode.running_steps:,} running steps ({lengths}), {decode.mean_rows:.1f} rows on average, each "
        f"at least {1e3 * decode.step_seconds:.3g} ms by the roofline: {decode.seconds:.3g} s"
    )

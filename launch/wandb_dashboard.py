"""The team's W&B workspace: python launch/wandb_dashboard.py project=PROJECT [entity=TEAM] [name=TITLE] [json=true]

A saved view of a project: what decides about a run first, then a section for every group of metrics, all over `step`,
with titles that give the unit. Needs wandb-workspaces (pip install -e .[wandb-workspaces]), and a key unless
json=true, which prints the view and saves nothing. Run it again after an update; it makes a new view, older ones stay.
Exit codes: 0 done; 1 W&B refused it; 2 wrong use.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any

from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.observe.metric_names import GROUPS, METRICS
from infsample_rl.observe.trackers.wandb_tracker import has_wandb_key

OVERVIEW = (  # title, metrics
    ("reward", ("reward/mean",)),
    ("held-out accuracy", ("eval/accuracy",)),
    ("response length, tokens", ("response/length_mean", "response/length_max")),
    ("share of groups with a signal, of samples cut", ("reward/groups_with_signal", "response/cut")),
    ("entropy, nats", ("learner/entropy",)),
    ("KL to the reference, nats", ("learner/kl",)),
    ("engine and learner: mean difference of log-probabilities, nats", ("learner/logprob_diff_mean",)),
    (
        "seconds of a step and its parts",
        ("timing/step", "timing/rollout", "timing/backward_after_rollout", "timing/update"),
    ),
    ("KV of sampling, bytes", ("rollout/peak_kv_bytes", "rollout/kv_pool_bytes")),
)


@dataclass(kw_only=True)
class DashboardOptions:
    """Arguments of the command."""

    project: str = option("infsample_rl", "W&B project, as in logging.wandb_project")
    entity: str = option("", "user or team that owns it; empty: the key's own")
    name: str = option("infsample_rl", "title of the view")
    json: bool = option(False, "print the view, and save nothing")


def build_workspace(options: DashboardOptions) -> Any:
    """The view, not saved yet."""
    import wandb_workspaces.reports.v2 as panels
    import wandb_workspaces.workspaces as workspaces

    def lines(title: str, names: tuple[str, ...]) -> Any:
        return panels.LinePlot(title=title, x="step", y=list(names))

    def section(name: str, shown: list[Any], *, is_open: bool = False) -> Any:
        axis = workspaces.SectionPanelSettings(x_axis="step")
        return workspaces.Section(name=name, panels=shown, is_open=is_open, panel_settings=axis)

    tables = [panels.WeavePanelSummaryTable(table_name="completions")]
    sections = [section("overview", [lines(*entry) for entry in OVERVIEW], is_open=True)]
    sections.append(section("samples", tables, is_open=True))
    for group in GROUPS:
        names = [name for name in METRICS if name.startswith(group + "/") and "<" not in name]
        sections.append(section(group, [lines(_title(name), (name,)) for name in names]))
    settings = workspaces.WorkspaceSettings(x_axis="step", group_by_prefix="first")
    return workspaces.Workspace(
        entity=options.entity, project=options.project, name=options.name, sections=sections, settings=settings
    )


def _title(name: str) -> str:
    unit = METRICS[name].unit
    return name.partition("/")[2] + (f", {unit}" if unit != "-" else "")


def main() -> int:
    """Build the view, and save or print it."""
    return run_with_options(build, DashboardOptions, usage=__doc__)


def build(options: DashboardOptions) -> int:
    """As main()."""
    try:
        workspace = build_workspace(options)
    except ImportError as error:
        raise ValueError(f"{error.name} is not installed: pip install -e .[wandb-workspaces]") from None
    if options.json:
        print(json.dumps(workspace._spec, indent=1))
        return 0
    if not has_wandb_key():
        raise ValueError("saving needs a key: set WANDB_API_KEY, run `wandb login`, or print the view with json=true")
    return save(workspace)


def save(workspace: Any) -> int:
    """Save the view and print its address; 0. RuntimeError where W&B refuses it."""
    import wandb

    try:
        workspace.entity = workspace.entity or wandb.Api().default_entity
        workspace.save()
    except Exception as error:  # the client's, the server's or the network's: whatever it is, the view is not saved
        raise RuntimeError("not saved: " + " ".join(str(error).split())[:300]) from None
    print(workspace.url)
    return 0


if __name__ == "__main__":
    sys.exit(main())

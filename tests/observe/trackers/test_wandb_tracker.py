"""What W&B is given: read back from its offline file, and from a recording server on the loopback address."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path

import pytest

from infsample_rl.observe.metric_names import GROUPS

BLOCK = 32_768


@pytest.fixture
def offline(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))


def records(store: Path) -> list:
    """Every record of a .wandb file: LevelDB's log format, blocks of 32 KiB, behind a header of 7 bytes (W&B's own
    reader is not public)."""
    from wandb.proto import wandb_internal_pb2

    data, at, found, parts = store.read_bytes(), 7, [], []
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:  # too little left for a record's header: padding
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    return found


def finished_records(store: Path) -> list:
    """The records, once W&B's own process has written the last of them: it does so beside this one."""
    for _ in range(600):
        found = records(store)
        if any(record.WhichOneof("record_type") == "exit" for record in found):
            return found
        time.sleep(0.1)
    raise AssertionError(f"after a minute {store} has no end: {[record.WhichOneof('record_type') for record in found]}")


def rows(found: list) -> list[dict]:
    """Rows of metrics as dicts."""
    items = [
        [("/".join(item.nested_key) or item.key, json.loads(item.value_json)) for item in record.history.item]
        for record in found
    ]
    return [dict(pairs) for pairs in items if pairs]


def test_offline_file_has_every_group_over_step_and_a_table(offline, log_run, tmp_path):
    log_run(tmp_path, range(1, 3), wandb="offline", upload_completions=True)
    (store,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    found = finished_records(store)
    defined = {
        record.metric.name or record.metric.glob_name: record.metric
        for record in found
        if record.WhichOneof("record_type") == "metric"
    }
    assert {f"{group}/*" for group in GROUPS} | {"completions"} <= set(defined)
    assert all(metric.step_metric == "step" for name, metric in defined.items() if name != "step")
    assert defined["step"].options.hidden and defined["eval/accuracy"].summary.max
    history = rows(found)
    steps = [row for row in history if "reward/mean" in row]
    assert [(row["step"], row["reward/mean"]) for row in steps] == [(1, 0.1), (2, 0.2)] and "learner/kl" not in steps[0]
    table = {key: value for key, value in steps[0].items() if key.startswith("completions")}
    assert "table-file" in json.dumps(table)


@pytest.mark.parametrize("project", ["team/project", "50%", "p" * 129])
def test_a_project_that_wandb_would_refuse_is_refused_before_anything_is_written(offline, log_run, tmp_path, project):
    with pytest.raises(ValueError, match=r"logging.wandb_project must be up to 128 characters without any of .*, got"):
        log_run(tmp_path / "run", range(1, 2), wandb="offline", wandb_project=project)
    assert not (tmp_path / "run").exists()
    log_run(tmp_path / "run", range(1, 2), wandb="disabled", wandb_project=project)


def test_whatever_else_wandb_refuses_is_one_line(offline, log_run, tmp_path, monkeypatch):
    import wandb

    def refuse(**_):
        raise wandb.errors.UsageError("no\nmore")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(ValueError, match="^logging.wandb=offline cannot be used: no; logging.wandb=disabled does"):
        log_run(tmp_path, range(1, 2), wandb="offline")


def test_online_run_reports_to_the_server_and_a_resumed_one_goes_on_under_its_id(recorder, log_run, tmp_path):
    log_run(tmp_path, range(1, 4), wandb="online")
    run_id = (tmp_path / "wandb_id").read_text().strip()
    upserts = [variables for name, variables in recorder.queries if name == "UpsertBucket"]
    assert {variables["name"] for variables in upserts} == {run_id} and upserts[0]["project"] == "infsample_rl"
    assert [row["step"] for row in recorder.history() if "reward/mean" in row] == [1, 2, 3]
    assert not any("completions" in name for name in recorder.uploaded), "samples only where they are asked for"
    log_run(tmp_path, range(3, 5), start_step=2, wandb="online", upload_completions=True)
    assert any("media/table/completions" in name for name in recorder.uploaded)
    assert {variables["name"] for name, variables in recorder.queries if name == "UpsertBucket"} == {run_id}
    assert [row["step"] for row in recorder.history() if "reward/mean" in row] == [1, 2, 3, 3, 4]

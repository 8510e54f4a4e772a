"""Parts of a real run are lost while it runs: it goes on, and the result is that of a run that was never disturbed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from datetime import date
from pathlib import Path
from typing import Any

import psutil
import pytest

from infsample_rl.commands import chaos
from infsample_rl.observe.phases import phase_of
from infsample_rl.observe.records import read_records

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not Path("/proc/self/comm").exists(), reason="reads /proc"),
]
SETTINGS = """
rollout.group_size=6 rollout.slots=3 rollout.micro_group_size=1 rollout.max_new_tokens=48
objective.kl=k3 objective.kl_coef=0.05 run.checkpoint_every=2 run.steps=4 run.deterministic=true
cluster.rollout_workers=2 cluster.learner_ranks=2 cluster.progress_timeout_s=120
"""


@pytest.fixture(scope="module")
def settings(tiny_run) -> list[str]:
    """A bitwise repeatable run of short steps, with every kind of worker."""
    return [*tiny_run, *SETTINGS.split()]


@pytest.fixture(scope="module")
def undisturbed(train, settings) -> Path:
    return train(*settings).folder


def command(settings: list[str], run: Path, *changes: str) -> list[str]:
    return [sys.executable, "-m", "infsample_rl.main", *settings, f"run.dir={run}", *changes]


def steps_done(run: Path) -> int:
    return max((record["step"] for record in read_records(run / "metrics.jsonl")), default=0)


def wait_for(condition: Callable[[], Any], target: chaos.Target, seconds: float = 300.0) -> Any:
    """What the condition finds, once it finds something."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert target.driver.poll() is None and time.monotonic() < deadline, Path(target._log.name).read_text()[-3000:]
        time.sleep(0.002)
    return found


def first_in(target: chaos.Target, role: str, wanted: str, but: Collection[int] = ()) -> int | None:
    """A process of this role in this phase, but for some."""
    found = (pid for pid, roles in target.processes() if role in roles and pid not in but)
    return next((pid for pid in found if phase_of(pid) == wanted), None)


def decoding(target: chaos.Target) -> list[int]:
    """Processes of the rollout workers, if all decode."""
    found = [pid for pid, roles in target.processes() if "rollout" in roles]
    return found if all(phase_of(pid) == "decode" for pid in found) else []


def throttle(pid: int, *, on_s: float, off_s: float) -> None:
    """Let a process run for on_s, after it has stood still for off_s."""
    for number, seconds in ((signal.SIGSTOP, off_s), (signal.SIGCONT, on_s)):
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, number)
        time.sleep(seconds)


def hit(
    settings: list[str],
    folder: Path,
    places: list[tuple[str, str]],
    number: int,
    *changes: str,
    said: str = "",
) -> str:
    """Send a signal to a worker in a phase, once a step is done, at each of the places in turn, the next when the run
    has `said` that it went on; of a kind that was hit before, to a process that was not there then. What the run,
    which must end well, printed."""
    run = folder / "run"
    target = chaos.Target(command(settings, run, *changes), run)
    printed = Path(target._log.name)
    try:
        wait_for(lambda: steps_done(run) >= 1, target)
        old = set[int]()
        for count, place in enumerate(places):
            wait_for(lambda count=count: len(re.findall(said, printed.read_text())) >= count, target)
            os.kill(wait_for(lambda place=place, old=old: first_in(target, *place, old), target), number)
            kind = place[0].split()[0]  # of a reference worker and its ranks
            old = old | {pid for pid, roles in target.processes() if any(role.split()[0] == kind for role in roles)}
        assert target.driver.wait(timeout=400) == 0, printed.read_text()[-3000:]
        return printed.read_text()
    finally:
        target.end()


def test_a_killed_worker_is_replaced_and_nothing_else_changes(settings, undisturbed, tmp_path):
    """A rollout worker is killed with the fork server, below."""
    places = [("reward", "idle"), ("reference", "reference"), ("reference rank", "reference")]
    places += [("learner", phase) for phase in ("forward", "backward", "optimizer")]
    said = "(?:reward|reference) worker 0: .* started again|going back to"
    output = hit(settings, tmp_path, places, signal.SIGKILL, "cluster.reference_ranks=2", said=said)
    assert re.findall("(reward|reference) worker 0: .* started again", output) == ["reward", "reference", "reference"]
    assert len(re.findall("going back to", output)) == 3, output[-3000:]
    assert chaos.differences(undisturbed, tmp_path / "run") == []


def test_workers_are_forked_and_start_by_themselves_once_the_fork_server_is_dead(settings, undisturbed, tmp_path):
    run = tmp_path / "run"
    target = chaos.Target(command(settings, run), run)
    try:
        decoding_worker = wait_for(lambda: first_in(target, "rollout", "decode"), target)
        [server] = [child for child in psutil.Process(target.driver.pid).children() if "serve" in child.cmdline()]
        workers = [pid for pid, roles in target.processes() if "driver" not in roles]
        assert {psutil.Process(pid).ppid() for pid in workers} == {server.pid} and len(workers) == 6
        server.kill()
        os.kill(decoding_worker, signal.SIGKILL)  # in the first step, however long the lines above took
        assert target.driver.wait(timeout=400) == 0, Path(target._log.name).read_text()[-3000:]
    finally:
        target.end()
    assert re.search("rollout worker .* started again", Path(target._log.name).read_text())
    assert chaos.differences(undisturbed, run) == []


def test_a_worker_that_hangs_is_named_with_where_it_stands_and_replaced(settings, undisturbed, tmp_path):
    places = [("rollout", "decode"), ("reward", "idle"), ("reference", "reference")]
    patience = ("cluster.progress_timeout_s=15", "reward.timeout_s=5")
    output = hit(settings, tmp_path, places, signal.SIGSTOP, *patience, said="worker .* started again")
    for role, _ in places:
        assert re.search(f"{role} worker .: it has not moved for .*; its process does not answer", output), output
        assert re.search(f"{role} worker .: .*started again", output), output
    assert chaos.differences(undisturbed, tmp_path / "run") == []


def test_a_rollout_worker_that_hangs_is_found_while_another_decodes_on(settings, tmp_path):
    run = tmp_path / "run"
    changes = ("rollout.group_size=96", "run.steps=4", "run.deterministic=false", "cluster.progress_timeout_s=9")
    target = chaos.Target(command(settings, run, *changes), run)
    try:
        wait_for(lambda: steps_done(run) == 1, target)
        hangs, slow = wait_for(lambda: decoding(target), target)
        os.kill(hangs, signal.SIGSTOP)
        seen, log = [], Path(target._log.name)
        while "started again" not in log.read_text():
            assert target.driver.poll() is None, log.read_text()[-3000:]
            throttle(slow, on_s=0.02, off_s=0.6)
            seen.append(phase_of(slow))  # idle at times between two items, and for long once it has ended
        assert set(seen[-12:-2]) - {"idle"}, f"found only when the other had ended: {seen}"
        assert target.driver.wait(timeout=400) == 0, log.read_text()[-3000:]
        assert len(re.findall("started again", log.read_text())) == 1
    finally:
        target.end()


def test_a_rank_that_hangs_is_lost_once_its_collective_runs_out_of_time(settings, undisturbed, tmp_path):
    """A reference worker's takes all ranks with it, which are started again."""
    places, changes = [("reference rank", "reference"), ("learner", "backward")], ("cluster.reference_ranks=2",)
    said = "reference worker 0: .* started again|going back to"
    output = hit(settings, tmp_path, places, signal.SIGSTOP, *changes, "cluster.progress_timeout_s=30", said=said)
    assert re.search("reference worker 0: .* started again", output), output[-3000:]
    assert (
        "Timed out waiting 15000ms" in output and "the learner: learner rank" in output and "going back to" in output
    ), output[-3000:]
    assert chaos.differences(undisturbed, tmp_path / "run") == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rollout_worker_lost_as_weights_come_by_broadcast_leaves_the_learner_in_step(
    settings, undisturbed, tmp_path, number
):
    broadcast = ("cluster.weight_sync=broadcast", "cluster.progress_timeout_s=24")
    output = hit(settings, tmp_path, [("rollout", "sync")], number, *broadcast)
    assert len(re.findall("rollout worker .: .* started again", output)) == 1, output[-3000:]
    assert "going back to" not in output, output[-3000:]
    assert chaos.differences(undisturbed, tmp_path / "run") == []


def test_sigterm_keeps_the_last_finished_step_and_the_run_goes_on_to_the_same_result(settings, undisturbed, tmp_path):
    run = tmp_path / "run"
    target = chaos.Target(command(settings, run), run)
    try:
        wait_for(lambda: steps_done(run) >= 3, target)
        target.driver.terminate()
        assert target.driver.wait(timeout=120) == 0
        assert (
            "SIGTERM: stopped after step 3; nothing but the unfinished step is lost"
            in Path(target._log.name).read_text()
        )
        assert (run / "checkpoints" / "step_000003").is_dir()
        target.start()
        assert target.driver.wait(timeout=400) == 0
    finally:
        target.end()
    assert chaos.differences(undisturbed, run) == []


@pytest.mark.parametrize(
    ("process", "name"),
    [("raylet", "Ray's raylet on the driver's node"), ("gcs_server", "Ray's control service (gcs_server)")],
)
def test_a_run_whose_ray_is_gone_ends_with_one_line_and_goes_on_when_started_again(
    settings, undisturbed, tmp_path, process, name
):
    run = tmp_path / "run"
    target = chaos.Target(command(settings, run), run)
    try:
        wait_for(lambda: steps_done(run) >= 2, target)
        of_ray = {child.name(): child for child in psutil.Process(target.driver.pid).children(recursive=True)}
        if process == "gcs_server":  # without it steps go on for a minute: let none end
            os.kill(wait_for(lambda: first_in(target, "reward", "idle"), target), signal.SIGSTOP)
        of_ray[process].kill()
        assert target.driver.wait(timeout=120) == 1
        output = Path(target._log.name).read_text()
        line = rf"^error: {re.escape(name)} has not answered .*; once Ray is there again, run.resume=auto"
        assert re.search(line, output, re.MULTILINE), output[-3000:]
        saved = f"stopped after step {steps_done(run)}; nothing but the unfinished step is lost"
        assert process == "raylet" or saved in output, output[-3000:]
        target.start()
        assert target.driver.wait(timeout=400) == 0
    finally:
        target.end()
    assert chaos.differences(undisturbed, run) == []


def test_a_disk_that_fills_up_while_a_checkpoint_is_written_leaves_the_last_good_one(settings, tmp_path):
    size, mounted, kept = "5500k", tmp_path / "small_disk", tmp_path / "kept"
    mounted.mkdir()
    inside = " ".join(
        map(
            json.dumps,
            command(settings, mounted / "run", "run.steps=8", "run.keep_checkpoints=4", "run.checkpoint_every=1"),
        )
    )
    script = (
        f"mount -t tmpfs -o size={size} tmpfs {mounted} && {inside}; code=$?; cp -r {mounted}/run {kept}; exit $code"
    )
    if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small disk")
    done = subprocess.run(["unshare", "-m", "bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "No space left on device" in done.stdout + done.stderr, (
        done.stdout[-2000:] + done.stderr[-2000:]
    )
    assert "could not be written" in done.stdout and "is the last good one" in done.stdout
    assert f"once run.dir={mounted / 'run'} has room, run.resume=auto" in done.stderr
    run = tmp_path / "resumed"
    (kept / ".lock").unlink(missing_ok=True)
    kept.rename(run)
    again = subprocess.run(command(settings, run, "run.steps=8"), capture_output=True, text=True)
    assert again.returncode == 0 and "going on after step" in again.stdout, again.stdout[-2000:] + again.stderr[-2000:]


@pytest.fixture
def ray_cluster():
    """Starts a Ray cluster here, its head node with room for all workers; ended with the test."""
    from ray.cluster_utils import Cluster

    quick = {
        "health_check_failure_threshold": 2,
        "health_check_period_ms": 500,
        "health_check_timeout_ms": 500,
        "health_check_initial_delay_ms": 0,
    }
    started = []

    def start(**head: int) -> Cluster:
        options = {
            "num_cpus": 14,
            "include_dashboard": False,
            "_system_config": quick,
            "object_store_memory": 100_000_000,
        } | head
        started.append(Cluster(initialize_head=True, head_node_args=options))
        return started[-1]

    yield start
    for cluster in started:
        cluster.shutdown()


def joined(cluster, *changes: str) -> tuple[str, ...]:
    return (f"cluster.address={cluster.address}", "cluster.allow_unauthenticated=true", *changes)


def test_a_lost_node_costs_nothing_but_time(settings, undisturbed, tmp_path, ray_cluster):
    cluster, run = ray_cluster(), tmp_path / "run"
    node = cluster.add_node(num_cpus=1)  # room for one rollout worker, which is spread there
    target = chaos.Target(command(settings, run, *joined(cluster)), run)
    try:
        wait_for(lambda: steps_done(run) >= 1, target)
        cluster.remove_node(node, allow_graceful=False)
        assert target.driver.wait(timeout=400) == 0, Path(target._log.name).read_text()[-3000:]
        output = Path(target._log.name).read_text()
    finally:
        target.end()
    assert re.search("rollout worker .: .* started again", output), output[-3000:]
    assert chaos.differences(undisturbed, run) == []


def test_a_clock_that_jumps_changes_nothing(settings, undisturbed, tmp_path):
    run, clock = tmp_path / "run", shutil.copytree(Path(__file__).parent / "jumping_clock", tmp_path / "clock")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(clock), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command(settings, run), capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert chaos.differences(undisturbed, run) == []
    timings = [
        value
        for record in read_records(run / "metrics.jsonl")
        for name, value in record.items()
        if name.startswith("timing/") and value is not None
    ]
    assert max(map(abs, timings)) > 3600, "else the driver's clock has not jumped"
    jumped = [path for path in clock.iterdir() if path.name.isdigit()]
    assert len(jumped) >= 7, "else a worker's clock has not"


def test_two_runs_at_once_on_a_cluster_with_a_full_object_store_do_not_disturb_each_other(
    settings, undisturbed, tmp_path, ray_cluster
):
    cluster = ray_cluster(num_cpus=14, object_store_memory=80_000_000)
    fill = "kept = [ray.put(bytes(8_000_000)) for _ in range(9)]; print('full', flush=True); time.sleep(900)"
    filler = f"import ray, time; ray.init(address={cluster.address!r}); {fill}"
    full = subprocess.Popen([sys.executable, "-c", filler], stdout=subprocess.PIPE, text=True)
    try:
        while "full" not in full.stdout.readline():
            assert full.poll() is None
        runs = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        both = [subprocess.Popen(command(settings, run, *joined(cluster)), **said) for run in runs]
        outputs = [run.communicate(timeout=600)[0] for run in both]
    finally:
        full.kill()
    assert [run.returncode for run in both] == [0, 0], "".join(output[-2000:] for output in outputs)
    assert [chaos.differences(undisturbed, run) for run in runs] == [[], []]


def test_a_slow_workers_samples_that_have_not_started_go_to_an_idle_one(settings, undisturbed, tmp_path):
    run = tmp_path / "run"
    target = chaos.Target(command(settings, run, "rollout.max_rows=2"), run)  # so that most of a worker's samples wait
    try:
        wait_for(lambda: steps_done(run) >= 1, target)
        slow = next(pid for pid, roles in target.processes() if "rollout" in roles)
        while target.driver.poll() is None:
            throttle(slow, on_s=0.02, off_s=0.18)
        assert target.driver.returncode == 0, Path(target._log.name).read_text()[-3000:]
    finally:
        target.end()
    assert sum(record["cluster/samples_moved"] for record in read_records(run / "metrics.jsonl")) > 0
    assert chaos.differences(undisturbed, run) == []


@pytest.mark.parametrize(
    ("steps", "kills", "settings"), [(8, 7, []), (6, 3, ["run.max_staleness=1"])], ids=["", "asynchronous"]
)
def test_disturbances_of_the_default_experiment_change_nothing(short_path, steps, kills, settings):
    seed = date.today().toordinal()  # no seed is tuned to
    print(f"seed={seed}")
    arguments = [sys.executable, "-m", "infsample_rl.chaos", f"steps={steps}", f"kills={kills}"]
    arguments += [f"seed={seed}", "json=true"]
    environment = os.environ | {"TMPDIR": short_path}
    done = subprocess.run([*arguments, *settings], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["kills"] == kills == sum(row["hits"] for row in found["table"]) and found["differences"] == []

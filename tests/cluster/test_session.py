"""A run's place in a real Ray cluster: two raylets on one machine, nodes that come late, disks that differ, tokens, two
runs at once."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray
from ray._private.services import JEMALLOC_SO
from ray.cluster_utils import Cluster
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from infsample_rl.cluster import local_ray
from infsample_rl.cluster.interruption import Interruption
from infsample_rl.cluster.local_ray import start_local
from infsample_rl.cluster.session import Session
from infsample_rl.cluster.worker_environment import allocator_environment
from infsample_rl.config.loading import load_config
from infsample_rl.main import main
from tests.waiting import end, wait_until

ROOT = Path(__file__).resolve().parents[2]
NODE = {"num_cpus": 4, "num_gpus": 0, "object_store_memory": 80 * 2**20, "include_dashboard": False}
SECOND = {key: value for key, value in NODE.items() if key != "include_dashboard"}


def make_session(address: str | None, run_dir: Path, *overrides: str) -> tuple[Session, list[str]]:
    joined = [f"cluster.address={address}", "cluster.allow_unauthenticated=true"] if address else []
    notes: list[str] = []
    return Session(
        load_config([f"run.dir={run_dir}", "objective=no_kl", *joined, *overrides]), notes.append, Interruption()
    ), notes


def program(settings: list[str], then: str) -> str:
    """Of a process with a session `mine` of these settings."""
    return (
        f"import sys, time; sys.path.insert(0, {str(ROOT)!r})\n"
        "from infsample_rl.config.loading import load_config\n"
        "from infsample_rl.cluster.interruption import Interruption\n"
        "from infsample_rl.cluster.session import Session\n"
        f"mine = Session(load_config({settings!r}), print, Interruption())\n{then}"
    )


def patiently(start):
    """Ray gives a raylet 30 s to start, which a busy machine may not keep: try again."""
    for _ in range(3):
        try:
            return start()
        except Exception as error:  # Ray's is a bare one
            failed = error
    raise failed


@pytest.fixture(scope="module")
def raylets():
    """A head and a second node of 4 CPUs each, without a GPU."""
    cluster = patiently(lambda: Cluster(initialize_head=True, head_node_args=NODE))
    try:
        patiently(lambda: cluster.add_node(**SECOND))
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def two_nodes(raylets):
    """The same, and no session of a test before."""
    yield raylets
    ray.shutdown()


def wait_for_nodes(count: int) -> None:
    """Until Ray knows of just so many."""
    wait_until(lambda: sum(node["Alive"] for node in ray.nodes()) == count, 90)


@ray.remote
class Probe:
    """An actor in a worker's place."""

    def __init__(self, secrets):
        from infsample_rl.cluster.worker_secrets import take_secrets

        take_secrets(secrets)

    def where(self) -> tuple[str, dict[str, str]]:
        return ray.get_runtime_context().get_node_id(), dict(os.environ)


def everything_written(folder: Path) -> str:
    return "".join(
        path.read_text(errors="replace") for path in folder.rglob("*") if path.is_file() and path.stat().st_size < 10**8
    )


@pytest.mark.slow
def test_while_ray_starts_this_process_keeps_its_keys_and_none_that_is_started_has_one(tmp_path, monkeypatch):
    """Checks run in a thread beside Ray's start, and ask a hub by its token."""
    monkeypatch.setenv("HF_TOKEN", "planted-hub-key")
    seen, is_open = set(), threading.Event()

    def watch():
        while not is_open.wait(0.005):
            seen.add(os.environ.get("HF_TOKEN"))

    watcher = threading.Thread(target=watch)
    watcher.start()
    mine, _ = make_session(None, tmp_path)
    try:
        mine.open()
    finally:
        is_open.set()
        watcher.join()
    started = [child.environ() for child in psutil.Process().children(recursive=True)]
    ray.shutdown()
    assert seen == {"planted-hub-key"}
    assert len(started) >= 3 and not any("planted" in str(environment) for environment in started)


@pytest.mark.slow
def test_a_start_that_is_refused_beside_rays_leaves_no_session_and_ends_no_other(short_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_TMPDIR", str(short_path))
    command = [f"run.dir={short_path}/run", "reward.functions=[nofile.py:f]"]
    assert main(command) == 2 and "no file" in capsys.readouterr().err
    assert os.listdir(f"{short_path}/ray") == [] and not ray.is_initialized()
    start_local(load_config(command), print)
    try:
        assert main(command) == 2 and ray.is_initialized()
        assert os.listdir(f"{short_path}/ray") != []
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_a_local_session_reserves_every_place_and_hands_keys_over_unseen(tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", "planted-judge-key")
    monkeypatch.setenv("WANDB_API_KEY", "planted-wandb-key")
    mine, notes = make_session(None, tmp_path, "reward.environment=[JUDGE_API_KEY]")
    signal.signal(signal.SIGTERM, handler := lambda *_: None)
    try:
        mine.open()
        assert signal.getsignal(signal.SIGTERM) is handler, "Ray's own handler does not stay"
        assert not any("placement" in note for note in notes), "all of it is on this machine"
        actor = Probe.options(**mine.options("reward", 0)).remote({"JUDGE_API_KEY": "planted-judge-key"})
        _, environment = ray.get(actor.where.remote())
        assert environment["JUDGE_API_KEY"] == "planted-judge-key" and "WANDB_API_KEY" not in environment
        assert "LD_PRELOAD" not in environment, "reward functions start programs of their own"
        _, environment = ray.get(Probe.options(**mine.options("learner", 0)).remote({}).where.remote())
        assert environment["LD_PRELOAD"] == JEMALLOC_SO and environment["OMP_NUM_THREADS"] == "1", (
            "the run's variables stay beside it"
        )
        assert "planted" not in str(ray.get_runtime_context().runtime_env)
        logs = Path(ray._private.worker._global_node.get_session_dir_path())
        assert "planted" not in everything_written(logs)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        ray.shutdown()


def test_what_holds_tensors_in_host_memory_gets_rays_jemalloc_unless_another_library_is_preloaded(monkeypatch):
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    given = {
        role: allocator_environment(role, 0.0).get("LD_PRELOAD")
        for role in ("rollout", "reference", "learner", "reward")
    }
    assert given == {"rollout": JEMALLOC_SO, "reference": JEMALLOC_SO, "learner": JEMALLOC_SO, "reward": None}
    assert allocator_environment("learner", 0.5) == {}, "its tensors are on a GPU"
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/mine.so")
    assert allocator_environment("learner", 0.0) == {}


def test_an_interpreter_in_a_folder_with_a_space_is_one_word_of_rays_command(tmp_path):
    python = tmp_path / "my models" / "python"
    mine, _ = make_session(None, tmp_path, "rollout.engine=vllm", f"rollout.vllm_python='{python}'")
    mine._bundles["rollout", 0] = (PlacementGroup.empty(), 0)
    assert shlex.split(mine.options("rollout", 0)["runtime_env"]["py_executable"]) == [str(python)]


@pytest.mark.slow
def test_learner_ranks_share_a_node_rollout_workers_do_not_and_a_lost_place_is_found_again(two_nodes, tmp_path):
    mine, notes = make_session(two_nodes.address, tmp_path)
    mine.open()
    assert mine.node_of("learner", 0) == mine.node_of("learner", 1)
    assert mine.node_of("rollout", 0) != mine.node_of("rollout", 1)
    assert "placement\n" in "\n".join(notes) and not list(tmp_path.iterdir())
    for role, index in [("learner", 1), ("rollout", 0), ("rollout", 1)]:
        actor = Probe.options(**mine.options(role, index)).remote({})
        assert ray.get(actor.where.remote())[0] == mine.node_of(role, index)
    lost = next(node for node in two_nodes.list_all_nodes() if node is not two_nodes.head_node)
    there = next(index for index in (0, 1) if mine.node_of("rollout", index) == lost.node_id)
    stays = two_nodes.head_node.node_id
    free = ray._private.state.available_resources_per_node()[stays].get("CPU", 0)
    if free > 0:  # else Ray may find the lost place there
        on_head = NodeAffinitySchedulingStrategy(stays, soft=False)
        filler = Probe.options(num_cpus=free, scheduling_strategy=on_head).remote({})
        assert ray.get(filler.where.remote())[0] == stays
    two_nodes.remove_node(lost, allow_graceful=False)
    wait_until(lambda: mine.node_of("rollout", there) != lost.node_id, 90)  # a place on a lost node is none
    patiently(lambda: two_nodes.add_node(**SECOND))
    wait_until(lambda: all(mine.node_of(*worker) for worker in mine._bundles), 90)  # Ray found places on the new node
    assert mine.node_of("rollout", there) not in mine._proven and mine.check_new_nodes()
    assert mine.node_of("rollout", there) in mine._proven and not list(tmp_path.iterdir())


def test_a_worker_that_was_moved_to_a_node_with_other_files_ends_the_run(tmp_path, monkeypatch):
    mine, _ = make_session("10.0.0.1:6379", tmp_path)
    places = {("learner", 0): "old", ("learner", 1): "old", ("reward", 0): None, ("rollout", 0): "new"}
    mine._bundles, mine._proven, asked = dict.fromkeys(places), {"old"}, []
    monkeypatch.setattr(mine, "node_of", lambda *worker: places[worker])
    monkeypatch.setattr(mine, "_check_files", lambda nodes: asked.append(nodes) or ["node b: another folder is there"])
    with pytest.raises(ValueError, match="every node must see .* node b: another folder is there; put them on"):
        mine.check_new_nodes()
    assert asked == [["new"]]
    places["rollout", 0] = "old"
    assert not mine.check_new_nodes(), "one has no place yet: it is asked for again"
    places["reward", 0] = "old"
    assert mine.check_new_nodes() and len(asked) == 1
    assert make_session(None, tmp_path)[0].check_new_nodes()


@pytest.mark.slow
def test_what_does_not_fit_is_refused_and_a_second_run_is_told_of_the_first(two_nodes, tmp_path):
    large, _ = make_session(two_nodes.address, tmp_path, "cluster.rollout_workers=9")
    with pytest.raises(ValueError, match="no place for .* rollout workers") as refused:
        large.open()
    assert "8 CPUs free" in str(refused.value) and "cluster.wait_for_nodes_s=600" in str(refused.value)
    ray.shutdown()
    gpus, _ = make_session(two_nodes.address, tmp_path, "cluster.learner_gpus=1")
    with pytest.raises(ValueError, match="without a GPU: cluster.learner_gpus=0"):
        gpus.open()
    ray.shutdown()
    joined = [f"cluster.address={two_nodes.address}", "cluster.allow_unauthenticated=true", "objective=no_kl"]
    hold = program([f"run.dir={tmp_path}/first", *joined], "mine.open(); print('open', flush=True); time.sleep(600)")
    first = subprocess.Popen([sys.executable, "-c", hold], stdout=subprocess.PIPE, text=True)
    try:
        assert any(line.strip() == "open" for line in first.stdout)
        second, _ = make_session(two_nodes.address, tmp_path / "second")
        with pytest.raises(ValueError, match="it fits once other work on these nodes has ended"):
            second.open()
        ray.shutdown()
        beside, notes = make_session(
            two_nodes.address, tmp_path / "third", "cluster.learner_ranks=1", "cluster.rollout_workers=1"
        )
        beside.open()
        assert "1 learner rank" in "\n".join(notes)
        ray.shutdown()
    finally:
        first.kill()
        first.wait()
    again, _ = make_session(two_nodes.address, tmp_path / "second", "cluster.wait_for_nodes_s=60")
    again.open()  # what the killed run held has come back


def start_node(arguments: list[str], environment: dict[str, str], prefix: list[str] | None = None) -> subprocess.Popen:
    """`ray start --block` in a process group of its own."""
    ray_command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--block",
        "--num-cpus=4",
        "--num-gpus=0",
        "--object-store-memory=80000000",
    ]
    return subprocess.Popen(
        [*(prefix or []), *ray_command, *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.slow
def test_a_node_that_comes_late_is_waited_for_in_sight(two_nodes, tmp_path, short_path):
    mine, notes = make_session(two_nodes.address, tmp_path, "cluster.rollout_workers=7", "cluster.wait_for_nodes_s=120")
    ports = ["--min-worker-port=23000", "--max-worker-port=23900"]
    arguments = [f"--address={two_nodes.address}", f"--temp-dir={short_path}", *ports]
    added = []
    late = threading.Timer(3.0, lambda: added.append(start_node(arguments, os.environ | {"RAY_AUTH_MODE": "disabled"})))
    late.start()
    try:
        mine.open()
    finally:
        late.join()
        end(added[0], 0)
    waiting = [note for note in notes if note.startswith("waiting for nodes")]
    assert waiting and "of 120 s" in waiting[0] and "no place for" in waiting[0]
    assert "7 rollout workers" not in "\n".join(notes).split("placement")[1], "on three nodes"
    wait_for_nodes(2)


def has_mount_namespaces() -> bool:
    return (
        subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True).returncode == 0
    )


@pytest.mark.slow
@pytest.mark.skipif(
    not has_mount_namespaces(), reason="a second node with another disk needs a mount namespace: unshare -m as root"
)
@pytest.mark.parametrize("hidden", ["run.dir", "model.path"])
def test_a_node_with_a_local_disk_is_refused_by_name(hidden, two_nodes, tmp_path, short_path, tiny_qwen3):
    """A third raylet runs with an empty tmpfs over the folder: the same path, another disk."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    mount = f'mount -t tmpfs none {run_dir if hidden == "run.dir" else tiny_qwen3} && exec "$@"'
    third = start_node(
        [
            f"--address={two_nodes.address}",
            f"--temp-dir={short_path}",
            "--min-worker-port=21000",
            "--max-worker-port=21900",
        ],
        os.environ | {"RAY_AUTH_MODE": "disabled"},
        ["unshare", "-m", "bash", "-c", mount, "node"],
    )
    try:
        mine, _ = make_session(
            two_nodes.address,
            run_dir,
            f"model.path={tiny_qwen3}",
            "cluster.rollout_workers=7",
            "cluster.wait_for_nodes_s=200",
        )
        with pytest.raises(
            ValueError, match="every node must see the driver's run folder, model and data: node "
        ) as refused:
            mine.open()
        good = {node.node_id for node in two_nodes.list_all_nodes()}
        (bad,) = {node["NodeID"] for node in ray.nodes() if node["Alive"]} - good
        assert f"({bad[:8]})" in str(refused.value), "the third node is named"
        assert not any(node_id[:8] in str(refused.value) for node_id in good)
        what = "is another folder there (a local disk?)" if hidden == "run.dir" else "is not there"
        assert f"{hidden}" in str(refused.value) and what in str(refused.value)
        assert not list(run_dir.iterdir())
    finally:
        end(third, 0)
        wait_for_nodes(2)


@pytest.mark.slow
def test_a_cluster_that_listens_on_the_loopback_address_is_joined_by_it(tmp_path):
    settings = [f"run.dir={tmp_path}", "objective=no_kl"]
    alone = "from infsample_rl.cluster.local_ray import start_local\nstart_local(mine._config, print)\n"
    alone += "import ray\nprint(ray.get_runtime_context().gcs_address, flush=True)\nsys.stdin.read()\n"
    with subprocess.Popen(
        [sys.executable, "-c", program(settings, alone)], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        address = next(line for line in other.stdout if line.startswith("127.0.0.1:")).strip()
        mine, _ = make_session(address, tmp_path)
        try:
            mine.open()
            assert ray.get_runtime_context().gcs_address == address and mine.node_of("learner", 0)
        finally:
            ray.shutdown()
            other.stdin.close()


@pytest.mark.slow
def test_a_cluster_without_tokens_is_joined_only_when_that_is_accepted(two_nodes, tmp_path):
    mine, _ = make_session(two_nodes.address, tmp_path, "cluster.allow_unauthenticated=false")
    with pytest.raises(
        ValueError,
        match="asks for no token, .*ray get-auth-token --generate.*or accept it with "
        "cluster.allow_unauthenticated=true",
    ):
        mine.open()
    assert not ray.is_initialized()
    accepted, notes = make_session(two_nodes.address, tmp_path)
    accepted.open()
    assert "asks for no token (cluster.allow_unauthenticated=true)" in "\n".join(notes)


@pytest.mark.slow
def test_a_cluster_with_tokens_is_joined_with_its_token_alone(tmp_path, short_path):
    token, wrong = tmp_path / "token", tmp_path / "wrong"
    token.write_text("ab" * 32)
    wrong.write_text("cd" * 32)
    plain = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")} | {"HOME": str(tmp_path)}
    head = start_node(
        [
            "--head",
            "--port=26391",
            "--include-dashboard=false",
            f"--temp-dir={short_path}",
            "--min-worker-port=22000",
            "--max-worker-port=22900",
        ],
        plain | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)},
    )
    settings = [f"run.dir={tmp_path}/run", "objective=no_kl", "cluster.rollout_workers=1"]  # the head has 4 CPUs
    settings += ["cluster.address=127.0.0.1:26391", "cluster.wait_for_nodes_s=60"]
    script = program(
        settings,
        "try:\n    mine.open()\n    print('opened', mine.node_of('learner', 0))\n"
        "except ValueError as error:\n    print('refused', error)\n",
    )

    def join(environment: dict[str, str]) -> str:
        return subprocess.run(
            [sys.executable, "-c", script], env=plain | environment, capture_output=True, text=True, timeout=300
        ).stdout

    try:
        assert "opened" in join({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)})
        assert "opened" in join({"RAY_AUTH_TOKEN_PATH": str(token)}), "the cluster's answer turns token mode on"
        refused = [{}, {"RAY_AUTH_TOKEN_PATH": str(tmp_path / "nowhere")}]
        refused.append({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(wrong)})
        for variables in refused:
            assert "asks for a token, and this process has none or another" in join(variables)
    finally:
        end(head, 0)


@pytest.mark.parametrize("named", [True, False])
def test_a_user_without_a_home_names_the_file_of_the_token(tmp_path, monkeypatch, named):
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "nowhere"))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", lambda **_: SimpleNamespace(address_info={"session_dir": str(tmp_path)}))
    monkeypatch.setattr(local_ray, "_start_fork_server", lambda _: None)
    if named:
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        start_local(load_config([]), print)
        assert (tmp_path / "token").stat().st_size >= 32 and (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    else:
        with pytest.raises(ValueError, match=r"kept in .*/nowhere/.ray/auth_token \(No such .* RAY_AUTH_TOKEN_PATH"):
            start_local(load_config([]), print)


@pytest.mark.slow
def test_no_cluster_at_an_address_is_one_line(tmp_path):
    mine, _ = make_session("127.0.0.1:1", tmp_path)
    with pytest.raises(ValueError, match="cluster.address=127.0.0.1:1: nothing answers at .*; start Ray there"):
        mine.open()


@pytest.mark.parametrize("there", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_run_of_this_machine_is_reached_from_no_other_address_and_its_token_is_private(tmp_path, there):
    """Every process of it, Ray's and ours; the token's file is the user's alone, whoever made it."""
    token = tmp_path / ".ray" / "auth_token"
    if there:
        token.parent.mkdir()
        token.write_text("0" * 64)
        token.chmod(0o644)
    text = program(
        ["objective=no_kl", f"run.dir={tmp_path}/run"],
        "mine.open()\n"
        "import psutil, ray\n"
        "ray.get(ray.remote(lambda: 0).remote())\n"
        "own = {process.pid for process in (psutil.Process(), *psutil.Process().children(recursive=True))}\n"
        "ends = [end for end in psutil.net_connections('tcp') if end.status == 'LISTEN' and end.pid in own]\n"
        "named = {process.pid: process.info['cmdline'] or () for process in psutil.process_iter(['cmdline'])}\n"
        "own_names = [' '.join(named[pid][:3]) for pid in own & named.keys() - {psutil.Process().pid}]\n"
        "assert any('raylet' in name for name in own_names), own_names\n"
        "needless = ('dashboard/dashboard.py', 'autoscaler/', 'log_monitor.py')\n"
        "assert not [name for name in own_names if any(part in name for part in needless)], own_names\n"
        "print('ends', *{f'{end.laddr.ip}|{end.laddr.port}' for end in ends}, flush=True)\n"
        "sys.stdin.read()\n",
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment["HOME"] = str(tmp_path)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", text], env=environment, text=True, **pipes) as run:
        ends = next(line.split()[1:] for line in run.stdout if line.startswith("ends"))
        assert len(ends) > 5, "Ray's raylet, control service, agents and workers"
        # not by connecting: another process may listen at another address under the same number
        assert {end.split("|")[0] for end in ends} <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}, ends
        assert token.stat().st_mode & 0o777 == 0o600
        run.stdin.close()

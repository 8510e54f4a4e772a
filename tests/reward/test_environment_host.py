"""A user's environments: TRL's form and gymnasium's, many at a time, and what one does costs its trajectory alone."""

import contextlib
import json
import os
import re
import signal
import site
import sys
import time
import venv
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from infsample_rl.config import Config, RewardFunctionConfig
from infsample_rl.config.environment import EnvironmentConfig
from infsample_rl.config.loading import load_config
from infsample_rl.reward import environment_host
from infsample_rl.reward.environment_host import EnvironmentFailed, EnvironmentHost, _is_reply
from infsample_rl.reward.policy_conversation import Asked
from infsample_rl.types import EpisodeStart
from tests.waiting import wait_until

COUNTER = '''
import asyncio, contextlib, json, os, signal, subprocess, time

subprocess.run("sleep 1233 &", shell=True, start_new_session=True)  # a service, for all trajectories


class Counter:
    """TRL's form."""

    def reset(self, target, seed=None, **columns):
        if target == "broken":
            raise RuntimeError("no such target")
        if target == "reset":
            raise ConnectionResetError("by its server")
        self.target, self.seed, self.total = target, seed, 0
        return f"Reach {target} from {seed}."

    def add(self, amount: int) -> str:
        """Adds to the total.

        Args:
            amount: What is added.
        """
        self.total += amount
        return f"The total is {self.total}."

    async def slowly(self, seconds: float) -> float:
        """Waits.

        Args:
            seconds: How long.
        """
        await asyncio.sleep(seconds)
        return seconds

    def misbehave(self, how: str) -> str:
        """Does something bad.

        Args:
            how: What.
        """
        if how == "raise":
            raise ValueError("it broke")
        if how == "forge":
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and os.path.exists(f"/proc/self/fd/{name}"):
                    with contextlib.suppress(OSError):
                        os.write(int(name), b'{"said": "anything"}\\n')
        if how.startswith("daemon"):
            subprocess.run("sleep 1234 &", shell=True, start_new_session=True)
        if how.endswith("exit"):
            os._exit(3)
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how.startswith("hold"):
            self.held = b"x" * (int(how[4:]) << 20)
        if how == "hang":
            subprocess.Popen(["sleep", "1234"])
            time.sleep(1234)
        if how == "print":
            print("x" * 10_000_000)
        if how == "long":
            return "a" * 5_000_000 + "end"
        return how

    def _hidden(self):
        pass

    def get_reward(self) -> float:
        return float("nan") if self.total < 0 else float(self.total == self.target)


class Game:
    """gymnasium's form."""

    def reset(self, seed=None, options=None):
        self.left = 2
        return f"seed {seed}, {options['target']}", {}

    def step(self, action):
        self.left -= 1
        return f"you said {action}", 0.5, self.left == 0, False, {}


class Play:
    """Calls the policy itself."""

    def rollout(self, base_url, api_key, target, seed):
        from urllib.request import Request, urlopen

        messages = [{"role": "user", "content": f"{target} {seed}"}]
        for _ in range(2):
            body = json.dumps({"messages": messages}).encode()
            headers = {"Authorization": f"Bearer {api_key}"}
            with urlopen(Request(base_url + "/chat/completions", body, headers)) as response:
                answer = json.load(response)["choices"][0]["message"]
            messages += [answer, {"role": "user", "content": "you said " + answer["content"]}]
        return 0.5


class Tooled:
    """Calls the policy with a tool."""

    def rollout(self, base_url, api_key, target):
        from urllib.request import Request, urlopen

        parameters = {"type": "object", "properties": {"amount": {"type": "integer"}}}
        tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
        messages = [{"role": "user", "content": target}]
        for _ in range(2):
            body = json.dumps({"messages": messages, "tools": tools}).encode()
            headers = {"Authorization": f"Bearer {api_key}"}
            with urlopen(Request(base_url + "/chat/completions", body, headers)) as response:
                answer = json.load(response)["choices"][0]["message"]
            messages.append(answer)
            for call in answer.get("tool_calls") or []:
                said = str(2 * json.loads(call["function"]["arguments"])["amount"])
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": said})
        return float(answer["content"] == "8")


class ByTokens:
    """Asks by token ids."""

    def rollout(self, base_url, api_key, target):
        from urllib.request import Request, urlopen

        ids, url = [target], base_url.removesuffix("/v1") + "/inference/v1/generate"
        for _ in range(2):
            request = Request(url, json.dumps({"token_ids": ids}).encode(), {"Authorization": f"Bearer {api_key}"})
            with urlopen(request) as response:
                sampled = json.load(response)["choices"][0]["token_ids"]
            ids += [*sampled, 7]
        return float(sum(ids))


class Deaf:
    def rollout(self, client):
        return 0.0


def double(number: int) -> int:
    """Twice a number.

    Args:
        number: Any.
    """
    return 2 * number


def rows(number: int) -> list:
    """Rows of a table.

    Args:
        number: How many.
    """
    return [(each, "x") for each in range(number)]


def note(path: str) -> int:
    """Grows a file.

    Args:
        path: Its.
    """
    with open(path, "a") as file:
        file.write("x")
    return os.path.getsize(path)


def undescribed(number):
    return number


class Dice:
    def reset(self, **row):
        import random

        import numpy

        self.thrown = [random.random(), numpy.random.random()]
        return str(sorted(row))

    def throw(self) -> str:
        """Throws."""
        return str(self.thrown)


class Board:
    """Draws from a library that it imports late, or from the system."""

    def reset(self, seed=None, options=None):
        import numpy

        drawn = os.urandom(8) if options["target"] == "anything" else numpy.random.random()
        return f"The board is {drawn}."

    def step(self, action):
        return "", 1.0, True, False, {}


class Held:
    """Holds what outlives its process."""

    def reset(self, path):
        self.path = path

    def read(self) -> str:
        """Reads."""
        return "nothing"

    def close(self):
        with open(self.path, "a") as file:
            file.write("closed ")
        if "hangs" in self.path:
            time.sleep(1234)


class Said:
    scorer = max

    class Config:
        """No tool."""

    def reset(self, said, function):
        if said == "<set>":
            return " ".join({str(number) for number in range(100)})
        return ("a", {}) if said == "<tuple>" else said

    @classmethod
    def made(cls) -> str:
        """No tool."""

    def echo(self, word: str) -> str:
        """Says it.

        Args:
            word: Any.
        """
        return word


class Needy:
    def __init__(self, licence, *, seats=1, **more):
        pass

    def reset(self):
        pass


NAMED = {"count": Counter, "dice": Dice}
MIXED = {"count": Counter, "game": Game}
WRONG = {"count": 3}
'''
SCRIPT = '''
import argparse
import pickle
from dataclasses import dataclass

from trl import GRPOConfig, GRPOTrainer


@dataclass
class Limits:
    most: "int" = 0


def reward(environments, **kwargs):
    return [environment.total / LIMITS.most for environment in environments]


def main():
    global LIMITS
    parser = argparse.ArgumentParser()
    parser.add_argument("--most", type=int, required=True)
    parser.add_argument("--form", choices=["one", "two", "none"], default="one")
    args = parser.parse_args()
    LIMITS = pickle.loads(pickle.dumps(Limits(args.most)))  # as what is sent to another process

    class Adds:
        def reset(self, **row):
            self.total = 0

        def add(self, amount: int) -> str:
            """Adds.

            Args:
                amount: What is added.
            """
            self.total = min(args.most, self.total + amount)
            return str(self.total)

        def train(self) -> str:
            """Needs TRL itself."""
            return str(GRPOConfig())

    factory = {"one": Adds, "two": {"small": Adds, "large": Adds}, "none": None}[args.form]
    trainer = GRPOTrainer("model", reward_funcs=reward, args=GRPOConfig(bf16=True), environment_factory=factory)
    trainer.train()
    raise SystemError("it trains")


if __name__ == "__main__":
    main()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("environments") / "counter.py"
    path.write_text(COUNTER)
    return path


def config_of(timeout_s=20.0, **environment) -> Config:
    return replace(load_config([]), environment=EnvironmentConfig(timeout_s=timeout_s, **environment))


@pytest.fixture(scope="module")
def host(file):
    made = EnvironmentHost(config_of(factory=f"{file}:Counter"))
    yield made
    made.close()


@pytest.fixture
def open_host(closing):
    """Opens a host of a config, or of these settings of its environment; every one is closed."""

    def build(config=None, python=sys.executable, **environment):
        return closing(EnvironmentHost(config or config_of(**environment), python))

    return build


def answers(host, count, seconds=30.0):
    found = {}
    deadline = time.monotonic() + seconds
    while len(found) < count:
        key, reply, _ = host.answers.get(timeout=max(0.1, deadline - time.monotonic()))
        found[key] = reply
    return found


def reply_to(host, key, *request):
    host.ask(key, *request)
    return answers(host, 1)[key]


def sleeps(host, seconds="1234"):
    """Whether something below the host still sleeps for so long."""
    for child in psutil.Process(host._server._keeper.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if seconds in child.cmdline():
                return True
    return False


def wait_until_none_sleeps(host):
    wait_until(lambda: not sleeps(host), 20.0, "what a trajectory has started does not end")


def asked(host, *request, key="one", target=5, end=True):
    host.open(key, EpisodeStart(7, {"target": target}))
    reply = reply_to(host, key, request)
    if end:
        host.end(key)
    return reply


def test_public_methods_are_tools_with_their_schemas(host):
    assert host.form == "tools"
    functions = [tool["function"] for tool in host.tools[""]]
    assert [function["name"] for function in functions] == ["add", "slowly", "misbehave"]
    assert functions[0]["parameters"] == {
        "type": "object",
        "properties": {"amount": {"type": "integer", "description": "What is added."}},
        "required": ["amount"],
    }


def test_an_episode_opens_keeps_its_state_and_is_rewarded(host):
    assert host.opening(7, {"target": 5, "unused": 1}) == "Reach 5 from 7."
    before = host.num_replies
    reply = asked(host, "call", [("add", {"amount": 2}), ("add", {"amount": 3})], end=False)
    assert host.num_replies == before + 3, "who it is, that it has begun, and its answer"
    assert reply == {"said": ["The total is 2.", "The total is 5."], "failed": 0}
    assert reply_to(host, "one", ("reward", [])) == {"reward": 1.0, "functions": {}, "reported": {}}
    host.end("one")


def test_async_methods_are_awaited_and_episodes_run_beside_each_other(host):
    started = time.monotonic()
    for key in range(4):
        host.open(key, EpisodeStart(0, {"target": 1}))
        host.ask(key, ("call", [("slowly", {"seconds": 1.0})]))
    assert answers(host, 4) == {key: {"said": ["1.0"], "failed": 0} for key in range(4)}
    assert time.monotonic() - started < 3.5
    for key in range(4):
        host.end(key)


@pytest.mark.parametrize(
    ("how", "said"), [("raise", "error: ValueError: it broke ("), ("print", "print"), ("long", "a" * 100)]
)
def test_what_a_tool_does_wrong_is_said_to_the_model(host, how, said):
    reply = asked(host, "call", [("misbehave", {"how": how})])
    assert reply["said"][0].startswith(said) and reply["failed"] == (how == "raise")
    assert len(reply["said"][0]) <= 1 << 20 and (how != "long" or reply["said"][0].endswith("end"))


SHARED = "a worker's environments share reward.memory_limit="


@pytest.mark.parametrize(("how", "said"), [("exit", "exit code 3"), ("killed", f"killed by SIGKILL; {SHARED}4GB")])
def test_a_process_that_ends_says_how_and_costs_its_own_episode(host, how, said):
    host.open("other", EpisodeStart(1, {"target": 3}))
    assert reply_to(host, "other", ("call", [("add", {"amount": 3})]))["said"] == ["The total is 3."]
    assert asked(host, "call", [("misbehave", {"how": how})]) == {"failed": f"its process died ({said})"}
    assert reply_to(host, "other", ("reward", [])) == {"reward": 1.0, "functions": {}, "reported": {}}
    host.end("other")


def test_where_environments_hold_too_much_together_the_largest_alone_is_ended(open_host, file):
    config = config_of(factory=f"{file}:Counter")
    host = open_host(replace(config, reward=replace(config.reward, memory_limit="800MB")))
    assert asked(host, "call", [("misbehave", {"how": "hold100"})], key="small", target=0, end=False)["said"]
    pid = host._episodes["small"].pid
    calls = [("misbehave", {"how": "hold550"}), ("slowly", {"seconds": 1234})]
    assert asked(host, "call", calls) == {"failed": f"its process died (killed by SIGKILL; {SHARED}800MB)"}
    assert reply_to(host, "small", ("reward", []))["reward"] == 1.0 and host._episodes["small"].pid == pid


def test_a_reply_that_the_environment_forged_fails_its_episode_alone(host):
    assert asked(host, "call", [("misbehave", {"how": "forge"})]) == {"failed": "it wrote into the line of its answers"}
    assert asked(host, "call", [("add", {"amount": 1})], key="two")["said"] == ["The total is 1."]


def test_one_that_hangs_is_ended_in_time_with_all_it_started(file):
    host = EnvironmentHost(config_of(factory=f"{file}:Counter", timeout_s=2.0))
    try:
        assert asked(host, "call", [("misbehave", {"how": "hang"})]) == {
            "failed": "timed out after 2 s (environment.timeout_s)"
        }
        wait_until_none_sleeps(host)
        assert asked(host, "call", [("add", {"amount": 1})], key="two")["said"] == ["The total is 1."]
    finally:
        host.close()
    assert not psutil.pid_exists(host._server._keeper.pid) or not psutil.Process(host._server._keeper.pid).is_running()


def test_a_daemon_ends_with_the_trajectory_that_started_it(host):
    assert asked(host, "call", [("misbehave", {"how": "daemon"})], end=False)["said"] == ["daemon"]
    time.sleep(1.0)  # the keeper has looked
    assert sleeps(host)
    host.end("one")
    wait_until_none_sleeps(host)
    assert asked(host, "call", [("misbehave", {"how": "daemon exit"})])["failed"] == "its process died (exit code 3)"
    wait_until_none_sleeps(host)
    assert sleeps(host, "1233"), "what the file itself has started is for all trajectories"


def test_output_that_is_cut_is_said_to_be_an_environments(file, capfd):
    host = EnvironmentHost(config_of(factory=f"{file}:Counter"))
    asked(host, "call", [("misbehave", {"how": "print"})])
    host.close()
    assert "bytes that an environment printed are left out" in capfd.readouterr().err


def test_what_the_environment_itself_does_wrong_fails_the_episode(host):
    failed = asked(host, "call", [("add", {"amount": 1})], target="broken")["failed"]
    assert failed.startswith("RuntimeError: no such target (") and "counter.py:" in failed
    assert asked(host, "reward", [], target="reset")["failed"].startswith("ConnectionResetError: by its server (")
    assert "pickle" in asked(host, "reward", [], target=lambda: 5)["failed"], "an answer comes whatever goes wrong"
    with pytest.raises(EnvironmentFailed, match="no such target"):
        host.opening(0, {"target": "broken"})
    asked(host, "call", [("add", {"amount": -1})], end=False)
    assert "the reward returned nan" in reply_to(host, "one", ("reward", []))["failed"]
    host.end("one")


def test_gymnasiums_form_is_told_by_its_step(open_host, file):
    host = open_host(factory=f"{file}:Game")
    assert (host.form, host.tools) == ("actions", {"": []})
    assert host.opening(3, {"target": 9}) == "seed 3, 9"
    assert asked(host, "act", "left", end=False) == {"said": "you said left", "reward": 0.5, "ended": False}
    assert reply_to(host, "one", ("act", "right"))["ended"] is True


def test_a_program_calls_the_policy_itself(open_host, file):
    prompt = [{"role": "user", "content": "5 7"}]
    host = open_host(factory=f"{file}:Play")
    assert host.form == "program" and host.opening(7, {"target": 5}).messages == prompt
    host.open("one", EpisodeStart(7, {"target": 5}, messages=prompt))
    for request, said in ((("act", "left", False), "you said left"), (("act", "right", False), "")):
        assert reply_to(host, "one", request) == {"said": said, "reward": 0.5 * (not said), "ended": not said}
    host.open("two", EpisodeStart(7, {"target": 6}, messages=prompt))
    assert "it is not its group's prompt" in reply_to(host, "two", ("act", "left", False))["failed"]


def test_a_program_offers_tools_and_is_given_their_calls(open_host, file):
    host = open_host(factory=f"{file}:Tooled")
    asked = host.opening(7, {"target": "Twice four?"})
    assert asked.messages == [{"role": "user", "content": "Twice four?"}]
    assert [tool["function"]["name"] for tool in asked.tools] == ["add"]
    host.open("one", EpisodeStart(7, {"target": "Twice four?"}, None, asked.messages, asked.tools))
    reply = reply_to(host, "one", ("act", "So:", False, [("add", {"amount": 1}), ("add", {"amount": 4})]))
    assert reply == {"said": "", "reward": 0.0, "ended": False, "answers": ["2", "8"]}
    assert reply_to(host, "one", ("act", "8", False)) == {"said": "", "reward": 1.0, "ended": True}
    host.open("two", EpisodeStart(7, {"target": "Twice four?"}, None, asked.messages, []))
    assert "it is not its group's prompt" in reply_to(host, "two", ("act", "8", False))["failed"]


def test_a_program_may_ask_by_token_ids(open_host, file):
    host = open_host(factory=f"{file}:ByTokens")
    assert host.opening(7, {"target": 5}) == Asked([], [], [5])
    host.open("one", EpisodeStart(7, {"target": 5}, None, [], [], [5]))
    first = ("act", "me", False, [], ([1, 2], [-0.5, -0.5], "stop"))
    assert reply_to(host, "one", first) == {"said": "", "reward": 0.0, "ended": False, "token_ids": [7]}
    reply = reply_to(host, "one", ("act", "you", False, [], ([3], [-0.5], "length")))
    assert reply == {"said": "", "reward": 25.0, "ended": True}
    host.open("two", EpisodeStart(7, {"target": 5}, None, [], [], [6]))
    assert "it is not its group's prompt" in reply_to(host, "two", first)["failed"]


@pytest.mark.parametrize("ids", ["7", [7.0], [-1], [True]])
def test_token_ids_that_are_none_are_no_reply(open_host, file, monkeypatch, ids):
    found = {"said": "", "reward": 0.0, "ended": False, "token_ids": ids}
    assert not _is_reply(found, "act", "me", False, [], ([1], [-0.5], "stop"))
    host = open_host(factory=f"{file}:ByTokens")
    monkeypatch.setattr(host, "_receive", lambda episode: {"said": "", "messages": [], "token_ids": ids})
    with pytest.raises(EnvironmentFailed, match="it wrote into the line of its answers"):
        host.opening(7, {"target": 5})


@pytest.mark.parametrize(("answers", "ended", "is_one"), [(2, False, True), (1, False, False), (0, True, True)])
def test_every_call_of_a_programs_tools_has_an_answer_or_it_has_ended(answers, ended, is_one):
    found = {"said": "", "reward": 0.0, "ended": ended, "answers": ["4"] * answers}
    assert _is_reply(found, "act", "So:", False, [("add", {}), ("add", {})]) == is_one


def test_a_program_is_refused_where_it_cannot_reach_the_policy(file):
    config = config_of(factory=f"{file}:Play")
    with pytest.raises(ValueError, match="environment.factory has rollout, .*reward.isolation=limits lets it"):
        EnvironmentHost(replace(config, reward=replace(config.reward, isolation="sandbox")))


def test_a_killed_process_is_started_again_and_brought_to_where_it_was(host):
    asked(host, "call", [("add", {"amount": 2})], key="killed", end=False)
    for total in (3, 4):
        os.kill(host._episodes["killed"].pid, signal.SIGKILL)
        assert reply_to(host, "killed", ("call", [("add", {"amount": 1})]))["said"] == [f"The total is {total}."]
    host.end("killed")


@pytest.mark.parametrize("total", [4, 5])
def test_a_process_that_begins_late_does_first_what_had_been_asked_before_and_fails_where_it_differs(host, total):
    adds = [
        (("call", [("add", {"amount": 2})]), {"said": [f"The total is {each}."], "failed": 0}) for each in (2, total)
    ]
    host.open("late", EpisodeStart(7, {"target": 5}))
    reply = reply_to(host, "late", ("call", [("add", {"amount": 1})]), adds)
    if total == 4:
        assert reply["said"] == ["The total is 5."]
    else:
        assert reply["failed"].startswith("brought back in a new process it answered otherwise: ")
    host.end("late")


def test_functions_alone_are_not_called_again_in_a_new_process(open_host, file, tmp_path):
    host = open_host(tools=[f"{file}:note"])
    request = ("call", [("note", {"path": str(tmp_path / "notes")})])
    host.open("late", EpisodeStart(7, {}))
    found = reply_to(host, "late", request, [(request, {"said": ["1"], "failed": 0})])["said"]
    os.kill(host._episodes["late"].pid, signal.SIGKILL)
    assert [*found, *reply_to(host, "late", request)["said"]] == ["1", "2"]


def test_it_is_known_since_when_a_call_runs_and_that_it_waits_for_a_worker(open_host, file):
    host, began = open_host(factory=f"{file}:Counter", workers=1), time.monotonic()
    for key in range(2):
        host.open(key, EpisodeStart(0, {"target": 1}))
        host.ask(key, ("call", [("slowly", {"seconds": 1.0})]))
    while host.called_at(0) is None:
        time.sleep(0.01)
    assert host.called_at(0) >= began and host.called_at(1) is None
    ended = [host.answers.get(timeout=30)[2] for _ in range(2)]
    assert 1.0 <= ended[0] - host.called_at(0) <= host.called_at(1) - host.called_at(0) < ended[1] - host.called_at(0)


def test_what_is_not_wanted_any_more_is_not_begun(open_host, file):
    host = open_host(factory=f"{file}:Counter", workers=1)
    for key in range(3):
        host.open(key, EpisodeStart(0, {"target": 1}))
        host.ask(key, ("call", [("slowly", {"seconds": 1.0})]))
    ended = host._episodes[1]
    host.end(1)
    assert set(answers(host, 2)) == {0, 2} and ended.line is None


def test_an_environment_that_is_not_wanted_any_more_closes_what_it_holds_within_its_time(file, tmp_path, monkeypatch):
    monkeypatch.setattr(environment_host, "CLOSE_LIMIT_S", 2.0)
    host, held = EnvironmentHost(config_of(factory=f"{file}:Held")), [tmp_path / name for name in ("ends", "hangs")]
    try:
        assert host.opening(7, {"path": str(held[0])}) == ""  # of the instance that is thrown away
        for path in held:
            host.open(path, EpisodeStart(7, {"path": str(path)}))
            host.ask(path, ("call", [("read", {})]))
        assert len(answers(host, 2)) == 2
        pids = [host._episodes[path].pid for path in held]
        started = time.monotonic()
        host.end(held[0])
        host.end(held[1])
        assert time.monotonic() - started < 1.0, "nobody waits for it"
    finally:
        host.close()
    assert [path.read_text() for path in held] == ["closed closed ", "closed "]
    assert not any(map(psutil.pid_exists, pids))


def server_of(host):
    [keeper] = psutil.Process(host._server._keeper.pid).children()
    return keeper.children()[0]


@pytest.mark.parametrize("killed", ["the server", "its keeper", "the keeper's stand-in"])
def test_environments_whose_server_is_killed_go_on_in_another(open_host, file, killed, caplog):
    host = open_host(factory=f"{file}:Game")
    for number in range(2):
        asked(host, "act", "left", key=f"before {number}", end=False)
        [server, keeper, stand_in] = [server_of(host), *server_of(host).parents()[:2]]
        {"the server": server, "its keeper": keeper}.get(killed, stand_in).kill()
        server.wait(20.0)
        assert asked(host, "act", "up", key="after")["said"] == "you said up"
        assert reply_to(host, f"before {number}", ("act", "down"))["said"] == "you said down"
    assert host.opening(7, {"target": 5}) == "seed 7, 5"
    assert caplog.text.count("another is started") == 2
    assert ("killed by SIGKILL" if killed == "the server" else "its keeper was killed") in caplog.text


LIMITED = """
import errno

fork = os.fork


def limited():
    if os.path.exists(__file__ + ".full"):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    return fork()


os.fork = limited
"""


def test_a_process_that_cannot_be_had_costs_its_own_episode(open_host, tmp_path):
    file, full = tmp_path / "limited.py", tmp_path / "limited.py.full"
    file.write_text(COUNTER + LIMITED)
    host = open_host(factory=f"{file}:Game")
    asked(host, "act", "left", key="before", end=False)
    server, pid = host._server, host._episodes["before"].pid
    full.touch()
    failed = "no further process: Resource temporarily unavailable; raise the limit of processes (ulimit -u, or "
    assert asked(host, "act", "up")["failed"].startswith(failed)
    full.unlink()
    assert asked(host, "act", "up")["said"] == "you said up"
    assert reply_to(host, "before", ("act", "down"))["ended"]
    assert host._server is server and host._episodes["before"].pid == pid


def test_a_host_that_is_closed_starts_no_server_again(file):
    host = EnvironmentHost(config_of(factory=f"{file}:Game"))
    keeper = host._server._keeper.pid
    host.close()
    with pytest.raises(EnvironmentFailed, match="it is over"):
        host.opening(7, {"target": 5})
    assert host._server._keeper.pid == keeper


def test_a_file_that_is_broken_when_a_server_is_started_again_fails_what_needs_it(file):
    host, text = EnvironmentHost(config_of(factory=f"{file}:Game")), file.read_text()
    try:
        file.write_text("import nothing_like_this")
        server = server_of(host)
        server.kill()
        server.wait()
        assert "nothing_like_this" in asked(host, "reward", [])["failed"]
    finally:
        file.write_text(text)
        host.close()


SCORES = '''
def total(environments, **kwargs):
    """As TRL's examples."""
    return [each.total / each.target for each in environments]


def said(environments, completions, prompts, target, log_metric):
    log_metric("turns", len(completions[0]))
    right = completions[0][-1]["content"] == str(target[0]) and prompts[0][0]["content"] == "Count."
    return [1.0 if right else None]


def fails(environments):
    raise KeyError("nothing here")


def another(completions):
    """Takes no environments, and is not asked."""
    return [5.0]
'''


@pytest.fixture
def scores(file):
    path = file.with_name("scores.py")
    path.write_text(SCORES)

    def of(*names, **environment):
        functions = [RewardFunctionConfig(name=f"{path}:{name}") for name in names]
        config = config_of(**{"factory": f"{file}:Counter"} | environment)
        return replace(config, reward=replace(config.reward, functions=functions))

    return of


def test_functions_of_the_rewards_that_take_environments_are_asked_in_their_process(open_host, scores):
    host = open_host(scores("total", "said", "another"))
    columns = {"target": 5, "prompt": [{"role": "user", "content": "Count."}]}
    found = {}
    for word in ("5", "6"):
        host.open(word, EpisodeStart(7, columns))
        host.ask(word, ("call", [("add", {"amount": 4})]))
        answers(host, 1)
        host.ask(word, ("reward", [{"role": "assistant", "content": word}]))
        found |= answers(host, 1)
    assert [found[word]["functions"] for word in ("5", "6")] == [{"total": 0.8, "said": each} for each in (1.0, None)]
    assert found["5"]["reward"] == 0.0 and found["5"]["reported"] == {"said/turns": 1.0}


def test_one_that_raises_fails_its_trajectory_and_one_without_tools_is_refused(open_host, scores, file):
    host = open_host(scores("fails"))
    assert "KeyError: 'nothing here'" in asked(host, "reward", [])["failed"]
    with pytest.raises(ValueError, match="reward.functions: total takes environments with tools; .*has turns"):
        EnvironmentHost(scores("total", factory=f"{file}:Game"))


def test_functions_alone_are_tools(open_host, file):
    host = open_host(tools=[f"{file}:double", f"{file}:rows"])
    assert host.opening(0, {}) == ""
    assert asked(host, "call", [("double", {"number": 4})]) == {"said": ["8"], "failed": 0}
    reply = asked(host, "call", [("double", {"number": 1}), ("rows", {"number": 1})])
    assert reply == {"said": ["2", "[(0, 'x')]"], "failed": 0, "lists": {"1": [[0, "x"]]}}


def test_a_function_may_make_them(open_host, file):
    path = file.with_name("made.py")
    path.write_text(
        file.read_text() + "\n\ndef make():\n    made = Counter()\n    made.note = 'made'\n    return made\n\n\n"
        "def fails():\n    raise RuntimeError('no licence')\n"
    )
    host = open_host(factory=f"{path}:make")
    assert host.form == "tools" and asked(host, "call", [("add", {"amount": 2})])["said"] == ["The total is 2."]
    with pytest.raises(ValueError, match=r"environment.factory: RuntimeError: no licence \(.*made.py:"):
        EnvironmentHost(config_of(factory=f"{path}:fails"))


@pytest.mark.parametrize("isolation", ["limits", "sandbox"])
def test_another_interpreter_runs_them_with_its_own_libraries(open_host, tmp_path, isolation):
    """As that of the driver, where this process has vLLM's."""
    venv.create(tmp_path / "other", symlinks=True)
    (site_packages,) = (tmp_path / "other").glob("lib/python*/site-packages")
    (site_packages / "ours.pth").write_text("\n".join(site.getsitepackages()))
    (site_packages / "only_there.py").write_text("NAME = 'found'")
    (tmp_path / "tools").mkdir()
    file = tmp_path / "tools" / "tools.py"
    file.write_text(
        'import sys\n\n\ndef where() -> str:\n    """Says where it runs."""\n'
        "    import only_there\n    return sys.executable + only_there.NAME\n"
    )
    config = config_of(tools=[f"{file}:where"])
    reward = replace(config.reward, isolation=isolation, read_paths=site.getsitepackages())
    python = str(tmp_path / "other" / "bin" / "python")
    host = open_host(replace(config, reward=reward), python)
    assert asked(host, "call", [("where", {})]) == {"said": [python + "found"], "failed": 0}


def test_what_draws_from_the_processs_own_generators_draws_by_the_seed(open_host, file):
    host = open_host(factory=f"{file}:Dice")
    said = []
    for number, seed in enumerate([7, 7, 8]):
        host.open(number, EpisodeStart(seed, {}))
        said += reply_to(host, number, ("call", [("throw", {})]))["said"]
    assert said[0] == said[1] and not set(json.loads(said[0])) & set(json.loads(said[2]))


def test_a_beginning_that_is_not_its_groups_fails(open_host, file):
    host = open_host(factory=f"{file}:Board")
    found = []
    for target in ("by the seed", "anything"):
        columns = {"target": target}
        host.open(target, EpisodeStart(7, columns, host.opening(7, columns)))
        found.append(reply_to(host, target, ("act", "left")))
    assert found[0]["ended"] and found[1]["failed"].endswith("seed and row: it is not its group's prompt")


@pytest.mark.parametrize(
    ("said", "opening"),
    [
        ([{"type": "text", "text": "7"}, {"type": "text", "text": " and 8"}], "7 and 8"),
        ("<set>", None),
        ([{"type": "image"}], "reset may return parts of type text alone, got {'type': 'image'}"),
        ("<tuple>", "reset must return a text or None, got a tuple"),
    ],
)
def test_what_reset_returns_is_text_in_every_process_the_same(open_host, file, said, opening):
    row = {"said": said, "function": 1}  # a column of any name
    host = open_host(factory=f"{file}:Said")
    if opening is not None and "reset" in opening:
        with pytest.raises(EnvironmentFailed, match=re.escape(opening)):
            host.opening(7, row)
        return
    found = host.opening(7, row)
    assert found == open_host(factory=f"{file}:Said").opening(7, row) and found == (opening or found)


def test_only_methods_are_tools_and_a_row_must_have_what_reset_needs(open_host, file):
    host = open_host(factory=f"{file}:Said")
    assert host.columns == {"": ["said", "function"]}
    assert [tool["function"]["name"] for tool in host.tools[""]] == ["echo"] and not host.rewards


def test_a_row_takes_one_of_several_environments(open_host, file):
    host = open_host(factory=f"{file}:NAMED")
    tools = {name: [tool["function"]["name"] for tool in tools] for name, tools in host.tools.items()}
    assert tools == {"count": ["add", "slowly", "misbehave"], "dice": ["throw"]}
    # not the name, nor a seed that it does not name, as TRL
    assert host.opening(7, {"environment": "dice", "target": 5}) == "['target']"
    assert host.opening(7, {"environment": "count", "target": 5}) == "Reach 5 from 7."
    with pytest.raises(EnvironmentFailed, match="environment must be one of count, dice .* got 'card'"):
        host.opening(7, {"environment": "card"})


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "play.py"
    path.write_text(SCRIPT)
    return path


def test_a_trl_scripts_own_class_is_what_it_gives_its_trainer(open_host, script):
    functions = [RewardFunctionConfig(name=f"{script}:reward")]
    config = config_of(factory=f"{script} --most 4")
    host = open_host(replace(config, reward=replace(config.reward, functions=functions)))
    found = asked(host, "call", [("add", {"amount": 3}), ("train", {})], end=False)
    assert found["said"][0] == "3" and "ModuleNotFoundError: trl.GRPOConfig is called" in found["said"][1]
    host.ask("one", ("reward", []))  # what main() set is there for it
    assert answers(host, 1)["one"] == {"reward": None, "functions": {"reward": 0.75}, "reported": {}}


def test_a_trl_script_may_give_several(open_host, script):
    host = open_host(factory=f"{script} --most 4 --form two")
    assert list(host.tools) == ["small", "large"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("", "play.py: error: the following arguments are required: --most"),
        ("--most 4 --form three", "play.py: error: argument --form: invalid choice: 'three'"),
        ("--most 4 --form none", "gives its trainer no environment_factory"),
        ("--most '4", "No closing quotation"),
    ],
)
def test_a_trl_script_that_gives_none_is_one_line(script, arguments, said):
    with pytest.raises(ValueError, match="^environment.factory") as error:
        EnvironmentHost(config_of(factory=f"{script} {arguments}"))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_script_that_never_trains_is_one_line(script):
    script.write_text(SCRIPT.replace("    main()", "    pass"))
    with pytest.raises(ValueError, match=r"play.py has ended before it called train\(\) of a trainer"):
        EnvironmentHost(config_of(factory=f"{script} --most 4"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"factory": "{}:Countr"},
            "has no class Countr; its classes are Counter, Game, Play, Tooled, ByTokens, Deaf, Dice, Board, Held,",
        ),
        ({"factory": "{}:MIXED"}, "all must be of one form, got {'count': 'tools', 'game': 'actions'}"),
        ({"factory": "{}:WRONG"}, ":WRONG, 'count', is neither a class nor a function"),
        ({"factory": "/no/such.py --most 4"}, "environment.factory: no file /no/such.py"),
        ({"factory": "/no/such"}, "must be path/to/file.py:NAME, or a TRL script and its arguments, got"),
        ({"tools": ["{}:undescribed"]}, "undescribed cannot be a tool: "),
        ({"factory": "/no/such.py:Counter"}, "environment.factory: no file /no/such.py"),
        ({"factory": "{}:Needy"}, ":Needy needs 'licence' to be made: give a function that makes one"),
        ({"factory": "{}:Deaf"}, ":Deaf: rollout must take base_url and api_key"),
        ({"factory": "{}:Game", "tools": ["{}:double"]}, "environment.tools cannot be beside"),
    ],
)
def test_what_cannot_be_is_one_line(file, settings, said):
    given = {
        name: [each.format(file) for each in value] if isinstance(value, list) else value.format(file)
        for name, value in settings.items()
    }
    with pytest.raises(ValueError) as error:
        EnvironmentHost(config_of(**given))
    assert said in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_ends_the_process_that_imports_it_is_named(tmp_path):
    (tmp_path / "ends.py").write_text("import os\nos._exit(4)\n")
    with pytest.raises(ValueError, match=r"^environment: the process that imports .*/ends.py died \(exit code 4\)$"):
        EnvironmentHost(config_of(factory=f"{tmp_path}/ends.py:Game"))


def test_an_interpreter_that_is_not_there_is_one_line(file):
    with pytest.raises(ValueError, match=r"environment: /no/python cannot be started \(No such file"):
        EnvironmentHost(config_of(factory=f"{file}:Game"), "/no/python")


def test_an_episode_that_has_ended_leaves_no_file_open(host):
    before = set(os.listdir("/proc/self/fd"))
    for number in range(5):
        asked(host, "call", [("add", {"amount": 1})], key=number)
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 1

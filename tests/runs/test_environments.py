"""Trajectories of several turns by the real command: trained, and the same whoever samples them."""

from __future__ import annotations

import json
import signal
import time
from collections import defaultdict
from pathlib import Path

import psutil
import pytest
import yaml

from infsample_rl.commands.chaos import differences
from infsample_rl.commands.convert.__main__ import main as convert
from infsample_rl.commands.disturbance import Target, send
from infsample_rl.learner.advantage import turn_advantages
from tests.conftest import CHATML_CALLS
from tests.real_runs import kill_a_decoding_worker, same_everywhere

GAME = '''
import json, os, random, subprocess, time
from urllib.error import HTTPError
from urllib.request import Request, urlopen


class Guess:
    """Says what comes of the last digit or letter of an action."""

    def reset(self, seed=0, options=None):
        self.dice, self.turns = random.Random(seed), 0
        return f"Game {self.dice.randint(0, 99)} of {options['answer']}."

    def step(self, action):
        self.turns += 1
        time.sleep(self.dice.random() / 50)
        said = sum(map(ord, action)) % 7
        if said == 6 and self.turns == 1 and self.dice.random() < 0.2:
            raise RuntimeError("a bad start")
        return f"it says {said}", said / 7, self.turns == 3, False, {}


class Slow(Guess):
    """The same game, which gives time to kill it."""

    def step(self, action):
        time.sleep(0.3)
        return super().step(action)


def start_daemon(folder):
    """One that is neither of this process's session nor its child, nor the intermediate process's."""
    left = os.path.join(os.path.dirname(__file__), folder)
    os.makedirs(left, exist_ok=True)
    subprocess.run(f"sleep 600 & touch {left}/$!", shell=True, start_new_session=True)


class Leaky(Slow):
    """The same game, which leaves processes behind."""

    def step(self, action):
        start_daemon("of_rollout")
        return super().step(action)


def leaky(completions, **columns):
    start_daemon("of_reward")
    return [1.0] * len(completions)


class Play(Guess):
    """The same game, by a program that calls the policy."""

    def rollout(self, base_url, api_key, prompt, seed, answer):
        total, ended, said = 0, False, self.reset(seed, {"answer": answer})
        messages = [*prompt[:-1], prompt[-1] | {"content": prompt[-1]["content"] + "\\n\\n" + said}]
        while not ended:
            body = json.dumps({"model": "policy", "messages": messages}).encode()
            try:
                asked = Request(base_url + "/chat/completions", body, {"Authorization": "Bearer " + api_key})
                with urlopen(asked) as response:
                    message = json.load(response)["choices"][0]["message"]
            except HTTPError:  # there is no further turn
                break
            said, reward, ended, _, _ = self.step(message["content"])
            total += reward
            messages += [message, {"role": "user", "content": said}]
        return total
'''
BY_TOKENS = '''
from transformers import AutoTokenizer

TOKENIZER = AutoTokenizer.from_pretrained("{model}")
BEHIND = "\\n<|im_start|>user\\n{{}}<|im_end|>\\n<|im_start|>assistant\\n"


class PlayByTokens(Guess):
    """The same game, by a program that renders itself and asks by token ids."""

    def rollout(self, base_url, api_key, prompt, seed, answer):
        total, ended, said = 0, False, self.reset(seed, {{"answer": answer}})
        messages = [*prompt[:-1], prompt[-1] | {{"content": prompt[-1]["content"] + "\\n\\n" + said}}]
        text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids, url = TOKENIZER(text)["input_ids"], base_url.removesuffix("/v1") + "/inference/v1/generate"
        while not ended:
            body = json.dumps({{"token_ids": ids, "sampling_params": {{"logprobs": 1}}}}).encode()
            try:
                with urlopen(Request(url, body, {{"Authorization": "Bearer " + api_key}})) as response:
                    sampled = json.load(response)["choices"][0]["token_ids"]
            except HTTPError:  # there is no further turn
                break
            said, reward, ended, _, _ = self.step(TOKENIZER.decode(sampled, skip_special_tokens=True))
            total += reward
            behind = BEHIND.format(said)
            behind = behind if sampled[-1] == TOKENIZER.eos_token_id else "<|im_end|>" + behind
            ids = [*ids, *sampled, *TOKENIZER(behind)["input_ids"]]
        return total
'''
TOOLS = '''
class Count:
    """TRL's form."""

    def reset(self, answer, **columns):
        self.reward, self.kind = float(answer) / 8, "even" if int(answer) % 2 == 0 else "odd"

    def add(self, amount: int) -> int:
        """Adds.

        Args:
            amount: What is added.
        """
        self.reward += amount
        return amount


def even(environments, **kwargs):
    return [each.reward if each.kind == "even" else None for each in environments]


def odd(environments, completions, **kwargs):
    return [each.reward + len(said[-1]["content"]) / 100 if each.kind == "odd" else None
            for each, said in zip(environments, completions)]
'''
SCRIPT = '''
import argparse

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer


def reward(environments, completions, **kwargs):
    return [each.total + len(said[-1]["content"]) / 1000 for each, said in zip(environments, completions)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bonus", type=float, default=0.0)
    args = parser.parse_args()

    class Adds:
        def reset(self, answer, **row):
            assert "environment" not in row
            self.total = float(answer) / 8

        def add(self, amount: int) -> int:
            """Adds.

            Args:
                amount: What is added.
            """
            self.total += amount
            return amount

    class Doubles(Adds):
        def reset(self, answer, **row):
            super().reset(answer, **row)
            self.total += args.bonus

        def double(self) -> str:
            """Doubles."""
            self.total *= 2
            return str(self.total)

    rows = {
        "prompt": [[{"role": "user", "content": f"Reach {number}."}] for number in range(6)],
        "answer": [str(number) for number in range(6)],
        "environment": ["adds", "doubles"] * 3,
    }
    trainer = GRPOTrainer(
        "a/b",
        reward_funcs=reward,
        train_dataset=Dataset.from_dict(rows),
        args=GRPOConfig(num_generations=4),
        environment_factory={"adds": Adds, "doubles": Doubles},
    )
    trainer.train()


if __name__ == "__main__":
    main()
'''
STOPS = list(range(40, 140, 4))
POLICY = Path(__file__).resolve().parents[2] / "infsample_rl" / "assets" / "kk_tiny" / "policy"


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    path = tmp_path_factory.mktemp("games") / "guess.py"
    path.write_text(GAME)
    own = [f"environment.factory={path}:Guess", "reward.functions=[]", f"rollout.stop_token_ids={STOPS}"]
    sizes = ["data.max_prompt_tokens=128", "rollout.max_new_tokens=150", "learner.max_tokens_per_micro_batch=320"]
    return [*own, *sizes, "objective=no_kl", "run.checkpoint_every=1", "rollout.slots=null"]


@pytest.fixture(scope="module")
def plain(train, settings):
    return train(*settings)


def rows_of(run):
    return [same_everywhere(row) for row in run.rows]


@pytest.mark.slow
def test_trajectories_are_trained_and_their_observations_are_not(plain):
    for row in plain.rows:
        assert 1 < row["environment/turns_mean"] <= 3 and row["environment/observed_tokens"] > 0
        assert row["learner/grad_norm"] > 0 and row["rollout/recomputed_tokens"] == 0
    assert plain.rows[1]["learner/logprob_diff_max"] < 1e-4
    completions = [json.loads(line) for line in (plain.folder / "completions.jsonl").read_text().splitlines()]
    assert any("it says" in each["response"] for each in completions) and "Game" in completions[0]["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        ("cluster.rollout_workers=2", "environment.workers=1"),
        ("rollout.kv_budget_tokens=320", "rollout.page_size=4"),
        ("cluster.colocate=true", "rollout.speculate=0"),
    ],
    ids=str,
)
def test_no_bit_changes_with(train, settings, plain, changes):
    assert rows_of(train(*settings, *changes)) == rows_of(plain)


@pytest.mark.slow
def test_a_program_that_calls_the_policy_itself_trains_the_same(train, settings, plain):
    assert rows_of(train(settings[0].replace(":Guess", ":Play"), *settings[1:])) == rows_of(plain)


@pytest.mark.slow
def test_one_that_asks_by_token_ids_trains_the_same(train, settings, plain, tiny_qwen3, tmp_path):
    path = tmp_path / "by_tokens.py"
    path.write_text(GAME + BY_TOKENS.format(model=tiny_qwen3))
    assert rows_of(train(f"environment.factory={path}:PlayByTokens", *settings[1:])) == rows_of(plain)


@pytest.mark.slow
def test_trls_functions_of_environments_reward_the_prompts_that_they_are_for(train, tmp_path):
    """As TRL's example of several environments in one, with a template of one's own."""
    for name, text in (("count.py", TOOLS), ("tools.jinja", CHATML_CALLS)):
        (tmp_path / name).write_text(text)
    functions = [f"{tmp_path}/count.py:{name}" for name in ("even", "odd")]
    own = (f"environment.factory={tmp_path}/count.py:Count", f"reward.functions={json.dumps(functions)}")
    run = train(
        *own, f"model.chat_template={tmp_path}/tools.jinja", f"rollout.stop_token_ids={STOPS}", "objective=no_kl"
    )
    assert all(row["learner/grad_norm"] > 0 and row["reward/failed"] == 0 for row in run.rows)
    for each in map(json.loads, (run.folder / "completions.jsonl").read_text().splitlines()):
        [value] = [value for value in each["components"].values() if value is not None]
        assert value == pytest.approx(each["reward"]) and set(each["components"]) == {"even", "odd"}


@pytest.mark.slow
def test_a_trl_script_with_environments_of_its_own_is_converted_and_trains(train, tmp_path, monkeypatch, capsys):
    (tmp_path / "play.py").write_text(SCRIPT)
    (tmp_path / "tools.jinja").write_text("{% for t in tools %}{{ t.function.name }} {% endfor %}" + CHATML_CALLS)
    monkeypatch.chdir(tmp_path)
    assert convert(["trl", "play.py", "--bonus", "2"]) == 0
    made = yaml.safe_load(capsys.readouterr().out)
    run = train(
        f"environment.factory={made['environment']['factory']}",
        f"data.source={tmp_path / made['data']['source']}",
        f"reward.functions=[{made['reward']['functions'][0]['name']}]",
        *(f"model.chat_template={tmp_path}/tools.jinja", f"rollout.stop_token_ids={STOPS}", "objective=no_kl"),
        *("data.max_prompt_tokens=128", "logging.completions_per_step=1000", "learner.max_tokens_per_micro_batch=256"),
    )
    assert all(row["learner/grad_norm"] > 0 and row["reward/failed"] == 0 for row in run.rows)
    for each in map(json.loads, (run.folder / "completions.jsonl").read_text().splitlines()):
        offered = each["prompt"].partition("<|im_start|>")[0]
        assert offered in ("add ", "add double ")
        made = (each["row"] - 1) / 8 + (2.0 if offered == "add double " else 0.0)
        assert made <= each["reward"] < made + 0.1


@pytest.mark.slow
def test_turns_are_credited_with_what_they_earned(train, settings, plain):
    run = train(*settings, "objective.turn_credit=turn", "logging.completions_per_step=1000")
    assert run.rows[0]["reward/mean"] == plain.rows[0]["reward/mean"]
    assert run.rows[0]["learner/grad_norm"] != plain.rows[0]["learner/grad_norm"]
    groups = defaultdict(list)
    for each in map(json.loads, (run.folder / "completions.jsonl").read_text().splitlines()):
        groups[each["step"], each["prompt_index"]].append(each)
    for group in groups.values():
        of_turns = [each["turn_rewards"] or [0.0] for each in group]
        wanted = turn_advantages([each["reward"] for each in group], of_turns, "std")
        assert [tuple(each.get("turn_advantages", [each["advantage"]])) for each in group] == wanted
    assert any(len(set(each.get("turn_advantages", []))) > 1 for group in groups.values() for each in group)


@pytest.mark.slow
def test_with_vllm_every_trajectory_is_the_same(train, settings):
    """A turn is a request of its own, with all tokens so far."""
    own = [*settings, f"model.path={POLICY}", f"rollout.stop_token_ids={list(range(20, 90, 6))}"]
    plain, with_vllm = (train(*own, f"rollout.engine={engine}") for engine in ("native", "vllm"))
    for row, wanted in zip(rows_of(with_vllm), rows_of(plain), strict=True):
        for name in ("response/tokens", "reward/mean", "environment/turns_mean", "environment/observed_tokens"):
            assert row[name] == wanted[name] > 0, name
        assert row["learner/grad_norm"] == pytest.approx(wanted["learner/grad_norm"], rel=1e-3)
    assert all(row["environment/turns_mean"] > 1 for row in plain.rows)


@pytest.mark.slow
def test_killed_environments_change_no_bit(command, settings, plain, tmp_path: Path):
    """Processes of trajectories, and those that make them, of the driver and of the rollout worker."""
    run, left = tmp_path / "run", ["environment", "environments", "environment"]
    target = Target(command(run, settings[0].replace(":Guess", ":Slow"), *settings[1:]), run)
    try:
        while target.driver.poll() is None:
            pids = [pid for pid, roles in target.processes() if left and roles == (left[0],)]
            is_hit = any(send(pid, signal.SIGKILL) for pid in pids[:1])
            left = left[1:] if is_hit else left
            time.sleep(1.0 if is_hit else 0.05)  # one that dies twice at one request is a fault of its own
        assert target.driver.returncode == 0
    finally:
        target.end()
    assert differences(plain.folder, run) == [] and not left


@pytest.mark.slow
def test_a_rollout_worker_that_is_killed_changes_no_bit(command, settings, plain, tmp_path: Path):
    run = tmp_path / "run"
    kill_a_decoding_worker(command(run, *settings), run)
    assert differences(plain.folder, run) == []
    assert not (run / "turns").exists() and not (plain.folder / "turns").exists(), "needed by nobody any more"


def daemons(folder: Path) -> list[str]:
    """Ids of those of the processes that left theirs in `folder` that run."""
    left = [path.name for path in folder.iterdir()] if folder.is_dir() else []
    return [pid for pid in left if psutil.pid_exists(int(pid))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ended", "number"),
    [
        ("nothing", None),
        ("driver", signal.SIGKILL),
        ("driver", signal.SIGINT),
        ("rollout", signal.SIGKILL),
        ("reward", signal.SIGKILL),
    ],
)
def test_no_daemon_of_a_users_code_outlives_who_started_it(command, settings, tmp_path: Path, ended, number):
    run, file = tmp_path / "run", tmp_path / "leaky.py"
    file.write_text(GAME)
    leaky = [f"environment.factory={file}:Leaky", f"reward.functions=[environment, {{name: '{file}:leaky'}}]"]
    folders = [tmp_path / f"of_{role}" for role in ("rollout", "reward") if ended in ("nothing", "driver", role)]
    target = Target(command(run, *settings[2:], *leaky, f"run.steps={2 if number is None else 100}"), run)
    try:
        while not all(map(daemons, folders)):
            assert target.driver.poll() is None
            time.sleep(0.1)
        started = {pid for folder in folders for pid in daemons(folder)}
        if number is None:
            assert target.driver.wait(timeout=300) == 0
        else:
            send(next(pid for pid, roles in target.processes() if ended in roles), number)
        deadline = time.monotonic() + 60.0
        while left := {pid for folder in folders for pid in daemons(folder)}:
            if ended in ("rollout", "reward") and not left & started:
                break  # the run goes on, and has others
            assert time.monotonic() < deadline, "a daemon lives on"
            time.sleep(0.1)
    finally:
        target.end()

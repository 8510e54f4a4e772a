"""A peer's name given as a setting or a flag: the error says what it is here."""

from __future__ import annotations

import re
import sys

import pytest

from infsample_rl.commands.convert import openrlhf, trl, verl
from infsample_rl.commands.convert.peer_names import PEERS, in_our_words
from infsample_rl.config.overrides import setting_names
from infsample_rl.main import main
from tests.commands.convert.test_convert_openrlhf import LEAST as OPENRLHF
from tests.commands.convert.test_convert_trl import LEAST as TRL
from tests.commands.convert.test_convert_verl import MINIMAL as VERL

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ("TRL's num_generations", "rollout.group_size"),
        ("TRL's temperature", "rollout.temperature"),
        ("TRL's epsilon", "objective.clip_low and objective.clip_high"),
        ("TRL's beta", "objective.kl_coef"),
        ("TRL's max_prompt_length", "data.max_prompt_tokens"),
        ("TRL's max_completion_length", "rollout.max_new_tokens"),
        ("TRL's max_steps", "run.steps"),
        ("TRL's reward_funcs", "reward.functions=[FILE.py:NAME]"),
        ("TRL's reward_weights", "weight in reward.functions=[{name: FILE.py:NAME, weight: 0.5}]"),
        ("TRL's per_device_train_batch_size", "data.prompts_per_step times rollout.group_size"),
        ("TRL's gradient_accumulation_steps", "data.prompts_per_step times rollout.group_size"),
        ("TRL's dataset_name", "data.source"),
        ("TRL's use_vllm", "rollout.engine=vllm"),
        (f"verl's {ROLLOUT}.n", "rollout.group_size"),
        (f"verl's {ROLLOUT}.name", "rollout.engine"),
        (f"verl's {ACTOR}.clip_ratio", "objective.clip_low and objective.clip_high"),
        (f"verl's {ACTOR}.ppo_mini_batch_size", "objective.mini_batches"),
        ("verl's custom_reward_function.path", "reward.functions=[FILE.py:NAME]"),
        ("verl's data.train_files", "data.source"),
        ("verl's data.max_response_length", "rollout.max_new_tokens"),
        ("verl's trainer.n_gpus_per_node", "cluster.learner_ranks and cluster.rollout_workers"),
        ("OpenRLHF's actor.adam.lr", "learner.lr"),
    ],
)
@pytest.mark.parametrize("spelling", ["{}=8", "--{}=8", "--{} 8"])
def test_a_peers_name_is_told_in_ours(given, ours, spelling, capsys):
    name = given.partition(" ")[2]
    assert main(["--cfg", "job", *spelling.format(name).split()]) == 2
    said = capsys.readouterr().err
    is_flag = spelling.startswith("--")
    head = f"error: --{name} is no flag: " if is_flag else f"error: {name} is not a setting: "
    assert said.startswith(f"{head}{given} is {ours} here") and said.count("\n") == 1
    assert ("settings are given without dashes, as rollout.slots=4; flags are" in said) == is_flag


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("n=8", "n is not a setting: verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        ("rollout.n=4,8", "rollout.n is not a setting: verl's actor_rollout_ref.rollout.n is rollout.group_size here"),
        ("kl_coef=0.01", "kl_coef is not a setting; did you mean objective.kl_coef?"),
        ("learner.learning_rate=1", "learner.learning_rate is not a setting: TRL's learning_rate is learner.lr here"),
        ("reward.custom_reward_function.path=a.py", "verl's custom_reward_function.path is reward.functions=[FILE.py:"),
        ("--num-generations=8", "--num-generations is no flag: TRL's num_generations is rollout.group_size here"),
        ("num_generations", "'num_generations' is not name=value: TRL's num_generations is rollout.group_size here"),
        (f"{ACTOR}.ppo_mini_batch_size=64", "here; it is the number of mini batches in a step, not the size of one"),
        ("max_steps=10", "run.steps here; a step may be several updates"),
        ("gradient_accumulation_steps=2", "here; micro batches are learner.max_tokens_per_micro_batch"),
        ("rollout.slot=8", "rollout.slot is not a setting; did you mean rollout.slots?"),
    ],
)
def test_a_part_of_a_peers_name_a_unit_and_our_own_names_are_told(given, said, capsys):
    assert main(["--cfg", "job", given]) == 2
    assert said in capsys.readouterr().err


def test_a_peers_name_in_a_file_is_told_with_the_file(tmp_path, capsys):
    path = tmp_path / "experiment" / "mine.yaml"
    path.parent.mkdir()
    path.write_text("# @package _global_\nrollout: {num_generations: 8}\n")
    assert main(["--cfg", "job", "--config-dir", str(tmp_path), "+experiment=mine"]) == 2
    assert f"TRL's num_generations is rollout.group_size here (in {path})\n" in capsys.readouterr().err


def test_what_a_peers_name_is_told_to_be_is_a_setting():
    groups = {name.partition(".")[0] for name in setting_names()}
    for table in PEERS.values():
        for theirs, ours in table.items():
            named = [name for name in re.findall(r"\w+\.\w+", ours) if name.partition(".")[0] in groups]
            assert set(named) <= set(setting_names()), (theirs, ours)
            assert named, (theirs, ours)


@pytest.mark.parametrize(
    ("peer", "convert", "file", "text", "argument"),
    [
        ("TRL", trl.convert, "a.yaml", TRL, "--tools=a.py:f"),
        ("verl", verl.convert, "a.yaml", VERL, "custom_reward_function.path=a.py"),
        ("OpenRLHF", openrlhf.convert, "a.sh", OPENRLHF, "--actor.lr_scheduler=cosine"),
    ],
)
def test_every_name_that_a_conversion_reads_is_told(peer, convert, file, text, argument, tmp_path):
    (tmp_path / file).write_text(text)
    read = convert(tmp_path / file, [argument])._read
    untold = {name for name in read if " here" not in in_our_words(f"{name} is not a setting")}
    untold -= {row.theirs for row in sys.modules[convert.__module__].ROWS if not row.ours}
    # what a script makes, the interval of a log that has every step here, and a name that is ours too
    assert untold <= {trl.REWARDED, "logging_steps", "rollout.max_new_tokens"}
    assert len(read - untold) > 40 and peer in PEERS

"""verl's scripts and YAML files: variables resolved, units kept, defaults written out where they are not ours."""

from __future__ import annotations

import re

import pytest

from infsample_rl.commands.convert.__main__ import main

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail
export WORLD=${NNODES_OF_NOWHERE:-2} BASE=$HOME/data
max_prompt=$((256 * 2)) max_response=$((512 + 512))   # tokens
files="['$BASE/sums/train.parquet']"
ACTOR=actor_rollout_ref.actor ROLLOUT=actor_rollout_ref.rollout LONG=reward_model.reward_kwargs.overlong_buffer_cfg
OVERLONG=(reward_model.reward_manager=dapo +$LONG.enable=True # the buffer
    +$LONG.len=128 +$LONG.penalty_factor=0.5)
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="$files" data.val_files=$BASE/sums/test.parquet \
    data.train_batch_size=96 data.max_prompt_length=${max_prompt} data.max_response_length=$max_response \
    data.filter_overlong_prompts=True data.truncation='left' actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    $ACTOR.ppo_mini_batch_size=32 $ACTOR.ppo_epochs=2 $ACTOR.clip_ratio_high=0.28 \
    $ACTOR.policy_loss.loss_mode=vanilla $ACTOR.loss_agg_mode=seq-mean-token-mean \
    $ACTOR.use_kl_loss=True $ACTOR.kl_loss_type=low_var_kl $ACTOR.kl_loss_coef=0.002 \
    $ACTOR.optim.lr=3e-6 $ACTOR.optim.lr_warmup_steps=5 $ACTOR.optim.weight_decay=0.1 \
    $ACTOR.use_dynamic_bsz=True $ACTOR.fsdp_config.optimizer_offload=True \
    $ROLLOUT.n=8 $ROLLOUT.top_k=-1 $ROLLOUT.tensor_model_parallel_size=1 \
    $ROLLOUT.val_kwargs.do_sample=True $ROLLOUT.val_kwargs.temperature=0.6 $ROLLOUT.val_kwargs.n=4 \
    custom_reward_function.path=rewards/sums.py custom_reward_function.name=score_sum "${OVERLONG[@]}" \
    trainer.n_gpus_per_node=4 trainer.nnodes=$WORLD trainer.total_epochs=2 trainer.save_freq=25 trainer.test_freq=-1 \
    trainer.experiment_name="sums-$(date +%s)" trainer.project_name=adding \
    trainer.logger='["console"]' trainer.nonsense=1 "$@"
"""
LONG = "reward.reward_kwargs.overlong_buffer_cfg"
KL, CTRL = "algorithm.use_kl_in_reward", "algorithm.kl_ctrl"
MINIMAL = """
algorithm: {adv_estimator: grpo}
data: {train_files: a.parquet, train_batch_size: 8}
actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4}}
trainer: {logger: [console]}
"""


def test_a_script_keeps_units_and_objective_and_says_what_it_drops(convert):
    found = convert("verl", "sums.sh", SCRIPT)
    expected = {
        **{"data.prompts_per_step": 96, "rollout.group_size": 8, "objective.mini_batches": 3, "objective.epochs": 2},
        **{"data.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024, "data.long_prompts": "drop"},
        **{"objective.loss": "grpo", "objective.advantage": "mean_only", "objective.clip_low": 0.2},
        **{"objective.clip_high": 0.28, "objective.kl": "k3", "objective.kl_coef": 0.002},
        **{"objective.overlong_buffer_tokens": 128, "objective.overlong_penalty": 0.5},
        # 5 steps of 6 updates
        **{"learner.warmup_steps": 30, "learner.weight_decay": 0.1, "reference.placement": "learner"},
        **{"cluster.learner_ranks": 8, "cluster.rollout_workers": 8, "cluster.learner_gpus": 1},
        **{"run.eval_temperature": 0.6, "run.eval_samples": 4, "run.eval_every": 0, "run.epochs": 2.0},
        **{"rollout.top_k": 0, "rollout.kv_budget_bytes": "auto", "logging.wandb": "disabled"},
        **{"logging.wandb_project": "adding"},
    }
    assert found.has(expected) == expected
    assert found.config.data.source.endswith("/data/sums/train.parquet")
    assert found.config.data.eval_source.endswith("/data/sums/test.parquet")
    assert found.functions() == [("sums.py:score_sum", 1.0)]
    assert re.fullmatch(r"sums-\d{10}", found.config.run.name)  # date +%s
    assert found.said == "not converted: trainer.nonsense=1\n"
    overridden = convert("verl", "sums.sh", SCRIPT, "data.train_batch_size=64")
    assert overridden.config.objective.mini_batches == 2  # arguments override what the script says


@pytest.mark.parametrize(
    ("arguments", "settings", "dropped"),
    [
        ("", {"objective.loss": "dapo", "objective.kl_coef": 0.0, "run.epochs": 30.0, "data.eval_source": None}, ""),
        ("ACTOR.policy_loss.loss_mode=gspo", {"objective.loss": "gspo"}, ""),
        ("ACTOR.policy_loss.loss_mode=clip_cov", {"objective.loss": "dapo"}, "loss_mode=clip_cov"),
        ("algorithm.adv_estimator=gae", {"objective.advantage": "std"}, "adv_estimator=gae: there is no critic"),
        ("ACTOR.optim.lr=1e-5 trainer.total_training_steps=9", {"learner.lr": 1e-5, "run.steps": 9}, ""),
        ("data.train_files=[a.parquet,b.parquet,c.parquet]", {}, "its rows could not be counted"),
        ("data.train_batch_size=", {"data.prompts_per_step": 1024}, "data.train_batch_size= is empty"),
        (f"{KL}=True algorithm.kl_penalty=abs", {}, "algorithm.kl_penalty=abs: a KL in the reward is k1"),
        (f"{KL}=True algorithm.kl_penalty=kl", {"objective.kl_in_reward": True}, ""),
        (f"{KL}=True {CTRL}.type=adaptive", {}, f"{CTRL}.type=adaptive: the weight of a KL stays as it is"),
        (f"{KL}=True {CTRL}.type=adaptive {CTRL}.target_kl=0.2", {}, f"{CTRL}.target_kl=0.2"),
        (f"{KL}=True {CTRL}.type=fixed {CTRL}.target_kl=0.2", {}, ""),
        (f"{CTRL}.type=adaptive {CTRL}.horizon=9 algorithm.kl_penalty=abs", {"objective.kl_in_reward": False}, ""),
        ("reward_model.reward_manager=mine", {}, "reward_model.reward_manager=mine: a reward manager is not run"),
        ("reward.reward_manager.name=gdpo", {}, "reward_manager.name=gdpo: a reward manager is not run"),
        ("reward_model.reward_manager=batch", {}, ""),
        ("ACTOR.optim.betas=[0.8,0.95]", {"learner.beta1": 0.8, "learner.beta2": 0.95}, ""),
        ("ACTOR.optim.lr_scheduler_type=cosine ACTOR.optim.min_lr_ratio=0.1", {"learner.min_lr_ratio": 0.1}, ""),
        (
            "data.shuffle=False MODEL.trust_remote_code=True",
            {"data.shuffle": False, "model.trust_remote_code": True},
            "",
        ),
        (f"{LONG}.enable=True {LONG}.len=8 reward.reward_kwargs.max_resp_len=512", {}, ""),
        (
            f"{LONG}.enable=True {LONG}.len=8 reward.reward_kwargs.max_resp_len=500",
            {},
            "max_resp_len=500: the buffer ends",
        ),
        ("actor_rollout_ref.rollout.ignore_eos=True", {}, "actor_rollout_ref.rollout.ignore_eos=True"),
    ],
)
def test_settings_by_their_name(convert, arguments, settings, dropped):
    words = arguments.replace("ACTOR", "actor_rollout_ref.actor").replace("MODEL", "actor_rollout_ref.model").split()
    found = convert("verl", "one.yaml", "defaults: [ppo_trainer, _self_]\n" + MINIMAL, *words)
    assert found.has(settings) == settings
    assert dropped in found.said and found.code == (3 if dropped else 0)
    assert found.functions() == [("data_source", 1.0)]


def test_a_reward_model_is_found_by_its_new_and_its_old_name(convert):
    for name in ("reward.reward_model.model_path", "reward_model.model.path"):
        found = convert("verl", "one.yaml", MINIMAL, "reward_model.enable=True", f"{name}=e/f")
        assert found.config.reward.functions[0].name == "model:e/f" and found.code == 0


def test_every_training_file_is_kept_and_every_row_counts_alike(convert, tmp_path):
    for name, rows in [("a.jsonl", 3), ("b.jsonl", 1)]:
        (tmp_path / name).write_text('{"prompt": "?", "answer": 1}\n' * rows)
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    words = (f"data.train_files=[{','.join(files)}]", f"data.val_files=[{files[1]}]")
    found = convert("verl", "one.yaml", MINIMAL, *words)
    sources = [(entry.source, entry.weight, entry.eval_source) for entry in found.config.data.sources]
    assert sources == [(files[0], 3.0, files[1]), (files[1], 1.0, None)] and found.code == 0
    found = convert("verl", "one.yaml", MINIMAL, words[0], f"data.val_files=[{','.join([*files, files[0]])}]")
    assert f"{files[0]} beside the others" in found.said and found.code == 3


@pytest.mark.parametrize(("gpus", "ranks", "share"), [(1, 1, 0.75), (8, 7, 1)])
def test_a_kl_in_the_reward_leaves_room_for_the_reference(convert, gpus, ranks, share):
    words = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", f"trainer.n_gpus_per_node={gpus}")
    expected = {
        **{"objective.kl_reward_coef": 0.01, "cluster.learner_ranks": ranks},
        **{"cluster.learner_gpus": share, "reference.placement": "workers"},
    }
    assert convert("verl", "one.yaml", MINIMAL, *words).has(expected) == expected


def test_dictionaries_and_the_names_of_today(convert):
    dotted = (
        *("+data.apply_chat_template_kwargs.enable_thinking=False", "reward.custom_reward_function.path=rw.py"),
        "+reward.custom_reward_function.reward_kwargs.cfg.len=4",
        "+reward.custom_reward_function.reward_kwargs.cfg.deep.er=5",
    )
    found = convert("verl", "one.yaml", MINIMAL, *dotted)
    assert found.config.data.chat_template_kwargs == {"enable_thinking": False}
    (function,) = found.config.reward.functions
    assert function.name.rpartition("/")[2] == "rw.py:compute_score"
    assert function.kwargs == {"cfg": {"len": 4, "deep": {"er": 5}}} and found.code == 0


WHOLE = """
algorithm: {adv_estimator: grpo}
data: {train_files: a.parquet, train_batch_size: 8}
actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4}}
trainer:
  logger: [console]
  project_name: sums
  experiment_name: ${trainer.project_name}-${oc.select:trainer.missing,small}
  default_local_dir: out/${trainer.project_name}/${trainer.experiment_name}
  save_freq: ${trainer.every}
custom_reward_function: {path: OLD, name: OLD_NAME}
reward: {custom_reward_function: {path: NEW, name: compute_score}}
"""


def test_a_whole_hydra_file_keeps_its_reward_function_and_what_its_references_stand_for(convert):
    for old, old_name, new, function in [
        ("rw.py", "score", "null", "rw.py:score"),
        ("null", "null", "rw.py", "rw.py:compute_score"),
        ("old.py", "score", "new.py", "old.py:score"),
    ]:
        text = WHOLE.replace("OLD_NAME", old_name).replace("OLD", old).replace("NEW", new)
        found = convert("verl", "config.yaml", text)
        assert found.functions() == [(function, 1.0)]
    assert found.said == "not converted: trainer.save_freq=${trainer.every}: nothing says what it stands for\n"
    assert found.config.run.name == "sums-small" and found.config.run.dir.endswith("/out/sums/sums-small")
    itself = WHOLE.replace("${trainer.every}", "'a${trainer.save_freq}'").replace("OLD", "null").replace("NEW", "rw.py")
    assert "trainer.save_freq=a" in convert("verl", "config.yaml", itself).said
    secret = convert("verl", "config.yaml", WHOLE.replace("${trainer.every}", "${oc.env:HOME}"))
    assert "${oc.env:HOME}: nothing says" in secret.said


def test_the_file_that_a_command_names_for_hydra_is_read_or_told_of(convert, refused, tmp_path):
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "sums.yaml").write_text("defaults: [ppo_trainer, _self_]\n" + MINIMAL)
    command = 'cd "$(dirname "$0")"\npython3 -m verl.trainer.main_ppo {} data.train_batch_size=16\n'
    for flags in ('--config-path="$PWD/config" --config-name=sums', "--config-path config --config-name sums.yaml"):
        found = convert("verl", "run.sh", command.format(flags))
        expected = {"data.prompts_per_step": 16, "rollout.group_size": 4, "model.path": "a/b"}
        assert found.has(expected) == expected and found.code == 0
    assert "config-name=other" in refused("verl", "run.sh", command.format("--config-name=other"))


@pytest.mark.parametrize(
    ("argument", "error"),
    [
        ("data.max_prompt_length=null", "data.max_prompt_length=None is not a value that verl 0.9.1 takes"),
        ("actor_rollout_ref.rollout.n=1", "error: rollout.group_size must be > 1"),  # said after it is printed
    ],
)
def test_a_value_that_is_not_taken_is_one_line(refused, argument, error):
    assert error in refused("verl", "one.yaml", MINIMAL, argument)


def test_settings_that_contradict_each_other_are_said_beside_what_was_not_converted(tmp_path, capsys):
    (tmp_path / "one.yaml").write_text(MINIMAL.replace("n: 4", "nn: 4"))
    assert main(["verl", str(tmp_path / "one.yaml")]) == 2
    dropped, error = capsys.readouterr().err.splitlines()
    assert dropped == "not converted: actor_rollout_ref.rollout.nn=4"
    assert "got 1: a group of one has no advantage; the experiment above sets rollout.group_size" in error


def test_no_file_no_command_and_no_mapping_are_one_line(refused, tmp_path, capsys):
    assert "before it started a trainer" in refused("verl", "one.sh", "echo hello\n")
    assert "one.yaml cannot be read as YAML: while parsing" in refused("verl", "one.yaml", "a: [")
    assert main(["verl", str(tmp_path / "none.sh")]) == 2
    assert "there is no such file" in capsys.readouterr().err

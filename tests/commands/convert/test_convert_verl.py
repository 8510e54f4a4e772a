"""verl's scripts and YAML files: variables resolved, units kept, defaults written out where they are not ours."""

from __future__ import annotations

import re

import pytest

from infsample_rl.commands.convert.__main__ import main
from infsample_rl.commands.convert.values import read_scalar

SCRIPT = r"""
#!/usr/bin/env bash
set -xeuo pipefail
export WORLD=${NNODES_OF_NOWHERE:-2}
BASE=$HOME/data
max_prompt=$((256 * 2))
max_response=$((max_prompt + 512))   # tokens
files="['$BASE/sums/train.parquet']"
loss=vanilla
OVERLONG=(
    reward_model.reward_manager=dapo
    # the buffer
    +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True
    +reward_model.reward_kwargs.overlong_buffer_cfg.len=128
    +reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=0.5
)
echo "training"
python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=False \
    data.train_files="$files" data.val_files=$BASE/sums/test.parquet \
    data.train_batch_size=96 data.max_prompt_length=${max_prompt} data.max_response_length=$max_response \
    data.filter_overlong_prompts=True data.truncation='left' \
    actor_rollout_ref.model.path=Qwen/Qwen2.5-1.5B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 actor_rollout_ref.actor.ppo_epochs=2 \
    actor_rollout_ref.actor.policy_loss.loss_mode=$loss actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.actor.kl_loss_coef=0.002 \
    actor_rollout_ref.actor.optim.lr=3e-6 actor_rollout_ref.actor.optim.lr_warmup_steps=5 actor_rollout_ref.actor.optim.weight_decay=0.1 \
    actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=True actor_rollout_ref.ref.fsdp_config.param_offload=True \
    actor_rollout_ref.rollout.n=8 actor_rollout_ref.rollout.top_k=-1 actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.val_kwargs.do_sample=True actor_rollout_ref.rollout.val_kwargs.temperature=0.6 \
    actor_rollout_ref.rollout.val_kwargs.n=4 \
    custom_reward_function.path=rewards/sums.py custom_reward_function.name=score_sum \
    "${OVERLONG[@]}" \
    trainer.n_gpus_per_node=4 trainer.nnodes=$WORLD trainer.total_epochs=2 trainer.save_freq=25 trainer.test_freq=-1 \
    trainer.experiment_name="sums-$(date +%s)" trainer.project_name=sums trainer.logger='["console"]' trainer.nonsense=1 "$@"
"""


MINIMAL = """
algorithm: {adv_estimator: grpo}
data: {train_files: a.parquet, train_batch_size: 8}
actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4, tensor_model_parallel_size: 1}}
trainer: {logger: [console]}
"""


def test_a_script_keeps_units_and_objective(convert):
    found = convert("verl", "sums.sh", SCRIPT)
    expected = {
        **{"data.prompts_per_step": 96, "rollout.group_size": 8, "objective.mini_batches": 3, "objective.epochs": 2},
        **{"data.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024, "data.long_prompts": "drop"},
        **{"objective.loss": "grpo", "objective.advantage": "mean_only", "objective.clip_low": 0.2},
        **{"objective.clip_high": 0.28, "objective.kl": "k3", "objective.kl_coef": 0.002},
        **{"objective.overlong_buffer_tokens": 128, "objective.overlong_penalty": 0.5},
        # 5 steps of 6 updates
        **{"learner.warmup_steps": 30, "learner.weight_decay": 0.1, "learner.offload_optimizer": True},
        **{"learner.max_tokens_per_micro_batch": 24000, "reference.placement": "learner", "reference.offload": True},
        **{"cluster.learner_ranks": 8, "cluster.rollout_workers": 8, "cluster.learner_gpus": 1},
        **{"run.eval_temperature": 0.6, "run.eval_samples": 4, "run.eval_every": 0, "run.epochs": 2.0},
        **{"rollout.top_k": 0, "rollout.kv_budget_bytes": "auto", "logging.wandb": "disabled"},
    }
    assert found.has(expected) == expected
    assert found.config.data.source.endswith("/data/sums/train.parquet")
    assert found.config.data.eval_source.endswith("/data/sums/test.parquet")
    assert [entry.name.rpartition("rewards/")[2] for entry in found.config.reward.functions] == ["sums.py:score_sum"]
    assert re.fullmatch(r"sums-\d{10}", found.config.run.name)  # date +%s


def test_nothing_of_a_script_is_dropped_and_what_has_no_value_is_said(convert):
    script = SCRIPT.replace("data.train_batch_size=96", "data.train_batch_size=$BATCH")
    found = convert("verl", "sums.sh", script)
    command = script.partition("python3 -m verl.trainer.main_ppo")[2]
    keys = [word.lstrip("+").partition("=")[0] for word in command.split() if "=" in word and not word.startswith('"$')]
    assert [key for key in keys if f"{key}=" not in found.text] == []
    unknown = found.under("Unknown, not converted")
    assert "trainer.nonsense=1" in unknown
    assert "data.train_batch_size=${BATCH}, line 21: it could not be resolved" in unknown
    assert "data.train_batch_size is given, line 21, and could not be resolved; 1024 is the default" in found.text


def test_arguments_are_the_scripts_own_and_override_it(convert):
    arguments = ("trainer.experiment_name=mine", "data.train_batch_size=64")
    found = convert("verl", "sums.sh", SCRIPT, *arguments)
    assert found.values("run.name", "data.prompts_per_step", "objective.mini_batches") == ("mine", 64, 2)


def test_verl_defaults_that_are_not_ours_are_written_out(convert):
    found = convert("verl", "minimal.yaml", MINIMAL)
    expected = {
        **{"objective.loss": "dapo", "objective.kl": "none", "learner.weight_decay": 0.01, "run.epochs": 30.0},
        **{"data.max_prompt_tokens": 512, "rollout.max_new_tokens": 512, "cluster.learner_ranks": 8},
        **{"data.eval_source": None, "run.checkpoint_every": 0, "model.dtype": "bfloat16"},
    }
    assert found.has(expected) == expected and found.code == 0
    assert [entry.name for entry in found.config.reward.functions] == ["data_source"]


@pytest.mark.parametrize(
    ("arguments", "settings", "said"),
    [
        ("ACTOR.policy_loss.loss_mode=gspo", {"loss": "gspo"}, "weighs all responses alike"),
        ("ACTOR.loss_agg_mode=seq-mean-token-sum-norm", {"loss": "dr_grpo"}, ""),
        ("ACTOR.policy_loss.loss_mode=clip_cov", {"loss": "dapo"}, "loss_mode=clip_cov"),
        ("algorithm.adv_estimator=rloo", {"advantage": "rloo"}, ""),
        ("algorithm.adv_estimator=reinforce_plus_plus", {"advantage": "std"}, "adv_estimator=reinforce_plus_plus"),
        (
            "algorithm.filter_groups.enable=True algorithm.filter_groups.max_num_gen_batches=10",
            {"dynamic_sampling": True, "dynamic_sampling_rounds": 10},
            "",
        ),
        ("algorithm.rollout_correction.rollout_is=token", {"importance": "token_tis", "importance_cap": 2.0}, ""),
        ("ACTOR.use_kl_loss=True ACTOR.kl_loss_type=mse", {"kl": "k2", "kl_coef": 0.001}, ""),
        (
            "reward_model.overlong_buffer.enable=True reward_model.overlong_buffer.len=64",
            {"overlong_buffer_tokens": 64, "overlong_penalty": 1.0},
            "",
        ),
    ],
)
def test_objectives_by_their_name(convert, arguments, settings, said):
    words = arguments.replace("ACTOR", "actor_rollout_ref.actor").split()
    found = convert("verl", "one.yaml", MINIMAL, *words)
    expected = {f"objective.{name}": value for name, value in settings.items()}
    assert found.has(expected) == expected
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")


@pytest.mark.parametrize(("gpus", "ranks", "share"), [(1, 1, 0.75), (8, 7, 1)])
def test_a_kl_in_the_reward_leaves_room_for_the_reference(convert, gpus, ranks, share):
    words = ("algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.01", f"trainer.n_gpus_per_node={gpus}")
    expected = {
        **{"objective.kl_in_reward": True, "objective.kl_reward_coef": 0.01, "cluster.learner_ranks": ranks},
        **{"cluster.learner_gpus": share, "reference.placement": "workers"},
    }
    assert convert("verl", "one.yaml", MINIMAL, *words).has(expected) == expected


def test_a_hydra_yaml_file_is_read_too_and_names_every_file(convert):
    files = "defaults: [ppo_trainer, _self_]\n" + MINIMAL.replace("a.parquet", "[a.parquet, b.parquet, c.parquet]")
    found = convert(
        "verl", "one.yaml", files, "actor_rollout_ref.actor.optim.lr=1e-5", "trainer.total_training_steps=9"
    )
    assert found.values("learner.lr", "run.steps") == (1e-5, 9)
    assert "b.parquet, c.parquet beside a.parquet" in found.said
    assert "defaults=" in found.under("Changes nothing that is learnt")


@pytest.mark.parametrize("null", ["", "  apply_chat_template_kwargs: null\n"])
def test_dictionaries_and_older_names_in_both_spellings(convert, null):
    dotted = (
        *("+data.apply_chat_template_kwargs.enable_thinking=False", "custom_reward_function.path=rw.py"),
        *("+custom_reward_function.reward_kwargs.cfg.len=4", "+custom_reward_function.reward_kwargs.cfg.deep.er=5"),
    )
    found = convert(
        "verl", "one.yaml", MINIMAL.replace("data: {", f"data: {{ {null.strip()}{',' if null else ''} "), *dotted
    )
    assert found.config.data.chat_template_kwargs == {"enable_thinking": False}
    (function,) = found.config.reward.functions
    assert function.name.rpartition("/")[2] == "rw.py:compute_score"
    assert function.kwargs == {"cfg": {"len": 4, "deep": {"er": 5}}} and found.code == 0


def test_other_samples_are_not_called_the_same(convert):
    words = ("actor_rollout_ref.rollout.ignore_eos=True", "actor_rollout_ref.rollout.do_sample=False")
    said = convert("verl", "one.yaml", MINIMAL, *words).said
    assert all(word in said for word in words)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("data.max_prompt_length", ("null", "0", "abc")),
        ("actor_rollout_ref.actor.ppo_mini_batch_size", ("null", "0", "abc")),
        ("actor_rollout_ref.actor.optim.betas", ("null", "0", "abc")),
        ("trainer.nnodes", ("null", "0", "abc")),
        ("actor_rollout_ref.model.path", ()),
    ],
)
def test_a_value_that_verl_does_not_take_is_one_line(refused, name, values):
    for value in values:
        said = refused("verl", "one.yaml", MINIMAL, f"{name}={value}")
        assert value == "0" or f"{name}={read_scalar(value)}, argument is not a value that verl 0.9.1 takes" in said
    unclear = refused("verl", "one.yaml", MINIMAL, "actor_rollout_ref.model.path=${NOWHERE}")
    assert (
        "what model.path is to be (could not be resolved: actor_rollout_ref.model.path); add actor_rollout" in unclear
    )


def test_what_is_refused_here_is_said_after_it_is_printed(refused, tmp_path):
    group_of_one = refused("verl", "one.yaml", MINIMAL, "actor_rollout_ref.rollout.n=1")
    assert group_of_one.startswith("error: rollout.group_size must be >= 2")
    assert "holds no command with verl.trainer.main_ppo" in refused("verl", "one.sh", "echo hello\n")
    assert main(["verl", str(tmp_path / "none.sh")]) == 2


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_bytes(b"python3 -m verl.trainer.main_ppo \xff\xfe")
    assert main(["verl", str(path)]) == 2
    assert f"FILE={path} is not UTF-8 text (byte 33)" in capsys.readouterr().err

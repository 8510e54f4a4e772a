"""verl's scripts and YAML files: variables resolved, units kept, defaults written out where they are not ours."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert.__main__ import main

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


def test_a_script_keeps_units_and_objective(convert):
    found = convert("verl", "sums.sh", SCRIPT)
    config = found.config
    assert (config.data.prompts_per_step, config.rollout.group_size) == (96, 8)
    assert (config.objective.mini_batches, config.objective.epochs) == (3, 2)
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.data.long_prompts) == (
        512,
        1024,
        "drop",
    )
    assert (
        config.data.source.endswith("/data/sums/train.parquet"),
        config.data.eval_source.endswith("/data/sums/test.parquet"),
    ) == (True, True)
    objective = config.objective
    assert (objective.loss, objective.advantage, objective.clip_low, objective.clip_high) == (
        "grpo",
        "mean_only",
        0.2,
        0.28,
    )
    assert (objective.kl, objective.kl_coef, config.reference.placement, config.reference.offload) == (
        "k3",
        0.002,
        "learner",
        True,
    )
    assert (objective.overlong_buffer_tokens, objective.overlong_penalty) == (128, 0.5)
    # 5 steps of 6 updates
    assert (config.learner.warmup_steps, config.learner.weight_decay, config.learner.offload_optimizer) == (
        30,
        0.1,
        True,
    )
    assert config.learner.max_tokens_per_micro_batch == 24000
    assert (config.cluster.learner_ranks, config.cluster.rollout_workers, config.cluster.learner_gpus) == (8, 8, 1)
    assert (config.run.eval_temperature, config.run.eval_samples, config.run.eval_every) == (0.6, 4, 0)
    assert [entry.name.rpartition("rewards/")[2] for entry in config.reward.functions] == ["sums.py:score_sum"]
    assert (config.rollout.top_k, config.run.epochs, config.logging.wandb) == (0, 2.0, "disabled")


def test_a_value_that_is_given_but_unknown_is_not_said_to_be_left_to_the_default(convert):
    text = convert("verl", "sums.sh", SCRIPT.replace("data.train_batch_size=96", "data.train_batch_size=$(nproc)")).text
    (line,) = [line for line in text.splitlines() if "prompts_per_step:" in line]
    assert (
        "data.train_batch_size is given, line " in line and "could not be resolved; 1024 is the default of verl" in line
    )


def test_nothing_of_a_script_is_dropped_and_what_only_a_shell_knows_is_said(convert):
    found = convert("verl", "sums.sh", SCRIPT)
    command = SCRIPT.partition("python3 -m verl.trainer.main_ppo")[2]
    keys = [word.lstrip("+").partition("=")[0] for word in command.split() if "=" in word and not word.startswith('"$')]
    shown = {
        "custom_reward_function.path": "reward.custom_reward_function.path",
        "custom_reward_function.name": "reward.custom_reward_function.name",
    }
    assert [key for key in keys if f"{shown.get(key, key)}=" not in found.text] == []
    unknown = found.under("Unknown, not converted")
    assert "trainer.nonsense=1" in unknown
    assert "trainer.experiment_name=sums-$(date +%s), line 37: only a shell could resolve it" in unknown


def test_arguments_behind_the_file_override_it(convert):
    config = convert("verl", "sums.sh", SCRIPT, "trainer.experiment_name=mine", "data.train_batch_size=64").config
    assert (config.run.name, config.data.prompts_per_step, config.objective.mini_batches) == ("mine", 64, 2)


def test_a_missing_setting_names_what_could_not_be_resolved(refused):
    said = refused("verl", "sums.sh", script_of(**{"actor_rollout_ref.model.path": "$NOWHERE"}))
    assert (
        "what model.path is to be (could not be resolved: actor_rollout_ref.model.path); add "
        "actor_rollout_ref.model.path=NAME" in said
    )


MINIMAL = {
    "algorithm.adv_estimator": "grpo",
    "data.train_files": "a.parquet",
    "actor_rollout_ref.model.path": "a/b",
    "actor_rollout_ref.rollout.n": 4,
    "data.train_batch_size": 8,
}


def script_of(**changes):
    settings = MINIMAL | changes
    return "python3 -m verl.trainer.main_ppo " + " ".join(f"{name}={value}" for name, value in settings.items())


def test_verl_defaults_that_are_not_ours_are_written_out(convert):
    config = convert("verl", "minimal.sh", script_of()).config
    assert (config.objective.loss, config.objective.kl, config.learner.weight_decay, config.run.epochs) == (
        "dapo",
        "none",
        0.01,
        30.0,
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.cluster.learner_ranks) == (512, 512, 8)
    assert (config.data.eval_source, config.run.checkpoint_every, config.model.dtype) == (None, 0, "bfloat16")
    assert [entry.name for entry in config.reward.functions] == ["data_source"]


@pytest.mark.parametrize(
    ("changes", "settings", "said"),
    [
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"}, {"loss": "gspo"}, "weighs all responses alike"),
        ({"actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm"}, {"loss": "dr_grpo"}, ""),
        ({"actor_rollout_ref.actor.policy_loss.loss_mode": "clip_cov"}, {"loss": "dapo"}, "loss_mode=clip_cov"),
        ({"algorithm.adv_estimator": "rloo"}, {"advantage": "rloo"}, ""),
        ({"algorithm.adv_estimator": "reinforce_plus_plus"}, {"advantage": "std"}, "adv_estimator=reinforce_plus_plus"),
        (
            {"algorithm.filter_groups.enable": True, "algorithm.filter_groups.max_num_gen_batches": 10},
            {"dynamic_sampling": True, "dynamic_sampling_rounds": 10},
            "",
        ),
        ({"algorithm.rollout_correction.rollout_is": "token"}, {"importance": "token_tis", "importance_cap": 2.0}, ""),
        (
            {"actor_rollout_ref.actor.use_kl_loss": True, "actor_rollout_ref.actor.kl_loss_type": "mse"},
            {"kl": "k2", "kl_coef": 0.001},
            "",
        ),
    ],
)
def test_objectives_by_their_name(convert, changes, settings, said):
    found = convert("verl", "one.sh", script_of(**changes))
    assert {name: getattr(found.config.objective, name) for name in settings} == settings
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")


@pytest.mark.parametrize(("gpus", "ranks", "share"), [(1, 1, 0.75), (8, 7, 1)])
def test_a_kl_in_the_reward_leaves_room_for_the_reference(convert, gpus, ranks, share):
    settings = {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.01, "trainer.n_gpus_per_node": gpus}
    config = convert("verl", "one.sh", script_of(**settings)).config
    assert (config.objective.kl_in_reward, config.objective.kl_reward_coef) == (True, 0.01)
    assert (config.cluster.learner_ranks, config.cluster.learner_gpus, config.reference.placement) == (
        ranks,
        share,
        "workers",
    )


def test_a_hydra_yaml_file_is_read_too(convert):
    text = (
        "defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\ndata:\n  train_files: [a.parquet, "
        "b.parquet]\n  train_batch_size: 4\n"
        "  apply_chat_template_kwargs: {enable_thinking: false}\n"
        "actor_rollout_ref:\n  model: {path: a/b}\n  rollout: {n: 4, name: vllm}\n  actor: {optim: {lr: "
        "1e-5}}\ntrainer: {total_training_steps: 9}\n"
    )
    found = convert("verl", "one.yaml", text)
    assert (found.config.learner.lr, found.config.run.steps, found.config.data.chat_template_kwargs) == (
        1e-5,
        9,
        {"enable_thinking": False},
    )
    assert "b.parquet beside a.parquet" in found.under("No equivalent here")
    assert "defaults=" in found.under("Changes nothing that is learnt")


@pytest.mark.parametrize(
    "spelling", ["reward_model.overlong_buffer", "+reward_model.reward_kwargs.overlong_buffer_cfg"]
)
def test_dapos_punishment_in_both_spellings(convert, spelling):
    changes = {
        "reward_model.reward_manager": "dapo",
        f"{spelling}.enable": True,
        f"{spelling}.len": 64,
        f"{spelling}.penalty_factor": 0.5,
    }
    config = convert("verl", "one.sh", script_of(**changes)).config
    assert (config.objective.overlong_buffer_tokens, config.objective.overlong_penalty) == (64, 0.5)


def test_dictionaries_in_both_spellings(convert):
    dotted = {
        "+data.apply_chat_template_kwargs.enable_thinking": False,
        "custom_reward_function.path": "rw.py",
        "+custom_reward_function.reward_kwargs.alpha": 2,
    }
    nested = (
        "algorithm: {adv_estimator: grpo}\n"
        "data: {train_files: a.parquet, train_batch_size: 4, apply_chat_template_kwargs: {enable_thinking: false}}\n"
        "actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4}}\n"
        "reward: {custom_reward_function: {path: rw.py, reward_kwargs: {alpha: 2}}}\n"
    )
    for found in (convert("verl", "one.sh", script_of(**dotted)), convert("verl", "one.yaml", nested)):
        assert found.config.data.chat_template_kwargs == {"enable_thinking": False}
        (function,) = found.config.reward.functions
        assert (function.name.rpartition("/")[2], function.kwargs) == ("rw.py:compute_score", {"alpha": 2})
        assert found.under("Unknown, not converted") == ""


def test_dictionaries_within_dictionaries_and_null_ones(convert):
    names = {"+custom_reward_function.reward_kwargs.cfg.len": 4, "+custom_reward_function.reward_kwargs.cfg.deep.er": 5}
    (function,) = convert(
        "verl", "one.sh", script_of(**{"custom_reward_function.path": "rw.py", **names})
    ).config.reward.functions
    assert function.kwargs == {"cfg": {"len": 4, "deep": {"er": 5}}}
    null = (
        "algorithm: {adv_estimator: grpo}\n"
        "data: {train_files: a.parquet, train_batch_size: 4, apply_chat_template_kwargs: null}\n"
        "actor_rollout_ref: {model: {path: a/b}, rollout: {n: 4}}\n"
    )
    found = convert("verl", "one.yaml", null, "data.apply_chat_template_kwargs.enable_thinking=False")
    assert found.config.data.chat_template_kwargs == {"enable_thinking": False}


def test_other_samples_are_not_called_the_same(convert):
    names = ("actor_rollout_ref.rollout.ignore_eos", "actor_rollout_ref.rollout.do_sample")
    found = convert("verl", "one.sh", script_of(**dict(zip(names, (True, False), strict=True))))
    assert all(f"{name}=" in found.under("No equivalent here") for name in names)


@pytest.mark.parametrize(
    "name",
    [
        "data.max_prompt_length",
        "actor_rollout_ref.actor.ppo_mini_batch_size",
        "actor_rollout_ref.actor.optim.betas",
        "trainer.nnodes",
    ],
)
@pytest.mark.parametrize("value", ["null", "0", "abc"])
def test_a_value_that_verl_does_not_take_is_one_line(tmp_path, capsys, name, value):
    (tmp_path / "one.sh").write_text(script_of(**{name: value}))
    code = main(["verl", str(tmp_path / "one.sh")])
    said = capsys.readouterr().err.strip()
    assert code in (0, 2) and said.count("\n") == 0
    if value == "abc":
        assert code == 2 and f"{name}=abc, line 1 is not a value that verl 0.9.1 takes" in said


def test_what_is_refused_here_is_said_after_it_is_printed(refused):
    group_of_one = script_of(**{"actor_rollout_ref.rollout.n": 1})
    assert refused("verl", "one.sh", group_of_one).startswith("error: rollout.group_size must be >= 2")
    assert "holds no command with verl.trainer.main_ppo" in refused("verl", "one.sh", "echo hello\n")


def test_a_file_that_is_no_text_is_named(tmp_path, capsys):
    path = tmp_path / "run.sh"
    path.write_bytes(b"python3 -m verl.trainer.main_ppo \xff\xfe")
    assert main(["verl", str(path)]) == 2
    assert f"FILE={path} is not UTF-8 text (byte 33)" in capsys.readouterr().err

"""OpenRLHF's scripts: dotted flags of today, the older ones, arrays of flags, Ray jobs."""

from __future__ import annotations

import pytest

SCRIPT = r"""
set -x
ROOT=$(cd "$(dirname "$0")/.." && pwd)
ARGS=(
   --actor.model_name_or_path Qwen/Qwen2.5-1.5B
   --reward.remote_url ${ROOT}/rewards/grade.py
   # --reward.model_name_or_path some/reward-model
   --data.prompt_dataset someone/sums
   --data.input_key question --data.label_key gold
   --data.apply_chat_template
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' \
   -- python3 -m openrlhf.cli.train_ppo_ray \
   ${ARGS[@]} \
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1 --ref.num_gpus_per_node 4 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 1 --train.colocate_all --vllm.gpu_memory_utilization 0.6 \
   --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \
   --actor.eps_clip_low_high 0.2 0.3 --actor.adam.lr 5e-7 --actor.entropy_coef 0.01 \
   --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 256 --rollout.micro_batch_size 4 --train.micro_batch_size 2 \
   --data.max_len 3072 --rollout.max_new_tokens 2048 --train.num_episodes 3 --ds.zero_stage 3 --ds.param_dtype bf16 \
   --eval.dataset someone/sums_test --eval.steps 10 --ckpt.save_steps 20 --ckpt.save_hf --logger.wandb.key abcdef0123456789 --no.such.flag 3
"""
OLD = """
python3 -m openrlhf.cli.train_ppo_ray --pretrain a/b --remote_rm_url grade.py --prompt_data c/d --input_key q --label_key a \\
   --advantage_estimator dr_grpo --init_kl_coef 0 --rollout_batch_size 16 --n_samples_per_prompt 4 --train_batch_size 64 \\
   --prompt_max_len 512 --generate_max_len 1024 --max_len 1536 --actor_learning_rate 1e-6 --async_train --bf16 --flash_attn \\
   --vllm_num_engines 2 --actor_num_gpus_per_node 2 --ref_num_gpus_per_node 2
"""


def test_a_ray_job_keeps_units_and_objective(convert, tmp_path):
    found = convert("openrlhf", "train.sh", SCRIPT)
    config = found.config
    assert (config.data.prompts_per_step, config.rollout.group_size, config.objective.mini_batches) == (64, 8, 2)
    assert (config.data.source, config.data.prompt_field, config.data.answer_field) == (
        "someone/sums",
        "question",
        "gold",
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.data.apply_chat_template) == (
        1024,
        2048,
        True,
    )
    objective = config.objective
    assert (objective.loss, objective.advantage, objective.clip_high, objective.entropy_coef) == (
        "dapo",
        "std",
        0.3,
        0.01,
    )
    assert (objective.kl, objective.kl_coef, config.reference.placement) == ("k3", 1e-3, "learner")
    assert [entry.name for entry in config.reward.functions] == [f"{tmp_path.parent}/rewards/grade.py:reward_func"]
    assert (
        config.learner.lr_schedule,
        config.learner.min_lr_ratio,
        config.learner.beta2,
    ) == ("cosine", 0.1, 0.95)
    assert (
        config.learner.backend,
        config.learner.zero_stage,
        config.cluster.colocate,
        config.cluster.learner_ranks,
    ) == ("deepspeed", 3, True, 4)
    assert (config.data.eval_source, config.run.eval_temperature, config.run.eval_samples) == (
        "someone/sums_test",
        0.6,
        4,
    )
    assert (config.run.seed, config.run.epochs, config.run.checkpoint_every) == (42, 3.0, 20)


def test_nothing_of_a_script_is_dropped_and_keys_are_never_shown(convert):
    found = convert("openrlhf", "train.sh", SCRIPT)
    flags = [word[2:] for word in SCRIPT.partition("-- python3")[2].split() if word.startswith("--")]
    assert [flag for flag in flags if f"{flag}=" not in found.text] == []
    assert "no.such.flag=3" in found.under("Unknown, not converted")
    assert "abcdef0123456789" not in found.text
    found = convert("openrlhf", "train.sh", SCRIPT.replace("--rollout.batch_size 64", "--rollout.batch_size $NOWHERE"))
    assert "# rollout.batch_size is given, line 19, and could not be resolved;" in found.text


def test_flags_of_older_versions_are_the_same_settings(convert):
    config = convert("openrlhf", "old.sh", OLD).config
    assert (config.model.path, config.data.prompts_per_step, config.objective.advantage, config.objective.kl) == (
        "a/b",
        16,
        "mean_only",
        "none",
    )
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.run.max_staleness) == (512, 1024, 1)
    assert (config.cluster.rollout_workers, config.cluster.learner_ranks, config.cluster.colocate) == (2, 2, False)
    assert config.data.apply_chat_template is False


def test_evaluations_are_of_the_whole_set_and_a_constant_rate_has_no_warm_up(convert, refused):
    found = convert("openrlhf", "one.sh", SCRIPT)
    assert (found.config.run.eval_prompts, found.config.run.eval_every) == (1_000_000, 10)
    assert "set learner.warmup_steps, 0.03 times the updates" in found.under("No equivalent here")
    constant = convert("openrlhf", "two.sh", SCRIPT.rstrip() + " --actor.lr_scheduler constant\n")
    assert constant.config.learner.lr_schedule == "constant"
    assert "learner.warmup_steps" not in constant.under("No equivalent here")
    assert "rollout.max_new_tokens=1k, line" in refused(
        "openrlhf", "three.sh", SCRIPT.replace("max_new_tokens 2048", "max_new_tokens 1k")
    )


@pytest.mark.parametrize(
    ("added", "settings", "said"),
    [
        ("--actor.policy_loss_type gspo", {"loss": "gspo"}, ""),
        (
            "--algo.kl.init_coef 0.02",
            {"kl_in_reward": True, "kl_reward_coef": 0.02},
            "takes a token's KL off the advantages",
        ),
        (
            "--algo.advantage.estimator reinforce_baseline",
            {"advantage": "mean_only"},
            "not divided by the batch's standard deviation",
        ),
        ("--algo.advantage.estimator gae", {"advantage": "std"}, "there is no critic"),
        (
            "--algo.advantage.is_correction_level token --algo.advantage.is_correction_mode clip",
            {"importance": "token_tis", "importance_cap": 5.0},
            "",
        ),
        ("--reward.overlong_buffer_len 256", {"overlong_buffer_tokens": 256, "overlong_penalty": 1.0}, ""),
        ("--algo.dynamic_filtering_enable --max_staleness_is_off", {"dynamic_sampling": True}, "groups are dropped"),
    ],
)
def test_objectives_by_their_name(convert, added, settings, said):
    script = OLD.replace(" --async_train", "").rstrip() + f" {added}\n"
    found = convert("openrlhf", "one.sh", script)
    assert {name: getattr(found.config.objective, name) for name in settings} == settings
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")


def test_what_is_missing_is_one_line(refused):
    assert "what reward.functions is to be; add --reward.remote_url" in refused(
        "openrlhf", "one.sh", OLD.replace("--remote_rm_url grade.py", "")
    )
    assert "holds no command with openrlhf.cli.train_ppo_ray" in refused("openrlhf", "one.sh", "echo\n")


def test_where_output_goes_is_no_setting(convert, refused):
    script = OLD.replace(" --async_train", "").rstrip()
    assert (
        convert(
            "openrlhf", "one.sh", script + " --actor.eps_clip_low_high 0.2 0.3 2>&1 | tee train.log\n"
        ).config.objective.clip_high
        == 0.3
    )
    assert "eps_clip_low_high" in refused("openrlhf", "one.sh", script + " --actor.eps_clip_low_high 0.2\n")

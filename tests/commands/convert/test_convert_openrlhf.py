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
    expected = {
        **{"data.prompts_per_step": 64, "rollout.group_size": 8, "objective.mini_batches": 2},
        **{"data.source": "someone/sums", "data.prompt_field": "question", "data.answer_field": "gold"},
        **{"data.max_prompt_tokens": 1024, "rollout.max_new_tokens": 2048, "data.apply_chat_template": True},
        **{"objective.loss": "dapo", "objective.advantage": "std", "objective.clip_high": 0.3},
        **{"objective.entropy_coef": 0.01, "objective.kl": "k3", "objective.kl_coef": 1e-3},
        **{"learner.lr_schedule": "cosine", "learner.min_lr_ratio": 0.1, "learner.beta2": 0.95},
        **{"learner.backend": "deepspeed", "learner.zero_stage": 3, "reference.placement": "learner"},
        **{"cluster.colocate": True, "cluster.learner_ranks": 4, "rollout.kv_budget_bytes": "auto"},
        **{"data.eval_source": "someone/sums_test", "run.eval_temperature": 0.6, "run.eval_samples": 4},
        **{"run.eval_prompts": 1_000_000, "run.eval_every": 10},
        **{"run.seed": 42, "run.epochs": 3.0, "run.checkpoint_every": 20},
    }
    assert found.has(expected) == expected
    assert [entry.name for entry in found.config.reward.functions] == [
        f"{tmp_path.parent}/rewards/grade.py:reward_func"
    ]


def test_nothing_of_a_script_is_dropped_and_keys_are_never_shown(convert):
    found = convert("openrlhf", "train.sh", SCRIPT.replace("--rollout.batch_size 64", "--rollout.batch_size $NOWHERE"))
    flags = [word[2:] for word in SCRIPT.partition("-- python3")[2].split() if word.startswith("--")]
    assert [flag for flag in flags if f"{flag}=" not in found.text] == []
    assert "no.such.flag=3" in found.under("Unknown, not converted")
    assert "rollout.batch_size=${NOWHERE}, line 19" in found.under("Unknown, not converted")
    assert "# rollout.batch_size is given, line 19, and could not be resolved; 1024 is the default" in found.text
    assert "actor.lr_warmup_ratio=0.03, the default of OpenRLHF 0.11.2" in found.under("No equivalent here")
    assert "abcdef0123456789" not in found.text + found.said


def test_flags_of_older_versions_are_the_same_settings(convert):
    expected = {
        **{
            "model.path": "a/b",
            "data.prompts_per_step": 16,
            "objective.advantage": "mean_only",
            "objective.kl": "none",
        },
        **{"data.max_prompt_tokens": 512, "rollout.max_new_tokens": 1024, "run.max_staleness": 1},
        **{"cluster.rollout_workers": 2, "cluster.learner_ranks": 2, "cluster.colocate": False},
        **{"data.apply_chat_template": False, "learner.lr": 1e-6},
    }
    assert convert("openrlhf", "old.sh", OLD).has(expected) == expected


@pytest.mark.parametrize(
    ("added", "settings", "said"),
    [
        ("--actor.policy_loss_type gspo --actor.lr_scheduler constant", {"loss": "gspo"}, ""),
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
        ("--actor.eps_clip_low_high 0.2 0.3 2>&1 | tee train.log", {"clip_high": 0.3}, ""),
    ],
)
def test_objectives_by_their_name(convert, added, settings, said):
    found = convert("openrlhf", "one.sh", OLD.replace(" --async_train", "").rstrip() + f" {added}\n")
    expected = {f"objective.{name}": value for name, value in settings.items()}
    assert found.has(expected) == expected
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")
    assert ("lr_warmup_ratio" in found.said) == ("lr_scheduler constant" not in added)


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("--remote_rm_url grade.py", "", "what reward.functions is to be; add --reward.remote_url"),
        ("-m openrlhf.cli.train_ppo_ray", "-m train", "holds no command with openrlhf.cli.train_ppo_ray"),
        ("--generate_max_len 1024", "--generate_max_len 1k", "generate_max_len=1k, line 4 is not a value"),
        ("--bf16", "--actor.eps_clip_low_high 0.2", "eps_clip_low_high=0.2, line 4 is not a value"),
    ],
)
def test_what_cannot_be_converted_is_one_line(refused, before, after, error):
    assert error in refused("openrlhf", "one.sh", OLD.replace(before, after))

"""OpenRLHF's scripts: arrays of flags, Ray jobs."""

from __future__ import annotations

import pytest

SCRIPT = r"""
set -x
ROOT=$(cd "$(dirname "$0")/.." && pwd)
ARGS=(
   --actor.model_name_or_path Qwen/Qwen2.5-1.5B --reward.remote_url ${ROOT}/rewards/grade.py
   # --reward.model_name_or_path some/reward-model
   --data.prompt_dataset someone/sums --data.input_key question --data.label_key gold --data.apply_chat_template
)
ray job submit --address="http://127.0.0.1:8265" --runtime-env-json='{"working_dir": "."}' \
   -- python3 -m openrlhf.cli.train_ppo_ray ${ARGS[@]} \
   --actor.num_nodes 1 --actor.num_gpus_per_node 4 --ref.num_nodes 1 --ref.num_gpus_per_node 4 \
   --vllm.num_engines 4 --vllm.tensor_parallel_size 1 --train.colocate_all --vllm.gpu_memory_utilization 0.6 \
   --algo.advantage.estimator group_norm --algo.kl.use_loss --algo.kl.estimator k3 --algo.kl.init_coef 1e-3 \
   --actor.eps_clip_low_high 0.2 0.3 --actor.adam.lr 5e-7 --actor.entropy_coef 0.01 --rollout.micro_batch_size 4 \
   --rollout.batch_size 64 --rollout.n_samples_per_prompt 8 --train.batch_size 256 --ds.zero_stage 3 \
   --data.max_len 3072 --rollout.max_new_tokens 2048 --train.num_episodes 3 --ds.param_dtype bf16 \
   --eval.dataset someone/sums_test --eval.steps 10 --ckpt.save_steps 20 --ckpt.save_hf \
   --logger.wandb.key abcdef0123456789 --logger.wandb.project adding --no.such.flag 3
"""
LEAST = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path a/b --reward.remote_url grade.py \\
   --data.prompt_dataset c/d --data.input_key q --algo.advantage.estimator group_norm --algo.kl.init_coef 0 \\
   --rollout.batch_size 16 --rollout.n_samples_per_prompt 4 --actor.lr_scheduler constant \\
   --vllm.num_engines 2 --actor.num_gpus_per_node 2
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
        **{"reference.placement": "learner", "cluster.colocate": True, "cluster.learner_ranks": 4},
        **{"data.eval_source": "someone/sums_test", "run.eval_temperature": 0.6, "run.eval_samples": 4},
        **{"run.eval_prompts": 1_000_000, "run.eval_every": 10, "rollout.kv_budget_bytes": "auto"},
        **{"run.seed": 42, "run.epochs": 3.0, "run.checkpoint_every": 20, "logging.wandb_project": "adding"},
    }
    assert found.has(expected) == expected
    assert found.config.reward.functions[0].name == f"{tmp_path.parent}/rewards/grade.py:reward_func"


def test_a_command_that_slurm_gives_a_shell_is_read(convert):
    found = convert("openrlhf", "slurm.sh", f'srun --overlap --nodes=1 bash -c "echo begun && {LEAST.strip()}"\n')
    expected = {"model.path": "a/b", "rollout.group_size": 4, "cluster.rollout_workers": 2}
    assert found.has(expected) == expected and found.code == 0


def test_nothing_of_a_script_is_dropped_in_silence_and_keys_are_never_shown(convert):
    found = convert("openrlhf", "train.sh", SCRIPT.replace("--rollout.batch_size 64", "--rollout.batch_size=$NOWHERE"))
    for dropped in ("no.such.flag=3", "rollout.batch_size= is empty", "actor.lr_warmup_ratio=0.03, the default"):
        assert f"not converted: {dropped}" in found.said
    assert "abcdef0123456789" not in found.text + found.said


@pytest.mark.parametrize(
    ("added", "settings", "dropped"),
    [
        ("", {"objective.kl_coef": 0.0, "cluster.rollout_workers": 2, "cluster.colocate": False}, ""),
        ("--algo.kl.init_coef 0.02", {"objective.kl_coef": 0.0, "objective.kl_reward_coef": 0.02}, ""),
        ("--actor.eps_clip_low_high 0.2 0.3 2>&1 | tee train.log", {"objective.clip_high": 0.3}, ""),
        ("--train.async_enable --ds.lora.rank 8", {"run.max_staleness": 1, "learner.lora_rank": 8}, ""),
        ("--algo.kl.init_coef 0.02 --algo.kl.estimator k3", {}, "algo.kl.estimator=k3: a KL in the reward is k1"),
        ("--algo.kl.estimator k3 --algo.kl.target 6 --ds.lora.dropout 0.1", {"objective.kl_coef": 0.0}, ""),
        ("--algo.kl.init_coef 0.02 --algo.kl.target 6", {}, "algo.kl.target=6: the weight of a KL stays as it is"),
        ("--ds.lora.rank 8 --ds.lora.dropout 0.1", {}, "ds.lora.dropout=0.1: adapters have no dropout"),
        ("--actor.adam.eps 1e-7", {"learner.adam_epsilon": 1e-7}, ""),
        ("--ds.load_in_4bit", {}, "ds.load_in_4bit=True"),
        ("--algo.advantage.gamma 0.9", {}, "algo.advantage.gamma=0.9: rewards are not discounted"),
        ("--data.prompt_dataset a.jsonl,b.jsonl", {}, "its rows could not be counted"),
    ],
)
def test_flags_by_their_name(convert, added, settings, dropped):
    found = convert("openrlhf", "one.sh", f"{LEAST.rstrip()} {added}\n")
    assert found.has(settings) == settings
    assert dropped in found.said and found.code == (3 if dropped else 0)
    given = {word[2:] for word in added.split() if word.startswith("--")}
    assert all(name in found.text for name in given)  # nothing is lost without a word


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ("grade.py", "http://127.0.0.1:1/grade", "nothing says what reward.functions is to be"),
        ("--rollout.batch_size 16", "--rollout.batch_size $NO", "rollout.batch_size=True is not a value"),
        ("--vllm.num_engines 2", "--actor.eps_clip_low_high 0.2", "actor.eps_clip_low_high=0.2 is not a value"),
    ],
)
def test_what_cannot_be_converted_is_one_line(refused, before, after, error):
    assert error in refused("openrlhf", "one.sh", LEAST.replace(before, after))

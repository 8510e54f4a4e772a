"""What the command prints for a peer's file trains, with the peer's data and reward function as they are; only the GPUs
are taken away."""

from __future__ import annotations

import json
import subprocess
import sys

import pandas
import pytest

TRL = """
model_name_or_path: {model}
dataset_name: {folder}/data.jsonl
reward_funcs: [my_rewards.vowels]
output_dir: {folder}/run
learning_rate: 1.0e-3
max_steps: 4
per_device_train_batch_size: 4
steps_per_generation: 2
num_generations: 4
max_completion_length: 12
max_prompt_length: 64
report_to: none
"""
TRL_REWARD = """
def vowels(completions, **columns):
    texts = [message[0]["content"] for message in completions]
    return [sum(c in "aeiou0123456789" for c in text) / (1 + len(text)) for text in texts]
"""

VERL = """
POLICY=actor_rollout_ref
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \\
    data.train_files={folder}/data.parquet data.val_files={folder}/data.parquet data.train_batch_size=3 \\
    data.max_prompt_length=64 data.max_response_length=12 $POLICY.model.path={model} $POLICY.rollout.n=4 \\
    $POLICY.actor.ppo_mini_batch_size=3 $POLICY.actor.use_kl_loss=True $POLICY.actor.kl_loss_coef=0.01 \\
    $POLICY.actor.optim.lr=1e-3 custom_reward_function.path={folder}/my_rewards.py custom_reward_function.name=vowels \\
    trainer.default_local_dir={folder}/run trainer.n_gpus_per_node=1 trainer.nnodes=1 \\
    trainer.total_training_steps=2 trainer.save_freq=2 trainer.test_freq=-1 trainer.logger='["console"]'
"""
VERL_REWARD = """
def vowels(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums" and ground_truth.isdigit()
    score = sum(c in "aeiou0123456789" for c in solution_str) / (1 + len(solution_str))
    return {"score": score, "length": len(solution_str)}
"""

OPENRLHF = """
python3 -m openrlhf.cli.train_ppo_ray --actor.model_name_or_path {model} --reward.remote_url {folder}/my_rewards.py \\
    --data.prompt_dataset {folder}/data.jsonl --data.input_key question --data.label_key answer \\
    --ckpt.output_dir {folder}/run --actor.num_nodes 1 --actor.num_gpus_per_node 1 --vllm.num_engines 1 \\
    --algo.advantage.estimator group_norm --algo.kl.init_coef 0 --actor.adam.lr 1e-3 \\
    --rollout.batch_size 4 --rollout.n_samples_per_prompt 4 --train.batch_size 16 --data.max_len 76 \\
    --rollout.max_new_tokens 12 --train.num_episodes 1
"""
OPENRLHF_REWARD = """
import torch

def reward_func(queries, prompts, labels, **kwargs):
    ends = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    return {"rewards": torch.tensor([sum(c in "aeiou0123456789" for c in end) / (1 + len(end)) for end in ends])}
"""

SUMS = [(1, 2), (3, 4), (2, 2), (5, 1), (0, 7), (6, 3), (8, 1), (4, 4)]


def write_data(peer, folder):
    """Eight sums, in the shape each peer's own examples have."""
    rows = []
    for text, answer in [(f"{a} + {b} = ?", str(a + b)) for a, b in SUMS]:
        row = {"prompt": [{"role": "user", "content": text}]}
        verl = {"data_source": "sums", "reward_model": {"style": "rule", "ground_truth": answer}}
        rows.append(row | (verl if peer == "verl" else {"question": text, "answer": answer}))
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("peer", "name", "text", "reward", "code"),
    [
        ("trl", "recipe.yaml", TRL, TRL_REWARD, 0),
        ("verl", "run.sh", VERL, VERL_REWARD, 0),
        ("openrlhf", "train.sh", OPENRLHF, OPENRLHF_REWARD, 3),  # its warm-up is a share of the run
    ],
    ids=["trl", "verl", "openrlhf"],
)
def test_a_converted_file_trains(peer, name, text, reward, code, tiny_qwen3, tmp_path):
    (tmp_path / name).write_text(text.format(model=tiny_qwen3, folder=tmp_path))
    (tmp_path / "my_rewards.py").write_text(reward)
    write_data(peer, tmp_path)
    converted = subprocess.run(
        [sys.executable, "-m", "infsample_rl", "convert", peer, name], cwd=tmp_path, capture_output=True, text=True
    )
    assert converted.returncode == code, converted.stderr
    (tmp_path / "mine" / "experiment").mkdir(parents=True)
    (tmp_path / "mine" / "experiment" / "theirs.yaml").write_text(converted.stdout)
    here = ["cluster.rollout_gpus=0", "cluster.learner_gpus=0", "model.dtype=float32"]
    command = [sys.executable, "-m", "infsample_rl.main", "--config-dir", "mine", "+experiment=theirs"]
    run = [*command, f"run.dir={tmp_path}/run", *here]
    trained = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert trained.returncode == 0, (trained.stdout[-2000:], trained.stderr[-2000:])
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in steps if record["step"]] == [1, 2]
    assert all(0 < record["reward/mean"] < 1 and record["learner/grad_norm"] > 0 for record in steps[-2:]), steps[-1]
    assert (tmp_path / "run" / "checkpoints" / "step_000002" / "model.safetensors").is_file()

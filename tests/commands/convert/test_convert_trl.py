"""TRL's YAML files, scripts and commands: what they become, and that nothing of them is lost."""

from __future__ import annotations

import pytest

RECIPE = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dtype: bfloat16
dataset_name: someone/sums
dataset_config: easy
reward_funcs: [my_rewards.format_reward, accuracy_reward]
reward_weights: [0.25, 1.0]
output_dir: out/grpo
run_name: recipe
learning_rate: 2.0e-6
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.05
max_steps: 400
per_device_train_batch_size: 4
gradient_accumulation_steps: 8
steps_per_generation: 16
num_generations: 16
num_iterations: 2
max_completion_length: 768
max_prompt_length: 256
beta: 0.04
epsilon: 0.2
epsilon_high: 0.28
loss_type: dr_grpo
scale_rewards: false
temperature: 0.9
top_k: 50
gradient_checkpointing: true
use_vllm: true
vllm_mode: colocate
vllm_gpu_memory_utilization: 0.35
vllm_importance_sampling_mode: token_truncate
vllm_importance_sampling_clip_max: 2.5
mask_truncated_completions: true
eval_strategy: steps
eval_steps: 40
save_steps: 80
save_total_limit: 3
report_to: [wandb]
logging_steps: 1
seed: 7
warp_speed: 9
"""

SCRIPT = '''
"""Sums: train."""
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward
from scoring.sums import correct

SYSTEM = "Think, " "then answer."
LENGTH = 512

def shortness(completions, **kwargs):
    return [-len(c[0]["content"]) / LENGTH for c in completions]

def to_chat(row):
    return {"prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": row["sum"]}]}

def main():
    data = load_dataset("someone/sums", split="train[:10%]").map(to_chat)
    args = GRPOConfig(
        output_dir="sums", learning_rate=5e-6, num_generations=4, per_device_train_batch_size=4 * 2, max_completion_length=2 * LENGTH,
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, bf16=False, num_train_epochs=1,
        log_completions=True, model_init_kwargs={"dtype": torch.float32}, reward_weights=[1.0, 0.5, 0.25, 0.75],
    )
    args.max_grad_norm = 0.2
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B", args=args, train_dataset=data, peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear"),
        reward_funcs=[correct, shortness, think_format_reward, get_soft_overlong_punishment(max_completion_len=1024, soft_punish_cache=128)],
    )
    trainer.train()

if __name__ == "__main__":
    main()
'''

COMMAND = """
#!/bin/bash
MODEL=Qwen/Qwen3-1.7B   # the policy
accelerate launch --num_processes 4 --config_file zero2.yaml train_gspo.py \\
    --model_name_or_path "$MODEL" \\
    --num_generations ${G:-8} \\
    --use_peft --lora_target_modules q_proj v_proj \\
    --output_dir "out/$(basename $MODEL)"
"""


def test_a_yaml_recipe_keeps_batch_updates_lengths_and_objective(convert):
    found = convert("trl", "recipe.yaml", RECIPE, "--num_processes", "2")
    config = found.config
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen2.5-0.5B-Instruct", "bfloat16")
    assert (config.data.source, config.data.eval_source, config.data.eval_split) == (
        "someone/sums:easy",
        "someone/sums:easy",
        "test",
    )
    # a generation batch is 4 x 2 processes x 16 = 128 responses, 8 groups of 16; an update 4 x 2 x 8 = 64: two updates,
    # twice
    assert (config.data.prompts_per_step, config.rollout.group_size) == (8, 16)
    assert (config.objective.mini_batches, config.objective.epochs) == (2, 2)
    # TRL counts updates, 4 a step here
    assert (config.run.steps, config.run.checkpoint_every, config.run.eval_every) == (100, 20, 10)
    assert (config.learner.lr, config.learner.lr_schedule, config.learner.min_lr_ratio) == (2e-6, "cosine", 0.1)
    assert config.learner.warmup_steps == -(-config.run.steps * 4 // 20), "of four updates a step"
    assert (config.data.max_prompt_tokens, config.rollout.max_new_tokens, config.data.long_prompts) == (
        256,
        768,
        "truncate",
    )
    objective = config.objective
    assert (objective.loss, objective.advantage, objective.clip_low, objective.clip_high) == (
        "dr_grpo",
        "mean_only",
        0.2,
        0.28,
    )
    assert (objective.kl, objective.kl_coef) == ("k2", 0.04)  # the gradient of TRL's k3 times the ratio
    assert (objective.importance, objective.importance_cap) == ("token_tis", 2.5)
    assert [(entry.name.rpartition("/")[2], entry.weight) for entry in config.reward.functions] == [
        ("my_rewards.py:format_reward", 0.25),
        ("math", 1.0),
    ]
    assert (config.cluster.colocate, config.cluster.rollout_workers, config.cluster.learner_ranks) == (True, 2, 2)
    assert (config.run.seed, config.rollout.temperature, config.rollout.top_k, config.run.keep_checkpoints) == (
        7,
        0.9,
        50,
        3,
    )


def test_every_key_of_a_recipe_is_in_the_printed_text(convert):
    text = convert("trl", "recipe.yaml", RECIPE).text
    keys = [line.partition(":")[0] for line in RECIPE.strip().split("\n")]
    assert [key for key in keys if f"{key}=" not in text] == []


def test_no_key_is_printed_and_no_value_leaves_its_comment(convert):
    recipe = RECIPE + 'model_init_kwargs: {note: "first\\nrun:\\n  seed: 777"}\n'
    text = convert("trl", "recipe.yaml", recipe, "--hub_token", "hf_SECRET").text
    assert "hf_SECRET" not in text and "--hub_token '(not shown)'" in text
    assert "#   model_init_kwargs.note=first run: seed: 777" in text


def test_what_has_no_equivalent_differs_or_is_unknown_is_said(convert):
    found = convert("trl", "recipe.yaml", RECIPE)
    assert "mask_truncated_completions=True, recipe.yaml" in found.under("No equivalent here")
    assert "k2" in found.under("Differs in meaning") and "one GPU is taken; add --num_processes N" in found.under(
        "Differs in meaning"
    )
    assert "vllm_gpu_memory_utilization=0.35, recipe.yaml: the engine here" in found.under(
        "Changes nothing that is learnt"
    )
    assert found.under("Unknown, not converted") == "#   warp_speed=9, recipe.yaml"


def test_a_script_is_read_and_never_run(convert, tmp_path):
    found = convert("trl", "train.py", SCRIPT + "\nraise SystemExit('this script was run')\n")
    config = found.config
    assert (config.model.path, config.model.dtype) == ("Qwen/Qwen3-0.6B", "float32")
    assert (config.data.source, config.data.split, config.data.prompt_field) == ("someone/sums", "train[:10%]", "sum")
    assert config.data.system_prompt == "Think, then answer."
    assert (config.objective.loss, config.objective.clip_high) == ("gspo", 4e-4)
    assert (config.data.prompts_per_step, config.rollout.max_new_tokens, config.learner.max_grad_norm) == (2, 1024, 0.2)
    assert (config.learner.lora_rank, config.learner.lora_alpha, config.learner.lora_targets) == (
        32,
        64.0,
        ["all-linear"],
    )
    names = [(entry.name.removeprefix(f"{tmp_path}/"), entry.weight) for entry in config.reward.functions]
    assert names[0][0].endswith("scoring/sums.py:correct")
    assert names[1:] == [("train.py:shortness", 0.5), ("think_format", 0.25)]
    assert (config.objective.overlong_buffer_tokens, config.objective.overlong_penalty) == (128, 0.75)
    assert ".map(to_chat) is not run" in found.under("No equivalent here")
    assert (
        "the script is imported for its reward functions, with what it imports (datasets, peft, scoring, trl)"
        in found.under("No equivalent here")
    )


def test_trl_defaults_that_are_not_ours_are_written_out(convert):
    minimal = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\n"
    config = convert("trl", "minimal.yaml", minimal).config
    assert (config.objective.loss, config.objective.kl, config.learner.lr_schedule, config.run.epochs) == (
        "dapo",
        "none",
        "linear",
        3.0,
    )
    assert (config.run.seed, config.rollout.max_new_tokens, config.learner.activation_checkpointing) == (42, 512, 1)
    assert (config.data.prompts_per_step, config.data.eval_source, config.run.checkpoint_every) == (1, None, 500)


def test_a_shell_command_gives_flags_processes_and_what_a_script_beside_it_says(convert, tmp_path):
    (tmp_path / "train_gspo.py").write_text(
        SCRIPT.replace('model="Qwen/Qwen3-0.6B"', "model=model_args.model_name_or_path")
    )
    config = convert("trl", "run.sh", COMMAND).config
    assert (config.model.path, config.rollout.group_size, config.cluster.learner_ranks) == ("Qwen/Qwen3-1.7B", 8, 4)
    assert (config.run.dir.endswith("out/Qwen3-1.7B"), config.learner.lora_targets) == (True, ["q_proj", "v_proj"])
    assert config.objective.loss == "gspo"
    unclear = convert("trl", "run.sh", COMMAND.replace("${G:-8}", "$NOWHERE")).text
    assert (
        "group_size: 8  # num_generations is given, line 6, and could not be resolved; 8 is the default of" in unclear
    )


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ("loss_type: cispo\nepsilon_high: 5.0", {"loss": "cispo", "clip_high": 4.0}, ""),
        ("loss_type: cispo", {"loss": "cispo", "clip_high": 0.0}, "scales every gradient by 0.2"),
        ("loss_type: sapo", {"loss": "grpo"}, "nearest: objective.loss=grpo"),
        ("loss_type: bnpo", {"loss": "dapo"}, "bnpo divides by the tokens of each micro-batch"),
        ("scale_rewards: batch", {"advantage": "mean_only"}, "scale_rewards=batch"),
        ("beta: 0.1\nuse_bias_correction_kl: false", {"kl": "k3", "kl_coef": 0.1}, ""),
        ("entropy_coef: 0.01", {"entropy_coef": 0.01, "kl": "none"}, ""),
    ],
)
def test_objectives_by_their_name(convert, changed, settings, said):
    found = convert(
        "trl", "one.yaml", f"model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\n{changed}\n"
    )
    assert {name: getattr(found.config.objective, name) for name in settings} == settings
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")


LEAST = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\n"


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ("max_steps: 1000", {"eval_every": 0}, ""),
        (
            "eval_strategy: steps\neval_steps: 40\nmax_steps: 1000",
            {"eval_every": 40, "eval_prompts": 1_000_000, "eval_samples": 8},
            "",
        ),
        ("eval_strategy: steps\neval_steps: 0.1\nmax_steps: 1000", {"eval_every": 100}, ""),
        (
            "eval_strategy: steps\neval_steps: 0.1",
            {"eval_every": 0},
            "eval_steps=0.1, one.yaml: a share of max_steps, which is not given",
        ),
        ("eval_strategy: steps", {"eval_every": 10}, ""),
        ("eval_strategy: steps\nlogging_steps: 25\nnum_generations_eval: 2", {"eval_every": 25, "eval_samples": 2}, ""),
        ("eval_strategy: epoch", {"eval_every": 0}, "eval_strategy=epoch, one.yaml: set run.eval_every, in steps"),
    ],
)
def test_evaluations_are_of_as_much_and_as_often(convert, changed, settings, said):
    found = convert("trl", "one.yaml", f"{LEAST}gradient_accumulation_steps: 1\n{changed}\n")
    assert {name: getattr(found.config.run, name) for name in settings} == settings
    assert said in found.under("No equivalent here")


@pytest.mark.parametrize(
    ("changed", "warmup"),
    [
        ("lr_scheduler_type: constant\nwarmup_steps: 100", 0),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 100", 100),
        ("warmup_ratio: 0.1", 100),
    ],
)
def test_a_constant_rate_has_no_warm_up_in_transformers(convert, changed, warmup):
    found = convert("trl", "one.yaml", f"{LEAST}max_steps: 1000\n{changed}\n")
    assert found.config.learner.warmup_steps == warmup
    assert ("constant has no warm-up" in found.under("No equivalent here")) == ("constant\n" in changed)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "dataset_name: c/d\nreward_funcs: accuracy_reward\n",
            "what model.path is to be; add --model_name_or_path NAME",
        ),
        (
            "model_name_or_path: a\nreward_funcs: accuracy_reward\n",
            "what data.source is to be; add --dataset_name NAME",
        ),
        ("model_name_or_path: a\ndataset_name: c\n", "what reward.functions is to be; add --reward_funcs"),
        ("- a\n", "must hold a mapping of settings, got list"),
        (
            "model_name_or_path: a\ndataset_name: c\nreward_funcs: accuracy_reward\nnum_generations: 3\n",
            "are no whole groups of num_generations=3",
        ),
        (
            "model_name_or_path: a\ndataset_name: c\nreward_funcs: accuracy_reward\nlearning_rate: fast\n",
            "learning_rate=fast, one.yaml is not a value",
        ),
        (
            "model_name_or_path: a\ndataset_name: c\nreward_funcs: accuracy_reward\nbeta: some\n",
            "beta=some, one.yaml is not a value",
        ),
        (
            "model_name_or_path: a\ndataset_name: c\nreward_funcs: accuracy_reward\nepsilon_high: abc\n",
            "epsilon_high=abc, one.yaml is not a value",
        ),
    ],
)
def test_what_cannot_be_converted_is_one_line(refused, text, error):
    assert error in refused("trl", "one.yaml", text)
    assert "\n" not in refused("trl", "one.yaml", text)

"""TRL's YAML files, scripts and commands: what they become, and that nothing of them is lost."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert import recording

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
    raise AssertionError

if __name__ == "__main__":
    main()
'''

QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
raise SystemExit("train() returned")
"""

PARSED = """
from dataclasses import dataclass, field
import numpy, torch, math_verify_of_nowhere
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

@dataclass
class Mine(ScriptArguments):
    scale: float = field(default=1.0)

@dataclass
class Config(GRPOConfig):
    flavour: str = "plain"

def rewards(kind):
    def made(completions, **kwargs):
        return [0.0] * len(completions)
    return made

if __name__ == "__main__":
    script, args, model = TrlParser((Mine, Config, ModelConfig)).parse_args_and_config()
    for exponent in range(5, 7):
        args.learning_rate = float(f"1e-{exponent}") * script.scale
    if args.num_generations == 8:  # TRL's default
        args.num_generations, args.max_grad_norm = 4, torch.finfo(torch.float16).max
    data = load_dataset("json", data_files=["a.jsonl", "b.jsonl"], split="train").filter(lambda row: row["ok"]).shuffle(seed=1)
    policy = AutoModelForCausalLM.from_pretrained(model.model_name_or_path, dtype=torch.bfloat16, device_map="auto")
    trainer = GRPOTrainer(policy, [rewards("a"), f"{script.dataset_name}/judge"], args, data, peft_config=get_peft_config(model))
    trainer.add_callback(print)
    trainer.train()
"""

COMMAND = """
#!/bin/bash
MODEL=Qwen/Qwen3-1.7B   # the policy
accelerate launch --num_processes 4 --config_file zero2.yaml train_gspo.py \\
    --model_name_or_path "$MODEL" \\
    --num_generations ${G:-8} \\
    --use_peft --lora_target_modules q_proj v_proj \\
    --output_dir "out/$(basename $MODEL)"
"""


LEAST = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\n"


def test_a_yaml_recipe_keeps_batch_updates_lengths_and_objective(convert):
    found = convert("trl", "recipe.yaml", RECIPE, "--num_processes", "2")
    expected = {
        **{"model.path": "Qwen/Qwen2.5-0.5B-Instruct", "model.dtype": "bfloat16"},
        **{"data.source": "someone/sums:easy", "data.eval_source": "someone/sums:easy", "data.eval_split": "test"},
        # a generation batch is 4 x 2 processes x 16 = 128 responses, 8 groups of 16; an update 4 x 2 x 8 = 64: two
        # updates, twice
        **{"data.prompts_per_step": 8, "rollout.group_size": 16, "objective.mini_batches": 2, "objective.epochs": 2},
        # TRL counts updates, 4 a step here
        **{"run.steps": 100, "run.checkpoint_every": 20, "run.eval_every": 10, "learner.warmup_steps": 20},
        **{"learner.lr": 2e-6, "learner.lr_schedule": "cosine", "learner.min_lr_ratio": 0.1},
        **{"data.max_prompt_tokens": 256, "rollout.max_new_tokens": 768, "data.long_prompts": "truncate"},
        **{"objective.loss": "dr_grpo", "objective.advantage": "mean_only", "objective.clip_low": 0.2},
        # k2 has the gradient of TRL's k3 times the ratio
        **{"objective.clip_high": 0.28, "objective.kl": "k2", "objective.kl_coef": 0.04},
        **{"objective.importance": "token_tis", "objective.importance_cap": 2.5, "rollout.kv_budget_bytes": "auto"},
        **{"cluster.colocate": True, "cluster.rollout_workers": 2, "cluster.learner_ranks": 2},
        **{"run.seed": 7, "rollout.temperature": 0.9, "rollout.top_k": 50, "run.keep_checkpoints": 3},
    }
    assert found.has(expected) == expected
    functions = [(entry.name.rpartition("/")[2], entry.weight) for entry in found.config.reward.functions]
    assert functions == [("my_rewards.py:format_reward", 0.25), ("math", 1.0)]


def test_every_key_of_a_recipe_is_printed_but_no_secret_and_no_line_leaves_its_comment(convert):
    recipe = RECIPE + 'model_init_kwargs: {note: "first\\nrun:\\n  seed: 777"}\n'
    found = convert("trl", "recipe.yaml", recipe, "--hub_token", "hf_SECRET")
    keys = [line.partition(":")[0] for line in RECIPE.strip().split("\n")]
    assert [key for key in keys if f"{key}=" not in found.text] == []
    assert "hf_SECRET" not in found.text + found.said and "--hub_token '(not shown)'" in found.text
    assert "#   model_init_kwargs.note=first run: seed: 777" in found.text
    assert "mask_truncated_completions=True, recipe.yaml" in found.under("No equivalent here")
    assert "k2" in found.under("Differs in meaning")
    assert "one GPU is taken; add --num_processes N" in found.under("Differs in meaning")
    assert "vllm_gpu_memory_utilization=0.35, recipe.yaml: the engine here" in found.under(
        "Changes nothing that is learnt"
    )
    assert found.under("Unknown, not converted") == "#   warp_speed=9, recipe.yaml"


def test_a_script_is_run_to_its_train(convert, tmp_path):
    found = convert("trl", "train.py", SCRIPT)
    expected = {
        **{"model.path": "Qwen/Qwen3-0.6B", "model.dtype": "float32", "data.source": "someone/sums"},
        **{"data.split": "train[:10%]", "data.prompt_field": "sum", "data.system_prompt": "Think, then answer."},
        **{"objective.loss": "gspo", "objective.clip_high": 4e-4, "data.prompts_per_step": 2},
        **{"rollout.max_new_tokens": 1024, "learner.max_grad_norm": 0.2, "learner.lora_rank": 32},
        **{"learner.lora_alpha": 64.0, "learner.lora_targets": ["all-linear"]},
        **{"objective.overlong_buffer_tokens": 128, "objective.overlong_penalty": 0.75},
    }
    assert found.has(expected) == expected and found.code == 0
    names = [(entry.name.removeprefix(f"{tmp_path}/"), entry.weight) for entry in found.config.reward.functions]
    assert names[0][0].endswith("scoring/sums.py:correct")
    assert names[1:] == [("train.py:shortness", 0.5), ("think_format", 0.25)]
    assert "imported for its reward functions, with what it imports (datasets, peft, scoring, torch, trl)" in found.text
    other = convert("trl", "train.py", SCRIPT.replace('row["sum"]}]', 'row["sum"] + "?"}]'))
    assert ".map(to_chat) is not run: save what it makes" in other.said


def test_the_quick_start_of_trl_loses_nothing(convert):
    found = convert("trl", "quick.py", QUICK_START)
    assert (found.code, found.said) == (0, "")
    assert found.values("model.path", "data.source") == ("Qwen/Qwen2.5-0.5B-Instruct", "trl-lib/DeepMath-103K")
    assert [entry.name for entry in found.config.reward.functions] == ["math"]


def test_parsers_loops_and_conditionals_of_a_script_come_out_right(convert):
    flags = "--model_name_or_path a/b --dataset_name c --scale 0.5 --lora_r 8 --use_peft --num_processes 2 --odd 1"
    found = convert("trl", "parsed.py", PARSED, *flags.split())
    assert found.values("learner.lr", "rollout.group_size", "learner.lora_rank") == (5e-7, 4, 8)
    assert found.values("model.path", "model.dtype", "cluster.learner_ranks") == ("a/b", "bfloat16", 2)
    assert [entry.name for entry in found.config.reward.functions] == ["model:c/judge"]
    assert "rewards.<locals>.made is made by code" in found.said and ".filter(<lambda>) is not run" in found.said
    assert "max_grad_norm=$(torch.finfo().max), line 26: it could not be resolved" in found.said
    assert "b.jsonl" in found.said and "odd=1" in found.said
    assert "scale=" not in found.said and "flavour=" not in found.said


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os\nos.fork()\nimport time\ntime.sleep(99)", "did not end within 4 s before GRPOTrainer"),
        (
            "import trl\nopen('OUTSIDE', 'w')",
            "PermissionError: [Errno 13] Permission denied: 'OUTSIDE' (line 2)) (it may",
        ),
        ("import urllib.request as u\nu.urlopen('http://127.0.0.1')", "Operation not permitted"),
        ("raise SystemExit(3)", "ended with exit code 3 before GRPOTrainer or RLOOTrainer had anything to train"),
        ("x = 1\nx.y", "ended with exit code 1 (AttributeError: 'int' object has no attribute 'y' (line 2)) before"),
        ("if x", "SyntaxError"),
        ("from trl import SFTTrainer\nSFTTrainer().train()", "ended before GRPOTrainer or RLOOTrainer had anything"),
    ],
)
def test_a_script_that_does_not_get_to_train_is_one_line(refused, monkeypatch, tmp_path, script, error):
    monkeypatch.setattr(recording, "TIME_LIMIT_S", 4.0)
    outside = f"{tmp_path}_outside"
    assert error.replace("OUTSIDE", outside) in refused("trl", "bad.py", script.replace("OUTSIDE", outside))


def test_trl_defaults_that_are_not_ours_are_written_out(convert):
    expected = {
        **{"objective.loss": "dapo", "objective.kl": "none", "learner.lr_schedule": "linear", "run.epochs": 3.0},
        **{"run.seed": 42, "rollout.max_new_tokens": 512, "learner.activation_checkpointing": 1},
        **{"data.prompts_per_step": 1, "data.eval_source": None, "run.checkpoint_every": 500},
    }
    found = convert("trl", "minimal.yaml", LEAST)
    assert found.has(expected) == expected and found.code == 0


def test_a_shell_command_gives_flags_processes_and_what_a_script_beside_it_says(convert, tmp_path):
    (tmp_path / "train_gspo.py").write_text(SCRIPT.replace('model="Qwen/Qwen3-0.6B"', "model=None"))
    found = convert("trl", "run.sh", COMMAND)
    expected = {
        **{"model.path": "Qwen/Qwen3-1.7B", "rollout.group_size": 8, "cluster.learner_ranks": 4},
        **{"learner.lora_targets": ["q_proj", "v_proj"], "objective.loss": "gspo"},
    }
    assert found.has(expected) == expected and found.config.run.dir.endswith("out/Qwen3-1.7B")
    unclear = convert("trl", "run.sh", COMMAND.replace("${G:-8}", "$NOWHERE")).text
    assert "group_size: 8  # num_generations is given, line 6, and could not be resolved; 8 is the default" in unclear


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
    found = convert("trl", "one.yaml", f"{LEAST}{changed}\n")
    expected = {f"objective.{name}": value for name, value in settings.items()}
    assert found.has(expected) == expected
    assert said in found.under("No equivalent here") + found.under("Differs in meaning")


def test_rloo_has_its_own_defaults(convert):
    found = convert("trl", "rloo.py", QUICK_START.replace("GRPO", "RLOO"))
    expected = {"objective.advantage": "rloo", "objective.kl_in_reward": True, "objective.kl_reward_coef": 0.05}
    assert found.has(expected | {"rollout.group_size": 2}) == expected | {"rollout.group_size": 2}


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
    expected = {f"run.{name}": value for name, value in settings.items()}
    assert found.has(expected) == expected
    assert said in found.under("No equivalent here")


@pytest.mark.parametrize(
    ("changed", "warmup", "dropped"),
    [
        ("lr_scheduler_type: constant\nwarmup_steps: 100\nmax_steps: 1000", 0, "constant has no warm-up"),
        ("lr_scheduler_type: constant_with_warmup\nwarmup_steps: 100\nmax_steps: 1000", 100, ""),
        ("warmup_ratio: 0.1\nmax_steps: 1000", 100, ""),
        ("warmup_ratio: 0.1", 0, "set learner.warmup_steps, 0.1 times the updates of the run"),
    ],
)
def test_warm_up_is_counted_in_updates(convert, changed, warmup, dropped):
    found = convert("trl", "one.yaml", f"{LEAST}{changed}\n")
    assert found.config.learner.warmup_steps == warmup
    assert dropped in found.said and found.code == (3 if dropped else 0)


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

"""TRL's YAML files, scripts and commands: what they become, and that nothing of them is lost in silence."""

from __future__ import annotations

import json

import pytest

from infsample_rl.commands.convert import recording

WHOLE = "per_device_train_batch_size: 1\nnum_generations: 16\n"
ADAM = {"learner.beta1": 0.8, "learner.beta2": 0.95, "learner.adam_epsilon": 1e-7}
LOWEST = "learning_rate: 2.0e-6\nlr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: "
PEFT, IS = "use_peft: true\nlora_dropout: 0\n", "vllm_importance_sampling"
LEAST = "model_name_or_path: a/b\ndataset_name: c/d\nreward_funcs: accuracy_reward\n"
RECIPE = """
model_name_or_path: Qwen/Qwen2.5-0.5B-Instruct
dataset_name: someone/sums
reward_funcs: [my_rewards.format_reward, accuracy_reward]
learning_rate: 2.0e-6
warp_speed: 9
note: "first\\nrun:\\n  seed: 777"
"""
FLAGS = """
--dataset_config easy --reward_weights 0.25 1.0 --warmup_ratio 0.05 --max_steps 400 --per_device_train_batch_size 4
--gradient_accumulation_steps 8 --steps_per_generation 16 --num_generations 16 --num_iterations 2 --beta 0.04
--max_completion_length 768 --max_prompt_length=256 --epsilon_high 0.28 --use_vllm --eval_strategy steps
--eval_steps 40 --save_steps 80 --num_processes 2 --hub_token hf_SECRET
"""
SCRIPT = """
import torch
from datasets import load_dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import get_soft_overlong_punishment, think_format_reward
from scoring.sums import correct

def shortness(completions, **kwargs):
    return [-len(c[0]["content"]) for c in completions]

def main(length=512):
    data = load_dataset("someone/sums", split="train[:10%]").shuffle(seed=1)
    assert not torch.cuda.get_device_capability()[0] >= 8
    args = GRPOConfig(
        "sums", num_generations=4, per_device_train_batch_size=4 * 2, max_completion_length=2 * length, bf16=False,
        importance_sampling_level="sequence", epsilon_high=4e-4, reward_weights=[1.0, 0.5, 0.25],
    )
    args.max_grad_norm = 0.2
    trainer = GRPOTrainer(
        model="Qwen/Qwen3-0.6B", args=args, train_dataset=data,
        peft_config=LoraConfig(r=32, lora_alpha=64, target_modules="all-linear", task_type="CAUSAL_LM"),
        reward_funcs=[correct, shortness, think_format_reward],
    )
    trainer.train()

__name__ == "__main__" and main()
"""

QUICK_START = """
from datasets import load_dataset
from trl import GRPOTrainer
from trl.rewards import accuracy_reward

dataset = load_dataset("trl-lib/DeepMath-103K", split="train")
trainer = GRPOTrainer(model="Qwen/Qwen2.5-0.5B-Instruct", reward_funcs=accuracy_reward, train_dataset=dataset)
trainer.train()
"""

PARSED = """
from dataclasses import dataclass, field
import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM
from trl import GRPOConfig, GRPOTrainer, ModelConfig, ScriptArguments, TrlParser, get_peft_config

@dataclass
class Mine(ScriptArguments):
    scale: float = field(default=1.0)

if __name__ == "__main__":
    script, args, model = TrlParser((Mine, GRPOConfig, ModelConfig)).parse_args_and_config()
    for exponent in range(5, 7):
        args.learning_rate = float(f"1e-{exponent}") * script.scale
    data = load_dataset("json", data_files=["a.jsonl", "b.jsonl"], split="train").filter(lambda row: row["ok"])
    policy = AutoModelForCausalLM.from_pretrained(model.model_name_or_path, dtype=torch.bfloat16, device_map="auto")
    functions = [lambda completions: [], f"{script.dataset_name}/judge"]
    trainer = GRPOTrainer(policy, functions, args, data, peft_config=get_peft_config(model))
    trainer.train()
"""

ENVIRONMENT = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

class Wordle:
    def reset(self, **kwargs) -> str: ...
    def guess(self, word: str) -> str: ...
    def get_reward(self) -> float: ...

def lookup(word: str) -> str: ...

if __name__ == "__main__":
    args = GRPOConfig(max_tool_calling_iterations=5)
    trainer = GRPOTrainer("a/b", args=args, environment_factory=Wordle, tools=[lookup, lambda word: word])
    trainer.train()
"""

COMMAND = """
MODEL=Qwen/Qwen3-1.7B   # the policy
python prepare.py
accelerate launch --config_file zero2.yaml --num_processes 4 train_grpo.py --dataset_name c --scale 0.5 \\
    --model_name_or_path "$MODEL" --num_generations ${G:-8} --odd 1 \\
    --use_peft --lora_target_modules q_proj v_proj --output_dir "out/$(basename $MODEL)"
"""


def test_a_yaml_recipe_keeps_batch_updates_lengths_and_objective(convert):
    found = convert("trl", "recipe.yaml", RECIPE, *FLAGS.split())
    expected = {
        **{"model.path": "Qwen/Qwen2.5-0.5B-Instruct", "model.dtype": "bfloat16", "learner.lr": 2e-6},
        **{"data.source": "someone/sums:easy", "data.eval_source": "someone/sums:easy"},
        # a generation batch is 4 x 2 processes x 16 = 128 responses, 8 groups of 16; an update 4 x 2 x 8 = 64: two
        # updates, twice
        **{"data.prompts_per_step": 8, "rollout.group_size": 16, "objective.mini_batches": 2, "objective.epochs": 2},
        # TRL counts updates, 4 a step here
        **{"run.steps": 100, "run.checkpoint_every": 20, "run.eval_every": 10, "learner.warmup_steps": 20},
        **{"data.max_prompt_tokens": 256, "rollout.max_new_tokens": 768, "data.long_prompts": "truncate"},
        # k2 has the gradient of TRL's k3 times the ratio
        **{"objective.clip_high": 0.28, "objective.kl": "k2", "objective.kl_coef": 0.04},
        **{"cluster.colocate": True, "cluster.learner_ranks": 2, "rollout.kv_budget_bytes": "auto"},
    }
    assert found.has(expected) == expected
    assert found.functions() == [("my_rewards.py:format_reward", 0.25), ("math", 1.0)]
    assert found.said == "not converted: note=first run: seed: 777\nnot converted: warp_speed=9\n"
    assert "change nothing that is learnt: hub_token use_vllm\n" in found.text
    assert "hf_SECRET" not in found.text


def test_a_script_is_run_to_its_train(convert, tmp_path):
    (tmp_path / "scoring").mkdir()
    (tmp_path / "scoring" / "sums.py").write_text("def correct(completions, **columns): ...\n")
    found = convert("trl", "train.py", SCRIPT)
    expected = {
        **{"model.path": "Qwen/Qwen3-0.6B", "model.dtype": "float32", "data.source": "someone/sums"},
        **{"data.split": "train[:10%]", "objective.loss": "gspo", "objective.clip_high": 4e-4},
        **{"data.prompts_per_step": 2, "rollout.max_new_tokens": 1024, "learner.max_grad_norm": 0.2},
        **{"learner.lora_rank": 32, "learner.lora_alpha": 64.0, "learner.lora_targets": ["all-linear"]},
    }
    assert found.has(expected) == expected and found.code == 3
    assert found.said == (
        "not converted: shuffle() of train_dataset is not run: data.shuffle draws orders of its own from run.seed\n"
    )
    assert found.functions() == [("sums.py:correct", 1.0), ("train.py:shortness", 0.5), ("think_format", 0.25)]
    script = SCRIPT.replace("shuffle(seed=1)", "select(range(9))").replace(
        "shortness,", "get_soft_overlong_punishment(9, 3),"
    )
    said = convert("trl", "train.py", script).said
    assert "train_dataset.select() is not run: save what it makes" in said
    assert "trl.rewards.get_soft_overlong_punishment() is made by code" in said


def test_the_quick_start_of_trl_loses_nothing(convert):
    found = convert("trl", "quick.py", QUICK_START)
    expected = {
        "model.path": "Qwen/Qwen2.5-0.5B-Instruct",
        "data.source": "trl-lib/DeepMath-103K",
        "data.split": "train",
    }
    assert (found.code, found.has(expected), found.functions()) == (0, expected, [("math", 1.0)])
    own = QUICK_START.replace("from trl.rewards import accuracy_reward", "def accuracy_reward(completions): ...")
    found = convert("trl", "own.py", own)
    assert (found.code, found.functions()) == (0, [("own.py:accuracy_reward", 1.0)])


def test_a_function_without_a_name_is_refused_with_what_to_do(refused):
    unnamed = QUICK_START.replace("reward_funcs=accuracy_reward", "reward_funcs=lambda completions: [1.0]")
    said = refused("trl", "quick.py", unnamed)
    assert "nothing says what reward.functions is to be" in said
    assert "<lambda> is made by code; write it into a file and give path/to/file.py:function" in said


OPENENV = """
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

class Count:
    def reset(self, **kwargs):
        self.reward = 0.0

    def add(self, amount: int) -> int:
        self.reward += amount

def counted(environments, **kwargs):
    return [environment.reward for environment in environments]

if __name__ == "__main__":
    rows = Dataset.from_dict({"prompt": [[{"role": "user", "content": "Count."}]]})
    args = GRPOConfig(chat_template_kwargs={"enable_thinking": False})
    GRPOTrainer("a/b", counted, args, rows, environment_factory=Count).train()
"""


def test_an_example_with_an_environment_says_where_its_rows_are_to_be_and_loses_nothing_else(convert, refused):
    said = refused("trl", "count.py", OPENENV.replace("Dataset.from_dict", "Dataset.from_generator"))
    assert "count.py: train_dataset.from_generator() is not run: save what it makes" in said
    assert said.endswith("here by --dataset_name rows.jsonl behind it")
    found = convert("trl", "count.py", OPENENV, "--dataset_name", "rows.jsonl")
    assert found.functions() == [("count.py:counted", 1.0)] and found.code == 0
    config = found.config
    assert config.environment.factory.endswith("count.py:Count") and config.data.source.endswith("rows.jsonl")
    assert config.data.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import os\nos.fork()\nimport time\ntime.sleep(99)", "did not end within 4 s before it called train()"),
        ("import trl\nopen('OUTSIDE', 'w')", "PermissionError: [Errno 13] Permission denied: 'OUTSIDE' (line 2))"),
        ("import trl\ntrl.GRPOTrainer()", "ended before it called train() of a trainer"),
    ],
)
def test_a_script_that_does_not_get_to_train_is_one_line(refused, monkeypatch, tmp_path, script, error):
    monkeypatch.setattr(recording, "TIME_LIMIT_S", 4.0)
    outside = f"{tmp_path}_outside"
    assert error.replace("OUTSIDE", outside) in refused("trl", "bad.py", script.replace("OUTSIDE", outside))


def test_a_shell_command_gives_flags_to_a_script_with_a_parser_and_every_file_is_named(convert, tmp_path):
    (tmp_path / "train_grpo.py").write_text(PARSED)
    expected = {
        **{"model.path": "Qwen/Qwen3-1.7B", "rollout.group_size": 8, "cluster.learner_ranks": 4, "learner.lr": 5e-7},
        **{"learner.lora_targets": ["q_proj", "v_proj"], "model.dtype": "bfloat16"},
    }
    found = convert("trl", "run.sh", COMMAND)
    assert found.has(expected) == expected and found.config.run.dir.endswith("out/Qwen3-1.7B")
    assert found.config.reward.functions[0].name == "model:c/judge"
    for said in (
        "<lambda> is made by code",
        "train_dataset.filter() is not run",
        "its rows could not be counted",
        "odd=1",
    ):
        assert said in found.said
    assert "scale=" not in found.said


@pytest.mark.parametrize(
    ("launcher", "ranks"),
    [
        ("accelerate launch --config_file=zero3.yaml", 4),
        ("accelerate launch --config_file zero3.yaml --num_processes 2", 2),
        ("accelerate launch --config_file none.yaml --num_processes 2", 2),
        ("torchrun --nproc-per-node 4", 4),
        ("deepspeed --num_gpus=4", 4),
    ],
)
def test_a_launchers_processes_count_where_it_has_them_from(convert, tmp_path, launcher, ranks):
    (tmp_path / "zero3.yaml").write_text("distributed_type: DEEPSPEED\nnum_processes: 4\n")
    (tmp_path / "train.py").write_text(QUICK_START)
    found = convert("trl", "run.sh", f"{launcher} train.py\n")
    # 8 responses a process are one group of 8
    expected = {"cluster.learner_ranks": ranks, "data.prompts_per_step": ranks}
    assert found.has(expected) == expected and found.code == 0


@pytest.mark.parametrize("command", ["trl grpo --config none.yaml", "accelerate launch --config_file none.yaml t.py"])
def test_a_file_of_settings_that_is_not_there_is_not_passed_over(refused, tmp_path, command):
    (tmp_path / "t.py").write_text(QUICK_START)
    assert "none.yaml cannot be read as YAML: [Errno 2] No such file" in refused("trl", "run.sh", command)


def test_a_flag_may_be_longer_than_a_files_name(convert, tmp_path):
    (tmp_path / "train_grpo.py").write_text(PARSED)
    found = convert("trl", "run.sh", f"{COMMAND.rstrip()} --note '{'long ' * 80}'\n")
    assert "not converted: note=long long" in found.said


def test_a_flag_may_be_written_with_dashes_as_their_parsers_take_it(convert, tmp_path):
    (tmp_path / "train_grpo.py").write_text(PARSED)
    found = convert("trl", "run.sh", COMMAND.replace("--model_name_or_path", "--model-name-or-path"))
    assert found.config.model.path == "Qwen/Qwen3-1.7B" and "model-name" not in found.said


def test_a_shell_command_of_its_command_line(convert, tmp_path):
    (tmp_path / "recipe.yaml").write_text(LEAST)
    expected = {"model.path": "a/b", "rollout.group_size": 4}
    command = "trl grpo --config recipe.yaml --num_generations 4\nsleep 99"
    assert convert("trl", "run.sh", command).has(expected) == expected


@pytest.mark.parametrize(
    ("changed", "settings", "dropped"),
    [
        ("", {"objective.loss": "dapo", "objective.kl_coef": 0.0, "run.epochs": 3.0, "data.eval_source": None}, ""),
        ("loss_type: sapo", {"objective.loss": "grpo"}, "loss_type=sapo: no such loss"),
        ("scale_rewards: batch", {"objective.advantage": "std"}, "scale_rewards=batch"),
        ("beta: 0.1\nuse_bias_correction_kl: false", {"objective.kl": "k3", "objective.kl_coef": 0.1}, ""),
        ("use_peft: true", {"learner.lora_rank": 16}, "lora_dropout=0.05, the default of trl 1.16.0: adapters have no"),
        (f"{PEFT}use_rslora: true", {"learner.lora_alpha": 128.0}, ""),  # 32 x the root of 16, of 16
        (f"{PEFT}lora_modules_to_save: [head]\nlora_task_type: CAUSAL_LM", {}, "lora_modules_to_save=['head']"),
        (f"{PEFT}lora_target_parameters: [w]", {}, "lora_target_parameters=['w']"),
        (f"{PEFT}use_dora: true", {}, "use_dora=True: adapters are LoRA's"),
        ("lora_r: 4\nlora_dropout: 0.1\nuse_rslora: true", {"learner.lora_rank": 0}, ""),
        ("use_vllm: true\nvllm_structured_outputs_regex: a+", {}, "vllm_structured_outputs_regex=a+: no sample is"),
        ("vllm_structured_outputs_regex: a+\nvllm_server_port: 1", {}, ""),
        (f"use_vllm: true\n{IS}_mode: token_mask\n{IS}_cap: 4", {"objective.importance": "auto"}, f"{IS}_mode=token_m"),
        (f"use_vllm: true\n{IS}_mode: token_truncate\n{IS}_cap: 4", {"objective.importance_cap": 4.0}, ""),
        (f"use_vllm: true\n{IS}_correction: false", {"objective.importance": "none"}, ""),
        (f"use_vllm: true\n{IS}_clip_min: 0.5", {}, f"{IS}_clip_min=0.5: weights have a cap alone"),
        ("adam_beta1: 0.8\nadam_beta2: 0.95\nadam_epsilon: 1.0e-7", ADAM, ""),
        ("entropy_coef: 0.01\nmin_p: 0.05", {"objective.entropy_coef": 0.01, "rollout.min_p": 0.05}, ""),
        (
            "shuffle_dataset: false\ntrust_remote_code: true",
            {"data.shuffle": False, "model.trust_remote_code": True},
            "",
        ),
        ("loss_type: cispo\nepsilon_high: 5", {"objective.loss": "cispo", "objective.clip_high": 4.0}, ""),
        ("loss_type: cispo\nepsilon: 0.3", {"objective.clip_high": 0.2}, "epsilon=0.3: cispo's bound of the ratio"),
        (f"{LOWEST}{{min_lr: 1.0e-7}}", {"learner.lr_schedule": "cosine", "learner.min_lr_ratio": 0.05}, ""),
        (f"{LOWEST}{{min_lr_rate: 0.1, num_cycles: 0.5}}", {"learner.min_lr_ratio": 0.1}, ""),
        (f"{LOWEST}{{min_lr_rate: 0.1, num_cycles: 2}}", {"learner.min_lr_ratio": 0.1}, "and nothing for num_cycles"),
        # 64 responses are 4 prompts; TRL's 64 updates of one response are 4 of one prompt here
        (f"{WHOLE}generation_batch_size: 64\nmax_steps: 640", {"data.prompts_per_step": 4, "run.steps": 10}, ""),
        (f"{WHOLE}steps_per_generation: 64\nmax_steps: 640\nwarmup_steps: 32", {"learner.warmup_steps": 2}, ""),
        ("save_strategy: no", {"run.checkpoint_every": 0}, ""),
        ("lr_scheduler_type: constant\nwarmup_steps: 100", {"learner.warmup_steps": 0}, "warmup_steps=100"),
        ("warmup_ratio: 0.1", {"learner.warmup_steps": 0}, "set learner.warmup_steps, 0.1 times the updates"),
    ],
)
def test_settings_by_their_name(convert, changed, settings, dropped):
    found = convert("trl", "one.yaml", f"{LEAST}{changed}\n")
    assert found.has(settings) == settings
    assert dropped in found.said and found.code == (3 if dropped else 0)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (LEAST.replace("model_name_or_path: a/b", ""), "nothing says what model.path is to be"),
        (f"{LEAST}num_generations: 3\n", "are no whole groups of num_generations=3"),
        (f"{LEAST}reward_weights: [1, 2]\n", "reward_weights has 2 entries for 1 reward_funcs"),
        (f"{LEAST}{LOWEST}{{min_lr: low}}\n", "is not a value that trl 1.16.0 takes"),
        (f"{LEAST}generation_batch_size: 12\n", "generation_batch_size=12 is no multiple of the 8 responses"),
        (f"{LEAST}learning_rate: fast\n", "learning_rate=fast is not a value that trl 1.16.0 takes"),
    ],
)
def test_what_cannot_be_converted_is_one_line(refused, text, error):
    assert error in refused("trl", "one.yaml", text)


def test_an_environment_and_tools_of_a_script_are_kept(convert, tmp_path):
    found = convert("trl", "play.py", ENVIRONMENT, "--dataset_name", "c/d")
    script = tmp_path / "play.py"
    expected = {
        "environment.factory": f"{script}:Wordle",
        "environment.tools": [f"{script}:lookup"],
        "environment.max_turns": 6,
    }
    assert found.has(expected) == expected and found.functions() == [("environment", 1.0)]
    assert "<lambda> is made by code; write it into a file and set environment.tools" in found.said
    assert "reward" not in found.said
    beside = ENVIRONMENT.replace("args=args,", "args=args, reward_funcs=[lookup],")
    both = convert("trl", "play.py", beside, "--dataset_name", "c/d").functions()
    assert both == [("environment", 1.0), ("play.py:lookup", 1.0)]  # TRL adds get_reward
    without = ENVIRONMENT.replace("environment_factory=Wordle, ", "reward_funcs=[len], ").replace("=5", "=None")
    kept = convert("trl", "play.py", without, "--dataset_name", "c/d", "--reward_funcs", "accuracy_reward")
    assert kept.has({"environment.max_turns": 0, "environment.tools": 0}) == {
        "environment.max_turns": 1000,
        "environment.tools": [f"{script}:lookup"],
    }


LOCAL = """
import argparse
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

def reward(environments, **kwargs): ...

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="http://far.example")
    parser.add_argument("--rows", type=int, default=2)
    args = parser.parse_args()

    class Echo:
        url = args.url
        def reset(self, **kwargs) -> str: ...
        def say(self, word: str) -> str: ...

    rows = {"prompt": [[{"role": "user", "content": "Say it."}]] * args.rows, "env": ["a"] * args.rows}
    trainer = GRPOTrainer("a/b", reward_funcs=reward, train_dataset=Dataset.from_dict(rows), environment_factory=Echo)
    trainer.train()

if __name__ == "__main__":
    main()
"""


def test_what_a_script_makes_in_its_main_is_kept(convert, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = convert("trl", "echo.py", LOCAL, "--url", "http://127.0.0.1:8104", "--num_generations", "4")
    expected = {
        "environment.factory": f"{tmp_path}/echo.py --url http://127.0.0.1:8104",
        "data.source": f"{tmp_path}/echo_rows.jsonl",
        "rollout.group_size": 4,
    }
    assert found.has(expected) == expected and found.code == 0 and found.functions() == [("echo.py:reward", 1.0)]
    assert f'source: "{tmp_path}/echo_rows.jsonl"' in found.text  # whatever folder it is read in
    row = {"prompt": [{"role": "user", "content": "Say it."}], "env": "a"}
    rows = [json.loads(line) for line in (tmp_path / "echo_rows.jsonl").read_text().splitlines()]
    assert rows == [row, row]
    said = refused("trl", "echo.py", LOCAL, "--rows", "3")
    assert "echo_rows.jsonl is there with other rows than the script's" in said
    own = convert("trl", "echo.py", LOCAL, "--rows=3", "--dataset_name", "c/d")
    assert own.has({"data.source": 0, "environment.factory": 0}) == {
        "data.source": "c/d",
        "environment.factory": f"{tmp_path}/echo.py --rows=3",
    }
    mapped = LOCAL.replace("from_dict(rows)", "from_dict(rows).map(len)")
    assert "train_dataset.map() is not run: save what it makes" in refused("trl", "echo.py", mapped)
    keyed = (
        LOCAL.replace('"--rows"', '"--api-key"').replace("type=int, default=2", "default=''").replace("args.rows", "2")
    )
    found = convert("trl", "echo.py", keyed, "--api-key", "abc")
    assert "abc" not in found.text and found.said == "not converted: api_key=(not shown)\n"
    several = LOCAL.replace("environment_factory=Echo", "environment_factory={'echo': Echo}")
    assert convert("trl", "echo.py", several).has({"environment.factory": 0}) == {
        "environment.factory": f"{tmp_path}/echo.py"
    }


@pytest.mark.parametrize(
    ("trainer", "said"),
    [("RLOO", "RLOOTrainer, and settings are read of GRPOTrainer alone; objective=rloo"), ("SFT", "SFTTrainer, and")],
)
def test_another_trainer_is_refused(refused, trainer, said):
    script = ENVIRONMENT.replace("GRPO", trainer)
    assert f"play.py: its trainer is {said}" in refused("trl", "play.py", script, "--dataset_name", "c/d")


def test_a_trainer_of_the_scripts_own_is_read_and_told_of(convert):
    own = OPENENV.replace("if __name__", "class Mine(GRPOTrainer):\n    def compute_loss(self): ...\n\nif __name__")
    found = convert("trl", "count.py", own.replace('GRPOTrainer("a/b"', 'Mine("a/b"'), "--dataset_name", "c/d")
    assert found.config.model.path == "a/b" and found.functions() == [("count.py:counted", 1.0)]
    assert found.said == "not converted: Mine is a trainer of the script's own: what its methods change\n"


TOLD = """
from datasets import Dataset, load_dataset
from peft import LoraConfig
from transformers import AutoTokenizer, BitsAndBytesConfig
from trl import GRPOConfig, GRPOTrainer
from trl.rewards import accuracy_reward

data = load_dataset("c/d", "easy")
tokenizer = AutoTokenizer.from_pretrained("a/b")
tokenizer.pad_token = tokenizer.eos_token
args = GRPOConfig(eval_strategy="steps", eval_steps=4)
GRPOTrainer("a/b", accuracy_reward, args, data["train"], MORE).train()
"""
FILES = 'data_files={"train": "a.jsonl", "test": ["b.jsonl"]}'
FIRST = 'data["held-out"], tokenizer'


@pytest.mark.parametrize(
    ("more", "settings", "dropped"),
    [
        (FIRST, {"data.eval_source": "c/d:easy", "data.eval_split": "held-out", "model.tokenizer_path": None}, ""),
        ("load_dataset('e/f', split='dev')", {"data.eval_source": "e/f", "data.eval_split": "dev"}, ""),
        ("Dataset.from_dict({'prompt': ['?']})", {"data.eval_source": None}, "give a file of them as data.eval_source"),
        ("data['test'].map(len)", {}, "eval_dataset.map() is not run: save what it makes"),
        ("{'sums': data['test']}", {"data.eval_source": None}, "eval_dataset is made by code"),
        (f"{FIRST}, None, [print], (None, None)", {}, "callbacks of the trainer"),
        ("processing_class=AutoTokenizer.from_pretrained('g/h')", {"model.tokenizer_path": "g/h"}, ""),
        ("processing_class=AutoTokenizer.from_pretrained('a/b', eos_token='.')", {}, "eos_token of processing_class"),
        ("processing_class=object()", {}, "processing_class is made by code"),
        ("peft_config=LoraConfig()", {"learner.lora_rank": 8, "learner.lora_alpha": 8.0}, ""),
        ("peft_config=object()", {"learner.lora_rank": 0}, "peft_config of the trainer"),
    ],
)
def test_everything_that_a_script_gives_its_trainer_is_read_or_told_of(convert, more, settings, dropped):
    found = convert("trl", "told.py", TOLD.replace("MORE", more))
    assert found.has(settings) == settings
    assert dropped in found.said and found.code == (3 if dropped else 0), found.said


@pytest.mark.parametrize(
    ("loaded", "train", "test"),
    [
        (f"load_dataset('json', {FILES})", 'data["train"]', 'data["test"]'),
        (f"load_dataset('json', {FILES}, split='train[:9]')", "data", f"load_dataset('json', {FILES}, split='test')"),
        (f"load_dataset('json', {FILES})", "data", 'data["test"].shuffle()'),
    ],
)
def test_files_of_every_split_are_found_by_its_name(convert, loaded, train, test):
    script = TOLD.replace('load_dataset("c/d", "easy")', loaded).replace('data["train"]', train).replace("MORE", test)
    found = convert("trl", "told.py", script)
    files = (found.config.data.source, found.config.data.eval_source)
    assert [file.rpartition("/")[2] for file in files] == ["a.jsonl", "b.jsonl"]
    assert found.config.data.sources == [] and found.code == 0


def test_keywords_of_a_trainer_that_nothing_here_stands_for_are_told(convert):
    names = "callbacks optimizers quantization_config reward_processing_classes rollout_func new_keyword".split()
    found = convert(
        "trl", "told.py", TOLD.replace("MORE", ", ".join(f"{name}=[BitsAndBytesConfig()]" for name in names))
    )
    assert {line.split()[2] for line in found.said.splitlines()} == set(names) and found.code == 3


def test_rows_that_train_are_not_held_out(convert):
    evaluates = f"{LEAST.replace('c/d', 'rows.jsonl')}eval_strategy: steps\n"
    found = convert("trl", "one.yaml", evaluates)
    assert found.config.data.eval_source is None
    assert found.said == (
        "not converted: eval_strategy=steps: a file has no other split; give held-out rows as data.eval_source\n"
    )
    unused = TOLD.replace("MORE", "data['test'].map(len)").replace('eval_strategy="steps", ', "")
    assert convert("trl", "told.py", unused).code == 0

"""TRL's GRPOTrainer on the experiment calculator_smollm2, in an interpreter that has both: a JSON line a step.

python -m benchmarks.calculator_trl [steps=8] [rows=8]

The same model, chat template, tool, rows in their order, reward, learning rate and lengths. TRL reads calls as Qwen3
writes them, which is how this template does.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

from infsample_rl.assets.calculator.tools import calculate
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.config.loading import load_config
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.reward.rule_reasoning_gym import score


@dataclass(kw_only=True)
class CalculatorOptions:
    """Arguments of benchmarks.calculator_trl."""

    steps: int = option(8, "updates", low=1)
    rows: int = option(8, "sequences of a micro-batch", low=1)

    def __post_init__(self) -> None:
        self.config = load_config(["+experiment=calculator_smollm2", f"run.steps={self.steps}"])
        if self.config.samples_per_step % self.rows:
            raise ValueError(f"rows={self.rows} does not divide a step of {self.config.samples_per_step} samples")
        if importlib.util.find_spec("trl") is None:
            raise ValueError("TRL is not in this interpreter: .venv-peers/bin/python, by make peers, has it")


def run(options: CalculatorOptions) -> int:
    """Train, and print each step's seconds, mean reward and share of samples that called the tool."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer, chat_template_utils

    torch.set_num_threads(2)
    config = options.config
    tokenizer = load_tokenizer(config.model)
    tokenizer.response_template = chat_template_utils.qwen3_template
    stream = build_train_prompts(config, tokenizer, None)
    prompts = [prompt for _ in range(options.steps) for prompt in stream.next_batch()]
    shown: dict[str, Any] = {}

    def reward(completions: list[Any], number: list[int], **columns: Any) -> list[float]:
        last = [completion[-1]["content"] or "" for completion in completions]
        values = [score(text, prompts[each].columns) for text, each in zip(last, number, strict=True)]
        called = [any(message["role"] == "tool" for message in completion) for completion in completions]
        shown.update(reward=sum(values) / len(values), called=sum(called) / len(called), samples=len(values))
        return values

    class Steps(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.started = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            seconds = time.monotonic() - self.started
            print(json.dumps({"step": state.global_step, "seconds": round(seconds, 1)} | shown), flush=True)

    samples = config.samples_per_step
    with tempfile.TemporaryDirectory() as scratch:
        arguments = GRPOConfig(
            output_dir=scratch,
            per_device_train_batch_size=options.rows,
            gradient_accumulation_steps=samples // options.rows,
            num_generations=config.rollout.group_size,
            max_completion_length=config.rollout.max_new_tokens,
            max_tool_calling_iterations=config.environment.max_turns - 1,
            learning_rate=config.learner.lr,
            lr_scheduler_type="constant",
            weight_decay=config.learner.weight_decay,
            max_grad_norm=config.learner.max_grad_norm,
            max_steps=options.steps,
            beta=0.0,
            loss_type="grpo",
            temperature=config.rollout.temperature,
            seed=config.run.seed,
            bf16=False,
            use_cpu=True,
            gradient_checkpointing=False,
            shuffle_dataset=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            model_init_kwargs={"dtype": "float32"},
        )
        rows = [{"prompt": prompt.messages, "number": index} for index, prompt in enumerate(prompts)]
        trainer = GRPOTrainer(
            model=config.model.path,
            reward_funcs=[reward],
            args=arguments,
            train_dataset=Dataset.from_list(rows),
            tools=[calculate],
            processing_class=tokenizer,
            callbacks=[Steps()],
        )
        trainer.train()
    return 0


def main() -> int:
    """As run(); 2 with one line for a bad argument."""
    return run_with_options(run, CalculatorOptions, usage=__doc__)


if __name__ == "__main__":
    sys.exit(main())

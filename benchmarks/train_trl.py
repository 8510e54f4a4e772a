"""TRL's GRPOTrainer on a workload: a script for the interpreter that has TRL (rivals.trl_python). Standard library, trl
and what it brings only. With `held_out` in the spec the run is evaluated too.

train_trl.py SPEC RESULT, both JSON: a string, and the file to write. The caller ends the process group. Written for trl
1.16: the trainer's own methods are timed, and its tokenising of prompts is replaced so that it trains on exactly the
ids our side does.
"""

from __future__ import annotations

import contextlib
import json
import runpy
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Steps(TrainerCallback):
    """Seconds of every step by phase, from its first micro-batch to the end of its optimizer step."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.phases: dict[str, float] = {}
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        self.started = 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Forget the phases of the step before."""
        self.phases = dict.fromkeys(("micro_batches", "prepare", "generate", "reward"), 0.0)
        self.rewards, self.lengths = [], []
        self.started = now()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Keep the step. What is outside the micro-batches is clipping and the optimizer."""
        seconds, spent = now() - self.started, self.phases
        phases = {name: spent[name] for name in ("generate", "reward")}
        phases["learn"] = spent["micro_batches"] - spent["prepare"]
        phases["optimizer"] = seconds - spent["micro_batches"]
        phases["other"] = seconds - sum(phases.values())
        step = {"seconds": seconds, "phases": phases, "rewards": self.rewards, "lengths": self.lengths}
        self.steps.append(step)


class TimedTrainer(GRPOTrainer):
    """GRPOTrainer whose prompts are numbers of `prompts`, and whose phases add up in `clock`."""

    def __init__(self, *, prompts: list[list[int]], clock: Steps, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.prompts_by_number, self.clock = prompts, clock
        if self.args.generation_kwargs is not None:  # the end token is one like any other: it would still be cut there
            self.eos_token_ids = self.args.generation_kwargs["eos_token_id"]

    def _tokenize_prompts(self, prompts: list) -> tuple[list[list[int]], None, dict]:
        return [self.prompts_by_number[int(prompt)] for prompt in prompts], None, {}

    def training_step(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self._timed("micro_batches", super().training_step, *arguments, **keywords)

    def _prepare_inputs(self, *arguments: Any, **keywords: Any) -> Any:
        return self._timed("prepare", super()._prepare_inputs, *arguments, **keywords)

    def _generate(self, *arguments: Any, **keywords: Any) -> Any:
        return self._timed("generate", super()._generate, *arguments, **keywords)

    def _calculate_rewards(self, *arguments: Any, **keywords: Any) -> Any:
        return self._timed("reward", super()._calculate_rewards, *arguments, **keywords)

    def _timed(self, name: str, function: Any, *arguments: Any, **keywords: Any) -> Any:
        started = now()
        found = function(*arguments, **keywords)
        self.clock.phases[name] += now() - started
        return found


class Rewards:
    """The reward function, kept for the report: last_number of the file `reward`, or train_ours.reward_of of the
    tokens."""

    __name__ = "reward"  # TRL names its metrics by it

    def __init__(self, clock: Steps, reward: str | None) -> None:
        self.clock = clock
        self.of_text = runpy.run_path(reward)["last_number"] if reward else None

    def __call__(
        self, prompts: list[str], completions: list[str], completion_ids: list[list[int]], **columns: Any
    ) -> list[float]:
        """Rewards of one generation batch."""
        if self.of_text is None:
            rewards = [sum(ids) % 1000 / 1000 for ids in completion_ids]
        else:
            rewards = self.of_text(prompts, completions, columns["answer"])
        self.clock.rewards += rewards
        self.clock.lengths += [len(ids) for ids in completion_ids]
        return rewards


class HeldOut(TrainerCallback):
    """Before the first step, and after every so many, the mean reward of so many samples of every held-out problem."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec, self.found = spec["held_out"], list[tuple[int, float]]()
        self.rows, self.max_new_tokens = 4 * spec["rows"], spec["max_new_tokens"]
        self.reward = runpy.run_path(spec["reward"])["last_number"]

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """The model as it was given."""
        self.evaluate(0, given["model"], given["processing_class"])

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """After Steps has kept the step, whose seconds this is no part of."""
        if state.global_step % self.spec["every"] == 0 or state.global_step == state.max_steps:
            self.evaluate(state.global_step, given["model"], given["processing_class"])

    @torch.no_grad()
    def evaluate(self, step: int, model: Any, tokenizer: Any) -> None:
        """Sample at temperature 1, as in training, with noise that training does not use."""
        samples = self.spec["samples"]
        prompts = [ids for ids in self.spec["prompts"] for _ in range(samples)]
        answers = [answer for answer in self.spec["answers"] for _ in range(samples)]
        texts = list[str]()
        with torch.random.fork_rng():
            torch.manual_seed(step)
            for start in range(0, len(prompts), self.rows):
                batch = tokenizer.pad(
                    {"input_ids": prompts[start : start + self.rows]}, padding_side="left", return_tensors="pt"
                )
                drawn = model.generate(
                    **batch,
                    **{"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0},
                    max_new_tokens=self.max_new_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                )
                texts += tokenizer.batch_decode(drawn[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
        rewards = self.reward(prompts, texts, answers)
        self.found.append((step, sum(rewards) / len(rewards)))


def main(spec: dict[str, Any]) -> dict[str, Any]:
    """Every step of the run with its seconds, phases, rewards and lengths, the most memory it held, and the held-out
    accuracy [(step, mean reward)]."""
    imported = status_bytes("VmRSS")
    held_out = [HeldOut(spec)] if "held_out" in spec else []
    clock = run_trainer(spec, TimedTrainer, held_out)
    on_cuda = spec["device"] != "cpu" and torch.cuda.is_available()
    return {
        "steps": clock.steps,
        "held_out": [found for callback in held_out for found in callback.found],
        "peak_memory_bytes": device_bytes() if on_cuda else status_bytes("VmHWM") - imported,
        "device": torch.cuda.get_device_name() if on_cuda else "cpu",
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": sys.version.split()[0],
        },
    }


def run_trainer(spec: dict[str, Any], trainer_class: type[TimedTrainer], callbacks: list[TrainerCallback]) -> Steps:
    """Train to the last step; the peak of memory counts from the loaded model on."""
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=getattr(torch, spec["weights"]))
    tokenizer = AutoTokenizer.from_pretrained(spec["model"])
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    clock = Steps()
    columns = {"prompt": [str(number) for number in range(len(spec["prompts"]))]}
    if "answers" in spec:
        columns["answer"] = spec["answers"]
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            prompts=spec["prompts"],
            clock=clock,
            callbacks=[clock, *callbacks],
            model=model,
            reward_funcs=[Rewards(clock, spec.get("reward"))],
            args=arguments_of(spec, folder),
            train_dataset=Dataset.from_dict(columns),
            processing_class=tokenizer,
        )
        if trainer.args.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        else:
            with contextlib.suppress(PermissionError):  # the peak of loading then counts too
                Path("/proc/self/clear_refs").write_text("5")
        trainer.train()
    return clock


def arguments_of(spec: dict[str, Any], folder: str) -> GRPOConfig:
    """The settings both sides share, said explicitly, and those of this variant."""
    samples = spec["group_size"] * spec["prompts_per_step"]
    ends = {"eos_token_id": [-1]} if spec["ignore_eos"] else None
    return GRPOConfig(
        output_dir=folder,
        use_cpu=spec["device"] == "cpu" or not torch.cuda.is_available(),  # else it refuses bf16
        bf16=spec["dtype"] == "bfloat16",
        fp16=spec["dtype"] == "float16",
        seed=spec["seed"],
        loss_type="grpo",
        beta=0.0,
        scale_rewards="group",
        epsilon=0.2,
        num_iterations=1,
        temperature=spec["temperature"],
        top_k=0,
        top_p=1.0,
        generation_kwargs=ends,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        shuffle_dataset=False,
        learning_rate=spec["lr"],
        lr_scheduler_type="constant",
        warmup_steps=0,
        weight_decay=0.0,
        adam_beta1=0.9,
        adam_beta2=0.999,
        adam_epsilon=1e-8,
        optim="adamw_torch_fused",
        disable_dropout=True,
        max_grad_norm=spec["max_grad_norm"],
        max_steps=spec["steps"],
        save_strategy="no",
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
        per_device_train_batch_size=spec["rows"],
        gradient_accumulation_steps=samples // spec["rows"],
        gradient_checkpointing=spec["gradient_checkpointing"],
        use_transformers_continuous_batching=spec["generation"] == "generate_batch",
        transformers_continuous_batching_config=spec["batching"] if spec["generation"] == "generate_batch" else None,
    )


def now() -> float:
    """Seconds on a clock; what was started on the GPU has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def device_bytes() -> int:
    """The most that the device has lent, as infsample_rl's PeakMemory counts it."""
    free, total = torch.cuda.mem_get_info()
    return total - free + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()


def status_bytes(field: str) -> int:
    """A field in kB of /proc/self/status, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field + ":")) * 1024


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(json.loads(sys.argv[1]))))

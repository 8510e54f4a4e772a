"""What a peer's setting is called here, from the tables of the conversion and of what its code sets."""

from __future__ import annotations

import re
from collections.abc import Sequence

from infsample_rl.commands.convert import openrlhf, trl, verl
from infsample_rl.commands.convert.conversion import Row
from infsample_rl.config.overrides import setting_names

FUNCTIONS, WEIGHTS = "reward.functions=[FILE.py:NAME]", "weight in reward.functions=[{name: FILE.py:NAME, weight: 0.5}]"
BATCH = "data.prompts_per_step times rollout.group_size"
MICRO, REFERENCE_MICRO = "learner.max_tokens_per_micro_batch", "reference.max_tokens_per_micro_batch"
PLACES = "cluster.learner_ranks and cluster.rollout_workers"
UPDATES = "run.steps; a step may be several updates"
MINI = "objective.mini_batches; it is the number of mini batches in a step, not the size of one"
VLLM = "rollout.engine=vllm"

# What no row says, since code of the conversion makes ours of several, a row says less, or the conversion leaves it
# out; behind "; " is what else there is to know.
BY_CODE: dict[str, dict[str, str]] = {
    "verl": {
        "data.train_files": "data.source; data.sources for several",
        "data.val_files": "data.eval_source",
        "data.max_prompt_length": "data.max_prompt_tokens",
        "data.max_response_length": "rollout.max_new_tokens",
        f"{verl.ACTOR}.clip_ratio": "objective.clip_low and objective.clip_high",
        f"{verl.ACTOR}.ppo_mini_batch_size": MINI,
        f"{verl.ACTOR}.ppo_micro_batch_size": f"{MICRO}; in tokens",
        f"{verl.ACTOR}.ppo_micro_batch_size_per_gpu": f"{MICRO}; in tokens",
        f"{verl.ACTOR}.ppo_max_token_len_per_gpu": MICRO,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": f"{REFERENCE_MICRO}; in tokens",
        f"{verl.ROLLOUT}.name": "rollout.engine",
        f"{verl.ROLLOUT}.tensor_model_parallel_size": "rollout.tensor_parallel",
        f"{verl.ROLLOUT}.gpu_memory_utilization": "rollout.kv_budget_bytes",
        f"{verl.OPTIM}.lr_warmup_steps": "learner.warmup_steps; in updates",
        f"{verl.OPTIM}.lr_warmup_steps_ratio": "learner.warmup_steps; in updates",
        f"{verl.CUSTOM}.path": FUNCTIONS,
        f"{verl.CUSTOM}.name": FUNCTIONS,
        f"{verl.CUSTOM}.reward_kwargs": "kwargs in reward.functions=[{name: FILE.py:NAME, kwargs: {...}}]",
        f"{verl.OVERLONG}.enable": "objective.overlong_buffer_tokens; 0 is off",
        "reward_kwargs.max_resp_len": "rollout.max_new_tokens",
        "algorithm.use_kl_in_reward": "objective.kl_reward_coef; 0 is off",
        "reward_model.path": "reward.functions=[model:FOLDER]",
        "trainer.n_gpus_per_node": f"{PLACES}; a GPU each with cluster.learner_gpus=1 and cluster.rollout_gpus=1",
        "trainer.nnodes": f"{PLACES}; of all nodes together",
        "trainer.logger": "logging.wandb, logging.tensorboard and logging.mlflow",
    },
    "TRL": {
        "dataset_name": "data.source",
        "dataset_config": "data.source=NAME:CONFIG",
        "eval_dataset": "data.eval_source",
        "max_prompt_length": "data.max_prompt_tokens; data.long_prompts says what happens to longer ones",
        "max_completion_length": "rollout.max_new_tokens",
        "per_device_train_batch_size": f"{BATCH}; micro batches are {MICRO}",
        "gradient_accumulation_steps": f"{BATCH}; micro batches are {MICRO}",
        "steps_per_generation": "objective.mini_batches; it is the number of updates that a step has",
        "generation_batch_size": BATCH,
        "max_steps": UPDATES,
        "save_steps": "run.checkpoint_every",
        "save_strategy": "run.checkpoint_every",
        "eval_steps": "run.eval_every",
        "lr_scheduler_kwargs": "learner.min_lr_ratio",
        "warmup_steps": "learner.warmup_steps; in updates",
        "warmup_ratio": "learner.warmup_steps; in updates",
        "reward_funcs": FUNCTIONS,
        "reward_weights": WEIGHTS,
        "environment_factory": "environment.factory=FILE.py:NAME",
        "tools": "environment.tools=[FILE.py:NAME]",
        "max_tool_calling_iterations": "environment.max_turns; one more than the calls",
        "use_vllm": VLLM,
        "vllm_gpu_memory_utilization": "rollout.kv_budget_bytes",
        "vllm_tensor_parallel_size": "rollout.tensor_parallel",
        "vllm_importance_sampling_clip_max": "objective.importance_cap",
        "num_processes": PLACES,
        "nproc_per_node": PLACES,
        "use_rslora": "learner.lora_alpha; times the root of learner.lora_rank",
        "use_peft": "learner.lora_rank; 0 trains the weights",
        "resume_from_checkpoint": "run.resume",
        "report_to": "logging.wandb, logging.tensorboard and logging.mlflow",
    },
    "OpenRLHF": {
        "data.prompt_dataset": "data.source; data.sources for several",
        "eval.dataset": "data.eval_source",
        "data.max_len": "data.max_prompt_tokens and rollout.max_new_tokens",
        "data.prompt_max_len": "data.max_prompt_tokens",
        "train.batch_size": MINI,
        "train.micro_batch_size": f"{MICRO}; in tokens",
        "train.colocate_all": "cluster.colocate",
        "algo.kl.use_loss": "objective.kl_coef; objective.kl_reward_coef is the weight of one in the reward",
        "actor.lr_warmup_ratio": "learner.warmup_steps; in updates",
        "actor.num_nodes": PLACES,
        "actor.num_gpus_per_node": PLACES,
        "vllm.num_engines": f"cluster.rollout_workers; with {VLLM}",
        "vllm.tensor_parallel_size": f"rollout.tensor_parallel; with {VLLM}",
        "logger.wandb.key": "WANDB_API_KEY in the environment, with logging.wandb=auto",
    },
}


def _names(rows: Sequence[Row], by_code: dict[str, str]) -> dict[str, str]:
    """A peer's names and what they are here. Rows that need no other setting of theirs go first, and speak alone
    where there are others of the same name."""
    found: dict[str, list[str]] = {}
    free = {row.theirs for row in rows if not row.when}
    for row in sorted(rows, key=lambda row: bool(row.when)):
        if row.ours and (not row.when or row.theirs not in free):
            found.setdefault(row.theirs, []).append(row.ours)
    return {theirs: " and ".join(ours) for theirs, ours in found.items()} | by_code


PEERS = {
    "verl": _names(verl.ROWS, BY_CODE["verl"]),
    "TRL": _names(trl.ROWS, BY_CODE["TRL"]),
    "OpenRLHF": _names(openrlhf.ROWS, BY_CODE["OpenRLHF"]),
}


def in_our_words(message: str) -> str:
    """An error that speaks of a setting or a flag there is not; where a peer has one of that name, it says what it is
    here.

    Example: "num_generations is not a setting; ..." -> "num_generations is not a setting: TRL's num_generations is
    rollout.group_size here"
    """
    found = re.match(r"'?([^\s']+)'? is (not a setting|not name=value|no flag)", message)
    peer, theirs = _named(found[1].lstrip("-").replace("-", "_")) if found else ("", "")
    if found is None or not peer:
        return message
    ours, more, note = PEERS[peer][theirs].partition("; ")
    where = message[message.rindex(" (in ") :] if " (in " in message else ""
    rest = message[found.end() :] if found[2] == "no flag" else where
    return f"{found[0]}: {peer}'s {theirs} is {ours} here{more}{note}{rest}"


def _named(name: str) -> tuple[str, str]:
    """The peer, and its name, that a name means: the whole of it, else, where no key of ours is called so, the end of
    one of theirs, else one of theirs at its own end, the longest; two empty texts for none."""
    names = [(peer, theirs) for peer, table in PEERS.items() for theirs in table]
    same = [pair for pair in names if pair[1] == name]
    if same or name in {full.partition(".")[2] for full in setting_names()}:
        return same[0] if same else ("", "")
    longer = [pair for pair in names if pair[1].endswith(f".{name}")]
    shorter = [pair for pair in names if name.endswith(f".{pair[1]}")]
    return longer[0] if longer else max(shorter, key=lambda pair: len(pair[1]), default=("", ""))

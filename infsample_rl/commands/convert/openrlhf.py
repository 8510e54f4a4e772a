"""OpenRLHF's flags into ours: openrlhf.cli.train_ppo_ray of 0.11.2, and the flags of 0.8 by their old names."""

from __future__ import annotations

from pathlib import Path

from infsample_rl.commands.convert.common import (
    first_of,
    local_path,
    need,
    place_apart,
    place_colocated,
    place_reward_model,
    reward_entry,
    set_row_lengths,
)
from infsample_rl.commands.convert.conversion import Conversion, Given, as_list, number, truth, whole
from infsample_rl.commands.convert.openrlhf_table import ADVANTAGES, ALIASES, DEFAULTS, IGNORED, ROWS, VERSION
from infsample_rl.commands.convert.scalars import read_scalar
from infsample_rl.commands.convert.shell import Word, read_commands, read_flags
from infsample_rl.config import ALL_PROBLEMS


def read(path: Path, words: list[Word], environment: dict[str, str]) -> dict[str, Given]:
    """Settings by OpenRLHF's names of today. ValueError for what is no script of OpenRLHF's."""
    text = path.read_text(encoding="utf-8")
    commands, _ = read_commands(
        text, environment, keep=lambda found: any(word.startswith("openrlhf.cli.train_ppo") for word in found)
    )
    if not commands:
        raise ValueError(f"{path} holds no command with openrlhf.cli.train_ppo_ray")
    start = next(index for index, word in enumerate(commands[0]) if word.text.startswith("openrlhf.cli.train_ppo"))
    given = _flags(commands[0][start + 1 :]) | _flags(words)
    return {ALIASES.get(name, name): entry for name, entry in given.items()}


def _flags(words: list[Word]) -> dict[str, Given]:
    flags, _ = read_flags(words)
    given = {}
    for name, (value, line) in flags.items():
        read_value = (
            [read_scalar(item) for item in value]
            if isinstance(value, list)
            else read_scalar(value)
            if isinstance(value, str)
            else value
        )
        given[name] = Given(read_value, f"line {line}" if line else "argument")
    return given


def convert(given: dict[str, Given]) -> Conversion:
    """All settings; ValueError for what is missing."""
    c = Conversion(given, DEFAULTS, VERSION)
    c.apply(ROWS)
    for part in (_data, _steps, _objective, _importance, _kl, _optimizer, _rewards, _workers, _refusals):
        c.fill(part)
    c.finish(IGNORED)
    need(c, "model.path", "add --actor.model_name_or_path NAME")
    need(c, "data.source", "add --data.prompt_dataset NAME")
    need(c, "reward.functions", "add --reward.remote_url path/to/file.py")
    return c


def _data(c: Conversion) -> None:
    sources = [local_path(part) for part in str(c.value("data.prompt_dataset") or "").split(",") if part]
    if sources:
        c.set("data.source", first_of(c, "data.prompt_dataset", sources), "data.prompt_dataset")
    c.refuse("data.prompt_probs", (None,), "join the data sets into one file in the shares you want")
    c.refuse("data.max_samples", (DEFAULTS["data.max_samples"],), "cut the file, or set run.steps")
    if not truth(c.value("data.apply_chat_template")):
        c.refuse("data.input_template", (None,), "write the template into the data, or set data.instruction")
    longest = whole(c.value("data.max_len"))
    new, prompt = (
        None if c.value(name) is None else whole(c.value(name))
        for name in ("rollout.max_new_tokens", "data.prompt_max_len")
    )
    names = [
        name for name in ("data.max_len", "data.prompt_max_len", "rollout.max_new_tokens") if c.is_given(name)
    ] or ["data.max_len"]
    if prompt is None:
        prompt = longest - new if new is not None else longest // 2
    if new is None:
        new = max(1, longest - prompt)
        c.differs.append(
            f"a response may fill data.max_len behind its prompt in OpenRLHF; here prompt and response have {prompt} "
            f"and {new} tokens"
        )
    c.set("data.max_prompt_tokens", prompt, *names)
    c.set("rollout.max_new_tokens", new, *names)
    c.set("data.long_prompts", "truncate", *names, why="OpenRLHF cuts long prompts from the left")
    row_tokens = whole(c.value("train.max_tokens_per_gpu")) if truth(c.value("train.dynamic_batch_enable")) else None
    set_row_lengths(c, prompt, new, *(["train.max_tokens_per_gpu"] if row_tokens else names), row_tokens=row_tokens)
    _evaluation(c)


def _evaluation(c: Conversion) -> None:
    if c.value("eval.dataset") is None:
        c.set("data.eval_source", None, "eval.dataset")
        return
    c.set("data.eval_source", local_path(str(c.value("eval.dataset"))), "eval.dataset")
    c.set("data.eval_split", str(c.value("eval.split")), "eval.split")
    c.set("run.eval_prompts", ALL_PROBLEMS, "eval.dataset", why="all of them")
    c.set("run.eval_every", max(0, whole(c.value("eval.steps"))), "eval.steps")
    c.set("run.eval_samples", whole(c.value("eval.n_samples_per_prompt")), "eval.n_samples_per_prompt")
    c.set("run.eval_temperature", number(c.value("eval.temperature")), "eval.temperature")


def _steps(c: Conversion) -> None:
    prompts, group = whole(c.value("rollout.batch_size")), whole(c.value("rollout.n_samples_per_prompt"))
    batch = whole(c.value("train.batch_size"))
    names = ("rollout.batch_size", "rollout.n_samples_per_prompt", "train.batch_size")
    updates = max(1, prompts * group // batch)
    if (prompts * group) % batch:
        c.differs.append(
            f"{prompts} x {group} responses in updates of {batch}: the last is smaller in OpenRLHF; here {updates} "
            "updates share them"
        )
    if updates > prompts:
        c.lacks(
            "train.batch_size", f"{updates} updates from {prompts} prompts; here an update has whole groups: {prompts}"
        )
        updates = prompts
    c.set("objective.mini_batches", updates, *names)
    if updates > 1:
        c.differs.append(
            "an update of a step is made of whole prompts here, of single responses drawn at random in OpenRLHF"
        )
    if truth(c.value("train.async_enable")):
        c.set("run.max_staleness", 1, "train.async_enable")


def _objective(c: Conversion) -> None:
    estimator = c.value("algo.advantage.estimator")
    if estimator not in ADVANTAGES:
        c.lacks(
            "algo.advantage.estimator",
            "nearest: objective.advantage=std; there is no critic, and a baseline is the group's own",
        )
    c.set("objective.advantage", ADVANTAGES.get(estimator, "std"), "algo.advantage.estimator")
    if estimator == "reinforce_baseline" and not truth(c.value("algo.advantage.no_std_norm")):
        c.lacks("algo.advantage.no_std_norm", "advantages are not divided by the batch's standard deviation")
    elif c.is_given("algo.advantage.no_std_norm"):
        c.value("algo.advantage.no_std_norm")
    gspo, aggregation = c.value("actor.policy_loss_type") == "gspo", c.value("actor.loss_agg_mode")
    loss = "gspo" if gspo else "dapo" if aggregation == "token-mean" else "grpo"
    c.set("objective.loss", loss, "actor.policy_loss_type", "actor.loss_agg_mode")
    bounds = c.value("actor.eps_clip_low_high") or [c.value("actor.eps_clip")] * 2
    given = "actor.eps_clip_low_high" if c.is_given("actor.eps_clip_low_high") else "actor.eps_clip"
    c.set("objective.clip_low", number(bounds[0]), given)
    c.set("objective.clip_high", number(bounds[1]), given)
    if truth(c.value("algo.dynamic_filtering_enable")):
        c.set("objective.dynamic_sampling", True, "algo.dynamic_filtering_enable")
        c.set("objective.dynamic_sampling_rounds", 1000, "algo.dynamic_filtering_enable", why="no bound in OpenRLHF")
        c.value("algo.dynamic_filtering_range")
        c.differs.append(
            "groups are dropped where all rewards are equal; OpenRLHF drops those whose mean score is outside "
            "dynamic_filtering_range"
        )


def _importance(c: Conversion) -> None:
    """Weights for vLLM's other arithmetic; older versions spell level and mode as one type."""
    level, mode = str(c.value("algo.advantage.is_correction_level")), str(c.value("algo.advantage.is_correction_mode"))
    if c.is_given("algo.advantage.is_correction_enable") and truth(c.value("algo.advantage.is_correction_enable")):
        kind = str(c.value("algo.advantage.is_correction_type") or "tis")
        level, mode = {"tis": ("token", "clip"), "icepop": ("token", "mask")}.get(kind, ("seq", "mask"))
    if level in ("off", "False"):
        return
    names = [name for name in c.given if name.startswith("algo.advantage.is_correction")]
    threshold = as_list(c.value("algo.advantage.is_correction_threshold"))
    c.set("objective.importance", "token_tis", *names)
    c.set("objective.importance_cap", number(threshold[-1]), *names)
    if (level, mode) != ("token", "clip") or len(threshold) > 1:
        c.differs.append(
            "importance weights are capped from above (token_tis); OpenRLHF also bounds them below, or drops what is "
            "outside"
        )


def _kl(c: Conversion) -> None:
    coefficient, in_loss = number(c.value("algo.kl.init_coef")), truth(c.value("algo.kl.use_loss"))
    estimator = str(c.value("algo.kl.estimator"))
    unbiased = truth(c.value("algo.kl.unbiased_gradient"))
    if coefficient > 0 and in_loss:
        c.set(
            "objective.kl",
            "k2" if unbiased else estimator,
            "algo.kl.estimator",
            "algo.kl.use_loss",
            "algo.kl.unbiased_gradient",
        )
        c.set("objective.kl_coef", coefficient, "algo.kl.init_coef")
    else:
        c.set("objective.kl", "none", "algo.kl.use_loss")
        c.set("objective.kl_coef", 0.0, "algo.kl.init_coef")
    if coefficient > 0 and not in_loss:
        c.set("objective.kl_in_reward", True, "algo.kl.init_coef")
        c.set("objective.kl_reward_coef", coefficient, "algo.kl.init_coef")
        c.differs.append(
            "the KL of a whole response is in its reward, before advantages; OpenRLHF takes a token's KL off the "
            "advantages up to it"
        )
    c.refuse("algo.kl.target", (None,), "objective.kl_coef stays as it is")


def _optimizer(c: Conversion) -> None:
    betas = c.value("actor.adam.betas")
    c.set("learner.beta1", number(betas[0]), "actor.adam.betas")
    c.set("learner.beta2", number(betas[1]), "actor.adam.betas")
    if c.value("actor.lr_scheduler") != "constant":
        c.set_warmup(number(c.value("actor.lr_warmup_ratio")), "actor.lr_warmup_ratio")
    elif c.is_given("actor.lr_warmup_ratio"):
        c.lacks(
            "actor.lr_warmup_ratio",
            "actor.lr_scheduler=constant has no warm-up in transformers; learner.warmup_steps if it is wanted",
        )
    if c.value("actor.lr_scheduler") == "cosine_with_min_lr":
        c.set(
            "learner.min_lr_ratio",
            number(c.value("actor.min_lr_ratio")),
            "actor.min_lr_ratio",
            why="cosine_with_min_lr",
        )
    if whole(c.value("ds.lora.rank")) > 0:
        c.set("learner.lora_alpha", number(c.value("ds.lora.alpha")), "ds.lora.alpha")
        c.set(
            "learner.lora_targets",
            [str(name) for name in as_list(c.value("ds.lora.target_modules"))],
            "ds.lora.target_modules",
        )
        c.refuse("ds.lora.dropout", (0, 0.0), "adapters have no dropout here: the policy that samples has none")


def _rewards(c: Conversion) -> None:
    entries, url = [], c.value("reward.remote_url")
    for place in str(url or "").split(","):
        if place.endswith(".py"):
            entries.append(reward_entry(f"{local_path(place)}:reward_func"))
        elif place:
            c.lacks(
                "reward.remote_url",
                f"{place} is a server: ask it in a reward function of your own (SECURITY.md: the network)",
            )
    for place in str(c.value("reward.model_name_or_path") or "").split(","):
        if place and not entries:
            entries.append(reward_entry(f"model:{local_path(place)}"))
    c.refuse("train.agent_func_path", (None,), "one turn; write its reward as reward_func(queries, prompts, labels)")
    if entries:
        c.set(
            "reward.functions",
            entries,
            *(name for name in ("reward.remote_url", "reward.model_name_or_path") if c.is_given(name)),
        )
    if c.value("reward.overlong_buffer_len") is not None:
        c.set(
            "objective.overlong_buffer_tokens",
            whole(c.value("reward.overlong_buffer_len")),
            "reward.overlong_buffer_len",
        )
        c.set(
            "objective.overlong_penalty",
            number(c.value("reward.overlong_penalty_factor")),
            "reward.overlong_penalty_factor",
        )
    low, high = (number(bound) for bound in c.value("reward.clip_range"))
    if (low, high) != (-10, 10):
        c.lacks("reward.clip_range", "clip in the reward function")
    else:
        c.differs.append("OpenRLHF clips rewards to [-10, 10]; here they are as the function gives them")


def _workers(c: Conversion) -> None:
    actors = whole(c.value("actor.num_nodes")) * whole(c.value("actor.num_gpus_per_node"))
    names = ["actor.num_nodes", "actor.num_gpus_per_node"]
    in_reward = "objective.kl_in_reward" in c.settings
    with_kl = number(c.value("algo.kl.init_coef")) > 0
    if truth(c.value("train.colocate_all")) and not truth(c.value("train.async_enable")):
        place_colocated(c, actors, "train.colocate_all", *names, separate_reference=in_reward)
        beside = True
    else:
        engines = whole(c.value("vllm.num_engines") or 1) * whole(c.value("vllm.tensor_parallel_size"))
        beside = truth(c.value("train.colocate_actor_ref")) and not in_reward
        references = (
            whole(c.value("ref.num_nodes")) * whole(c.value("ref.num_gpus_per_node")) if with_kl and not beside else 0
        )
        place_apart(c, engines, actors, references, *names, "vllm.num_engines", "vllm.tensor_parallel_size")
    if with_kl and beside and not in_reward:
        c.set("reference.placement", "learner", "algo.kl.use_loss", why="beside the policy")
        c.set("reference.offload", truth(c.value("ref.offload") or False), "ref.offload")
    if whole(c.value("vllm.tensor_parallel_size")) > 1:
        c.lacks(
            "vllm.tensor_parallel_size",
            "an engine is whole on one GPU: the policy in 16 bits and its KV pool must fit there",
        )
    c.set("learner.backend", "deepspeed", "ds.zero_stage")
    stage = whole(c.value("ds.zero_stage"))
    c.set("learner.zero_stage", max(1, stage), "ds.zero_stage")
    place_reward_model(c)
    c.set("logging.wandb", "auto" if c.is_given("logger.wandb.key") else "disabled", "logger.wandb.key")
    if c.value("logger.tensorboard_dir"):
        c.set("logging.tensorboard", True, "logger.tensorboard_dir")


def _refusals(c: Conversion) -> None:
    c.refuse("actor.dual_clip", (None,), "the loss of A < 0 is not bounded; the same with one update a step")
    c.refuse("actor.aux_loss_coef", (0, 0.0), "policies are dense models")
    c.refuse(
        "reward.normalize_enable",
        (False,),
        "rewards are as the function gives them; advantages are normalised by group",
    )
    c.refuse(
        "reward.stop_properly_penalty_coef", (None,), "objective.overlong_buffer_tokens punishes long responses instead"
    )
    c.refuse("train.enable_ema", (False,), "no average of the weights is kept")
    c.refuse("ds.load_in_4bit", (False,), "weights are model.dtype")
    c.refuse("data.max_images_per_prompt", (0,), "text only")

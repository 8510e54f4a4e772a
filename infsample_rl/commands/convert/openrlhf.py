"""OpenRLHF's flags into ours: openrlhf.cli.train_ppo_ray of 0.11.2, and the flags of 0.8 by their old names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from infsample_rl.commands.convert.common import (
    DRAWN_AT_RANDOM,
    NO_CRITIC,
    finish_places,
    place_apart,
    place_colocated,
    reward_entry,
    set_betas,
    set_evaluations,
    set_lengths,
    set_sources,
)
from infsample_rl.commands.convert.conversion import Conversion, Given
from infsample_rl.commands.convert.openrlhf_table import (
    ADVANTAGES,
    ALIASES,
    CORRECTION,
    DEFAULTS,
    PEER,
    READ,
    REFUSED,
    ROWS,
)
from infsample_rl.commands.convert.recording import commands_of, given_of
from infsample_rl.commands.convert.values import local_path, number, read_flags


def read(path: Path, arguments: list[str]) -> dict[str, Given]:
    """Settings by OpenRLHF's names of today. ValueError for what is no script of OpenRLHF's."""
    words = commands_of(path, arguments, r"openrlhf\.cli\.train_ppo", "openrlhf.cli.train_ppo_ray")[-1].words
    start = next(index for index, word in enumerate(words) if word.startswith("openrlhf.cli.train_ppo"))
    today = [*(row.theirs for row in ROWS), *DEFAULTS, *REFUSED, *READ]
    ends = Counter(end for name in today for end in _ends(name))
    old = {end: name for name in today for end in _ends(name) if ends[end] == 1} | ALIASES
    return given_of(path, read_flags(words[start + 1 :]), read_flags(arguments), lambda name: old.get(name, name))


def _ends(name: str) -> list[str]:
    """What an older flag may be called: algo.kl.estimator -> algo_kl_estimator, kl_estimator, estimator."""
    parts = name.split(".")
    return ["_".join(parts[start:]) for start in range(len(parts))]


def convert(given: dict[str, Given]) -> Conversion:
    """All settings; ValueError for what is missing."""
    c = Conversion(given, PEER)
    c.apply_tables()
    for part in (_data, _steps, _objective, _importance, _kl, _optimizer, _rewards, _workers):
        part(c)
    c.finish(
        {
            "model.path": "--actor.model_name_or_path NAME",
            "data.source": "--data.prompt_dataset NAME",
            "reward.functions": "--reward.remote_url path/to/file.py",
        }
    )
    return c


def _data(c: Conversion) -> None:
    sources = str(c.value("data.prompt_dataset") or "").split(",")
    set_sources(c, "data.prompt_dataset", [local_path(source) for source in sources if source])
    if c.value("data.input_template") is not None and not c.truth("data.apply_chat_template"):
        c.lacks("data.input_template", "write the template into the data, or set data.instruction")
    longest = c.count("data.max_len")
    new, prompt = (
        None if c.value(name) is None else c.count(name) for name in ("rollout.max_new_tokens", "data.prompt_max_len")
    )
    lengths = ("data.max_len", "data.prompt_max_len", "rollout.max_new_tokens")
    names = " ".join(name for name in lengths if name in c.given) or "data.max_len"
    if prompt is None:
        prompt = longest - new if new is not None else longest // 2
    if new is None:
        new = max(1, longest - prompt)
        c.differs.append(
            f"a response may fill data.max_len behind its prompt in OpenRLHF; here prompt and response have {prompt} "
            f"and {new} tokens"
        )
    c.set("data.long_prompts", "truncate", names, "OpenRLHF cuts long prompts from the left")
    dynamic = c.truth("train.dynamic_batch_enable")
    set_lengths(c, prompt, new, names, c.count("train.max_tokens_per_gpu") if dynamic else 0)
    if c.value("eval.dataset") is None:
        return c.set("data.eval_source", None, "eval.dataset")
    set_evaluations(c, local_path(c.value("eval.dataset")), every="eval.steps", of="eval.dataset")
    c.set("data.eval_split", str(c.value("eval.split")), "eval.split")
    c.set("run.eval_samples", c.whole("eval.n_samples_per_prompt"), "eval.n_samples_per_prompt")
    c.set("run.eval_temperature", c.number("eval.temperature"), "eval.temperature")


def _steps(c: Conversion) -> None:
    prompts, batch = c.count("rollout.batch_size"), c.count("train.batch_size")
    responses = prompts * c.count("rollout.n_samples_per_prompt")
    updates = max(1, responses // batch)
    if responses % batch:
        c.differs.append(
            f"{responses} responses in updates of {batch}: the last is smaller in OpenRLHF; here {updates} share them"
        )
    if updates > prompts:
        c.lacks("train.batch_size", f"{updates} updates from {prompts} prompts; here an update has whole groups")
        updates = prompts
    c.set("objective.mini_batches", updates, "rollout.batch_size rollout.n_samples_per_prompt train.batch_size")
    if updates > 1:
        c.differs.append(f"{DRAWN_AT_RANDOM}OpenRLHF")
    if c.truth("train.async_enable"):
        c.set("run.max_staleness", 1, "train.async_enable")


def _objective(c: Conversion) -> None:
    estimator = c.value("algo.advantage.estimator")
    if estimator not in ADVANTAGES:
        c.lacks("algo.advantage.estimator", NO_CRITIC)
    c.set("objective.advantage", ADVANTAGES.get(estimator, "std"), "algo.advantage.estimator")
    if not c.truth("algo.advantage.no_std_norm") and estimator == "reinforce_baseline":
        c.lacks("algo.advantage.no_std_norm", "advantages are not divided by the batch's standard deviation")
    by_token = c.value("actor.loss_agg_mode") == "token-mean"
    loss = "gspo" if c.value("actor.policy_loss_type") == "gspo" else "dapo" if by_token else "grpo"
    c.set("objective.loss", loss, "actor.policy_loss_type actor.loss_agg_mode")
    name = c.first_given("actor.eps_clip_low_high", "actor.eps_clip")
    both = c.value("actor.eps_clip_low_high") is not None
    low, high = c.checked(name, lambda value: [number(value[i]) if both else number(value) for i in (0, 1)])
    c.set("objective.clip_low", low, name)
    c.set("objective.clip_high", high, name)
    if c.truth("algo.dynamic_filtering_enable"):
        c.set("objective.dynamic_sampling", True, "algo.dynamic_filtering_enable")
        c.set("objective.dynamic_sampling_rounds", 1000, "algo.dynamic_filtering_enable", "no bound in OpenRLHF")
        c.value("algo.dynamic_filtering_range")
        c.differs.append(
            "groups are dropped where all rewards are equal; OpenRLHF drops those whose mean score is outside "
            "dynamic_filtering_range"
        )


def _importance(c: Conversion) -> None:
    """Weights for vLLM's other arithmetic; older versions spell level and mode as one type."""
    level, mode = str(c.value(f"{CORRECTION}_level")), str(c.value(f"{CORRECTION}_mode"))
    if c.truth(f"{CORRECTION}_enable"):
        kinds = {"tis": ("token", "clip"), "icepop": ("token", "mask")}
        level, mode = kinds.get(str(c.value(f"{CORRECTION}_type") or "tis"), ("seq", "mask"))
    if level in ("off", "False"):
        return
    names = " ".join(name for name in c.given if name.startswith(CORRECTION))
    c.set("objective.importance", "token_tis", names)
    c.set("objective.importance_cap", number(c.list(f"{CORRECTION}_threshold")[-1]), names)
    if (level, mode) != ("token", "clip") or len(c.list(f"{CORRECTION}_threshold")) > 1:
        c.differs.append(
            "importance weights are capped from above (token_tis); OpenRLHF also bounds them below, or drops what is "
            "outside"
        )


def _kl(c: Conversion) -> None:
    coefficient, in_loss = c.number("algo.kl.init_coef"), c.truth("algo.kl.use_loss")
    if coefficient > 0 and in_loss:
        kind = "k2" if c.truth("algo.kl.unbiased_gradient") else str(c.value("algo.kl.estimator"))
        c.set("objective.kl", kind, "algo.kl.estimator algo.kl.use_loss algo.kl.unbiased_gradient")
        c.set("objective.kl_coef", coefficient, "algo.kl.init_coef")
        return
    c.set("objective.kl", "none", "algo.kl.use_loss")
    c.set("objective.kl_coef", 0.0, "algo.kl.init_coef")
    if coefficient > 0:
        c.set("objective.kl_in_reward", True, "algo.kl.init_coef")
        c.set("objective.kl_reward_coef", coefficient, "algo.kl.init_coef")
        c.differs.append(
            "the KL of a whole response is in its reward, before advantages; OpenRLHF takes a token's KL off the "
            "advantages up to it"
        )


def _optimizer(c: Conversion) -> None:
    set_betas(c, "actor.adam.betas")
    if c.value("actor.lr_scheduler") != "constant":
        c.set_warmup(c.number("actor.lr_warmup_ratio"), "actor.lr_warmup_ratio")
    elif "actor.lr_warmup_ratio" in c.given:
        why = "actor.lr_scheduler=constant has no warm-up in transformers; learner.warmup_steps if it is wanted"
        c.lacks("actor.lr_warmup_ratio", why)
    if c.value("actor.lr_scheduler") == "cosine_with_min_lr":
        c.set("learner.min_lr_ratio", c.number("actor.min_lr_ratio"), "actor.min_lr_ratio", "cosine_with_min_lr")
    if c.ours("learner.lora_rank") > 0:
        c.set("learner.lora_alpha", c.number("ds.lora.alpha"), "ds.lora.alpha")
        c.set("learner.lora_targets", [str(x) for x in c.list("ds.lora.target_modules")], "ds.lora.target_modules")


def _rewards(c: Conversion) -> None:
    entries = []
    for place in str(c.value("reward.remote_url") or "").split(","):
        if place.endswith(".py"):
            entries.append(reward_entry(f"{local_path(place)}:reward_func"))
        elif place:
            why = f"{place} is a server: ask it in a reward function of your own (SECURITY.md: the network)"
            c.lacks("reward.remote_url", why)
    for place in str(c.value("reward.model_name_or_path") or "").split(","):
        if place and not entries:
            entries.append(reward_entry(f"model:{local_path(place)}"))
    if entries:
        names = ("reward.remote_url", "reward.model_name_or_path")
        c.set("reward.functions", entries, " ".join(name for name in names if name in c.given))
    buffer, penalty = "reward.overlong_buffer_len", "reward.overlong_penalty_factor"
    if c.value(buffer) is not None:
        c.set("objective.overlong_buffer_tokens", c.whole(buffer), buffer)
        c.set("objective.overlong_penalty", c.number(penalty), penalty)
    if c.list("reward.clip_range") == [-10, 10]:
        c.differs.append("OpenRLHF clips rewards to [-10, 10]; here they are as the function gives them")


def _workers(c: Conversion) -> None:
    names = "actor.num_nodes actor.num_gpus_per_node"
    actors = c.whole("actor.num_nodes") * c.whole("actor.num_gpus_per_node")
    in_reward, with_kl = c.ours("objective.kl_in_reward"), c.number("algo.kl.init_coef") > 0
    if c.truth("train.colocate_all") and not c.truth("train.async_enable"):
        place_colocated(c, actors, f"train.colocate_all {names}", separate_reference=in_reward)
        beside = True
    else:
        engines = c.whole("vllm.num_engines") * c.whole("vllm.tensor_parallel_size")
        beside = c.truth("train.colocate_actor_ref") and not in_reward
        references = c.whole("ref.num_nodes") * c.whole("ref.num_gpus_per_node")
        apart = references if with_kl and not beside else 0
        place_apart(c, engines, actors, apart, f"{names} vllm.num_engines vllm.tensor_parallel_size")
    if with_kl and beside and not in_reward:
        c.set("reference.placement", "learner", "algo.kl.use_loss", "beside the policy")
        c.set("reference.offload", c.truth("ref.offload"), "ref.offload")
    c.set("learner.backend", "deepspeed", "ds.zero_stage")
    loggers = {"logger.wandb.key": "wandb", "logger.tensorboard_dir": "tensorboard"}
    finish_places(c, [name for key, name in loggers.items() if c.value(key)], "logger.wandb.key")

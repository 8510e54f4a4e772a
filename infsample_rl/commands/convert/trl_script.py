"""What a TRL script gave its trainer, by the names of flags, and what no flag stands for."""

from __future__ import annotations

import re
from typing import Any

from infsample_rl.commands.convert.values import texts

COLUMNS = "rows that the script makes"  # among its settings, until they are in a file
# GRPOTrainer's, in their order
TRAINER = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
    *("rollout_func", "environment_factory"),
)
NOT_READ = {
    "reward_processing_classes": "a reward model has the tokenizer of its own folder",
    "callbacks": "what they change is not",
    "optimizers": "there is learner.optimizer, with learner.lr_schedule",
    "quantization_config": "weights are not quantized",
    "rollout_func": "set environment.factory or environment.tools",
}
OURS = {"train_dataset": "data.source", "eval_dataset": "data.eval_source"}
TOKENIZERS = {"pad_token", "pad_token_id", "padding_side", "use_fast", "trust_remote_code", "token"}  # as it is anyway


def settings_of(trainer: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Those of a trainer as trl_run.py writes it."""
    given = dict(zip(TRAINER, trainer["args"], strict=False)) | trainer["kwargs"]
    given = {name: value for name, value in given.items() if value not in (None, [], [None, None])}
    config = given.get("args") or {"args": [], "kwargs": {}}
    code = [f"{name} of the trainer: {why}" for name, why in NOT_READ.items() if name in given]
    code += [f"{name} of the trainer" for name in given.keys() - set(TRAINER)]
    made = dict(zip(("output_dir",), config["args"], strict=False)) | config["kwargs"]
    made |= _adapters(given.get("peft_config"), code)
    made["model_name_or_path"] = given["model"] if isinstance(given.get("model"), str) else None
    made |= _loaded(given.get("model"), "model_name_or_path")
    tokenizer = _loaded(given.get("processing_class"), "name")
    if "processing_class" in given and not tokenizer:
        code.append("processing_class is made by code: save it and give the folder as model.tokenizer_path")
    elif (name := tokenizer.pop("name", None)) != made["model_name_or_path"]:
        made["processing_class"] = name
    if unread := tokenizer.keys() - TOKENIZERS:
        code.append(f"{', '.join(sorted(unread))} of processing_class: save it and set model.tokenizer_path")
    functions = given.get("reward_funcs") or []
    made["reward_funcs"] = list(map(_reward, functions if isinstance(functions, list) else [functions]))
    made |= {name: given.get(name) for name in ("environment_factory", "tools")}
    name, config_name, split, made[COLUMNS] = _data(given, "train_dataset", code)
    made |= {"dataset_name": name, "dataset_config": config_name, "dataset_train_split": split}
    name, config_name, split, columns = _data(given, "eval_dataset", code)
    if columns:
        code.append("eval_dataset is rows of the script: give a file of them as data.eval_source")
    made["eval_dataset"] = [f"{file}:{config_name}" if config_name else file for file in texts(name)] or None
    made["dataset_test_split"] = split
    return {name: value for name, value in made.items() if value is not None}, code


def _adapters(lora: Any, code: list[str]) -> dict[str, Any]:
    """peft_config by the names of flags, with peft's own defaults; none of TRL's get_peft_config, which reads flags."""
    kind = lora["name"].rpartition(".")[2] if isinstance(lora, dict) else ""
    if kind == "LoraConfig()":
        given = {re.sub("^(?!lora_|use_)", "lora_", name): value for name, value in lora["kwargs"].items()}
        return {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0} | given
    if lora is not None and kind != "get_peft_config()":
        code.append("peft_config of the trainer: adapters are those of a LoraConfig")
    return {}


def _loaded(made: Any, name: str) -> dict[str, Any]:
    """What from_pretrained() was given, its path under this name; nothing where no such call made it."""
    found: dict[str, Any] = {}
    for call in [call for call in _calls(made) if call["name"].endswith("from_pretrained()")]:
        kwargs = dict(call["kwargs"])
        found |= {name: next(iter(call["args"]), kwargs.pop("pretrained_model_name_or_path", None))} | kwargs
    return found


def _data(given: dict[str, Any], role: str, code: list[str]) -> tuple[Any, Any, Any, Any]:
    """Name or files, config and split of load_dataset(), or the columns of rows that the script makes; the rest is
    not run."""
    name = config = split = columns = part = None
    for call in _calls(given.get(role)):
        method = call["name"].rpartition(".")[2]
        if method == "load_dataset()":
            data = dict(zip(("path", "name"), call["args"], strict=False)) | call["kwargs"]
            name, config, split = data.get("data_files", data.get("path")), data.get("name"), data.get("split") or part
            if isinstance(name, dict):  # files of every split
                name = name.get(str(split or "train").partition("[")[0])
        elif method in ("from_dict()", "from_list()") and (columns := _columns(call["args"])):
            pass
        elif method.endswith("]") and (call["args"][0] is None or re.fullmatch(r"[\w-]+", str(call["args"][0]))):
            part = call["args"][0]  # a split of what load_dataset() gives
        elif method == "shuffle()":
            if role == "train_dataset":
                code.append("shuffle() of train_dataset is not run: data.shuffle draws orders of its own from run.seed")
        else:
            part = None
            code.append(f"{role}.{method} is not run: save what it makes and give the file as {OURS[role]}")
    if role in given and not _calls(given[role]):
        code.append(f"{role} is made by code: save what it makes and give the file as {OURS[role]}")
    return name, config, split, columns


def _columns(args: list[Any]) -> dict[str, list[Any]]:
    """Those of Dataset.from_dict or from_list with plain values; none where it was given something else."""
    given = args[0] if args else None
    if isinstance(given, list) and given and all(isinstance(row, dict) for row in given):
        given = {name: [row.get(name) for row in given] for name in given[0]}
    if not isinstance(given, dict) or not all(isinstance(values, list) for values in given.values()):
        return {}
    return given if len(set(map(len, given.values()))) == 1 else {}


def _reward(function: Any) -> str:
    """A function or what a call has made by its name, a text as the model it names."""
    name = function["name"] if isinstance(function, dict) else str(function)
    return name if name != function or ".py:" in name or name.startswith("trl.") else f"model:{name}"


def _calls(made: Any) -> list[dict[str, Any]]:
    """The calls that a value is made by, the last one first."""
    return [made, *_calls(made["of"])] if isinstance(made, dict) and "of" in made else []

"""What TRL's files, flags and scripts say, by the names of flags, and what no flag stands for."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.conversion import SECRET
from infsample_rl.commands.convert.recording import read_yaml, trainer_of, words_of
from infsample_rl.commands.convert.values import texts
from infsample_rl.config.peer_flags import read_flags

TRAINING, LAUNCHERS = r"\.py( |$)|(^| )grpo( |$)", r"^(accelerate launch|torchrun|deepspeed|trl) "
OWN_TRAINER = "Trainer"  # a class of the script's own
REWARDED = "get_reward of environment_factory"  # among its settings: whether there is one
COLUMNS = "rows that the script makes"  # among its settings, until they are in a file
# GRPOTrainer's, in their order
TRAINER = (
    *("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    *("reward_processing_classes", "callbacks", "optimizers", "quantization_config", "peft_config", "tools"),
    *("rollout_func", "environment_factory"),
)
NOT_READ = {
    "reward_processing_classes": "a reward model has the tokenizer of its own folder",
    "callbacks": "what they change",
    "optimizers": "there is learner.optimizer, with learner.lr_schedule",
    "quantization_config": "weights are not quantized",
    "rollout_func": "set environment.factory or environment.tools",
}
OURS = {"train_dataset": "data.source", "eval_dataset": "data.eval_source"}
TOKENIZERS = {"pad_token", "pad_token_id", "padding_side", "use_fast", "trust_remote_code", "token"}  # as it is anyway


def read(path: Path, arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Settings by their names and what no setting stands for, of the YAML files, script and flags of a command."""
    folder, words = ".", [str(path), *arguments]
    if path.suffix not in (".py", ".yaml", ".yml"):
        folder, *words = [*words_of(path, arguments, TRAINING, LAUNCHERS), *arguments]
    given: dict[str, Any] = {}
    script, start = None, 0
    places = (Path(folder), path.parent)
    for index, word in enumerate(words):
        before, is_yaml = words[index - 1], word.endswith((".yaml", ".yml"))
        if word.endswith(".py") and script is None and _find(word, places).is_file():
            script, start = _find(word, places), index + 1
        elif is_yaml and before != "--config_file" and (before == "--config" or _find(word, places).is_file()):
            given |= read_yaml(_find(word, places))
    flags = read_flags(words[: max(0, start - 1)]) | read_flags(words[start:])
    given |= {name.replace("-", "_"): value for name, value in flags.items()}  # their parsers take both
    if "config_file" in given and "num_processes" not in given:  # `accelerate launch` has it from there
        given["num_processes"] = read_yaml(_find(str(given["config_file"]), places)).get("num_processes", 1)
    if script is None:
        return given, []
    record = trainer_of(script, words[start:], given)
    trainer = record["trainer"]["name"].rpartition(".")[2].removesuffix("()")
    if trainer not in ("GRPOTrainer", OWN_TRAINER):
        rloo = "; objective=rloo is RLOO here" if trainer == "RLOOTrainer" else ""
        raise ValueError(f"{script.name}: its trainer is {trainer}, and settings are read of GRPOTrainer alone{rloo}")
    made, code = _settings_of(record["trainer"])
    own = [name for name in record["own"] if not SECRET.search(name)]  # a key stays behind, and is told of
    given = {name: value for name, value in given.items() if name not in own}
    factory = made.get("environment_factory")
    if factory is not None and not (is_in_file(factory) and not own):  # it is as the script has made it
        arguments = words[start:] if record["taken"] else _words_of(words[start:], own)
        made["environment_factory"] = shlex.join([os.path.abspath(script), *arguments])
    if factory is not None and record["rewarded"]:
        made[REWARDED] = True
    code += [f"{name} is a trainer of the script's own: what its methods change" for name in record["classes"]]
    if given.get("dataset_name") and not record["taken"]:  # the rows that the script makes are in it
        code = [line for line in code if not line.startswith("train_dataset")]
    given = given | made if record["taken"] else made | given  # a parser of TRL's has had the flags
    return {name: value for name, value in given.items() if name not in record["taken"]}, code


def _find(name: str, places: Sequence[Path]) -> Path:
    """The file of this name in the first of these folders that has one; where none has, in the first."""
    return next((place / name for place in places if (place / name).is_file()), places[0] / name)


def _settings_of(trainer: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
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


def as_lines(columns: dict[str, list[Any]], file: Path) -> str:
    """The text of a file of these rows. ValueError where it is there with others."""
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if text and file.exists() and file.read_text(encoding="utf-8") != text:
        raise ValueError(f"{file} is there with other rows than the script's: move it, or give its own --dataset_name")
    return text


def is_in_file(factory: Any) -> bool:
    """Whether importing the script is enough to have it."""
    return isinstance(factory, str) and factory.partition(".py:")[2].isidentifier()


def _words_of(words: list[str], flags: list[str]) -> list[str]:
    """Those of a command's words that are these flags and their values, or come before any flag."""
    kept, is_kept = [], True
    for word in words:
        is_kept = word[2:].partition("=")[0].replace("-", "_") in flags if word.startswith("--") else is_kept
        kept += [word] if is_kept else []
    return kept

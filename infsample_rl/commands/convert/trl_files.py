"""TRL's settings out of a YAML file of its command line, a Python script, or a shell command with flags."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.conversion import Given, as_list
from infsample_rl.commands.convert.python_script import Call, Name, Script, Unknown
from infsample_rl.commands.convert.scalars import read_scalar, read_yaml
from infsample_rl.commands.convert.shell import Word, read_commands, read_flags
from infsample_rl.commands.convert.trl_table import LORA_CONFIG, OWN_REWARDS

CONFIGS = ("GRPOConfig", "RLOOConfig")
TRAINERS = ("GRPOTrainer", "RLOOTrainer")
LAUNCHERS = ("trl", "accelerate", "python", "python3", "torchrun", "uv")
PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num-processes")


def read(path: Path, environment: dict[str, str]) -> tuple[dict[str, Given], str]:
    """(settings by TRL's names, "grpo" or "rloo"). ValueError for what is no file of TRL's."""
    if path.suffix in (".yaml", ".yml"):
        content = read_yaml(path.read_text(encoding="utf-8"), str(path))
        return {name: Given(value, path.name) for name, value in content.items() if name != "env"}, "grpo"
    if path.suffix == ".py":
        return read_script(path)
    return _read_shell(path, environment)


def read_words(words: list[Word], place: str) -> dict[str, Given]:
    """Flags as TRL's parser takes them; --num_processes of the launcher among them."""
    flags, _ = read_flags(words)
    given = {}
    for name, (value, line) in flags.items():
        where = f"line {line}" if line else place
        name = "num_processes" if name in PROCESSES else name
        given[name] = Given([read_scalar(item) for item in value] if isinstance(value, list) else _scalar(value), where)
    return given


def _scalar(value: object) -> Any:
    return read_scalar(value) if isinstance(value, str) else value


def _read_shell(path: Path, environment: dict[str, str]) -> tuple[dict[str, Given], str]:
    commands, _ = read_commands(path.read_text(encoding="utf-8"), environment, keep=_is_training)
    if not commands:
        raise ValueError(
            f"{path} holds no command that trains with TRL: trl grpo, or accelerate launch or python with a script"
        )
    words = commands[0]
    given, trainer = {}, "rloo" if any(word.text == "rloo" for word in words) else "grpo"
    flags = read_words(words, path.name)
    for name in [word.text for word in words if word.text.endswith((".py", ".yaml", ".yml"))]:
        beside = path.parent / name
        if beside.is_file() and name != str(getattr(flags.get("config_file"), "value", "")):
            found, trainer = read(beside, environment)
            given |= found
    return given | {name: value for name, value in flags.items() if name != "config"}, trainer


def _is_training(words: list[str]) -> bool:
    return (
        bool(words)
        and words[0] in LAUNCHERS
        and any(word in ("grpo", "rloo") or word.endswith(".py") for word in words[1:])
    )


def read_script(path: Path) -> tuple[dict[str, Given], str]:
    """What GRPOConfig(...), GRPOTrainer(...), LoraConfig(...) and load_dataset(...) are given in a script."""
    script = Script(path.read_text(encoding="utf-8"), str(path))
    configs, trainers = script.calls_of(*CONFIGS), script.calls_of(*TRAINERS)
    if not configs and not trainers:
        raise ValueError(
            f"{path} calls neither of {', '.join((*CONFIGS, *TRAINERS))}: it does not train with TRL's GRPO"
        )
    given: dict[str, Given] = {}
    for call in configs[:1]:
        for name, node in call.keywords.items():
            _enter(given, script, name, node)
    for owner, name, node, _ in script.attributes:
        if owner in ("training_args", "args", "config", "grpo_config", "model_args", "script_args"):
            _enter(given, script, name, node)
    for call in trainers[:1]:
        _enter_trainer(given, script, call, path)
    _enter_dataset(given, script)
    return given, "rloo" if (configs or trainers)[0].name.startswith("RLOO") else "grpo"


def _enter(given: dict[str, Given], script: Script, name: str, node: ast.expr) -> None:
    """A keyword whose value can be read; one that comes from the command line or from code is left to its flag."""
    try:
        given[name] = Given(script.known(node), f"line {node.lineno}")
    except Unknown:
        return


def _enter_trainer(given: dict[str, Given], script: Script, call: Call, path: Path) -> None:
    arguments = (
        dict(zip(("model", "reward_funcs", "args", "train_dataset"), call.arguments, strict=False)) | call.keywords
    )
    if "model" in arguments:
        _enter(given, script, "model_name_or_path", arguments["model"])
    if "reward_funcs" in arguments:
        try:
            names = [_spelled(name, path) for name in script.names(arguments["reward_funcs"])]
            given["reward_funcs"] = Given(names, f"line {arguments['reward_funcs'].lineno}")
        except Unknown as error:
            _note(
                given,
                f"line {call.line}: reward_funcs={error} is made by code: write the function into a file and give "
                "path/to/file.py:function",
            )
    lora = arguments.get("peft_config")
    if isinstance(lora, ast.Name) and lora.id in script.values:
        lora = script.values[lora.id]
    if isinstance(lora, ast.Call) and ast.unparse(lora.func).endswith("LoraConfig"):
        values = {keyword.arg: keyword.value for keyword in lora.keywords if keyword.arg}
        given["use_peft"] = Given(True, f"line {lora.lineno}")
        for theirs, (name, default) in LORA_CONFIG.items():
            given[name] = Given(default, f"line {lora.lineno}, peft's default")
            if theirs in values:
                _enter(given, script, name, values[theirs])


def _spelled(name: Name, path: Path) -> str:
    """A reward function as our settings name it, or as TRL's command line does."""
    if name.module == "":
        return f"model:{name.name}"
    if name.module is None:
        return f"{path}:{name.name}"
    if name.module.startswith("trl"):
        return name.name if name.name in OWN_REWARDS or "(" in name.name else f"trl.rewards.{name.name}"
    return f"{name.module}.{name.name}"


def _enter_dataset(given: dict[str, Given], script: Script) -> None:
    for call in script.calls_of("load_dataset")[:1]:
        arguments = dict(zip(("dataset_name", "dataset_config"), call.arguments, strict=False))
        arguments |= {
            {"path": "dataset_name", "name": "dataset_config"}.get(name, name): node
            for name, node in call.keywords.items()
        }
        for name in ("dataset_name", "dataset_config"):
            if name in arguments:
                _enter(given, script, name, arguments[name])
        if "split" in arguments:
            _enter(given, script, "split", arguments["split"])
        splits = as_list(given.pop("split").value) if "split" in given else []
        for name, split in zip(("dataset_train_split", "dataset_test_split"), splits, strict=False):
            given[name] = Given(split, f"line {call.line}")
    system, question = script.system_prompt_and_question()
    if system is not None:
        given["system_prompt"] = Given(system, "the script's system message")
    if question is not None:
        given["prompt_field"] = Given(question, "the script's user message")
    for call in script.calls_of("map", "filter"):
        made = ast.unparse(call.arguments[0]) if call.arguments else ""
        _note(
            given,
            f"line {call.line}: .{call.name}({made}) is not run: save what it makes and give the file as data.source",
        )
    if any(str(name).partition(":")[0].endswith(".py") for name in as_list(_value(given, "reward_funcs"))):
        needs = ", ".join(sorted({module.partition(".")[0] for module in script.modules.values()}))
        _note(
            given,
            f"the script is imported for its reward functions, with what it imports ({needs}); better move them to a "
            "file of their own",
        )
        if script.runs_when_imported:
            _note(given, 'the script trains when it is imported: put that under `if __name__ == "__main__"`')


def _note(given: dict[str, Given], text: str) -> None:
    """Something of the script that no setting stands for."""
    before = given["script_code"].value if "script_code" in given else []
    given["script_code"] = Given([*before, text], "code")


def _value(given: dict[str, Given], name: str) -> Any:
    return given[name].value if name in given else None

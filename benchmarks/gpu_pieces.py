"""Pieces of the GPU's evidence that no other benchmark measures; each prints JSON lines.

python -m benchmarks.gpu_pieces facts                     # the device, its bandwidth and products
python -m benchmarks.gpu_pieces tests                     # all tests marked gpu
python -m benchmarks.gpu_pieces races                     # a decode step of two layers under compute-sanitizer
python -m benchmarks.gpu_pieces run FOLDER [SETTING...]   # a run of the whole system: a line for every step
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import models
from benchmarks.engine_point import read_bandwidth
from benchmarks.matrix_products import SIDE, matrix_flops
from benchmarks.process import ROOT, end_with_terminate
from benchmarks.workload import ModelOptions

TESTS = ("tests/model", "tests/rollout", "tests/learner", "tests/benchmarks")
TEST_PROCESSES = 6
STEP_METRICS = ("timing/", "memory/", "rollout/", "reward/mean", "learner/logprob_diff", "learner/grad_norm")


def main(arguments: list[str]) -> int:
    """One piece; its exit status."""
    name, *rest = arguments or [""]
    if name not in PIECES:
        print(__doc__, file=sys.stderr)
        return 2
    return PIECES[name](rest)


def facts(_: list[str]) -> int:
    """Name and memory of the device, versions, bytes a second that a sum reads, FLOP a second of a product."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = models.machine(device) | {
        "bandwidth": read_bandwidth(64 * SIDE**2 if device.type == "cuda" else SIDE**2, device)
    }
    if device.type == "cuda":
        found |= {"memory_bytes": torch.cuda.mem_get_info()[1], "matrix_flops": matrix_flops(device)}
        found["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    _say(found)
    return 0


def tests(selected: list[str]) -> int:
    """How many tests passed, failed and were skipped, and which failed. `selected`: files instead of all folders."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-rfE", "--tb=line", *(selected or TESTS)]
    if importlib.util.find_spec("xdist") is not None:
        command += ["-n", str(TEST_PROCESSES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr.strip()[-300:]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    failures = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    _say({"counts": counts, "failures": failures, "said": last})
    return done.returncode


def races(_: list[str]) -> int:
    """Hazards in shared memory that compute-sanitizer finds in decode steps of two layers of Qwen3-1.7B's shape."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    if not Path(tool).exists():
        print("gpu_pieces races: there is no compute-sanitizer here", file=sys.stderr)
        return 1
    spec = asdict(ModelOptions(shape="qwen3_1.7b_two_layers", dtype="bfloat16", prompt_tokens=200)) | {"rows": [4]}
    spec |= {"own_tokens": [6], "steps": 2, "kv_dtype": "auto", "top_p": 1.0}
    code = f"from benchmarks.decode import measure_here; list(measure_here({spec!r}))"
    command = [tool, "--tool", "racecheck", "--print-limit", "5", sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    summary = re.findall(r"RACECHECK SUMMARY: (.*)", done.stdout)
    _say(
        {
            "summary": summary[-1] if summary else None,
            "status": done.returncode,
            "said": (done.stdout + done.stderr)[-600:],
        }
    )
    return 0 if summary and summary[-1].startswith("0 hazards") else 1


def run(arguments: list[str]) -> int:
    """A run into FOLDER with settings of the user's: the metrics of its steps, also where it is cut."""
    folder, *settings = arguments
    shutil.rmtree(folder, ignore_errors=True)  # of one that was cut
    command = [sys.executable, "-m", "infsample_rl.main", f"run.dir={folder}", *settings]
    metrics = Path(folder, "metrics.jsonl")
    end_with_terminate()
    with tempfile.TemporaryFile("w+") as output:  # a pipe would break while the run ends behind this process
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
        try:
            status = process.wait()
        finally:
            for line in metrics.read_text().split("\n")[:-1] if metrics.exists() else []:
                step = json.loads(line)
                _say({name: value for name, value in step.items() if name == "step" or name.startswith(STEP_METRICS)})
        if status:
            output.seek(0)
            print(output.read()[-600:], file=sys.stderr)
    return status


def _output(*command: str) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _say(record: dict[str, Any]) -> None:
    print(json.dumps(record), flush=True)


PIECES = {"facts": facts, "tests": tests, "races": races, "run": run}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Which memory of a process counts as taken."""

from __future__ import annotations

import mmap
import subprocess
import sys

import pytest

MB = 1_000_000
MEASURE = """
import mmap, sys, torch
from infsample_rl.model.peak_memory import PeakMemory

memory = PeakMemory(torch.device("cpu"), with_mapped=sys.argv[2] == "True")
memory.reset()
with open(sys.argv[1], "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    sum(mapped[:: mmap.PAGESIZE])  # every page is read
print(memory.peak_bytes())
torch.ones(50_000_000)
print(memory.peak_bytes(), memory.held_bytes())
"""


@pytest.mark.parametrize("name", ["library.so", "model.safetensors"])
@pytest.mark.parametrize("with_mapped", [False, True])
def test_a_worker_counts_what_it_allocates_and_of_the_files_it_maps_only_weights(tmp_path, name, with_mapped):
    file = tmp_path / name
    file.write_bytes(bytes(100 * MB // mmap.PAGESIZE * mmap.PAGESIZE))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(file), str(with_mapped)], capture_output=True, text=True, check=True
    )
    after_mapping, peak, held = map(int, done.stdout.split())
    files = 100 * MB if with_mapped or name == "model.safetensors" else 0
    assert abs(after_mapping - files) < 20 * MB
    assert abs(peak - files - 200 * MB) < 20 * MB and abs(held - files) < 20 * MB, "the tensor was there for a moment"

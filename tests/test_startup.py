"""What a resumed run finds: its length probe, or a line that it starts anew."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from infsample_rl.checksums import write_checksums
from infsample_rl.config_loading import load_config
from infsample_rl.keeping import write_checkpoint
from infsample_rl.rollout.length_prediction.run_probe import FILE
from infsample_rl.startup import Start, prepare
from infsample_rl.types import ProbeReport, ProbeStatistics


def begin(run_dir: Path, *overrides: str) -> Start:
    start = prepare(load_config([f"run.dir={run_dir}", *overrides]))
    start.lock.close()  # as when the process ends
    return start


def test_a_run_goes_on_with_the_length_probe_of_its_checkpoint(tmp_path):
    start = begin(tmp_path)
    size = start.probe.statistics.xy.shape[1]
    assert size == 2 * 128 + 2  # kk_tiny's hidden size is 128
    seen = ProbeStatistics(np.ones((2, size, size)), np.ones((2, size)), np.ones(2))
    start.probe.enter([ProbeReport(statistics=seen, steps_with=9, steps_without=10)])

    def save(folder: str) -> None:
        Path(folder, "model.safetensors").write_text("weights")
        start.probe.save(Path(folder))

    checkpoint = write_checkpoint(tmp_path, {"step": 3, "data": start.prompts.state()}, save, keep=2)
    again = begin(tmp_path)
    assert again.step == 3 and again.probe.statistics.xx.tobytes() == seen.xx.tobytes() and again.probe.published().is_used
    assert not any("length probe" in warning for warning in again.warnings)
    (checkpoint / FILE).unlink()
    write_checksums(checkpoint)
    anew = begin(tmp_path)
    assert anew.probe.statistics.counts.tolist() == [0, 0]
    assert f"{checkpoint / FILE} is not there: the length probe starts anew" in anew.warnings


def test_a_bitwise_run_and_a_schedule_that_reads_no_lengths_have_no_probe(tmp_path):
    assert begin(tmp_path / "one", "run.deterministic=true").probe is None
    assert begin(tmp_path / "two", "rollout.schedule=arrival").probe is None

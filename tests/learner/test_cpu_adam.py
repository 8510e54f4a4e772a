"""DeepSpeed's CPU Adam is compiled by one process at a time. test_deepspeed.py trains with it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

from infsample_rl.learner.cpu_adam import _alone


def test_a_process_that_is_killed_while_it_compiles_keeps_nobody_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "given")
    program = (
        "import pathlib, sys, time; from infsample_rl.learner.cpu_adam import _alone\n"
        "with _alone(pathlib.Path(sys.argv[1])):\n"
        "    (pathlib.Path(sys.argv[1]) / 'lock').touch()  # torch's\n"
        "    print('in', flush=True); time.sleep(300)\n"
    )
    entered, folder = threading.Event(), tmp_path / "version" / "cpu_adam"

    def enter():
        with _alone(folder):
            assert not (folder / "lock").exists() and os.environ["TORCH_EXTENSIONS_DIR"] == str(folder.parent)
            entered.set()

    command = [sys.executable, "-c", program, str(folder)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as compiling:
        assert compiling.stdout.readline() == "in\n"
        other = threading.Thread(target=enter)
        other.start()
        was_alone = not entered.wait(0.3)
        compiling.kill()
        other.join(30)
    assert was_alone and entered.is_set()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "given"

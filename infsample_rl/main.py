"""Train: python -m infsample_rl.main [+experiment=NAME] [group=CHOICE] [group.key=value ...]

  --cfg job          print the composed settings and stop
  --config-dir DIR   a folder of your own, laid out like configs/, searched beside it
  -m                 settings may be lists, rollout.slots=2,4: a run for each, one after another, in run.dir/0, /1, ...
  --help             this text and the experiments there are

Exit codes: 0 done, or ended in order by SIGTERM; 1 the run failed; 2 a setting or an input is wrong; 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infsample_rl import lasting_imports
from infsample_rl.cluster.early_end import SIGTERM_SAID, end_process, ending_at_once, is_command, take_over

if TYPE_CHECKING:  # torch and transformers are imported beside Ray's start
    from infsample_rl.controller.checks import Start

FLAGS: dict[str, dict[str, Any]] = {
    "--cfg": {"choices": ["job"]},
    "--multirun -m": {"action": "store_true"},
    "--help -h": {"action": "store_true"},
}


def main(arguments: list[str] | None = None) -> int:
    """Run the command; returns the exit code. SIGTERM and Ctrl-C end the process at once until there is a run."""
    with ending_at_once():
        return _main(arguments)


def _main(arguments: list[str] | None) -> int:
    # behind ending_at_once(), as most of what is imported here
    from infsample_rl.config.loading import compose, load_config
    from infsample_rl.config.overrides import ConfigError, experiments, parse_flags, sweep

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path may hold what an ASCII terminal cannot show
    try:
        options = parse_flags(sys.argv[1:] if arguments is None else arguments, FLAGS)
        if options.help:
            print(__doc__ + "\nExperiments: " + ", ".join(experiments(options.config_dir)))
            return 0
        if options.cfg:
            import yaml

            print(yaml.safe_dump(compose(options.words, options.config_dir), sort_keys=False), end="")
            load_config(options.words, options.config_dir)  # what a run would refuse is said here too
            return 0
        if options.multirun:
            return run_each(sweep(options.words, options.config_dir), options.config_dir)
        config = load_config(options.words, options.config_dir)
    except ConfigError as error:
        from infsample_rl.commands.convert.peer_names import in_our_words

        return _fail(in_our_words(str(error)), 2)
    return train(config)


def run_each(jobs: list[list[str]], config_dir: str | None) -> int:
    """The runs of these overrides, one after another, each a process of its own; the code of the first that fails,
    after the others. A signal ends the run that is there, and begins no other. ConfigError, before any begins, where
    one cannot be composed."""
    from infsample_rl.config.loading import load_config

    folder = [load_config(overrides, config_dir).run.dir for overrides in jobs][0]
    flags = [] if config_dir is None else ["--config-dir", config_dir]
    sent: list[int] = []  # signals that end this run and those after it
    failed: dict[str, int] = {}
    try:
        for number, overrides in enumerate(jobs):
            own = [override for override in overrides if not override.startswith("run.dir=")]
            name, settings = f"run {number + 1} of {len(jobs)}", " ".join(own)
            print(f"{name}: {settings}", flush=True)
            command = [sys.executable, "-m", "infsample_rl.main", *flags, *own, f"run.dir={folder}/{number}"]
            run = subprocess.Popen(command)

            def end(number: int, _frame: object, run: subprocess.Popen[bytes] = run) -> None:
                sent.append(number)
                run.terminate()

            take_over(end)  # the run ends in order by itself
            code = run.wait()
            if sent:
                return code
            if code != 0:
                failed[f"{name} failed (exit {code}): {settings}"] = code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        run.wait()  # the terminal has told it too
        return 130
    finally:
        print(*failed, sep="\n", end="\n" if failed else "", file=sys.stderr)
    return next(iter(failed.values()), 0)


def train(config) -> int:
    """Check the inputs, then run; every failure is one line and an exit code."""
    from infsample_rl.cluster.interruption import Terminated
    from infsample_rl.observe.trackers.trackers import import_ahead

    notes: list[str] = []
    try:
        with lasting_imports():
            _check_folders(config)
            import_ahead(config)
            from infsample_rl.cluster.local_ray import no_session_left_if_refused

        with no_session_left_if_refused():
            with lasting_imports():
                start = _prepare(config, notes.append)
                import torch

                from infsample_rl.controller.driver import Driver

            # the driver computes little, and threads that spin would wait for cores that its workers need
            torch.set_num_threads(1)
            start.warnings += [text.removeprefix("warning: ") for text in notes]
            driver = Driver(config, start)
        driver.run()
    except KeyboardInterrupt:
        print(
            f"interrupted; go on with run.dir={config.run.dir} run.resume=auto and the same settings", file=sys.stderr
        )
        return 130
    except Terminated:
        print(SIGTERM_SAID, file=sys.stderr)
        return 0
    except ValueError as error:
        return _fail(error, 2)
    except (RuntimeError, OSError, MemoryError) as error:
        from infsample_rl.cluster.out_of_memory import explain

        return _fail(_how_to_go_on(explain(str(error) or type(error).__name__, config.run.dir), config), 1)
    return 0


def _check_folders(config) -> None:
    """ValueError for a local folder of a model that is not there, before anything is started or imported that takes
    time; a hub name is tried later."""
    from infsample_rl.config.loading import cache_folder

    for name, path in (
        ("rollout.predictor_path", config.rollout.predictor_path),
        ("reference.path", config.reference.path),
    ):
        if path is not None and Path(path).is_absolute() and not Path(path).is_dir():
            raise ValueError(f"{name}={path} is not a folder")
    folder = Path(config.model.path)
    if not folder.is_absolute():
        return  # a hub name
    if not folder.is_dir():
        makes_it = "; `make smollm2` makes it"
        raise ValueError(f"model.path={folder} is not a folder{makes_it if cache_folder() in folder.parents else ''}")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ValueError(f"model.path={folder} holds no weights (*.safetensors or *.bin)")


def _prepare(config, note: Callable[[str], None]) -> Start:
    """Check everything; where Ray is to start here, beside it: its processes come up on another core meanwhile."""
    from infsample_rl.cluster.local_ray import start_local

    def check() -> Start:
        from infsample_rl.controller.inputs import read_inputs

        try:
            inputs = read_inputs(config)
            from infsample_rl.controller.checks import prepare

            return prepare(config, inputs)
        except ValueError as error:
            if is_command() and config.cluster.address is None:
                end_process(_line(error), 2)  # Ray's start, which nothing can break off, is not waited for
            raise

    with ThreadPoolExecutor(1) as beside:
        checked = beside.submit(check)
        if config.cluster.address is None:
            start_local(config, note)
    return checked.result()


def _how_to_go_on(text: str, config) -> str:
    """A failure's line; that of a full disk, which names no file, says what is to have room and that nothing else is
    lost."""
    if any(os.strerror(code) in text for code in (errno.ENOSPC, errno.EDQUOT)):
        return (
            f"{text}; once run.dir={config.run.dir} has room, run.resume=auto and the same settings go on from the "
            "last checkpoint"
        )
    return text


def _fail(error: Exception | str, code: int) -> int:
    print(_line(error), file=sys.stderr)
    return code


def _line(error: Exception | str) -> str:
    return "error: " + " ".join(line.strip() for line in str(error).splitlines() if line.strip())


if __name__ == "__main__":
    code = main()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one, while Python ends, must not change the exit code
    sys.exit(code)

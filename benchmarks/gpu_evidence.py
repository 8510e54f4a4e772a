"""Everything that is claimed of a GPU, measured by one command in parts of nine minutes at most.

python -m benchmarks.gpu_evidence part=a [out=docs/results/gpu] [minutes=9] [wheels=FOLDER] [tiny=true]

Every piece is a command of its own; its JSON lines go, with date, seconds and status, into OUT/PART.jsonl, one line a
piece. A piece that is there with status 0, of the same command, sources, device and torch, is not run again, so a part
that was cut goes on where it was. `tiny`: the same pieces with small models, on any machine. benchmarks.gpu_tables
writes the page.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.process import ROOT, Record, end_with_terminate, terminate_group
from infsample_rl.config.command_line import option, run_with_options
from infsample_rl.observe.versions import commit_of

PAGE_FOLDER = "docs/results/gpu"
MODEL = "{scratch}/qwen3_1.7b"  # of random weights; made by the first piece that wants it
BIG = ["shape=qwen3_1.7b", "dtype=bfloat16"]
HUGE = ["shape=qwen3_8b", "dtype=bfloat16"]
RUN = ["+experiment=kk_tiny", "run.steps=3", "run.eval_prompts=8", "logging.wandb=disabled", "cluster.learner_ranks=1"]
RUN += ["cluster.rollout_workers=1", "learner.warmup_steps=1"]
ON_GPU = ["cluster.colocate=true", "cluster.rollout_gpus=1", "cluster.learner_gpus=1"]
SHARED_GPU = ["cluster.rollout_gpus=0.5", "cluster.learner_gpus=0.5", "cluster.weight_sync=cuda_ipc"]
TINY_RUN = ["run", "{scratch}/run", *RUN]
LARGE_RUN = ["reward.functions=[benchmarks/random_reward.py:of_tokens]", "learner.max_tokens_per_micro_batch=8192"]
LARGE_RUN += ["objective.mismatch_stop=1", "data.prompts_per_step=2", "run.checkpoint_every=100"]
LARGE_RUN += ["model.dtype=bfloat16", "run.eval_prompts=0"]
LARGE = [*RUN, *LARGE_RUN, f"model.path={MODEL}", "rollout.max_new_tokens=512"]
TINY_DECODE, INT8, TOP_P = ["rows=[1,2]", "prompt_tokens=20", "own_tokens=[4]", "steps=2"], "kv_dtype=int8", "top_p=0.9"
ENGINE = ["schedules=[token_budget]", "rivals=[]", "rows=[]"]
TRAIN = [f"model={MODEL}", "dtype=bfloat16", "prompt_tokens=256", "max_new_tokens=128", "repeats=1"]
TRAIN += ["max_tokens_per_micro_batch=8192", "logprob_chunk_tokens=2048"]
TINY_TRAIN = ["rivals=[]", "group_size=4", "max_new_tokens=8", "prompt_tokens=16", "repeats=1"]
RECOMPUTED = "activation_checkpointing=1"
VLLM = ["prompt_tokens=512", "max_new_tokens=512", *ENGINE, "repeats=1", "rivals.vllm_python={vllm_python}"]
TINY_VLLM = [*VLLM, "rivals.vllm_variants=1", "prompt_tokens=20", "max_new_tokens=16", "group_size=4"]
RECORDED = ["ignore_eos=false", "mean_tokens=256"]
PIECES = "gpu_pieces"
SOURCES, SUFFIXES = ("benchmarks", "configs", "infsample_rl", "tests"), (".py", ".yaml", ".cpp", ".h")


@dataclass(frozen=True)
class Piece:
    """One command `python -m benchmarks.MODULE ARGUMENTS`, the seconds it may take, and what it runs where `tiny`."""

    name: str
    module: str
    arguments: list[str]
    seconds: int
    tiny: list[str] | None = None  # None: it does not run there


PARTS = {
    "a": [
        Piece("facts", PIECES, ["facts"], 60, ["facts"]),
        Piece("tests", PIECES, ["tests"], 300, ["tests", "tests/model/test_policy_head.py"]),
        Piece("races", PIECES, ["races"], 150),
    ],
    "b": [
        Piece("1.7b", "decode", [*BIG], 120, TINY_DECODE),
        Piece("8b", "decode", [*HUGE, "own_tokens=[64,1024]"], 240),
        # the shipped experiments decode as many as the GPU's memory holds; above 64 the layers are torch's products
        Piece("many rows", "decode", [*BIG, "rows=[128,256,512]", "own_tokens=[256]"], 120),
        Piece("short prompt", "decode", [*BIG, "rows=[4,32]", "prompt_tokens=128", "own_tokens=[64]"], 60),
        Piece("long prompt", "decode", [*BIG, "rows=[4,32]", "prompt_tokens=4096", "own_tokens=[64]"], 60),
        Piece("int8", "decode", [*BIG, "rows=[4,32]", "own_tokens=[1024]", INT8], 60, [*TINY_DECODE, INT8]),
        Piece("top-p", "decode", [*BIG, "rows=[4,32]", "own_tokens=[64]", TOP_P], 60, [*TINY_DECODE, TOP_P]),
        Piece(
            "drafts",
            "engine",
            ["dtype=bfloat16", "max_new_tokens=256", "ignore_eos=false", "speculate=[0,auto]", *ENGINE, "repeats=3"],
            240,
            ["max_new_tokens=16", "group_size=4", "speculate=[0,auto]", *ENGINE, "repeats=1"],
        ),
    ],
    "c": [
        Piece(
            "engine",
            "engine",
            [*BIG, "prompt_tokens=512", "max_new_tokens=256", "schedules=[token_budget,infinite]", "rivals=[generate]"]
            + ["rows=[]", "repeats=1"],
            400,
            ["max_new_tokens=8", "group_size=4", *ENGINE, "rivals=[generate]", "repeats=1"],
        ),
        Piece(
            "memory",
            "memory",
            [*BIG, "prompt_tokens=256", "max_new_tokens=1024", "groups=[32,1024]", "slots=[1,4]"],
            300,
            ["max_new_tokens=8", "groups=[4]", "slots=[2]", "max_generate_group=1", "prompt_tokens=16"],
        ),
    ],
    "d": [
        Piece("model", "random_folder", ["shape=qwen3_1.7b", f"out={MODEL}"], 60),
        Piece("kept", "train", [*TRAIN, "rivals=[]"], 120, TINY_TRAIN),
        Piece("recomputed", "train", [*TRAIN, "rivals=[]", RECOMPUTED], 120, [*TINY_TRAIN, RECOMPUTED]),
        Piece("beside TRL", "train", TRAIN, 420),
    ],
    "e": [
        Piece("colocated", PIECES, ["run", "{scratch}/colocated", *RUN, *ON_GPU], 150, TINY_RUN),
        Piece("cuda_ipc", PIECES, ["run", "{scratch}/cuda_ipc", *RUN, *SHARED_GPU], 150),
        Piece("model", "random_folder", ["shape=qwen3_1.7b", f"out={MODEL}"], 60),
        Piece("colocated 1.7b", PIECES, ["run", "{scratch}/large", *ON_GPU, *LARGE], 200, [*TINY_RUN, *LARGE_RUN]),
        Piece("cuda_ipc 1.7b", PIECES, ["run", "{scratch}/large_ipc", *SHARED_GPU, *LARGE], 200),
    ],
    "f": [
        Piece("forced lengths", "engine", [*BIG, *VLLM], 400, TINY_VLLM),
        Piece("recorded lengths", "engine", [*BIG, *VLLM, *RECORDED], 400, [*TINY_VLLM, *RECORDED, "mean_tokens=4"]),
    ],
}
ALWAYS = ("model",)  # what lies in a scratch folder is made again


@dataclass(kw_only=True)
class EvidenceOptions:
    """Arguments of this command."""

    part: str = option("a", "which part", choices=tuple(PARTS))
    out: str = option(PAGE_FOLDER, "folder of the JSON lines")
    scratch: str = option("", "folder of models, wheels, runs and kernels; default: one in the temporary folder")
    minutes: float = option(9.0, "no piece is begun that may last longer than what is left of them", above=0)
    only: list[str] = option([], "names of pieces; []: all of the part")
    vllm_python: str = option(sys.executable, "interpreter that has vLLM, for part f; default: this one")
    wheels: str | None = option(None, "folder of wheels of what is missing here, as Ray and vLLM, for the pieces alone")
    tiny: bool = option(False, "small models, on any machine; what needs a GPU is left out")

    def __post_init__(self) -> None:
        names = [piece.name for piece in PARTS[self.part]]
        for name in self.only:
            if name not in names:
                raise ValueError(f"only={name}: part {self.part} has {', '.join(names)}")
        if self.wheels is not None and not list(Path(self.wheels).glob("*.whl")):
            raise ValueError(f"wheels={self.wheels}: there is no .whl file")
        self.scratch = self.scratch or os.path.join(tempfile.gettempdir(), "infsample_rl_gpu")


def main() -> int:
    """Run a part; 1 when a piece failed, 3 when some are left for want of time."""
    end_with_terminate()
    return run_with_options(run, EvidenceOptions, usage=__doc__)


def run(options: EvidenceOptions) -> int:
    """As main()."""
    started, failed = time.monotonic(), False
    path = Path(options.out, f"{options.part}.jsonl")
    path.parent.mkdir(parents=True, exist_ok=True)
    if options.wheels is not None:
        install(options)
    here = {"machine": machine(), "sources": sources()}
    done = [record for record in read(path) if record["status"] == 0 and record["piece"] not in ALWAYS]
    for piece in PARTS[options.part]:
        left = 60 * options.minutes - (time.monotonic() - started)
        arguments = piece.tiny if options.tiny else piece.arguments
        if arguments is None or (options.only and piece.name not in options.only):
            continue
        asked = {"piece": piece.name, "command": " ".join([f"benchmarks.{piece.module}", *arguments])} | here
        if any(asked.items() <= record.items() for record in done):
            continue
        if piece.seconds > left:
            print(f"gpu_evidence: {piece.name} may take {piece.seconds} s, {left:.0f} are left: run again", flush=True)
            return 3
        found, ended = measure(piece, arguments, options)
        with path.open("a") as lines:
            lines.write(json.dumps(asked | found) + "\n")
        failed = failed or found["status"] != 0
        print(f"{options.part}, {piece.name}: status {found['status']}, {found['seconds']} s", flush=True)
        if ended is not None:
            raise ended
    return 1 if failed else 0


def machine() -> str:
    """Device and torch, asked of a process of its own: a context of this one would count as memory in use."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu', torch.__version__)"
    done = subprocess.run([sys.executable, "-c", ask], check=True, capture_output=True, text=True)
    return ", torch ".join(done.stdout.strip().rsplit(maxsplit=1))


def sources() -> str:
    """A digest of what the pieces run, which is there without git too, and which new results leave as it was."""
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in SUFFIXES]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(found))).hexdigest()[:12]


def install(options: EvidenceOptions) -> None:
    """Put the wheels where the pieces find them, once, without a network. CalledProcessError where pip cannot."""
    folder = Path(options.scratch, "wheels")
    if not folder.exists():
        files = [str(path) for path in sorted(Path(options.wheels or "").glob("*.whl"))]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target"]
        subprocess.run([*pip, f"{folder}.new", *files], check=True)
        Path(f"{folder}.new").rename(folder)


def measure(piece: Piece, arguments: list[str], options: EvidenceOptions) -> tuple[Record, BaseException | None]:
    """What came of one piece, for its line; and what ended this command meanwhile."""
    scratch = options.scratch
    given = [each.format(scratch=scratch, vllm_python=options.vllm_python) for each in arguments]
    given += [] if piece.module in (PIECES, "random_folder") else ["json=true"]
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
    if options.wheels is not None:
        caches["PYTHONPATH"] = os.pathsep.join(filter(None, [f"{scratch}/wheels", os.environ.get("PYTHONPATH")]))
    begun, started = datetime.datetime.now(datetime.UTC), time.monotonic()
    ended: BaseException | None = None
    command = [sys.executable, "-m", f"benchmarks.{piece.module}", *given]
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | caches, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        said, errors = process.communicate(timeout=piece.seconds)
    except BaseException as error:  # it takes longer than it may, or this command is ended
        terminate_group(process)
        said, errors = process.communicate()
        if isinstance(error, subprocess.TimeoutExpired):
            errors += f"\nlonger than {piece.seconds} s"
        else:
            ended = error
    return {
        "date": begun.date().isoformat(),
        "seconds": round(time.monotonic() - started, 1),
        "status": process.returncode,
        "records": [_shown(json.loads(line)) for line in said.splitlines() if line.startswith("{")],
        "said": errors.strip()[-1500:] if process.returncode else "",
        "code": commit_of(ROOT),
        "note": "",
    }, ended


def _shown(record: Record) -> Record:
    """Without the workload, which the command says, and which has paths of the machine."""
    return {name: value for name, value in record.items() if name != "workload"}


def read(path: Path) -> list[Record]:
    """The lines of a part, oldest first; none where it was not run."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


if __name__ == "__main__":
    sys.exit(main())

"""The GPU's evidence: parts that go on where they were cut, the page of what was found, a rehearsal without a GPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import decode, gpu_evidence, gpu_pieces, gpu_tables
from benchmarks.gpu_evidence import EvidenceOptions, Piece
from infsample_rl.cluster.rollout_interpreter import MADE_HERE

ROOT = Path(__file__).resolve().parents[2]
# Of a GPU alone, or with the same code as a piece of the same part.
NOT_REHEARSED = {"races", "8b", "many rows", "short prompt", "long prompt", "model", "beside TRL"}
NOT_REHEARSED |= {"cuda_ipc", "cuda_ipc 1.7b"}


def test_the_page_is_what_its_json_says():
    assert (ROOT / "docs/results/gpu.md").read_text() == gpu_tables.page(ROOT / gpu_evidence.PAGE_FOLDER)


def test_the_page_says_what_is_not_measured(tmp_path):
    page = gpu_tables.page(tmp_path)
    assert page.count("Not yet measured: ") == len(gpu_evidence.PARTS) and "recomputed" in page


def write_lines(folder, part, *records):
    """What a piece's line has at least."""
    plain = {"date": "2026-11-30", "command": "c", "code": "abc", "note": "", "records": []}
    (folder / f"{part}.jsonl").write_text("".join(json.dumps(plain | record) + "\n" for record in records))


def test_the_page_shows_what_failed_or_was_cut_with_its_status_in_words(tmp_path):
    ours = {"name": "ours", "seconds": 2.5, "running_steps": 7}
    failed = {"piece": "tests", "status": 1, "seconds": 194, "records": [{"counts": {"passed": 97, "failed": 4}}]}
    write_lines(tmp_path, "a", failed, {"piece": "races", "status": -9, "seconds": 3.2})
    whole = {"piece": "engine", "status": 0, "seconds": 50, "records": [ours]}
    cut = {"piece": "engine", "status": 143, "seconds": 400.2, "machine": "H200, torch 2.13.0", "records": [ours]}
    write_lines(tmp_path, "c", cut | {"seconds": 1}, whole, cut, {"piece": "memory", "status": 1, "seconds": 9})
    good = {"piece": "1.7b", "status": 0, "seconds": 60, "records": [ours]}
    write_lines(tmp_path, "b", good | {"status": 1, "seconds": 2}, good)
    write_lines(tmp_path, "e", {"piece": "colocated", "status": -15, "seconds": 9, "records": [{"step": 0}]})
    page = gpu_tables.page(tmp_path)
    assert "**tests**, 2026-11-30, code abc, failed with status 1 after 194 s: `c`\n97 passed, 4 failed.\n" in page
    assert "**races**, 2026-11-30, code abc, failed with status -9 after 3 s: `c`\n\nNot yet measured: facts.\n" in page
    assert "**engine**, 2026-11-30, code abc: `c`\n\n| name | seconds | steps |" in page
    assert "**engine**, 2026-11-30, H200, torch 2.13.0, code abc, cut off after 400 s: `c`\n\n| name |" in page
    assert "**memory**, 2026-11-30, code abc, failed with status 1 after 9 s: `c`\n" in page
    assert "after 1 s" not in page and "after 2 s" not in page
    assert "**colocated**, 2026-11-30, code abc, cut off after 9 s: `c`\n\nNot yet" in page


def test_the_page_has_the_papers_memory_and_the_learners_share_of_the_matrix_units(tmp_path):
    kept = {"name": "ours", "seconds_per_step": 4.0, "phases": {"learn": 1.5}, "matrix_share": 0.41}
    write_lines(tmp_path, "d", {"piece": "kept", "status": 0, "seconds": 50, "records": [kept]})
    page = gpu_tables.page(tmp_path)
    assert "21.55 GB" in page and "10.64 GB" in page
    assert (
        "| name | s a step | learn s | of the matrix units |\n| --- | --- | --- | --- |\n| ours | 4 | 1.5 | 0.41 |"
        in page
    )


def test_the_page_of_another_folder_lies_beside_it(tmp_path):
    assert gpu_tables.TableOptions().out == "docs/results/gpu.md"
    made = ["make", "-n", "gpu-evidence", f"ARGS=minutes=1 out={tmp_path}/lines"]
    said = subprocess.run(made, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"part=a minutes=1 out={tmp_path}/lines;" in said and f"gpu_tables lines={tmp_path}/lines &&" in said
    assert gpu_tables.TableOptions(lines=f"{tmp_path}/lines/").out == f"{tmp_path}/lines.md"


@pytest.fixture
def pieces(monkeypatch):
    """Part a: a command that says nothing, one that fails, and one that takes longer than it may."""
    found = [Piece("good", "intervals", [], 60, []), Piece("wrong", "not_there", [], 60, [])]
    monkeypatch.setitem(gpu_evidence.PARTS, "a", [*found, Piece("slow", "decode", [], 1, ["rows=[1]"])])
    monkeypatch.setattr(gpu_evidence, "machine", lambda: "cpu, torch 2.13.0")


def lines(folder):
    return [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]


def test_a_part_goes_on_where_it_was_cut_and_runs_again_what_failed(pieces, tmp_path, capsys):
    options = EvidenceOptions(tiny=True, out=str(tmp_path), scratch=str(tmp_path / "scratch"))
    assert gpu_evidence.run(options) == 1
    assert [(each["piece"], each["status"]) for each in lines(tmp_path)][:2] == [("good", 0), ("wrong", 1)]
    assert lines(tmp_path)[2]["status"] in (-signal.SIGTERM, 143)  # before, or while it measures
    assert "No module named" in lines(tmp_path)[1]["said"] and "longer than 1 s" in lines(tmp_path)[2]["said"]
    options.only = ["good", "wrong"]
    assert gpu_evidence.run(options) == 1
    assert [each["piece"] for each in lines(tmp_path)][3:] == ["wrong"]
    options.minutes = 0.5
    assert gpu_evidence.run(options) == 3
    assert "wrong may take 60 s, 30 are left: run again" in capsys.readouterr().out


def test_what_is_missing_comes_from_wheels_in_a_folder(monkeypatch, tmp_path):
    about = {"METADATA": "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n", "RECORD": "numpy.py,,\n"}
    about["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(
            "numpy.py", "print('{\"carried\": 1}')\nraise SystemExit\n"
        )  # which benchmarks.intervals imports
        for name, text in about.items():
            wheel.writestr(f"carried-1.0.dist-info/{name}", text)
    monkeypatch.setitem(gpu_evidence.PARTS, "a", [Piece("carried", "intervals", [], 60, [])])
    folders = {"out": str(tmp_path), "scratch": str(tmp_path / "scratch"), "wheels": str(tmp_path)}
    assert gpu_evidence.run(EvidenceOptions(tiny=True, **folders)) == 0
    assert lines(tmp_path)[0]["records"] == [{"carried": 1}] and ", torch 2" in lines(tmp_path)[0]["machine"]


@pytest.mark.parametrize("changed", ["command", "machine", "sources"])
def test_a_record_of_another_command_device_or_code_stops_no_new_one(changed, monkeypatch, tmp_path):
    monkeypatch.setitem(gpu_evidence.PARTS, "a", [Piece("good", "intervals", [], 60, [])])
    monkeypatch.setattr(gpu_evidence, "machine", lambda: "H200, torch 2.13.0")
    options = EvidenceOptions(tiny=True, out=str(tmp_path), scratch=str(tmp_path / "scratch"))
    assert [gpu_evidence.run(options) for _ in range(2)] == [0, 0] and len(lines(tmp_path)) == 1
    (tmp_path / "a.jsonl").write_text(json.dumps(lines(tmp_path)[0] | {changed: "another"}) + "\n")
    assert gpu_evidence.run(options) == 0 and len(lines(tmp_path)) == 2


def test_sources_are_those_that_lie_there(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_evidence, "ROOT", tmp_path)
    (tmp_path / "benchmarks").mkdir()
    found = [gpu_evidence.sources()]
    for name in ("benchmarks/a.py", "result.jsonl"):
        (tmp_path / name).write_text("1")
        found.append(gpu_evidence.sources())
    assert found[0] != found[1] == found[2]


SAYS = "import time; print('{\"n\": 1}', flush=True); time.sleep(60)"


def test_what_a_piece_has_said_is_kept_where_this_command_is_ended(monkeypatch, tmp_path):
    class Ended(subprocess.Popen):
        def __init__(self, command, **settings):
            super().__init__([sys.executable, "-c", SAYS], **settings)

        def communicate(self, timeout=None):
            try:
                return super().communicate(timeout=timeout and 4)
            except subprocess.TimeoutExpired:
                raise KeyboardInterrupt from None

    parts = {"Popen": Ended, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    monkeypatch.setattr(gpu_evidence, "subprocess", SimpleNamespace(**parts))
    monkeypatch.setattr(gpu_evidence, "machine", lambda: "cpu")
    with pytest.raises(KeyboardInterrupt):
        gpu_evidence.run(EvidenceOptions(tiny=True, out=str(tmp_path), scratch=str(tmp_path / "scratch")))
    assert [(each["piece"], each["status"], each["records"]) for each in lines(tmp_path)] == [
        ("facts", -15, [{"n": 1}])
    ]


def test_a_run_that_is_cut_says_the_steps_it_made(monkeypatch, tmp_path, capsys):
    class Cut:
        def __init__(self, command, **settings):
            (tmp_path / "run").mkdir()
            (tmp_path / "run/metrics.jsonl").write_text('{"step": 1, "timing/step": 2.0, "policy": 3}\n{"step": 2, "ti')

        def wait(self):
            raise SystemExit(143)

    monkeypatch.setattr(gpu_pieces, "subprocess", SimpleNamespace(Popen=Cut))
    monkeypatch.setattr(gpu_pieces, "end_with_terminate", lambda: None)
    with pytest.raises(SystemExit):
        gpu_pieces.run([str(tmp_path / "run")])
    assert capsys.readouterr().out == '{"step": 1, "timing/step": 2.0}\n'


def test_a_decode_that_is_cut_says_what_it_measured(monkeypatch, capsys):
    def measure_here(spec):
        yield {"rows": 1}
        raise SystemExit(143)

    monkeypatch.setattr(decode, "measure_here", measure_here)
    with pytest.raises(SystemExit):
        decode.run(decode.DecodeOptions(json=True))
    assert capsys.readouterr().out == '{"rows": 1}\n'


def test_the_driver_is_unknown_where_no_tool_says_it():
    assert gpu_pieces._output("there-is-no-nvidia-smi", "--query-gpu=driver_version") is None


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("part=g", "must be one of a, b"),
        ("only=[nothing]", "part a has facts, tests, races"),
        ("minutes=0", "> 0"),
        ("wheels=nowhere", "no .whl file"),
    ],
)
def test_bad_arguments_end_with_one_line_and_status_2(refused, argument, said):
    assert said in refused(gpu_evidence.main, argument)


@pytest.mark.slow
@pytest.mark.parametrize("part", gpu_evidence.PARTS)
@pytest.mark.timeout(1800)
def test_every_part_runs_on_small_models_without_a_gpu(part, tmp_path):
    if part == "f" and not MADE_HERE.exists():
        pytest.skip("needs vLLM: make vllm makes its interpreter, which make test-all does before")
    folders = {"out": str(tmp_path), "scratch": str(tmp_path / "scratch"), "vllm_python": str(MADE_HERE)}
    assert gpu_evidence.run(EvidenceOptions(part=part, tiny=True, minutes=20, **folders)) == 0
    found = gpu_evidence.read(tmp_path / f"{part}.jsonl")
    rehearsed = [each.name for each in gpu_evidence.PARTS[part] if each.name not in NOT_REHEARSED]
    assert [each["piece"] for each in found] == rehearsed and rehearsed
    assert all(each["records"] for each in found)
    assert gpu_tables.page(tmp_path).count("**") == 2 * len(found)

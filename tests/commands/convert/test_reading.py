"""Scripts are run to where they would train: what their language does comes out right, and nothing else happens."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert.recording import words_of
from infsample_rl.config.peer_flags import read_flags, scalar


def run(tmp_path, text, *arguments):
    path = tmp_path / "run.sh"
    path.write_text(text)
    return words_of(path, list(arguments), "train")[2:]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            'A=(x "z z")\nA+=(w)\nN=$((2 ** 3 * 16))\npython3 train "${A[@]}" $N ${NONE:-7} 2>&1 | tee log',
            ["x", "z z", "w", "128", "7"],
        ),
        (
            'launch() { local gpus=$1; shift; exec env A=1 torchrun train --gpus $gpus "$@"; }\n'
            'for n in 1 2 4; do last=$n; done\nif [[ $last -gt 2 ]]; then launch $last "$@"; else launch 1; fi\n'
            "ray stop",
            ["--gpus", "4", "--lr", "1e-6"],
        ),
        ("export PATH=/usr/bin:$PATH\nG=$(python3 -c 'print(2 * 8)')\nray job submit -- python3 -m train $G", ["16"]),
        ('[ "$1" == x ] || shift 0\nwhile ! ray status; do sleep 9; done; deepspeed train $1\nsleep 999', ["--lr"]),
        ("srun -c 8 bash -lc \"cd / && ray job submit -- python3 -m train 'a b'\"", ["a b"]),
    ],
)
def test_words_of_a_command_are_what_bash_makes_of_them(tmp_path, text, words):
    found = run(tmp_path, text, "--lr", "1e-6")
    assert found[found.index("train") + 1 :] == words


def test_variables_count_but_keys_do_not(tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "a/b")
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert run(tmp_path, "python3 train $MODEL key=$WANDB_API_KEY")[1:] == ["a/b", "key="]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("echo hello", "run.sh ended before it started a trainer: no command has train"),
        ("echo a problem >&2\nexit 7\npython3 train", "ended with exit code 7 (a problem) before it started"),
        ("set -e\necho x > OUTSIDE\npython3 train", "OUTSIDE: Permission denied) before"),
        ("set -u\npython3 train $BATCH", "BATCH: unbound variable) before"),
        ("cat < /dev/tcp/127.0.0.1/1 || exit 4\npython3 train", "exit code 4"),
    ],
)
def test_a_script_that_does_not_get_there_is_one_line(tmp_path, text, error):
    outside = tmp_path.parent / f"{tmp_path.name}_outside"
    with pytest.raises(ValueError) as raised:
        run(tmp_path, text.replace("OUTSIDE", str(outside)))
    assert error.replace("OUTSIDE", str(outside)) in str(raised.value) and "\n" not in str(raised.value)
    assert not outside.exists() and sorted(path.name for path in tmp_path.iterdir()) == ["run.sh"]


def test_flags_have_the_values_that_yaml_makes_of_the_words_behind_them():
    flags = read_flags("run x --a 1e-6 --b --c=True --d 3 null @x --e= --f {k:2e3} --g 1_000".split())
    assert flags == {"a": 1e-6, "b": True, "c": True, "d": [3, None, "@x"], "e": "", "f": {"k:2e3": None}, "g": 1000}
    assert scalar("['a', 1e-3]") == ["a", 1e-3] and scalar("'q'") == "q"

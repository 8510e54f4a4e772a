"""Shell words, variables and values, resolved without a shell."""

from __future__ import annotations

import pytest

from infsample_rl.commands.convert.scalars import read_scalar
from infsample_rl.commands.convert.shell import is_unresolved, read_commands, read_flags


def words_of(text, **environment):
    commands, _ = read_commands(text, environment, keep=lambda words: bool(words) and words[0] == "run")
    return [word.text for word in commands[0]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run a b", ["run", "a", "b"]),
        ("A=1\nrun $A ${A}x '$A' \"$A $A\"", ["run", "1", "1x", "$A", "1 1"]),
        ("run ${NONE:-7} ${NONE:-$HOME/x}", ["run", "7", "/home/me/x"]),
        (
            'A=${A:-"${HOME}/x"}\nB=${B:-"${A}/y"}\nrun $A $B "${C:-${D:-c}}"',
            ["run", "/home/me/x", "/home/me/x/y", "c"],
        ),
        (
            "run ${M:-${ROOT:-${HOME}/m}/Qwen}/z ${1:-1e-6} ${HOME:+set} a${NONE:+set}b",
            ["run", "/home/me/m/Qwen/z", "1e-6", "set", "ab"],
        ),
        (
            'run ${HOME%/me} ${HOME/ /_} ${1} ${N:-a\\}b} ${N:-"}"}',
            ["run", "${HOME%/me}", "${HOME/ /_}", "${1}", "a}b", "}"],
        ),
        ('run "${A:-it\'s}" "${B:-[\'$HOME/a\']}"', ["run", "it's", "['/home/me/a']"]),
        ("A=(x y)\nrun ${B:-${A[@]}} ${C:?set C} ${D:-$(date)}", ["run", "x", "y", "${C:?set C}", "$(date)"]),
        (": ${A:=x} ${B=y}\nrun $A $B ${A:=z}", ["run", "x", "y", "x"]),
        ("run $'/a b' $\"c\" $((2 ** 3 * 16))", ["run", "/a b", "c", "128"]),
        ("run $((9 ** 9 ** 9)) $((2 ** -1)) $((${N:-2} * 4))", ["run", "$((9 ** 9 ** 9))", "$((2 ** -1))", "8"]),
        ("N=$((2 * (3 + 4)))\nrun $N $((N / 2))", ["run", "14", "7"]),
        ("A=(x y 'z z')\nA+=(w)\nrun ${A[@]}", ["run", "x", "y", "z", "z", "w"]),
        ('A=(x "z z")\nrun "${A[@]}"', ["run", "x", "z z"]),
        ("A='b c'\nrun $A \"$A\"", ["run", "b", "c", "b c"]),
        ("run a \\\n  b # c\nrun d", ["run", "a", "b"]),
        ("export A=1 B=2; run $A$B", ["run", "12"]),
        ('run "$@" $1 $(hostname) `date` $NONE', ["run", "$(hostname)", "`date`", "$NONE"]),
        ("run $(basename /a/b.sh .sh) $(dirname /a/b)", ["run", "b", "/a"]),
        ("run a 1024 2>&1 | tee log", ["run", "a", "1024"]),
        ("run a > train.log 2>&1", ["run", "a"]),
        ("run a >>log b &> other < in", ["run", "a", "b"]),
        ("run 'a>b' \"c<d\"", ["run", "a>b", "c<d"]),
        ("if true; then\n  A=1\nelse\n  A=2\nfi\nrun $A", ["run", "2"]),
    ],
)
def test_words_of_a_command(text, words):
    assert words_of(text, HOME="/home/me") == words


def test_what_only_a_shell_could_know_is_told_apart():
    assert [is_unresolved(text) for text in ("$(hostname)", "${X}", "`date`", "a$", "5$", "plain")] == [
        True,
        True,
        True,
        False,
        False,
        False,
    ]
    assert is_unresolved({"a": ["b", "$C"]}) and not is_unresolved({"a": ["b", 1]})


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("1e-6", 1e-6),
        ("8", 8),
        ("-1", -1),
        (".5", 0.5),
        ("1_000", 1000),
        ("True", True),
        ("null", None),
        ("no", "no"),
        ("off", "off"),
        ("[a,b]", ["a", "b"]),
        ("['a', 1e-3]", ["a", 1e-3]),
        ("{k: 1}", {"k": 1}),
        ("'q'", "q"),
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("None", "None"),
    ],
)
def test_values_are_read_as_their_trainers_read_them(word, value):
    assert read_scalar(word) == value and type(read_scalar(word)) is type(value)


def test_flags_take_as_many_values_as_stand_behind_them():
    commands, _ = read_commands("run x --a 1 --b --c=2 --d 3 4 5 -- y", {}, keep=bool)
    flags, others = read_flags(commands[0])
    assert {name: value for name, (value, _) in flags.items()} == {
        "a": "1",
        "b": True,
        "c": "2",
        "d": ["3", "4", "5", "--", "y"],
    }
    assert [word.text for word in others] == ["run", "x"]

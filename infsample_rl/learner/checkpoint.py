"""The learner's part of a checkpoint: a Hugging Face folder, and beside it what only training needs.

FOLDER/                 config, safetensors in the model's dtype, tokenizer, generation config: from_pretrained loads it
FOLDER/training_state/  float32 masters and AdamW moments, whole tensors by parameter name in safetensors files, written
                        by all ranks in turn; one random state a rank; last of all progress.json, without which the rest
                        counts for nothing. Any backend at any number of ranks can go on from it.

Tensors are gathered on all ranks together, so a rank that cannot write goes on gathering, and all ranks fail in the
end.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping

from infsample_rl.model.tensor_files import TensorFile, in_files
from infsample_rl.model.weight_sync.buckets import Shape
from infsample_rl.observe.files import write_atomically

TRAINING_STATE = "training_state"
SAID_BYTES = 4096  # of a failure that the ranks tell each other
FILE_BYTES = 2**30  # a file of the training state takes no more when it has this much
WEIGHT_FILE_BYTES = 50 * 10**9  # most of one file of weights, as of transformers' save_pretrained

KINDS = ("master", "exp_avg", "exp_avg_sq")  # of a parameter; before the optimizer's first step the master alone


def save_pretrained_folder(
    folder: Path,
    lm: PreTrainedModel,
    shapes: list[Shape],
    tensors: Iterator[tuple[str, Tensor]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    rank: int,
) -> None:
    """Write the policy as a Hugging Face folder; `tensors`, of these shapes, gathers on all ranks, rank 0 writes each
    as it comes."""
    if rank != 0:
        drain(tensors)
        return
    # The sharded module cannot save itself: an empty one of its class writes all but the weights.
    with torch.device("meta"):
        shell = type(lm)(lm.config)
    shell.generation_config = lm.generation_config
    if get_model_conversion_mapping(lm, add_legacy=False):
        # Its files have other names or layouts than the model, which transformers converts for all weights at once.
        shell.load_state_dict({name: tensor.cpu() for name, tensor in tensors}, strict=False, assign=True)
        shell.tie_weights()
        shell.save_pretrained(folder)
    else:
        shell.to(dtype=shapes[0][1]).save_pretrained(folder, state_dict={})  # type: ignore[call-arg]
        _write_weights(folder, shapes, tensors)
    tokenizer.save_pretrained(folder)


def _write_weights(folder: Path, shapes: list[Shape], tensors: Iterator[tuple[str, Tensor]]) -> None:
    """model.safetensors, or files of at most WEIGHT_FILE_BYTES and their index, as save_pretrained would."""
    by_name = {shape[0]: shape for shape in sorted(shapes, key=itemgetter(0))}
    outlines = {name: torch.empty(shape, dtype=dtype, device="meta") for name, dtype, shape in by_name.values()}
    split = split_torch_state_dict_into_shards(
        outlines, filename_pattern="model{suffix}.safetensors", max_shard_size=WEIGHT_FILE_BYTES
    )
    if split.is_sharded:
        (folder / "model.safetensors").unlink(missing_ok=True)  # the empty one of a model without weights
    files = {
        name: TensorFile(folder / name, [by_name[tensor] for tensor in of_file])
        for name, of_file in split.filename_to_tensors.items()
    }
    file_of = {tensor: files[name] for name, of_file in split.filename_to_tensors.items() for tensor in of_file}
    for name, tensor in tensors:
        file_of[name].write(name, tensor)
        del tensor  # before the next one is gathered
    for file in files.values():
        file.close()
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_atomically(folder / "model.safetensors.index.json", json.dumps(index, indent=2) + "\n")


def save_training_state(
    folder: Path, shapes: list[Shape], states: Iterator[tuple[str, Tensor]], *, rank: int, world_size: int
) -> None:
    """Write the training states of all parameters, which `states`, of these shapes, gathers one at a time on all ranks;
    rank i writes every i-th parameter's."""
    state_folder = folder / TRAINING_STATE
    state_folder.mkdir(parents=True, exist_ok=True)
    names = dict.fromkeys(name.rpartition("/")[0] for name, _, _ in shapes)
    own = {name for number, name in enumerate(names) if number % world_size == rank}
    files = in_files((shape for shape in shapes if shape[0].rpartition("/")[0] in own), FILE_BYTES)
    for number, of_file in enumerate(files):
        file = TensorFile(state_folder / f"rank_{rank}_{number}.safetensors", of_file)
        left = {name for name, _, _ in of_file}
        while left:
            name, value = next(states)
            if name in left:
                file.write(name, value)
                left.remove(name)
            del value  # before the next one is gathered
        file.close()
    drain(states)  # those of other ranks
    torch.save(torch.get_rng_state(), state_folder / f"random_state_{rank}.pt")


def write_progress(folder: Path, *, num_steps: int, num_updates: int, optimizer_steps: int) -> None:
    """After the files of all ranks: a save that was cut short has no progress.json, and is not taken for a whole
    one."""
    counts = {"num_steps": num_steps, "num_updates": num_updates, "optimizer_steps": optimizer_steps}
    write_atomically(folder / TRAINING_STATE / "progress.json", json.dumps(counts) + "\n")


def written_by_all(
    write: Callable[[Iterator[Any]], None], tensors: Iterable[Any], *, what: str, writers: dist.ProcessGroup | None
) -> None:
    """`write(tensors)` on every rank, each to the end of what all gather together. RuntimeError on all ranks when one
    of them could not write.

    `writers`: where the ranks hear of each other; its timeout bounds how long one may write. None for a single rank.
    """
    tensors, failure = iter(tensors), None
    try:
        write(tensors)
    except Exception as error:
        failure = error
        drain(tensors)  # the other ranks take part in the gathering of the rest
    rank = dist.get_rank(writers) if writers else 0
    mine = "" if failure is None else f"rank {rank}: {type(failure).__name__}: {failure}"
    failed = [line for line in ([mine] if writers is None else _said_by_all(mine, writers)) if line]
    try:
        if failed:
            raise RuntimeError(f"{what} could not be written by {'; '.join(failed)}") from failure
    finally:
        failure = None  # with its traceback it would keep this frame, and the frame what writes


def _said_by_all(mine: str, ranks: dist.ProcessGroup) -> list[str]:
    """What every rank says, cut to SAID_BYTES of UTF-8: text, since torch's own gathering of objects unpickles what
    comes over the ranks' connections."""
    said = torch.zeros(SAID_BYTES, dtype=torch.uint8)
    encoded = mine.encode()[:SAID_BYTES]
    said[: len(encoded)] = torch.tensor(list(encoded), dtype=torch.uint8)
    found = [torch.empty_like(said) for _ in range(ranks.size())]
    dist.all_gather(found, said, group=ranks)
    return [bytes(text.tolist()).rstrip(b"\0").decode(errors="replace") for text in found]


def drain(tensors: Iterable[Any]) -> None:
    """Gather the rest for the other ranks, without keeping one tensor while the next comes."""
    deque(tensors, maxlen=0)


class SavedState:
    """Reads what save_training_state wrote, a parameter at a time. ValueError for what is not there; that the files are
    whole is known from their checksums (controller/checkpoints.py)."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / TRAINING_STATE
        if not (self.folder / "progress.json").is_file():
            raise ValueError(f"checkpoint {folder} has no {TRAINING_STATE}/progress.json: it was not saved to its end")
        progress = json.loads((self.folder / "progress.json").read_text())
        self.num_updates, self.optimizer_steps = int(progress["num_updates"]), int(progress["optimizer_steps"])
        self.num_steps: int | None = progress.get("num_steps")  # None in checkpoints of older versions
        self._files: dict[str, Path] = {}  # parameter/kind -> file
        for path in self.folder.glob("rank_*.safetensors"):
            with safe_open(path, "pt") as file:
                self._files |= dict.fromkeys(file.keys(), path)

    def read(self, name: str, shape: torch.Size) -> dict[str, Tensor]:
        """A parameter's full float32 KINDS, of this shape."""
        state: dict[str, Tensor] = {}
        for kind in KINDS if self.optimizer_steps > 0 else KINDS[:1]:
            tensor, found = f"{name}/{kind}", "none"
            if tensor in self._files:
                with safe_open(self._files[tensor], "pt") as file:
                    state[kind] = file.get_tensor(tensor)
                found = str(list(state[kind].shape))
            if found != str(list(shape)):
                raise ValueError(
                    f"checkpoint {self.folder.parent} is of another model or of other LoRA settings: {tensor} must be "
                    f"{list(shape)}, it has {found}"
                )
        return state

    def restore_random_state(self, rank: int) -> None:
        """The random state the rank had; one that did not exist when it was saved keeps its own."""
        path = self.folder / f"random_state_{rank}.pt"
        if path.is_file():
            torch.set_rng_state(torch.load(path, weights_only=True))

"""The bert predictor of a run that names no folder: it trains once, on the run's first groups, and is frozen then.

It is a small BERT with random weights that reads token ids as they are: its vocabulary are the ids of those groups, its
input the last tokens of [prompt; a sample's first k]. Trained as commands/train_predictor.py trains one.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from infsample_rl.rollout.length_prediction.bert import BertLengthPredictor
from infsample_rl.rollout.length_prediction.fit import TextGroup, TrainOptions, fit, split_groups
from infsample_rl.rollout.length_prediction.messages import PublishedBert, SampledLengths, TrainedBert

FILE = "length_predictor.npz"  # in a checkpoint
FIRST_GROUPS = 64  # that it trains on, those of whose samples one at least outlives its first k tokens
SAMPLES = 8  # of a prompt in one epoch
LEARNING_RATE = 1e-3  # random weights take more than pretrained ones
WINDOW, PROMPT_TOKENS = 128, 64  # tokens of its input, and of the prompt at least
SIZES: dict[str, Any] = {
    "num_labels": 1,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 256,
}
SPECIAL = ("[PAD]", "[UNK]", "[CLS]")

Group = tuple[list[int], list[list[Any]]]  # prompt ids; of each sample index, first tokens, length, whether it was cut


class RunBert:
    """Collects a run's first groups and trains on them; the driver's, as RunProbe is."""

    steps_saved: int | None = None  # nothing is replayed

    def __init__(self, prefix_tokens: int, *, seed: int = 0) -> None:
        """`prefix_tokens`: k. Equal groups and seeds, equal bits on one machine."""
        self._k, self._seed = prefix_tokens, seed
        self.reset(None)

    def reset(self, folder: Path | None) -> None:
        """Go back to what a checkpoint of this run has, None: to the start."""
        self._groups: list[Group] = []
        self._trained: TrainedBert | None = None
        if folder is not None:
            self.load(folder)

    def enter(self, reports: Sequence[list[SampledLengths]]) -> str | None:
        """Take one step's samples, in whatever order workers report them; a sentence when it has trained."""
        if self._trained is not None:
            return None
        step: dict[int, Group] = {}
        for said in (said for report in reports for said in report):
            group = step.setdefault(said.prompt_index, (list(said.prompt_ids), []))
            group[1].extend(map(list, said.samples))
        for _, (prompt, samples) in sorted(step.items()):
            if any(length > self._k for _, _, length, _ in samples):
                self._groups.append((prompt, sorted(samples)))
        if len(self._groups) < FIRST_GROUPS or len({tuple(prompt) for prompt, _ in self._groups}) < 2:
            return None
        return self._train()

    def published(self) -> PublishedBert:
        """What workers need to predict."""
        return PublishedBert(trained=self._trained)

    def save(self, folder: Path) -> None:
        """Write the predictor into a checkpoint; before it has trained, the groups that it has."""
        state: dict[str, Any]
        if self._trained is None:
            state = {"groups": np.frombuffer(json.dumps(self._groups).encode(), np.uint8)}
        else:
            state = {"vocabulary": self._trained.vocabulary} | self._trained.weights
        np.savez(folder / FILE, k=np.array(self._k), **state)

    def load(self, folder: Path) -> str | None:
        """Go on from a checkpoint; a sentence when there is nothing of use in it, and the predictor starts anew."""
        path = folder / FILE
        if not path.is_file():
            return f"{path} is not there: the length predictor starts anew"
        try:
            with np.load(path) as file:
                state = dict(file)
            if int(k := state.pop("k")) != self._k:
                raise ValueError(f"it reads the first {k} tokens, now rollout.prefix_tokens is {self._k}")
            if "groups" in state:
                groups = json.loads(state["groups"].tobytes())
                self._groups = [(prompt, samples) for prompt, samples in groups]
            else:
                trained = TrainedBert(state.pop("vocabulary"), state)
                restored(trained, self._k)
                self._trained = trained
        # NotImplementedError: damage that reads as a compression; RuntimeError: weights of another shape
        except (OSError, EOFError, KeyError, ValueError, RuntimeError, zipfile.BadZipFile) as error:
            said = " ".join(str(error).split())[:160]
            return f"{path} is of no use ({type(error).__name__}: {said}); the length predictor starts anew"
        return None

    def _train(self) -> str:
        started, k, groups = time.perf_counter(), self._k, self._groups
        ids = {token for prompt, _ in groups for token in prompt}
        ids |= {token for _, samples in groups for _, first, _, _ in samples for token in first}
        vocabulary = np.array(sorted(ids), np.int32)
        options = TrainOptions(prefix_tokens=[k], samples=SAMPLES, lr=LEARNING_RATE, seed=self._seed)
        training, held = split_groups([_texts(prompt, samples, k) for prompt, samples in groups], 0.2, self._seed)
        with torch.random.fork_rng(devices=[]):  # of dropout
            torch.manual_seed(self._seed)
            predictor = untrained(vocabulary, k)
            epochs = fit(predictor, training, held, options, say=lambda line: None)
        weights = {name: value.numpy() for name, value in predictor.model.state_dict().items()}
        self._trained, self._groups = TrainedBert(vocabulary, weights), []
        best = min(epochs, key=lambda epoch: epoch["held_out_loss"])
        tau = "no order" if best["tau"] is None else f"Kendall's tau {best['tau']:.2f}"
        return (
            f"length predictor: trained on {len(groups)} groups in {time.perf_counter() - started:.1f} s ({tau} on "
            f"{len(held)} of them held out), frozen, and used from the next step on"
        )


def text_of(ids: Iterable[int]) -> str:
    """Token ids as the words of the predictor's text: [5, 17] -> "5 17 "."""
    return "".join(f"{token} " for token in ids)


def untrained(vocabulary: np.ndarray, prefix_tokens: int) -> BertLengthPredictor:
    """A small BERT with random weights over these ids; any other id is [UNK]."""
    window = max(WINDOW, PROMPT_TOKENS + prefix_tokens)
    words = {word: index for index, word in enumerate([*SPECIAL, *map(str, vocabulary.tolist())])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="[CLS] $A", special_tokens=[("[CLS]", words["[CLS]"])])
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "truncation_side": "left"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, model_max_length=window, **names)
    config = BertConfig(vocab_size=len(words), max_position_embeddings=window, pad_token_id=0, **SIZES)
    return BertLengthPredictor(BertForSequenceClassification(config), tokenizer)


def restored(trained: TrainedBert, prefix_tokens: int, device: torch.device | str = "cpu") -> BertLengthPredictor:
    """The predictor with the weights it was trained to. RuntimeError for weights of another shape."""
    with torch.random.fork_rng(devices=[]):
        predictor = untrained(trained.vocabulary, prefix_tokens)
    # copies: an array of the object store is read only
    weights = {name: torch.from_numpy(np.array(value)) for name, value in trained.weights.items()}
    predictor.model.load_state_dict(weights)
    predictor.model.to(device)
    return predictor


def _texts(prompt: list[int], samples: list[list[Any]], k: int) -> TextGroup:
    text = text_of(prompt)
    prefixes = [text_of(first) if length > k else None for _, first, length, _ in samples]
    lengths, cut = [sample[2] for sample in samples], [sample[3] for sample in samples]
    return TextGroup(key=text, prompt=text, prefixes={k: prefixes}, lengths=lengths, censored=cut)

"""What a plan needs to know of a model: counted on the meta device from its config alone, no weight is read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from infsample_rl.config import Config
from infsample_rl.model.architecture import KVShape, check_full_attention
from infsample_rl.model.loading import build_outline, load_model_config
from infsample_rl.model.lora import target_names
from infsample_rl.model.tokenizer import load_tokenizer


@dataclass(frozen=True, kw_only=True)
class ModelOutline:
    """A model's config and its tokenizer's length, and what follows from them."""

    architecture: PretrainedConfig
    valid_vocab: int
    trust_remote_code: bool = False

    @classmethod
    def of(cls, config: Config, valid_vocab: int | None = None) -> ModelOutline:
        """The policy of these settings. `valid_vocab` None: the tokenizer's length, or the model's vocabulary where no
        tokenizer is to be had.

        ValueError, in one line, for a config that cannot be had or a model that cannot be trained here.
        """
        architecture = load_model_config(config.model)
        check_full_attention(architecture)
        if valid_vocab is None:
            try:
                valid_vocab = len(load_tokenizer(config.model))
            except ValueError:
                valid_vocab = architecture.vocab_size
        return cls(
            architecture=architecture,
            valid_vocab=min(valid_vocab, architecture.vocab_size),
            trust_remote_code=config.model.trust_remote_code,
        )

    @cached_property
    def model(self) -> PreTrainedModel:
        """The whole model, without memory."""
        return build_outline(self.architecture, torch.float32, trust_remote_code=self.trust_remote_code)

    @cached_property
    def traces(self) -> dict[Any, Any]:
        """Rows that have been traced, by what decides about them (row_memory.py): of each what its moments hold."""
        return {}

    @cached_property
    def others(self) -> dict[str, ModelOutline]:
        """Other models by path, kept so that their rows are traced once."""
        return {}

    def reference_of(self, config: Config) -> ModelOutline:
        """The reference or teacher of a run whose policy this is: itself where it has no path of its own."""
        path = config.reference.path
        if path is None or path == config.model.path:
            return self
        if path not in self.others:
            architecture = load_model_config(replace(config.model, path=path), "reference.path")
            self.others[path] = replace(self, architecture=architecture)
        return self.others[path]

    @cached_property
    def sizes(self) -> list[int]:
        """Elements of every parameter, a tied one once."""
        return [parameter.numel() for parameter in self.model.parameters()]

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(self.sizes)

    @cached_property
    def layer_shapes(self) -> list[torch.Size]:
        """Shapes of the parameters of one decoder layer."""
        names = self.model._no_split_modules or ()
        layer = next(module for module in self.model.modules() if type(module).__name__ in names)
        return [parameter.shape for parameter in layer.parameters()]

    @property
    def layer_parameters(self) -> int:
        """Elements of one decoder layer."""
        return sum(shape.numel() for shape in self.layer_shapes)

    @cached_property
    def is_converted(self) -> bool:
        """Whether its files have other names or layouts than the model, so that it is loaded and saved whole."""
        return bool(get_model_conversion_mapping(self.model, add_legacy=False))

    @property
    def root_parameters(self) -> int:
        """Elements outside the decoder layers: embeddings, last norm, head."""
        return self.num_parameters - self.architecture.num_hidden_layers * self.layer_parameters

    @property
    def parameters_read(self) -> int:
        """Elements a decode step reads: all but an input embedding that is not the head too, of which it gathers a few
        rows."""
        embedding: Any = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        return self.num_parameters - (0 if embedding is head else embedding.numel())

    def adapted(self, config: Config) -> list[torch.Size]:
        """Shapes of the weights that get LoRA adapters."""
        names = target_names(self.model, config.learner.lora_targets)
        return [self.model.get_parameter(f"{name}.weight").shape for name in names]

    def adapter_sizes(self, config: Config) -> list[int]:
        """Elements of every LoRA matrix of these settings."""
        return [config.learner.lora_rank * size for shape in self.adapted(config) for size in reversed(shape)]

    @cached_property
    def kv(self) -> KVShape:
        """Layers, key-value heads and the size of a head."""
        return KVShape.of(self.architecture)

    @property
    def widths(self) -> tuple[int, int, int, int]:
        """Elements of a token's hidden state, of its queries, of its keys (or values), and inside a layer's MLP."""
        sizes, kv = self.architecture, self.kv
        # GPT-2, OPT and others name it otherwise: it is the longest side of their matrices
        inner = getattr(sizes, "intermediate_size", None) or max(max(shape) for shape in self.layer_shapes)
        return sizes.hidden_size, sizes.num_attention_heads * kv.head_dim, kv.num_kv_heads * kv.head_dim, inner

"""Tiny random models, a tokenizer and a Triton interpreter for the rollout tests."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.configs import run_config

SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": None,
    "initializer_range": 0.2,  # large, so that greedy continuations do not repeat one token
}
FAMILIES = {  # what differs from SIZES
    "gpt_neox": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}
UNGROUPED = ("gpt_neox", "opt")  # these know no kv heads


@pytest.fixture(scope="session")
def make_model():
    """Build a random float32 model of a family: make_model("qwen3", vocab_size=80)."""

    def build(family="qwen3", **changes):
        torch.manual_seed(0)
        settings = SIZES | FAMILIES.get(family, {}) | changes
        if family in UNGROUPED:
            settings = {
                name: value for name, value in settings.items() if name not in ("num_key_value_heads", "head_dim")
            }
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=torch.float32).eval()

    return build


@pytest.fixture(scope="session")
def make_tokenizer():
    """Build a word tokenizer of `size` tokens, w0 w1 ..., without an end token unless named."""

    def build(size=64, **special):
        inner = Tokenizer(models.WordLevel({f"w{index}": index for index in range(size)}, unk_token="w0"))
        inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        return PreTrainedTokenizerFast(tokenizer_object=inner, **special)

    return build


@pytest.fixture(scope="session")
def tokenizer(make_tokenizer):
    return make_tokenizer()


@pytest.fixture(scope="session")
def worker_config(make_model, make_tokenizer, tmp_path_factory):
    """Settings of a rollout worker over a random model whose samples end with the word w3."""
    folder = tmp_path_factory.mktemp("model")
    make_model().save_pretrained(folder)
    make_tokenizer(64, eos_token="w3").save_pretrained(folder)
    return run_config(
        run={"seed": 4, "eval_temperature": 0},
        model={"path": str(folder)},
        rollout={"group_size": 4, "slots": 2, "max_new_tokens": 16},
    )


@pytest.fixture(scope="session")
def make_variant(make_model):
    """Build a random model of every kind the decoders know, with random biases: make_variant("qwen3 with biases",
    hidden_size=128)."""
    changed = {
        "qwen3 with biases": ("qwen3", {"attention_bias": True}),
        "llama": ("llama", {"num_key_value_heads": 1}),
        "llama with biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    }

    def build(variant, **changes):
        family, options = changed.get(variant, (variant, {}))
        model = make_model(family, **(changes | options))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.normal_()
        return model

    return build


# Triton 3.6 makes an int of an array of one element, which numpy 2.4 no longer does. On some processors numpy's BLAS
# gives a row of a product other bits at another place of its block, which a GPU does not; einsum's loops do not either.
# A program without tokens takes as long as another, so tables are divided into two instead of eight.
START = """
import numpy
from triton.runtime import interpreter
numpy.matmul = lambda a, b, dtype: numpy.einsum("...ij,...jk->...ik", a, b, dtype=dtype)
patch = interpreter._patch_lang_tensor
def patch_and_index(tensor, scope):
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())
interpreter._patch_lang_tensor = patch_and_index
from infsample_rl.rollout.kernels import paged_attention
paged_attention.SPLITS = 2
"""


@pytest.fixture(scope="session")
def interpreted():
    """Runs a function in a process where Triton interprets: it reads the switch when it is imported, and a GPU run must
    not have it."""
    with ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=exec, initargs=(START, {})
    ) as pool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRITON_INTERPRET", "1")
            patch.setenv("OMP_NUM_THREADS", "1")
            pool.submit(len, "started").result()
        yield lambda function, *arguments, **options: pool.submit(function, *arguments, **options).result()

"""Small real models for every test: a random Qwen3 (or Llama, Qwen2) of two layers with a byte tokenizer."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import re
import signal
import tempfile
from collections import Counter
from pathlib import Path

import pytest
import torch

from infsample_rl.model.disk import IN_MEMORY, file_system

os.environ.setdefault("RAY_AUTH_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "offline")
torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell's background job has it, and every process it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CALLS = "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
CHATML_CALLS = CHATML.replace("<|im_end|>", f"{CALLS}<|im_end|>")  # as Hermes writes them


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Whole runs first: no process is to begin the longest file when the others have nothing left. Without a GPU one
    case of a test marked gpu tells as much as all."""
    if importlib.util.find_spec("verl") is None or importlib.util.find_spec("trl") is None:
        for item in items:
            if item.get_closest_marker("peers") is not None:
                item.add_marker(pytest.mark.skip("TRL and verl are not installed here: make test-peers"))
    seen = set()
    for item in items if not torch.cuda.is_available() else ():
        name = item.nodeid.split("[")[0]
        if item.get_closest_marker("gpu") is not None:
            if name in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(name)
    items.sort(key=lambda item: not item.nodeid.startswith("tests/runs/"))


NO_GPU = re.compile(
    "not compiled with CUDA|No CUDA GPUs|no NVIDIA driver|sees no CUDA device|Cannot access accelerator|no kernel image"
    "|Can only use CUDA|No CUDA runtime|0 active drivers|dummy base class|requires CUDA support"
)


def lacks_gpu(item):
    """Whether a test is marked gpu and there is none."""
    return item.get_closest_marker("gpu") is not None and not torch.cuda.is_available()


@contextlib.contextmanager
def _as_far_as_this_machine_goes(item):
    """Of a test marked gpu: where there is no GPU it ends as skipped at the first thing that needs one. What fails
    before would fail there too."""
    try:
        yield
    except Exception as error:
        if not lacks_gpu(item) or not NO_GPU.search(str(error)):
            raise
        pytest.skip("needs a GPU from here on")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item):
    with _as_far_as_this_machine_goes(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    with _as_far_as_this_machine_goes(item):
        result = yield
    if lacks_gpu(item):
        pytest.skip("passes on the CPU, and needs a GPU to tell more")
    return result


def pytest_terminal_summary(terminalreporter):
    """The minutes that each folder took."""
    seconds = Counter[str]()
    for report in itertools.chain(*terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds["/".join(report.nodeid.split("/")[:2]).split("::")[0]] += report.duration
    terminalreporter.section("minutes")
    for name, spent in seconds.most_common():
        terminalreporter.line(f"{spent / 60:6.1f}  {name}")


def bytes_and(special: list[str]):
    """A tokenizer with one token a byte and the special tokens behind them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    return tokenizer


def byte_tokenizer():
    """256 bytes and three special tokens; <|im_end|> ends a turn."""
    from transformers import PreTrainedTokenizerFast

    inner = bytes_and(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    fast.chat_template = CHATML
    return fast


def save_tiny_qwen3(folder: Path, *, tie: bool = True, seed: int = 0, head: int = 264) -> Path:
    """A random Qwen3 folder that from_pretrained takes. `head`: rows of it, more than the tokenizer has ids."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=head,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=tie,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory) -> Path:
    """Folder of a random two-layer Qwen3 with tied embeddings."""
    return save_tiny_qwen3(tmp_path_factory.mktemp("models") / "tiny_qwen3")


@pytest.fixture(scope="session")
def sums_file(tmp_path_factory) -> Path:
    """A JSONL file of eight one-digit sums."""
    path = tmp_path_factory.mktemp("data") / "sums.jsonl"
    rows = [
        {"question": f"{a} + {b} = ?", "answer": str(a + b)}
        for a, b in [(1, 2), (3, 4), (2, 2), (5, 1), (0, 7), (6, 3), (8, 1), (4, 4)]
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


TINY_RUN = """
data.eval_source=null data.max_prompt_tokens=64 data.prompts_per_step=3
rollout.group_size=4 rollout.slots=2 rollout.max_new_tokens=12
learner.max_tokens_per_micro_batch=128 learner.lr=1e-3 learner.warmup_steps=0
run.steps=2 cluster.rollout_workers=1 cluster.learner_ranks=1 logging.wandb=disabled
"""
REWARD = '''
def vowels(prompts, completions, answer, **columns):
    """Share of vowels and digits: something a random model's samples differ in."""
    return [sum(c in "aeiou0123456789" for c in text) / (1 + len(text)) for text in completions]


def rarely(prompts, completions, answer, **columns):
    """One for responses that begin with a byte of the upper half, in prompts of even sums; zero in all others."""
    return [float(int(value) % 2 == 0 and text[:1] > "a") for value, text in zip(answer, completions)]
'''


@pytest.fixture(scope="session")
def reward_file(tmp_path_factory) -> Path:
    """Reward functions that samples of a random model differ in."""
    path = tmp_path_factory.mktemp("rewards") / "my_rewards.py"
    path.write_text(REWARD)
    return path


@pytest.fixture(scope="session")
def tiny_run(tiny_qwen3, sums_file, reward_file) -> list[str]:
    """Settings of a run of seconds: two steps of 3 prompts x G = 4 through 2 slots, a rollout worker and a learner."""
    inputs = [f"model.path={tiny_qwen3}", f"data.source={sums_file}", f"reward.functions=['{reward_file}:vowels']"]
    return [*inputs, *TINY_RUN.split()]


@pytest.fixture
def disk_folder(tmp_path) -> Path:
    """An empty folder that is on a disk."""
    found = tmp_path / "disk"
    found.mkdir()
    if file_system(found) in IN_MEMORY:
        pytest.skip("the temporary folder is in memory")
    return found


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs a command's main in this process with arguments it must refuse; the one line it said, its exit code being
    2."""

    def run(main, *arguments):
        monkeypatch.setattr("sys.argv", ["command", *arguments])
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        # a progress bar
        lines = [line for line in printed.err.strip().splitlines() if not line.startswith("Loading weights")]
        assert status == 2 and len(lines) == 1, (status, printed)
        return lines[0]

    return run


@pytest.fixture(scope="session")
def pack_buckets():
    """(name, tensor) pairs, version -> manifest and all buckets at once, as a learner would put them into the object
    store."""
    from infsample_rl.model.weight_sync.buckets import BUCKET_BYTES, plan_weights, shapes_of, stream_buckets

    def pack(named_tensors, version, bucket_bytes=BUCKET_BYTES):
        tensors = list(named_tensors)
        manifest = plan_weights(shapes_of(tensors), version, bucket_bytes)
        return manifest, [bucket.copy() for bucket in stream_buckets(tensors, manifest)]

    return pack


@pytest.fixture
def closing():
    """closing(THING): the thing, which is closed after the test."""
    with contextlib.ExitStack() as things:
        yield lambda thing: things.enter_context(contextlib.closing(thing))


@pytest.fixture
def short_path():
    """A folder for a node of Ray: the paths of its sockets may have 107 characters."""
    with tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield folder

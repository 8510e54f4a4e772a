"""The order of prompts: seeded, complete, resumable anywhere; and what is refused before a run starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from infsample_rl.config import Config
from infsample_rl.data.prompts import PromptStream, build_eval_prompts, build_train_prompts, held_out_problems
from tests.configs import run_config


@pytest.fixture
def seven(tmp_path) -> str:
    """A file of seven rows."""
    return write(tmp_path / "seven.jsonl", 7)


def write(path: Path | str, rows: int, first: str = "a") -> str:
    """Questions of one letter: the prompt is <|im_start|>user\\nQ<|im_end|>\\n<|im_start|>assistant\\n = 20 tokens."""
    questions = [first, *(chr(97 + i % 26) for i in range(1, rows))]
    lines = [json.dumps({"question": each, "answer": i}) + "\n" for i, each in enumerate(questions)]
    Path(path).write_text("".join(lines))
    return str(path)


def config(
    source: str, *, seed: int = 0, eval_prompts: int = 100, max_new_tokens: int = 8, reward: str = "gsm8k", **data: Any
) -> Config:
    """Settings of a run over a file."""
    return run_config(
        run={"seed": seed, "eval_prompts": eval_prompts},
        data={"source": source, "prompts_per_step": 3, **data},
        rollout={"max_new_tokens": max_new_tokens},
        reward={"functions": [reward]},
    )


def rows_of(stream: PromptStream, steps: int) -> list[list[int]]:
    """Rows of the next steps' prompts."""
    return [[prompt.row for prompt in stream.next_batch()] for _ in range(steps)]


def test_every_epoch_deals_every_row_once_in_a_new_order_of_the_seed_or_in_the_files(seven, qwen_tokenizer):
    stream = build_train_prompts(config(seven), qwen_tokenizer, None)
    rows = sum(rows_of(stream, 7), [])  # 21 prompts: three epochs
    epochs = [rows[:7], rows[7:14], rows[14:]]
    assert epochs == [[4, 7, 5, 1, 3, 6, 2], [1, 6, 7, 2, 4, 3, 5], [7, 3, 2, 5, 4, 1, 6]]  # for ever, on every machine
    other = build_train_prompts(config(seven, seed=1), qwen_tokenizer, None)
    assert sum(rows_of(other, 7), [])[:7] != epochs[0]
    unshuffled = build_train_prompts(config(seven, shuffle=False), qwen_tokenizer, None)
    assert rows_of(unshuffled, 3) == [[1, 2, 3], [4, 5, 6], [7, 1, 2]]


def test_prompts_are_numbered_by_their_place_in_the_batch_and_carry_their_columns(seven, qwen_tokenizer):
    stream = build_train_prompts(config(seven, shuffle=False), qwen_tokenizer, None)
    stream.next_batch()
    batch = stream.next_batch()
    assert [prompt.prompt_index for prompt in batch] == [0, 1, 2]
    assert [prompt.columns for prompt in batch] == [
        {"question": question, "answer": str(number), "answer_as_given": number}
        for question, number in (("d", 3), ("e", 4), ("f", 5))
    ]
    assert stream.first_rendered == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert stream.num_rows == 7


@pytest.mark.parametrize(("rows", "per_step"), [(7, 3), (6, 3), (2, 5)])
def test_a_stream_restored_after_any_step_goes_on_as_if_never_stopped(tmp_path, qwen_tokenizer, rows, per_step):
    settings = config(write(tmp_path / "a.jsonl", rows), prompts_per_step=per_step)
    undisturbed = rows_of(build_train_prompts(settings, qwen_tokenizer, None), 8)
    for stop in range(8):  # within epochs, and with 6 rows exactly at their ends
        stopped = build_train_prompts(settings, qwen_tokenizer, None)
        rows_of(stopped, stop)
        state = json.loads(json.dumps(stopped.state()))
        resumed = build_train_prompts(settings, qwen_tokenizer, None)
        resumed.restore(state)
        assert rows_of(resumed, 8 - stop) == undisturbed[stop:]


def test_restoring_over_other_data_or_another_order_is_refused(seven, tmp_path, qwen_tokenizer):
    stream = build_train_prompts(config(seven), qwen_tokenizer, None)
    stream.next_batch()
    state = stream.state()
    changed = Path(seven).read_text().replace('"answer": 3', '"answer": 4')
    (tmp_path / "changed.jsonl").write_text(changed)
    cases = [
        (config(write(tmp_path / "eight.jsonl", 8)), "the number of usable rows was 7 and is 8 now"),
        (config(str(tmp_path / "changed.jsonl")), "the hash of all prompts and answers"),
        (config(seven, instruction="!"), "the hash of all prompts and answers"),
        (config(seven, seed=3), "run.seed was 0 and is 3 now"),
        (config(seven, shuffle=False), "data.shuffle was True and is False now"),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=f"cannot resume: {message}"):
            build_train_prompts(settings, qwen_tokenizer, None).restore(state)


@pytest.mark.parametrize(
    ("rows", "per_step", "epochs", "steps"),
    [(7, 3, 1.0, 3), (7, 3, 2.0, 5), (7, 3, 3.0, 7), (7, 3, 0.1, 1), (7, 3, 1.5, 4), (100, 1, 0.07, 7)],
)
def test_steps_for_epochs_rounds_up_decimals_as_written(tmp_path, qwen_tokenizer, rows, per_step, epochs, steps):
    settings = config(write(tmp_path / "a.jsonl", rows), prompts_per_step=per_step)  # 0.07 * 100 > 7 in floats
    assert build_train_prompts(settings, qwen_tokenizer, None).steps_for_epochs(epochs) == steps


def test_prompt_and_response_must_fit_the_context(seven, qwen_tokenizer):
    assert build_train_prompts(config(seven, max_new_tokens=12), qwen_tokenizer, 32).num_rows == 7
    with pytest.raises(ValueError, match="rollout.max_new_tokens must be <= 12, got 13: the longest prompt .* row 1"):
        build_train_prompts(config(seven, max_new_tokens=13), qwen_tokenizer, 32)
    with pytest.raises(ValueError, match="data.max_prompt_tokens must be < the model's context 20, got 1024"):
        build_train_prompts(config(seven), qwen_tokenizer, 20)
    with pytest.raises(ValueError, match="rollout.max_new_tokens must be <= 4, got 8"):
        build_eval_prompts(config(seven, eval_source=seven), qwen_tokenizer, 24)


def test_evaluation_takes_the_first_prompts_in_the_files_order(seven, qwen_tokenizer):
    prompts = build_eval_prompts(config(seven, eval_source=seven, eval_prompts=4), qwen_tokenizer, None)
    assert [(prompt.row, prompt.prompt_index) for prompt in prompts] == [(1, 0), (2, 1), (3, 2), (4, 3)]
    assert build_eval_prompts(config(seven, eval_source=seven, eval_prompts=0), qwen_tokenizer, None) == []
    assert build_eval_prompts(config(seven), qwen_tokenizer, None) == []
    long = write(seven.replace("seven", "long"), 3, first="a" * 40)
    few = config(seven, eval_source=long, eval_prompts=2, max_prompt_tokens=40)
    with pytest.raises(ValueError, match="row 1"):
        build_eval_prompts(few, qwen_tokenizer, None)
    few = config(seven, eval_source=long, eval_prompts=2, max_prompt_tokens=40, long_prompts="drop")
    assert [prompt.row for prompt in build_eval_prompts(few, qwen_tokenizer, None)] == [2, 3]
    few = config(seven, eval_source=long, eval_prompts=2)
    assert [problem.row for problem in held_out_problems(few)[""]] == [1, 2], "of the others nobody asks anything"
    for count in (100, 0):
        with pytest.raises(ValueError, match="data.eval_source=missing.jsonl: there is no such file"):
            build_eval_prompts(config(seven, eval_source="missing.jsonl", eval_prompts=count), qwen_tokenizer, None)


def test_several_sources_are_mixed_by_weight_and_each_deals_its_own_epochs(tmp_path, qwen_tokenizer):
    three, ten = write(tmp_path / "three.jsonl", 3), write(tmp_path / "ten.jsonl", 10)
    mixed = [{"source": three, "weight": 1}, {"source": ten, "weight": 2.5, "instruction": "!"}]

    def stream(**changed: Any) -> PromptStream:
        return build_train_prompts(config("", sources=mixed, eval_source=None, **changed), qwen_tokenizer, None)

    whole = stream()
    dealt = [prompt for _ in range(14) for prompt in whole.next_batch()]
    for count in range(1, 43):  # a share of every prefix, not of the whole alone
        assert abs(sum(p.source == "three" for p in dealt[:count]) - count / 3.5) < 1
    small = [prompt.row for prompt in dealt if prompt.source == "three"]
    assert [sorted(small[start : start + 3]) for start in range(0, 12, 3)] == [[1, 2, 3]] * 4
    assert len({tuple(small[start : start + 3]) for start in range(0, 12, 3)}) > 1  # shuffled anew
    assert sorted(prompt.row for prompt in dealt if prompt.source == "ten")[:20] == sorted([*range(1, 11)] * 3)[:20]
    assert dealt[0].place == f"ten:{dealt[0].row}"  # the larger weight first
    for stop in range(0, 40, 7):  # resumed anywhere, and by steps of another size
        resumed = stream(prompts_per_step=1)
        resumed.restore({**stream().state(), "position": stop})
        assert [resumed.next_batch()[0].place for _ in range(stop, 42)] == [prompt.place for prompt in dealt[stop:]]
    assert stream().steps_for_epochs(1.0) == 5  # ceil(13 rows / 3)
    before = stream().state()
    mixed[0]["weight"] = 2
    with pytest.raises(
        ValueError, match=r"cannot resume: the mixture of data.sources .* was three \(3 rows\) x 1, ten"
    ):
        stream().restore(before)


def test_a_tokenizer_without_a_chat_template_is_said_once(seven, llama_tokenizer, caplog):
    llama_tokenizer.chat_template = None
    assert build_train_prompts(config(seven), llama_tokenizer, None).first_rendered == "a"
    assert caplog.text.count("has no chat template: prompts are plain text") == 1

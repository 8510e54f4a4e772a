"""What is written down of a step's samples: who decoded when, and a few of them as text."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from infsample_rl.config.loading import load_config
from infsample_rl.controller.groups import StepGroups
from infsample_rl.controller.recording import read_recording
from infsample_rl.controller.step_records import (
    completion_records,
    cut_by_observations,
    response_reader,
    sample_records,
)
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.observe.report.samples import LONGEST_TEXT, shortened, shown_places
from infsample_rl.types import (
    AcceptedSpan,
    Completion,
    Episode,
    Forecast,
    RowStay,
)
from tests.fakes import header, rewarded
from tests.tiny_models import finished, prompt_of

CONFIG = load_config([])
TOKENIZER = load_tokenizer(CONFIG.model)
STAYS = [
    [RowStay(2, 0, 10, 100.0, 101.0, 10), RowStay(0, 12, 14, 102.0, 102.5, 3, (AcceptedSpan(13, 14, 1),))],
    [RowStay(1, 4, 8, 100.5, 101.5, 4)],
]


def book() -> StepGroups:
    """Two prompts of two samples; of the second no stays were wanted."""
    prompts = [prompt_of(index, [0] * 3, row=7 + index, text="who is what?") for index in range(2)]
    groups = StepGroups(prompts, CONFIG, group_size=2, step=0, with_reference=False)
    for key in range(2):
        told = {"lengths": [13, 4], "finish_reasons": ["stop", "length"], "finished_at": 103.0, "worker": 5}
        forecasts = [Forecast(8, 11.26), None]
        groups.add_micro_group(key, header(key, [1, 0], **told, forecasts=forecasts, stays=[] if key else STAYS))
        groups.add_rewards(key, rewarded(1.0, None))
    return groups


def fetched(key: int) -> list[Completion]:
    """A micro-group of two samples of one text."""
    ids = TOKENIZER(" knight. knave.<|im_end|>", add_special_tokens=False)["input_ids"]
    return [finished(key, index, ids) for index in (1, 0)]


def test_a_record_says_who_decoded_when_and_what_came_of_it():
    (record,) = sample_records(book(), response_reader(fetched, TOKENIZER, []), step=3)
    first = {
        "sample_index": 0, "length": 4, "finish_reason": "length", "reward": None, "worker": 5, "forecast": None,
        "text": " knight. knave.",
        "stays": [[1, 4, 8, 0.5, 1.5, 4, []]],
    }  # fmt: skip
    second = {
        "sample_index": 1, "length": 13, "finish_reason": "stop", "reward": 1.0, "worker": 5, "forecast": [8, 11.3],
        "text": " knight. knave.",
        "stays": [[2, 0, 10, 0.0, 1.0, 10, []], [0, 12, 14, 2.0, 2.5, 3, [[13, 14, 1]]]],
    }  # fmt: skip
    assert record == {
        "step": 3,
        "prompt_index": 0,
        "row": 7,
        "started": 100.0,
        "prompt": "who is what?",
        "samples": [first, second],
    }
    assert json.loads(json.dumps(record)) == record


def test_texts_that_are_gone_are_none():
    response_of = response_reader(lambda key: None, TOKENIZER, [])
    (record,) = sample_records(book(), response_of, step=3)
    assert [sample["text"] for sample in record["samples"]] == [None, None]
    assert completion_records(book(), response_of, 4, step=3) == []


@pytest.mark.parametrize(("strings", "text"), [([], " knight. knave."), ([" knave", "."], " knight")])
def test_completions_show_the_text_rewards_saw(strings, text):
    records = completion_records(book(), response_reader(fetched, TOKENIZER, strings), 2, step=3)
    assert [(record["response"], record["prompt_index"]) for record in records] == [(text, 0), (text, 1)]
    assert records[0]["reward"] is None and records[0]["length"] == 4 and records[0]["policy_version"] == 0


def test_trajectories_that_an_observation_without_room_has_ended_are_told_of():
    groups, fits = book(), Episode(reward=1.0, failure="", turns=1, calls=0, waited_s=0.0)
    samples = [sample for group in groups.groups for sample in group.samples]
    for sample in samples:
        sample.episode = fits
    assert cut_by_observations(groups, CONFIG, step=3) == ""
    for sample, tokens in zip(samples, (30, 40), strict=False):
        sample.episode = dataclasses.replace(fits, unfit_tokens=tokens)
    said = cut_by_observations(groups, CONFIG, step=3)
    assert said.startswith("step 3: 2 of 4 trajectories ended because an observation, of up to 40 tokens, did")
    assert f"rollout.max_new_tokens={CONFIG.rollout.max_new_tokens}: raise it, or take shorter ones" in said


def test_what_an_environment_said_is_found_in_the_text_also_in_what_is_left_of_a_long_one():
    turns = [" knight.", " Zoe is?", " knave.<|im_end|>"]
    ids = [TOKENIZER(text, add_special_tokens=False)["input_ids"] for text in turns]
    logprobs = np.concatenate([np.full(len(own), np.nan if turn == 1 else 0.0) for turn, own in enumerate(ids)])
    episode = Episode(reward=1.0, failure="", turns=2, calls=0, waited_s=0.0, turn_rewards=[0.25, 0.75])
    groups = book()
    for group in groups.groups:
        for sample in group.samples:
            sample.episode = episode

    def trajectories(key: int) -> list[Completion]:
        found = {"token_ids": np.array(sum(ids, []), np.int32), "logprobs": logprobs.astype(np.float32)}
        return [dataclasses.replace(each, **found, episode=episode) for each in fetched(key)]

    record = completion_records(groups, response_reader(trajectories, TOKENIZER, []), 1, step=3)[0]
    [(start, end)] = record["observed"]
    assert record["response"][start:end] == " Zoe is?" and record["response"] == " knight. Zoe is? knave."
    assert record["turn_rewards"] == [0.25, 0.75] and json.loads(json.dumps(record))["observed"] == [[start, end]]

    text = "".join(chr(33 + place % 90) for place in range(LONGEST_TEXT * 2))
    half = LONGEST_TEXT // 2
    places = [(3, 9), (half - 5, half + 5), (half + 9, half + 12), (half + 7, 3 * half + 8), (len(text) - 9, len(text))]
    shown = [shortened(text)[start:end] for start, end in shown_places(places, len(text))]
    assert shown == [text[3:9], text[half - 5 : half], text[3 * half : 3 * half + 8], text[-9:]]
    assert shown_places(places[:1], 12) == [[3, 9]]


def test_the_steps_that_were_recorded_are_named_and_folders_beside_them_are_none(tmp_path):
    for name in ("step_000010", "step_000002", "step_000003_mine", "superseded"):
        (tmp_path / "recordings" / name).mkdir(parents=True)
    with pytest.raises(ValueError, match="step=4 of .* was not recorded; recorded steps: 2, 10; set logging.record_ev"):
        read_recording(tmp_path, 4)

"""Reward functions of the shape TRL's, verl's and OpenRLHF's users write, as they are; and the rules their data sets
need."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow
import pyarrow.parquet
import pytest

from infsample_rl.config import RewardConfig, RewardFunctionConfig
from infsample_rl.config.reward import RULES
from infsample_rl.data.prompts import build_train_prompts
from infsample_rl.model.tokenizer import load_tokenizer
from infsample_rl.reward import rule_data_source, rule_think_format, user_function
from infsample_rl.reward.checks import check_reward_functions
from infsample_rl.reward.worker import RewardWorker
from infsample_rl.types import Episode
from tests.configs import run_config
from tests.scored_texts import score_texts
from tests.tiny_models import finished

PEERS = """
import re
from dataclasses import dataclass

# --- TRL
def last_number(text):
    return (re.findall(r"-?\\d+", text) or [None])[-1]

def exact(prompts, completions, answer, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    golds = [text.split("####")[1].strip() for text in answer]
    return [1.0 if last_number(content) == gold else 0.0 for content, gold in zip(contents, golds)]

def only_maths(completions, kind, log_extra=None, log_metric=None, **kwargs):
    scores = [2.0 if topic == "maths" else None for topic in kind]
    if log_extra:
        log_extra("words", [str(len(completion[0]["content"].split())) for completion in completions])
        log_extra("tokens", [len(ids) for ids in kwargs["completion_ids"]])
    if log_metric:
        words = [len(completion[0]["content"].split()) for completion in completions]
        log_metric("mean_words", sum(words) / len(words))
    return scores

def only_code(completions, kind, **kwargs):
    return [5.0 if topic == "code" else None for topic in kind]

def roles(completions, **kwargs):
    wanted = ["assistant", "tool", "assistant"]
    return [3.0 * ([message["role"] for message in each] == wanted) for each in completions]

def seen(environments, **kwargs):
    return [environment.reward for environment in environments]

def turns(data_source, solution_str, ground_truth, extra_info):
    return float(extra_info["num_turns"])

def warms_up(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

async def judged(completions, answer, **kwargs):
    return [0.25] * len(completions)

def kinds(completions, answer, **columns):
    return [float(one) if isinstance(one, int) else -1.0 for one in answer]

def plain(prompts, completions, **columns):
    return [100.0 * len(prompt) + len(text) for prompt, text in zip(prompts, completions)]

def of_question(completions, prompts, question):
    return [float(len(one)) + 0.5 * isinstance(prompt, list) for one, prompt in zip(question, prompts)]

class Length:
    def __init__(self, most):
        self.most = most
    def __call__(self, completions, **kwargs):
        return [min(1.0, len(completion[0]["content"]) / self.most) for completion in completions]

length = Length(10)

# --- verl
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = solution_str.strip().endswith(ground_truth)
    assert data_source == "openai/gsm8k" and extra_info["index"] == 7 and extra_info["num_turns"] == 2
    return {"score": 1.0 if right else -1.0, "acc": right, "pred": solution_str[-1:]}

async def compute_score_async(data_source, solution_str, ground_truth, extra_info, strict=False, **kwargs):
    return float(solution_str.strip() == ground_truth) if strict else 0.5

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    return [{"score": float(len(text)), "long": len(text) > 2} for text in solution_strs]

# --- OpenRLHF
class Tensor:  # what a torch tensor is to its caller
    def __init__(self, values):
        self.values = values
    def tolist(self):
        return self.values

def reward_func(queries, prompts, labels, **kwargs):
    responses = [query[len(prompt):] for query, prompt in zip(queries, prompts)]
    golds = [label.split("####")[1].strip() for label in labels]
    rewards = Tensor([1.0 if response.strip() == gold else 0.0 for response, gold in zip(responses, golds)])
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": Tensor([float(len(responses[0]))])}}

def labelled(queries, prompts, labels):
    return Tensor([float(label) if isinstance(label, int) else -1.0 for label in labels])

def reward_plain(queries, prompts, labels):
    return Tensor([3.0])
"""
SCRIPT = """
from datasets import load_dataset
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

rows = load_dataset("nobody/nothing", split="train")
tokenizer = AutoTokenizer.from_pretrained("nobody/nothing")
rows = rows.map(lambda row: {"prompt": tokenizer.apply_chat_template(row["messages"])})

def short(completions, **kwargs):
    return [float(len(completion[0]["content"]) < 5) for completion in completions]

def tokens(completions, **kwargs):
    return [float(len(tokenizer(completion[0]["content"]))) for completion in completions]

def local(completions, **kwargs):
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained("MODEL")
    return [float(len(tokenizer(completion[0]["content"])["input_ids"]) > 0) for completion in completions]

args = GRPOConfig(num_generations=4, learning_rate=1e-6)
trainer = GRPOTrainer(model="nobody/nothing", reward_funcs=[short, tokens], args=args, train_dataset=rows)
trainer.train()
raise SystemExit("trained")
"""
WORKED = "1 + 2 makes three.\n#### 3"


@pytest.fixture
def open_worker(tiny_qwen3, tmp_path, closing):
    """Builds a worker over functions of PEERS; every one is closed."""
    path = tmp_path / "peers.py"
    path.write_text(PEERS)

    def build(*functions, **data):
        entries = [{"name": function} if isinstance(function, str) else function for function in functions]
        listed = [
            entry | {"name": name if name in RULES or ":" in name else f"{path}:{name}"}
            for entry in entries
            for name in [entry["name"]]
        ]
        settings = {"data": data, "reward": {"functions": listed}, "run": {"steps": 8}}
        return closing(RewardWorker(run_config(model={"path": str(tiny_qwen3)}, **settings)))

    return build


@pytest.fixture
def prompt_of(tiny_qwen3, tmp_path):
    """The first prompt of a data file that holds one row."""

    def read(row, *, parquet=False, **settings):
        path = tmp_path / ("train.parquet" if parquet else "train.jsonl")
        if parquet:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
        else:
            path.write_text(json.dumps(row) + "\n")
        config = run_config(model={"path": str(tiny_qwen3)}, data={"source": str(path), **settings})
        return build_train_prompts(config, load_tokenizer(config.model), None).next_batch(1)[0]

    return read


def trl_row(**columns):
    return {"prompt": [{"role": "user", "content": "1 + 2 = ?"}], "answer": WORKED} | columns


def test_of_several_turns_trls_form_gets_the_messages_and_a_rule_what_was_said_last(open_worker, prompt_of):
    """An answer that an environment gave away is no answer of the policy's."""
    call = {"role": "assistant", "content": "", "tool_calls": []}
    gave_away = {"role": "tool", "name": "look", "content": "#### 3"}
    said = [[call, gave_away, {"role": "assistant", "content": last}] for last in ("#### 4", "#### 3")]
    told = {"failure": "", "turns": 2, "calls": 1, "waited_s": 0.0}
    episodes = [
        Episode(reward=None, messages=messages, function_rewards={"seen": value}, reported={"seen/x": 2.0}, **told)
        for messages, value in zip(said, (0.5, None), strict=True)
    ]
    completions = [finished(0, index, [0], episode=episode) for index, episode in enumerate(episodes)]
    worker = open_worker("roles", "turns", "seen", {"name": "gsm8k", "weight": 2.0})
    plain = prompt_of({"question": "1 + 2 = ?", "answer": WORKED})  # no list of messages
    [found] = worker.score([(plain, completions)])
    assert found.failures == []
    assert found.components == {
        "roles": [3.0, 3.0],
        "turns": [4.0, 4.0],
        "seen": [0.5, None],
        "gsm8k": [0.0, 1.0],
        "seen/x": [2.0, 2.0],
    }
    assert found.rewards == [7.5, 9.0]


def test_a_trl_script_that_trains_when_it_is_imported_is_imported_up_to_there(
    open_worker, prompt_of, tiny_qwen3, tmp_path
):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT.replace("MODEL", str(tiny_qwen3)))
    worker = open_worker(*(f"{path}:{name}" for name in ("short", "local")))
    found = score_texts(worker, prompt_of(trl_row()), ["3", "so 3"])
    assert found.components == {"short": [1.0, 1.0], "local": [1.0, 1.0]} and found.failures == []
    with pytest.raises(
        ValueError, match="train.py: tokens reads tokenizer, which is not loaded where importing the file"
    ):
        open_worker(f"{path}:tokens")


MENTIONS = '''
"""Was passed to GRPOTrainer(reward_funcs=[known])."""
from datasets import Dataset
# GRPOTrainer(reward_funcs=[known]).train()

WORDS = set(Dataset.from_list([{"word": "a"}])["word"])

def known(completions, **kwargs):
    return [float(completion in WORDS) for completion in completions]

def train():
    from trl import GRPOTrainer
    GRPOTrainer(reward_funcs=[known]).train()
'''


def test_a_file_that_only_speaks_of_a_trainer_loads_what_it_loads(open_worker, prompt_of, tmp_path):
    (tmp_path / "known.py").write_text(MENTIONS)
    prompt = prompt_of({"question": "1 + 2 = ?"})
    assert score_texts(open_worker(f"{tmp_path}/known.py:known"), prompt, ["a", "b"]).rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        ("GRPOTrainer(f).train()", True),
        ("with trl.GRPOTrainer(f) as trainer: ...", True),
        ("class Own(GRPOTrainer): ...\nOwn(f).train()", True),
        ("def main():\n    GRPOTrainer(f).train()\nmain()", True),
        ("if here:\n    GRPOTrainer(f).train()", True),
        ("def main():\n    GRPOTrainer(f).train()", False),
        ("def main():\n    GRPOTrainer(f).train()\nif __name__ == '__main__':\n    main()", False),
        ("if '__main__' == __name__:\n    GRPOTrainer(f).train()", False),
        ("# GRPOTrainer(f)\nX = 'GRPOTrainer(f)'", False),
        ("GRPOTrainer(f", False),
    ],
)
def test_a_file_trains_where_importing_it_makes_a_trainer(source, trains):
    assert user_function._trains(source.encode()) is trains


def test_a_function_that_takes_environments_needs_some(tmp_path):
    path = tmp_path / "seen.py"
    path.write_text(PEERS)
    functions = [RewardFunctionConfig(name=f"{path}:seen")]
    with pytest.raises(ValueError, match="seen takes environments; set environment.factory to their class"):
        check_reward_functions(RewardConfig(functions=functions))
    assert check_reward_functions(RewardConfig(functions=functions), "game.py:Game") == [(functions[0].name, [])]


def test_trl_functions_get_the_answer_column_as_the_data_has_it(open_worker, prompt_of):
    result = score_texts(open_worker("exact", "judged", "length"), prompt_of(trl_row()), ["so 3", "so 4"])
    assert result.failures == []
    assert result.components == {"exact": [1.0, 0.0], "judged": [0.25, 0.25], "length": [0.4, 0.4]}
    prompt = prompt_of({"prompt": "1 + 2 = ?", "answer": WORKED}, apply_chat_template=False)
    assert score_texts(open_worker("plain"), prompt, ["3", "so 4"]).rewards == [
        901.0,
        904.0,
    ]  # strings, where the data holds strings


@pytest.mark.parametrize("asked", ["1 + 2 = ?", [{"role": "user", "content": "1 + 2 = ?"}]])
def test_trl_functions_get_the_question_by_its_own_name_too(open_worker, prompt_of, asked):
    prompt = prompt_of({"question": asked, "answer": "3"}, apply_chat_template=True)
    assert score_texts(open_worker("of_question"), prompt, ["3", "4"]).rewards == [float(len(asked))] * 2


def test_numbers_stay_numbers_for_functions_and_a_rows_own_answer_its_own(open_worker, prompt_of):
    row = trl_row(answer=42, target=7)
    own, other = prompt_of(row), prompt_of(row, answer_field="target")
    assert (own.columns["answer"], other.columns["answer"]) == ("42", "7")
    assert score_texts(open_worker("kinds"), own, ["x"]).rewards == [42.0]
    assert score_texts(open_worker("labelled"), own, ["x"]).rewards == [42.0]
    assert score_texts(open_worker("kinds", answer_field="target"), other, ["x"]).rewards == [42.0]
    assert score_texts(open_worker("labelled", answer_field="target"), other, ["x"]).rewards == [7.0]


def test_a_trl_function_that_returns_none_is_left_out_of_the_weighted_sum(open_worker, prompt_of):
    worker = open_worker({"name": "exact", "weight": 2.0}, {"name": "only_maths", "weight": 0.5}, "only_code")
    result = score_texts(worker, prompt_of(trl_row(kind="maths")), ["3", "two words"], token_ids=[[5], [6, 7]])
    assert result.rewards == [2.0 * 1.0 + 0.5 * 2.0, 0.5 * 2.0]
    assert result.failures == []
    assert result.components["only_code"] == [None, None]
    assert result.components["only_maths/tokens"] == [1.0, 2.0]  # log_extra
    assert result.components["only_maths/mean_words"] == [1.5, 1.5]  # log_metric
    assert "only_maths/words" not in result.components  # texts are not kept


def test_a_sample_that_every_trl_function_leaves_out_has_no_reward_and_is_said(open_worker, prompt_of):
    result = score_texts(open_worker("only_maths", "only_code"), prompt_of(trl_row(kind="prose")), ["a", "b"])
    assert result.rewards == [None, None]
    assert result.failures == ["only_maths: returned None on prompt row 1 (2 samples)"]


def test_trl_functions_see_how_far_the_run_is(open_worker, prompt_of):
    worker = open_worker("warms_up")
    assert worker.score([(prompt_of(trl_row()), [finished(0, 0, [5], policy_version=2)])])[0].rewards == [2 / 8]


def test_verl_functions_take_verl_parquet_and_their_extra_numbers_are_kept(open_worker, prompt_of):
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "1 + 2 = ?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 7},
    }
    prompt = prompt_of(row, parquet=True)
    result = score_texts(open_worker("compute_score"), prompt, ["it is 3", "4"])
    assert (result.rewards, result.failures) == ([1.0, -1.0], [])
    assert result.components == {"compute_score": [1.0, -1.0], "compute_score/acc": [1.0, 0.0]}
    strict = {"name": "compute_score_async", "kwargs": {"strict": True}}
    assert score_texts(open_worker(strict, "compute_scores"), prompt, ["3", "333"]).components == {
        "compute_score_async": [1.0, 0.0],
        "compute_scores": [1.0, 3.0],
        "compute_scores/long": [0.0, 1.0],
    }


def test_openrlhf_functions_get_queries_prompts_and_the_label_as_the_data_has_it(open_worker, prompt_of):
    prompt = prompt_of({"input": "1 + 2 = ?", "label": WORKED}, prompt_field="input", answer_field="label")
    result = score_texts(open_worker("reward_func", "reward_plain", answer_field="label"), prompt, ["3", " 4"])
    assert result.failures == []
    assert result.components == {
        "reward_func": [1.0, 0.0],
        "reward_func/length": [1.0, 2.0],
        "reward_plain": [3.0, 3.0],
    }
    named_answer = prompt_of({"input": "1 + 2 = ?", "answer": WORKED}, prompt_field="input")
    assert score_texts(open_worker("reward_func"), named_answer, ["3"]).rewards == [1.0]


@pytest.mark.parametrize(("named", "right"), [(None, 7), ("mended", 8)])
def test_rules_take_verls_ground_truth_unless_another_field_is_named(open_worker, prompt_of, named, right):
    row = {"prompt": trl_row()["prompt"], "reward_model": {"ground_truth": 7}, "mended": 8}
    worker, prompt = open_worker("gsm8k", "math"), prompt_of(row, answer_field=named)
    scores = score_texts(worker, prompt, ["Answer: 7", "Answer: 8"])
    assert scores.rewards == [2.0 * (right == 7), 2.0 * (right == 8)]


def test_the_label_is_what_the_answer_field_of_a_prompts_own_source_names(open_worker, prompt_of):
    prompt = prompt_of({"input": "1 + 2 = ?", "label": WORKED}, prompt_field="input", answer_field="label")
    worker = open_worker("reward_func", source="", sources=[{"source": "sums.jsonl", "answer_field": "label"}])
    assert score_texts(worker, replace(prompt, source="sums"), ["3", "4"]).rewards == [1.0, 0.0]


@pytest.mark.parametrize(
    ("source", "response", "answer"),
    [
        ("openai/gsm8k", "so #### 3", "3"),
        ("lighteval/MATH", r"\boxed{\frac12}", "0.5"),
        ("aime2024", r"\boxed{204}", "204"),
    ],
)
def test_the_rule_of_a_row_is_its_data_source(source, response, answer):
    assert rule_data_source.score(response, {"data_source": source, "answer": answer}) == 1.0
    with pytest.raises(ValueError, match="data_source is 'codeforces', which has no rule here"):
        rule_data_source.score(response, {"data_source": "codeforces", "answer": answer})


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>\na\n</think>\nb", 1.0),
        ("<think></think>", 1.0),
        ("a</think>b", 0.0),
        ("<think>a", 0.0),
        ("<think>a<think></think>b", 0.0),
    ],
)
def test_think_format_wants_one_thought_before_the_answer(response, reward):
    assert rule_think_format.score(response, {}) == reward

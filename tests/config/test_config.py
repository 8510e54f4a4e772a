"""Settings: every experiment composes, every wrong setting is one line with exit code 2, every key is read."""

from __future__ import annotations

import ast
import dataclasses
import re
import signal
import sys
from pathlib import Path

import pytest
from transformers import GenerationConfig, Qwen3Config, Qwen3MoeConfig

from infsample_rl.config import DATA_NAMES, Config, ObjectiveConfig, RewardFunctionConfig, RolloutConfig
from infsample_rl.config.loading import compose, load_config
from infsample_rl.config.overrides import SECTIONS, ConfigError, experiments, sweep
from infsample_rl.controller import start_table
from infsample_rl.controller.start_table import (
    context_warnings,
    derived_table,
    kv_bytes_per_token,
    sampling_warnings,
    setting_warnings,
)
from infsample_rl.data.sources import HUB_NAMES, SHIPPED
from infsample_rl.main import main
from infsample_rl.model.architecture import context_of
from infsample_rl.model.tokenizer import load_tokenizer

ROOT = Path(__file__).resolve().parents[2]
LARGE = [f"{data}_qwen3_{size}" for data in ("gsm8k", "kk", "math") for size in ("1.7b", "8b")]
NAMED = [
    "arithmetic_smollm2",
    "calculator_smollm2",
    "gsm8k_smollm2",
    "guess_tiny",
    "kk_tiny",
    *LARGE,
    *(f"{name}_paper" for name in LARGE),
]


def test_experiments_are_the_promised_ones():
    assert experiments() == sorted(NAMED)


@pytest.mark.parametrize("name", experiments())
def test_every_experiment_composes_and_validates(name):
    assert load_config([f"+experiment={name}"]).run.name == name


def test_bare_command_is_kk_tiny():
    assert compose([])["run"]["name"] == "kk_tiny"


def test_paper_setting():
    rollout = load_config(["+experiment=math_qwen3_8b_paper"]).rollout
    assert (rollout.schedule, rollout.predictor, rollout.prefix_tokens, rollout.epsilon) == (
        "infinite",
        "bert",
        16,
        0.1,
    )
    assert (
        rollout.group_size,
        rollout.slots,
        rollout.temperature,
        rollout.max_new_tokens,
        rollout.prompts_at_once,
    ) == (32, 4, 0.8, 1024, "1")


@pytest.mark.parametrize("name", LARGE)
def test_a_large_model_fills_the_memory_there_is(name):
    rollout = load_config([f"+experiment={name}"]).rollout
    assert (rollout.schedule, rollout.takes_free_memory, rollout.predictor) == ("token_budget", True, "probe")
    assert (rollout.prompts_at_once, rollout.most_prompts) == ("auto", 256)


@pytest.mark.parametrize(
    ("overrides", "free", "deterministic"),
    [
        ([], True, True),
        (["rollout.slots=4"], False, True),
        (["rollout.kv_budget_tokens=4096"], False, True),
        (["rollout.kv_budget_bytes=1GB"], False, True),
        (["rollout.schedule=arrival"], False, True),
        (["rollout.schedule=arrival", "rollout.kv_budget_bytes=auto"], True, True),
        (["rollout.slots=4", "rollout.kv_budget_bytes=auto"], True, True),
        (["run.deterministic=false"], True, False),
        (["run.max_staleness=1"], True, True),
        (["model.dtype=bfloat16"], True, False),
        (["rollout.kv_dtype=int8", "objective.importance=token_tis"], True, False),
        (["cluster.rollout_gpus=1"], True, False),
        (["cluster.rollout_gpus=1", "model.dtype=bfloat16", "run.deterministic=true"], True, True),
    ],
)
def test_a_pool_has_what_is_free_and_a_run_repeats_unless_settings_say_otherwise(overrides, free, deterministic):
    config = load_config(overrides)
    assert (config.rollout.takes_free_memory, config.is_deterministic) == (free, deterministic)


def test_prompts_at_once_is_auto_or_a_count():
    assert RolloutConfig(prompts_at_once=3).most_prompts == RolloutConfig(prompts_at_once=3).planned_prompts == 3
    assert (RolloutConfig().most_prompts, RolloutConfig().planned_prompts) == (256, 2)
    assert RolloutConfig(schedule="arrival", slots=6).most_prompts == 6


def test_group_choice_overrides_the_experiment():
    config = load_config(
        ["+experiment=math_qwen3_8b_paper", "rollout=default", "objective=paper_section_3_4", "rollout.slots=2"]
    )
    assert (config.rollout.schedule, config.rollout.slots, config.objective.advantage) == (
        "token_budget",
        2,
        "mean_only",
    )


def test_choices_and_bounds_raise_value_error_in_python():
    with pytest.raises(ValueError, match=r"rollout.schedule must be one of .*, got 'infinit'; did you mean infinite\?"):
        RolloutConfig(schedule="infinit")
    with pytest.raises(ValueError, match="objective.clip_low must be <= 1, got 1.5; the nearest that works is 1"):
        ObjectiveConfig(clip_low=1.5)


WRONG = [
    (["rollout.grop_size=3"], "rollout.grop_size is not a setting; did you mean rollout.group_size?"),
    *[
        (
            [f"rollout.prompts_at_once={wrong}"],
            f"rollout.prompts_at_once must be auto or a whole number >= 1, got '{wrong}'",
        )
        for wrong in ("0", "-1", "1.5", "all")
    ],
    (["group_size=4"], "group_size is not a setting; did you mean rollout.group_size?"),
    (["path=x"], "path is not a setting; did you mean model.path or reference.path?"),
    (["rollout.foo=4"], "rollout.foo is not a setting; sections are run, model,"),
    (["rollot.slots=4"], "rollot.slots is not a setting; did you mean rollout.slots?"),
    (["rollout.group_size=abc"], "rollout.group_size must be a whole number, got 'abc'; the default is 8"),
    (["rollout.group_size=3.5"], "rollout.group_size must be a whole number, got '3.5'"),
    (["run.deterministic=perhaps"], "run.deterministic must be true or false, got 'perhaps'"),
    (["rollout.group_size=0"], "rollout.group_size must be >= 1, got 0; the nearest that works is 1"),
    (["rollout.top_p=1.5"], "rollout.top_p must be <= 1, got 1.5; the nearest that works is 1"),
    (["learner.lr=0"], "learner.lr must be > 0, got 0"),
    (["learner.lr=nan"], "learner.lr must be finite, got nan"),
    (["rollout.schedule=arival"], "did you mean arrival?"),
    (["cluster.device_type=A100"], "did you mean a100-40gb or a100-80gb?"),
    (["+experiment=kk_tny"], "did you mean experiment=kk_tiny?"),
    (["rollout=papr"], "did you mean rollout=paper?"),
    (["+rollout.group_size=8"], "a plus only adds what is not there: write rollout.group_size=8\n"),
    (["+data=gsm8k"], "a plus only adds what is not there: write data=gsm8k\n"),
    (
        ["data.chat_template_kwargs=x"],
        "data.chat_template_kwargs must be a mapping, got x: write data.chat_template_kwargs.NAME=VALUE",
    ),
    (["--config", "mine.yaml"], "--config is no flag; a file is given as DIR/experiment/NAME.yaml by --config-dir DIR"),
    (["model=/my/folder"], "qwen3_8b, smollm2; for one of your own give model.path=/my/folder\n"),
    (["data=train.jsonl"], "kk_tiny, math; for one of your own give data.source=train.jsonl\n"),
    (["data=kk_tny"], "; for one of your own give data.source=kk_tny; did you mean data=kk_tiny?"),
    (["reward=a.py:f"], "; for one of your own give reward.functions=[a.py:f]\n"),
    (["reward.functions=kk"], "error: reward.functions: give a list, reward.functions=[kk]\n"),
    (["rollout.stop_token_ids=5"], "error: rollout.stop_token_ids: give a list, rollout.stop_token_ids=[5]\n"),
    (["reward.functions=kk,math"], "one after another; for all of them in one run give a list, reward.functions=[kk,"),
    (["rollout.schedule=lpt,sjf"], "rollout.schedule=lpt,sjf gives several values: -m runs one after another\n"),
    (["rollout.slots=2,4"], "rollout.slots=2,4 gives several values: -m runs one after another\n"),
    (
        ["data.instruction=Think step by step: a, b"],
        "a text with commas needs two pairs of quotes: 'data.instruction=\"Think step by step: a, b\"'",
    ),
    (["data.foo=a, b"], "data.foo is not a setting"),
    (["model.path="], "model.path is empty"),
    (["rollout.slots"], "'rollout.slots' is not name=value"),
    (["data.instruction=a = b"], "needs two pairs of quotes: 'data.instruction=\"a = b\"'"),
    (["~rollout.slots"], "settings cannot be deleted"),
    (["run.dir="], "run.dir is empty, as a shell's variable that is not set"),
    (["hydra.run.dir=x"], "Hydra only composes the settings here"),
    (
        ["rollout.preemption=recomputed"],
        "rollout.preemption must be one of auto, recompute, park, or the path of a folder (with a /), got 'recomputed'",
    ),
    (["data.generator_kwargs.size=0"], "data.generator_kwargs.size must be a whole number >= 1, got 0"),
    (["data.generator_kwargs.seed=a"], "data.generator_kwargs.seed must be a whole number >= 0, got 'a'"),
    (
        ["rollout.predictor=bert"],
        "rollout.schedule must be fptas or sjf or infinite or lpt with rollout.predictor=bert, got token_budget",
    ),
    (
        ["rollout.prefix_tokens=16"],
        "rollout.schedule must be fptas or sjf or infinite or lpt with rollout.prefix_tokens=16, got token_budget",
    ),
    (
        ["rollout.schedule=lpt", "rollout.prefix_tokens=1"],
        "rollout.prefix_tokens must be > 1 with rollout.predictor=probe, rollout.schedule=lpt, got 1",
    ),
    (
        ["rollout.schedule=lpt", "rollout.prefix_tokens=320"],
        "rollout.prefix_tokens must be < rollout.max_new_tokens = 320, got 320",
    ),
    (
        ["rollout.schedule=lpt", "rollout.predictor=none", "rollout.prefix_tokens=4"],
        "rollout.prefix_tokens must be <= 0 with rollout.predictor=none, got 4",
    ),
    (["rollout.group_size=1"], "rollout.group_size must be > 1 with objective.advantage=std, got 1"),
    (["rollout.temperature=0"], "rollout.temperature must be > 0, got 0: this is training"),
    (
        ["learner.max_tokens_per_micro_batch=100"],
        "learner.max_tokens_per_micro_batch must be >= data.max_prompt_tokens + rollout.max_new_tokens",
    ),
    (["rollout.micro_group_size=64"], "rollout.micro_group_size must be <= rollout.group_size = 32, got 64"),
    (["learner.warmup_steps=9", "run.steps=3"], "learner.warmup_steps must be <= 3, the updates of 3 steps, got 9"),
    (["reward.functions=[]"], "reward.functions is empty"),
    (
        ["reward.isolation=sandbx"],
        "reward.isolation must be one of none, limits, sandbox, got 'sandbx'; did you mean sandbox?",
    ),
    (["reward.memory_limit=64MB"], "reward.memory_limit must be >= 256MiB, got 64MB; the nearest that works is 256MiB"),
    (
        ["environment.factory=a.py:A", "rollout.schedule=arrival"],
        "rollout.schedule must be token_budget, got arrival: samples that wait for their environment",
    ),
    (
        ["environment.factory=a.txt"],
        "environment.factory must be path/to/file.py:NAME, or a TRL script and its arguments",
    ),
    (["reward.functions=[environment]"], "reward.functions: environment needs environment.factory"),
    (["reward.memory_limit=much"], "reward.memory_limit must be a size as 24GB or 512MiB, got 'much'"),
    (["reward.environment=[NO_SUCH_KEY]"], "reward.environment names NO_SUCH_KEY, which is not set"),
    (["reward.isolation=sandbox", "reward.read_paths=[/no/folder]"], "reward.read_paths: there is no /no/folder"),
    (["data.sources=[kk_tiny]"], "data.source=kk_tiny and data.sources are both given: take one"),
    (["data.source=''", "data.sources=[{source: kk, weight: 0}]"], "data.sources[0].weight must be > 0, got 0"),
    (["data.source=''", "data.sources=[{source: kk, weight: inf}]"], "data.sources[0].weight must be finite, got inf"),
    (["data.source=''", "data.sources=[{sorce: kk}]"], "data.sources: an entry takes source, weight, reward, "),
    (
        ["data.source=''", "data.sources=[{source: kk, generator_kwargs: 5}]"],
        "data.sources[0].generator_kwargs must be {key: value}, got 5",
    ),
    (["reward.functions=[{name: kk, kwargs: 5}]"], "reward.functions[0].kwargs must be {key: value}, got 5"),
    (["data.source=''", "data.sources=[kk, {source: kk, reward: [3]}]"], "data.sources[1].reward must be names of"),
    (["data.source=''", "data.sources=[kk]", "reward.functions=[]"], "data.sources[0].reward and reward.functions are"),
    (["data.source=''", "data.sources=[kk]", "data.eval_source=math"], "data.eval_source must be auto or none with"),
    (
        [
            "data.source=''",
            "data.sources=[{source: kk, reward: score}]",
            "reward.functions=['/x/a.py:score', '/x/b.py:score']",
        ],
        "data.sources: reward=score could be each of /x/a.py:score, /x/b.py:score: give its file too",
    ),
    (
        ["data.source=''", "data.sources=[{source: a.jsonl, reward: gsm8k}]", "reward.functions=[gsm8k, kk]"],
        "reward.functions: kk scores no prompt, as every entry of data.sources names others: give it to one, or",
    ),
    (["reward.functions=[3]"], "reward.functions[0] must be a name or {name: ...}, got 3"),
    (["reward.functions=[{nam: kk}]"], "reward.functions: an entry takes name, weight, kwargs, not nam"),
    (["model.path=/no/such/folder"], "model.path=/no/such/folder is not a folder"),
    (["reward.functions=[{name: gsm9k}]"], "gsm8k"),
    (["reward.functions=[{name: kk, weight: x}]"], "reward.functions[0].weight must be a number, got 'x'"),
    (
        [
            "learner.backend=deepspeed",
            "learner.zero_stage=3",
            "learner.activation_checkpointing=1",
            "learner.recompute_granularity=selective",
        ],
        "learner.recompute_granularity must be full with learner.backend=deepspeed, learner.zero_stage=3, learner",
    ),
    (["data.source=/no/such/file.jsonl"], "/no/such/file.jsonl"),
    (["cluster.learner_gpus=1", "cluster.learner_ranks=64"], "64 GPUs, but there are"),
    (
        ["run.resume=nevr"],
        "run.resume must be auto, never, or a checkpoint RUN/checkpoints/step_N, got 'nevr', which is no folder; did "
        "you mean never?",
    ),
    (["run.resume=alwyas"], "step_N, got 'alwyas', which is no folder\n"),
    (["run.resume=/no/checkpoints/step_000001"], "run.resume=/no/checkpoints/step_000001 is not a checkpoint"),
    (
        ["rollout.kv_budget_tokens=10"],
        "rollout.kv_budget_tokens must be >= 480 to hold a prompt of data.max_prompt_tokens = 160",
    ),
    (["reward.functions=[{name: kk, weight: nan}]"], "reward.functions[0].weight must be finite, got nan"),
    (
        ["cluster.learner_gpus=0.5", "cluster.learner_ranks=2"],
        "cluster.learner_gpus must be 0 or 1 with cluster.learner_ranks=2, got 0.5",
    ),
    (["rollout.stop_token_ids=[96]"], "rollout.stop_token_ids must be ids of the tokenizer, 0 to 95, got [96]"),
    (["rollout.bad_token_ids=[3,96]"], "rollout.bad_token_ids must be ids of the tokenizer, 0 to 95, got [96]"),
    (["rollout.bad_token_ids=[-1]"], "rollout.bad_token_ids must be >= 0, got [-1]"),
    (["rollout.bad_token_ids=[a]"], "rollout.bad_token_ids[0] must be a whole number, got 'a'"),
    (
        ["rollout.bad_token_ids=" + str(list(range(96))).replace(" ", "")],
        "rollout.bad_token_ids must leave an id to sample, got all 96",
    ),
    (['rollout.stop_strings=["a",""]'], "rollout.stop_strings must not hold an empty string, got ['a', '']"),
    (['rollout.stop_strings=["a\ufffd"]'], "rollout.stop_strings must not hold U+FFFD"),
    (
        ['rollout.stop_strings=["<|im_end|>"]'],
        "rollout.stop_strings must not hold special tokens, which texts leave out, got '<|im_end|>'",
    ),
    (
        ["rollout=paper", "rollout.predictor_path=/no", "learner.max_tokens_per_micro_batch=4096"],
        "rollout.predictor_path=/no is not a folder",
    ),
    (["run.dir=/dev/null/run"], "run.dir=/dev/null/run cannot be written"),
    (["rollout.kv_dtype=int4"], "rollout.kv_dtype must be one of auto, int8, got 'int4'; did you mean int8?"),
    (["rollout.kv_dtype=int8"], "rollout.kv_dtype must be auto with objective.importance=auto, got int8"),
    (
        ["rollout.kv_dtype=int8", "objective.importance=token_tis", "run.deterministic=true"],
        "rollout.kv_dtype must be auto with run.deterministic=true, got int8",
    ),
    (
        ["rollout.engine=vllm", "rollout.vllm_python=/no"],
        "rollout.vllm_python=/no is no interpreter; `make vllm` makes one that has vLLM",
    ),
    (["rollout.engine=vllm", f"rollout.vllm_python={sys.executable}"], "has no vLLM; `make vllm` makes one"),
    (
        ["rollout.engine=vllm", "rollout.vllm_python=/bin/false"],
        "rollout.vllm_python=/bin/false does not run: no word; `make vllm`",
    ),
    (["rollout.engine=sglang"], "rollout.engine must be one of native, vllm, got 'sglang'"),
    (
        ["run.deterministic=true", "cluster.rollout_gpus=1"],
        "model.dtype must be bfloat16 or float16 with run.deterministic=true, cluster.rollout_gpus=1, got float32",
    ),
    (
        ["run.deterministic=true", "model.dtype=bfloat16"],
        "model.dtype must be float32 with run.deterministic=true, cluster.rollout_gpus=0, got bfloat16",
    ),
    (["rollout.engine=vllm", "run.deterministic=true"], "rollout.engine must be native with run.deterministic=true"),
    (
        ["rollout.engine=vllm", "rollout.schedule=infinite"],
        "rollout.predictor must be none or bert with rollout.engine=vllm, rollout.schedule=infinite, got probe",
    ),
    (["rollout.engine=vllm", "rollout.temperature=0.005"], "rollout.temperature must be >= 0.01 with rollout.engine="),
    (
        ["rollout.engine=vllm", "rollout.vllm_python=/bin/true"],
        "vllm_python=/bin/true does not run Python",
    ),
    (["rollout.engine=vllm", "rollout.speculate=3"], "rollout.speculate must be auto or 0 with rollout.engine=vllm"),
    (
        ["rollout.engine=vllm", "cluster.colocate=true", "rollout.tensor_parallel=2"],
        "rollout.tensor_parallel must be 1 with cluster.colocate=true, got 2",
    ),
    (
        ["rollout.engine=vllm", "run.eval_temperature=0.002"],
        "run.eval_temperature must be >= 0.01 with rollout.engine=vllm, run.eval_temperature=0.002, got 0.002: vLLM",
    ),
    (["rollout.engine=vllm", "rollout.preemption=park"], "rollout.preemption must be auto or recompute with rollout"),
    (["rollout.engine=vllm", "rollout.schedule=dynamic_slot"], "rollout.schedule must be token_budget or"),
    (["rollout.tensor_parallel=2"], "rollout.engine must be vllm with rollout.tensor_parallel=2, got native"),
    (
        ["rollout.engine=vllm", "rollout.tensor_parallel=2", "cluster.rollout_gpus=0.5"],
        "cluster.rollout_gpus must be 0 or 1 with rollout.tensor_parallel=2, got 0.5",
    ),
    (["objective.mini_batches=99"], "objective.mini_batches must be <= data.prompts_per_step"),
    (
        ["run.max_staleness=1", "objective.importance=none"],
        "objective.importance must be auto or token_tis or sequence_tis with run.max_staleness=1, got none",
    ),
    (
        ["run.max_staleness=1", "objective.dynamic_sampling=true"],
        "objective.dynamic_sampling must be false with run.max_staleness=1",
    ),
    (["run.max_staleness=1", "cluster.colocate=true"], "cluster.colocate must be false with run.max_staleness=1"),
    (
        ["cluster.colocate=true", "cluster.rollout_workers=3"],
        "cluster.rollout_workers must be cluster.learner_ranks = 2 with cluster.colocate=true, got 3",
    ),
    (["cluster.weight_sync=cuda_ipc"], "cluster.learner_gpus must be > 0 with cluster.weight_sync=cuda_ipc, got 0"),
    (
        ["learner.shard_ranks=3"],
        "learner.shard_ranks must divide cluster.learner_ranks = 2, got 3",
    ),
    (
        ["learner.backend=deepspeed", "model.dtype=float16"],
        "model.dtype must be float32 or bfloat16 with learner.backend=deepspeed, got float16",
    ),
    (
        ["learner.backend=deepspeed", "learner.grad_sync=last_row"],
        "learner.grad_sync must be every_row with learner.backend=deepspeed",
    ),
    (
        ["learner.backend=deepspeed", "learner.optimizer=adamw_8bit"],
        "learner.optimizer must be adamw with learner.backend=deepspeed",
    ),
    (
        ["objective.kl_reward_coef=0.1", "reference.placement=learner"],
        "reference.placement must be workers with objective.kl_reward_coef=0.1, got learner",
    ),
    (["reference.offload=true"], "reference.offload must be false with reference.placement=workers, got true"),
    (
        ["cluster.address=ray://head:10001"],
        "cluster.address must be auto or host:port, got 'ray://head:10001': Ray Client (ray://) cannot stream",
    ),
    (["--bogus"], "--bogus is no flag; settings are given without dashes, as rollout.slots=4; flags are --config-dir,"),
    (["--rollout.group_size", "8"], "--rollout.group_size is no flag; settings are given without dashes"),
    (["--config-dir", "/no/such/folder"], "--config-dir /no/such/folder is not a folder"),
]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"predictor": None}, "rollout.predictor must not be none"),
        ({"max_rows": 2.5}, "rollout.max_rows must be a whole number, got 2.5"),
        ({"prefix_tokens": "x"}, "rollout.prefix_tokens must be a whole number, got 'x'"),
        ({"top_p": "0.9"}, "rollout.top_p must be a number, got '0.9'"),
        ({"group_size": True}, "rollout.group_size must be a whole number, got True"),
    ],
)
def test_a_value_of_another_type_is_a_value_error_in_python(values, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        RolloutConfig(**values)


def test_values_that_say_the_same_are_taken():
    assert RolloutConfig(temperature=1, kv_budget_bytes=10**6).kv_budget_bytes == "1000000"


def test_cfg_job_prints_what_a_run_would_refuse_and_says_so(capsys):
    assert main(["--cfg", "job", "rollout.predictor=foo"]) == 2
    printed = capsys.readouterr()
    assert "predictor: foo" in printed.out and printed.err.startswith(
        "error: rollout.predictor must be one of none, bert, probe, got 'foo'"
    )


@pytest.mark.parametrize(("overrides", "message"), WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG])
def test_a_wrong_setting_is_one_line_and_exit_code_2(overrides, message, tmp_path, capsys):
    assert main([f"run.dir={tmp_path}/run", *overrides]) == 2
    output = capsys.readouterr()
    assert message in output.err and output.err.count("\n") == 1 and output.err.startswith("error: ")


def test_stop_strings_may_hold_anything_else():
    assert load_config(['rollout.stop_strings=["\\n\\n", "</a>", "a, b = c"]']).rollout.stop_strings == [
        "\\n\\n",
        "</a>",
        "a, b = c",
    ]
    assert load_config(["rollout.stop_strings=['\n\n']"]).rollout.stop_strings == ["\n\n"]


def test_a_context_shorter_than_the_models_positions_is_told():
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0],
        "long_factor": [2.0],
        "original_max_position_embeddings": 4096,
    }
    long = Qwen3Config(head_dim=128, max_position_embeddings=131072, rope_parameters=rope)
    assert context_of(long) == 4096
    (warning,) = context_warnings(long, context_of(long))
    assert "4096 of the model's 131072 tokens" in warning
    plain = Qwen3Config(max_position_embeddings=40960)
    assert context_warnings(plain, context_of(plain)) == []


def test_what_is_told_of_sampling_before_a_run():
    config = load_config(["rollout.bad_token_ids=[3,5]", "rollout.temperature=0.5"])
    tokenizer, generation = load_tokenizer(config.model), GenerationConfig(eos_token_id=3, temperature=1.0)
    assert sampling_warnings(config, tokenizer, generation) == [
        "the model's own generation settings are not used; to take them write rollout.temperature=1.0",
        "rollout.bad_token_ids forbids the stop ids [3]: no stop id is left",
    ]
    config.rollout.stop_token_ids = [7]
    assert sampling_warnings(config, tokenizer, GenerationConfig()) == [
        "rollout.bad_token_ids forbids the stop ids [3]: samples end at [7]"
    ]
    assert sampling_warnings(load_config([]), tokenizer, generation) == []
    assert setting_warnings(load_config(["model.lm_head_fp32=true"])) == [
        "set, but nothing reads it here: model.lm_head_fp32"
    ]
    unused = [
        "learner.zero_stage=3",
        "learner.lora_alpha=8",
        "objective.dynamic_sampling_rounds=2",
        "cluster.wait_for_nodes_s=2",
    ]
    names = "objective.dynamic_sampling_rounds, learner.zero_stage, learner.lora_alpha, cluster.wait_for_nodes_s"
    assert setting_warnings(load_config(unused)) == [f"set, but nothing reads it here: {names}"]
    assert setting_warnings(load_config(["model.lm_head_fp32=true", "model.dtype=bfloat16"])) == []


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["objective.kl=k2"], "nothing reads it here: objective.kl"),
        (["rollout.epsilon=0.2"], "nothing reads it here: rollout.epsilon"),
        (["data.source=reasoning_gym:products", 'data.split="train[:9]"'], "nothing reads it here: data.split"),
        (
            ["rollout.engine=vllm", "cluster.colocate=true", "learner.overlap=false"],
            "nothing reads it here: learner.overlap",
        ),
        (["run.epochs=3", "run.steps=4"], "nothing reads it here: run.epochs"),
        (["run.eval_prompts=0", "run.eval_temperature=0"], "run.eval_temperature"),
        (
            ["data.eval_source=null", "run.eval_prompts=9"],
            "run.eval_every=10 evaluates nothing: data.eval_source=FILE gives",
        ),
        (["learner.offload_optimizer=true"], "nothing reads it here: learner.offload_optimizer"),
        (
            ["cluster.reference_workers=2", "cluster.reference_gpus=1"],
            "cluster.reference_workers, cluster.reference_gpus",
        ),
        (["objective=cispo", "objective.clip_low=0.1"], "objective.clip_low"),
        (["rollout.slots=8", "rollout.kv_budget_tokens=4096"], "rollout.slots=8 is but the samples of a micro-group"),
    ],
)
def test_what_nothing_reads_is_told(overrides, said):
    assert any(said in warning for warning in setting_warnings(load_config(overrides)))


def test_offload_is_read_by_deepspeed_on_any_device():
    assert setting_warnings(load_config(["learner.backend=deepspeed", "learner.offload_optimizer=true"])) == []


def test_a_warm_up_counts_updates_not_steps():
    assert load_config(["run.steps=10", "objective.epochs=4", "learner.warmup_steps=40"]).learner.warmup_steps == 40
    with pytest.raises(ConfigError, match="learner.warmup_steps must be <= 40, the updates of 10 steps, got 41"):
        load_config(["run.steps=10", "objective.epochs=4", "learner.warmup_steps=41"])


@pytest.mark.parametrize("objective", ["default", "no_kl", "dapo", "gspo", "cispo", "dr_grpo", "rloo"])
def test_what_a_preset_sets_is_read(objective):
    assert setting_warnings(load_config([f"objective={objective}"])) == []


SHAPE = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
QWEN = Qwen3Config(**SHAPE)


def start_table_of(config, architecture=QWEN):
    """What is told before a run of such a model."""
    return dict(derived_table(config, architecture, total_steps=1, step=0, num_rows={"": 8}))


def test_rounded_kv_is_told_before_the_run_and_halves_the_bytes_of_a_token():
    config = load_config(
        ["rollout.kv_dtype=int8", "objective.importance=sequence_tis", "model.dtype=bfloat16", "rollout.page_size=16"]
    )
    (line,) = setting_warnings(config)
    assert (
        line.startswith("rollout.kv_dtype=int8: ")
        and "learner/logprob_diff_*" in line
        and "objective.mismatch_stop=0.05" in line
    )
    qwen = Qwen3Config(num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128)
    assert kv_bytes_per_token(qwen, "bfloat16") == 114_688
    assert kv_bytes_per_token(qwen, "bfloat16", "int8", 16) == 61_376  # 4,032 of them scales
    assert start_table_of(config, qwen)["KV of a token"] == "61,376 bytes (int8 with scales; 114,688 in bfloat16)"


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"schedule": "token_budget"}, 0),
        ({"schedule": "arrival"}, 0),
        ({"schedule": "infinite"}, 16),  # the paper's
        ({"schedule": "infinite", "predictor": "bert", "max_new_tokens": 10}, 9),
        ({"schedule": "infinite", "max_new_tokens": 2}, 0),  # too short for the probe to have seen a token
        ({"schedule": "infinite", "predictor": "none"}, 0),
        ({"schedule": "infinite", "prefix_tokens": 5}, 5),
    ],
)
def test_prefixes_are_the_papers_where_a_schedule_waits_for_predictions(settings, tokens):
    assert RolloutConfig(**settings).num_prefix_tokens == tokens


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ([], "probe, then every 32 running steps; learns from every finished sample"),
        (
            ["rollout.schedule=sjf"],
            "probe, after 16 tokens, then every 32 running steps; learns from every finished sample",
        ),
        (["rollout.schedule=arrival"], "none: probe is not read by rollout.schedule=arrival"),
        (["rollout.predictor=none"], "none"),
        (
            ["rollout.schedule=lpt", "rollout.predictor=bert"],
            "bert, after 16 tokens, frozen; lengths: all equal until 64 groups have been sampled, which train it",
        ),
    ],
)
def test_which_predictor_is_used_is_told_before_the_run(overrides, text):
    config = load_config(overrides)
    assert start_table_of(config)["length predictor"] == text
    assert config.rollout.probes == text.startswith("probe")


@pytest.mark.parametrize(
    ("logging", "sent"),
    [
        (["logging.wandb=offline"], "nothing; W&B is offline, in wandb of the run folder"),
        (["logging.wandb=disabled"], "nothing"),
        (["logging.wandb=online"], "numbers and settings, to W&B, online"),
        (
            ["logging.mlflow=http://host:5000", "logging.upload_completions=true"],
            "numbers, settings and samples as text, to MLflow, http://host:5000",
        ),
        (
            ["logging.wandb=online", "reward.functions=[{name: judge, url: 'http://host/v1', model: m, prompt: a.md}]"],
            "numbers and settings, to W&B, online; prompts and responses, to the judge m at http://host/v1",
        ),
    ],
)
def test_who_gets_what_of_a_run_is_told(logging, sent, monkeypatch):
    monkeypatch.setattr(start_table, "check_trackers", lambda config: config.logging.wandb)
    assert start_table_of(load_config(logging))["sent away"] == sent


@pytest.mark.parametrize("gpus", [0, 1])
def test_a_model_without_kernels_is_told_of_at_start(gpus):
    config = load_config([f"cluster.rollout_gpus={gpus}"])
    said = start_table_of(config, Qwen3MoeConfig(**SHAPE))["schedule"]
    assert said.endswith("own modules: there are no kernels for qwen3_moe")
    assert "modules" not in start_table_of(config)["schedule"]


def test_none_unsets_what_may_be_unset_as_messages_say():
    config = load_config(["data.eval_source=none", "rollout.max_rows=none", "rollout.predictor=none"])
    assert (config.data.eval_source, config.rollout.max_rows, config.rollout.predictor) == (None, None, "none")


def test_value_with_equals_sign_works_when_quoted():
    assert load_config(['data.instruction="a = b, c"']).data.instruction == "a = b, c"


@pytest.mark.parametrize("written", [".enable_thinking=false", "={enable_thinking: false}"])
def test_dictionary_settings_take_new_keys_without_a_plus(written):
    assert load_config([f"data.chat_template_kwargs{written}"]).data.chat_template_kwargs == {"enable_thinking": False}


def write_experiment(folder, text, name="mine"):
    """One's own experiment below a folder; its path."""
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, errors="surrogateescape")
    return path


OWN = "# @package _global_\nmodel: {path: x}\ndata: {source: gsm8k}\n"


def test_a_users_own_folder_adds_choices(tmp_path):
    write_experiment(tmp_path, OWN + "run: {name: mine}\n")
    (tmp_path / "rollout").mkdir()
    (tmp_path / "rollout" / "wide.yaml").write_text("slots: 16\n")
    config = load_config(["+experiment=mine", "rollout=wide", "reward=gsm8k"], str(tmp_path))
    assert (config.run.name, config.rollout.slots) == ("mine", 16)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            OWN + "rollout: {grop_size: 8}",
            "rollout.grop_size is not a setting; did you mean rollout.group_size? (in {})",
        ),
        (
            OWN + "rollout: {slots: many}",
            "rollout.slots must be a whole number, got 'many'; the default is null (in {})",
        ),
        (OWN.replace("# @package _global_\n", ""), "{}: the first line must be `# @package _global_`"),
        (
            OWN + "rollout: {temperature: 20}",
            "rollout.temperature must be <= 10, got 20.0; the nearest that works is 10; {} sets",
        ),
        (OWN + "num_generations: 8", "--cfg job prints all) (in {})"),
        (
            OWN + "rolout: {group_size: 8}",
            "rolout.group_size is not a setting; did you mean rollout.group_size? (in {})",
        ),
        (
            OWN + "actor_rollout_ref: {rollout: {n: 8}}",
            "actor_rollout_ref.rollout.n is not a setting; sections are",
        ),
        (OWN + "rollout:", "rollout is empty (in {}): write a setting below it, or leave it out"),
        (OWN + "rollout: 8", "rollout must be a section of settings, got 8 (in {})"),
        (OWN + "reward: {functions: kk}", "reward.functions must be a list, got 'kk' (in {})"),
        ("- a", "{} must be sections of settings, got a list"),
        (OWN + "defaults: [{model: kk_tiny}]", "{}: its defaults must say `override /model: kk_tiny`, got `model: kk"),
        (OWN + "defaults: [{override model: kk_tiny}]", "must say `override /model: kk_tiny`, got `override model: kk"),
        (OWN + "defaults: [{override /model: kk}]", "{}: override /model: kk: there is no such choice; there are"),
        (OWN + "run: {name: \udce4}", "{} is not UTF-8"),
        (OWN + "rollout:\n slots: 3\n  x: 4", 'mapping values are not allowed here in "{}", line 6'),
    ],
)
def test_a_mistake_in_ones_own_file_names_the_file(text, said, tmp_path):
    path = write_experiment(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        load_config(["+experiment=mine", "reward=gsm8k"], str(tmp_path))
    assert said.format(path) in str(refused.value)


def test_a_mistake_is_blamed_on_the_file_that_was_chosen(tmp_path):
    for name in ("mine", "other"):
        write_experiment(tmp_path, OWN + "rollout: {grop_size: 8}", name)
    with pytest.raises(ConfigError, match=r"group_size\? \(in [^,]*mine.yaml\)$"):
        load_config(["+experiment=mine", "reward=gsm8k"], str(tmp_path))


def test_a_file_of_ones_own_is_not_passed_over_for_a_shipped_one_of_its_name(tmp_path):
    path = write_experiment(tmp_path, OWN + "run: {steps: 2}", "kk_tiny")
    said = "is never read: {} is a shipped choice; give it another name"
    with pytest.raises(ConfigError, match=f"^{path} {said.format('experiment=kk_tiny')}$"):
        load_config([], str(tmp_path))
    write_experiment(tmp_path, OWN)
    (tmp_path / "reward").mkdir()
    (tmp_path / "reward" / "kk.yaml").write_text((ROOT / "configs" / "reward" / "kk.yaml").read_text())
    assert load_config(["+experiment=mine", "reward=kk"], str(tmp_path)).reward.functions[0].name == "kk"
    (tmp_path / "reward" / "kk.yaml").write_text("functions: [gsm8k]\n")
    with pytest.raises(ConfigError, match=said.format("reward=kk")):
        load_config(["+experiment=mine", "reward=kk"], str(tmp_path))


def test_a_name_that_values_refer_to_is_ones_own(tmp_path):
    text = OWN + "size: 4\nsteps: {few: 3}\nrollout: {group_size: '${size}'}\nrun: {steps: '${steps.few}'}"
    write_experiment(tmp_path, text)
    config = load_config(["+experiment=mine", "reward=gsm8k"], str(tmp_path))
    assert (config.rollout.group_size, config.run.steps) == (4, 3)


def test_what_the_experiment_that_another_is_made_of_sets_is_its_own(tmp_path):
    parent = write_experiment(tmp_path, OWN + "rollout: {temperature: 20}")
    text = "# @package _global_\ndefaults: [mine, {override /rollout: paper}]\nrun: {name: child}"
    write_experiment(tmp_path, text, "mine_paper")
    with pytest.raises(ConfigError, match=f"the nearest that works is 10; {parent} sets rollout.temperature$"):
        load_config(["+experiment=mine_paper", "reward=gsm8k"], str(tmp_path))
    with pytest.raises(ConfigError, match=r"kk_qwen3_8b.yaml sets run.epochs, .*|got 2") as refused:
        load_config(["+experiment=kk_qwen3_8b_paper", "cluster.learner_ranks=3", "learner.shard_ranks=2"])
    assert "shard_ranks must divide" in str(refused.value)


def test_what_a_shipped_file_sets_is_not_blamed_on_the_command_line():
    with pytest.raises(ConfigError, match=r"got arrival: .*; configs/rollout/paper.yaml sets rollout.predictor$"):
        load_config(["+experiment=math_qwen3_8b", "rollout=paper", "rollout.schedule=arrival"])


def test_a_multirun_is_a_run_for_every_value():
    assert sweep(["rollout.slots=1,2", "rollout=paper,default", "run.seed=3"], None) == [
        [f"rollout.slots={slots}", f"rollout={choice}", "run.seed=3"]
        for slots in (1, 2)
        for choice in ("paper", "default")
    ]
    with pytest.raises(ConfigError, match="rollout.slots=1,2 gives several values: -m runs one after another"):
        load_config(["rollout.slots=1,2"])


@pytest.mark.parametrize(
    ("seeds", "code", "begun", "failed"),
    [
        ("1,2,3", 0, "123", []),
        ("7,1,8", 7, "718", ["run 1 of 3 failed (exit 7): run.seed=7", "run 3 of 3 failed (exit 8): run.seed=8"]),
        ("7,0,1", 130, "70", ["run 1 of 3 failed (exit 7): run.seed=7"]),  # Ctrl-C in the second
    ],
)
def test_a_multirun_goes_on_after_a_run_that_fails_and_ends_with_ctrl_c(
    tmp_path, monkeypatch, capfd, seeds, code, begun, failed
):
    interpreter = tmp_path / "python"
    interpreter.write_text(
        "#!/bin/sh\n"
        "for word; do case $word in run.seed=*) seed=${word#*=};; run.dir=*) folder=${word#*=};; esac; done\n"
        f"echo $seed $folder >> {tmp_path}/begun\n"
        "case $seed in 0) kill -INT $PPID; exit 130;; 7|8) exit $seed;; esac\n"
    )
    interpreter.chmod(0o755)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    monkeypatch.setattr(sys, "executable", str(interpreter))
    try:
        assert main(["-m", f"run.seed={seeds}", f"run.dir={tmp_path}/out"]) == code
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    lines = (tmp_path / "begun").read_text().splitlines()
    assert lines == [f"{seed} {tmp_path}/out/{number}" for number, seed in enumerate(begun)]
    assert capfd.readouterr().err.splitlines() == failed


def test_paths_become_absolute_against_the_current_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model").mkdir()
    overrides = [
        "run.dir=out",
        "data.source=rows.jsonl",
        "model.path=my_model",
        "reward.functions=[{name: rewards.py:score}]",
    ]
    config = load_config(overrides)
    assert config.run.dir == str(tmp_path / "out") and config.data.source == str(tmp_path / "rows.jsonl")
    assert (
        config.model.path == str(tmp_path / "my_model")
        and config.reward.functions[0].name == f"{tmp_path}/rewards.py:score"
    )
    ours = ["environment.factory=games.py:Game", "environment.tools=['~/tools.py:look']", "rollout.preemption=./parked"]
    config = load_config([*ours, "rollout.vllm_python='~/vllm/bin/python'"])
    assert config.environment.factory == f"{tmp_path}/games.py:Game"
    assert config.environment.tools == [f"{Path.home()}/tools.py:look"]
    assert config.rollout.park_folder == f"{tmp_path}/parked"
    assert config.rollout.vllm_python == f"{Path.home()}/vllm/bin/python"
    config = load_config(["environment.factory='train.py --name \"a b\"'"])
    assert config.environment.script == [f"{tmp_path}/train.py", "--name", "a b"]
    assert list(tmp_path.iterdir()) == [tmp_path / "my_model"], "composing writes nothing"


def test_functions_and_sources_are_given_by_name_alone_on_the_command_line_and_in_yaml(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_experiment(
        tmp_path / "mine",
        "# @package _global_\ndefaults: [{override /model: kk_tiny}, {override /objective: no_kl}]\n"
        "reward: {functions: [kk, rewards.py:short]}\nlearner: {max_tokens_per_micro_batch: 4096}\n"
        "data: {sources: [kk_tiny, {source: sums.jsonl, weight: 2, reward: [short, 'other.py:f']}]}\n",
        "two",
    )
    alone = load_config(["reward.functions=[kk, rewards.py:short]"])
    assert alone.reward.functions == [
        RewardFunctionConfig(name="kk"),
        RewardFunctionConfig(name=f"{tmp_path}/rewards.py:short"),
    ]
    config = load_config(["+experiment=two"], "mine")
    assert [entry.name for entry in config.reward.functions[2:]] == [f"{tmp_path}/other.py:f"]
    assert list(config.data.parts) == ["kk_tiny", "sums"] and config.data.parts["kk_tiny"].held_out == "kk_tiny"
    assert config.data.parts["sums"].source == str(tmp_path / "sums.jsonl")
    assert [config.rewards_of(name) for name in config.data.parts] == [[0, 1], [1, 2]]


@pytest.mark.parametrize(
    ("functions", "rewards", "scored_by"),
    [
        ("[]", ["gsm8k", "/x/my.py:gsm8k"], [["gsm8k"], ["/x/my.py:gsm8k"]]),
        ("[]", ["/x/my.py:gsm8k", "gsm8k"], [["/x/my.py:gsm8k"], ["gsm8k"]]),
        ("[/x/my.py:gsm8k]", ["gsm8k", "/x/my.py:gsm8k"], [["gsm8k"], ["/x/my.py:gsm8k"]]),
        ("[/x/a.py:score, /x/b.py:f]", ["score", "f"], [["/x/a.py:score"], ["/x/b.py:f"]]),
        ("[]", ["score", "/x/a.py:score"], [["/x/a.py:score"], ["/x/a.py:score"]]),
    ],
)
def test_a_source_is_scored_by_what_its_reward_names_and_by_nothing_else(functions, rewards, scored_by):
    sources = ", ".join(
        f"{{source: {name}.jsonl, reward: '{reward}'}}" for name, reward in zip("ab", rewards, strict=True)
    )
    config = load_config(["data.source=''", f"data.sources=[{sources}]", f"reward.functions={functions}"])
    for again in (config, dataclasses.replace(config)):  # full names mean themselves
        found = [[again.reward.functions[index].name for index in again.rewards_of(name)] for name in "ab"]
        assert found == scored_by


def test_a_folder_that_is_called_like_a_data_set_is_not_taken_for_it(tmp_path, monkeypatch):
    assert set(DATA_NAMES) == {*HUB_NAMES, *SHIPPED}
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kk_tiny").mkdir()
    assert load_config([]).data.source == "kk_tiny"
    assert load_config(["data.source=./kk_tiny"]).data.source == str(tmp_path / "kk_tiny")


def test_every_setting_is_read_somewhere():
    """By the name of its section, as in `config.rollout.slots`, but for a few."""
    package = ROOT / "infsample_rl"
    trees = [ast.parse(path.read_text()) for path in package.rglob("*.py") if path.parent != package / "config"]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    read = {(ast.unparse(node.value).rpartition(".")[2].strip("_"), node.attr) for node in nodes}
    settings = {(section, spec.name) for section, kind in SECTIONS.items() for spec in dataclasses.fields(kind)}
    by_properties = {("run", "deterministic"), ("data", "eval_source"), ("learner", "lora_publish")}
    by_properties |= {("objective", "distill_top_k")}
    alone = {
        "rollout": "prefix_tokens kv_budget_tokens preemption",
        "environment": "tools max_turns straggler_s",
    }
    by_another_name = {(section, name) for section, names in alone.items() for name in names.split()}
    assert settings - read == by_properties | by_another_name


def test_config_error_is_a_value_error_and_sections_are_the_schema():
    assert issubclass(ConfigError, ValueError)
    assert list(SECTIONS) == [spec.name for spec in dataclasses.fields(Config)]


@pytest.mark.parametrize("resume", ["step_000010", "/backup/step_000010"])
def test_a_checkpoint_outside_a_run_folder_needs_run_dir(resume, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step_000010").mkdir()
    known = "auto, never, or a checkpoint RUN/checkpoints/step_N"
    with pytest.raises(ConfigError, match=f"^run.resume must be {known}, got '{resume}'; .* give run.dir too$"):
        load_config([f"run.resume={resume}"])
    assert load_config([f"run.resume={resume}", f"run.dir={tmp_path}"]).run.dir == str(tmp_path)
    superseded = tmp_path / "checkpoints" / "superseded" / "step_000003"
    assert load_config([f"run.resume={superseded}"]).run.dir == str(tmp_path)

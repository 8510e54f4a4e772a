"""KV memory that lies idle is told, and no shipped experiment leaves it so without saying why."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, Qwen3Config

from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import experiments
from infsample_rl.plan.devices import DEVICES
from infsample_rl.plan.limits import idle_memory, largest_pool
from infsample_rl.plan.model_outline import ModelOutline
from infsample_rl.plan.processes import device_of, plan_role

QWEN3 = {"vocab_size": 151936, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
SHAPES = {  # of the models that experiments name: no hub is asked
    "qwen3_1.7b": Qwen3Config(
        **QWEN3, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16
    ),
    "qwen3_8b": Qwen3Config(
        **QWEN3, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32
    ),
    "smollm2": LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
}


def idle(model_folder, *settings, model=None):
    config = load_config([*settings, *([f"model.path={model_folder}"] if model_folder else [])])
    model = model or ModelOutline.of(config)
    plan = plan_role(config, model, "rollout")
    most = largest_pool(config, model, plan, device_of(config, "rollout"))
    return idle_memory(config, model, plan, most)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {name: tmp_path_factory.mktemp("shapes") / name for name in SHAPES}
    for name, folder in made.items():
        architecture = SHAPES[name]
        architecture.architectures = [type(architecture).__name__.replace("Config", "ForCausalLM")]
        architecture.save_pretrained(folder)
    return made


OTHER_DATA = ("gsm8k_qwen3", "kk_qwen3")  # of the models and settings that math_qwen3 has


@pytest.mark.parametrize(
    "experiment",
    [pytest.param(name, marks=pytest.mark.slow if name.startswith(OTHER_DATA) else ()) for name in experiments()],
)
def test_every_shipped_experiment_uses_the_memory_that_is_free_or_is_the_papers(experiment, folders):
    folder = next((folders[name] for name in SHAPES if name in experiment), None)
    own = [f"+experiment={experiment}", *([f"model.path={folder}"] if folder else [])]
    config = load_config(own)
    model, slots = ModelOutline.of(config), config.rollout.slots
    for device in DEVICES if config.cluster.rollout_gpus else [None]:
        found = idle(None, *own, *([f"cluster.device_type={device}"] if device else []), model=model)
        if experiment.endswith("_paper"):
            assert f"rows limited by rollout.slots={slots}; set rollout.slots=" in found, "told, not silent"
        else:
            assert found is None, (device, found)


@pytest.mark.parametrize(
    ("settings", "limit", "change"),
    [
        (["rollout.schedule=arrival"], "rollout.slots=4", "rollout.slots=128"),
        (["rollout.kv_budget_bytes=1GB"], "rollout.kv_budget_bytes=1GB", "rollout.kv_budget_bytes=auto"),
        (["rollout.kv_budget_tokens=9000"], "rollout.kv_budget_tokens=9000", "rollout.kv_budget_bytes=auto"),
        (["rollout.kv_budget_bytes=auto", "rollout.max_rows=8"], "rollout.max_rows=8", "rollout.max_rows=128"),
        (
            ["rollout.kv_budget_bytes=auto", "rollout.prompts_at_once=1"],
            "rollout.prompts_at_once=1",
            "rollout.prompts_at_once=auto",
        ),
        (["rollout.slots=4"], "rollout.slots=4", "rollout.slots=null"),
        (
            ["rollout.schedule=arrival", "rollout.kv_budget_bytes=auto", "rollout.slots=4"],
            "rollout.slots=4",
            "rollout.slots=null",
        ),
        (["rollout.schedule=arrival", "rollout.kv_budget_bytes=auto"], None, None),
        ([], None, None),
    ],
)
def test_what_limits_the_rows_is_named_with_what_to_set_and_that_fills_it(settings, limit, change, folders):
    own = ["+experiment=gsm8k_qwen3_1.7b", "cluster.device_type=h100", "rollout.kv_budget_bytes=null"]
    found = idle(folders["qwen3_1.7b"], *own, *settings)
    if limit is None:
        assert found is None
        return
    assert f"rows limited by {limit}; set {change}" in found
    reset = (
        [] if change.startswith("rollout.slots") else ["rollout.kv_budget_tokens=null", "rollout.kv_budget_bytes=auto"]
    )
    assert idle(folders["qwen3_1.7b"], *own, *settings, *reset, change) is None

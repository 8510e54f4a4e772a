"""Settings that are gone are refused with what replaces them, and old run folders are read without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from infsample_rl.commands.run_settings import load_run_config
from infsample_rl.config.loading import load_config
from infsample_rl.config.overrides import SECTIONS, ConfigError, setting_names
from infsample_rl.config.removed import REMOVED

OLD_RUN = Path(__file__).resolve().parents[1] / "data" / "report_run" / "config.yaml"


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_setting_is_refused_in_one_line_that_says_what_to_do(name):
    assert name not in setting_names()
    with pytest.raises(ConfigError) as refused:
        load_config([f"{name}=1"])
    assert str(refused.value) == f"{name} is gone: {REMOVED[name].instead}"
    told = re.findall(rf"\b(?:{'|'.join(SECTIONS)})\.(?!json|html)\w+", REMOVED[name].instead)
    assert set(told) <= set(setting_names())


def test_a_removed_setting_in_a_folder_of_the_users_own_is_refused_alike(tmp_path):
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / "mine.yaml").write_text("warmup_ratio: 0.1\n")
    with pytest.raises(ConfigError, match="^learner.warmup_ratio is gone: set learner.warmup_steps"):
        load_config(["learner=mine"], str(tmp_path))


def test_an_old_run_is_read_without_what_is_gone_unless_it_was_changed(tmp_path):
    settings = yaml.safe_load(OLD_RUN.read_text())
    assert {"dashboard", "rollout_cpus"} < set(settings["cluster"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    config = load_run_config(tmp_path, [])
    assert (config.run.seed, config.rollout.slots) == (settings["run"]["seed"], settings["rollout"]["slots"])
    settings["objective"] |= {"kl_in_reward": True, "kl_reward_coef": 0.05}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    assert load_run_config(tmp_path, []).objective.kl_in_reward  # its coefficient says so
    settings["data"]["size"] = 7
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(settings))
    with pytest.raises(ValueError) as refused:
        load_run_config(tmp_path, [])
    assert str(refused.value).endswith("data.size=7: data.size is gone: set data.generator_kwargs.size")

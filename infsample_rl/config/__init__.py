"""Every setting, its bounds and its meaning: `schema` holds a run's, the other files a section each."""

from infsample_rl.config.cluster import ClusterConfig
from infsample_rl.config.data import DATA_NAMES, DataConfig, DataSourceConfig
from infsample_rl.config.learner import LearnerConfig, ObjectiveConfig, ReferenceConfig
from infsample_rl.config.reward import RewardConfig, RewardFunctionConfig
from infsample_rl.config.rollout import RolloutConfig
from infsample_rl.config.run import ALL_PROBLEMS, DTYPES, LoggingConfig, ModelConfig, RunConfig
from infsample_rl.config.schema import Config

__all__ = [
    "ALL_PROBLEMS",
    "DATA_NAMES",
    "DTYPES",
    "ClusterConfig",
    "Config",
    "DataConfig",
    "DataSourceConfig",
    "LearnerConfig",
    "LoggingConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ReferenceConfig",
    "RewardConfig",
    "RewardFunctionConfig",
    "RolloutConfig",
    "RunConfig",
]

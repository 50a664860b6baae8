"""Who samples: the TorchRL policy that evicts, records and scores, and the environment that asks and pays."""

from smdlib.rollout.actor import SparseActor
from smdlib.rollout.conversations import DatasetEnv, NextMessage
from smdlib.rollout.environment import dataset_env
from smdlib.rollout.rewards import RewardError, RewardFunction
from smdlib.rollout.weights import policy_versions, push_weights

__all__ = [
    "DatasetEnv",
    "NextMessage",
    "RewardError",
    "RewardFunction",
    "SparseActor",
    "dataset_env",
    "policy_versions",
    "push_weights",
]

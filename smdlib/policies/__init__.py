"""What to evict: policies, their registry, budgets, and the selection of keys by score.

This package knows tensors only, so that a policy can be written and tested on its own.

Example:
    >>> from smdlib.policies import available_policies, make_policy
    >>> make_policy("snapkv", window=16)
    SnapKVPolicy(window=16, kernel_size=7, pooling='max')
"""

from .adaptive import AdaptiveHeadAllocation, ScoreAllocation
from .budget import Allocation, PyramidAllocation, UniformAllocation, resolve_budget
from .combined import Combined
from .errors import PolicyError
from .h2o import H2OPolicy
from .keydiff import KeyDiffPolicy
from .knorm import KnormPolicy
from .lagkv import LagKVPolicy
from .layers import LayerAllocation
from .protected import Protected
from .protocol import EvictionPolicy, needs_tokens, query_window, tracks_attention
from .random_policy import RandomPolicy
from .recent import RecentPolicy
from .registry import available_policies, make_policy, register_policy
from .rkv import RKVPolicy
from .select import checked_scores, evict_indices, keep_indices, worst_indices
from .snapkv import SnapKVPolicy
from .steps import StepAllocation, StepwiseAllocation
from .streaming import StreamingPolicy
from .tova import TOVAPolicy
from .view import CacheView

__all__ = [
    "AdaptiveHeadAllocation",
    "Allocation",
    "CacheView",
    "Combined",
    "EvictionPolicy",
    "H2OPolicy",
    "KeyDiffPolicy",
    "KnormPolicy",
    "LagKVPolicy",
    "LayerAllocation",
    "PolicyError",
    "Protected",
    "PyramidAllocation",
    "RKVPolicy",
    "RandomPolicy",
    "RecentPolicy",
    "ScoreAllocation",
    "SnapKVPolicy",
    "StepAllocation",
    "StepwiseAllocation",
    "StreamingPolicy",
    "TOVAPolicy",
    "UniformAllocation",
    "available_policies",
    "checked_scores",
    "evict_indices",
    "keep_indices",
    "make_policy",
    "needs_tokens",
    "query_window",
    "register_policy",
    "resolve_budget",
    "tracks_attention",
    "worst_indices",
]

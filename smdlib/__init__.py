"""Shadow Mask Distillation: sparse-cache rollouts, replayed exactly in the learner."""

from smdlib.cache import CompressedCache, EvictionRecorder, UnsupportedModelError
from smdlib.losses import DenseToSparseKL, GRPOLoss, SMDLoss, group_advantage
from smdlib.masks import NEVER, MaskedAttentionAdapter, ShadowMask, ShadowMaskRecorder
from smdlib.policies import (
    AdaptiveHeadAllocation,
    CacheView,
    Combined,
    EvictionPolicy,
    LayerAllocation,
    PolicyError,
    Protected,
    PyramidAllocation,
    StepAllocation,
    UniformAllocation,
    available_policies,
    make_policy,
    register_policy,
)
from smdlib.rollout import SparseActor

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "AdaptiveHeadAllocation",
    "CacheView",
    "Combined",
    "CompressedCache",
    "DenseToSparseKL",
    "EvictionPolicy",
    "EvictionRecorder",
    "GRPOLoss",
    "LayerAllocation",
    "MaskedAttentionAdapter",
    "PolicyError",
    "Protected",
    "PyramidAllocation",
    "SMDLoss",
    "ShadowMask",
    "ShadowMaskRecorder",
    "SparseActor",
    "StepAllocation",
    "UniformAllocation",
    "UnsupportedModelError",
    "available_policies",
    "group_advantage",
    "make_policy",
    "register_policy",
]

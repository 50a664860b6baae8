"""Shadow Mask Distillation: sparse-cache rollouts, replayed exactly in the learner."""

from smdlib.cache import CompressedCache, EvictionRecorder, UnsupportedModelError
from smdlib.masks import NEVER, MaskedAttentionAdapter, ShadowMask, ShadowMaskRecorder
from smdlib.policies import (
    CacheView,
    EvictionPolicy,
    PolicyError,
    PyramidAllocation,
    UniformAllocation,
    available_policies,
    make_policy,
    register_policy,
)

__version__ = "0.1.0"

__all__ = [
    "NEVER",
    "CacheView",
    "CompressedCache",
    "EvictionPolicy",
    "EvictionRecorder",
    "MaskedAttentionAdapter",
    "PolicyError",
    "PyramidAllocation",
    "ShadowMask",
    "ShadowMaskRecorder",
    "UniformAllocation",
    "UnsupportedModelError",
    "available_policies",
    "make_policy",
    "register_policy",
]

"""What a rollout and its update will take: bytes from a configuration, before any weight is loaded.

Example:
    >>> from transformers import LlamaConfig
    >>> from smdlib.planning import plan_memory
    >>> plan = plan_memory(LlamaConfig(), prompt=1024, response=256, group=8, budget=0.5)
    >>> f"{plan.kv_sparse / plan.kv_dense:.0%}"
    '60%'
"""

from smdlib.planning.memory import plan_memory
from smdlib.planning.plan import MemoryPlan, PlanLine, human_bytes

__all__ = ["MemoryPlan", "PlanLine", "human_bytes", "plan_memory"]

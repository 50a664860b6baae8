"""Who samples: the TorchRL policy that evicts, records and scores."""

from smdlib.rollout.actor import SparseActor

__all__ = [
    "SparseActor",
]

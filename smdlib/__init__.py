"""Shadow Mask Distillation: sparse-cache rollouts, replayed exactly in the learner."""

__version__ = "0.1.0"

__all__ = ["__version__"]

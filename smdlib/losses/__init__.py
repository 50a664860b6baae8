"""What is learned: policy optimisation and distillation on the shadow-masked policy."""

from smdlib.losses.advantage import group_advantage
from smdlib.losses.aggregate import Aggregation, ConstantMean, SequenceMean, TokenMean
from smdlib.losses.distill import DenseToSparseKL, DenseToSparseKLOutput
from smdlib.losses.grpo import GRPOLoss, GRPOLossOutput
from smdlib.losses.ratio import Ratio, SequenceRatio, TokenRatio
from smdlib.losses.smd import SMDLoss, SMDLossOutput
from smdlib.losses.surrogate import CISPOSurrogate, ClippedSurrogate, Surrogate, SurrogateValue
from smdlib.losses.tokens import TokenKeys

__all__ = [
    "Aggregation",
    "CISPOSurrogate",
    "ClippedSurrogate",
    "ConstantMean",
    "DenseToSparseKL",
    "DenseToSparseKLOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "Ratio",
    "SMDLoss",
    "SMDLossOutput",
    "SequenceMean",
    "SequenceRatio",
    "Surrogate",
    "SurrogateValue",
    "TokenKeys",
    "TokenMean",
    "TokenRatio",
    "group_advantage",
]

"""What is learned: policy optimisation and distillation on the shadow-masked policy."""

from smdlib.losses.advantage import group_advantage
from smdlib.losses.aggregate import Aggregation, ConstantMean, SequenceMean, TokenMean
from smdlib.losses.base import TokenLoss
from smdlib.losses.corrections import Correction, CorrectionValue, MaskedIS, SparseRLCorrection, TruncatedIS, Unweighted
from smdlib.losses.distill import DenseToSparseKL, DenseToSparseKLOutput
from smdlib.losses.dpo import OnlineDPOLoss, OnlineDPOLossOutput
from smdlib.losses.fused_head import HeadTransform
from smdlib.losses.grpo import GRPOLoss, GRPOLossOutput
from smdlib.losses.linear import TokenScores, linear_kl, linear_log_probs, linear_scores
from smdlib.losses.metrics import acceptance, effective_sample_size, mismatch_k1, mismatch_k3, zero_variance_groups
from smdlib.losses.presets import cispo, dapo, dr_grpo, grpo, gspo
from smdlib.losses.ratio import Ratio, SequenceRatio, TokenRatio
from smdlib.losses.smd import SMDLoss, SMDLossOutput
from smdlib.losses.surrogate import CISPOSurrogate, ClippedSurrogate, Surrogate, SurrogateValue
from smdlib.losses.tokens import TokenKeys

__all__ = [
    "Aggregation",
    "CISPOSurrogate",
    "ClippedSurrogate",
    "ConstantMean",
    "Correction",
    "CorrectionValue",
    "DenseToSparseKL",
    "DenseToSparseKLOutput",
    "GRPOLoss",
    "GRPOLossOutput",
    "HeadTransform",
    "MaskedIS",
    "OnlineDPOLoss",
    "OnlineDPOLossOutput",
    "Ratio",
    "SMDLoss",
    "SMDLossOutput",
    "SequenceMean",
    "SequenceRatio",
    "SparseRLCorrection",
    "Surrogate",
    "SurrogateValue",
    "TokenKeys",
    "TokenLoss",
    "TokenMean",
    "TokenRatio",
    "TokenScores",
    "TruncatedIS",
    "Unweighted",
    "acceptance",
    "cispo",
    "dapo",
    "dr_grpo",
    "effective_sample_size",
    "group_advantage",
    "grpo",
    "gspo",
    "linear_kl",
    "linear_log_probs",
    "linear_scores",
    "mismatch_k1",
    "mismatch_k3",
    "zero_variance_groups",
]

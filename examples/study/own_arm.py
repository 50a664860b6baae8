"""An arm of your own: ``python -m examples.study try examples/study/own_arm.py masked_is`` runs it for one seed.

Tokens whose ratio of dense policy to sampler lies outside [0.5, 2] are left out, the others weighted by it.
"""

from examples.study.arms import arm
from smdlib import GRPOLoss
from smdlib.losses import MaskedIS


@arm("masked_is", old=True)
def masked_is(actor, coeff):
    """Naive, with importance weights where they are moderate, and nothing elsewhere."""
    return GRPOLoss(actor, dense=True, correction=MaskedIS(0.5, 2.0))

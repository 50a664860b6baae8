"""For tests and examples, yours too: checks of a policy and of a model, a tiny model, and a tokenizer of bytes.

Example:
    >>> from smdlib.testing import check_policy
    >>> check_policy("streaming").gap < 1e-4
    True
"""

from smdlib.testing.check import PolicyReport, check_policy
from smdlib.testing.models import tiny_model
from smdlib.testing.parity import Parity, check_parity
from smdlib.testing.tokenizer import byte_tokenizer

__all__ = [
    "Parity",
    "PolicyReport",
    "byte_tokenizer",
    "check_parity",
    "check_policy",
    "tiny_model",
]

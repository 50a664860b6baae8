"""What was seen: the record of evictions, and attention that replays it."""

from smdlib.masks.adapter import MaskedAttentionAdapter
from smdlib.masks.attention import attention_mass
from smdlib.masks.files import ShadowMaskFileError
from smdlib.masks.head import LanguageHead
from smdlib.masks.plot import plot_retained_keys
from smdlib.masks.recorder import ShadowMaskRecorder
from smdlib.masks.shadow import NEVER, ShadowMask
from smdlib.masks.shared import View

__all__ = [
    "NEVER",
    "LanguageHead",
    "MaskedAttentionAdapter",
    "ShadowMask",
    "ShadowMaskFileError",
    "ShadowMaskRecorder",
    "View",
    "attention_mass",
    "plot_retained_keys",
]

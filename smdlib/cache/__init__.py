"""Where keys live: a transformers cache on fixed slots."""

from smdlib.cache.compressed import CompressedCache
from smdlib.cache.settings import EvictionRecorder
from smdlib.cache.support import UnsupportedModelError, check_supported

__all__ = [
    "CompressedCache",
    "EvictionRecorder",
    "UnsupportedModelError",
    "check_supported",
]

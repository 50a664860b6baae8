"""The tokenizer that users have too, under the name that the tests know."""

from smdlib.testing.tokenizer import BOS, EOS, PAD, VOCABULARY, byte_tokenizer

__all__ = ["BOS", "EOS", "PAD", "VOCABULARY", "byte_tokenizer"]

"""What was measured, in plain words."""

from __future__ import annotations

from smdlib.testing import Parity


def verdict(parity: Parity, dtype: str) -> tuple[bool, str]:
    """Say whether the promise holds.

    Args:
        parity: What was measured.
        dtype: Of the weights.

    Returns:
        Whether it holds and was put to the test, and the words.
    """
    if not parity.holds:
        words = (
            f"It does NOT hold: the learner's log-probs differ from the sampler's by up to {parity.gap:.2g} nats, more "
            f"than the tolerance of {parity.tolerance:g}. Do not train on these samples."
        )
        if dtype in ("bfloat16", "float16"):
            words += f" {dtype} rounds: with --dtype float32 you see whether it is more than rounding."
        return False, words
    if parity.evicted == 0:
        return False, (
            "This proves nothing: no key was evicted, so there was nothing to record. The budget is as large as the "
            "prompt, or larger; choose a smaller one or a longer prompt."
        )
    if not parity.conclusive:
        return False, (
            f"This proves little: {parity.evicted:.0%} of the keys were evicted, but a learner with every key is off "
            f"by {parity.dense_gap:.2g} nats only, within the tolerance of {parity.tolerance:g}. Choose a smaller "
            "budget or a longer prompt."
        )
    band = (
        ""
        if parity.tolerance < 1e-2
        else f" (a band, since {dtype} rounds; --dtype float32 tells whether they agree to 1e-4)"
    )
    return True, (
        f"It holds: with the record, the learner's log-probs are those of the sampler to {parity.gap:.2g} nats; the "
        f"tolerance is {parity.tolerance:g}{band}. Without the record they would be off by up to "
        f"{parity.dense_gap:.2g} nats."
    )

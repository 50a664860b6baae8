"""Every score of a policy under watch: what it returns, what it writes, and what it draws."""

from __future__ import annotations

from dataclasses import fields

import torch
from torch import Tensor

from smdlib.policies import CacheView, EvictionPolicy, PolicyError, checked_scores


def score(policy: EvictionPolicy, view: CacheView) -> Tensor:
    """Score a view as the cache does, and look at what else happened.

    Args:
        policy: The policy.
        view: The layer.

    Returns:
        ``[B, H, K]`` float32.

    Raises:
        PolicyError: as `smdlib.policies.checked_scores`; for any other error; for a view that is not as it was; or for
            numbers drawn from the global generator.
    """
    name, before, state = type(policy).__name__, _copies(view), torch.get_rng_state()
    try:
        with torch.no_grad():
            scores = checked_scores(policy, view)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{name}: score raised {type(error).__name__}: {error}{_absent(view, error)}") from error
    for field, old in before.items():
        now = getattr(view, field)
        if not (torch.equal(_bits(now), _bits(old)) if isinstance(old, Tensor) else now is old or now == old):
            raise PolicyError(
                f"{name}: score wrote to view.{field}. A view is the cache itself: a key would be changed, or an "
                "evicted one returned, without a record of it. Clone first."
            )
    if not torch.equal(torch.get_rng_state(), state):
        raise PolicyError(
            f"{name}: score is not deterministic: it draws from (or seeds) torch's global random generator, which is "
            "the sampler's. Draw from view.generators[row] where there are any, else from a torch.Generator seeded by "
            "an option of the policy, the layer and view.seen."
        )
    return scores.clone()


def check_protected(policy: EvictionPolicy, view: CacheView, scores: Tensor) -> int:
    """Refuse scores that protect more keys than a head may keep; return the largest number protected.

    Args:
        policy: For its name.
        view: What was scored.
        scores: ``[B, H, K]``.

    Raises:
        PolicyError: if a head that evicts has more protected keys than budget.
    """
    count = (view.present & (scores == float("inf"))).sum(-1)
    over = (count > view.budget) & (view.present.sum(-1) > view.budget)
    if over.any():
        row, head = over.nonzero()[0].tolist()
        protected, keeps = int(count[row, head]), int(view.budget[row, head])
        raise PolicyError(
            f"{type(policy).__name__} drops its own protected keys: it gives +inf to {protected} keys of row {row}, KV "
            f"head {head}, which may keep {keeps}, so {protected - keeps} of them go. Protect fewer (a share of "
            "view.budget), or check with the budget that it is meant for: check_policy(policy, budget=...)."
        )
    return int(count.max())


def _copies(view: CacheView) -> dict[str, object]:
    copies = {field.name: getattr(view, field.name) for field in fields(view)}
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in copies.items()}


def _bits(value: object) -> Tensor:
    """The bytes of a tensor, so that NaN equals itself; empty for what is no tensor."""
    return value.contiguous().view(torch.uint8) if isinstance(value, Tensor) else torch.empty(0, dtype=torch.uint8)


def _absent(view: CacheView, error: Exception) -> str:
    """What the view lacked and why, if that may be what the error is about."""
    if "None" not in str(error):
        return ""
    reasons = {
        "queries": "set query_window on the policy to get the last queries",
        "attention": "set tracks_attention = True on the policy to get it",
        "generators": "a cache has generators only where its caller passes some, so a policy must do without",
    }
    missing = [f"view.{name} is None: {why}" for name, why in reasons.items() if getattr(view, name) is None]
    return f" ({'; '.join(missing)})" if missing else ""

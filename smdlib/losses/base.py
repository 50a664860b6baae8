"""What the token losses share: keys, actor and temperature, in TorchRL's manner."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrl.objectives.common import LossModule

from smdlib.losses.scoring import Actor
from smdlib.losses.tokens import TokenKeys


class TokenLoss(LossModule):
    """A loss over tokens of an actor that can be shadow-masked; base of the losses of this package.

    Args:
        actor: The policy, a `smdlib.masks.MaskedAttentionAdapter`.
        temperature: The sampler's, above 0.

    Raises:
        TypeError: if the actor cannot be shadow-masked.
        ValueError: for a temperature that defines no distribution.
    """

    @dataclass
    class _AcceptedKeys(TokenKeys):
        """The configurable keys."""

    default_keys = _AcceptedKeys
    output_type: type[Any]
    actor_network: Any  # a module and an Actor

    def __init__(self, actor: nn.Module, temperature: float = 1.0) -> None:
        super().__init__()
        if not isinstance(actor, nn.Module) or not isinstance(actor, Actor):
            raise TypeError(
                f"actor is a {type(actor).__name__}, which cannot be shadow-masked; wrap the model: "
                "MaskedAttentionAdapter(model)."
            )
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature}; greedy decoding has no distribution.")
        sampled = getattr(actor, "temperature", None)
        if sampled is not None and sampled != temperature:
            raise ValueError(
                f"this actor samples at temperature {sampled}, but the loss would score at {temperature}, so the first "
                f"ratio would not be 1; pass temperature={sampled} to the loss."
            )
        self.actor_network = actor
        self._temperature = float(temperature)

    @property
    def temperature(self) -> float:
        """The sampler's temperature; fixed, since every term and the data share it."""
        return self._temperature

    @property
    def tensor_keys(self) -> TokenKeys:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The keys in use, see `TokenKeys`."""
        return self._tensor_keys  # pyright: ignore[reportReturnType]

    @property
    def functional(self) -> bool:
        """``False``: the loss calls the actor as it is."""
        return False

    @property
    def out_keys(self) -> list[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Entries of the output."""
        return list(self.output_type.__annotations__)

    def _forward_value_estimator_keys(self, **kwargs: object) -> None:
        """There is no value estimator."""


def check_weight(name: str, value: float) -> float:
    """Return the weight of a loss term, or refuse one that is no finite number of at least 0.

    Args:
        name: Of the weight, for the message.
        value: The weight.

    Raises:
        ValueError: unless ``0 <= value < inf``.

    Example:
        >>> check_weight("coeff", 0.1)
        0.1
    """
    if value is None or not 0 <= float(value) < math.inf:
        raise ValueError(f"{name} must be a finite number of at least 0, not {value}.")
    return float(value)

"""Installs the attention function into a model, and scores tokens under a recorded mask."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from smdlib.cache.support import UnsupportedModelError, check_supported, text_config
from smdlib.masks.attention import Attention, eager_attention, fused_attention, shadow_attention
from smdlib.masks.calls import prepare_call
from smdlib.masks.flex import replay_attention
from smdlib.masks.head import LanguageHead, check_head, language_head
from smdlib.masks.installation import NAMES, owner_of, previous_implementation, resolve_backend, take_over
from smdlib.masks.passes import check_rows, run_pass, run_shared, run_whole
from smdlib.masks.replay import Replay
from smdlib.masks.shadow import ShadowMask
from smdlib.masks.sharding import agree, check_sharding
from smdlib.masks.shared import View, split_rows
from smdlib.masks.spec import mask_spec

_BACKENDS: dict[str, Attention] = {
    "sdpa": partial(shadow_attention, inner=fused_attention),
    "eager": partial(shadow_attention, inner=eager_attention),
    "flex": replay_attention,
}
_OWN_ARGUMENTS = {"use_cache", "cache", "past_key_values", "position_ids", "labels", "inputs_embeds", "return_dict"}


class MaskedAttentionAdapter(nn.Module):
    """Gives a causal language model attention that honours evictions, and replays a `ShadowMask`.

    While it is installed the model samples with a `smdlib.cache.CompressedCache`; everything else (plain calls, other
    caches) computes what it did before. It is also the learner's way to masked log-probs: a module around the model,
    to be handed to the losses as their actor.

    ``backend="flex"`` replays evictions by FlexAttention, for learners on CUDA: no mask of queries times keys is made,
    and one kernel, compiled at first use, serves all layers and lengths (heads of at least 16 numbers each). All else
    is as with ``"sdpa"``: rollouts, prompts, passes without a record, and patterns that are not causal, sliding or
    chunked, whose exact dense mask is made after all. On the CPU it scores without gradient only, slowly; it was
    tested there, and has not been run on a GPU yet.

    Args:
        model: A transformers causal language model.
        backend: ``"sdpa"``, ``"eager"``, ``"flex"`` (below), or ``"auto"``: sdpa, except for models that cap logits,
            have sinks or do not support it, which take their own eager attention.
        share_prompts: Let `response_states`, and with it the losses, compute each distinct prompt of a batch once.

    Raises:
        UnsupportedModelError: if attention of this architecture cannot be evicted and replayed exactly.
        ValueError: for a back-end that cannot take a mask per KV head, or a second adapter on one model.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=32,
        ...         hidden_size=16,
        ...         intermediate_size=16,
        ...         num_hidden_layers=2,
        ...         num_attention_heads=4,
        ...         num_key_value_heads=2,
        ...     )
        ... ).eval()
        >>> with MaskedAttentionAdapter(model) as adapter:
        ...     log_probs = adapter.log_probs(torch.arange(6)[None], shadow_mask=ShadowMask.dense(1, 6, 2, 2))
        >>> log_probs.shape, log_probs[0, 0].item()
        (torch.Size([1, 6]), nan)
    """

    def __init__(self, model: PreTrainedModel, backend: str = "auto", *, share_prompts: bool = True) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel):
            raise TypeError(
                f"model must be a transformers model, not {type(model).__name__}; give the adapter the model inside a "
                "wrapper."
            )
        if model.get_output_embeddings() is None:
            raise TypeError(
                f"{type(model).__name__} has no language-model head; pass the causal language model around it."
            )
        check_supported(model.config)
        previous = previous_implementation(model)
        self.model = model
        self.backend = resolve_backend(model, previous, backend)
        self.share_prompts = share_prompts
        self._previous = previous
        self._head_checked = False
        self._register()
        model.set_attn_implementation(NAMES[self.backend])
        if text_config(model.config)._attn_implementation != NAMES[self.backend]:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not look up its attention through transformers' AttentionInterface, so "
                "evictions cannot be applied to it."
            )
        self._own()

    def _register(self) -> None:
        """Make the attention known to transformers, in this process."""
        name = NAMES[self.backend]
        AttentionInterface.register(name, _BACKENDS[self.backend])
        AttentionMaskInterface.register(name, mask_spec)

    def _own(self) -> None:
        take_over(self.model, self)
        self.model.register_forward_pre_hook(prepare_call, with_kwargs=True)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Install the adapter on the model that was copied or unpickled with it, if it was installed."""
        super().__setstate__(state)
        if text_config(self.model.config)._attn_implementation == NAMES[self.backend]:
            self._register()
            self._own()

    def remove(self) -> None:
        """Give the model its previous attention back; harmless when already removed.

        Not between a forward pass with activation checkpointing and its ``backward()``, which runs the layers again.
        """
        if self.installed:
            self.model.set_attn_implementation(self._previous)
            take_over(self.model, None)

    @property
    def installed(self) -> bool:
        """Whether the model still attends through this adapter."""
        return (
            owner_of(self.model) is self and text_config(self.model.config)._attn_implementation == NAMES[self.backend]
        )

    def __enter__(self) -> MaskedAttentionAdapter:
        self._refuse_removed()
        return self

    def _refuse_removed(self) -> None:
        if not self.installed:
            raise RuntimeError(
                "this MaskedAttentionAdapter was removed from its model, or the model's attention implementation was "
                "changed since; install a new one."
            )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        shadow_mask: ShadowMask | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Run the model on whole sequences, without a cache.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, 1 for real tokens; padding on the left or right. All real by default.
            shadow_mask: Record ``[B, T', L, H]`` of the unpadded rows; ``None`` runs dense.
            **kwargs: For the model's forward, such as ``logits_to_keep``.

        Returns:
            Logits ``[B, T, V]`` in the model's dtype (fewer columns with ``logits_to_keep``).

        Raises:
            ValueError: if the mask does not fit rows and model, or the model has dropout in train mode.
            UnsupportedModelError: if some layer did not apply the mask.
        """
        taken = sorted(_OWN_ARGUMENTS & kwargs.keys())
        if taken:
            raise TypeError(
                f"{taken} are set by the adapter: it scores whole sequences without a cache, and returns logits."
            )
        return self._run(self.model, input_ids, attention_mask, shadow_mask, kwargs).logits

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, shadow_mask: ShadowMask | None = None
    ) -> Tensor:
        """Run the model up to its head: what `head` turns into logits.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, as in `forward`.
            shadow_mask: As in `forward`; it may end one token early, and then the last column, which predicts no token
                of the row, is not the sampler's.

        Returns:
            Last hidden states ``[B, T, D]`` in the model's dtype.

        Raises:
            ValueError: as `forward`.
            UnsupportedModelError: as `forward`.
        """
        return self._run(
            self.model.base_model, input_ids, attention_mask, shadow_mask, {}, short=True
        ).last_hidden_state

    def head(self) -> LanguageHead:
        """Return the model's head, checked once against the model's own logits.

        Raises:
            UnsupportedModelError: if the model computes its logits in a way that `LanguageHead` does not describe.
        """
        head = language_head(self.model)
        if not self._head_checked:
            check_head(self.model, head)
            self._head_checked = True
        return head

    def response_states(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, views: Sequence[View]
    ) -> tuple[list[Tensor], float]:
        """Run the model up to its head in several views, and keep the states that predict loss tokens.

        Each distinct prompt is computed once, in one plain causal pass, for all rows and all views; the responses
        attend to the prompt's keys that their record left them. Where a prompt cannot be shared (keys evicted while
        the prompt was still read, a prompt of one token, reentrant activation checkpointing), every row is run whole.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, 1 for real tokens; padding on the left or right.
            loss_mask: bool ``[B, T]``.
            views: What the responses see; a record may end one token early.

        Returns:
            States ``[N, D]`` of each view, row after row, and prompts computed per row: ``1 / G`` for groups of G
            rows, 1 where every row was run whole.

        Raises:
            ValueError: as `forward`.
            UnsupportedModelError: as `forward`.
        """
        starts, lengths = self._checked(input_ids, attention_mask, [view.shadow for view in views])
        shadows = [view.shadow for view in views if view.shadow is not None]
        rows = split_rows(input_ids, starts, lengths, loss_mask, shadows) if self.share_prompts else None
        if agree(self.model, rows is not None) and rows is not None:
            shared = run_shared(self.model, rows, views)
            if shared is not None:
                return shared, len(rows.prompts) / len(input_ids)
        return run_whole(self.hidden_states, input_ids, attention_mask, loss_mask, views), 1.0

    def _run(
        self,
        module: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor | None,
        shadow_mask: ShadowMask | None,
        kwargs: dict[str, Any],
        short: bool = False,
    ) -> Any:
        """Check the arguments and run ``module`` under the mask; ``short`` allows one that ends one token early."""
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        starts, lengths = self._checked(input_ids, attention_mask, [shadow_mask], short)
        replay = None if shadow_mask is None else Replay(shadow_mask, starts, lengths, input_ids.shape[1])
        columns = torch.arange(input_ids.shape[1], device=input_ids.device)
        positions = (columns - starts[:, None]).clamp(min=0)
        return run_pass(
            self.model,
            module,
            replay,
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=positions,
            **kwargs,
        )

    def _checked(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        shadow_masks: Sequence[ShadowMask | None],
        short: bool = True,
    ) -> tuple[Tensor, Tensor]:
        self._refuse_removed()
        check_sharding(self, self.model)
        return check_rows(self.model, input_ids, attention_mask, shadow_masks, short)

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        shadow_mask: ShadowMask | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Score the tokens of whole sequences, with exactly the keys that the sampler saw.

        Left and right padding give the same numbers.

        Args:
            input_ids: int64 ``[B, T]``.
            attention_mask: ``[B, T]``, 1 for real tokens. All real by default.
            shadow_mask: Record ``[B, T', L, H]`` of the unpadded rows; ``None`` scores with every key (dense).
            temperature: The sampler's, above 0; logits are divided by it.

        Returns:
            float32 ``[B, T]`` in nats; entry ``t`` is ``log p(x_t | x_<t)``, NaN where there is none (first token and
            padding).

        Raises:
            ValueError: as `forward`, and for a temperature that is not positive.
        """
        if not temperature > 0:
            raise ValueError(f"temperature must be above 0, not {temperature}; greedy decoding has no log-probs.")
        logits = self._run(self.model, input_ids, attention_mask, shadow_mask, {}, short=True).logits
        logits = logits[:, :-1].float() / temperature
        scored = logits.gather(-1, input_ids[:, 1:, None]).squeeze(-1) - logits.logsumexp(-1)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        known = (mask[:, 1:] * mask[:, :-1]).bool()
        # Select before filling, so that no gradient flows through padding.
        scored = torch.where(known, scored, torch.nan)
        return torch.nn.functional.pad(scored, (1, 0), value=torch.nan)

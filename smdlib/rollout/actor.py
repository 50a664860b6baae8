"""The TorchRL policy that samples with evicted keys, and the actor of the losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torchrl.modules.llm.policies import LogProbs, Masks, Text, Tokens
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from smdlib.cache import CompressedCache
from smdlib.masks import LanguageHead, MaskedAttentionAdapter, ShadowMask, View
from smdlib.policies import Allocation, EvictionPolicy, make_policy
from smdlib.rollout.generation import Eviction, sample_rows
from smdlib.rollout.inputs import PROMPT, read_prompts
from smdlib.rollout.options import num_tokens, resolve_options
from smdlib.rollout.segments import SampledRow


class SparseActor(TensorDictModuleBase):
    """Samples responses with a compressed cache and records what was seen; token in, token out.

    A policy for ``env.rollout`` and TorchRL's ``LLMCollector`` (with an env in tokens mode, such as `dataset_env`),
    and the ``actor`` of smdlib's losses. Each distinct prompt of a batch is prefilled once. Rows that have ended leave
    the batch, with their keys, as soon as they are half of it. Sampling is in eval mode and leaves every module's mode
    as it was. Under ``torch.autocast`` the learner has to run under the same autocast.

    Reads ``("tokens", "prompt")``: int64 ``[P]`` per row, ragged or one ``[B, P]`` without padding. Writes rows without
    padding, as a lazy stack:

    - ``("tokens", "prompt" | "response" | "full")``: int64 ``[P]``, ``[R]`` and ``[P + R]``, the end token included;
    - ``("masks", "all_attention_mask")``, all ones, and ``("masks", "all_assistant_mask")``, ones at the tokens sampled
      in this call: bool ``[P + R]``;
    - ``("log_probs", "response" | "full")``: float32 in nats, of the distribution that was sampled from, temperature
      included; NaN on the prompt;
    - ``("text", "prompt" | "response" | "full")``: for rewards and eyes, without special tokens; never read back;
    - ``"shadow"``: the row's `smdlib.masks.ShadowMask`, ``[P + R, L, H]``;
    - ``"kv_bytes"``: int64, the row's share of the cache's keys and values when these were most.

    Args:
        model: A causal language model, or the `smdlib.masks.MaskedAttentionAdapter` that is installed on it; several
            actors may share one adapter.
        tokenizer: Decodes the text; its end-of-sequence token ends a response if the model names none.
        policy: Eviction policy or its name. ``None`` keeps every key: dense sampling, for baselines and evaluation.
        budget: Keys to keep, as for `smdlib.cache.CompressedCache`; needed unless ``policy`` is ``None``.
        allocation: Spreads the budget over layers and heads.
        evict_every: Evict after every so many sampled tokens too.
        generate_kwargs: Options of ``model.generate``. Each is honoured or refused: max_new_tokens (128), do_sample
            (True), temperature (1.0), eos_token_id, pad_token_id, stop_strings, stopping_criteria, max_time. Of the
            model's own generation config only eos_token_id is used.

    Raises:
        ValueError: for options that would make the sampled log-probs differ from the learner's, and why.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> from transformers import PreTrainedTokenizerFast
        >>> from tokenizers import Tokenizer, models
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=32,
        ...         hidden_size=16,
        ...         intermediate_size=16,
        ...         num_hidden_layers=2,
        ...         num_attention_heads=4,
        ...         num_key_value_heads=2,
        ...     )
        ... )
        >>> words = Tokenizer(models.WordLevel({f"w{index}": index for index in range(32)}))
        >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
        >>> options = {"max_new_tokens": 4, "eos_token_id": None}
        >>> actor = SparseActor(model, tokenizer, policy="snapkv", budget=0.5, generate_kwargs=options)
        >>> prompts = torch.arange(23).expand(3, -1)
        >>> batch = actor(TensorDict({("tokens", "prompt"): prompts}, batch_size=[3]))
        >>> batch[0]["shadow"].evicted_at.shape, batch[0]["log_probs", "full"].isnan().sum().item()
        (torch.Size([27, 2, 2]), 23)
    """

    def __init__(
        self,
        model: PreTrainedModel | MaskedAttentionAdapter,
        tokenizer: PreTrainedTokenizerBase,
        *,
        policy: EvictionPolicy | str | None,
        budget: float | int | None = None,
        allocation: Allocation | None = None,
        evict_every: int | None = None,
        generate_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.in_keys: Any = [PROMPT]
        self.out_keys = ["tokens", "masks", "log_probs", "text", "shadow", "kv_bytes"]
        bare = model.model if isinstance(model, MaskedAttentionAdapter) else model
        if not isinstance(bare, PreTrainedModel):
            wrong = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
            raise TypeError(f"model must be a transformers model or the adapter on it, not {wrong}.")
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            raise TypeError(
                f"tokenizer must be a transformers tokenizer, not {type(tokenizer).__name__}: rewards read the text."
            )
        # All arguments are checked before the adapter touches the model, so that a second attempt finds it as it was.
        self.options = resolve_options(generate_kwargs, bare, tokenizer)
        self.eviction = _eviction(bare.config, policy, budget, allocation, evict_every)
        self.adapter = model if isinstance(model, MaskedAttentionAdapter) else MaskedAttentionAdapter(bare)
        self.tokenizer = tokenizer
        self._check_installed()

    def _check_installed(self) -> None:
        if not self.adapter.installed:
            raise RuntimeError(
                "the MaskedAttentionAdapter was removed from the model, or the model's attention implementation was "
                "changed since; make a new SparseActor."
            )

    @property
    def temperature(self) -> float | None:
        """Temperature of sampling, which the losses have to use as well; ``None`` for greedy decoding."""
        return self.options.temperature if self.options.do_sample else None

    @property
    def model(self) -> PreTrainedModel:
        """The language model."""
        return self.adapter.model

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Sample one response per row.

        Args:
            tensordict: Batch of shape ``[B]`` with ``("tokens", "prompt")``.

        Returns:
            A lazy stack of the rows, with their entries and the new ones.

        Raises:
            KeyError: if the prompts are missing.
            ValueError: if they are empty or padded, or the batch is not one-dimensional.
        """
        self._check_installed()
        prompts = read_prompts(tensordict, self.tokenizer, num_tokens(self.model))
        rows = sample_rows(self.model, self.tokenizer, prompts, self.options, self.eviction)
        device = tensordict.device
        entries = [self._entry(row) if device is None else self._entry(row).to(device) for row in rows]
        # Entries are replaced whole: what an earlier turn left in a container must not mix with this one.
        rows_out = [given.copy() for given in tensordict.unbind(0)]
        for row, entry in zip(rows_out, entries, strict=True):
            for key in self.out_keys:
                row.set(key, entry.get(key))
        return lazy_stack(rows_out)

    def _entry(self, row: SampledRow) -> TensorDict:
        full = torch.cat([row.prompt, row.response])
        sampled = torch.cat([torch.zeros_like(row.prompt), torch.ones_like(row.response)]).bool()
        before = torch.full(row.prompt.shape, torch.nan, dtype=row.log_probs.dtype, device=row.prompt.device)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in (row.prompt, row.response, full)]
        return TensorDict(
            {
                "tokens": Tokens(prompt=row.prompt, response=row.response, full=full, padded=False),
                "masks": Masks(all_attention_mask=torch.ones_like(sampled), all_assistant_mask=sampled, padded=False),
                "log_probs": LogProbs(response=row.log_probs, full=torch.cat([before, row.log_probs]), padded=False),
                "text": Text(prompt=texts[0], response=texts[1], full=texts[2]),
                "shadow": row.shadow,
                "kv_bytes": torch.tensor(row.kv_bytes, device=full.device),
            }
        )

    def hidden_states(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, shadow_mask: ShadowMask | None = None
    ) -> Tensor:
        """Run the model up to its head under a mask; see `smdlib.masks.MaskedAttentionAdapter.hidden_states`."""
        return self.adapter.hidden_states(input_ids, attention_mask, shadow_mask)

    def response_states(
        self, input_ids: Tensor, attention_mask: Tensor, loss_mask: Tensor, views: Sequence[View]
    ) -> tuple[list[Tensor], float]:
        """Run each prompt once for several passes; see `smdlib.masks.MaskedAttentionAdapter.response_states`."""
        return self.adapter.response_states(input_ids, attention_mask, loss_mask, views)

    def head(self) -> LanguageHead:
        """Return what turns hidden states into logits; see `smdlib.masks.MaskedAttentionAdapter.head`."""
        return self.adapter.head()

    def log_probs(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        shadow_mask: ShadowMask | None = None,
        temperature: float = 1.0,
    ) -> Tensor:
        """Score tokens under a mask; see `smdlib.masks.MaskedAttentionAdapter.log_probs`."""
        return self.adapter.log_probs(input_ids, attention_mask, shadow_mask, temperature)


def _eviction(
    config: Any,
    policy: EvictionPolicy | str | None,
    budget: float | int | None,
    allocation: Allocation | None,
    evict_every: int | None,
) -> Eviction | None:
    if policy is None:
        given = {"budget": budget, "allocation": allocation, "evict_every": evict_every}
        unused = sorted(name for name, value in given.items() if value is not None)
        if unused:
            raise ValueError(f"policy=None keeps every key, so {unused} would have no effect; name a policy.")
        return None
    if budget is None:
        raise ValueError(
            f"policy={policy!r} needs a budget: a share of the prompt's keys in (0, 1], or a number of keys."
        )
    eviction = Eviction(make_policy(policy), budget, allocation, evict_every)
    # Refuses settings here that would only show when sampling.
    CompressedCache(config, eviction.policy, budget, allocation=allocation, evict_every=evict_every)
    return eviction

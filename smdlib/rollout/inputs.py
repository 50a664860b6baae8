"""Reads the prompts of a batch, and refuses those of which it is not clear what the tokens are."""

from __future__ import annotations

import torch
from tensordict import NonTensorData, TensorDictBase
from torch import Tensor
from transformers import PreTrainedTokenizerBase

PROMPT = ("tokens", "prompt")
"""Where the prompts are."""

_PADDED = (
    "the prompts are padded, and which of their tokens are real cannot be told from a padding token; pass ragged rows, "
    "lazy_stack([TensorDict({('tokens', 'prompt'): ids}), ...])."
)


def read_prompts(
    tensordict: TensorDictBase, tokenizer: PreTrainedTokenizerBase, vocabulary: int | None
) -> list[Tensor]:
    """Read the prompts of all rows.

    Args:
        tensordict: Batch of shape ``[B]``.
        tokenizer: Its padding token is not expected where a prompt begins.
        vocabulary: Tokens that the model knows, ``None`` if that is unknown.

    Returns:
        int64 ``[P]`` per row.

    Raises:
        KeyError: if the prompts are missing.
        ValueError: if they are no rows of token ids of the model, or empty or padded.
    """
    if tensordict.ndim != 1 or tensordict.shape[0] == 0:
        raise ValueError(
            f"SparseActor takes a batch of rows [B], B at least 1, not one of shape {tuple(tensordict.shape)}; flatten "
            "it with reshape(-1)."
        )
    rows = tensordict.unbind(0)
    given = [row.get(PROMPT, None) for row in rows]
    if any(prompt is None for prompt in given):
        found = sorted({str(key) for row in rows for key in row.keys(include_nested=True)})
        raise KeyError(
            f"no prompts at {PROMPT!r}; the batch has {found}. SparseActor is token in, token out: use an env in "
            'tokens mode, such as smdlib.rollout.dataset_env or ChatEnv(input_mode="tokens", tokenizer=...).'
        )
    if any(_padded(row) for row in rows):
        raise ValueError(_PADDED)
    prompts = [torch.as_tensor(prompt) for prompt in given]
    kinds = {(prompt.ndim, prompt.is_floating_point() or prompt.dtype == torch.bool) for prompt in prompts}
    if kinds != {(1, False)}:
        found = sorted({f"{prompt.dtype} {list(prompt.shape)}" for prompt in prompts if prompt.numel()} or {"nothing"})
        raise ValueError(f"a row's prompt is a list of token ids, int64 [P]; the rows hold {', '.join(found)}.")
    empty = [index for index, prompt in enumerate(prompts) if prompt.numel() == 0]
    if empty:
        raise ValueError(f"the prompts of rows {empty} are empty; a response needs at least one token before it.")
    foreign = [index for index, prompt in enumerate(prompts) if not _known(prompt, vocabulary)]
    if foreign:
        raise ValueError(f"the prompts of rows {foreign} hold ids that are none of the model's {vocabulary} tokens.")
    pad = tokenizer.pad_token_id
    if pad is not None and pad not in (tokenizer.bos_token_id, tokenizer.eos_token_id):
        padded = [index for index, prompt in enumerate(prompts) if int(prompt[0]) == pad]
        if padded:
            raise ValueError(f"rows {padded} begin with the padding token {pad}: {_PADDED}")
    return [prompt.long() for prompt in prompts]


def _padded(row: TensorDictBase) -> bool:
    flag, mask = row.get(("tokens", "padded"), None), row.get(("masks", "all_attention_mask"), None)
    flag = flag.data if isinstance(flag, NonTensorData) else flag
    return bool(flag) or (mask is not None and not bool(torch.as_tensor(mask).all()))


def _known(prompt: Tensor, vocabulary: int | None) -> bool:
    return int(prompt.min()) >= 0 and (vocabulary is None or int(prompt.max()) < vocabulary)

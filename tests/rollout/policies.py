"""A policy without a model, which writes what SparseActor writes, and rewards at the top of a module."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import LogProbs, Masks, Tokens

from smdlib import NEVER, ShadowMask
from tests.tokenizer import EOS


@dataclass
class Echo:
    """Answers with the prompt's last bytes and its length: ragged, and different for different prompts."""

    end: bool = True  # whether a response ends with the end token
    calls: int = 0

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        rows = []
        for index, given in enumerate(tensordict.unbind(0)):
            prompt = given.get(("tokens", "prompt"))
            response = torch.cat([prompt[-1 - index % 3 :] % 256, torch.tensor([len(prompt) % 256])])
            if self.end:
                response = torch.cat([response, torch.tensor([EOS])])
            full = torch.cat([prompt, response])
            sampled = torch.arange(len(full)) >= len(prompt)
            shadow = torch.full((len(full), 2, 1), NEVER, dtype=torch.int32)
            shadow[: len(prompt)] = len(prompt)
            new = {
                "tokens": Tokens(prompt=prompt, response=response, full=full, padded=False),
                "masks": Masks(all_attention_mask=torch.ones_like(sampled), all_assistant_mask=sampled, padded=False),
                "log_probs": LogProbs(full=-torch.rand(len(full)), padded=False),
                "shadow": ShadowMask(evicted_at=shadow, batch_size=[]),
            }
            rows.append(given.copy().update(TensorDict(new)))
        return lazy_stack(rows)


def length_reward(response: str, row: dict) -> float:
    """Depends on the response and on the row, so that a mix-up of either shows."""
    return len(response) + 1000.0 * row["number"]

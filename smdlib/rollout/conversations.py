"""The environment itself: draws prompts, hands out tokens, takes conversations on, pays responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data import Composite, Unbounded
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import Tokens

from smdlib.rollout.order import row_at
from smdlib.rollout.prompts import ChatTokens
from smdlib.rollout.rewards import RewardFunction, checked_reward
from smdlib.rollout.rows import prompt_of

NextMessage = Callable[[str, Mapping[str, Any], int], str | None]
"""``next_message(response, row, turn)``: the user's answer to the ``turn``-th response (from 1), ``None`` to end."""


@dataclass
class _Slot:
    """One row of the batch: which draw it holds and how far that has come."""

    draw: int
    prompt: Tensor
    started: bool = False
    done: bool = False


class DatasetEnv(ChatEnv):
    """A `torchrl.envs.llm.ChatEnv` that draws prompts from a data set and pays a response with a Python function.

    Token in, token out. ``reset`` gives a lazy stack of ``prompts * group`` rows, a prompt's samples side by side:

    - ``("tokens", "prompt")``: int64 ``[P]``, without padding;
    - ``"row"``: int64, the row of the data set; ``"group"``: int64, how many prompts were drawn before this one, over
      all epochs: the samples of one prompt share it, and nothing else does (``MCAdvantage(prompt_key="group")``);
      ``"turn"``: int64, responses so far.

    The policy writes ``("tokens", "full")``, int64 ``[P + R]``, the prompt and then the response. ``step`` gives
    ``"reward"``, float32 ``[B, 1, 1]`` (TorchRL's losses broadcast an advantage of this shape over ``[B, T, 1]``), and
    ``"done"``. A conversation that its task ends is ``terminated``, one that runs into ``max_turns`` ``truncated``. It
    is paid once, for its last response; earlier turns get 0.

    A prompt counts as used once a response to it has been stepped: collectors that reset twice skip nothing. Rows that
    end earlier than others (several turns) are reset alone, and take the next prompts in order. A reset of all rows
    gives up the conversations that are under way.

    Use `dataset_env`, which says what the arguments are.

    Example:
        >>> from smdlib.rollout.environment import dataset_env
        >>> from smdlib.testing import byte_tokenizer
        >>> env = dataset_env([{"prompt": "2 + 2 ="}], byte_tokenizer(), lambda response, row: 0.0, prompts=1, group=2)
        >>> env.reset()["row"], env.position
        (tensor([0, 0]), 0)
    """

    def __init__(
        self,
        dataset: Sequence[Mapping[str, Any]],
        chat: ChatTokens,
        reward: RewardFunction,
        *,
        prompt: str,
        prompts: int,
        group: int,
        max_turns: int,
        next_message: NextMessage | None,
        seed: int | None,
        start: int,
        shard: tuple[int, int],
    ) -> None:
        self.chat, self.dataset, self.reward_function, self.next_message = chat, dataset, reward, next_message
        self.prompt_column, self.group, self.max_turns, self.seed = prompt, group, max_turns, seed
        self.start, self.shard = start, shard
        self._next_draw, self._slots = 0, []
        # TorchRL's annotations know neither this mode nor tokenizers other than AutoTokenizer.
        options: dict[str, Any] = {"input_mode": "tokens", "tokenizer": chat.tokenizer}
        super().__init__(batch_size=(prompts * group,), **options)

    def _make_specs_tokens(self) -> None:
        super()._make_specs_tokens()
        shape = self.batch_size
        self.full_state_spec = Composite(shape=shape)  # prompts come from the data set, not from the caller
        for key in ("row", "group", "turn"):
            self.observation_spec[key] = Unbounded(shape=shape, dtype=torch.int64)
        self.full_reward_spec = Composite(reward=Unbounded(shape=torch.Size((*shape, 1, 1))), shape=shape)

    @property
    def position(self) -> int:
        """Prompts used so far, ``start`` included: a new environment with this ``start`` goes on from here.

        While rows of one batch are at different prompts (several turns), it is the first that is not finished.
        """
        open_draws = [slot.draw for slot in self._slots if not slot.done]
        return self._position(min([self._next_draw, *open_draws]))

    def _position(self, draw: int) -> int:
        return self.start + self.shard[0] + draw // self.group * self.shard[1]

    def _set_seed(self, seed: int | None) -> None:
        """Refuse another order: it would make ``start`` mean other prompts."""
        raise RuntimeError("the order of the prompts is given by dataset_env(seed=...); make a new environment.")

    def _row(self, draw: int) -> int:
        return row_at(self._position(draw), len(self.dataset), self.seed)

    def _prompt(self, draw: int, before: list[_Slot]) -> Tensor:
        if before and before[-1].draw // self.group == draw // self.group:
            return before[-1].prompt
        return prompt_of(self.dataset, self._row(draw), self.prompt_column, self.chat)

    def _reset(self, tensordict: TensorDictBase | None = None, **_: Any) -> TensorDictBase:
        size = self.batch_size[0]
        mask = None if tensordict is None else tensordict.get("_reset", None)
        chosen = [True] * size if mask is None else mask.reshape(size).tolist()
        slots, draw = [], self._next_draw
        for index in range(size):
            if self._slots and (not chosen[index] or not self._slots[index].started):
                slots.append(self._slots[index])
            else:
                slots.append(_Slot(draw, self._prompt(draw, slots)))
                draw += 1
        self._slots, self._next_draw = slots, draw  # only now: a bad row must not leave half a reset behind
        return lazy_stack(
            [self._observation(slot.prompt, self._row(slot.draw), self._position(slot.draw), 0) for slot in self._slots]
        )

    def _step(self, tensordict: TensorDictBase) -> TensorDictBase:
        return lazy_stack([self._step_row(index, row) for index, row in enumerate(tensordict.unbind(0))])

    def _step_row(self, index: int, given: TensorDictBase) -> TensorDict:
        prompt, full = given.get(("tokens", "prompt")), given.get(("tokens", "full"), None)
        response = _response(prompt, full, index)
        row_index, turn = int(given["row"]), int(given["turn"]) + 1
        row, text = self.dataset[row_index], str(self.chat.tokenizer.decode(response, skip_special_tokens=True))
        following = full.cpu()
        terminated, truncated = False, turn >= self.max_turns
        if truncated and self.max_turns == 1:
            terminated, truncated = True, False  # one response is all that was asked for
        elif not truncated and self.next_message is not None:
            message = self.next_message(text, row, turn)
            terminated = message is None
            if message is not None:
                following = torch.cat([following, self.chat.further(response.cpu(), message)])
        done = terminated or truncated
        reward = checked_reward(self.reward_function, text, row, row_index) if done else 0.0
        if self._slots:  # there are none when a batch is stepped that this environment did not make
            self._slots[index].started, self._slots[index].done = True, done
        result = self._observation(following, row_index, int(given["group"]), turn)
        result.set("reward", torch.full((1, 1), reward))
        for key, value in {"done": done, "terminated": terminated, "truncated": truncated}.items():
            result.set(key, torch.tensor([value]))
        return result

    @staticmethod
    def _observation(prompt: Tensor, row: int, group: int, turn: int) -> TensorDict:
        counts = {"row": row, "group": group, "turn": turn}
        return TensorDict({"tokens": Tokens(prompt=prompt)} | {key: torch.tensor(n) for key, n in counts.items()})


def _response(prompt: Tensor, full: Tensor | None, index: int) -> Tensor:
    """What the policy added to the prompt."""
    if full is None:
        raise KeyError(
            f'row {index} of the batch has no ("tokens", "full"): the policy has to write prompt and response tokens.'
        )
    if full.ndim != 1 or not torch.equal(full[: len(prompt)].cpu(), prompt.cpu()):
        raise ValueError(
            f'row {index} of the batch: ("tokens", "full") of shape {tuple(full.shape)} does not start with the '
            f"{len(prompt)} tokens of its prompt; write it without padding, and do not tokenise the prompt again."
        )
    return full[len(prompt) :]

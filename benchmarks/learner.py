"""One learner step, forward and backward: both tracks of SMD against a plain dense GRPO step.

    python -m benchmarks.learner              # one group of 8, prompt 1,024, response 128, half the prompt's keys kept

Peers: TorchRL's `GRPOLoss` on full logits of whole rows, and what TRL's trainer computes (whole rows, logits of the
response only), on the same weights without an adapter. With ``--all``: this library's terms one by one, and with every
row run whole. The vocabulary is small for the peers' sake: full logits of 49,152 tokens take six times as much.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss
from transformers import PreTrainedModel

from benchmarks._measure import Result, alternate, peak
from benchmarks._report import main
from benchmarks.models import SHAPES, add_model_arguments, make_model, plain_twin
from smdlib import GRPOLoss, MaskedAttentionAdapter, ShadowMask, SMDLoss

TORCHRL, TRL, MASKED, BOTH = "TorchRL GRPOLoss, full logits", "TRL's computation", "masked track", "both tracks"
QUICK = "--shape tiny --group 4 --prompt 32 --response 8 --layers 2 --repeats 1 --vocabulary 64 --all"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--shape", default="smollm2", choices=list(SHAPES))
    made.add_argument("--group", type=int, default=8)
    made.add_argument("--prompt", type=int, default=1024)
    made.add_argument("--response", type=int, default=128)
    made.add_argument("--budget", type=float, default=0.5)
    made.add_argument("--repeats", type=int, default=3)
    made.add_argument("--all", action="store_true", help="each term alone too, and rows run whole")
    add_model_arguments(made, layers=4, vocabulary=8192)
    return made


class FullLogits(torch.nn.Module):
    """What TorchRL's loss asks of its actor: a distribution over all tokens of all rows."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def get_dist(self, batch: TensorDict, logits_key: str = "logits") -> LLMMaskedCategorical:
        ids, mask = batch["tokens", "full"], batch["masks", "all_attention_mask"]
        logits = self.model(input_ids=ids, attention_mask=mask.long(), use_cache=False).logits
        shifted = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1)
        return LLMMaskedCategorical(logits=shifted, mask=batch["masks", "all_assistant_mask"])


def make_batch(model: Any, group: int, prompt: int, response: int, budget: float) -> TensorDict:
    """A group's rows; every layer and KV head has lost other keys of the prompt, the same in all rows."""
    torch.manual_seed(1)
    device, total = model.device, prompt + response
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    ids = torch.randint(model.config.vocab_size, (group, total), device=device)
    ids[:, :prompt] = ids[:1, :prompt]
    shadow = ShadowMask.dense(group, total, layers, heads, device=device)
    order = torch.rand(prompt - 1, layers, heads, device=device).argsort(0)
    lost = order >= int(budget * prompt)
    shadow.evicted_at[:, : prompt - 1][:, lost] = prompt - 1
    sampled = torch.arange(total, device=device) >= prompt
    return TensorDict(
        {
            ("tokens", "full"): ids,
            ("masks", "all_attention_mask"): torch.ones_like(ids, dtype=torch.bool),
            ("masks", "all_assistant_mask"): sampled.expand(group, -1).contiguous(),
            ("log_probs", "full"): torch.where(sampled, -8.0, torch.nan).expand(group, -1).contiguous(),
            "advantage": torch.linspace(-1, 1, group, device=device),
            "shadow": shadow,
        },
        [group],
    )


def peer_losses(model: PreTrainedModel, batch: TensorDict) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes the loss of each peer."""
    response = int(batch["masks", "all_assistant_mask"][0].sum())
    ids, old = batch["tokens", "full"], batch["log_probs", "full"][:, -response:]
    per_token = batch["advantage"][:, None, None].expand(*ids.shape, 1).contiguous()
    plain = batch.exclude("shadow").set("advantage", per_token)
    actor: Any = FullLogits(model)
    torchrl = TorchRLGRPOLoss(actor, masking_strategy="generic", entropy_bonus=False, entropy_coeff=0.0)

    def trl() -> torch.Tensor:
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
        chosen = logits.gather(-1, ids[:, -response:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio, advantage = (chosen - old).exp(), batch["advantage"][:, None]
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    return {TORCHRL: lambda: torchrl(plain).loss_objective, TRL: trl}


def own_losses(
    adapter: MaskedAttentionAdapter, batch: TensorDict, every: bool
) -> dict[str, Callable[[], torch.Tensor]]:
    """Return what computes each of our losses, prompts shared unless the name says otherwise."""
    adapter.head()  # checked once, at the first use
    modules = {MASKED: GRPOLoss(adapter), BOTH: SMDLoss(adapter)}
    if every:
        modules["dense track"] = GRPOLoss(adapter, dense=True)

    def way(loss: Any, share: bool) -> Callable[[], torch.Tensor]:
        def compute() -> torch.Tensor:
            adapter.share_prompts = share
            output = loss(batch)
            terms = [value for name, value in output.items() if name.startswith("loss_") and value is not None]
            return torch.stack(terms).sum()

        return compute

    ways = {name: way(loss, True) for name, loss in modules.items()}
    if every:
        ways |= {f"{name}, rows whole": way(loss, False) for name, loss in modules.items()}
    return ways


def steps(model: Any, plain: Any, batch: TensorDict, adapter: MaskedAttentionAdapter, every: bool) -> dict[str, Any]:
    """Return the steps of all ways: gradients are cleared, and stay allocated."""

    def step(runner: Any, loss: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def run() -> None:
            runner.zero_grad(set_to_none=False)
            loss().backward()

        return run

    for runner in (model, plain):  # before anything is counted
        for weight in runner.parameters():
            weight.grad = torch.zeros_like(weight)
    ways = {name: step(plain, loss) for name, loss in peer_losses(plain, batch).items()}
    return ways | {name: step(model, loss) for name, loss in own_losses(adapter, batch, every).items()}


def measure(args: argparse.Namespace) -> list[Result]:
    """Time all ways in turn."""
    model = make_model(args.shape, args)
    plain = plain_twin(model)
    batch = make_batch(model, args.group, args.prompt, args.response, args.budget)
    with MaskedAttentionAdapter(model) as adapter:
        ways = steps(model, plain, batch, adapter, args.all)
        # The first step of each is the counted one.
        peaks = {name: peak(way).peak for name, way in ways.items()}
        times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0, label="learner")
    claim = f"learner step, {args.group} x ({args.prompt} + {args.response}) tokens, vocabulary {args.vocabulary}"
    results = [times.result(claim, name, TORCHRL, 0.3 if name == BOTH else None, bytes=peaks[name]) for name in ways]
    results.append(times.result("second track on top of the first", BOTH, MASKED, 1.15, bytes=peaks[BOTH]))
    ratio = peaks[BOTH] / peaks[TORCHRL]
    results.append(Result("learner's peak", BOTH, ratio=ratio, of=TORCHRL, goal=1.0, bytes=peaks[BOTH]))
    return results


if __name__ == "__main__":
    main("learner", parser(), measure)

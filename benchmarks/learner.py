"""One learner step, forward and backward: both tracks of SMD against a plain dense GRPO step, in one run.

    python -m benchmarks.learner              # one group of 8, prompt 1,024, response 128, half the prompt's keys kept

Peers: TorchRL's ``GRPOLoss`` on full logits of whole rows, and what TRL's trainer computes (whole rows, logits of the
response only). The rest is this library's: its dense and masked policy term with rows run whole and with shared
prompts, and both tracks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torchrl.modules.distributions import LLMMaskedCategorical
from torchrl.objectives.llm import GRPOLoss as TorchRLGRPOLoss

from benchmarks.decode import make_model
from smdlib import GRPOLoss, MaskedAttentionAdapter, ShadowMask, SMDLoss
from tests.cache.allocations import Allocations


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


def make_batch(model: Any, group: int, prompt: int, response: int, budget: float, device: str) -> TensorDict:
    """A group's rows; every layer and KV head has lost other keys of the prompt, the same in all rows."""
    torch.manual_seed(1)
    layers, heads = model.config.num_hidden_layers, model.config.num_key_value_heads
    total = prompt + response
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


def make_ways(model: Any, batch: TensorDict) -> dict[str, Callable[[], torch.Tensor]]:
    """Return a function per way that gives the loss."""
    adapter = MaskedAttentionAdapter(model)
    adapter.head()
    response = int(batch["masks", "all_assistant_mask"][0].sum())
    plain = batch.exclude("shadow").set("advantage", batch["advantage"][:, None, None].expand(*batch.shape, 1, 1))
    plain = plain.set("advantage", plain["advantage"].expand(-1, batch["tokens", "full"].shape[1], 1).contiguous())
    torchrl = TorchRLGRPOLoss(FullLogits(model), masking_strategy="generic", entropy_bonus=False, entropy_coeff=0.0)

    def torchrl_way() -> torch.Tensor:
        return torchrl(plain).loss_objective

    def trl_way() -> torch.Tensor:
        ids = batch["tokens", "full"]
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=response + 1).logits[:, :-1].float()
        chosen = logits.gather(-1, ids[:, -response:, None]).squeeze(-1) - logits.logsumexp(-1)
        ratio = (chosen - batch["log_probs", "full"][:, -response:]).exp()
        advantage = batch["advantage"][:, None]
        return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()

    def own(loss: Any, share: bool) -> Callable[[], torch.Tensor]:
        def way() -> torch.Tensor:
            adapter.share_prompts = share
            output = loss(batch)
            return sum(value for name, value in output.items() if name.startswith("loss_") and value is not None)

        return way

    return {
        "TorchRL GRPOLoss, full logits": torchrl_way,
        "TRL's computation": trl_way,
        "dense, rows whole": own(GRPOLoss(adapter, dense=True), False),
        "masked, rows whole": own(GRPOLoss(adapter), False),
        "both tracks, rows whole": own(SMDLoss(adapter), False),
        "dense, prompts shared": own(GRPOLoss(adapter, dense=True), True),
        "masked, prompts shared": own(GRPOLoss(adapter), True),
        "both tracks, prompts shared": own(SMDLoss(adapter), True),
    }


def step(model: Any, way: Callable[[], torch.Tensor], device: str) -> float:
    """Seconds of one forward and backward pass."""
    model.zero_grad()
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    way().backward()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def peak(model: Any, way: Callable[[], torch.Tensor]) -> int:
    """Peak of live storage above what was there before, in bytes; gradients of the weights are not counted."""
    model.zero_grad(set_to_none=False)
    with Allocations() as measured:
        way().backward()
    return measured.peak


def main(args: argparse.Namespace) -> None:
    """Time all ways in turn."""
    model = make_model(args.layers, args.device, getattr(torch, args.dtype), args.vocabulary)
    batch = make_batch(model, args.group, args.prompt, args.response, args.budget, args.device)
    ways = make_ways(model, batch)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(args.repetitions + 1):
        for name, way in ways.items():
            taken = step(model, way, args.device)
            if repetition:
                times[name].append(taken)
    baseline, results = times["TorchRL GRPOLoss, full logits"], {}
    print(
        f"group {args.group}, prompt {args.prompt}, response {args.response}, {args.layers} layers, vocabulary "
        f"{args.vocabulary}, {args.dtype}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    for name, taken in times.items():
        ratio = statistics.median(a / b for a, b in zip(taken, baseline, strict=True))
        memory = peak(model, ways[name])
        results[name] = {"median_s": statistics.median(taken), "ratio": ratio, "peak_bytes": memory}
        print(f"{name:30} median {statistics.median(taken):7.2f} s   ratio {ratio:5.2f}   peak {memory / 1e6:8.0f} MB")
    if args.json:
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=128)
    parser.add_argument("--budget", type=float, default=0.5)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    main(parser.parse_args())

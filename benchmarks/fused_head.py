"""Log-prob, entropy and KL of N tokens: the fused head against full logits, forward and backward.

    python -m benchmarks.fused_head            # N = 1024, hidden 896, V = 151,936 (the shapes of Qwen2.5-0.5B)

Extra memory is the peak of live storage above what was there before, less the gradients of hidden states and weight
that either way has to return. Full logits take N * V * 4 bytes = 622 MB.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Result, alternate, peak
from benchmarks._report import main
from smdlib.losses import linear_scores

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
FUSED, FULL = "fused", "full logits"
QUICK = "--tokens 512 --width 32 --vocabulary 32768 --repeats 1"


def parser() -> argparse.ArgumentParser:
    """Arguments of the script."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 1024), ("width", 896), ("vocabulary", 151_936), ("repeats", 3)):
        made.add_argument(f"--{name}", type=int, default=default)
    made.add_argument("--device", default="cpu")
    return made


def fused(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor, upstream: Tensor) -> None:
    """The library's way."""
    scores = linear_scores(hidden, weight, targets, teacher)
    assert scores.kl is not None
    (scores.log_probs * upstream[0] + scores.entropy * upstream[1] + scores.kl * upstream[2]).sum().backward()


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, teacher: Tensor, upstream: Tensor) -> None:
    """Full logits of student and teacher."""
    log_probs = (hidden @ weight.T).log_softmax(-1)
    with torch.no_grad():
        dense = (teacher @ weight.T).log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    kl = (dense.exp() * (dense - log_probs)).sum(-1)
    chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    (chosen * upstream[0] + entropy * upstream[1] + kl * upstream[2]).sum().backward()


def make_inputs(tokens: int, width: int, vocabulary: int, device: str) -> Inputs:
    """Random states whose teacher is a little off, and random upstream gradients."""
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, device=device) * 0.5
    weight = torch.randn(vocabulary, width, device=device) * 0.05
    targets = torch.randint(vocabulary, (tokens,), device=device)
    teacher = hidden + 0.05 * torch.randn(tokens, width, device=device)
    return hidden.requires_grad_(), weight.requires_grad_(), targets, teacher, torch.randn(3, tokens, device=device)


def measure(args: argparse.Namespace) -> list[Result]:
    """Time both ways in turn, and compare their gradients."""
    inputs = make_inputs(args.tokens, args.width, args.vocabulary, args.device)
    hidden, weight, *_ = inputs
    grads: dict[str, tuple[Any, Any]] = {}

    def way(name: str, compute: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            hidden.grad = weight.grad = None
            compute(*inputs)
            grads[name] = hidden.grad, weight.grad

        return run

    ways = {FUSED: way(FUSED, fused), FULL: way(FULL, plain)}
    extra = {name: peak(run).peak - hidden.nbytes - weight.nbytes for name, run in ways.items()}
    largest = max(float((a - b).abs().max()) for a, b in zip(grads[FUSED], grads[FULL], strict=True))
    assert largest < 1e-4, f"gradients differ by {largest}: the two do not compute the same"
    times = alternate(ways, device=args.device, repeats=args.repeats, warmup=0, label="fused head")
    logits = 4 * args.tokens * args.vocabulary
    claim = f"head, {args.tokens} tokens, vocabulary {args.vocabulary}"
    results = [times.result(claim, name, FULL, 1.3 if name == FUSED else None) for name in (FULL, FUSED)]
    for name in (FULL, FUSED):
        goal = 1 / 3 if name == FUSED else None
        results.append(
            Result("head, extra memory", name, None, extra[name] / logits, "one [N, V]", goal, bytes=extra[name])
        )
    return results


if __name__ == "__main__":
    main("fused_head", parser(), measure)

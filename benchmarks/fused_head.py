"""Log-prob, entropy and KL of N tokens: the fused head against full logits, forward and backward, in one run.

    python -m benchmarks.fused_head            # N = 1024, hidden 896, V = 151,936 (the shapes of Qwen2.5-0.5B)

Measured on 2 CPU cores, float32, torch 2.13.0, 5 repetitions:

    fused: median  10.18 s, extra memory    12.6 MB = 0.020 of full logits
    plain: median  13.93 s, extra memory  3808.1 MB = 6.119 of full logits
    time ratio fused / plain (median of pairs): 0.73; largest difference of gradients 1.3e-06

Alternating repetitions, medians; extra memory is the peak of live storage above what was there before, less the
gradients of hidden states and weight that either way has to return. Full logits take N * V * 4 bytes = 622 MB.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from smdlib.losses import linear_scores
from tests.cache.allocations import Allocations

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


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


def run(way: Callable[..., None], inputs: Inputs) -> tuple[float, tuple[Tensor, Tensor]]:
    """Seconds of one forward and backward pass, and the gradients."""
    hidden, weight, *_ = inputs
    hidden.grad = weight.grad = None
    if hidden.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    way(*inputs)
    if hidden.is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    assert hidden.grad is not None and weight.grad is not None
    return seconds, (hidden.grad, weight.grad)


def extra_memory(way: Callable[..., None], inputs: Inputs) -> int:
    """Peak bytes above the start, less the returned gradients."""
    hidden, weight, *_ = inputs
    hidden.grad = weight.grad = None
    with Allocations() as allocations:
        way(*inputs)
    return allocations.peak - hidden.nbytes - weight.nbytes


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 1024), ("width", 896), ("vocabulary", 151_936), ("repeats", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    inputs = make_inputs(options.tokens, options.width, options.vocabulary, options.device)
    times: dict[str, list[float]] = {"fused": [], "plain": []}
    grads = {}
    for _ in range(options.repeats):
        for name, way in (("fused", fused), ("plain", plain)):
            seconds, grads[name] = run(way, inputs)
            times[name].append(seconds)
    error = max(float((a - b).abs().max()) for a, b in zip(grads["fused"], grads["plain"], strict=True))
    grads.clear()
    full = options.tokens * options.vocabulary * 4
    print(f"{options.tokens} tokens, width {options.width}, vocabulary {options.vocabulary}, {options.device}, "
          f"{torch.get_num_threads()} threads, torch {torch.__version__}")  # fmt: skip
    for name, way in (("fused", fused), ("plain", plain)):
        extra = extra_memory(way, inputs)
        print(f"{name}: median {statistics.median(times[name]):6.2f} s, extra memory {extra / 1e6:7.1f} MB = "
              f"{extra / full:.3f} of full logits")  # fmt: skip
    print(f"time ratio fused / plain (median of pairs): "
          f"{statistics.median(a / b for a, b in zip(times['fused'], times['plain'], strict=True)):.2f}; "
          f"largest difference of gradients {error:.1e}")  # fmt: skip


if __name__ == "__main__":
    main()

"""A long prompt in chunks under one budget: what a layer holds at its peak, and whether the chunks take equal time.

    python -m benchmarks.chunked_prefill    # SmolLM2-135M, 8,192 tokens in chunks of 512, budget 1024

Measured on one CPU core, float32, torch 2.13.0; limit of a layer: 1024 + 512 = 1536 slots:

                             s a chunk   second half    peak of    all layers at    at rest,
                             (median)    over first     a layer    once, a layer    a layer
    snapkv,    reserve 512     2.46        1.02          1536          1536          1536
    streaming, reserve 512     2.38        1.01          1536          1536          1536
    streaming, reserve 128     2.33        0.99          2688          1203          1152

A layer's peak counts the slots behind every storage that holds its keys or values while it attends: its own, and the
copy that attention looks at where a chunk does not fit into the reserve (``--reserve 128``: one layer at a time holds
more than budget and chunk, all together hold less). What a policy needs for its scores is not counted. The first chunk
is left out of the times: it has nothing to look back at, and pays for the start. Seconds are of the processor, so that
other programs on the machine do not count.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from examples.documents import load_documents
from examples.smollm2 import load_model
from smdlib import CompressedCache, MaskedAttentionAdapter, ShadowMaskRecorder


@dataclass
class Result:
    """One prefill; slots are keys and values of one token in every row and KV head of a layer."""

    policy: str
    tokens: int
    chunk: int
    budget: int
    reserve: int
    seconds: list[float]  # of each chunk
    second_half_over_first: float
    layer_peak: float  # slots
    mean_peak: float  # slots, all layers together at one moment, over their number
    at_rest: float  # slots a layer, after the prefill

    @property
    def bounded(self) -> bool:
        """Whether no layer ever held more than budget and chunk."""
        return self.layer_peak <= self.budget + self.chunk


class Peak:
    """Watches, at each layer's ``update``, which storages hold keys and values."""

    def __init__(self, cache: CompressedCache) -> None:
        self.cache, self.layer, self.total = cache, 0, 0
        for layer in cache.layers:
            setattr(layer, "update", self.watched(layer))  # noqa: B010

    def watched(self, layer: Any) -> Any:
        update = layer.update

        def watching(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            held = [self.storages(other) for other in self.cache.layers]
            self.layer = max(self.layer, sum(self.storages(layer).values()))
            self.total = max(self.total, sum(sum(one.values()) for one in held))
            return result

        return watching

    @staticmethod
    def storages(layer: Any) -> dict[int, int]:
        parts = [layer.slots, layer._step]
        tensors = [tensor for part in parts if part is not None for tensor in (part.keys, part.values)]
        return {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}


@torch.no_grad()
def prefill(model: PreTrainedModel, ids: torch.Tensor, policy: str, chunk: int, budget: int, reserve: int) -> Result:
    """Feed ``ids [1, T]`` in chunks."""
    cache = CompressedCache(
        model.config,
        policy,
        budget,
        reserve=reserve,
        recorder=ShadowMaskRecorder(),
        prompt_lengths=[ids.shape[1]],
    )
    peak, seconds = Peak(cache), []
    for start in range(0, ids.shape[1], chunk):
        began = time.process_time()
        model(ids[:, start : start + chunk], cache=cache, logits_to_keep=1)
        seconds.append(time.process_time() - began)
        print(f"  {policy}: tokens {start + chunk:6d}, {seconds[-1]:6.2f} s", flush=True)
    config: Any = model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    slot = 2 * config.num_key_value_heads * dim * model.dtype.itemsize
    full = seconds[1:]
    half = len(full) // 2
    return Result(
        policy=policy,
        tokens=ids.shape[1],
        chunk=chunk,
        budget=budget,
        reserve=reserve,
        seconds=seconds,
        second_half_over_first=statistics.median(full[-half:]) / statistics.median(full[:half]),
        layer_peak=peak.layer / slot,
        mean_peak=peak.total / slot / len(cache.layers),
        at_rest=cache.kv_bytes() / slot / len(cache.layers),
    )


def main() -> None:
    """Print one line a policy, and write all figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 8192), ("chunk", 512), ("budget", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--reserve", type=int, default=None, help="default: the chunk, so that chunks are in place")
    parser.add_argument("--policies", nargs="+", default=["snapkv", "streaming"])
    parser.add_argument("--out", type=Path, default=Path("runs/chunked_prefill.json"))
    options = parser.parse_args()
    model, tokenizer = load_model()
    text = "\n\n".join(row["document"] for row in load_documents())
    ids = torch.tensor(tokenizer(text)["input_ids"])
    ids = ids.repeat(-(-options.tokens // len(ids)))[None, : options.tokens]
    print(f"{options.tokens} tokens, chunks of {options.chunk}, budget {options.budget}, torch {torch.__version__}, "
          f"{torch.get_num_threads()} threads")  # fmt: skip
    results = []
    with MaskedAttentionAdapter(model):
        for policy in options.policies:
            reserve = options.reserve or options.chunk
            result = prefill(model, ids, policy, options.chunk, options.budget, reserve)
            results.append(result)
            print(f"{policy}, reserve {reserve}: {statistics.median(result.seconds[1:]):.2f} s a chunk, second half "
                  f"over first {result.second_half_over_first:.2f}; peak of a layer {result.layer_peak:.0f} slots, "
                  f"limit {options.budget + options.chunk}; all layers at once {result.mean_peak:.0f} a layer; at rest "
                  f"{result.at_rest:.0f}")  # fmt: skip
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps([asdict(result) | {"bounded": result.bounded} for result in results], indent=1))
    print(f"wrote {options.out}")


if __name__ == "__main__":
    main()

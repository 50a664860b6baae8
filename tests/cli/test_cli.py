"""`python -m smdlib`: what it prints, what it returns, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from transformers import DeepseekV3Config

from smdlib._cli import main
from smdlib._cli.check import TEXT
from smdlib.masks import ShadowMaskRecorder
from smdlib.testing import byte_tokenizer, tiny_model

QUICK = ["--prompt-tokens", "60", "--new-tokens", "6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A tiny model with its tokenizer, as `from_pretrained` wants it."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def run(capsys):
    """Runs a command; exit code and what was printed, without line breaks, on either stream."""

    def call(*arguments):
        code = main([str(argument) for argument in arguments])
        printed = capsys.readouterr()
        return code, " ".join(printed.out.split()), " ".join(printed.err.split())

    return call


# --- check


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--policy", "h2o(recent=4)", "--evict-every", "2", "--budget", "20"],
        ["--policy", "streaming", "--allocation", "pyramid", "--budget", "0.3"],
        ["--policy", "knorm", "--allocation", "adaptive"],
    ],
)
def test_check_says_that_it_holds(run, folder, options):
    code, out, _ = run("check", folder, *QUICK, *options)
    assert code == 0
    assert "It holds: with the record, the learner's log-probs are those of the sampler" in out
    assert "prompts of 60 and 40 tokens, 6 sampled each" in out


def test_check_says_that_it_does_not_hold(run, folder, monkeypatch):
    record = ShadowMaskRecorder.record
    monkeypatch.setattr(ShadowMaskRecorder, "record", lambda s, i, at, gone, seen: record(s, i, at, gone & False, seen))
    code, out, _ = run("check", folder, *QUICK)
    assert code == 1
    assert "It does NOT hold: " in out and "Do not train on these samples" in out
    assert "bfloat16" not in out
    code, out, _ = run("check", folder, *QUICK, "--dtype", "bfloat16")
    assert code == 1 and "with --dtype float32 you see whether it is more than rounding" in out


def test_a_budget_that_evicts_nothing_proves_nothing(run, folder):
    code, out, _ = run("check", folder, *QUICK, "--budget", "60")
    assert code == 1
    assert "This proves nothing: no key was evicted" in out and "It holds" not in out


def test_evictions_that_do_not_matter_prove_little(run, folder):
    code, out, _ = run("check", folder, *QUICK, "--tolerance", "50")
    assert code == 1
    assert "This proves little: " in out and "It holds" not in out


def test_half_precision_is_called_a_band(run, folder):
    code, out, _ = run("check", folder, *QUICK, "--dtype", "bfloat16")
    assert code == 0
    assert "a band, since bfloat16 rounds" in out


def test_a_prompt_of_your_own(run, folder, tmp_path):
    (tmp_path / "prompt.txt").write_text(TEXT[300:330], encoding="utf-8")
    code, out, _ = run("check", folder, "--prompt-file", tmp_path / "prompt.txt", "--new-tokens", 4)
    assert code == 0 and "prompts of 30 and 20 tokens" in out
    (tmp_path / "prompt.txt").write_text("ab", encoding="utf-8")
    code, _, err = run("check", folder, "--prompt-file", tmp_path / "prompt.txt")
    assert code == 2 and "the prompt has 2 tokens; it takes 3 at least" in err
    code, _, err = run("check", folder, "--prompt-file", tmp_path / "none.txt")
    assert code == 2 and "error: cannot read the prompt file" in err


# --- plan


def test_plan_needs_a_configuration_only(run, folder, tmp_path):
    settings = ["--prompt", 100, "--response", 20, "--group", 2, "--budget", 0.25]
    code, out, _ = run("plan", folder, *settings)
    assert code == 0
    assert "llama: 2 layers, 2 KV heads of 8, float32 2 rows: 1 x 2, 100 tokens of prompt and 20 of response" in out
    assert "snapkv keeps 25 keys per layer and KV head" in out
    # 2 rows x 2 layers x 2 heads x (25 + 20) slots x 2 x 8 numbers x 4 bytes, against 119 tokens
    assert "keys and values │ 60.9 kB │ 23.0 kB │ 38 %" in out
    config = tmp_path / "somewhere" / "config.json"
    config.parent.mkdir()
    config.write_text(open(f"{folder}/config.json").read())
    assert run("plan", config, *settings)[:2] == (0, out)
    code, half, _ = run("plan", config, *settings, "--dtype", "bfloat16")
    assert code == 0 and "keys and values │ 30.5 kB │ 11.5 kB │ 38 %" in half


def test_plan_of_budgets_that_differ(run, folder):
    code, out, _ = run("plan", folder, "--allocation", "pyramid", "--prompts", 3, "--budget", 100)
    assert code == 0 and "24 rows: 3 x 8" in out and "snapkv keeps 5 to 195 keys" in out
    code, out, _ = run("plan", folder, "--allocation", "adaptive")
    assert code == 0 and "padding of unequal heads, at most" in out


# --- what cannot be run


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_missing_model_is_named(run, command, tmp_path):
    code, _, err = run(command, "./no/such/model")
    assert (code, err) == (2, "error: there is no folder or file './no/such/model'.")
    code, _, err = run(command, tmp_path)
    assert code == 2 and "holds no config.json" in err


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_model_that_is_not_on_the_hub_is_named(run, command, monkeypatch):
    def missing(*args, **kwargs):
        raise OSError("nobody/nothing is not a valid model identifier\nand much more")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", missing)
    code, _, err = run(command, "nobody/nothing")
    assert code == 2
    assert (
        err == "error: 'nobody/nothing' is neither here nor on the hub: nobody/nothing is not a valid model identifier"
    )


@pytest.mark.parametrize("command", ["plan", "check"])
def test_an_unsupported_architecture_is_refused_before_loading(run, command, tmp_path):
    DeepseekV3Config().save_pretrained(tmp_path)
    code, _, err = run(command, tmp_path)
    assert code == 2
    assert "is not supported: DeepseekV3Config uses multi-head latent attention" in err


def test_a_file_that_is_no_configuration(run, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nonesuch"}))
    code, _, err = run("plan", tmp_path / "config.json")
    assert code == 2 and "is no configuration that transformers knows" in err


def test_check_wants_the_folder(run, folder, tmp_path):
    code, _, err = run("check", f"{folder}/config.json")
    assert code == 2 and "is a file; to check a model give its folder" in err
    tiny_model().config.save_pretrained(tmp_path)
    code, _, err = run("check", tmp_path)
    assert code == 2 and "cannot be loaded" in err


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_policy_that_does_not_exist(run, folder, command):
    code, _, err = run(command, folder, "--policy", "snapk")
    assert code == 2 and "error: unknown policy 'snapk', available: " in err
    code, _, err = run(command, folder, "--policy", "snapkv(windows=3)")
    assert code == 2 and "has no option windows" in err


def test_a_policy_that_breaks_its_contract(run, folder, monkeypatch):
    from smdlib.policies import KnormPolicy

    monkeypatch.setattr(KnormPolicy, "score", lambda self, view: view.keys.norm(dim=-1).double())
    code, _, err = run("check", folder, *QUICK, "--policy", "knorm")
    assert code == 2 and "cannot be checked: policy KnormPolicy at layer 0: scores are torch.float64" in err


def test_without_rich_the_extra_is_named(run, folder, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich" or name.startswith("smdlib._cli.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    code, _, err = run("plan", folder)
    assert (code, err) == (2, "error: the tables are drawn by rich, which is not installed: pip install 'smdlib[cli]'")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "x", "--budget", "1.5"], "'1.5' is neither a share such as 0.5"),
        (["plan", "x", "--budget", "0"], "'0' is neither a share"),
        (["plan", "x", "--budget", "half"], "'half' is neither a share"),
        (["plan", "x", "--budget", "nan"], "'nan' is neither a share"),
        (["check", "x", "--evict-every", "0"], "'0' is no whole number of at least 1"),
        (["check", "x", "--new-tokens", "2.5"], "'2.5' is no whole number"),
        (["check", "x", "--dtype", "int8"], "invalid choice: 'int8'"),
        (["check"], "the following arguments are required: MODEL"),
        (["paln"], "invalid choice: 'paln'"),
    ],
)
def test_arguments_out_of_range(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["check", "--help"], []], ids=str)
def test_help_runs_as_a_module(arguments):
    done = subprocess.run(
        [sys.executable, "-m", "smdlib", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120"},
    )
    assert done.returncode == (0 if arguments else 2), done.stderr
    expected = {"plan": "MODEL_OR_CONFIG", "check": "exit code: 0 if it holds"}
    assert (
        expected.get(arguments[0] if arguments else "", "whether the promise holds on a model of yours") in done.stdout
    )

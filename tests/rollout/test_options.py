"""Every option of ``generate`` is honoured, accepted because it changes nothing, or refused with a reason."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, MaxTimeCriteria

from smdlib.rollout.options import resolve_options
from tests.families import make_model
from tests.rollout.actors import make_actor, make_prompts, run, word_tokenizer

HONOURED: dict[str, Any] = {
    "max_new_tokens": 7,
    "do_sample": False,
    "temperature": 0.5,
    "eos_token_id": [3, 4],
    "pad_token_id": 5,
    "stop_strings": ["w1"],
    "stopping_criteria": [MaxTimeCriteria(1.0)],
    "max_time": 2.5,
}
# Values by which an option changes nothing.
NEUTRAL: dict[str, Any] = {
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "remove_invalid_values": False,
    "renormalize_logits": False,
    "use_cache": True,
}
ALL_OPTIONS = sorted(
    {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    | {name for name in inspect.signature(GenerationMixin.generate).parameters if name not in ("self", "kwargs")}
    | set(NEUTRAL)
    | {"input_ids", "attention_mask", "position_ids", "cache", "past_key_values", "tokenizer"}
)


def resolve(**given):
    return resolve_options(given, make_model("llama"), word_tokenizer())


def other_values(name):
    """Values of the kinds that options take; none of them is neutral for ``name``."""
    values = [True, False, 0, 1, 3, 0.0, 0.5, 1.0, "x", [7], {"x": 1}, [[7]]]
    return [value for value in values if not (name in NEUTRAL and value == NEUTRAL[name])]


def test_the_lists_cover_transformers():
    assert {"max_new_tokens", "top_k", "streamer", "logits_processor", "watermarking_config"} <= set(ALL_OPTIONS)
    assert len(ALL_OPTIONS) > 60


@pytest.mark.parametrize("name", sorted(set(ALL_OPTIONS) - set(HONOURED)))
def test_other_options_are_neutral_or_refused(name):
    """Nothing is dropped silently: every value that could change anything is an error which names it and says why."""
    plain = resolve()
    assert resolve(**{name: None}) == plain  # as if left out, in GenerationConfig too
    if name in NEUTRAL:
        assert resolve(**{name: NEUTRAL[name]}) == plain
    for value in other_values(name):
        with pytest.raises(ValueError, match=rf"generate option {name}=.* is refused: \w+") as caught:
            resolve(**{name: value})
        assert re.search(r"refused: .{25,}", str(caught.value))  # a reason


@pytest.mark.parametrize("name", HONOURED)
def test_honoured_options_arrive(name):
    options, plain = resolve(**{name: HONOURED[name]}), resolve()
    changed = {field for field in vars(options) if getattr(options, field) != getattr(plain, field)}
    field = {"eos_token_id": "eos_token_ids"}.get(name, name)
    assert changed == {field}
    value = HONOURED[name]
    assert getattr(options, field) == (tuple(value) if isinstance(value, list) else value)


def test_defaults():
    options = resolve()
    assert (options.max_new_tokens, options.do_sample, options.temperature) == (128, True, 1.0)
    assert (options.eos_token_ids, options.pad_token_id, options.stop_strings) == ((2,), 0, ())
    assert options.stopping_criteria == () and options.max_time is None
    assert resolve_options(None, make_model("llama"), word_tokenizer()) == options


def test_what_generate_is_told():
    config = resolve(temperature=0.5, max_new_tokens=7, eos_token_id=[3, 4], pad_token_id=5, max_time=2.5).config()
    assert (config.temperature, config.max_new_tokens, config.do_sample) == (0.5, 7, True)
    assert (config.eos_token_id, config.pad_token_id) == ([3, 4], 5)
    assert config.max_time is None  # RowEnds has one clock for all calls
    assert resolve(do_sample=False).config().do_sample is False
    for name, value in NEUTRAL.items():
        assert getattr(config, name, None) in (None, value)


BAD = {
    "max_new_tokens": (0, -1, 2.5, True, None, "8", float("inf")),
    "temperature": (0, 0.0, -1.0, True, None, "1", float("nan"), float("inf")),
    "do_sample": (None, 1, "yes"),
    "max_time": (0, -1.0, "1", True),
    "eos_token_id": (-1, [3, -1], ["a"], 2.5, [True], "</s>"),
    "pad_token_id": (-1, 97, "a", True, 2.0),
    "stop_strings": ("", ["a", ""], [3], 3),
    "stopping_criteria": ([lambda ids, scores: True], 3, ["x"]),
}


@pytest.mark.parametrize("name", BAD)
def test_values_out_of_range(name):
    for value in BAD[name]:
        with pytest.raises((ValueError, TypeError), match=name):
            resolve(**{name: value})


def test_temperature_zero_and_greedy():
    with pytest.raises(ValueError, match="do_sample=False is greedy"):
        resolve(temperature=0.0)
    with pytest.raises(ValueError, match=r"temperature=0.5 has no effect with do_sample=False"):
        resolve(temperature=0.5, do_sample=False)


@pytest.mark.parametrize("value", [None, 1.0])
def test_unknown_names(value):
    with pytest.raises(TypeError, match=r"unknown generate option 'temprature'; SparseActor takes .*temperature"):
        resolve(temprature=value)
    with pytest.raises(TypeError, match="unknown generate option 'validate'"):  # a method, not an option
        resolve(validate=value)


def test_padding_is_a_token_of_the_model():
    tokenizer = word_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "w9"})
    assert resolve_options({}, make_model("llama"), tokenizer).pad_token_id == 9
    tokenizer.add_special_tokens({"pad_token": "<new>"})
    assert resolve_options({}, make_model("llama"), tokenizer).pad_token_id == 0
    assert resolve_options({"eos_token_id": 10**6}, make_model("llama"), word_tokenizer()).pad_token_id == 0


def test_padding_changes_nothing():
    prompts = make_prompts(9, 4, 6)
    ends = list(range(0, 97, 5))
    rows = [run(make_actor(eos_token_id=ends, pad_token_id=pad, max_new_tokens=12), prompts) for pad in (0, 5, 50)]
    assert len({len(row["tokens", "response"]) for row in rows[0]}) > 1
    for other in rows[1:]:
        for row, same in zip(rows[0], other, strict=True):
            assert torch.equal(row["tokens", "full"], same["tokens", "full"])
            torch.testing.assert_close(row["log_probs", "response"], same["log_probs", "response"], rtol=0, atol=1e-5)
            assert torch.equal(row["shadow"].evicted_at, same["shadow"].evicted_at)

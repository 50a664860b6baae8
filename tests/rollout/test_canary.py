"""What smdlib relies on in TorchRL and transformers. A failure here after an upgrade says what to look at."""

from __future__ import annotations

import inspect

import pytest
import torch
from torchrl.collectors.llm import LLMCollector
from torchrl.envs.llm import ChatEnv
from torchrl.modules.llm.policies import LogProbs, Masks, Text, Tokens
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)
from transformers.cache_utils import DynamicCache

from tests.families import make_model
from tests.rollout.actors import make_prompts
from tests.tokenizer import byte_tokenizer

FIELDS = {
    Tokens: {"prompt", "response", "full", "padded"},
    Masks: {"all_attention_mask", "all_assistant_mask", "padded"},
    LogProbs: {"prompt", "response", "full", "padded"},
    Text: {"prompt", "response", "full"},
}


@pytest.mark.parametrize("container", FIELDS)
def test_torchrl_containers(container):
    found = set(container.__annotations__)
    assert found == FIELDS[container], (
        f"TorchRL's {container.__name__} now has {sorted(found)}: SparseActor._entry writes all of its fields, "
        "smdlib.losses.TokenKeys reads some, and smdlib.rollout.inputs reads `padded`."
    )


def test_torchrl_collector_arguments():
    found = set(inspect.signature(LLMCollector.__init__).parameters)
    wanted = {"env", "policy", "dialog_turns_per_batch", "total_dialog_turns", "replay_buffer", "flatten_data"}
    assert wanted <= found, f"LLMCollector lost {sorted(wanted - found)}: look at the recipes and tests/rollout."


def test_torchrl_tokens_mode():
    parameters = inspect.signature(ChatEnv.__init__).parameters
    assert {"input_mode", "tokenizer", "batch_size"} <= set(parameters)
    try:
        env = ChatEnv(batch_size=(1,), input_mode="tokens", tokenizer=byte_tokenizer())
    except ValueError as error:
        pytest.fail(f"ChatEnv has no tokens mode any more ({error}): smdlib.rollout.environment builds on it.")
    assert ("tokens", "prompt") in env.full_observation_spec.keys(True) and "_make_specs_tokens" in dir(env), (
        "ChatEnv's tokens mode has other names: look at smdlib.rollout.environment and smdlib.rollout.inputs."
    )


class Watch(LogitsProcessor):
    def __init__(self):
        self.seen, self.copies, self.columns = [], [], []

    def __call__(self, input_ids, scores):
        self.seen.append(scores)
        self.copies.append(scores.clone())
        self.columns.append(input_ids.shape[1])
        return scores


class Count(StoppingCriteria):
    def __init__(self):
        self.columns = []

    def __call__(self, input_ids, scores, **kwargs):
        self.columns.append(input_ids.shape[1])
        return torch.zeros(len(input_ids), dtype=torch.bool)


def generate(dtype=torch.float32, **options):
    model = make_model("llama").to(dtype)
    (prompt,) = make_prompts(7)
    watch, count = Watch(), Count()
    config = GenerationConfig(max_new_tokens=4, pad_token_id=0, **({"do_sample": True, "top_k": 0} | options))
    torch.manual_seed(0)
    tokens = model.generate(
        prompt[None],
        cache=DynamicCache(config=model.config),
        generation_config=config,
        logits_processor=LogitsProcessorList([watch]),
        stopping_criteria=StoppingCriteriaList([count]),
    )
    return model, tokens, watch, count


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_logits_processors_see_raw_logits_before_the_warpers(dtype):
    model, tokens, watch, _ = generate(dtype, temperature=0.5)
    hint = "SampledLogProbs takes what a logits processor is given for the model's float32 logits: look at its callers."
    assert all(one.dtype == torch.float32 and one.shape == (1, 97) for one in watch.seen), hint
    logits = model(tokens).logits[0, 6:-1].float()
    close = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(torch.cat(watch.copies), logits, rtol=0, atol=close, msg=lambda text: f"{text}\n{hint}")


def test_processors_are_called_once_a_step_and_their_logits_are_not_changed_later():
    _, tokens, watch, count = generate(temperature=0.5)
    assert tokens.shape == (1, 11)
    assert watch.columns == [7, 8, 9, 10], "SampledLogProbs scores the newest token of each step: look at _score."
    assert count.columns == [8, 9, 10, 11], "RowEnds counts one call a step, after the token: look at __call__."
    for seen, copy in zip(watch.seen, watch.copies, strict=True):
        assert torch.equal(seen, copy), "generate() changes logits in place: SampledLogProbs has to copy them."


def test_no_defaults_of_transformers_reshape_the_distribution():
    """All that generate() adds to our own processor is the temperature."""
    from smdlib.rollout.options import resolve_options

    model = make_model("llama")
    config = resolve_options({"temperature": 0.5}, model, byte_tokenizer()).config()
    prepared, _ = model._prepare_generation_config(config)
    model._prepare_special_tokens(prepared, True, device=torch.device("cpu"))
    processors = model._get_logits_processor(
        generation_config=prepared,
        input_ids_seq_length=7,
        encoder_input_ids=None,
        prefix_allowed_tokens_fn=None,
        logits_processor=LogitsProcessorList([Watch()]),
    )
    names = [type(one).__name__ for one in processors]
    assert names == ["Watch", "TemperatureLogitsWarper"], (
        f"generate() now runs {names}: a default changes the distribution, or comes before our processor. Look at "
        "_NEUTRAL in smdlib/rollout/options.py."
    )


def test_stop_strings_of_a_slice():
    """RowEnds hands the response's columns alone to transformers' criterion, from one token on."""
    tokenizer = byte_tokenizer()
    criterion = StopStringCriteria(tokenizer, ["abc"])
    tokens = torch.tensor(tokenizer(["xabc", "abxc"], add_special_tokens=False)["input_ids"])
    found = [criterion(tokens[:, :columns], None).tolist() for columns in (1, 2, 3, 4)]
    assert found == [[False, False]] * 3 + [[True, False]], "StopStringCriteria works differently: look at RowEnds."

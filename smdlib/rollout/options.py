"""Options of ``generate``: honoured, or refused with the reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, cast

from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria

_RESHAPES = (
    "it changes the distribution that tokens are drawn from, and the learner scores the full softmax at one "
    "temperature, so the first ratio would not be 1"
)
_SEARCHES = "it is not plain sampling, so the tokens are no sample of the policy that the record describes"
_OWN = "it is what SparseActor itself gives to generate() and reads from it"

# Values that leave sampling as it is; a model's own generation config does not fill them in.
_NEUTRAL: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(("top_k",), (0, _RESHAPES)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty", "encoder_repetition_penalty"), (1.0, _RESHAPES)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_length"), (0, _RESHAPES)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff"), (0.0, _RESHAPES)),
    **dict.fromkeys(("num_beams", "num_return_sequences", "num_beam_groups"), (1, _SEARCHES)),
    **dict.fromkeys(("remove_invalid_values", "renormalize_logits"), (False, _RESHAPES)),
    "use_cache": (True, "without a cache there is nothing to evict from"),
}
# Other values that change nothing, of options that are off when they are None.
_OFF = {"min_p": 0.0, "min_new_tokens": 0, "guidance_scale": 1.0}
_REASONS = {
    **dict.fromkeys(
        ("min_p", "top_h", "min_new_tokens", "bad_words_ids", "sequence_bias", "suppress_tokens", "guidance_scale"),
        _RESHAPES,
    ),
    **dict.fromkeys(("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id"), _RESHAPES),
    **dict.fromkeys(("logits_processor", "prefix_allowed_tokens_fn", "watermarking_config"), _RESHAPES),
    **dict.fromkeys(("penalty_alpha", "assistant_model", "prompt_lookup_num_tokens", "constraints"), _SEARCHES),
    **dict.fromkeys(("return_dict_in_generate", "output_scores", "output_logits", "cache", "past_key_values"), _OWN),
    **dict.fromkeys(("input_ids", "inputs", "attention_mask", "position_ids", "tokenizer"), _OWN),
    **dict.fromkeys(("negative_prompt_ids", "negative_prompt_attention_mask"), _RESHAPES),
    "custom_generate": _SEARCHES,
    "generation_config": "pass what it should say as options of their own: each of them is checked",
    "streamer": "rows are sampled as a batch, and streamers take one row",
    "cache_implementation": "the cache is the actor's; choose policy, budget and evict_every instead",
    "max_length": "pass max_new_tokens, which does not depend on the prompt",
}


@dataclass(frozen=True)
class GenerateOptions:
    """What `SparseActor` honours of ``generate``'s options.

    Attributes:
        max_new_tokens: Longest response, in tokens.
        do_sample: Sample, or decode greedily (for evaluation; log-probs are the model's at temperature 1).
        temperature: Logits are divided by it before sampling; it is part of the log-probs.
        eos_token_ids: Tokens that end a response; they belong to it.
        pad_token_id: What fills rows that have ended. Never used to tell which tokens are real.
        stop_strings: A response ends when its text contains one of them.
        stopping_criteria: transformers' criteria; a row ends when one of them says so.
        max_time: Seconds after which sampling stops, for all rows.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float
    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    stop_strings: tuple[str, ...]
    stopping_criteria: tuple[StoppingCriteria, ...]
    max_time: float | None

    def config(self) -> GenerationConfig:
        """Return all of it that transformers' ``generate`` is to know; stopping is `RowEnds`' business."""
        neutral = {name: value for name, (value, _) in _NEUTRAL.items() if hasattr(GenerationConfig(), name)}
        if not self.do_sample:
            neutral.pop("top_k")  # greedy decoding never reads it, and warns when it is set
        return GenerationConfig(
            **neutral,
            max_new_tokens=self.max_new_tokens,
            do_sample=self.do_sample,
            temperature=self.temperature if self.do_sample else 1.0,
            eos_token_id=list(self.eos_token_ids) or None,
            pad_token_id=self.pad_token_id,
        )


def resolve_options(
    given: Mapping[str, Any] | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> GenerateOptions:
    """Check options of ``generate`` and fill in the rest.

    Of the model's own generation config only ``eos_token_id`` is taken: its top-k, top-p or temperature would change
    the policy that is trained without anybody having asked for it.

    Args:
        given: Keyword arguments as for ``model.generate``.
        model: For its end-of-sequence tokens.
        tokenizer: For its end-of-sequence and padding tokens.

    Returns:
        The options.

    Raises:
        ValueError: for an option that cannot be honoured, or a value out of range.
        TypeError: for a name that ``generate`` does not know.
    """
    given = dict(given or {})
    max_new_tokens = int(_positive(given.pop("max_new_tokens", 128), "max_new_tokens", int))
    do_sample = given.pop("do_sample", True)
    if not isinstance(do_sample, bool):
        raise ValueError(f"do_sample must be True or False, not {do_sample!r}.")
    temperature = float(_positive(given.pop("temperature", 1.0), "temperature", float, "; do_sample=False is greedy"))
    if not do_sample and temperature != 1.0:
        raise ValueError(f"temperature={temperature} has no effect with do_sample=False; leave one of the two out.")
    max_time = given.pop("max_time", None)
    if max_time is not None:
        max_time = float(_positive(max_time, "max_time", float))
    default = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    default = tokenizer.eos_token_id if default is None else default
    eos = _several(given.pop("eos_token_id", default), "eos_token_id", int)
    if any(isinstance(one, bool) or one < 0 for one in eos):
        raise ValueError(f"eos_token_id must be a token id or a list of them, not {eos!r}.")
    pad = _padding(given.pop("pad_token_id", None), model, tokenizer)
    strings = _several(given.pop("stop_strings", None), "stop_strings", str)
    if not all(strings):
        raise ValueError(f"stop_strings must not be empty, as one of {strings!r} is.")
    criteria = _several(given.pop("stopping_criteria", None), "stopping_criteria", StoppingCriteria)
    for name, value in given.items():
        _refuse(name, value)
    return GenerateOptions(max_new_tokens, do_sample, temperature, eos, pad, strings, criteria, max_time)


def _refuse(name: str, value: Any) -> None:
    """Accept a neutral value, refuse any other."""
    arguments = signature(cast(Any, GenerationMixin).generate).parameters
    if name not in {*vars(GenerationConfig()), *arguments, *_NEUTRAL, *_REASONS}:
        raise TypeError(
            f"unknown generate option {name!r}; SparseActor takes max_new_tokens, do_sample, temperature, "
            "eos_token_id, pad_token_id, stop_strings, stopping_criteria and max_time."
        )
    if value is None or (name in _OFF and value == _OFF[name]):
        return
    if name in _NEUTRAL:
        neutral, reason = _NEUTRAL[name]
        if value == neutral:
            return
        raise ValueError(f"generate option {name}={value!r} is refused: {reason}. Leave it out (it is {neutral!r}).")
    reason = _REASONS.get(name, "SparseActor does not know how to keep its tokens replayable")
    raise ValueError(f"generate option {name}={value!r} is refused: {reason}.")


def _padding(given: Any, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """What stands before short prompts and after ended rows: any token will do, but the model has to know it."""
    size = num_tokens(model)
    if given is None:
        # Tokenizers often have a padding token that the model was never resized for.
        usual = tokenizer.pad_token_id
        return usual if isinstance(usual, int) and 0 <= usual and (size is None or usual < size) else 0
    if isinstance(given, bool) or not isinstance(given, int) or given < 0 or (size is not None and given >= size):
        raise ValueError(f"pad_token_id must be one of the model's {size} tokens, not {given!r}.")
    return given


def num_tokens(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model can be fed, or ``None`` if its embedding does not say."""
    size = getattr(model.get_input_embeddings(), "num_embeddings", None)
    return size if isinstance(size, int) else None


def _positive(value: Any, name: str, kind: type, hint: str = "") -> int | float:
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a positive {'int' if kind is int else 'number'}, not {value!r}{hint}.")
    return value


def _several(value: Any, name: str, kind: type) -> tuple[Any, ...]:
    """Return one object, several of them or ``None`` as a tuple."""
    if value is None:
        return ()
    items = (value,) if isinstance(value, kind) or not isinstance(value, Sequence) else tuple(value)
    if not all(isinstance(one, kind) for one in items):
        raise TypeError(f"{name} must be of {kind.__name__}, one or several, not {value!r}.")
    return items

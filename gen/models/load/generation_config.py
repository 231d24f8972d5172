"""``generation_config.json`` of a published model: ends of texts, and sampling parameters that the
model's author ships.

Settings have the names and the meaning that ``generate`` of transformers gives them. They are the
defaults of the model's pipeline. A setting that changes tokens and that gen lacks is named in a
warning, and an invalid one is an error that names the file and the field.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from gen.core.errors import GenError, bad_value
from gen.core.sampling_params import SamplingParams

GENERATION = "generation_config.json"
SAME_NAME = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram_size",
    "min_new_tokens", "max_new_tokens", "max_length",
)  # fmt: skip
# read by ``sampling_of``, ``first_tokens`` and ``end_ids`` under other names
READ = (
    "do_sample", "stop_strings", "bad_words_ids", "suppress_tokens", "sequence_bias",
    "begin_suppress_tokens", "eos_token_id",
)  # fmt: skip
# settings that change no token of a decoder alone, or none without one of those that are named
WITHOUT_EFFECT = (
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight",
    "assistant_lookbehind", "bos_token_id", "cache_config", "cache_implementation",
    "compile_config", "continuous_batching_config", "decoder_start_token_id", "disable_compile",
    "early_stopping", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "is_assistant", "length_penalty", "low_memory", "max_cache_len", "max_matching_ngram_size",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "output_attentions",
    "output_hidden_states", "output_logits", "output_scores", "pad_token_id",
    "prefill_chunk_size", "prompt_lookup_num_tokens", "remove_invalid_values",
    "renormalize_logits", "return_dict_in_generate", "speculation_type", "target_lookbehind",
    "transformers_version", "use_cache", "use_mtp",
)  # fmt: skip
# values with which settings that gen lacks change nothing, beside null, false, 0 and nothing at all
FORCED = ("forced_bos_token_id", "forced_eos_token_id")
UNUSED = {"num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1}


def end_ids(*sources: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the ids that end a text, each once, in the order of their sources: the eos token ids
    of ``generation_config.json``, the config and the tokenizer, and the end of a turn."""
    found: list[Any] = []
    for source in sources:
        found += source if isinstance(source, (list, tuple)) else [source]
    return tuple(dict.fromkeys(i for i in found if i is not None))


def config_ends(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the eos token ids that a ``config.json`` states, of the model and of its text part."""
    return end_ids(
        config.get("eos_token_id"), (config.get("text_config") or {}).get("eos_token_id")
    )


def sampling_of(said: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the sampling parameters that a generation config states.

    ``do_sample: false`` is temperature 0. Without ``do_sample`` the temperature is the stated one,
    or that of the family.

    Args:
        said: content of the file.
        name: name of the model, for messages.

    Raises:
        GenError: a value is out of range.
    """
    where = f"{GENERATION} of model {name}"
    draws = said.get("do_sample")
    if draws is not None and not isinstance(draws, bool):
        raise bad_value(f"do_sample in {where}", draws, "true or false")
    stated: dict[str, tuple[str, Any]] = {key: (key, said.get(key)) for key in SAME_NAME}
    if draws is False:
        stated["temperature"] = "do_sample", 0.0
    stated["stop"] = "stop_strings", said.get("stop_strings")
    words = [
        *_lists(said, "bad_words_ids", where),
        *([token] for token in _ids(said, "suppress_tokens", where)),
    ]
    ends = end_ids(said.get("eos_token_id"))  # which ``generate`` never takes for bad words
    words = [word for word in words if len(word) != 1 or word[0] not in ends]
    stated["bad_words"] = "bad_words_ids", words or None
    stated["logit_bias"] = "sequence_bias", _token_bias(said, where) or None
    found = {}
    for key, (field, value) in stated.items():
        if value is None:
            continue
        try:
            SamplingParams(**{key: value})
        except GenError as error:
            reason = str(error).replace(f"sampling.{key}", field)
            raise GenError(f"{where}: {reason}") from None
        found[key] = value
    return found


def first_tokens(said: Mapping[str, Any], name: str) -> list[int]:
    """Return the token ids that may not begin an answer (``begin_suppress_tokens``). Raises
    ``GenError`` where they are no list of ids."""
    return _ids(said, "begin_suppress_tokens", f"{GENERATION} of model {name}")


def warn_of_missing(said: Mapping[str, Any], name: str) -> None:
    """Warn of the settings that change tokens and that gen lacks.

    Args:
        said: content of the file.
        name: name of the model.
    """
    known = (*SAME_NAME, *READ, *WITHOUT_EFFECT)
    missing = {
        key: value
        for key, value in said.items()
        if key not in known and not key.startswith("_") and value and value != UNUSED.get(key)
    }
    # other ids are names of tokens, such as that of an image
    missing = {k: v for k, v in missing.items() if not k.endswith("_token_id") or k in FORCED}
    if any(len(tokens) != 1 for tokens, _ in _biases(said)):
        missing["sequence_bias"] = "of several tokens"
    if missing:
        warnings.warn(
            f"{GENERATION} of model {name} has settings that gen lacks and leaves out:"
            f" {', '.join(f'{key} = {value!r}' for key, value in missing.items())}. With"
            " generation_config=False none of its settings are taken",
            stacklevel=2,
        )


def _ids(said: Mapping[str, Any], key: str, where: str) -> list[int]:
    """Return a setting that lists token ids. Raises ``GenError`` for anything else."""
    found = said.get(key) or []
    if not isinstance(found, list) or not all(_is_id(token) for token in found):
        raise bad_value(f"{key} in {where}", said[key], "a list of token ids")
    return found


def _lists(said: Mapping[str, Any], key: str, where: str) -> list[list[int]]:
    """Return a setting that lists lists of token ids. Raises ``GenError`` for anything else."""
    found = said.get(key) or []
    if not isinstance(found, list) or not all(
        isinstance(word, list) and word and all(_is_id(token) for token in word) for word in found
    ):
        raise bad_value(f"{key} in {where}", said[key], "a list of lists of token ids")
    return found


def _token_bias(said: Mapping[str, Any], where: str) -> dict[int, float]:
    """Return the biases of single tokens. Raises ``GenError`` unless biases are as transformers
    writes them: ``[[[id, ...], number], ...]``."""
    try:
        found = [(list(tokens), bias) for tokens, bias in _biases(said)]
        fine = all(
            tokens
            and all(map(_is_id, tokens))
            and isinstance(bias, (int, float))
            and not math.isnan(bias)
            for tokens, bias in found
        )
    except (TypeError, ValueError):
        found, fine = [], False
    if not fine:
        expected = "a list such as [[[5], -2.0]], token ids and a number each"
        raise bad_value(f"sequence_bias in {where}", said["sequence_bias"], expected)
    return {tokens[0]: float(bias) for tokens, bias in found if len(tokens) == 1}


def _biases(said: Mapping[str, Any]) -> list[Any]:
    return said.get("sequence_bias") or []


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

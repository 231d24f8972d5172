"""Samplers behind ``generate`` of any causal language model of transformers:

    model.generate(**inputs, custom_generate=gen.transformers_generate,
                   sampler="speculative_jacobi", max_new_tokens=64, seed=0)

``generate`` prepares its inputs as usual and calls this function in place of its own loop. Greedy
decoding gives the same tokens as that loop, sampling the same distribution. Row j of the same
prompt has the seed ``seed + j``; its tokens depend on prompt and seed alone, whatever the batch.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gen.core.errors import GenError, bad_value
from gen.core.rng import CounterRNG, item_key
from gen.core.sampler import Sampler, resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput, Stats
from gen.interop.transformers_request import Request, read_request
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.language_models import CausalLM
from gen.models.load.transformers_compat import argument_of_generate, pad_token
from gen.models.targets.causal import CausalTarget

# models that passed ``require_slots``, which takes a few forward passes
_PROVEN: weakref.WeakSet = weakref.WeakSet()


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """Output of ``generate`` with ``return_dict_in_generate``, with the cost of every row
    (``gen.core.stats.Stats``)."""

    stats: list[Stats] | None = None


def transformers_generate(
    model,
    input_ids: Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    synced_gpus: bool = False,
    streamer=None,
    *,
    sampler: str | Mapping[str, Any] | Sampler = "speculative_jacobi",
    seed: int | None = None,
    draft_model=None,
    **model_kwargs,
) -> Tensor | GenerateOutput:
    """Decode for ``generate``, which calls this function with what it prepared.

    Args:
        model: causal language model of transformers.
        input_ids: prompts, long [B, S], padded on the left.
        logits_processor: processors that ``generate`` made of its settings.
        stopping_criteria: criteria that ``generate`` made of its settings.
        generation_config: settings of ``generate``.
        synced_gpus: not supported.
        streamer: streamer of transformers.
        sampler: name of a causal sampler or preset, ``{"name": ..., parameter: value}`` or a
            sampler.
        seed: integer; None draws one from torch's default generator, which
            ``transformers.set_seed`` sets.
        draft_model: causal language model with the same vocabulary, for samplers that need one.
        model_kwargs: keyword arguments for the model.

    Returns:
        Long [B, S + new], padded behind the eos token, or a ``GenerateOutput``.

    Raises:
        GenError: the model's attention takes no masks, or a setting cannot be honoured
            (docs/interop.md lists them).
    """
    _refuse_call(generation_config, synced_gpus)
    streamer = streamer if streamer is not None else argument_of_generate("streamer")
    with _usable(model, draft_model):
        request = read_request(
            input_ids,
            generation_config,
            logits_processor,
            stopping_criteria,
            CausalLM(model).vocab_size,
            model_kwargs,
        )
        sampler, sampling = _resolved(sampler, request, generation_config.do_sample)
        _require_sampler(sampler, draft_model, request.space.vocab_size)
        target, put = _target(model, request, sampling), None
        draft = None if draft_model is None else _target(draft_model, request, sampling)
        if streamer is not None:
            put = _following(streamer, request.ends, generation_config, input_ids.device)
        rng = CounterRNG(_keys(request.prompts, seed), model.device)
        out = sampler(target, rng, draft=draft, callback=put)
    if streamer is not None:
        streamer.end()
    return _result(input_ids, out, request.ends, generation_config)


def _resolved(spec: Any, request: Request, draws: bool) -> tuple[Sampler, SamplingParams]:
    """Make the sampler and its sampling parameters; arguments as in ``resolve_sampler``."""
    sampler, sampling = resolve_sampler(spec, request.sampling)
    if sampler.deterministic and not draws:
        # it reads the distribution of the model, as ``generate(num_beams=...)`` does
        sampling = replace(sampling, temperature=1.0)
    return sampler, sampling


@contextmanager
def _usable(*models: Any) -> Iterator[None]:
    """Require models that can be used, and leave them in the mode that they were in.

    Args:
        models: causal language models of transformers; None is skipped.
    """
    came = [m for m in models if m is not None]
    training = [m.training for m in came]
    try:
        for model in came:
            require_model(model)
        yield
    finally:
        for model, was_training in zip(came, training, strict=True):
            model.train(was_training)


def _result(
    input_ids: Tensor, out: SampleOutput, ends: Tensor, config: Any
) -> Tensor | GenerateOutput:
    """Put the prompts before the tokens, as ``generate`` returns them."""
    tokens = out.tokens.to(input_ids.device)
    lengths = spoken(tokens, ends)
    tokens = padded(tokens, lengths, config)[:, : int(lengths.max())]
    sequences = torch.cat([input_ids, tokens], 1)
    if config.return_dict_in_generate:
        return GenerateOutput(sequences=sequences, stats=out.stats)
    return sequences


def spoken(tokens: Tensor, ends: Tensor) -> Tensor:
    """Count the tokens of each row [B, T] up to and including its first end token: long [B]."""
    over = torch.isin(tokens, ends.to(tokens.device))
    return torch.where(over.any(1), over.long().argmax(1) + 1, tokens.shape[1])


def padded(tokens: Tensor, lengths: Tensor, config) -> Tensor:
    """Pad tokens [B, T] behind the first ``lengths`` [B]."""
    pad = pad_token(config)
    behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    return tokens if pad is None else torch.where(behind, pad.to(tokens.device), tokens)


def _target(model, request: Request, sampling: SamplingParams) -> CausalTarget:
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)

    def count(rows):
        return torch.tensor([len(r) for r in rows])

    branches = (
        {}
        if request.negative is None
        else {"uncond": pad(request.negative), "uncond_length": count(request.negative)}
    )
    return CausalTarget(
        CausalLM(model),
        pad(request.prompts),
        request.space,
        sampling,
        prompt_length=count(request.prompts),
        **branches,
    )


def _keys(prompts: list[list[int]], seed: int | None) -> list[int]:
    """Make the random key of every row from its prompt's tokens and the seed, one higher for every
    row of the same prompt before it."""
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**62:
        raise bad_value("seed", seed, "an integer of at least 0")
    used: Counter = Counter()
    keys = []
    for prompt in map(tuple, prompts):
        keys.append(item_key("transformers", prompt, seed + used[prompt]))
        used[prompt] += 1
    return keys


def _following(streamer, ends: Tensor, config, device):
    """Make a callback that sends the streamer the tokens [B] of a position as soon as all rows have
    theirs, as ``generate`` does."""
    sent = 0

    def put(info: dict[str, Any]) -> None:
        nonlocal sent
        tokens, known = info["tokens"].to(device), info["known"].to(device)
        lengths = torch.where(known.all(1), spoken(tokens, ends), tokens.shape[1])
        ready = int(known.all(0).long().cumprod(0).sum())
        ready = min(ready, int(lengths.max()))
        for column in padded(tokens, lengths, config)[:, sent:ready].T:
            streamer.put(column.cpu())
        sent = max(sent, ready)

    return put


def _refuse_call(generation_config: Any, synced_gpus: bool) -> None:
    """Refuse a call that is not ``generate``'s, and the ways of generating it cannot honour."""
    if generation_config is None:
        raise GenError(
            "gen.transformers_generate got no generation_config; expected a call of"
            " model.generate(..., custom_generate=gen.transformers_generate)"
        )
    if argument_of_generate("assistant_model") is not None:
        raise GenError(
            "gen.transformers_generate cannot honour assistant_model; expected draft_model=that"
            " model and a sampler such as 'speculative'"
        )
    if synced_gpus:
        raise GenError(
            "gen.transformers_generate cannot honour synced_gpus; expected a model that is not"
            " sharded by FSDP or ZeRO stage 3"
        )


def _require_sampler(sampler: Sampler, draft_model, vocab_size: int) -> None:
    name = type(sampler).__name__
    if sampler.protocol != "causal" or "codes" not in sampler.kinds:
        raise GenError(
            f"sampler {name} needs a {sampler.protocol} model of {' or '.join(sampler.kinds)};"
            " expected a causal one of codes, such as 'speculative_jacobi', 'autoregressive' or"
            " 'speculative'"
        )
    if sampler.drafted and (sampler.draft_protocol or draft_model is None):
        raise GenError(
            f"sampler {name} needs a {sampler.draft_protocol or 'causal'} draft model; expected"
            " draft_model=, a causal language model, or another sampler"
        )
    if sampler.drafted and sampler.draft_model:
        raise GenError(
            f"sampler.draft_model is {sampler.draft_model!r}; expected the model itself as"
            " draft_model="
        )
    if draft_model is not None and not sampler.drafted:
        raise GenError(
            f"draft_model is given, but sampler {name} drafts without one; expected a sampler"
            " such as 'speculative'"
        )
    if draft_model is not None and CausalLM(draft_model).vocab_size != vocab_size:
        raise GenError(
            f"draft_model has a vocabulary of {CausalLM(draft_model).vocab_size} tokens; expected"
            f" {vocab_size}, as the model"
        )


def require_model(model) -> None:
    """Raise ``GenError`` for a model whose distributions change with a cache of one slot per
    position. Every model is checked once."""
    if model not in _PROVEN:
        require_slots(
            CausalLM(model),
            type(model).__name__,
            lambda ids: model(input_ids=ids, use_cache=False).logits,
        )
        _PROVEN.add(model)

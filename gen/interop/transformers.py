"""Samplers behind ``generate`` of any causal language model of transformers:

    model.generate(**inputs, custom_generate=gen.transformers_generate,
                   sampler="speculative_jacobi", max_new_tokens=64, seed=0)

``generate`` prepares its inputs as usual and calls this function in place of its own loop. Greedy
decoding gives the same tokens as that loop, sampling the same distribution. Row j of the same
prompt has the seed ``seed + j``; its tokens depend on prompt and seed alone, whatever the batch.
"""

from __future__ import annotations

import inspect
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from keyword import iskeyword
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.utils import GenerateDecoderOnlyOutput

from gen.core.errors import GenError, bad_value
from gen.core.logprobs import ItemLogprobs
from gen.core.registry import registry
from gen.core.resolve import parameter_names, resolve_sampler
from gen.core.rng import CounterRNG, item_key
from gen.core.sampler import Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput, Stats
from gen.interop.transformers_control import Control
from gen.interop.transformers_request import READ, Ends, Request, read_request
from gen.models.adapters.cache_probe import require_slots
from gen.models.adapters.language_models import CausalLM
from gen.models.load.transformers_compat import argument_of_generate, pad_token
from gen.models.targets.causal import CausalTarget
from gen.pipeline.arguments import read_parameters

USUAL = "autoregressive"
# models that passed ``require_slots``, which takes a few forward passes
_PROVEN: weakref.WeakSet = weakref.WeakSet()


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """Output of ``generate`` with ``return_dict_in_generate``.

    Attributes:
        stats: cost of every row.
        logprobs: log-probabilities of every row's new tokens; None where nobody asked for them.
    """

    stats: list[Stats] | None = None
    logprobs: list[ItemLogprobs] | None = None


def transformers_generate(
    model,
    input_ids: Tensor,
    logits_processor=None,
    stopping_criteria=None,
    generation_config=None,
    synced_gpus: bool = False,
    streamer=None,
    *,
    sampler: str | Mapping[str, Any] | Sampler = USUAL,
    seed: int | None = None,
    draft_model=None,
    logprobs: int | None = None,
    presence_penalty: float | None = None,
    frequency_penalty: float | None = None,
    logit_bias: Mapping[int, float] | None = None,
    stop: str | Sequence[str] | None = None,
    structured: Mapping[str, Any] | None = None,
    processing_class: Any = None,
    tokenizer: Any = None,
    **model_kwargs,
) -> Tensor | GenerateOutput:
    """Decode for ``generate``, which calls this function with what it prepared.

    Args:
        model: causal language model of transformers.
        input_ids: prompts, long [B, S], padded on the left.
        logits_processor: processors that ``generate`` made of settings, and those of the user.
        stopping_criteria: criteria, likewise.
        generation_config: the settings.
        synced_gpus: not supported.
        streamer: streamer of transformers.
        sampler: name of a causal sampler or preset, ``{"name": ..., parameter: value}`` or one.
        seed: integer; None draws one from torch's generator (``transformers.set_seed``).
        draft_model: causal language model with the same vocabulary, or a list of several.
        logprobs: sampling parameter of gen, as those that follow (docs/control.md).
        presence_penalty: see there.
        frequency_penalty: see there.
        logit_bias: see there.
        stop: see there.
        structured: see there.
        processing_class: tokenizer, for ``stop`` and ``structured``; ``tokenizer`` is the same.
        model_kwargs: keyword arguments for the model, and parameters of the sampler.

    Returns:
        Long [B, S + new], padded behind the eos token, or a ``GenerateOutput``.

    Raises:
        GenError: the model is an encoder-decoder or recurrent, its attention takes no masks, or a
            setting cannot be honoured.
    """
    sampler = _completed(sampler, model_kwargs)
    text = tokenizer if processing_class is None else processing_class
    params = {"presence_penalty": presence_penalty, "frequency_penalty": frequency_penalty}
    params |= {"logit_bias": logit_bias}
    control = Control(params, stop, structured, text, logprobs)
    _refuse_call(generation_config, synced_gpus)
    prepared = (logits_processor, stopping_criteria, generation_config, model_kwargs)
    streamer = argument_of_generate("streamer") if streamer is None else streamer
    return _decode(model, input_ids, prepared, control, streamer, (sampler, seed, draft_model))


def _completed(sampler: Any, model_kwargs: dict[str, Any]) -> Any:
    """Move parameters of the sampler from the arguments of the model to its spec."""
    others = model_kwargs.keys() - set(READ)
    given = {k: model_kwargs.pop(k) for k in others and others & _parameters()}
    return read_parameters(sampler, lambda: USUAL, given, ())


def _parameters() -> set[str]:
    """Names of the parameters of causal samplers, without settings of ``generate``."""
    samplers, presets = registry.table("sampler"), registry.table("preset").values()
    causal = {k: cls for k, cls in samplers.items() if cls.wraps or cls.protocol == "causal"}
    groups = [p.aliases for p in presets if p.sampler in causal]
    for cls in causal.values():
        groups += [parameter_names(cls), cls.aliases, cls.sampling_aliases]
    names = {name for group in groups for name in group if not iskeyword(name)}
    return names - vars(GenerationConfig()).keys() - set(READ)


class _Signature(inspect.Signature):
    """Signature with the parameters of causal samplers beside its own: ``generate`` passes on the
    arguments that a signature has, and takes others for the model's."""

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        *own, rest = super().parameters.values()  # the last one is **model_kwargs
        names = sorted(_parameters() - super().parameters.keys())
        others = [inspect.Parameter(n, inspect.Parameter.KEYWORD_ONLY) for n in names]
        return {p.name: p for p in (*own, *others, rest)}


transformers_generate.__signature__ = _Signature(
    list(inspect.signature(transformers_generate).parameters.values())
)


def _decode(
    model: Any,
    input_ids: Tensor,
    prepared: tuple[Any, Any, Any, dict[str, Any]],
    control: Control,
    streamer: Any,
    chosen: tuple[Any, int | None, Any],
) -> Tensor | GenerateOutput:
    """Decode; arguments as of ``transformers_generate``.

    Args:
        model: the model.
        input_ids: prompts.
        prepared: logits processors, stopping criteria, settings and arguments of the model.
        control: sampling parameters of gen.
        streamer: streamer, if any.
        chosen: sampler, seed and draft models.
    """
    (processors, criteria, config, model_kwargs), (sampler, seed, draft_model) = prepared, chosen
    drafts, put = _listed(draft_model), None
    with _usable(model, *drafts):
        criteria = [*(criteria or ()), *control.criteria()]
        size = CausalLM(model).vocab_size
        request = read_request(input_ids, config, processors, criteria, size, model_kwargs)
        request = control.controlled(request)
        _require_logprobs(control.logprobs, request, config)
        sampler, sampling = _resolved(sampler, request, config.do_sample)
        _require_sampler(sampler, drafts, request)
        _require_positions(request, model)
        target = _target(CausalLM(model), request, sampling)
        if streamer is not None:
            put = _following(streamer, request.ends, config, input_ids.device)
        rng = CounterRNG(_keys(request.prompts, seed), model.device)
        out = sampler(target, rng, draft=_draft(drafts, request, sampling), callback=put)
    if streamer is not None:
        streamer.end()
    return _result(input_ids, out, request.ends, config)


def _listed(draft_model) -> list[Any]:
    """List the draft models: none, one or several."""
    if isinstance(draft_model, (list, tuple)):
        return list(draft_model)
    return [] if draft_model is None else [draft_model]


def _draft(drafts: list[Any], request: Request, sampling: SamplingParams) -> Any:
    """Make the target of the draft model, or of each where there are several."""
    targets = [_target(DraftLM(draft), request, sampling) for draft in drafts]
    return targets if len(targets) > 1 else next(iter(targets), None)


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
    input_ids: Tensor, out: SampleOutput, ends: Ends, config: Any
) -> Tensor | GenerateOutput:
    """Put the prompts before the tokens, as ``generate`` returns them."""
    tokens = out.tokens.to(input_ids.device)
    lengths = ends.lengths(tokens)
    if ends.pads:
        tokens = padded(tokens, lengths, config)
    tokens = tokens[:, : int(lengths.max())]
    sequences = torch.cat([input_ids, tokens], 1)
    if config.return_dict_in_generate:
        logprobs = out.logprobs
        if logprobs is not None:  # the eos token after a stop string is no token of generate
            logprobs = [row[:n] for row, n in zip(logprobs, lengths.tolist(), strict=True)]
        return GenerateOutput(sequences=sequences, stats=out.stats, logprobs=logprobs)
    return sequences


def padded(tokens: Tensor, lengths: Tensor, config) -> Tensor:
    """Pad tokens [B, T] behind the first ``lengths`` [B]."""
    pad = pad_token(config)
    behind = torch.arange(tokens.shape[1], device=tokens.device) >= lengths[:, None]
    return tokens if pad is None else torch.where(behind, pad.to(tokens.device), tokens)


class GuidedTarget(CausalTarget):
    """Target whose guidance mixes log-probabilities, as that of ``generate`` does.

    The mixture differs from that of logits by a number for each position, which a penalty that
    depends on the sign of a score does not ignore.
    """

    def _split(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        wide = logits if logits.dtype == torch.float64 else logits.float()
        return super()._split(wide.log_softmax(-1))


class DraftLM(CausalLM):
    """Draft model, which may have vectors for fewer positions than the text takes.

    Calls for rows of several lengths ask it about positions past its last, which it is then told to
    be the last. Samplers draft with a model up to there (``CausalTarget.reach``), and no draft
    counts unverified.
    """

    def _of_module(self, inputs, positions, mask, cache, **more):
        if self.learned_positions is not None:
            positions = positions.clamp_max(self.learned_positions - 1)
        return super()._of_module(inputs, positions, mask, cache, **more)


def _target(model: CausalLM, request: Request, sampling: SamplingParams) -> CausalTarget:
    def pad(rows):
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)

    def count(rows):
        return torch.tensor([len(r) for r in rows])

    kind, branches = CausalTarget, {}
    if request.negative is not None:
        branches = {"uncond": pad(request.negative), "uncond_length": count(request.negative)}
        kind = GuidedTarget if request.controls else CausalTarget
    return kind(
        model,
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


def _following(streamer, ends: Ends, config: Any, device: torch.device):
    """Make a callback that sends the streamer the tokens [B] of a position as soon as all rows have
    theirs, as ``generate`` does."""
    sent = 0

    def put(info: dict[str, Any]) -> None:
        nonlocal sent
        tokens, known = info["tokens"].to(device), info["known"].to(device)
        ready = int(known.all(0).long().cumprod(0).sum())
        lengths = ends.lengths(tokens, ready)
        ready = min(ready, int(lengths.max()))
        shown = padded(tokens, lengths, config) if ends.pads else tokens
        for column in shown[:, sent:ready].T:
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


def _require_logprobs(logprobs: int | None, request: Request, config: Any) -> None:
    """Refuse log-probabilities that nobody would see, or that temperature and filters changed."""
    if logprobs is None:
        return
    if not config.return_dict_in_generate:
        raise GenError(
            f"logprobs is {logprobs!r} without return_dict_in_generate; expected"
            " return_dict_in_generate=True, whose output holds them"
        )
    if request.warps:
        raise GenError(
            f"logprobs is {logprobs!r} with processors that apply temperature or filters"
            " themselves; expected none of typical_p, epsilon_cutoff, eta_cutoff and top_h"
        )


def _require_positions(request: Request, model: Any) -> None:
    """Refuse more positions than the network has vectors for; rotations are made for any number,
    as in ``generate``."""
    longest, length = max(map(len, request.prompts)), request.space.length
    limit = CausalLM(model).learned_positions
    # no pass reads the last token of the output
    if limit is not None and longest + length - 1 > limit:
        raise GenError(
            f"the prompt has {longest} tokens and the output {length}, and {type(model).__name__}"
            f" has embeddings of {limit} positions; expected at most {limit + 1} tokens together"
        )


def _require_sampler(sampler: Sampler, drafts: list[Any], request: Request) -> None:
    name, vocab_size = type(sampler).__name__, request.space.vocab_size
    if sampler.protocol != "causal" or "codes" not in sampler.kinds:
        raise GenError(
            f"sampler {name} needs a {sampler.protocol} model of {' or '.join(sampler.kinds)};"
            " expected a causal one of codes, such as 'speculative_jacobi', 'autoregressive' or"
            " 'speculative'"
        )
    if not sampler.returns_logprobs and request.controls:
        raise GenError(
            f"sampler {name} compares whole texts, and generate counts"
            f" {', '.join(request.controls)} among their scores; expected a sampler such as"
            " 'speculative_jacobi'"
        )
    if sampler.drafted and (sampler.draft_protocol or not drafts):
        raise GenError(
            f"sampler {name} needs a {sampler.draft_protocol or 'causal'} draft model; expected"
            " draft_model=, a causal language model, or another sampler"
        )
    named = [model for model in sampler.draft_names if model is not None]
    if named:
        raise GenError(
            f"sampler.draft_model is {named[0]!r}; expected the model itself as draft_model="
        )
    if len(drafts) > 1 and not sampler.takes_several_drafts:
        raise GenError(
            f"draft_model has {len(drafts)} models; expected one, or the drafter several"
        )
    if drafts and not sampler.drafted:
        raise GenError(
            f"draft_model is given, but sampler {name} drafts without one; expected a sampler"
            " such as 'speculative'"
        )
    for size in (CausalLM(draft).vocab_size for draft in drafts):
        if size != vocab_size:
            raise GenError(
                f"draft_model has a vocabulary of {size} tokens; expected {vocab_size}, as the"
                " model"
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

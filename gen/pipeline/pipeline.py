"""The Python API: ``gen.load("image")`` gives a pipeline, calling it gives media.

    pipe = gen.load("image")
    out = pipe("a small blue ring in the centre", sampler="speculative_jacobi", temperature=0.9)
    out.media[0]; out.tokens; out.stats; out.save("out/api")

Sample j of a prompt has the seed ``seed + j``, and its random numbers depend on prompt and seed
alone: ``seed=seed + j, num_samples=1`` makes the same item again, in any batch.

A call goes through five steps: ``plan`` (prompts to items), ``request`` (sampler and sampling
parameters), ``prepare`` (model, token space, targets), ``run`` (the sampler) and
``decode_outputs`` (tokens to media).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint
from gen.contracts.condition import Condition, PromptBatch
from gen.contracts.frontend import TokenFrontend
from gen.contracts.modality import suggested_sampling
from gen.contracts.protocol import ModelProtocol
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, bad_value
from gen.core.registry import registry
from gen.core.rng import CounterRNG, OffsetRNG, item_key
from gen.core.sampler import Callback, Sampler, resolve_sampler
from gen.core.sampling_params import SamplingOptions, SamplingParams, explicit_sampling
from gen.core.seeds import sample_seeds
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import compiled_forward
from gen.models.targets.base import Target
from gen.pipeline.lengths import add_length_pass, draw_lengths, without_eos
from gen.pipeline.models import ModalityModels, same_frontend
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.request import (
    GenerationRequest,
    PreparedRun,
    SamplerSpec,
    StartingPoint,
    spell,
)
from gen.pipeline.streaming import Chunk, MediaStream, OnChunk, stream_chunks

BATCH_SIZE = 8
TURNS = 4  # batches that are handed over together, so that rows that are done can be replaced
Prompts = str | Condition | Sequence[str | Condition]


class Pipeline(ModalityModels):
    """A modality with its models, loaded when a sampler first needs them.

    Args:
        modality: name of a modality, or a modality.
        model: zoo name, folder, file or hub id; None is the modality's default for the sampler's
            protocol. A published checkpoint is loaded at once, and may decide what prompts mean.
        device: device of models and frontends.
        dtype: floating-point type of models.
        device_map: placement of a model larger than one device, as in accelerate.
        trust_remote_code: whether code in a checkpoint's folder may run.
        compile: run models through ``torch.compile``, on a GPU as CUDA graphs. The first calls of
            every shape then take long. A model that cannot be compiled is refused.
        options: options of the checkpoint's family (``gen ls families``).

    Raises:
        GenError: an unknown name, device, dtype or option.
    """

    def __init__(
        self,
        modality: Any,
        model: str | Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        **options: Any,
    ):
        super().__init__(
            modality, model, device, dtype, device_map, trust_remote_code, compile, **options
        )
        # what samplers learned of each model and want to know in the next call
        self._learned: dict[str, dict[Any, Any]] = {}

    def __call__(
        self,
        prompts: Prompts,
        sampler: SamplerSpec = "speculative_jacobi",
        *,
        num_samples: int = 1,
        seed: int = 0,
        batch_size: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
        source: Any = None,
        mask: Any = None,
        span: str | None = None,
        prefix: Any = None,
        frames: int | None = None,
        **sampling: Unpack[SamplingOptions],
    ) -> PipelineOutput:
        """Make ``num_samples`` outputs per prompt.

        Args:
            prompts: one prompt or several; text, or a ``Condition``.
            sampler: name of a sampler or preset, ``{"name": ..., parameter: value}`` or a sampler.
            num_samples: outputs per prompt.
            seed: seed of the first output of every prompt.
            batch_size: items decoded together (8); changes no random number.
            trace: record every step.
            callback: called once per forward pass with ``{"step", "done", "total", ...}``.
            source: media to edit, or its path; with ``mask`` or ``span``.
            mask: region of an image that is made anew, as an image or its path.
            span: part of the source that is made anew, such as ``"20:60"``.
            prefix: media, or its path, that every output begins with.
            frames: length of the outputs, where the modality has no fixed one.
            sampling: ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``guidance_scale``; absent
                ones are the modality's default.

        Returns:
            Media, tokens and statistics, one of each per item.

        Raises:
            GenError: anything that cannot be done.
        """
        start = EditSpec(source, mask, span, prefix, frames)
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise bad_value("batch_size", batch_size, "an integer of at least 1")
        request = GenerationRequest(
            self.plan(prompts, num_samples, seed),
            spell(sampler),
            *self.resolve(sampler, explicit=sampling),
            start=start,
            trace=trace,
            callback=callback,
            max_batch=batch_size or BATCH_SIZE,
        )
        together = request.max_batch * self.turns(request.sampler)
        return PipelineOutput.joined([self._make(batch) for batch in request.batches(together)])

    def stream(
        self,
        prompts: Prompts,
        sampler: SamplerSpec = "speculative_jacobi",
        *,
        num_samples: int = 1,
        seed: int = 0,
        prefix: Any = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Yield parts of media while they are being made: first frames, first sounds.

        All items are made in one batch, so their parts come interleaved. The parts of one item, put
        together, are what a call gives for it. See ``__call__`` for the arguments.

        Raises:
            GenError: anything that cannot be done.
        """
        request = GenerationRequest(
            self.plan(prompts, num_samples, seed),
            spell(sampler),
            *self.resolve(sampler, explicit=sampling),
            start=EditSpec(prefix=prefix),
        )

        def work(on_chunk: OnChunk) -> None:
            self._make(replace(request, on_chunk=on_chunk))

        yield from stream_chunks(work, request.items)

    def plan(self, prompts: Prompts, num_samples: int = 1, seed: int = 0) -> list[ItemPlan]:
        """Return the items of a call, prompt-major.

        Every prompt is parsed before anything is made. A prompt that comes again goes on with fresh
        seeds.

        Args:
            prompts: one prompt or several.
            num_samples: items per prompt.
            seed: seed of the first item of every prompt.

        Raises:
            GenError: no prompts, a prompt that the modality does not understand, or a bad number.
        """
        prompts = [prompts] if isinstance(prompts, (str, Condition)) else list(prompts)
        if not prompts:
            raise GenError("there are no prompts; expected at least one")
        for name, value, low in (("num_samples", num_samples, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**62:
                raise bad_value(name, value, f"an integer of at least {low}")
        items: list[ItemPlan] = []
        used: dict[str, int] = {}
        for prompt in map(Condition.of, prompts):
            parsed = self.modality.parse(prompt)
            items += [
                ItemPlan(
                    len(items) + j,
                    prompt.text or "",
                    item_seed,
                    self.modality.ground(parsed, item_seed),
                )
                for j, item_seed in enumerate(sample_seeds(used, str(parsed), num_samples, seed))
            ]
        return items

    def resolve(
        self,
        sampler: SamplerSpec,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
        *,
        explicit: Mapping[str, Any] | None = None,
    ) -> tuple[Sampler, SamplingParams]:
        """Return a sampler and complete sampling parameters.

        Args:
            sampler: name, ``{"name": ..., parameter: value}`` or a sampler.
            sampling: all sampling parameters, absent ones switched off; None takes the modality's
                defaults, overridden by the preset's.
            explicit: keywords of a call, which override both; None values are absent.

        Raises:
            GenError: a keyword is unknown, or a parameter contradicts the preset.
        """
        if sampling is None:
            sampling = self._default_sampling(sampler)
        if explicit:
            sampling = {**_as_mapping(sampling), **explicit_sampling(explicit, *CALL_KEYWORDS)}
        return resolve_sampler(sampler, sampling)

    def _default_sampling(self, sampler: SamplerSpec) -> dict[str, Any]:
        """Return the modality's default sampling parameters, overridden by the preset's."""
        preset = registry.table("preset").get(spell(sampler).get("name"))
        kind = self.kind(resolve_sampler(sampler)[0])
        return {**suggested_sampling(self.modality, kind), **(preset.sampling if preset else {})}

    def generate(
        self,
        items: Sequence[ItemPlan],
        sampler: SamplerSpec = "speculative_jacobi",
        sampling: Mapping[str, Any] | SamplingParams | None = None,
        *,
        trace: bool = False,
        callback: Callback | None = None,
        start: EditSpec = EditSpec(),
        on_chunk: OnChunk | None = None,
        max_batch: int | None = None,
    ) -> PipelineOutput:
        """Make planned items.

        Args:
            items: items of ``plan``.
            sampler: name, ``{"name": ..., parameter: value}`` or a sampler.
            sampling: all sampling parameters; None takes the defaults.
            trace: record every step.
            callback: called once per forward pass.
            start: edit, continuation or length to start from.
            on_chunk: called with a row and a part of its media, as soon as its tokens are there.
            max_batch: items decoded at a time. The next item takes the row of one that is done, or
                items come batch by batch where a model cannot replace rows.
        """
        request = GenerationRequest(
            items,
            spell(sampler),
            *self.resolve(sampler, sampling),
            start=start,
            trace=trace,
            callback=callback,
            on_chunk=on_chunk,
            max_batch=max_batch,
        )
        return self._make(request)

    def _make(self, request: GenerationRequest) -> PipelineOutput:
        """Prepare and run a request, batch by batch where rows cannot be replaced."""
        prepared = self.prepare(request)
        if request.split and not prepared.replaces_rows:
            batches = request.batches(request.max_batch)
            return PipelineOutput.joined([self.run(self.prepare(batch)) for batch in batches])
        return self.run(prepared)

    def prepare(self, request: GenerationRequest) -> PreparedRun:
        """Load the models of a request and make the targets that its sampler sees.

        Raises:
            GenError: no model serves the sampler, or the draft model does not fit.
        """
        if request.start.source is not None:
            request = replace(request, items=[self._as_stated(i) for i in request.items])
        sampler, sampling, items = request.sampler, request.sampling, request.items
        name = self.model_name(sampler)
        _, binding, frontend = self.bound(name)
        protocol: type[ModelProtocol] = registry.get("protocol", sampler.protocol)
        start = StartingPoint.of(
            request, protocol, self.modality, frontend, binding.space, self.device
        )
        space, length_space = start.space, None
        # a row's end is drawn before anything else is decoded, or is a token like any other
        draws_lengths = protocol.draws_lengths and self.modality.length_first
        if draws_lengths and space.eos_token_id is not None:
            if start.canvas is None:
                start = replace(start, canvas=space.empty(len(items), self.device))
            if request.start.source is None and request.start.frames is None:
                length_space = space
            space = without_eos(space)
        target = self.target(sampler, sampling, items, name, start.prefix, space)
        draft = None
        if sampler.drafted:
            draft = self._draft_target(request, name, frontend, start.prefix, space)
        return PreparedRun(request, name, frontend, start, space, target, draft, length_space)

    def _as_stated(self, item: ItemPlan) -> ItemPlan:
        """Return an item of an edit with the condition that its prompt states."""
        return replace(item, condition=self.modality.as_stated(item.condition))

    def run(self, prepared: PreparedRun) -> PipelineOutput:
        """Decode the tokens of a prepared run, and its media."""
        request, space, target = prepared.request, prepared.space, prepared.target
        if request.split:
            prepared.limit_batch(request.max_batch)
        rng = CounterRNG([self.draw_key(i) for i in request.items], self.device)
        canvas, length_pass = prepared.start.canvas, []
        if prepared.length_space is not None:
            lengths = self.target(
                request.sampler,
                request.sampling,
                request.items,
                prepared.model,
                space=prepared.length_space,
            )
            max_batch = request.max_batch if request.split else None
            canvas, length_pass = draw_lengths(lengths, rng, canvas, max_batch)
        # positions after the prefix have the random numbers that they have without one
        num_prefix = space.length - target.length
        if num_prefix:
            rng = OffsetRNG(rng, num_prefix)
        prefix = prepared.start.prefix if num_prefix else None
        callback, stream = request.callback, None
        if request.on_chunk:
            stream = MediaStream(
                self.modality, prepared.frontend, space, len(request.items), request.on_chunk
            )
            callback = stream.following(callback, prefix)
        out = request.sampler(
            target,
            rng,
            draft=prepared.draft,
            canvas=canvas,
            trace=request.trace,
            callback=callback,
        )
        if prefix is not None:
            out = out.with_prefix(prefix.to(out.tokens))
        if length_pass:
            out = add_length_pass(out, length_pass)
        return self.decode_outputs(prepared, out, stream)

    def decode_outputs(
        self, prepared: PreparedRun, out: SampleOutput, stream: MediaStream | None = None
    ) -> PipelineOutput:
        """Return the output of a run, with the media of its tokens.

        Args:
            prepared: the run.
            out: tokens [B, T(, C)], statistics and traces of the sampler.
            stream: decoder that made the media while they were streamed.
        """
        request, space, frontend = prepared.request, prepared.space, prepared.frontend
        decoded = (
            stream.media() if stream else [self.decode(t, space, frontend) for t in out.tokens]
        )
        media = [
            prepared.start.overlay(self.modality.complete(media, item.condition))
            for media, item in zip(decoded, request.items, strict=True)
        ]
        return PipelineOutput(
            media=media,
            tokens=out.tokens.cpu(),
            stats=out.stats,
            traces=out.traces,
            items=list(request.items),
            modality=self.modality.name,
            model=prepared.model,
            spec=request.spec,
            guarantee=request.sampler.guarantee,
            sampling=request.sampling,
            device=self.device,
            dtype=self.dtype,
            start=request.start,
            grid=space.grid,
            model_options=self.model_options,
            served=self.modality,
            frontend=frontend,
        )

    def decode(self, tokens: Tensor, space: TokenSpace, frontend: TokenFrontend) -> Any:
        """Return the media of one row's tokens [T(, C)], up to its end.

        Rows are decoded one at a time, so that media do not depend on a batch.
        """
        codes = self.modality.to_codes(space.before_end(tokens)[None], space)
        return self.modality.trim(frontend.postprocess(frontend.decode(codes)[0]))

    def target(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        items: Sequence[ItemPlan],
        name: str | None = None,
        prefix: Tensor | None = None,
        space: TokenSpace | None = None,
        protocol: str | None = None,
    ) -> Target:
        """Return the target that a sampler sees: model, conditions and sampling parameters.

        Args:
            sampler: the sampler.
            sampling: sampling parameters.
            items: items whose conditions are decoded.
            name: name of the model; None for the sampler's own.
            prefix: tokens [k] that the prompt of a left-to-right model ends with; the target is
                what follows them.
            space: token space; None for the model's own.
            protocol: protocol of the model; None for the sampler's.

        Raises:
            GenError: the vocabularies of model and space differ.
        """
        name = name or self.model_name(sampler)
        model, binding, _ = self.bound(name)
        protocol = protocol or sampler.protocol
        kind: type[ModelProtocol] = registry.get("protocol", protocol)
        space, before = space or binding.space, []
        if prefix is not None and kind.left_to_right:
            space, before = space.suffix(prefix), prefix.tolist()
        adapter = (
            model.adapter(protocol)
            if isinstance(model, Checkpoint)
            else kind.adapters[space.kind](model)
        )
        if space.kind == "codes" and adapter.vocab_size != space.vocab_size:
            raise GenError(
                f"model {name} has logits of {adapter.vocab_size} tokens; expected"
                f" {space.vocab_size}, as its target has"
            )
        if self.compile:
            compiled_forward(adapter)
        batch = PromptBatch.of(
            [binding.prompt(i.condition) for i in items], before, adapter.condition_token
        )
        if batch.features:
            adapter = adapter.conditioned(batch.features)
        uncond, uncond_lengths = None, None
        if sampling.guided:
            without = PromptBatch.of([binding.without(i.condition) for i in items], before)
            uncond, uncond_lengths = without.tokens, without.lengths
        target = kind.targets[space.kind](
            adapter, batch.tokens, space, sampling, uncond, batch.lengths, uncond_lengths
        )
        target.learned, target.name = self._learned.setdefault(name, {}), name
        return target

    def _draft_target(
        self,
        request: GenerationRequest,
        model: str,
        frontend: TokenFrontend,
        prefix: Tensor | None,
        space: TokenSpace,
    ) -> Target:
        """Return the target of the draft model of a request."""
        sampler, sampling, items = request.sampler, request.sampling, request.items
        name = self.draft_name(sampler)
        _, binding, draft_frontend = self.bound(name)
        # tokens of another frontend would be noise, or out of range
        if not same_frontend(draft_frontend, frontend):
            raise GenError(
                f"draft model {name} was trained on the tokens of another frontend than model"
                f" {model}; expected the same one"
            )
        if sampler.draft_protocol is None:
            return self.target(sampler, sampling, items, name, prefix, space)
        # it sees the whole canvas, known tokens included, and keeps its own eos and constraint
        space = replace(binding.space, grid=space.grid, legal=space.legal)
        return self.target(
            sampler, sampling, items, name, space=space, protocol=sampler.draft_protocol
        )

    def as_diffusers(self):
        """Return this pipeline with the call of diffusers' pipelines."""
        # interop is a floor above, and diffusers is heavy
        from gen.interop.diffusers import DiffusersPipeline

        return DiffusersPipeline(self)

    def prompt_lengths(self, items: Sequence[ItemPlan], sampler: SamplerSpec) -> list[int]:
        """Return the number of tokens of every item's prompt.

        Shorter prompts of a batch are padded, so items of like lengths run together.
        """
        prompt = self.bound(self.model_name(resolve_sampler(sampler)[0]))[1].prompt
        return [len(prompt(i.condition)) for i in items]

    def turns(self, sampler: SamplerSpec) -> int:
        """Return how many batches of items to hand over together, so that rows can be replaced."""
        if not isinstance(sampler, Sampler):
            sampler = resolve_sampler(sampler)[0]
        return TURNS if registry.get("protocol", sampler.protocol).replaces_rows else 1

    def draw_key(self, item: ItemPlan) -> int:
        """Return the key of an item's random numbers."""
        return item_key(self.modality.name, str(item.condition), item.seed)


CALL_KEYWORDS = tuple(inspect.signature(Pipeline.__call__).parameters)[2:-1]


def _as_mapping(sampling: Mapping[str, Any] | SamplingParams) -> Mapping[str, Any]:
    """Return sampling parameters by name."""
    return asdict(sampling) if isinstance(sampling, SamplingParams) else sampling


def load(
    modality: str,
    model: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    **options: Any,
) -> Pipeline:
    """Return a pipeline for a modality.

    Args:
        modality: name of the modality (``gen ls modalities``).
        model: zoo name, folder, file or hub id; None is the modality's default.
        device: device of the model.
        dtype: floating-point type of the model.
        options: options of the model's family (``gen ls families``), ``device_map``,
            ``trust_remote_code`` and ``compile``.

    Raises:
        GenError: an unknown name, device, dtype or option.
    """
    return Pipeline(modality, model, device, dtype, **options)

"""Targets (models with the prompts of a batch and its sampling parameters), runs of them, and the
media that come out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from gen.contracts.checkpoint import Checkpoint
from gen.contracts.condition import Condition, PromptBatch
from gen.contracts.draft_model import DraftModel
from gen.contracts.frontend import TokenFrontend, Vocabulary
from gen.contracts.protocol import ModelProtocol
from gen.core.counts import free_bytes, require_count, require_counts
from gen.core.errors import GenError, Interrupt
from gen.core.registry import registry
from gen.core.resolve import SamplerSpec
from gen.core.rng import CounterRNG, OffsetRNG, item_key
from gen.core.sampler import Sampler, require_constraint_kept
from gen.core.sampling_params import SamplingParams
from gen.core.stats import SampleOutput
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.batch_invariant import make_invariant
from gen.models.adapters.captured import captured_forward
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.sparse_prefill import sparse
from gen.models.load.routed import router_of
from gen.models.targets.base import Target
from gen.models.targets.causal import CausalTarget
from gen.pipeline.candidates import decoded_on_demand
from gen.pipeline.control import (
    before_stop,
    controlled,
    filled_behind,
    item_limits,
    within_length,
)
from gen.pipeline.evaluator import RunEvaluator
from gen.pipeline.lengths import add_length_pass, draw_lengths, without_eos
from gen.pipeline.logprobs import with_texts
from gen.pipeline.models import ModalityModels, same_frontend
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.partial import LastStep
from gen.pipeline.request import GenerationRequest, PreparedRun, StartingPoint
from gen.pipeline.streaming import OnChunk, Stream, stream_of
from gen.tokenizers.base.text_bytes import TextBytes

LOG = logging.getLogger("gen")


class PromptedModels(ModalityModels):
    """Models of a modality that are bound to prompts."""

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
            prefix: tokens [k] at the end of a left-to-right prompt; the target is what follows.
            space: token space; None for the model's own.
            protocol: protocol of the model; None for the sampler's.

        Raises:
            GenError: the vocabularies of model and space differ.
        """
        name = name or self.model_name(sampler, self.part_of(items))
        binding = self.bound(name)[1]
        protocol = protocol or sampler.protocol
        kind: type[ModelProtocol] = registry.get("protocol", protocol)
        space, before = space or binding.space, []
        if prefix is not None and kind.left_to_right:
            space, before = space.suffix(prefix), prefix.tolist()
            if sampling.looks_back:  # what is given counts as output
                space = replace(space, prefix=prefix)
        if protocol == sampler.protocol:
            require_constraint_kept(sampler, space)
        adapter = self._adapter(name, protocol, space)
        batch = PromptBatch.of(
            [binding.prompt(i.condition) for i in items], before, adapter.condition_token
        )
        self._require_positions(name, adapter, batch, space)
        features, uncond, uncond_lengths = batch.features, None, None
        if sampling.guided:
            without = PromptBatch.of(
                [binding.without(i.condition) for i in items],
                before,
                adapter.condition_token,
                len(features),
            )
            uncond, uncond_lengths = without.tokens, without.lengths
            features += without.features
        if features:
            adapter = adapter.conditioned(features)
        target = kind.targets[space.kind](
            adapter, batch.tokens, space, sampling, uncond, batch.lengths, uncond_lengths
        )
        if name == self.model:
            self._route(target, adapter, items)
        target.learned, target.name = self._learned.setdefault(name, {}), name
        target.drafters = DraftModel.drafters(self.draft_model)
        return target

    def _route(self, target: Target, adapter: Any, items: Sequence[ItemPlan]) -> None:
        """Tell a target the adapters of its items.

        Raises:
            GenError: an unknown adapter, or a target that computes all rows alike.
        """
        chosen = {item.adapter for item in items} - {None}
        if not isinstance(self._load_options.adapters, Mapping):
            if chosen:
                raise GenError(
                    f"adapter is {sorted(chosen)[0]!r}, and model {self.model} has no adapters by"
                    " name; expected adapters={name: folder} where it is loaded"
                )
            return
        router = router_of(adapter.model)
        if router is None or not isinstance(target, CausalTarget):
            raise GenError(
                "adapters by name are chosen for each row, which causal models alone can do;"
                " expected the folder of one adapter"
            )
        target.router = router
        target.adapters = np.array([router.number(item.adapter) for item in items])

    def _adapter(self, name: str, protocol: str, space: TokenSpace) -> Any:
        """Return a model's adapter of a protocol, compiled where that is asked for.

        Raises:
            GenError: the vocabularies of model and space differ.
        """
        model: Any = self.bound(name)[0]
        kind: type[ModelProtocol] = registry.get("protocol", protocol)
        is_checkpoint = isinstance(model, Checkpoint)
        adapter = model.adapter(protocol) if is_checkpoint else kind.adapters[space.kind](model)
        if is_checkpoint and model.ranks is not None:
            adapter.lead = model.ranks.lead
        if space.kind == "codes" and adapter.vocab_size != space.vocab_size:
            raise GenError(
                f"model {name} has logits of {adapter.vocab_size} tokens; expected"
                f" {space.vocab_size}, as its target has"
            )
        if self.sparse_prefill is not None and name == self.model:
            adapter = self._sparse(name, adapter)
        if self.batch_invariant:
            self._make_batch_invariant(name, adapter)
        if self.compile:
            self._compile(name, adapter)
        if self.cuda_graphs:
            self._captured[name] = captured_forward(adapter, self._captured.get(name))
        return adapter

    def _make_batch_invariant(self, name: str, adapter: Any) -> None:
        """Fix the order of sums in the passes of a model.

        Raises:
            GenError: the adapter or the device is not one of which that is known.
        """
        if not isinstance(adapter, CausalLM) or adapter.takes_block_masks:
            raise GenError(
                f"batch_invariant does not support model {name} as {type(adapter).__name__};"
                " expected a causal language model whose attn_implementation is 'sdpa'"
            )
        if name not in self._products:
            self._products[name] = make_invariant(adapter.model, name)
        adapter.make_batch_invariant(self._products[name])

    def _sparse(self, name: str, adapter: Any) -> Any:
        """Let prompts skip layers of an adapter, and say so once for every model."""
        assert self.sparse_prefill is not None, "callers ask"
        if name not in self._learned and self.sparse_prefill.ratio:
            LOG.warning("prompts skip layers of model %s, whose distribution they change", name)
        return sparse(adapter, self.sparse_prefill, name)

    def _compile(self, name: str, adapter: Any) -> None:
        """Let an adapter's forward be compiled, and say so once for every model."""
        if name not in self._learned:
            LOG.warning("the first passes compile model %s, which takes minutes", name)
        compiled_forward(adapter)

    def _require_positions(
        self, name: str, adapter: Any, batch: PromptBatch, space: TokenSpace
    ) -> None:
        """Raise ``GenError`` where prompt and output take more positions than the model has."""
        # adapters of third parties need not know
        limit = adapter.max_positions if isinstance(adapter, ModelAdapter) else None
        longest = int(batch.lengths.max())
        if limit is not None and longest + space.length > limit:
            raise GenError(
                f"the prompt has {longest} tokens and the output {space.length} positions; expected"
                f" at most {limit} together, the positions of model {name}"
            )

    def part_of(self, items: Sequence[ItemPlan]) -> str:
        """Return the part of the conditions that decides which of the modality's models serves
        them.

        Raises:
            GenError: the items of the batch need different models.
        """
        if self.model is not None:
            return ""
        given = (Condition() if item.given is None else item.given for item in items)
        parts = {self.modality.media_part(condition) for condition in given}
        if len(parts) > 1:
            named = " and ".join(part or "text alone" for part in sorted(parts))
            raise GenError(
                f"the conditions of one call are {named}, which different models of modality"
                f" {self.modality.name!r} serve; expected one call, or one job, for each"
            )
        return parts.pop() if parts else ""

    def vocabulary(self, name: str) -> Vocabulary | None:
        """Return the bytes of every token of a model; None where its tokens are no text."""
        if name not in self._vocabularies:
            _, binding, frontend = self.bound(name)
            found = frontend.vocabulary()
            if found is not None:  # ids of conditions and the mask are no text
                more = (None,) * (binding.space.vocab_size - len(found))
                found = Vocabulary((*found.first, *more), (*found.later, *more))
            self._vocabularies[name] = found
        return self._vocabularies[name]

    def _draft_target(
        self,
        request: GenerationRequest,
        sampling: SamplingParams,
        model: str,
        frontend: TokenFrontend,
        prefix: Tensor | None,
        space: TokenSpace,
        name: str,
    ) -> Target:
        """Return the target of a draft model of a request."""
        sampler, items = request.sampler, request.items
        _, binding, draft_frontend = self.bound(name)
        # tokens of another frontend would be noise, or out of range
        if not same_frontend(draft_frontend, frontend):
            raise GenError(
                f"draft model {name} was trained on the tokens of another frontend than model"
                f" {model}; expected the same one"
            )
        if sampler.draft_protocol is None:
            return self.target(sampler, sampling, items, name, prefix, space)
        # it sees the whole canvas, known tokens included, and keeps its own eos and constraint;
        # what reads the tokens before is a matter of the target alone
        sampling = sampling.without_past()
        space = replace(binding.space, grid=space.grid, legal=space.legal)
        return self.target(
            sampler, sampling, items, name, space=space, protocol=sampler.draft_protocol
        )

    def prompt_lengths(self, items: Sequence[ItemPlan], sampler: SamplerSpec) -> list[int]:
        """Return the number of tokens of every item's prompt.

        Shorter prompts of a batch are padded, so items of like lengths run together.
        """
        prompt = self.bound(self.model_name(sampler, self.part_of(items)))[1].prompt
        return [len(prompt(i.condition)) for i in items]

    def draw_key(self, item: ItemPlan) -> int:
        """Return the key of an item's random numbers."""
        return item_key(self.modality.name, self.modality.drawn_by(item.condition), item.seed)


class PreparedModels(PromptedModels):
    """Models of a modality that make runs ready and decode them."""

    def prepare(self, request: GenerationRequest) -> PreparedRun:
        """Load the models of a request and make the targets that its sampler sees.

        Raises:
            GenError: no model serves the sampler, or the draft model does not fit.
        """
        if request.start.source is not None:
            request = replace(request, items=[self._as_stated(i) for i in request.items])
        sampler, sampling, items = request.sampler, request.sampling, request.items
        part = self.part_of(items)
        name = self.model_name(request.spec, part)
        _, binding, frontend = self.bound(name)
        free = free_bytes(self.device)
        require_counts(sampler, binding.space, free)
        if sampling.max_new_tokens is not None:
            each = binding.space.vocab_size  # whether each token may stand at a position
            require_count("sampling.max_new_tokens", sampling.max_new_tokens, each, free)
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
        num_prefix = 0 if start.prefix is None else len(start.prefix)
        wanted = [item.max_new_tokens for item in items]
        if sampling.max_length is not None:
            prompts = [len(binding.prompt(i.condition)) + num_prefix for i in items]
            wanted = within_length(sampling, wanted, prompts, space.length - num_prefix)
        limits = item_limits(wanted, space, sampling)
        if limits is not None and not protocol.left_to_right:
            canvas = space.empty(len(items), self.device) if start.canvas is None else start.canvas
            start = replace(start, canvas=filled_behind(canvas, limits + num_prefix, space))
        vocabulary = partial(self.vocabulary, name)
        space, sampling = controlled(
            space,
            sampling,
            frontend,
            vocabulary,
            protocol.left_to_right,
            num_prefix,
            request.build or self.constraints.build,
        )
        target = self.target(sampler, sampling, items, name, start.prefix, space)
        target.limits = limits
        if sampler.wraps:
            target.evaluator = RunEvaluator(
                self, request, space, frontend, start, protocol.left_to_right
            )
        drafts = tuple(
            self._draft_target(request, sampling, name, frontend, start.prefix, space, draft)
            for draft in (self.draft_names(request.spec, part) if sampler.drafted else ())
        )
        return PreparedRun(request, name, frontend, start, space, target, drafts, length_space)

    def _as_stated(self, item: ItemPlan) -> ItemPlan:
        """Return an item of an edit with the condition that its prompt states."""
        return replace(item, condition=self.modality.as_stated(item.condition))

    def run(self, prepared: PreparedRun) -> PipelineOutput:
        """Decode the tokens of a prepared run, and its media."""
        request = prepared.request
        if request.split:
            prepared.limit_batch(request.max_batch)
        rng = CounterRNG([self.draw_key(i) for i in request.items], self.device)
        canvas, length_pass = self.start_canvas(prepared, rng)
        # positions after the prefix have the random numbers that they have without one
        prefix = prepared.prefix
        offset_rng = rng if prefix is None else OffsetRNG(rng, len(prefix))
        callback, stream = request.callback, None
        if request.on_chunk:
            stream = self.stream_for(prepared, request.on_chunk)
            callback = stream.following(callback, prefix)
        last_step = LastStep(callback) if callback else None
        interrupted = False
        try:
            out = request.sampler(
                prepared.target,
                offset_rng,
                draft=prepared.draft,
                canvas=canvas,
                trace=request.trace,
                callback=last_step,
            )
        except Interrupt:
            if last_step is None:
                raise
            left_to_right = registry.get("protocol", request.sampler.protocol).left_to_right
            out, interrupted = last_step.output(prepared.target.space, left_to_right), True
        if self.ranks is not None and not interrupted:
            self.ranks.agree_on_tokens(out.tokens)
        return self.complete(prepared, out, length_pass, stream, interrupted)

    def start_canvas(
        self, prepared: PreparedRun, rng: CounterRNG
    ) -> tuple[Tensor | None, list[tuple[int, int]]]:
        """Return the canvas that a run starts from, with the ends of rows where they come first.

        Args:
            prepared: the run.
            rng: random numbers of its items.

        Returns:
            Canvas [B, T(, C)] or None, and what the forward pass of the lengths computed of each
            row (``draw_lengths``), empty without one.
        """
        if prepared.length_space is None:
            return prepared.start.canvas, []
        request = prepared.request
        lengths = self.target(
            request.sampler,
            prepared.target.sampling,
            request.items,
            prepared.model,
            space=prepared.length_space,
        )
        max_batch = request.max_batch if request.split else None
        return draw_lengths(lengths, rng, prepared.start.canvas, max_batch)

    def stream_for(self, prepared: PreparedRun, on_chunk: OnChunk) -> Stream:
        """Return the sender of the media of a run.

        Args:
            prepared: the run.
            on_chunk: receiver of the parts.

        Raises:
            GenError: the media can only be decoded as a whole.
        """
        request, space = prepared.request, prepared.space
        return stream_of(
            self.modality,
            prepared.frontend,
            space,
            len(request.items),
            on_chunk,
            lambda tokens: self.decode(tokens, space, prepared.frontend),
            registry.get("protocol", request.sampler.protocol).left_to_right,
            request.previews,
        )

    def complete(
        self,
        prepared: PreparedRun,
        out: SampleOutput,
        length_pass: list[tuple[int, int]],
        stream: Stream | None = None,
        interrupted: bool = False,
    ) -> PipelineOutput:
        """Return the output of a run and send what is left of its media.

        Args:
            prepared: the run.
            out: tokens [B, T(, C)], statistics and traces of the sampler.
            length_pass: what ``start_canvas`` computed.
            stream: sender of the media; None where nobody receives them.
            interrupted: whether a callback ended the run.
        """
        if prepared.prefix is not None:
            out = out.with_prefix(prepared.prefix.to(out.tokens))
        if length_pass:
            out = add_length_pass(out, length_pass)
        made = self.decode_outputs(prepared, out, None if interrupted else stream)
        if stream is not None:
            stream.finish(made.media)
        return replace(made, interrupted=True) if interrupted else made

    def decode_outputs(
        self, prepared: PreparedRun, out: SampleOutput, stream: Stream | None = None
    ) -> PipelineOutput:
        """Return the output of a run, with the media of its tokens.

        Args:
            prepared: the run.
            out: tokens [B, T(, C)], statistics and traces of the sampler.
            stream: decoder that made the media while they were streamed.
        """
        request, space, frontend = prepared.request, prepared.space, prepared.frontend
        decoded = None if stream is None else stream.decoded()
        if decoded is None:
            decoded = [self.decode(t, space, frontend) for t in out.tokens]
        media = [
            prepared.start.overlay(row, self.modality.complete(media, item.condition))
            for row, (media, item) in enumerate(zip(decoded, request.items, strict=True))
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
            guarantee=self.guarantee(request.sampler),
            sampling=request.sampling,
            device=self.device,
            dtype=self.dtype,
            start=request.start,
            grid=space.grid,
            model_options=self.model_options,
            served=self.modality,
            frontend=frontend,
            logprobs=with_texts(out.logprobs, frontend),
            candidates=decoded_on_demand(out.candidates, prepared.target.evaluator),
        )

    def decode(self, tokens: Tensor, space: TokenSpace, frontend: TokenFrontend) -> Any:
        """Return the media of one row's tokens [T(, C)], up to its end.

        Rows are decoded one at a time, so that media do not depend on a batch.
        """
        kept = space.before_end(tokens)
        if not len(kept) and isinstance(frontend, TextBytes):
            return ""
        codes = self.modality.to_codes(kept[None], space)
        media = self.modality.trim(frontend.postprocess(frontend.decode(codes)[0]))
        return before_stop(media, space.stop) if space.stop else media

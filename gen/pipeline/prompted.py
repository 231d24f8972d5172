"""Targets: models with the prompts of a batch and its sampling parameters."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from gen.contracts.checkpoint import Checkpoint
from gen.contracts.condition import Condition, PromptBatch
from gen.contracts.frontend import TokenFrontend, Vocabulary
from gen.contracts.protocol import ModelProtocol
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import item_key
from gen.core.sampler import Sampler, SamplerSpec, require_constraint_kept
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.language_models import compiled_forward
from gen.models.targets.base import Target
from gen.pipeline.models import ModalityModels, same_frontend
from gen.pipeline.output import ItemPlan
from gen.pipeline.request import GenerationRequest

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
            prefix: tokens [k] that the prompt of a left-to-right model ends with; the target is
                what follows them.
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
        target.learned, target.name = self._learned.setdefault(name, {}), name
        return target

    def _adapter(self, name: str, protocol: str, space: TokenSpace) -> Any:
        """Return a model's adapter of a protocol, compiled where that is asked for.

        Raises:
            GenError: the vocabularies of model and space differ.
        """
        model: Any = self.bound(name)[0]
        kind: type[ModelProtocol] = registry.get("protocol", protocol)
        is_checkpoint = isinstance(model, Checkpoint)
        adapter = model.adapter(protocol) if is_checkpoint else kind.adapters[space.kind](model)
        if space.kind == "codes" and adapter.vocab_size != space.vocab_size:
            raise GenError(
                f"model {name} has logits of {adapter.vocab_size} tokens; expected"
                f" {space.vocab_size}, as its target has"
            )
        if self.compile:
            self._compile(name, adapter)
        return adapter

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

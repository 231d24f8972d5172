"""Defaults of a request: sampler, parameters of the sampler and sampling parameters.

Job files, the command line, the Python API, ``gen bench``, diffusers' call and policies all take
their defaults from ``Defaults.complete``, so a request means the same at every door.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gen.contracts.checkpoint import CheckpointFiles, family_of
from gen.contracts.draft_model import DRAFTING, DraftModel
from gen.contracts.modality import BUILT_IN, CONDITIONS, Modality
from gen.contracts.protocol import model_key, protocols_of
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import (
    SamplerSpec,
    implied_sampling,
    parameter_names,
    preset_of,
    protocol_of,
    resolve_sampler,
    sampler_class,
    spell,
    takes_kinds,
)
from gen.core.sampler import Sampler
from gen.models.load.hub import HubOptions
from gen.models.load.locate import model_kind

# sampling parameters that latents have too: nothing ranks them
OF_LATENTS = ("temperature", "guidance_scale")
STATED_SAMPLING = "default_sampling"  # field of the config of a model of gen's own architectures


def own_sampling(usual: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the default sampling parameters of a model of gen's own architectures: what its
    training stated, over those of its modality. Guidance, whose scale suits the modality's own
    models, is left out of those where the model reads no prompts in the modality's language.

    Args:
        usual: default sampling parameters of the modality.
        config: content of the model's config.json.
    """
    guides = config.get(CONDITIONS, BUILT_IN) == BUILT_IN
    kept = {k: v for k, v in usual.items() if guides or k != "guidance_scale"}
    return {**kept, **(config.get(STATED_SAMPLING) or {})}


@dataclass(frozen=True)
class Defaults:
    """Suggestions of a modality, or of one of its models.

    Attributes:
        modality: name of the modality.
        models: zoo name of each model of the modality by ``model_key``.
        samplers: default sampler of each ``model_key``, the preferred protocol first.
        sampling: sampling parameters of a request that gives none.
        masked_params: parameters of masked samplers that neither the request nor the preset gives.
        protocols: protocols of the model that was named; empty where none was.
        model_kind: ``codes`` or ``latents``, the kind of the model that was named.
        dtype: floating-point type of a model that is named without one.
        draft: draft model that the model is loaded with.
        needs_prompt: whether the model reads prompts in the language of the modality, or of its
            family; the empty one is none.
    """

    modality: str
    models: Mapping[str, str]
    samplers: Mapping[str, str]
    sampling: Mapping[str, Any]
    masked_params: Mapping[str, Any]
    protocols: tuple[str, ...] = ()
    model_kind: str | None = None
    dtype: str = "float32"
    draft: DraftModel | None = None
    needs_prompt: bool = True

    @classmethod
    def of(
        cls,
        modality: Modality | type[Modality],
        sampling: Mapping[str, Any],
        protocols: tuple[str, ...] = (),
        kind: str | None = None,
    ) -> Defaults:
        """Return the defaults of a modality.

        Args:
            modality: the modality.
            sampling: default sampling parameters of the model, or else of the modality.
            protocols: protocols of the model that was named.
            kind: kind of the model that was named.
        """
        return cls(
            modality.name,
            modality.models,
            modality.default_samplers,
            sampling,
            modality.masked_params,
            protocols,
            kind,
        )

    @classmethod
    def named(
        cls,
        modality: str,
        model: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        where: str = "",
    ) -> Defaults:
        """Return the defaults of a modality and a model by name; no weights are loaded.

        Args:
            modality: a registered modality.
            model: zoo name, folder, file or hub id; None for the modality's own models. One that
                cannot be found has the modality's defaults.
            options: options that the model is loaded with.
            where: file or flag that the names came from, for messages.

        Raises:
            GenError: the modality is unknown, no family knows the model's files, or there is no
                such draft model.
        """
        own: type[Modality] = registry.get("modality", modality, where)
        hub, draft = HubOptions.among(options or {}), (options or {}).get("draft_model")
        if model is None:
            found = cls.of(own, own.default_sampling)
            return found if draft is None else replace(found, draft=DraftModel.find(draft, hub))
        try:
            files = CheckpointFiles.find(model, hub.of(str(model)))
        except GenError:  # a loader of the caller's own may know it; any other one refuses it
            return cls.of(own, own.default_sampling)
        saved = files.saved
        dtype = cls.dtype if saved is None else saved.dtype
        if draft is None and saved is not None:
            draft = saved.options.get("draft_model")
        more = {"dtype": dtype, "draft": None if draft is None else DraftModel.find(draft, hub)}
        if files.embedded:
            protocols, kind = protocols_of(files.path), model_kind(files.path)
            needs = files.config.get(CONDITIONS, BUILT_IN) == BUILT_IN
            said = own_sampling(own.default_sampling, files.config)
            return replace(cls.of(own, said, protocols, kind), needs_prompt=needs, **more)
        family = family_of(files, modality)
        said = family.sampling_of(files, {**(saved.options if saved else {}), **(options or {})})
        # parameters that suit the embedded models need not suit a published one
        found = cls.of(own, said, family.protocols_of(files), family.kind)
        samplers = {**found.samplers, **family.default_samplers}
        return replace(found, models={}, samplers=samplers, masked_params={}, **more)

    def sampler(self, part: str = "") -> str:
        """Return the default sampler: the one of the model's protocol and kind, or of the first
        model that the modality has for the part. With a draft model it is one that drafts, where
        the model's protocol has one.

        Args:
            part: part of the condition that decides which of the modality's models serves it.

        Raises:
            GenError: none is known for the protocol of the model.
        """
        kind = self.model_kind or "codes"
        served = [model_key(p, kind) for p in self.protocols] or list(self.models)
        if part and not self.protocols:
            behind = f"-{part}"
            keys = [key.removesuffix(behind) for key in served if key.endswith(behind)]
            order = [key for key in keys if key in self.samplers]
        else:
            order = [key for key in self.samplers if key in served or not served]
        if order and self.draft is not None:
            return DRAFTING.get(order[0], self.samplers[order[0]])
        if order:
            return self.samplers[order[0]]
        raise GenError(
            f"no default sampler is known for the {' and '.join(served)} models of"
            f" modality {self.modality!r}; expected the name of a sampler"
        )

    def kind(self, sampler: SamplerSpec, part: str = "") -> str:
        """Return the kind of token that a sampler decodes here: ``codes`` or ``latents``.

        Where no model was named, it is the first of the sampler's kinds with a model. ``part``: as
        of ``sampler``.
        """
        if self.model_kind is not None:
            return self.model_kind
        protocol, kinds = protocol_of(sampler), takes_kinds(sampler)
        keys = (k for k in kinds if model_key(protocol, k, part=part) in self.models)
        return next(keys, kinds[0])

    def complete(
        self, sampler: SamplerSpec | None, sampling: Mapping[str, Any], part: str = ""
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Complete a request.

        Args:
            sampler: the sampler as the user wrote it; the default one for None and for parameters
                without a name.
            sampling: sampling parameters that the user gave.
            part: part of the condition that decides which of the modality's models serves it.

        Returns:
            ``{"name": ..., parameter: value}``, and the sampling parameters of the modality or
            model under those of the preset under the user's.

        Raises:
            GenError: an unknown sampler or parameter, or no default sampler.
        """
        spec = self.complete_sampler(sampler, part)
        usual = dict(self.sampling)
        if self.kind(spec, part) == "latents":
            usual = {k: v for k, v in usual.items() if k in OF_LATENTS}
        if not registry.get("protocol", protocol_of(spec)).guides:
            usual.pop("guidance_scale", None)
        return spec, {**usual, **implied_sampling(spec), **sampling}

    def complete_sampler(self, sampler: SamplerSpec | None, part: str = "") -> dict[str, Any]:
        """Return a sampler as ``{"name": ..., parameter: value}`` with the modality's parameters.

        Raises:
            GenError: an unknown sampler or parameter, or no default sampler.
        """
        spec = {} if sampler is None else spell(sampler)
        if spec.get("name") is None:
            spec = {**spec, "name": self.sampler(part)}
        if isinstance(sampler, Sampler):
            return spec
        cls = sampler_class(spec)
        if self.draft is not None:
            spec = self.draft.completed(spec)
        if cls.wraps:
            preset = preset_of(spec)
            base = spec.get("base", preset.params.get("base") if preset else None)
            return {**spec, "base": self.complete_sampler(base, part)}
        if not self.masked_params:
            return spec
        if cls.protocol != "masked":
            return spec
        preset = preset_of(spec)
        aliases = {**cls.aliases, **(preset.aliases if preset else {})}
        stated = {*(preset.params if preset else {}), *(aliases.get(key, key) for key in spec)}
        added = {
            key: value
            for key, value in self.masked_params.items()
            if key in parameter_names(cls) and key not in stated
        }
        if added and resolve_sampler(spec)[0].counts_steps:
            return {**spec, **added}
        return spec

"""The Python API: ``gen.load("image")`` gives a pipeline, calling it gives media.

    pipe = gen.load("image")
    out = pipe(["a small blue ring in the centre"], sampler="speculative_jacobi", num_samples=4, seed=0)
    out.media[0]; out.tokens; out.stats; out.save("out/api")

Sample j of a prompt has the seed ``seed + j``, and its draws depend on prompt and seed alone: ``seed=that, num_samples=1``
makes the same item again, in any batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.draws import CounterDraws, OffsetDraws, item_key
from gen.errors import GenError, bad_value
from gen.law import Law
from gen.modality import Binding, Modality, kind_of, model_key, suggested_law
from gen.models.adapters import BlockLM, CausalLatentLM, CausalLM, MaskedLatentLM, MaskedLM
from gen.models.block_target import BlockTarget
from gen.models.latent_targets import CausalLatentTarget, MaskedLatentTarget
from gen.models.loading import load_lm, model_kind, model_protocol, pick_device, pick_dtype, read_config
from gen.models.targets import CausalTarget, MaskedTarget, Target
from gen.registry import registry
from gen.sampling import Callback, Sampler, resolve_sampler
from gen.streaming import Chunk, MediaStream, OnChunk, streamed
from gen.types import Stats, TokenSpace, TraceStep

SamplerSpec = str | Mapping[str, Any] | Sampler
BATCH_SIZE = 8
TARGETS = {
    ("causal", "codes"): (CausalTarget, CausalLM),
    ("masked", "codes"): (MaskedTarget, MaskedLM),
    ("blocks", "codes"): (BlockTarget, BlockLM),
    ("causal", "latents"): (CausalLatentTarget, CausalLatentLM),
    ("masked", "latents"): (MaskedLatentTarget, MaskedLatentLM),
}


@dataclass(frozen=True)
class ItemPlan:
    """One medium to make. ``index``: its place among all items; ``prompt``: as the user wrote it; ``seed``: its own."""

    index: int
    prompt: str
    seed: int


@dataclass
class PipelineOutput:
    """``media`` and ``items`` in the same order, ``tokens`` long [N, T] or latents [N, T, C], ``stats`` and ``traces`` (if asked for) per item."""

    media: list[Any]
    tokens: Tensor
    stats: list[Stats]
    traces: list[list[TraceStep]] | None
    items: list[ItemPlan]
    modality: str
    model: str
    spec: dict[str, Any]  # the sampler: its name as the user wrote it, and the knobs that were said
    exactness: str
    law: Law
    device: torch.device
    dtype: torch.dtype
    image: Any = None
    mask: Any = None
    prefix: Any = None
    grid: tuple[int, ...] = ()

    def save(self, folder: str | Path) -> Path:
        """Writes a job folder: media, manifest, config, gallery. Returns the gallery's path."""
        from gen.jobs import save_output

        return save_output(self, Path(folder))


class Pipeline:
    """A modality with its models, loaded when a sampler first needs them.

    ``model``: a zoo name, folder or hub id; ``None`` is the modality's default for the sampler's protocol.
    """

    def __init__(self, modality: str | Modality, model: str | Path | None = None, device: str | torch.device = "cpu",
                 dtype: str | torch.dtype = "float32"):
        self.modality: Modality = registry.get("modality", modality)() if isinstance(modality, str) else modality
        self.device, self.dtype = pick_device(device), pick_dtype(dtype)
        self.model = None if model is None else str(model)
        if self.model is not None:
            read_config(self.model)  # an unknown name fails here, not after the first batch
        self._frontends: dict[str, Any] = {}
        self._loaded: dict[str, tuple[torch.nn.Module, Binding]] = {}

    def frontend(self, kind: str = "codes"):
        """The frontend of ``codes`` or ``latents``."""
        if kind not in self._frontends:
            folder = self._beside(self.modality.frontends[kind])
            self._frontends[kind] = self.modality.frontend(kind, self.device, self.dtype, folder)
        return self._frontends[kind]

    def _beside(self, name: str) -> Path | None:
        """The folder of that name beside the model's own, if there is one: a model trained elsewhere brings its company along."""
        beside = Path(self.model or "").expanduser().resolve().parent / name
        return beside if self.model and beside.is_dir() else None

    def kind(self, sampler: Sampler) -> str:
        """What a sampler decodes here: ``codes`` or ``latents``."""
        return kind_of(sampler, self.modality) if self.model is None else model_kind(self.model)

    def model_name(self, sampler: Sampler) -> str:
        """The model that serves a sampler. Raises ``GenError`` if it is none of the sampler's kind, or the modality has none."""
        if self.model is not None:
            have = model_protocol(self.model), model_kind(self.model)
            if have[0] != sampler.protocol or have[1] not in sampler.kinds:
                raise GenError(f"model {self.model} is a {have[0]} one of {have[1]}, but the sampler needs a {sampler.protocol} one of "
                               f"{' or '.join(sampler.kinds)}")
            return self.model
        return self._default(model_key(sampler.protocol, self.kind(sampler)))

    def draft_name(self, sampler: Sampler) -> str:
        """The draft model of a sampler: the one it names, or the modality's; beside the model if it lies there."""
        name = sampler.draft_model or self._default(model_key(sampler.protocol, self.kind(sampler), draft=True))
        return name if sampler.draft_model else str(self._beside(name) or name)

    def _default(self, key: str) -> str:
        if key not in self.modality.models:
            raise GenError(f"modality {self.modality.name!r} has no {key} model; it has {', '.join(self.modality.models)}")
        return self.modality.models[key]

    def _model(self, name: str) -> tuple[torch.nn.Module, Binding]:
        if name not in self._loaded:
            model = load_lm(name, self.device, self.dtype)
            self._loaded[name] = model, self.modality.bind(model.config, self.frontend(model_kind(name)), name)
        return self._loaded[name]

    def plan(self, prompts: str | Sequence[str], num_samples: int = 1, seed: int = 0) -> list[ItemPlan]:
        """The items of a call, prompt-major; every prompt is read first. A prompt given twice goes on with fresh seeds."""
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not prompts:
            raise GenError("there are no prompts; expected at least one")
        for name, value, low in (("num_samples", num_samples, 1), ("seed", seed, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value < 2**62:
                raise bad_value(name, value, f"an integer of at least {low}")
        items, used = [], {}
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise GenError(f"prompt {prompt!r} is a {type(prompt).__name__}; expected a string")
            canonical = str(self.modality.condition(prompt))
            first = used.get(canonical, 0)
            used[canonical] = first + num_samples
            items += [ItemPlan(len(items) + j, prompt, seed + first + j) for j in range(num_samples)]
        return items

    def resolve(self, sampler: SamplerSpec, law: Mapping[str, Any] | Law | None) -> tuple[Sampler, Law]:
        """The sampler and law of a call; without a law, the modality's default one, as far as a preset leaves it open."""
        if law is None:
            preset = registry.table("preset").get(spell(sampler).get("name"))
            kind = self.kind(resolve_sampler(sampler)[0])
            law = {**suggested_law(self.modality, kind), **(preset.law if preset else {})}
        return resolve_sampler(sampler, law)

    def target(self, sampler: Sampler, law: Law, items: Sequence[ItemPlan], name: str | None = None,
               given: Tensor | None = None) -> Target:
        """What the sampler will see: model (its own, or the one of that name), conditions and law. A causal model's prompt ends
        with the tokens ``given`` [k], and the target is what follows them."""
        model, binding = self._model(name or self.model_name(sampler))
        space, before = binding.space, []
        if given is not None and sampler.protocol == "causal":
            space, before = space.after(len(given)), given.tolist()
        conditions = [self.modality.condition(i.prompt) for i in items]
        prompts = [binding.prompt(c) + before for c in conditions]
        width = max(map(len, prompts))
        padded = torch.tensor([p + p[-1:] * (width - len(p)) for p in prompts])
        lengths = torch.tensor([len(p) for p in prompts])
        uncond = torch.tensor([binding.unconditional + before]).expand(len(items), -1) if law.guided else None
        make, adapt = TARGETS[sampler.protocol, space.kind]
        return make(adapt(model), padded, space, law, uncond, prompt_length=lengths)

    def generate(self, items: Sequence[ItemPlan], sampler: SamplerSpec = "speculative_jacobi",
                 law: Mapping[str, Any] | Law | None = None, *, trace: bool = False, callback: Callback | None = None,
                 image: Any = None, mask: Any = None, prefix: Any = None, on_chunk: OnChunk | None = None) -> PipelineOutput:
        """Makes the items in one batch. ``on_chunk(row, media)``: called with every part of a medium as soon as its tokens are there."""
        spec = spell(sampler)
        sampler, law = self.resolve(sampler, law)
        name = self.model_name(sampler)
        space = self._model(name)[1].space
        frontend = self.frontend(space.kind)
        given, canvas, overlay = self._given(spec, sampler, space, frontend, image, mask, prefix, len(items))
        target = self.target(sampler, law, items, name, given)
        draft = self.target(sampler, law, items, self.draft_name(sampler), given) if sampler.drafted else None
        draws, first = CounterDraws([self.draw_key(i) for i in items], self.device), 0
        if target.length < space.length:  # the places after what is given have the draws that they always have
            first = space.length - target.length
            draws = OffsetDraws(draws, first)
        stream = MediaStream(self.modality, frontend, space, len(items), on_chunk) if on_chunk else None
        if stream:
            callback = stream.following(callback, given if first else None)
        out = sampler(target, draws, draft=draft, canvas=canvas, trace=trace, callback=callback)
        if first:
            out = out.after(given.to(out.tokens))
        # one at a time, so that an item's media do not depend on its batch either
        codes = self.modality.to_codes(out.tokens, space)
        media = stream.media() if stream else [self.modality.trim(frontend.postprocess(frontend.decode(c[None])[0])) for c in codes]
        return PipelineOutput([overlay(m) for m in media], out.tokens.cpu(), out.stats, out.traces, list(items), self.modality.name,
                              name, spec, sampler.exactness, law, self.device, self.dtype, image, mask, prefix, space.grid)

    def _given(self, spec: dict, sampler: Sampler, space: TokenSpace, frontend, image: Any, mask: Any, prefix: Any, rows: int):
        """Tokens that come first [k], a canvas, and what lays the result over the original."""
        if (image is None) != (mask is None):
            raise GenError("editing needs both an image and a mask")
        if image is not None and prefix is not None:
            raise GenError("an image to edit and a prefix to continue came together; expected one of them")
        if image is not None:
            if sampler.protocol != "masked":
                raise GenError(f"sampler {spec['name']!r} decodes left to right and cannot edit; use a masked one such as 'maskgit' or 'halton'")
            canvas, overlay = self.modality.edit(image, mask, frontend, space)
            return None, canvas.expand(rows, *canvas.shape), overlay
        same = lambda media: media
        if prefix is None:
            return None, None, same
        given = self.modality.prefix(prefix, frontend, space)
        if sampler.protocol == "causal":
            return given, None, same
        canvas = space.empty(rows, self.device)
        canvas[:, : len(given)] = given
        return given, canvas, same

    def draw_key(self, item: ItemPlan) -> int:
        return item_key(self.modality.name, str(self.modality.condition(item.prompt)), item.seed)

    def __call__(self, prompts: str | Sequence[str], sampler: SamplerSpec = "speculative_jacobi",
                 law: Mapping[str, Any] | Law | None = None, *, num_samples: int = 1, seed: int = 0,
                 batch_size: int | None = None, trace: bool = False, callback: Callback | None = None,
                 image: Any = None, mask: Any = None, prefix: Any = None) -> PipelineOutput:
        """Makes ``num_samples`` media per prompt.

        ``sampler``: a sampler's or preset's name, ``{"name": ..., knob: value}`` or a sampler. ``law``: see ``gen.law.Law``;
        ``None`` is the modality's default. ``batch_size``: items decoded together (8), which changes no draw. ``image`` and
        ``mask``: regenerate only what the mask marks. ``prefix``: a medium, or the path of one, that every result begins with.
        Raises ``GenError`` for anything it cannot do.
        """
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise bad_value("batch_size", batch_size, "an integer of at least 1")
        items = self.plan(prompts, num_samples, seed)
        size = batch_size or BATCH_SIZE
        parts = [
            self.generate(items[i : i + size], sampler, law, trace=trace, callback=callback, image=image, mask=mask, prefix=prefix)
            for i in range(0, len(items), size)
        ]
        return replace(
            parts[0],
            media=[m for p in parts for m in p.media],
            tokens=torch.cat([p.tokens for p in parts]),
            stats=[s for p in parts for s in p.stats],
            traces=[t for p in parts for t in p.traces] if trace else None,
            items=items,
        )

    def stream(self, prompts: str | Sequence[str], sampler: SamplerSpec = "speculative_jacobi",
               law: Mapping[str, Any] | Law | None = None, *, num_samples: int = 1, seed: int = 0,
               prefix: Any = None) -> Iterator[Chunk]:
        """The parts of media while they are being made: first frames, first sounds. All items are made in one batch, so their
        parts come interleaved; those of one item, put together, are what a call gives for it. Raises ``GenError``."""
        items = self.plan(prompts, num_samples, seed)
        yield from streamed(lambda on_chunk: self.generate(items, sampler, law, prefix=prefix, on_chunk=on_chunk), items)


def spell(sampler: SamplerSpec) -> dict[str, Any]:
    """A sampler as ``{"name": ..., knob: value}``. Raises ``GenError`` for a sampler object whose class has no name."""
    if isinstance(sampler, str):
        return {"name": sampler}
    if isinstance(sampler, Mapping):
        return dict(sampler)
    names = [name for name, cls in registry.table("sampler").items() if cls is type(sampler)]
    if not names:
        raise GenError(f"{type(sampler).__name__} is not registered as a sampler")
    return {"name": names[0], **asdict(sampler)}


def load(modality: str, model: str | Path | None = None, *, device: str | torch.device = "cpu",
         dtype: str | torch.dtype = "float32") -> Pipeline:
    """A pipeline for a modality (see ``gen ls modalities``). Raises ``GenError`` for unknown names, devices and dtypes."""
    return Pipeline(modality, model, device, dtype)

"""The Python API: ``gen.load("image")`` gives a pipeline, calling it gives media.

    pipe = gen.load("image") out = pipe(["a small blue ring in the centre"],
    sampler="speculative_jacobi", num_samples=4, seed=0) out.media[0]; out.tokens; out.stats;
    out.save("out/api")

Sample j of a prompt has the seed ``seed + j``, and its draws depend on prompt and seed alone:
``seed=that, num_samples=1`` makes the same item again, in any batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor

from gen.contracts.checkpoint import (
    Checkpoint,
    CheckpointFiles,
    LoadOptions,
    family_of,
    load_checkpoint,
    options_of,
)
from gen.contracts.frontend import TokenFrontend, codebook_digest
from gen.contracts.modality import Binding, Modality, kind_of, model_key, suggested_sampling
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, bad_value
from gen.core.registry import registry
from gen.core.rng import CounterRNG, OffsetDraws, item_key
from gen.core.sampler import Callback, Sampler, resolve_sampler
from gen.core.sampling_params import SamplingOptions, SamplingParams, explicit_sampling
from gen.core.token_space import TokenSpace
from gen.jobs.plan import own_seeds
from gen.models.adapters.language_models import (
    BlockLM,
    CausalLatentLM,
    CausalLM,
    MaskedLatentLM,
    MaskedLM,
    compiled_forward,
)
from gen.models.load.locate import (
    ZOO,
    locate,
    model_kind,
    model_protocols,
    pick_device,
    pick_dtype,
    read_config,
    readable,
)
from gen.models.targets.base import Target
from gen.models.targets.block import BlockTarget
from gen.models.targets.causal import CausalTarget
from gen.models.targets.latent import CausalLatentTarget, MaskedLatentTarget
from gen.models.targets.masked import MaskedTarget
from gen.models.zoo import load_lm
from gen.pipeline.lengths import counted, draw_lengths, settled
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.streaming import Chunk, MediaStream, OnChunk, streamed

SamplerSpec = str | Mapping[str, Any] | Sampler
BATCH_SIZE = 8
TURNS = 4  # batches that are one, rows that are done being replaced
TARGETS = {
    ("causal", "codes"): (CausalTarget, CausalLM),
    ("masked", "codes"): (MaskedTarget, MaskedLM),
    ("blocks", "codes"): (BlockTarget, BlockLM),
    ("causal", "latents"): (CausalLatentTarget, CausalLatentLM),
    ("masked", "latents"): (MaskedLatentTarget, MaskedLatentLM),
}


class Pipeline:
    """A modality with its models, loaded when a sampler first needs them.

    ``model``: a zoo name, folder, file or hub id; ``None`` is the modality's default for the
    sampler's protocol. One of a family of published checkpoints is loaded at once, and may then
    decide what prompts mean: ``options`` are its family's (``gen ls families``). ``compile``:
    models run through ``torch.compile``, on a GPU as CUDA graphs; the first calls of every shape
    then take long. One that cannot is refused.
    """

    def __init__(
        self,
        modality: str | Modality,
        model: str | Path | None = None,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype = "float32",
        device_map: str | Mapping[str, Any] | None = None,
        trust_remote_code: bool = False,
        compile: bool = False,
        **options: Any,
    ):
        self.modality: Modality = (
            registry.get("modality", modality)() if isinstance(modality, str) else modality
        )
        self._how = LoadOptions(
            pick_device(device), pick_dtype(dtype), device_map, trust_remote_code
        )
        if not isinstance(compile, bool):
            raise bad_value("compile", compile, "true or false")
        self.device, self.dtype, self.compile = self._how.device, self._how.dtype, compile
        self.model = None if model is None else str(model)
        said = {
            k: v
            for k, v in (("device_map", device_map), ("trust_remote_code", trust_remote_code))
            if v
        }
        self.model_options = {
            k: str(v) if isinstance(v, Path) else v for k, v in {**said, **options}.items()
        }
        self._options = options
        self._checkpoints: dict[str, Checkpoint | None] = {}
        checkpoint = None if self.model is None else self._published(self.model)
        if checkpoint is not None:
            self.modality = checkpoint.modality
        elif self.model_options:
            raise GenError(
                f"model {self.model or 'of the zoo'} came with the options"
                f" {', '.join(self.model_options)}; expected none: they are for published"
                " checkpoints"
            )
        elif self.model is not None:
            read_config(self.model)  # an unknown name fails here, not after the first batch
        self._frontends: dict[str, Any] = {}
        self._known: dict[str, dict[Any, Any]] = {}
        self._loaded: dict[str, tuple[torch.nn.Module, Binding, TokenFrontend]] = {}

    def _published(self, name: str) -> Checkpoint | None:
        """The checkpoint of that name, if it is none of gen's own architectures. A draft model gets
        those options that its family has."""
        if name not in self._checkpoints:
            files, options = CheckpointFiles.find(name), self._options
            if not files.embedded and name != self.model:
                options = {
                    k: v
                    for k, v in options.items()
                    if k in options_of(family_of(files, self.modality.name))
                }
            self._checkpoints[name] = (
                None
                if files.embedded
                else load_checkpoint(files, self.modality.name, self._how, options)
            )
        return self._checkpoints[name]

    def _serves(self, name: str) -> tuple[tuple[str, ...], str]:
        """The protocols and the kind of a model."""
        checkpoint = self._published(name)
        return (
            (checkpoint.protocols, checkpoint.kind)
            if checkpoint
            else (model_protocols(name), model_kind(name))
        )

    def frontend(self, kind: str = "codes", name: str | None = None) -> TokenFrontend:
        """The frontend of ``codes`` or ``latents``: the modality's own, or the embedded one of that
        name."""
        usual = self.modality.frontends[kind]
        name = name or usual
        if name not in self._frontends:
            folder = self._beside(name) or (None if name == usual else ZOO / name)
            self._frontends[name] = self.modality.frontend(
                kind, self.device, self.frontend_dtype, folder
            )
        return self._frontends[name]

    @property
    def frontend_dtype(self) -> torch.dtype:
        """bfloat16 is for language models: it does not hold a codebook to the last of its float16
        bits, by which models know theirs."""
        return torch.float32 if self.dtype == torch.bfloat16 else self.dtype

    def _beside(self, name: str) -> Path | None:
        """The folder of that name beside the model's own, if there is one: a model trained
        elsewhere brings its company along."""
        beside = Path(self.model or "").expanduser().resolve().parent / name
        return beside if self.model and beside.is_dir() else None

    def kind(self, sampler: Sampler) -> str:
        """What a sampler decodes here: ``codes`` or ``latents``."""
        return (
            kind_of(sampler, self.modality) if self.model is None else self._serves(self.model)[1]
        )

    def model_name(self, sampler: Sampler) -> str:
        """The model that serves a sampler. Raises ``GenError`` if it is none of the sampler's kind,
        or the modality has none."""
        if self.model is not None:
            protocols, kind = self._serves(self.model)
            if sampler.protocol not in protocols or kind not in sampler.kinds:
                raise GenError(
                    f"model {self.model} is a {' and '.join(protocols)} one of {kind}, but the"
                    f" sampler needs a {sampler.protocol} one of {' or '.join(sampler.kinds)}"
                )
            return self.model
        return self._default(model_key(sampler.protocol, self.kind(sampler)))

    def draft_name(self, sampler: Sampler) -> str:
        """The draft model of a sampler: the one it names, or the modality's; beside the model if it
        lies there."""
        other = sampler.draft_protocol
        name = sampler.draft_model or self._default(
            model_key(other or sampler.protocol, self.kind(sampler), draft=not other)
        )
        if sampler.draft_model and other and other not in self._serves(name)[0]:
            raise GenError(
                f"draft model {name} is a {' and '.join(self._serves(name)[0])} one; expected a"
                f" {other} one"
            )
        return name if sampler.draft_model else str(self._beside(name) or name)

    def _default(self, key: str) -> str:
        if key not in self.modality.models:
            raise GenError(
                f"modality {self.modality.name!r} has no {key} model; it has"
                f" {', '.join(self.modality.models)}"
            )
        return self.modality.models[key]

    def bound(self, name: str) -> tuple[torch.nn.Module, Binding, TokenFrontend]:
        """A model, how the modality binds it, and the frontend that it was trained with, if it says
        so."""
        if name not in self._loaded:
            checkpoint = self._published(name)
            if checkpoint is not None:
                self._loaded[name] = checkpoint, checkpoint.binding, checkpoint.frontend
                return self._loaded[name]
            model = load_lm(name, self.device, self.dtype)
            frontend = self.frontend(model_kind(name), getattr(model.config, "frontend", None))
            self._loaded[name] = model, self.modality.bind(model.config, frontend, name), frontend
        return self._loaded[name]

    def binding(self, name: str) -> tuple[Binding, TokenFrontend]:
        """As ``bound``, for who only needs to read tokens: of an embedded model nothing but its
        config is loaded."""
        if name in self._loaded or self._published(name) is not None:
            return self.bound(name)[1:]
        from transformers import (
            AutoConfig,
        )  # the registry has imported the embedded architectures, so it knows them

        with readable("model", name):
            config = AutoConfig.from_pretrained(locate(name))
        frontend = self.frontend(model_kind(name), getattr(config, "frontend", None))
        return self.modality.bind(config, frontend, name), frontend

    def plan(
        self, prompts: str | Sequence[str], num_samples: int = 1, seed: int = 0
    ) -> list[ItemPlan]:
        """The items of a call, prompt-major; every prompt is read first. A prompt given twice goes
        on with fresh seeds."""
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
            condition = self.modality.condition(prompt)
            items += [
                ItemPlan(len(items) + j, prompt, own, self.modality.ground(condition, own))
                for j, own in enumerate(own_seeds(used, str(condition), num_samples, seed))
            ]
        return items

    def resolve(
        self, sampler: SamplerSpec, sampling: Mapping[str, Any] | SamplingParams | None
    ) -> tuple[Sampler, SamplingParams]:
        """The sampler and law of a call; without a law, the modality's default one, as far as a
        preset leaves it open."""
        if sampling is None:
            sampling = self.default_sampling(sampler)
        return resolve_sampler(sampler, sampling)

    def sampling_params(self, sampler: SamplerSpec, explicit: Mapping[str, Any]) -> SamplingParams:
        """Return the sampling parameters of a call: the defaults, overridden by what is explicit.

        Args:
            sampler: name, ``{"name": ..., parameter: value}`` or a sampler.
            explicit: sampling parameters by name; None means the default.

        Raises:
            GenError: a keyword is unknown, or contradicts the preset.
        """
        explicit = explicit_sampling(explicit, *CALL_KEYWORDS)
        return self.resolve(sampler, {**self.default_sampling(sampler), **explicit})[1]

    def default_sampling(self, sampler: SamplerSpec) -> dict[str, Any]:
        """Return the modality's default sampling parameters, overridden by the preset's."""
        preset = registry.table("preset").get(spell(sampler).get("name"))
        kind = self.kind(resolve_sampler(sampler)[0])
        return {**suggested_sampling(self.modality, kind), **(preset.sampling if preset else {})}

    def target(
        self,
        sampler: Sampler,
        sampling: SamplingParams,
        items: Sequence[ItemPlan],
        name: str | None = None,
        given: Tensor | None = None,
        space: TokenSpace | None = None,
        protocol: str | None = None,
    ) -> Target:
        """What the sampler will see: model (its own, or the one of that name), conditions and law.
        A causal model's prompt ends with the tokens ``given`` [k], and the target is what follows
        them. ``space``: by default the model's own. ``protocol``: of the model, by default the
        sampler's."""
        model, binding, _ = self.bound(name or self.model_name(sampler))
        space, before = space or binding.space, []
        protocol = protocol or sampler.protocol
        if given is not None and protocol == "causal":
            space, before = space.after(given), given.tolist()
        padded, lengths = _padded([binding.prompt(i.condition) + before for i in items])
        uncond, uncond_lengths = (
            _padded([binding.without(i.condition) + before for i in items])
            if sampling.guided
            else (None, None)
        )
        make, adapt = TARGETS[protocol, space.kind]
        adapter = model.adapter(protocol) if isinstance(model, Checkpoint) else adapt(model)
        if space.kind == "codes" and adapter.vocab_size != space.vocab_size:
            raise GenError(
                f"model {name or self.model_name(sampler)} has a law over {adapter.vocab_size} ids;"
                f" expected {space.vocab_size}, as its target has"
            )
        if self.compile:
            compiled_forward(adapter)
        target = make(adapter, padded, space, sampling, uncond, lengths, uncond_lengths)
        target.learned = self._known.setdefault(name or self.model_name(sampler), {})
        return target

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
        at_most: int | None = None,
    ) -> PipelineOutput:
        """Makes the items in one batch. ``on_chunk(row, media)``: called with every part of a
        medium as soon as its tokens are there. ``at_most``: items decoded at a time; the next one
        takes the place of one that is done, or they come batch by batch where a model cannot
        replace rows.
        """
        spec = spell(sampler)
        sampler, sampling = self.resolve(sampler, sampling)
        name = self.model_name(sampler)
        _, binding, frontend = self.bound(name)
        space, given, canvas, overlay = self._given(
            spec, sampler, binding.space, frontend, start, len(items)
        )
        rng, positions, unsettled = (
            CounterRNG([self.draw_key(i) for i in items], self.device),
            [],
            None,
        )
        if (
            sampler.protocol == "masked"
            and space.eos_token_id is not None
            and self.modality.length_first
        ):
            canvas = space.empty(len(items), self.device) if canvas is None else canvas
            unsettled = space if start.source is None and start.frames is None else None
            space = settled(space)
        target = self.target(sampler, sampling, items, name, given, space)
        draft = None
        if sampler.drafted:
            drafter = self.draft_name(sampler)
            if not _same_frontend(
                self.bound(drafter)[2], frontend
            ):  # ids of another frontend would be noise, or out of range
                raise GenError(
                    f"draft model {drafter} was trained on the tokens of another frontend than"
                    f" model {name}; expected the same one"
                )
            if (
                sampler.draft_protocol
            ):  # it sees the whole canvas, what is given included, and keeps its own rules
                own = replace(self.bound(drafter)[1].space, grid=space.grid, legal=space.legal)
                draft = self.target(
                    sampler, sampling, items, drafter, space=own, protocol=sampler.draft_protocol
                )
            else:
                draft = self.target(sampler, sampling, items, drafter, given, space)
        if at_most is not None and at_most < len(items):
            if not all(getattr(x, "replaces", False) for x in (target, draft) if x is not None):
                return PipelineOutput.joined(
                    [
                        self.generate(
                            items[i : i + at_most],
                            spec,
                            sampling,
                            trace=trace,
                            callback=callback,
                            start=start,
                            on_chunk=on_chunk
                            and (lambda row, media, first=i: on_chunk(first + row, media)),
                        )
                        for i in range(0, len(items), at_most)
                    ]
                )
            for part in (target, draft):
                if part is not None:
                    part.at_most(at_most)
        if unsettled is not None:
            canvas, positions = draw_lengths(
                self.target(sampler, sampling, items, name, space=unsettled), rng, canvas, at_most
            )
        first = 0
        if (
            target.length < space.length
        ):  # the places after what is given have the draws that they always have
            first = space.length - target.length
            rng = OffsetDraws(rng, first)
        stream = (
            MediaStream(self.modality, frontend, space, len(items), on_chunk) if on_chunk else None
        )
        if stream:
            callback = stream.following(callback, given if first else None)
        out = sampler(target, rng, draft=draft, canvas=canvas, trace=trace, callback=callback)
        if first:
            out = out.after(given.to(out.tokens))
        if positions:
            out = counted(out, positions)
        media = stream.media() if stream else [self.decode(t, space, frontend) for t in out.tokens]
        media = [
            overlay(self.modality.complete(m, i.condition))
            for m, i in zip(media, items, strict=True)
        ]
        return PipelineOutput(
            media,
            out.tokens.cpu(),
            out.stats,
            out.traces,
            list(items),
            self.modality.name,
            name,
            spec,
            sampler.guarantee,
            sampling,
            self.device,
            self.dtype,
            start,
            space.grid,
            self.model_options,
            self.modality,
            frontend,
        )

    def decode(self, tokens: Tensor, space: TokenSpace, frontend: TokenFrontend) -> Any:
        """The medium of one row's tokens [T(, C)] as far as they go. One at a time, so that it does
        not depend on a batch either."""
        codes = self.modality.to_codes(space.before_end(tokens)[None], space)
        return self.modality.trim(frontend.postprocess(frontend.decode(codes)[0]))

    def _given(
        self,
        spec: dict,
        sampler: Sampler,
        space: TokenSpace,
        frontend: TokenFrontend,
        start: EditSpec,
        rows: int,
    ):
        """The space, tokens that come first [k], a canvas, and what lays the result over the
        original."""

        def same(media):
            return media

        if start.source is not None:
            if sampler.protocol != "masked":
                raise GenError(
                    f"sampler {spec['name']!r} decodes left to right and cannot edit; use a masked"
                    " one such as 'maskgit' or 'halton'"
                )
            how = "mask" if start.span is None else "span"
            if how != self.modality.edited_by:
                raise GenError(
                    f"modality {self.modality.name!r} is edited with a {self.modality.edited_by}; a"
                    f" {how} came"
                )
            where = getattr(start, how)
            canvas, overlay = self.modality.edit(start.source, where, frontend, space)
            return space, None, canvas.expand(rows, *canvas.shape), overlay
        if start.frames is not None:
            space = self.modality.lasting(start.frames, frontend, space)
        given = (
            None if start.prefix is None else self.modality.prefix(start.prefix, frontend, space)
        )
        if (
            given is not None
            and start.frames is not None
            and len(given) >= int((space.legal.sum(1) > 1).sum())
        ):
            raise GenError(
                f"frames is {start.frames}, which the medium to continue fills by itself; expected"
                " more"
            )
        if sampler.protocol == "causal" or (given is None and start.frames is None):
            return space, given, None, same
        canvas = space.empty(rows, self.device)
        if given is not None:
            canvas[:, : len(given)] = given
        sole = (space.legal.sum(1) == 1).to(self.device)  # where only one id may stand, it does
        if bool(sole.any()):
            canvas[:, sole] = space.legal.to(self.device)[sole].long().argmax(1)
        return space, given, canvas, same

    def as_diffusers(self):
        """This pipeline with the call of diffusers' (``gen.interop.diffusers``)."""
        from gen.interop.diffusers import DiffusersPipeline

        return DiffusersPipeline(self)

    def sizes(self, items: Sequence[ItemPlan], sampler: SamplerSpec) -> list[int]:
        """The ids of every item's prompt: what is padded where items of other lengths run with
        it."""
        prompt = self.bound(self.model_name(resolve_sampler(sampler)[0]))[1].prompt
        return [len(prompt(i.condition)) for i in items]

    def turns(self, sampler: SamplerSpec) -> int:
        """How many batches of items to hand over at once, so that rows that are done can be
        replaced; 1 where none are."""
        return 1 if resolve_sampler(sampler)[0].protocol == "blocks" else TURNS

    def draw_key(self, item: ItemPlan) -> int:
        return item_key(self.modality.name, str(item.condition), item.seed)

    def __call__(
        self,
        prompts: str | Sequence[str],
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
        """Makes ``num_samples`` media per prompt.

        ``sampler``: a sampler's or preset's name, ``{"name": ..., knob: value}`` or a sampler.
        ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``guidance_scale``: sampling parameters; those
        that are not given are the modality's default.
        ``batch_size``: items decoded together (8), which changes no draw. ``source`` with ``mask``
        or ``span``, ``prefix`` and ``frames``: see ``gen.core.edit_spec.Start``. Raises
        ``GenError`` for anything it cannot do.
        """
        start = EditSpec(source, mask, span, prefix, frames)
        if batch_size is not None and (not isinstance(batch_size, int) or batch_size < 1):
            raise bad_value("batch_size", batch_size, "an integer of at least 1")
        params = self.sampling_params(sampler, sampling)
        items = self.plan(prompts, num_samples, seed)
        size = batch_size or BATCH_SIZE
        every = size * self.turns(sampler)
        return PipelineOutput.joined(
            [
                self.generate(
                    items[i : i + every],
                    sampler,
                    params,
                    trace=trace,
                    callback=callback,
                    start=start,
                    at_most=size,
                )
                for i in range(0, len(items), every)
            ]
        )

    def stream(
        self,
        prompts: str | Sequence[str],
        sampler: SamplerSpec = "speculative_jacobi",
        *,
        num_samples: int = 1,
        seed: int = 0,
        prefix: Any = None,
        **sampling: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """The parts of media while they are being made: first frames, first sounds. All items are
        made in one batch, so their parts come interleaved; those of one item, put together, are
        what a call gives for it. Raises ``GenError``.
        """
        params = self.sampling_params(sampler, sampling)
        items = self.plan(prompts, num_samples, seed)
        yield from streamed(
            lambda on_chunk: self.generate(
                items, sampler, params, start=EditSpec(prefix=prefix), on_chunk=on_chunk
            ),
            items,
        )


CALL_KEYWORDS = tuple(inspect.signature(Pipeline.__call__).parameters)[2:-1]


def _padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Rows of ids as long [B, P], the shorter ones with their last id repeated, and their lengths
    [B]."""
    width = max(map(len, rows))
    return torch.tensor(
        [r + r[-1:] * (width - len(r)) for r in rows], dtype=torch.long
    ), torch.tensor([len(r) for r in rows])


def _same_frontend(a: TokenFrontend, b: TokenFrontend) -> bool:
    return a is b or (
        type(a) is type(b)
        and a.config == b.config
        and codebook_digest(a.fingerprint) == codebook_digest(b.fingerprint)
    )


def spell(sampler: SamplerSpec) -> dict[str, Any]:
    """A sampler as ``{"name": ..., knob: value}``. Raises ``GenError`` for a sampler object whose
    class has no name."""
    if isinstance(sampler, str):
        return {"name": sampler}
    if isinstance(sampler, Mapping):
        return dict(sampler)
    names = [name for name, cls in registry.table("sampler").items() if cls is type(sampler)]
    if not names:
        raise GenError(f"{type(sampler).__name__} is not registered as a sampler")
    return {"name": names[0], **asdict(sampler)}


def load(
    modality: str,
    model: str | Path | None = None,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
    **options: Any,
) -> Pipeline:
    """A pipeline for a modality (see ``gen ls modalities``). ``options``: of the model's family
    (``gen ls families``), and ``device_map`` and ``trust_remote_code``. Raises ``GenError`` for
    unknown names, devices, dtypes and options."""
    return Pipeline(modality, model, device, dtype, **options)

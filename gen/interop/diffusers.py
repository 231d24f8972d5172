"""Pipelines with the call of diffusers:

    pipeline = gen.load("image").as_diffusers()
    images = pipeline("a large red circle", num_images_per_prompt=4, guidance_scale=2.0,
                      generator=torch.Generator().manual_seed(0)).images

Arguments, outputs and callbacks are those of diffusers; ``sampler`` is added. Each call decodes one
batch. The seed of an item is an integer drawn from its generator: the same state of the generator
gives the same samples, and the generator advances.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from diffusers import AudioPipelineOutput, ImagePipelineOutput
from diffusers.utils import BaseOutput
from PIL import Image
from torch import Tensor

from gen.core.errors import GenError, Interrupt, bad_value, unknown
from gen.core.registry import registry
from gen.core.resolve import SamplerSpec, require_answerable, spell
from gen.core.sampler import Sampler
from gen.core.sampling_params import CONTROLS, SamplingParams
from gen.pipeline.arguments import read_parameters
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.pipeline import Pipeline
from gen.pipeline.progress import Progress, ProgressBar
from gen.tokenizers.action.base import at_least

COUNTS = {
    "image": "num_images_per_prompt",
    "video": "num_videos_per_prompt",
    "audio": "num_waveforms_per_prompt",
}
TYPES = {
    "image": ("pil", "np", "pt", "latent"),
    "video": ("np", "pil", "pt", "latent"),
    "audio": ("np", "pt", "latent"),
    "text": ("text", "latent"),
    "data": ("np", "latent"),
}
MEDIA = ("image", "audio", "video")  # arguments that are parts of the condition
SAMPLING = ("temperature", "top_k", "top_p", "min_p", "guidance_scale")


@dataclass
class VideoPipelineOutput(BaseOutput):
    """Output of videos. ``frames``: float [N, F, h, w, 3] in [0, 1] (``np``), [N, F, 3, h, w]
    (``pt``) or lists of images (``pil``)."""

    frames: Any


@dataclass
class TextPipelineOutput(BaseOutput):
    """Output of texts, and their token ids ``sequences`` long [N, T]."""

    texts: list[str] | None
    sequences: Tensor | None = None


@dataclass
class MediaPipelineOutput(BaseOutput):
    """Output of modalities without a class in diffusers: motions, actions."""

    media: Any


class DiffusersPipeline:
    """Pipeline with the call of diffusers, see the module.

    A callback that sets ``_interrupt`` ends the call, which returns the tokens decoded so far and
    fills the other positions with allowed tokens.

    Attributes:
        output: output of the last call, with statistics; None if it was interrupted.
        num_timesteps: forward passes of the last call.
    """

    _callback_tensor_inputs = ("tokens", "known")

    def __init__(self, pipe: Pipeline):
        self.pipe = pipe
        self.output: PipelineOutput | None = None
        self.num_timesteps, self._interrupt = 0, False
        self._progress: Progress = "auto"

    def to(self, *targets: Any, **named: Any) -> DiffusersPipeline:
        """Move the pipeline to a device or dtype, as ``Pipeline.to``; return it."""
        self.pipe.to(*targets, **named)
        return self

    @property
    def components(self) -> dict[str, Any]:
        """Network and frontend of the default sampler's model, and others loaded by now."""
        return self.pipe.components

    @property
    def config(self) -> dict[str, Any]:
        """Facts about the pipeline as plain data."""
        return self.pipe.config

    def set_progress_bar_config(self, *, disable: bool = False) -> None:
        """Show the progress bar of calls, or none; by default one in terminals and notebooks."""
        self._progress = not disable

    @property
    def interrupt(self) -> bool:
        return self._interrupt

    @property
    def device(self) -> torch.device:
        return self.pipe.device

    @property
    def dtype(self) -> torch.dtype:
        return self.pipe.dtype

    @property
    def kind(self) -> str:
        """``image``, ``video``, ``audio``, ``text`` or ``data``."""
        return "text" if self.pipe.modality.name == "text" else self.pipe.modality.media_kind

    @torch.no_grad()
    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        negative_prompt: str | None = None,
        num_inference_steps: int | None = None,
        guidance_scale: float | None = None,
        num_images_per_prompt: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        output_type: str | None = None,
        return_dict: bool = True,
        callback_on_step_end: Callable | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("tokens",),
        *,
        sampler: SamplerSpec | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        **others: Any,
    ) -> BaseOutput | tuple:
        """Generate ``num_images_per_prompt`` samples of every prompt. Absent sampling parameters
        are the model's defaults.

        Args:
            prompt: one prompt, or several; None where the condition is media alone.
            negative_prompt: prompt of the unconditional CFG branch, for all prompts.
            num_inference_steps: number of steps, for samplers that have one (the masked ones).
            guidance_scale: weight of classifier-free guidance; 1 and less is no guidance, as in
                diffusers.
            num_images_per_prompt: samples per prompt; also by the name that diffusers has for the
                kind of output (``COUNTS``).
            generator: one generator, one for each item, or None for torch's own.
            output_type: ``pil``, ``np``, ``pt``, or ``latent`` for tokens.
            return_dict: return a ``BaseOutput`` instead of a tuple.
            callback_on_step_end: called as ``callback(pipeline, step, timestep, tensors)`` after
                every forward pass; ``timestep`` is the share of positions that are still masked.
            callback_on_step_end_tensor_inputs: names of the tensors for the callback.
            sampler: name, ``{"name": ..., parameter: value}`` or sampler; None for the usual one.
            temperature, top_k, top_p, min_p, others: sampling parameters, the sampler's, and media.

        Raises:
            GenError: an argument is not supported, or ``Pipeline`` refuses a value.
        """
        sampler, others = self._completed(sampler, others)
        controls, media = ({k: others.pop(k) for k in n if k in others} for n in (CONTROLS, MEDIA))
        count = self._count(num_images_per_prompt, others)
        output_type = self._output_type(output_type)
        self._check_callback_inputs(callback_on_step_end_tensor_inputs)
        spec = _with_steps(self.pipe, sampler, num_inference_steps)
        filters = (temperature, top_k, top_p, min_p, guidance_scale)
        sampling = self._sampling(spec, filters, controls)
        pipe = _against(self.pipe, negative_prompt, sampling.guided)
        items = self._items(pipe, _prompts(prompt, media), count, generator)
        self.output, self.num_timesteps, self._interrupt = None, 0, False
        step = self._following(callback_on_step_end, callback_on_step_end_tensor_inputs)
        with ProgressBar(self._progress, len(items)) as bar:
            out = pipe.generate(items, spec, sampling, callback=bar.following(step, len(items)))
        self.output = None if out.interrupted else out
        outcome = self._outcome(out.media, out.tokens, output_type)
        return outcome if return_dict else outcome.to_tuple()

    def _sampling(
        self, spec: SamplerSpec | None, values: Sequence[Any], controls: Mapping[str, Any]
    ) -> SamplingParams:
        """Return the defaults with the values of ``SAMPLING`` and others that came. Raises
        ``GenError`` for those that the sampler cannot answer."""
        came = {**dict(zip(SAMPLING, values, strict=True)), **controls}
        asked = {k: v for k, v in came.items() if v is not None}
        sampler, sampling = self.pipe.resolve(spec, None)
        sampling = require_answerable(sampler, replace(sampling, **asked))
        if 0 <= sampling.guidance_scale < 1:  # diffusers guides above 1 alone
            return replace(sampling, guidance_scale=1.0)
        return sampling

    def _output_type(self, output_type: str | None) -> str:
        """Return the type of output, by default the kind's first. Raises ``GenError`` for another
        one than the kind has."""
        usual = TYPES[self.kind]
        if output_type and output_type not in usual:
            raise bad_value(
                "output_type", output_type, f"one of {', '.join(usual)} for {self.kind}"
            )
        return output_type or usual[0]

    def _check_callback_inputs(self, names: Sequence[str]) -> None:
        """Refuse names of tensors that no callback gets. Raises ``GenError``."""
        for key in names:
            if key not in self._callback_tensor_inputs:
                raise unknown(
                    "entry of callback_on_step_end_tensor_inputs", key, self._callback_tensor_inputs
                )

    def _items(
        self,
        pipe: Pipeline,
        prompts: list[Any],
        count: int,
        generator: torch.Generator | Sequence[torch.Generator] | None,
    ) -> list[ItemPlan]:
        """Plan ``count`` items per prompt, each with a seed that ``generator`` draws."""
        self.pipe.plan(prompts)  # refuses bad prompts before a generator advances
        seeds = _seeds(generator, len(prompts) * count)
        return [
            replace(pipe.plan(p, 1, seeds[i * count + j])[0], index=i * count + j)
            for i, p in enumerate(prompts)
            for j in range(count)
        ]

    def _completed(
        self, sampler: SamplerSpec | None, others: Mapping[str, Any]
    ) -> tuple[SamplerSpec | None, dict[str, Any]]:
        """Return the sampler with its parameters among ``others``, and what is left of them."""
        left = {k: v for k, v in others.items() if v is not None}
        own = {*type(self).__call__.__annotations__, *MEDIA} - {"others", "return"}
        own.add(COUNTS.get(self.kind, "num_images_per_prompt"))
        return read_parameters(sampler, self.pipe.defaults.sampler, left, own), left

    def _count(self, images: int | None, others: Mapping[str, Any]) -> int:
        said = {"num_images_per_prompt": images, **others}
        said = {k: v for k, v in said.items() if v is not None}
        if len(said) > 1:
            raise GenError(f"{' and '.join(sorted(said))} are both given; expected one of them")
        key, count = next(iter(said.items()), ("num_images_per_prompt", 1))
        return at_least(key, count, 1)

    def _following(
        self, callback: Callable | None, wanted: Sequence[str]
    ) -> Callable[[dict[str, Any]], None]:
        def step(info: dict[str, Any]) -> None:
            self.num_timesteps += 1
            if callback is None:
                return
            shown = {k: info[k].clone() for k in wanted}
            changed = (
                callback(self, self.num_timesteps - 1, 1 - info["done"] / info["total"], shown)
                or {}
            )
            for key, value in changed.items():
                if key not in info or not torch.equal(value.nan_to_num(), info[key].nan_to_num()):
                    raise GenError(
                        f"callback_on_step_end returned different {key!r}; expected those it"
                        " received, since committed tokens cannot change"
                    )
            if self._interrupt:
                raise Interrupt

        return step

    def _outcome(self, media: list[Any], tokens: Tensor, output_type: str) -> BaseOutput:
        """Wrap samples and tokens in the output class of diffusers."""
        kind, latent = self.kind, output_type == "latent"
        if kind == "text":
            return TextPipelineOutput(None if latent else media, tokens)
        if kind == "image":
            return ImagePipelineOutput(tokens if latent else _as_images(media, output_type))
        if kind == "video":
            clips = media if latent else [[Image.fromarray(f) for f in clip] for clip in media]
            clips = (
                clips
                if latent or output_type == "pil"
                else _stacked([_as_images(c, output_type) for c in clips])
            )
            return VideoPipelineOutput(tokens if latent else clips)
        if kind == "audio":
            return AudioPipelineOutput(
                tokens
                if latent
                else _stacked([torch.from_numpy(m) if output_type == "pt" else m for m in media])
            )
        return MediaPipelineOutput(tokens if latent else media)


def diffusers_pipeline(pipe: Pipeline) -> DiffusersPipeline:
    """Make the pipeline with the call of diffusers."""
    return DiffusersPipeline(pipe)


def _prompts(prompt: Any, media: Mapping[str, Any]) -> list[Any]:
    """Return the prompts of a call with its arguments ``image``, ``audio`` and ``video``.

    One medium is that of all prompts. A list has one for each of several prompts, or all media of
    one; without a prompt, each is the condition of an output of its own.

    Raises:
        GenError: there is neither prompt nor medium, or a list of media has another length than the
            prompts.
    """
    came = {name: value for name, value in media.items() if value is not None}
    if not came:
        if prompt is None:
            raise GenError("there is no prompt; expected a text, or image, audio or video")
        return [prompt] if isinstance(prompt, str) else list(prompt)
    if isinstance(prompt, str):
        return [{"text": prompt, **came}]
    lists = {name: value for name, value in came.items() if isinstance(value, list)}
    count = max(map(len, lists.values()), default=1)
    texts = [None] * count if prompt is None else list(prompt)
    for name, value in lists.items():
        if len(value) != len(texts):
            raise GenError(
                f"{name} is a list of {len(value)} and there are {len(texts)} prompts; expected one"
                " for each"
            )
    return [
        {"text": text, **{n: v[i] if n in lists else v for n, v in came.items()}}
        for i, text in enumerate(texts)
    ]


def _with_steps(
    pipe: Pipeline, sampler: SamplerSpec | None, steps: int | None
) -> SamplerSpec | None:
    """Set the number of steps of a sampler.

    Raises:
        GenError: the sampler has no number of steps, or the spec has set it already.
    """
    if steps is None:
        return sampler
    found = pipe.resolve(sampler, None)[0]
    spec = spell(sampler or pipe.defaults.sampler())
    if "steps" not in type(found).__dataclass_fields__:
        raise GenError(
            f"num_inference_steps is {steps}, and sampler {spec['name']!r} has no number of steps;"
            " expected a masked sampler, such as 'maskgit'"
        )
    if isinstance(sampler, Sampler):
        return replace(sampler, steps=steps)
    preset = registry.table("preset").get(spec["name"])
    # a preset may have another parameter of steps under that name
    param = (preset.aliases if preset else {}).get("num_inference_steps", "steps")
    if param in spec:
        raise GenError(
            f"num_inference_steps is {steps} and sampler.{param} {spec[param]}; expected one of"
            " them"
        )
    return {**spec, param: steps}


def _against(pipe: Pipeline, negative: str | None, guided: bool) -> Pipeline:
    """Give a pipeline the condition of a negative prompt for the unconditional CFG branch."""
    if negative is None:
        return pipe
    if not isinstance(negative, str):
        raise bad_value("negative_prompt", negative, "one text, for all prompts")
    if not guided:
        raise GenError(
            "negative_prompt is given without guidance; expected a guidance_scale other than 1"
        )
    view, modality = copy.copy(pipe), pipe.modality
    condition, other = (
        modality.as_stated(modality.ground(modality.condition(negative), seed)) for seed in (0, 1)
    )
    if str(condition) != str(other):
        raise GenError(
            f"negative_prompt {negative!r} omits attributes that a seed would choose;"
            " expected a complete prompt"
        )
    view.negative_condition = condition
    return view


def _seeds(generator: torch.Generator | Sequence[torch.Generator] | None, count: int) -> list[int]:
    """Draw one seed for each item."""
    one = generator is None or isinstance(generator, torch.Generator)
    given = (
        [generator] * count if one else list(generator) if isinstance(generator, Sequence) else []
    )
    if len(given) != count or not (one or all(isinstance(g, torch.Generator) for g in given)):
        came = f"{len(given)} of them" if given else repr(generator)
        raise GenError(
            f"generator is {came}; expected a torch.Generator, or a list of one for each of the"
            f" {count} items"
        )
    return [
        int(torch.randint(2**62, (), generator=g, device="cpu" if g is None else g.device))
        for g in given
    ]


def _as_images(images: Sequence[Image.Image], output_type: str) -> Any:
    """Convert images: a list of Pillow's, float32 [N, h, w, 3] in [0, 1], or a tensor
    [N, 3, h, w]."""
    if output_type == "pil":
        return list(images)
    array = np.stack([np.asarray(p.convert("RGB"), np.float32) / 255 for p in images])
    return array if output_type == "np" else torch.from_numpy(array).permute(0, 3, 1, 2)


def _stacked(parts: list[Any]) -> Any:
    """Stack parts of one shape to an array or tensor; return parts of several shapes as a list."""
    if len({tuple(p.shape) for p in parts}) > 1:
        return parts
    return torch.stack(parts) if isinstance(parts[0], Tensor) else np.stack(parts)

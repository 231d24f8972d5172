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
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from gen.contracts.checkpoint import CheckpointFiles
from gen.contracts.condition import Condition
from gen.contracts.modality import Modality
from gen.core.edit_spec import EditSpec
from gen.core.errors import GenError, bad_value
from gen.core.memory import free_memory
from gen.core.paths import exists, expand_user
from gen.core.registry import registry
from gen.core.resolve import SamplerSpec, protocol_of, resolve_sampler
from gen.core.sampler import Callback, Sampler
from gen.core.sampling_params import SamplingParams
from gen.core.seeds import sample_seeds
from gen.core.token_space import kept_guarantee
from gen.models.load.hub import HubOptions
from gen.models.load.locate import AUTO
from gen.models.load.saved import Saved, read_saved
from gen.pipeline.arguments import (
    CallOptions,
    check_types,
    read_adapters,
    read_count,
    read_integer,
    read_limits,
    read_parameters,
    read_prompts,
    read_sampling,
    read_seed,
    require_items,
)
from gen.pipeline.memory import Attempt, BatchSizes
from gen.pipeline.output import ItemPlan, PipelineOutput
from gen.pipeline.progress import Progress, ProgressBar
from gen.pipeline.prompted import PreparedModels
from gen.pipeline.request import GenerationRequest
from gen.pipeline.save import push_pipeline, save_pipeline
from gen.pipeline.scoring import ScoredModels
from gen.pipeline.streaming import Chunk, OnChunk, stream_chunks

BATCH_SIZE = 8
TURNS = 4  # batches that are handed over together, so that rows that are done can be replaced
Prompt = str | Condition | Mapping[str, Any]
Prompts = Prompt | Iterable[Prompt]


class Pipeline(PreparedModels, ScoredModels):
    """A modality with its models, loaded when a sampler first needs them.

    Args:
        modality: name of a modality, or a modality.
        model: zoo name, folder, file or hub id; None is the modality's default for the sampler's
            protocol. A published checkpoint is loaded at once, and may decide what prompts mean.
        device: device of models and frontends.
        dtype: floating-point type of models; None is float32, or that of a saved pipeline.
        device_map: placement of a model larger than one device, as in accelerate.
        trust_remote_code: whether code in a checkpoint's folder may run.
        compile: run models through ``torch.compile``, on a GPU as CUDA graphs. The first calls of
            every shape then take long. A model that cannot be compiled is refused.
        quantization: weight-only quantisation of the model: ``int8``, ``int4``,
            ``bitsandbytes_8bit``, ``bitsandbytes_4bit``, ``{"name": "int4", "group_size": 64}``, or
            a configuration of torchao or bitsandbytes. ``{"name": "int8", "head": True}``
            quantises the output head, too.
        adapters: folder or hub id of a LoRA adapter of PEFT, which is merged into the weights; or
            several by name, of which every prompt takes its own (``adapter`` of a call) or none.
        sparse_prefill: share of a prompt's tokens that layers skip, or ``{"ratio": 0.5,
            "first_layer": 1}``; a causal model of the Llama architecture then has approximately its
            distribution (``gen.models.adapters.sparse_prefill``).
        batch_invariant: fix the order of sums in forward passes of causal models, so that the bits
            of a token's logits depend on neither batch, order, window nor neighbours
            (``gen.models.adapters.batch_invariant``): a sampler of label ``same_tokens`` then keeps
            it in 16-bit types too.
        cuda_graphs: capture forward passes of language models as CUDA graphs, on first use of each
            number of rows and columns (``gen.models.adapters.captured``).
        options: options of the checkpoint's family (``gen ls families``), and ``draft_model``: zoo
            name, folder or hub id of a smaller model, or folder of a trained drafter
            (``gen.recipes.drafters``), for samplers that draft and name none. A call that names no
            sampler then drafts with it.

    Raises:
        GenError: an unknown name, device, dtype or option.
    """

    def __call__(
        self,
        prompts: Prompts | None = None,
        sampler: SamplerSpec | None = None,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        batch_size: int | None = None,
        trace: bool = False,
        callback: Callback | None = None,
        progress: Progress = "auto",
        source: Any = None,
        mask: Any = None,
        span: str | None = None,
        prefix: Any = None,
        frames: int | None = None,
        **options: Unpack[CallOptions],
    ) -> PipelineOutput:
        """Make ``num_samples`` outputs per prompt.

        Args:
            prompts: one or several, a text or ``{"text": ..., "image": ...}``; also as ``prompt``.
            sampler: name of a sampler or preset, ``{"name": ..., parameter: value}`` or a sampler;
                None takes the one that suits the model (``pipe.config["sampler"]``).
            num_samples: outputs per prompt (1); also as ``n``, ``num_images_per_prompt`` and
                ``num_return_sequences``.
            seed: seed of the first output of every prompt; None draws one from torch's generator.
                ``out.seeds`` has it.
            batch_size: items decoded together (8), fewer where memory runs out; changes no output.
            trace: record every step.
            callback: called once per forward pass with ``{"step", "done", "total", "tokens",
                "known"}``. ``gen.Interrupt`` raised in it ends the call with what is known.
            progress: show a progress bar; ``auto`` does in terminals and notebooks.
            source: media to edit, or its path; with ``mask`` or ``span``.
            mask: region of an image that is made anew, as an image or its path.
            span: part of the source that is made anew, such as ``"20:60"``.
            prefix: media, or its path, that every output begins with.
            frames: length of the outputs, where the modality has no fixed one.
            options: sampling parameters (``SamplingParams``); absent ones are the modality's
                default; parameters of the sampler; and other names of arguments above.

        Returns:
            Media, tokens and statistics, one of each per item.

        Raises:
            GenError: anything that cannot be done.
            WrongType: an argument of another type, or an unknown keyword; also a ``TypeError``.
        """
        check_types(callback, trace)
        frames = None if frames is None else read_integer("frames", frames, 1)
        size = BATCH_SIZE if batch_size is None else read_integer("batch_size", batch_size, 1)
        request = replace(
            self.request(prompts, sampler, num_samples, seed, dict(options)),
            start=EditSpec(source, mask, span, prefix, frames),
            trace=trace,
            callback=callback,
            max_batch=size,
        )
        with ProgressBar(progress, len(request.items)) as bar:
            return self._make_all(request, bar)

    def request(
        self,
        prompts: Prompts | None,
        sampler: SamplerSpec | None,
        num_samples: int | None,
        seed: int | None,
        options: dict[str, Any],
    ) -> GenerationRequest:
        """Read the arguments of a call; see ``__call__``. No model is loaded.

        Args:
            prompts: one prompt or several.
            sampler: the sampler.
            num_samples: outputs per prompt.
            seed: seed of the first output of every prompt.
            options: sampling parameters, those of the sampler, and other names of arguments; keys
                that are read are removed.

        Raises:
            GenError: anything that cannot be done.
        """
        prompt = options.pop("prompt", None)
        if prompts is None and prompt is None and not self.modality.needs_prompt:
            prompt = ""
        conditions = read_prompts(prompts, prompt)
        keywords = dict(options)
        count = read_count(num_samples, options)
        limits = read_limits(options, len(conditions))
        adapters = read_adapters(options.pop("adapter", None), len(conditions))
        drawn = read_seed(seed)
        if seed is None and self.ranks is not None:  # each process has a generator of its own
            drawn = self.ranks.same(drawn)
        items = self.plan(conditions, count, drawn)
        part = self.part_of(items)
        usual = partial(self.defaults.sampler, part)
        sampler = read_parameters(sampler, usual, keywords, CALL_KEYWORDS)
        explicit = read_sampling({k: options[k] for k in options if k in keywords}, CALL_KEYWORDS)
        spec, sampling = self.defaults.complete(sampler, explicit, part)
        resolved, params = resolve_sampler(spec, sampling)
        if "guidance_scale" in explicit and params.guidance_scale == 0:
            warnings.warn(
                "guidance_scale is 0, so the prompt has no effect; 1 turns guidance off",
                stacklevel=3,
            )
        self.model_name(spec, part)
        if limits is not None:
            items = [replace(x, max_new_tokens=limits[n // count]) for n, x in enumerate(items)]
        if adapters is not None:
            items = [replace(x, adapter=adapters[n // count]) for n, x in enumerate(items)]
        return GenerationRequest(items, spec, resolved, params)

    def _make_all(self, request: GenerationRequest, bar: ProgressBar) -> PipelineOutput:
        """Make all items, in smaller batches where memory runs out."""
        turns, sizes = self.turns(request.sampler), BatchSizes()
        parts: list[PipelineOutput] = []
        rest = list(request.items)
        while rest:
            size = sizes.of(0, 0, request.max_batch or len(rest))
            items = rest[: size * turns]
            part = replace(
                request,
                items=items,
                max_batch=size,
                callback=bar.following(request.callback, len(items)),
            )
            made: Attempt[PipelineOutput] = Attempt()
            with made:
                made.result = self.make(part)
            if made.out_of_memory:
                free_memory()
            if made.result is None:
                size = min(size, len(items))
                if made.out_of_memory and size > 1:
                    sizes.lower(0, 0, size)
                    continue
                if made.out_of_memory:
                    raise GenError(
                        "out of memory with one item at a time; use a smaller model, a"
                        " smaller dtype or a larger device"
                    ) from made.error
                assert made.error is not None, "a batch without a result has an error"
                raise made.error
            parts.append(made.result)
            bar.finish(len(items))
            if made.result.interrupted:
                break
            rest = rest[len(items) :]
        return PipelineOutput.joined(parts)

    def stream(
        self,
        prompts: Prompts | None = None,
        sampler: SamplerSpec | None = None,
        *,
        num_samples: int | None = None,
        seed: int | None = None,
        prefix: Any = None,
        partial_images: int = 3,
        **options: Unpack[CallOptions],
    ) -> Iterator[Chunk]:
        """Yield parts of media while they are generated: frames, sounds, characters, previews.

        All items form one batch, so their parts are interleaved. The concatenated parts of an item
        equal the result of a call; for an image, the last part does. See ``__call__`` for the other
        arguments, which are checked before the first part is requested.

        Args:
            prompts: one prompt or several.
            sampler: the sampler.
            num_samples: outputs per prompt.
            seed: seed of the first output of every prompt.
            prefix: media that every output begins with.
            partial_images: previews of each image (``Chunk.preview``); undecided regions are grey.
            options: sampling parameters, those of the sampler, and other names of arguments.

        Raises:
            GenError: anything that cannot be done.
        """
        if options.get("logprobs") is not None:
            raise GenError(
                f"logprobs is {options['logprobs']!r}, and a stream yields media alone; expected a"
                " call of the pipeline"
            )
        request = replace(
            self.request(prompts, sampler, num_samples, seed, dict(options)),
            start=EditSpec(prefix=prefix),
            previews=read_integer("partial_images", partial_images, 0),
        )

        def work(on_chunk: OnChunk) -> None:
            self.make(replace(request, on_chunk=on_chunk))

        return stream_chunks(work, request.items)

    def plan(self, prompts: Prompts, num_samples: int = 1, seed: int = 0) -> list[ItemPlan]:
        """Return the items of a call, prompt-major.

        Every prompt is parsed before anything is generated. A repeated prompt continues with fresh
        seeds.

        Args:
            prompts: one prompt or several.
            num_samples: items per prompt.
            seed: seed of the first item of every prompt.

        Raises:
            GenError: no prompts, a prompt that the modality does not understand, or a bad number.
        """
        conditions = read_prompts(prompts)
        num_samples = read_integer("num_samples", num_samples, 1)
        seed = read_integer("seed", seed, 0)
        require_items(len(conditions), num_samples)
        items: list[ItemPlan] = []
        used: dict[str, int] = {}
        for prompt in conditions:
            parsed = self.modality.parse(prompt)
            items += [
                ItemPlan(
                    len(items) + j,
                    prompt.text or "",
                    item_seed,
                    self.modality.ground(parsed, item_seed),
                    given=prompt,
                )
                for j, item_seed in enumerate(sample_seeds(used, str(parsed), num_samples, seed))
            ]
        return items

    def resolve(
        self,
        sampler: SamplerSpec | None = None,
        sampling: Mapping[str, Any] | SamplingParams | None = None,
        *,
        explicit: Mapping[str, Any] | None = None,
    ) -> tuple[Sampler, SamplingParams]:
        """Return a sampler and complete sampling parameters.

        Args:
            sampler: name, ``{"name": ..., parameter: value}`` or a sampler; None takes the one that
                suits the model.
            sampling: all sampling parameters, absent ones switched off; None takes the modality's
                defaults, overridden by the preset's.
            explicit: keywords of a call, which override both; None values are absent.

        Raises:
            GenError: a keyword is unknown, or a parameter contradicts the preset.
        """
        said = read_sampling(explicit or {}, CALL_KEYWORDS)
        if sampling is None:
            return resolve_sampler(*self.defaults.complete(sampler, said))
        spec = self.defaults.complete_sampler(sampler)
        return resolve_sampler(spec, {**_as_mapping(sampling), **said} if said else sampling)

    def guarantee(self, sampler: Sampler) -> str:
        """Return the guarantee that outputs of a sampler keep in the pipeline's dtype, one of
        ``gen.core.token_space.GUARANTEES``."""
        return kept_guarantee(sampler.guarantee, self.dtype, self.batch_invariant)

    def generate(
        self,
        items: Sequence[ItemPlan],
        sampler: SamplerSpec | None = None,
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
            sampler: name, ``{"name": ..., parameter: value}`` or a sampler; None takes the one that
                suits the model.
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
            self.defaults.complete_sampler(sampler),
            *self.resolve(sampler, sampling),
            start=start,
            trace=trace,
            callback=callback,
            on_chunk=on_chunk,
            max_batch=max_batch,
        )
        return self.make(request)

    def make(self, request: GenerationRequest) -> PipelineOutput:
        """Prepare and run a request, batch by batch where rows cannot be replaced."""
        prepared = self.prepare(request)
        if not request.split or prepared.replaces_rows:
            return self.run(prepared)
        parts: list[PipelineOutput] = []
        for batch in request.batches(request.max_batch):
            parts.append(self.run(self.prepare(batch)))
            if parts[-1].interrupted:
                break
        return PipelineOutput.joined(parts)

    def save_pretrained(
        self,
        folder: str | Path,
        *,
        sampler: SamplerSpec | None = None,
        max_shard_size: int | str = "5GB",
    ) -> Path:
        """Write the pipeline to a folder that stands alone: ``gen.load(folder)`` makes the same.

        A published checkpoint is saved in its published layout: the files that loading it read are
        copied with their stored weights, and the pipeline's dtype is recorded and used on loading.
        A model of a GGUF file becomes a folder of transformers with safetensors, which others load
        too. A model of gen's own architectures is written from memory, in the pipeline's dtype,
        with its frontend and draft model. A model card is written too. The folder appears whole or
        not at all.

        Args:
            folder: a folder that is new or empty.
            sampler: a modality with several models saves the one that serves this sampler; None
                is the default sampler.
            max_shard_size: size of the largest file of weights written from memory.

        Returns:
            Path of the folder.

        Raises:
            GenError: the folder has content or cannot be written, the weights of a published
                checkpoint were changed after loading, or the pipeline has ``quantization`` or
                ``adapters``.
        """
        return save_pipeline(self, folder, sampler, max_shard_size)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        revision: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        commit_message: str | None = None,
        sampler: SamplerSpec | None = None,
        max_shard_size: int | str = "5GB",
    ) -> str:
        """Upload what ``save_pretrained`` writes to a repository of the Hub, created if absent.

        Args:
            repo_id: ``name`` or ``organisation/name``.
            revision: branch, created if absent; None is the main branch.
            private: whether a new repository is private; None is the account's default.
            token: access token; None is the stored one.
            commit_message: message of the commit.
            sampler: as in ``save_pretrained``.
            max_shard_size: as in ``save_pretrained``.

        Returns:
            Address of the commit.

        Raises:
            GenError: as ``save_pretrained``, and an error of the Hub.
        """
        saving = (sampler, max_shard_size)
        return push_pipeline(self, repo_id, revision, private, token, commit_message, saving)

    def as_diffusers(self):
        """Return this pipeline with the call of diffusers' pipelines."""
        # interop is a floor above, and diffusers is heavy
        from gen.interop.diffusers import DiffusersPipeline

        return DiffusersPipeline(self)

    def turns(self, sampler: SamplerSpec) -> int:
        """Return how many batches of items to hand over together, so that rows can be replaced."""
        return TURNS if registry.get("protocol", protocol_of(sampler)).replaces_rows else 1


CALL_KEYWORDS = (
    *tuple(inspect.signature(Pipeline.__call__).parameters)[1:-1],
    *CallOptions.__annotations__,
)


def _as_mapping(sampling: Mapping[str, Any] | SamplingParams) -> Mapping[str, Any]:
    """Return sampling parameters by name."""
    return sampling.keywords() if isinstance(sampling, SamplingParams) else sampling


def load(
    modality: str | Path | Modality,
    model: str | Path | None = None,
    *,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype | None = None,
    torch_dtype: str | torch.dtype | None = None,
    device_map: str | Mapping[str, Any] | None = None,
    trust_remote_code: bool = False,
    compile: bool = False,
    quantization: Any = None,
    adapters: str | Path | Mapping[str, str | Path] | None = None,
    sparse_prefill: Any = None,
    batch_invariant: bool = False,
    cuda_graphs: bool = False,
    draft_model: str | Path | None = None,
    **options: Any,
) -> Pipeline:
    """Return a pipeline for a modality.

    Args:
        modality: name of the modality (``gen ls modalities``), or a folder of
            ``Pipeline.save_pretrained`` or hub id of ``Pipeline.push_to_hub`` alone.
        model: zoo name, folder, file or hub id; None is the modality's default. Of a saved
            pipeline, dtype and options are the defaults.
        device: device of the model; ``auto`` is the first CUDA device, or else the CPU, as in
            ``transformers.pipeline``.
        dtype: floating-point type of the model, as torch's or by name (``float32``, ``bf16`` ...);
            ``auto`` is the one that a published model is stored in. The default is float32, or that
            of a saved pipeline.
        torch_dtype: the same under its older name in transformers and diffusers.
        device_map: placement of a model larger than one device, as in accelerate.
        trust_remote_code: whether code in a checkpoint's folder may run.
        compile: run models through ``torch.compile``.
        quantization: ``int8`` or ``int4`` weights, by torchao, and so on; see ``Pipeline``.
        adapters: folder or hub id of a LoRA adapter of PEFT, or several by name.
        sparse_prefill: share of a prompt's tokens that layers skip; see ``Pipeline``.
        batch_invariant: tokens of any dtype depend on no batch, order or window; see ``Pipeline``.
        cuda_graphs: replay forward passes of language models as CUDA graphs; see ``Pipeline``.
        draft_model: smaller model, or trained drafter, that calls draft with; see ``Pipeline``.
        options: options of the model's family (``gen ls families``), and these keywords of
            ``from_pretrained``: ``revision``, ``token``, ``cache_dir``, ``subfolder``, ``variant``,
            ``gguf_file``, ``local_files_only`` (``gen.models.load.hub.HubOptions``), and those of
            ``gen.contracts.checkpoint.PLACEMENT``.

    Raises:
        GenError: an unknown name, device, dtype or option.
    """
    if dtype is not None and torch_dtype is not None and str(dtype) != str(torch_dtype):
        raise GenError(f"dtype is {dtype} and torch_dtype {torch_dtype}; expected one of them")
    if model is None and (saved := _saved_pipeline(modality, options)):
        modality, model = saved.modality, modality
    elif isinstance(modality, Path):
        raise bad_value("modality", str(modality), "a modality, or a folder of save_pretrained")
    options |= {"quantization": quantization, "adapters": adapters, "compile": compile}
    options |= {"sparse_prefill": sparse_prefill, "batch_invariant": batch_invariant}
    options["cuda_graphs"] = cuda_graphs
    options |= {} if draft_model is None else {"draft_model": draft_model}
    chosen = torch_dtype if dtype is None else dtype
    return Pipeline(modality, model, device, chosen, device_map, trust_remote_code, **options)


def _saved_pipeline(name: Any, options: Mapping[str, Any]) -> Saved | None:
    """Return the record of a saved pipeline by its folder or hub id; None for anything else.

    Raises:
        GenError: the record or the repository cannot be read.
    """
    if not isinstance(name, (str, Path)) or not str(name):
        return None
    if exists(path := expand_user(name)):
        return read_saved(path)
    if str(name).count("/") != 1:
        return None
    return CheckpointFiles.find(name, HubOptions.among(options).of(str(name))).saved

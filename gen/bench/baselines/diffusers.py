"""Peers of ``gen bench``: pipelines of diffusers, on checkpoints of their families.

LLaDA2Pipeline   the network that is loaded, with their scheduler; beside the preset ``llada2``,
                 whose parameters it gets
AmusedPipeline   the same folder, loaded by diffusers; beside the preset ``amused``
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from diffusers import AmusedPipeline, BlockRefinementScheduler, LLaDA2Pipeline
from diffusers.utils import logging
from torch import Tensor

from gen.bench.baselines.base import NOT_HERE, Calls, Network, Peer
from gen.contracts.checkpoint import CheckpointFiles
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.core.stats import Stats
from gen.models.load.locate import quiet
from gen.pipeline.pipeline import Pipeline


def llada2(
    pipe: Pipeline, net: Network, sampling: SamplingParams, items: Sequence[Any]
) -> tuple[Tensor, list[Stats]]:
    """Decode one prompt at a time: rows of a batch wait for each other there, and need prompts of
    one length. Their ``max_post_steps`` allows one more forward pass than it says."""
    params, space, length = resolve_sampler("llada2")[0], net.space, net.module.config.block_length
    theirs = LLaDA2Pipeline(
        model=net.module, scheduler=BlockRefinementScheduler(block_length=length), tokenizer=None
    )
    theirs.set_progress_bar_config(disable=True)
    rows, stats = [], []
    for item in items:
        generator = torch.Generator(net.module.device).manual_seed(pipe.draw_key(item))
        with Calls(net.module) as calls, quiet():
            out = theirs(
                input_ids=torch.tensor([net.binding.prompt(item.condition)]),
                gen_length=space.length,
                block_length=length,
                mask_token_id=space.mask_token_id,
                eos_token_id=space.eos_token_id,
                eos_early_stop=False,
                temperature=sampling.temperature,
                threshold=params.conf_threshold,
                editing_threshold=params.edit_threshold,
                num_inference_steps=length + 1,
                max_post_steps=params.max_post_steps - 1,
                generator=generator,
                output_type="seq",
            )
        rows.append(out.sequences[0].cpu())
        stats.append(calls.stats(space.length))
    return torch.stack(rows), stats


def amused(
    pipe: Pipeline, net: Network, sampling: SamplingParams, theirs: Any, items: Sequence[Any]
) -> tuple[Tensor, list[Stats]]:
    """Decode a batch at once. Their temperature is that of the order, as in the preset; the
    distribution of tokens has none."""
    params, height, width = resolve_sampler("amused")[0], *net.space.grid
    transformer, factor = theirs().transformer, net.frontend.factor
    generators = torch.Generator(pipe.device).manual_seed(pipe.draw_key(items[0]))
    with Calls(transformer) as calls, quiet():
        out = theirs()(
            [str(i.condition) for i in items],
            height=height * factor,
            width=width * factor,
            num_inference_steps=params.steps,
            guidance_scale=sampling.guidance_scale,
            generator=generators,
            temperature=(params.choice_temperature, 0),
            output_type="latent",
        )
    tokens = out.images.flatten(1).cpu()
    positions = net.space.length * (
        2 if sampling.guided else 1
    )  # their codes are an image, without a condition before it
    return tokens, [
        Stats(
            calls.n,
            net.space.length,
            calls.n * positions,
            calls.n * positions,
            net.space.length / calls.n,
        )
        for _ in tokens
    ]


def peers(pipe: Pipeline, sampling: SamplingParams) -> list[Peer]:
    """Return the rows of this group, with reasons for those that cannot run."""
    found = {"llada2": NOT_HERE, "amused": NOT_HERE}
    model, net = None, None
    if pipe.model is not None:
        model, *bound = pipe.bound(pipe.model)
    for name in found:
        if isinstance(model, registry.get("checkpoint", name)):
            net = Network(model.model if name == "llada2" else model.lm.model, *bound)
            found[name] = _beyond(name, sampling)
    likeliest = SamplingParams(
        temperature=0.0
    )  # what the preset proposes, whatever the sampling parameters
    return [
        Peer(
            "LLaDA2Pipeline",
            likeliest,
            net,
            partial(llada2, pipe, net, likeliest),
            True,
            found["llada2"],
        ),
        Peer(
            "AmusedPipeline",
            sampling,
            net,
            partial(amused, pipe, net, sampling, cache(lambda: _loaded(pipe))),
            False,
            found["amused"],
        ),
    ]


def _beyond(name: str, sampling: SamplingParams) -> str | None:
    """Name the sampling parameters that their pipeline does not have. That of LLaDA2 has no
    guidance; the other parameters do not change the most likely tokens."""
    usual = {
        "llada2": {"guidance_scale": 1.0},
        "amused": {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
    }[name]
    said = [key for key, value in usual.items() if getattr(sampling, key) != value]
    return f"it has no {', '.join(said)}" if said else None


def _loaded(pipe: Pipeline) -> Any:
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            theirs = AmusedPipeline.from_pretrained(
                CheckpointFiles.find(pipe.model).path, dtype=pipe.dtype
            ).to(pipe.device)
    except (OSError, ValueError) as error:
        raise GenError(
            f"diffusers cannot load {pipe.model}: {' '.join(str(error).split())[:200]}"
        ) from None
    finally:
        if bar:
            logging.enable_progress_bar()
    theirs.set_progress_bar_config(disable=True)
    return theirs

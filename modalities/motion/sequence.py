"""One long motion from several prompts, by masked decoding alone.

Every prompt gets a motion of its own. Where two meet, the last codes of the one and the first of
the other are emptied and filled again on a canvas that holds what lies on both sides
(Pinyoanuntapong et al., "MMM", arXiv 2312.03596, make transitions so). The prompt of that is the
one that says nothing: no caption describes the middle of two motions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.rng import CounterRNG, item_key
from gen.core.sampling_params import SamplingOptions
from gen.media.motion.skeleton import Motion
from gen.modalities.motion.modality import ANYTHING
from gen.pipeline.lengths import settled
from gen.pipeline.pipeline import Pipeline, SamplerSpec


def sequence(
    pipe: Pipeline,
    prompts: Sequence[str],
    sampler: SamplerSpec = "maskgit",
    *,
    seed: int = 0,
    blend: int = 2,
    **options: Unpack[SamplingOptions],
) -> Motion:
    """``blend``: frames of codes (of four poses) that are made anew on either side of a joint; 0
    leaves the motions as they are.

    Raises ``GenError`` for a sampler that is not masked and for bad values.
    """
    if not isinstance(blend, int) or isinstance(blend, bool) or blend < 0:
        raise bad_value("blend", blend, "an integer of at least 0")
    sampling = pipe.sampling_params(sampler, options)
    resolved = pipe.resolve(sampler, sampling)[0]
    if resolved.protocol != "masked":
        raise GenError(
            "one motion from several prompts is made on a canvas; expected a masked sampler such as"
            " 'maskgit'"
        )
    name = pipe.model_name(resolved)
    items = pipe.plan(list(prompts), 1, seed)
    out = pipe.generate(items, sampler, sampling)
    _, binding, frontend = pipe.bound(name)
    space = binding.space
    streams = space.length // space.grid[0]
    parts = [space.before_end(t) for t in out.tokens]
    whole, at = torch.cat(parts), 0
    anything = pipe.plan(ANYTHING, 1, seed)
    for number, part in enumerate(parts[:-1] if blend else []):
        at += len(part)
        half = min(space.grid[0] // 2, at // streams, (len(whole) - at) // streams) * streams
        window = whole[at - half : at + half].clone()
        edge = min(blend * streams, half - streams)  # something has to stay on either side
        window[half - edge : half + edge] = space.mask_token_id
        whole[at - half : at + half] = _filled(
            pipe,
            resolved,
            sampling,
            anything,
            name,
            window,
            space,
            item_key("joint", seed, number, *prompts),
        )
    codes = pipe.modality.to_codes(whole[None], replace(space, eos_token_id=None, constraint=None))
    return frontend.postprocess(frontend.decode(codes)[0])


def _filled(
    pipe: Pipeline, sampler, sampling, items, name: str, window: Tensor, space, key: int
) -> Tensor:
    canvas = torch.full((1, space.length), space.eos_token_id)
    canvas[0, : len(window)] = window
    target = pipe.target(sampler, sampling, items, name, space=settled(space))
    return (
        sampler(target, CounterRNG([key], pipe.device), canvas=canvas)
        .tokens[0, : len(window)]
        .cpu()
    )

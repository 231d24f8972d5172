"""Long motions from several prompts, by masked decoding alone.

Every prompt gets a separate motion. At a joint, the last codes of one motion and the first of the
next are remasked and decoded again on a canvas that holds the codes on both sides, as in the
transitions of MMM (Pinyoanuntapong et al., arXiv 2312.03596). Their prompt is the unconditional
one, since no caption describes the middle of two motions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.core.resolve import SamplerSpec
from gen.core.rng import CounterRNG, item_key
from gen.core.sampling_params import SamplingOptions
from gen.media.motion.skeleton import Motion
from gen.modalities.motion.modality import ANYTHING
from gen.pipeline.lengths import without_eos
from gen.pipeline.pipeline import Pipeline


def sequence(
    pipe: Pipeline,
    prompts: Sequence[str],
    sampler: SamplerSpec = "maskgit",
    *,
    seed: int = 0,
    blend: int = 2,
    **options: Unpack[SamplingOptions],
) -> Motion:
    """Decode one motion per prompt and blend them.

    Args:
        pipe: pipeline of a masked motion model.
        prompts: captions, in order.
        sampler: masked sampler, as in a call of the pipeline.
        sampling: sampling parameters, as in a call of the pipeline.
        seed: seed of the first motion.
        blend: frames of codes (of four poses) that are regenerated on either side of a joint; 0
            leaves the motions unchanged.

    Raises:
        GenError: the sampler is not masked, or a value is invalid.
    """
    if not isinstance(blend, int) or isinstance(blend, bool) or blend < 0:
        raise bad_value("blend", blend, "an integer of at least 0")
    resolved, sampling = pipe.resolve(sampler, explicit=options)
    if resolved.protocol != "masked":
        raise GenError(
            "the sampler decodes no canvas, which a motion from several prompts needs;"
            " expected a masked sampler such as 'maskgit'"
        )
    name = pipe.model_name(sampler)
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
        edge = min(blend * streams, half - streams)  # each side keeps at least one frame
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
    target = pipe.target(sampler, sampling, items, name, space=without_eos(space))
    return (
        sampler(target, CounterRNG([key], pipe.device), canvas=canvas)
        .tokens[0, : len(window)]
        .cpu()
    )

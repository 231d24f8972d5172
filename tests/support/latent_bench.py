"""Closed-form models of latents on a grid, and a runner of their samplers."""

from __future__ import annotations

import torch

from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import CausalLatentLM, MaskedLatentLM
from gen.models.nets.grid_latent import GridLatentConfig, GridLatentModel
from gen.models.targets.latent import CausalLatentTarget, MaskedLatentTarget
from gen.samplers.masked.parts.orders import BLIND
from gen.testing.even_reward import EvenEvaluator

GRID, POSITIONS, CHANNELS, ROWS = (2, 3), 6, 4, 4


SPACE = TokenSpace.latents(GRID, CHANNELS)


SAMPLING = SamplingParams(temperature=0.9, guidance_scale=1.5)


WORDS = torch.tensor([[r, 2 * r % 9, 8] for r in range(ROWS)])


def architecture(causal: bool, layers: int = 2) -> GridLatentModel:
    torch.manual_seed(0)
    config = GridLatentConfig(
        grid=GRID,
        prefix_length=3,
        vocab_size=9,
        latent_channels=CHANNELS,
        causal=causal,
        encoder_layers=0 if causal else 1,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_width=16,
        head_depth=1,
        head_steps=4,
        sigma_floor=0.3,
        initializer_range=0.3,
    )
    return GridLatentModel(config).double().eval()


def shallow(model: GridLatentModel) -> GridLatentModel:
    """The model without its last layer, which is made small first: a draft that is sometimes
    right."""
    with torch.no_grad():
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            model.model.layers[-1].get_submodule(name).weight.mul_(0.1)
    draft = architecture(True, len(model.model.layers) - 1)
    draft.load_state_dict(model.state_dict(), strict=False)
    return draft


TARGET, MASKED = architecture(True), architecture(False)


DRAFT = shallow(TARGET)


def target_of(
    protocol: str, rows: list[int], sampling: SamplingParams = SAMPLING, draft: bool = False
):
    words, empty = WORDS[rows], torch.full((len(rows), 3), 7)
    uncond = empty if sampling.guided else None
    if protocol == "causal":
        return CausalLatentTarget(
            CausalLatentLM(DRAFT if draft else TARGET), words, SPACE, sampling, uncond
        )
    return MaskedLatentTarget(MaskedLatentLM(MASKED), words, SPACE, sampling, uncond)


def run(
    sampler,
    rows: list[int] | None = None,
    keys: list[int] | None = None,
    sampling: SamplingParams = SAMPLING,
    **kwargs,
):
    rows = list(range(ROWS)) if rows is None else rows
    keys = [31 * r + 7 for r in rows] if keys is None else keys
    draft = target_of(sampler.protocol, rows, sampling, draft=True) if sampler.drafted else None
    target = target_of(sampler.protocol, rows, sampling)
    target.evaluator = EvenEvaluator()
    return sampler(target, CounterRNG(keys), draft=draft, **kwargs)


def of_latents() -> dict[str, dict]:
    samplers = {
        name: {"name": name}
        for name, cls in registry.table("sampler").items()
        # those of frame models have a bench of their own: tests/samplers/worlds
        if "latents" in cls.kinds and cls.protocol != "frames"
    }
    presets = {
        n: {"name": n}
        for n, p in registry.table("preset").items()
        if p.sampler in samplers and p.params.get("order") in (None, *BLIND)
    }
    if "atts" in samplers:  # it has neither a default threshold nor a likelihood of latents
        samplers["atts"] |= {"threshold": 0.5, "value": "checker"}
    return samplers | presets


SPECS = of_latents()


SPECS |= {
    f"jacobi-{w}-{t}": {"name": "continuous_jacobi", "window": w, "tolerance": t}
    for w in (1, 3)
    for t in (0.0, 1.0)
}


SPECS |= {
    f"{mode}-{k}": {
        "name": "continuous_speculative",
        "mode": mode,
        "num_speculative_tokens": k,
        "relaxation": 0.5,
    }
    for mode in ("exact", "relaxed")
    for k in (1, 3)
}


SPECS["unguided-drafts"] = {
    "name": "continuous_speculative",
    "draft_guidance": 1.0,
    "draft_temperature": 1.1,
}


SPECS |= {
    f"{order}-{steps}": {"name": "masked_iterative", "order": order, "steps": steps}
    for order in ("random", "halton", "raster")
    for steps in (3, POSITIONS)
}


SPECS["mar-partial"] = {"name": "mar", "steps": 4, "cache": "partial", "cache_warmup": 1}

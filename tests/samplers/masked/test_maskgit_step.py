"""The preset ``amused`` against diffusers' ``AmusedScheduler`` and ``AmusedPipeline``: same
weights, same noise, step by step the same canvas."""

from __future__ import annotations

import pytest
import torch
from tiny_amused import CODES, MASK, PROMPTS, amused_folder

import gen
from gen.core.errors import GenError
from gen.models.load.locate import quiet

SIDES = (4, 8)  # rows of codes


class Replayed:
    """Draws that take what diffusers' scheduler takes from a generator of torch, in its order: an
    id for every place, then, where confidence has noise, a uniform number for each."""

    def __init__(self, seed: int, dtype: torch.dtype):
        self.generator, self.dtype = torch.Generator().manual_seed(seed), dtype

    def categorical(self, logp, rows, positions, purpose, round, active):
        assert purpose == "propose"
        p = logp[..., :CODES].exp().float()  # the mask is no id that it could draw
        return torch.multinomial(p.flatten(0, 1), 1, generator=self.generator).view(p.shape[:2])

    def uniform(self, rows, positions, purpose, round):
        assert purpose == "confidence"
        return (
            torch.zeros(positions.shape, dtype=self.dtype)
            .uniform_(0, 1, generator=self.generator)
            .clamp(1e-20)
            .double()
        )


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        side: amused_folder(tmp_path_factory.mktemp(f"amused{side}") / "model", sample_size=side)
        for side in SIDES
    }


def ours(pipe, spec, seed: int, prompts=PROMPTS[:2], sampling=None) -> list[torch.Tensor]:
    """The canvas [B, T] after every call, in the model's own ids."""
    items = pipe.plan(prompts)
    sampler, sampling = pipe.resolve(spec, sampling)
    seen = []
    sampler(
        pipe.target(sampler, sampling, items),
        Replayed(seed, pipe.dtype),
        callback=lambda info: seen.append(info["tokens"].clone()),
    )
    return [torch.where(c == CODES, MASK, c) for c in seen]


def theirs(
    folder, steps: int, seed: int, prompts=PROMPTS[:2], dtype=torch.float64, **kwargs
) -> list[torch.Tensor]:
    from diffusers import AmusedPipeline

    with quiet():
        pipe = AmusedPipeline.from_pretrained(folder, dtype=dtype)
        pipe.set_progress_bar_config(disable=True)
    seen = []
    pipe(
        prompts,
        num_inference_steps=steps,
        generator=torch.Generator().manual_seed(seed),
        output_type="latent",
        callback=lambda step, t, latents: seen.append(latents.flatten(1).clone()),
        **kwargs,
    )
    return seen


def first_difference(a: list[torch.Tensor], b: list[torch.Tensor]) -> int | None:
    """The first step after which two runs have another canvas; none if they are the same."""
    different = [n for n, (x, y) in enumerate(zip(a, b, strict=False)) if not torch.equal(x, y)]
    return different[0] if different else min(len(a), len(b)) if len(a) != len(b) else None


@pytest.mark.parametrize(
    ("side", "steps"), [(4, 1), (4, 2), (4, 5), (4, 12), (8, 3), (8, 12), (8, 16)]
)
@pytest.mark.thinned(4)
def test_every_step_is_the_schedulers(folders, side, steps):
    pipe = gen.load("image", model=folders[side], dtype="float64")
    wanted = theirs(folders[side], steps, seed=steps)
    found = ours(pipe, {"name": "amused", "steps": steps}, seed=steps)
    assert len(wanted) == steps and first_difference(found, wanted) is None
    assert not bool((found[-1] == MASK).any()) and (steps == 1 or bool((found[-2] == MASK).any()))
    assert (
        first_difference(ours(pipe, {"name": "amused", "steps": steps}, seed=steps + 1), wanted)
        == 0
    )  # control: other noise


def test_in_single_precision_and_with_other_guidance_and_temperature_it_is_the_same(folders):
    pipe = gen.load("image", model=folders[8])
    wanted = theirs(folders[8], 6, 4, dtype=torch.float32, guidance_scale=2.5, temperature=(5, 0))
    spec, sampling = (
        {"name": "amused", "steps": 6, "choice_temperature": 5.0},
        {"guidance_scale": 2.5},
    )
    assert first_difference(ours(pipe, spec, 4, sampling=sampling), wanted) is None
    assert (
        first_difference(ours(pipe, spec, 4), wanted) is not None
    )  # control: the family's guidance of 10
    assert (
        first_difference(
            ours(pipe, spec | {"choice_temperature": 0.5}, 4, sampling=sampling), wanted
        )
        is not None
    )  # control: hardly any noise
    plain = theirs(folders[8], 6, 4, dtype=torch.float32, guidance_scale=1.0)
    assert (
        first_difference(
            ours(pipe, {"name": "amused", "steps": 6}, 4, sampling={"guidance_scale": 1.0}), plain
        )
        is None
    )


@pytest.mark.parametrize(
    "params", [{"schedule": "linear"}, {"order": "confidence"}, {"schedule": "cosine", "steps": 12}]
)
def test_control_another_schedule_or_order_is_not_the_scheduler(folders, params):
    pipe = gen.load("image", model=folders[8], dtype="float64")
    spec = {"name": "amused", "steps": 12} | params
    different = first_difference(ours(pipe, spec, seed=1), theirs(folders[8], 12, seed=1))
    # in double precision a share of one half is one half: from two thirds of the steps on, one
    # place more stays masked
    assert different == 7 if params.get("schedule") == "cosine" else different is not None


def test_counts_of_masked_places_are_the_schedulers():
    """For all numbers of steps, where there are no more of them than places; beyond that the
    scheduler waits and this sampler is done earlier."""
    from diffusers import AmusedScheduler

    from gen.core.registry import registry

    def commits(schedule: str, positions: int, steps: int) -> list[int]:
        share, left, out = registry.get("schedule", schedule), positions, []
        for s in range(steps - 1):
            left = min(
                max(
                    int(
                        positions * share(torch.tensor((s + 1) / steps, dtype=torch.float64), 2.0)
                        + 1e-9
                    ),
                    1,
                ),
                left - 1,
            )
            out.append(left)
        return out

    def masked(positions: int, steps: int) -> list[int]:
        scheduler = AmusedScheduler(mask_token_id=2)
        scheduler.set_timesteps(steps)
        canvas, out = torch.full((1, positions), 2), []
        logits = torch.zeros(1, positions, 2)
        for t in scheduler.timesteps[:-1]:
            canvas = scheduler.step(
                logits, t, canvas, generator=torch.Generator().manual_seed(int(t))
            ).prev_sample
            out.append(int((canvas == 2).sum()))
        return out

    for positions in (64, 256):
        for steps in (2, 3, 7, 12, 18, 30):
            assert commits("cosine_single", positions, steps) == masked(positions, steps)
            assert (commits("cosine", positions, steps) == masked(positions, steps)) == (
                steps % 3 != 0
            )  # control: double precision


def test_a_canvas_that_is_partly_given_is_kept_by_both(folders):
    """diffusers counts what stays masked from the whole image unless it is told the share that
    was masked at the start."""
    from diffusers import AmusedScheduler

    pipe = gen.load("image", model=folders[4], dtype="float64")
    items = pipe.plan(PROMPTS[:2])
    sampler, sampling = pipe.resolve({"name": "amused", "steps": 4}, None)
    start = torch.randint(CODES, (2, 16), generator=torch.Generator().manual_seed(1))
    start[:, ::2] = CODES
    seen = []
    sampler(
        pipe.target(sampler, sampling, items),
        Replayed(2, pipe.dtype),
        canvas=start,
        callback=lambda info: seen.append(info["tokens"].clone()),
    )

    for share, same in ((0.5, True), (1.0, False)):
        scheduler, generator = AmusedScheduler(mask_token_id=MASK), torch.Generator().manual_seed(2)
        scheduler.set_timesteps(4)
        target, canvas, steps = (
            pipe.target(sampler, sampling, items),
            torch.where(start == CODES, MASK, start),
            [],
        )
        for t in scheduler.timesteps:
            logits = target.predict(torch.where(canvas == MASK, CODES, canvas)).logprobs
            canvas = scheduler.step(
                logits[..., :CODES], t, canvas, starting_mask_ratio=share, generator=generator
            ).prev_sample
            steps.append(torch.where(canvas == MASK, CODES, canvas))
        assert (first_difference(seen, steps) is None) == same
        assert torch.equal(steps[-1][:, 1::2], start[:, 1::2]) and torch.equal(
            seen[-1][:, 1::2], start[:, 1::2]
        )


def test_lossless_decoders_refuse_an_order_that_looks_at_drawn_ids():
    with pytest.raises(GenError, match="does not look at the tokens drawn"):
        gen.load("image").resolve({"name": "exact_speculative", "order": "annealed"}, None)

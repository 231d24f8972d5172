"""Block models: frames in order, the places of a frame by masked steps, finished frames from a
cache."""

from __future__ import annotations

import pytest
import torch
from block_bench import target_of
from enumeration import distance, enumerate_distribution
from tabular import TabularBlocks, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG, OffsetRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.language_models import BlockLM
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.targets.block import BlockTarget
from gen.recipes.common.grid_models import Shape, block_loss, hidden_positions

EXACT, WRONG = 1e-12, 1e-3
GUIDED = SamplingParams(temperature=0.8, guidance_scale=1.7)
frame_blocks = registry.get("sampler", "frame_blocks")


def sampling_of(
    model: TabularBlocks, space: TokenSpace, sampling: SamplingParams, context: int
) -> dict[tuple[int, ...], float]:
    """Place after place, each given its block with masks where nothing stands yet, from the model's
    definition, without a cache."""
    block = model.block_length

    def logits(prompt: list[int], known: tuple[int, ...]) -> torch.Tensor:
        position, end = len(known), (len(known) // block + 1) * block
        ids = torch.tensor([[*prompt, *known, *[space.mask_token_id] * (end - position)]])
        at = torch.arange(ids.shape[1])[None]
        return model.forward(
            ids, at, torch.full_like(at, ids.shape[1] - 1), model.new_cache(ids.shape[1])
        )[0, len(prompt) + position]

    def extend(known: tuple[int, ...], mass: float, out: dict) -> dict:
        if len(known) == space.length:
            out[known] = mass
            return out
        uncond = logits([50, 51 + context], known) if sampling.guided else None
        for token, p in enumerate(
            sampling(logits([31 + context, 40], known), uncond, space.legal[len(known)])
            .exp()
            .tolist()
        ):
            if p > 0:
                extend((*known, token), mass * p, out)
        return out

    return extend((), 1.0, {})


@pytest.mark.parametrize("sampling", [SamplingParams(), GUIDED], ids=["plain", "guided"])
@pytest.mark.parametrize("steps", [2, 1])
def test_with_one_place_per_step_it_is_sequential_decoding_and_otherwise_not(sampling, steps):
    """The second half is the control: two places of a block at once are drawn independently, and
    that shows."""
    space = space_of((2, 2), 2, masked=True)
    model = TabularBlocks(space.vocab_size, block_length=2, low=0.0, spread=1.5)
    sampler = frame_blocks(steps=steps, order="raster", schedule="linear")
    found = enumerate_distribution(
        lambda rng, c: sampler(target_of(model, space, sampling, c), rng).tokens, 2
    )
    error = max(distance(f, sampling_of(model, space, sampling, c)) for c, f in enumerate(found))
    assert error < EXACT if steps == 2 else error > WRONG


def test_control_a_block_that_is_not_handed_on_gives_another_distribution(monkeypatch):
    monkeypatch.setattr(
        BlockTarget,
        "commit",
        lambda self, tokens: setattr(self, "known", self.known + tokens.shape[1]),
    )
    space = space_of((2, 2), 2, masked=True)
    model = TabularBlocks(space.vocab_size, block_length=2, low=0.0, spread=1.5)
    sampler = frame_blocks(steps=2, order="raster", schedule="linear")
    found = enumerate_distribution(
        lambda rng, c: sampler(target_of(model, space, SamplingParams(), c), rng).tokens, 2
    )
    assert (
        max(
            distance(f, sampling_of(model, space, SamplingParams(), c)) for c, f in enumerate(found)
        )
        > WRONG
    )


# --- the embedded architecture


def llama() -> BlockLM:
    torch.manual_seed(1)
    return BlockLM(
        GridLlamaForCausalLM(
            GridLlamaConfig(
                grid=(4, 2, 3),
                prefix_length=2,
                codebook_size=6,
                causal=False,
                shifted=False,
                block_length=6,
                mask_token_id=8,
                vocab_size=60,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=2,
                num_attention_heads=2,
                num_key_value_heads=2,
                initializer_range=0.6,
            )
        ).double()
    )


def wide() -> TokenSpace:
    return TokenSpace.codes((4, 2, 3), 6, 60, 8)


def recomputed(
    model: BlockLM, prompt: torch.Tensor, known: torch.Tensor, canvas: torch.Tensor
) -> torch.Tensor:
    """The logits of a block from one call without a cache."""
    ids = torch.cat([prompt, known, canvas], 1)
    block = torch.cat(
        [torch.full((prompt.shape[1],), -1), torch.arange(known.shape[1] + canvas.shape[1]) // 6]
    )
    mask = torch.zeros(1, 1, ids.shape[1], ids.shape[1], dtype=torch.float64)
    mask = mask.masked_fill(block[None, :] > block[:, None], torch.finfo(torch.float64).min).expand(
        len(ids), -1, -1, -1
    )
    return model.model(input_ids=ids, attention_mask=mask, use_cache=False).logits[
        :, -canvas.shape[1] :
    ]


def test_the_cache_gives_what_full_recomputation_gives():
    model, space = llama(), wide()
    target = target_of(model, space, SamplingParams(), [0, 1, 2])
    generator = torch.Generator().manual_seed(2)
    known = torch.zeros(3, 0, dtype=torch.long)
    for _ in range(4):
        full = torch.randint(6, (3, 6), generator=generator)
        block = target.block()
        for share in (0.0, 0.5):
            canvas = torch.where(torch.rand(3, 6, generator=generator) < share, full, 8)
            out = block.predict(canvas)
            sampling, computed = out.logprobs, out.num_computed_tokens
            with torch.no_grad():
                expected = SamplingParams()(
                    recomputed(model, target.prompt, known, canvas), None, space.legal[:6]
                )
            # the distribution ends with the last id that may come; behind it nothing has any mass
            assert (
                sampling.shape[-1] == 6
                and torch.allclose(sampling, expected[..., :6], atol=1e-12)
                and bool(expected[..., 6:].isneginf().all())
            )
            # what is known goes through the model once, with the first call of the next block
            assert computed == 6 + (0 if share else (2 if known.shape[1] == 0 else 6))
        target.commit(full)
        known = torch.cat([known, full], 1)


def test_training_sees_what_generation_sees():
    """All blocks at once, beside a clean copy, have the logits that they have one after another."""
    model, shape, seen = llama(), Shape((4, 2, 3), 2, 6, 53), []

    def forward(attention_mask, **kwargs):
        seen.append(model.model(attention_mask=attention_mask.double(), **kwargs))
        return seen[0]

    codes = torch.randint(6, (2, 24), generator=torch.Generator().manual_seed(3))
    words = torch.tensor([[3, 4], [5, 6]])
    hidden = hidden_positions((8, 6), torch.Generator().manual_seed(5)).view(2, 24)
    with torch.no_grad():
        block_loss(shape, 6, torch.Generator().manual_seed(5))(forward, (words, codes))
        canvas = codes.masked_fill(hidden, shape.mask)
        for block in range(4):
            here = slice(6 * block, 6 * block + 6)
            expected = recomputed(
                model, shape.codes + words, codes[:, : 6 * block], canvas[:, here]
            )
            assert torch.allclose(seen[0].logits[:, here], expected, atol=1e-9)


def test_forward_passes_are_steps_times_blocks_and_given_blocks_are_kept():
    model, space = llama(), wide()
    sampler = frame_blocks(steps=3)
    whole = sampler(target_of(model, space, SamplingParams(), [0, 1]), CounterRNG([5, 6]))
    assert [s.nfe for s in whole.stats] == [12, 12]
    canvas = space.empty(2)
    canvas[:, :12] = whole.tokens[:, :12]
    again = sampler(
        target_of(model, space, SamplingParams(), [0, 1]), CounterRNG([5, 6]), canvas=canvas
    )
    assert torch.equal(again.tokens, whole.tokens)  # the same draws for the same places
    assert [s.nfe for s in again.stats] == [6, 6] and [s.tokens for s in again.stats] == [12, 12]


def test_rows_with_nothing_to_do_in_a_block_come_back_in_the_next():
    model, space = llama(), wide()
    sampler = frame_blocks(steps=3)
    alone = sampler(target_of(model, space, SamplingParams(), [1]), CounterRNG([6]))
    canvas = space.empty(2)
    canvas[0, :6] = 3  # row 0 has its first block, row 1 has not
    both = sampler(
        target_of(model, space, SamplingParams(), [0, 1]), CounterRNG([5, 6]), canvas=canvas
    )
    assert torch.equal(both.tokens[1], alone.tokens[0]) and bool((both.tokens[0, :6] == 3).all())
    assert [s.nfe for s in both.stats] == [9, 12]


def test_places_that_would_not_be_seen_are_refused():
    canvas = wide().empty(1)
    canvas[0, 13] = 2
    with pytest.raises(
        GenError, match="position 13, but blocks are decoded in order and block 0 is not complete"
    ):
        frame_blocks()(
            target_of(llama(), wide(), SamplingParams(), [0]), CounterRNG([1]), canvas=canvas
        )


def test_blocks_must_divide_the_grid():
    with pytest.raises(GenError, match="blocks are of 6 positions; expected a divisor of the 8"):
        target_of(llama(), TokenSpace.codes((2, 4), 6, 60, 8), SamplingParams(), [0])


def test_draws_of_a_part_are_those_of_the_whole():
    whole, part = CounterRNG([3]), OffsetRNG(CounterRNG([3]), 4)
    rows, at = torch.tensor([0]), torch.arange(3)[None]
    assert torch.equal(part.uniform(rows, at, "x", None), whole.uniform(rows, at + 4, "x", None))
    assert torch.equal(
        part.normal(rows, at, "x", None, 2), whole.normal(rows, at + 4, "x", None, 2)
    )
    logp = torch.zeros(1, 3, 5)
    assert torch.equal(
        part.categorical(logp, rows, at, "x", None, at >= 0),
        whole.categorical(logp, rows, at + 4, "x", None, at >= 0),
    )
    assert torch.equal(
        part.flip(torch.full((1, 3), 0.5), rows, at, "x", rows, at >= 0),
        whole.flip(torch.full((1, 3), 0.5), rows, at + 4, "x", rows, at >= 0),
    )
    assert not torch.equal(part.uniform(rows, at, "x", None), whole.uniform(rows, at, "x", None))

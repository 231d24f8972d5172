"""Networks on a grid whose prompts are an image of codes, or states of another network."""

from __future__ import annotations

import pytest
import torch

from gen.models.adapters.feature_prompts import POSITIONS, VECTORS, StatesMaskedLM, masked_lm
from gen.models.adapters.language_models import CausalLM, MaskedLM
from gen.models.nets.grid import GridLlamaConfig, GridLlamaForCausalLM
from gen.models.nets.grid_reader import GridReaderConfig, GridReaderForCausalLM
from gen.models.nets.grid_states import GridStatesConfig, GridStatesForCausalLM

ROWS, COLUMNS, CODES, WORDS = 4, 5, 9, 6
CELLS = ROWS * COLUMNS
SIZES = dict(
    hidden_size=32,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    bos_token_id=None,
    eos_token_id=None,
)


def reader() -> GridReaderForCausalLM:
    torch.manual_seed(0)
    config = GridReaderConfig(
        grid=(6,),
        prefix_length=CELLS + 1,
        codebook_size=WORDS,
        vocab_size=WORDS + CODES + 1,
        mask_token_id=WORDS + CODES,
        max_position_embeddings=CELLS + 7,
        image_grid=(ROWS, COLUMNS),
        stem_channels=8,
        **SIZES,
    )
    model = GridReaderForCausalLM(config).double().eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(0, 0.2)
    return model


def prompts(count: int) -> torch.Tensor:
    """Token ids of random images and the mask, long [count, CELLS + 1]."""
    codes = torch.randint(CODES, (count, CELLS), generator=torch.Generator().manual_seed(1))
    return torch.cat([codes + WORDS, torch.full((count, 1), WORDS + CODES)], 1)


def test_a_code_is_embedded_with_its_neighbours_and_no_other_code():
    model, ids = reader(), prompts(1)
    at = torch.arange(CELLS + 1)[None]
    before = model.embed(ids, at)
    changed = ids.clone()
    cell = 1 * COLUMNS + 1
    changed[0, cell] = WORDS + (ids[0, cell] - WORDS + 1) % CODES
    moved = (model.embed(changed, at) - before).abs().amax(-1)[0] > 1e-12
    grid = moved[:CELLS].view(ROWS, COLUMNS)
    assert grid[:, :].all(1).tolist() == [True] * ROWS  # three convolutions reach three cells
    assert not moved[CELLS]  # the slot at which writing begins sees no code yet
    corner = ids.clone()
    corner[0, 0] = WORDS + (ids[0, 0] - WORDS + 1) % CODES
    moved = (model.embed(corner, at) - before).abs().amax(-1)[0] > 1e-12
    near = moved[:CELLS].view(ROWS, COLUMNS)
    assert near[:, : COLUMNS - 1].all() and not near[:, COLUMNS - 1].any()


def test_written_words_are_embedded_alone_wherever_the_call_begins():
    model, ids = reader(), torch.cat([prompts(2), torch.tensor([[1, 2, 3], [4, 0, 5]])], 1)
    at = torch.arange(ids.shape[1]).expand_as(ids)
    together = model.embed(ids, at)
    alone = model.embed(ids[:, CELLS:], at[:, CELLS:])
    assert torch.equal(together[:, CELLS:], alone)


@pytest.mark.parametrize("split", [CELLS, CELLS + 1, CELLS + 3])
def test_a_cached_prompt_gives_the_logits_of_the_whole_sequence(split):
    model = reader()
    ids = torch.cat([prompts(2), torch.tensor([[1, 2, 3], [4, 0, 5]])], 1)
    whole = model(input_ids=ids, use_cache=False).logits
    adapter, at = CausalLM(model), torch.arange(ids.shape[1]).expand_as(ids)
    cache = adapter.new_cache(ids.shape[1])
    first = adapter.forward(ids[:, :split], at[:, :split], cache)
    rest = adapter.forward(ids[:, split:], at[:, split:], cache)
    assert torch.allclose(torch.cat([first, rest], 1), whole, atol=1e-10)
    assert adapter._lean is None  # the fast forward embeds tokens one by one


# --- states


def heard() -> GridStatesForCausalLM:
    torch.manual_seed(0)
    config = GridStatesConfig(
        grid=(3, 2),
        prefix_length=4,
        codebook_size=CODES,
        vocab_size=CODES + 1,
        mask_token_id=CODES,
        max_position_embeddings=10,
        causal=False,
        shifted=True,
        state_size=7,
        **SIZES,
    )
    return GridStatesForCausalLM(config).double().eval()


def features(count: int) -> list[dict[str, torch.Tensor]]:
    made = torch.randn(count, 4, 7, generator=torch.Generator().manual_seed(2)).double()
    return [{VECTORS: states, POSITIONS: torch.arange(4)} for states in made]


def test_the_adapter_places_the_states_of_each_row_as_training_does():
    model, given = heard(), features(2)
    adapter = masked_lm(model).conditioned(given)
    assert isinstance(adapter, StatesMaskedLM)
    canvas = torch.full((3, 6), CODES)
    canvas[:, 1] = 3
    marks = torch.tensor([adapter.condition_token(n) for n in (1, 0, 1)])
    ids = torch.cat([marks[:, None].expand(-1, 4), canvas], 1)
    found = adapter.forward(ids, 6)
    states = torch.stack([given[n][VECTORS] for n in (1, 0, 1)])
    full = torch.zeros(1, 1, 10, 10, dtype=torch.float64)
    expected = model(
        input_ids=ids.clamp_max(CODES + 1), states=states, attention_mask=full, use_cache=False
    ).logits[:, 3:9]
    assert torch.allclose(found, expected, atol=1e-12)
    assert torch.equal(found[0], found[2]) and not torch.allclose(found[0], found[1])


def test_the_unconditional_prompt_needs_no_states():
    model = heard()
    ids = torch.full((1, 10), CODES)
    bare = masked_lm(model).forward(ids, 6)
    beside = masked_lm(model).conditioned(features(1)).forward(ids, 6)
    assert torch.allclose(bare, beside, atol=1e-12)


def test_other_models_keep_the_adapter_of_token_ids():
    plain = GridLlamaForCausalLM(GridLlamaConfig(grid=(4,), vocab_size=8, causal=False, **SIZES))
    assert type(masked_lm(plain)) is MaskedLM

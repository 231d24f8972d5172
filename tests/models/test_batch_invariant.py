"""Bits of a token's logits do not depend on what runs beside it, in 16-bit types too.

Controls run the same checks without the option, where this machine's kernels differ.
"""

from __future__ import annotations

import byte_folders
import pytest
import torch
from torch import nn

import gen
from gen.core.errors import GenError
from gen.models.adapters.batch_invariant import (
    CANDIDATES,
    InvariantSlots,
    Widened,
    attention_in_order,
    by_leaf,
    make_invariant,
    rows_needed,
)
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.masks import branches

LENGTH = 96
HALF = (torch.bfloat16, torch.float16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return byte_folders.causal(tmp_path_factory.mktemp("model"))


def network(folder, dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def adapter(folder, dtype: torch.dtype, invariant: bool, lean: bool = True) -> CausalLM:
    module = network(folder, dtype)
    product = make_invariant(module, "tiny") if invariant else None
    if not lean:  # a hook, by which the fast forward is not used
        module.register_forward_hook(lambda *_: None)
    found = CausalLM(module)
    if product is not None:
        found.make_batch_invariant(product)
    assert found.has_fast_forward == lean
    return found


def fed(model: CausalLM, tokens: torch.Tensor, widths: list[int], slots: int = LENGTH):
    """Logits of tokens [B, T] that are fed in passes of these widths, in turns."""
    cache, parts, at = model.new_cache(slots), [], 0
    while at < tokens.shape[1]:
        here = slice(at, min(tokens.shape[1], at + widths[len(parts) % len(widths)]))
        positions = torch.arange(here.start, here.stop).expand(len(tokens), -1)
        parts.append(model.forward(tokens[:, here], positions, cache))
        at = here.stop
    return torch.cat(parts, 1)


def variants(model: CausalLM) -> list[bool]:
    """Whether logits have the bits of one token at a time, for widths, batches and slots."""
    tokens = torch.randint(0, 256, (5, LENGTH), generator=torch.Generator().manual_seed(1))
    alone = torch.cat([fed(model, row[None], [1]) for row in tokens])
    found = [fed(model, tokens, widths) for widths in ([1], [16], [64], [1, 7, 33, 3], [LENGTH])]
    found.append(fed(model, tokens, [5], slots=700))
    found.append(fed(model, tokens.flip(0), [4]).flip(0))
    return [torch.equal(logits, alone) for logits in found]


@pytest.mark.parametrize("lean", [True, False], ids=["fast", "module"])
@pytest.mark.parametrize("dtype", [*HALF, torch.float32], ids=str)
def test_widths_batches_and_slots_change_no_bit_of_a_logit(folder, dtype, lean):
    assert all(variants(adapter(folder, dtype, True, lean)))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_control_without_the_option_bits_change(folder, dtype):
    assert not all(variants(adapter(folder, dtype, False)))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A random Llama with heads of a published model's size, three to a group of keys."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=192, intermediate_size=256, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=1024,
        initializer_range=0.1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("wide")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


@pytest.mark.parametrize("shape", ["folder", "wide"])
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("lean", [True, False], ids=["fast", "module"])
def test_drafts_of_a_tree_have_the_bits_of_a_chain(request, shape, dtype, batch, lean):
    model = adapter(request.getfixturevalue(shape), dtype, True, lean)
    tokens = torch.randint(0, 256, (batch, 24), generator=torch.Generator().manual_seed(2))
    chain = fed(model, tokens, [1])
    cache = model.new_cache(LENGTH)
    start = torch.arange(20).expand(batch, -1)
    model.forward(tokens[:, :20], start, cache)
    # the branch 20, 21, 22 in columns 1, 3 and 4 of the tree, beside other drafts
    other = (tokens + 1) % 256
    columns = [tokens[:, 20], tokens[:, 21], other[:, 21], tokens[:, 22], tokens[:, 23]]
    positions = torch.tensor([[20, 21, 21, 22, 23]]).expand(batch, -1)
    parents = torch.tensor([[-1, -1, 0, 2]]).expand(batch, -1)
    logits = model.forward_tree(torch.stack(columns, 1), positions, parents, cache)
    assert torch.equal(logits[:, [0, 1, 3, 4]], chain[:, 20:])


def trees() -> torch.Tensor:
    """Parents of three trees of seven drafts, of which some do not exist."""
    return torch.tensor(
        [[-1, -1, 0, 0, 2, 1, 4], [-1, 0, 1, 2, 3, 4, 5], [-1, -1, -1, 0, -2, 1, -2]]
    )


def test_branches_cover_every_column_of_a_tree_by_leaves_that_stand_on_it():
    branch = branches(trees())
    groups, seen = list(by_leaf(branch.numpy())), [set() for _ in branch]
    assert len(groups) == 5  # as the tree with the most leaves; not one for every draft
    for rows, leaf, columns in groups:
        for row, own, some in zip(rows, leaf, columns, strict=True):
            seen[row] |= set(some.tolist())
            assert all(branch[row, own, c - 1] for c in some if c), (row, own, some)
    assert seen == [set(range(8))] * 3


@pytest.mark.parametrize("dtype", HALF)
def test_branch_after_branch_has_the_bits_of_queries_with_keys_of_their_own(folder, dtype):
    """The control: read with the slots of another draft, the bits are others."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    parents, text = trees(), random(3, 20, 2, 32)
    cache = InvariantSlots(1, LENGTH)
    cache.at(torch.arange(20).expand(3, -1), dtype)
    cache.write(0, text, text)
    depth = torch.tensor([[1, 1, 2, 2, 3, 2, 4], [1, 2, 3, 4, 5, 6, 7], [1, 1, 1, 2, 0, 2, 0]])
    positions = 20 + torch.nn.functional.pad(depth, (1, 0))
    mask = cache.tree(positions, parents, dtype)
    q, k, v = random(3, 8, 4, 32), random(3, 8, 2, 32), random(3, 8, 2, 32)
    for x in (q, k, v):  # a draft that does not exist repeats the root
        x[2, [5, 7]] = x[2, 0].clone()
    alone = attention_in_order(q, *cache.write(0, k, v), mask)
    assert torch.equal(cache.attend(0, q, k, v, mask), alone)
    cache.branches = [(at.roll(1, 0), columns) for at, columns in cache.branches]
    assert not torch.equal(cache.attend(0, q, k, v, mask), alone)


def test_the_class_itself_still_computes_what_it_did(folder):
    tokens = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(2))
    module = network(folder, torch.float32)
    with torch.no_grad():
        plain = module(tokens).logits
        make_invariant(module, "tiny")
        assert torch.allclose(module(tokens).logits, plain, atol=1e-4)
        ids = module.generate(tokens[:1], max_new_tokens=8, do_sample=False)
    again = network(folder, torch.float32).generate(tokens[:1], max_new_tokens=8, do_sample=False)
    assert torch.equal(ids, again)


SAMPLERS = (
    {"name": "speculative_jacobi", "window": 8},
    {"name": "speculative_jacobi", "window": 64},
    {"name": "prompt_lookup"},
    {"name": "suffix"},
    {"name": "token_recycling"},
)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_samplers_of_same_tokens_keep_their_label_in_bfloat16(folder, temperature):
    prompts = ["one two one two", "a", "what is this, and what is that?"]
    call = {"seed": 3, "temperature": temperature, "max_new_tokens": 32}
    pipe = gen.load("text", model=folder, dtype="bfloat16", batch_invariant=True)
    plain = pipe(prompts, sampler="autoregressive", batch_size=1, **call).tokens
    assert torch.equal(pipe(prompts, sampler="autoregressive", **call).tokens, plain)
    for sampler in SAMPLERS:
        assert torch.equal(pipe(prompts[::-1], sampler=sampler, **call).tokens.flip(0), plain)
        assert torch.equal(pipe(prompts, sampler=sampler, batch_size=1, **call).tokens, plain)


MEDIA = {"image": 4, "text": 12, "speech": 3, "video": 2}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("modality", MEDIA)
def test_built_in_models_give_the_same_media_in_any_batch_and_window(modality, dtype):
    pipe = gen.load(modality, dtype=dtype, batch_invariant=True)
    prompts = pipe.modality.example_prompts(MEDIA[modality], seed=1)
    plain = pipe(prompts, sampler="autoregressive", seed=0).tokens
    for batch, window in ((1, 8), (3, 16), (8, 64)):
        sampler = {"name": "speculative_jacobi", "window": window}
        made = pipe(prompts[::-1], sampler=sampler, seed=0, batch_size=batch).tokens.flip(0)
        assert torch.equal(made, plain)


# --- what the device is asked, and what is refused


class Uneven(nn.Linear):
    """Product whose rows have other bits among fewer than ``least`` rows."""

    def __init__(self, least: int):
        super().__init__(4, 4, dtype=torch.float64)
        self.least = least

    def forward(self, x):
        out = (x[:, None] * self.weight).sum(-1)  # row by row
        return out if len(x) >= self.least else out + 1e-6


def test_as_many_rows_are_taken_as_the_products_of_the_device_need():
    assert [rows_needed(nn.Sequential(Uneven(n)), "it") for n in (1, 3, 16)] == [1, 4, 16]


def test_a_device_whose_products_always_depend_on_rows_is_refused():
    with pytest.raises(GenError, match=r"batch_invariant: products of it .*other bits"):
        rows_needed(nn.Sequential(Uneven(CANDIDATES[-1] + 100)), "it")


def test_missing_rows_are_added_and_taken_off_again():
    seen = []

    def product(x, weight):
        seen.append(len(x))
        return x @ weight.T

    x, weight = torch.randn(1, 3, 4), torch.randn(5, 4)
    out = Widened(product, 8)(x, weight)
    assert seen == [8] and out.shape == (1, 3, 5)
    assert torch.allclose(out, x @ weight.T)


def test_models_and_options_that_have_no_such_passes_are_refused():
    with pytest.raises(GenError, match="batch_invariant is 'yes'; expected true or false"):
        gen.load("image", batch_invariant="yes")
    with pytest.raises(GenError, match="compile and batch_invariant are given; expected one"):
        gen.load("image", batch_invariant=True, compile=True)
    pipe = gen.load("image", batch_invariant=True)
    with pytest.raises(GenError, match="batch_invariant does not support model .* as MaskedLM"):
        pipe(["a red circle"], sampler="maskgit")


def test_experts_are_refused():
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, num_local_experts=2,
    )  # fmt: skip
    with pytest.raises(GenError, match="batch_invariant does not support tiny, whose experts"):
        make_invariant(MixtralForCausalLM(config), "tiny")

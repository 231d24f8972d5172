"""Block masks of ``flex_attention`` hide what additive masks hide."""

from __future__ import annotations

import pytest
import torch
from compiling import needs_compiler
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from gen.core.errors import GenError
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters import masks, slot_cache
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import CausalLM, MaskedLM
from gen.models.adapters.masks import BlockMask, blocks_among, blocks_up_to
from gen.models.adapters.slot_cache import SlotCache
from gen.models.targets.causal import CausalTarget

V, CLOSE, HIDE = 24, 1e-5, masks.hide
SIZES = dict(
    vocab_size=V,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=512,
    initializer_range=0.2,  # large, so that what is attended to matters
)
NETS = {
    "llama": lambda **k: LlamaForCausalLM(LlamaConfig(**SIZES, **k)),
    "qwen3": lambda **k: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=16, **k)),
}


@pytest.fixture(autouse=True)
def eager():
    """Run ``flex_attention`` without a compiler: it makes all scores of queries and keys then."""
    torch.compiler.set_stance("force_eager")
    yield
    torch.compiler.set_stance("default")


@pytest.fixture
def no_additive_masks(monkeypatch):
    """Let nothing make a mask that is added to scores."""

    def refuse(hidden, dtype):
        raise AssertionError(f"a mask of {tuple(hidden.shape)}")

    monkeypatch.setattr(masks, "hide", refuse)
    monkeypatch.setattr(slot_cache, "hide", refuse)


def pair(name: str, kind=CausalLM):
    """Adapters of the same network, with additive masks and with block masks."""
    out = []
    for attention in ("sdpa", "flex_attention"):
        torch.manual_seed(0)
        out.append(kind(NETS[name](attn_implementation=attention)))
    assert not out[0].takes_block_masks and out[1].takes_block_masks
    return out


def tokens(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(V, (rows, width), generator=torch.Generator().manual_seed(seed))


def passes(adapter, slots: int = 300) -> list[torch.Tensor]:
    """Logits of a prompt, of windows of rows at different positions, and of a tree."""
    cache = adapter.new_cache(slots)
    at = torch.arange(150).expand(3, -1)
    out = [adapter.forward(tokens(3, 150), at, cache)]
    start = torch.tensor([[140], [17], [150]])
    for width in (5, 1):
        out.append(adapter.forward(tokens(3, width, 1), start + torch.arange(width), cache))
    root = torch.tensor([[60], [128], [151]])
    parents = torch.tensor([[-1, -1, 0, 2], [-1, 0, 1, 2], [-1, 0, -1, 2]])
    depth = torch.tensor([[0, 1, 1, 2, 3], [0, 1, 2, 3, 4], [0, 1, 2, 1, 2]])
    out.append(adapter.forward_tree(tokens(3, 5, 2), root + depth, parents, cache))
    cache.commit_path(torch.tensor([[0, 2], [0, 1], [0, 1]]), torch.tensor([2, 1, 0]))
    out.append(adapter.forward(tokens(3, 2, 3), root + 1 + torch.arange(2), cache))
    return out


def worst(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("name", NETS)
def test_block_masks_give_the_logits_of_additive_masks(name):
    additive, blocks = pair(name)
    assert worst(passes(blocks), passes(additive)) < CLOSE


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("name", NETS)
def test_the_compiled_kernel_gives_the_logits_of_additive_masks(name):
    """The kernel reads the tables of blocks, which the eager one does not."""
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
    additive, blocks = pair(name)
    want = passes(additive)
    assert worst(passes(blocks), want) < CLOSE


@pytest.mark.parametrize("name", NETS)
def test_control_another_rule_gives_other_logits(name, monkeypatch):
    additive, blocks = pair(name)
    monkeypatch.setattr(
        slot_cache, "blocks_up_to", lambda last, *rest: blocks_up_to(last + 1, *rest)
    )
    got, want = passes(blocks), passes(additive)
    assert worst(got[1:3], want[1:3]) > 1e3 * CLOSE


def test_no_tensor_of_all_queries_and_slots_is_made(no_additive_masks):
    additive, blocks = pair("qwen3")
    assert len(passes(blocks)) == 5
    with pytest.raises(AssertionError, match="a mask of"):
        passes(additive)  # control


@pytest.mark.parametrize("name", NETS)
def test_greedy_tokens_are_those_of_additive_masks(name, no_additive_masks):
    def decode(adapter):
        sampler = resolve_sampler({"name": "speculative_jacobi", "window": 5})[0]
        space, lengths = TokenSpace.codes((16,), V, V), torch.tensor([2, 4, 3])
        sampling = SamplingParams(temperature=0.0)
        target = CausalTarget(adapter, tokens(3, 4), space, sampling, None, lengths)
        return sampler(target, CounterRNG(range(3))).tokens

    additive, blocks = pair(name)
    got = decode(blocks)
    with pytest.MonkeyPatch.context() as patch:
        for module in (masks, slot_cache):
            patch.setattr(module, "hide", HIDE)
        assert torch.equal(got, decode(additive))
    assert len(got.unique()) > 4


def test_a_masked_model_sees_all_but_padding():
    additive, blocks = pair("qwen3", MaskedLM)
    ids = tokens(3, 140)
    for padding in (None, torch.tensor([0, 130, 3])):
        got, want = (net.forward(ids, 9, padding) for net in (blocks, additive))
        assert worst([got], [want]) < CLOSE
    assert worst([got], [additive.forward(ids, 9)]) > 1e3 * CLOSE  # control
    seen = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) < 0.4
    seen[:, :4] = True
    parts = []
    for net in (blocks, additive):
        cache = net.new_cache(200)
        net.part(tokens(3, 200), torch.arange(200).expand(3, -1), seen, cache, 0)
        parts.append(net.part(ids[:, :5], torch.arange(7, 12).expand(3, -1), seen, cache, 0))
    assert worst(*[[x] for x in parts]) < CLOSE


# --- the tables of blocks


def dense(mask: BlockMask, rows: int) -> torch.Tensor:
    """What a mask lets queries see, bool [B, L, S]: blocks that hold everywhere, and those that
    hold somewhere with the rule."""
    queries, slots = mask.seq_lengths
    size, out = masks.BLOCK, torch.zeros(rows, queries, slots, dtype=torch.bool)
    tables = (
        (mask.kv_num_blocks, mask.kv_indices, False),
        (mask.full_kv_num_blocks, mask.full_kv_indices, True),
    )
    for counts, indices, whole in tables:
        for row in range(rows):
            for block in range(counts.shape[2]):
                for at in indices[row, 0, block, : counts[row, 0, block]].tolist():
                    q = torch.arange(block * size, min((block + 1) * size, queries))[:, None]
                    s = torch.arange(at * size, min((at + 1) * size, slots))[None]
                    shown = mask.mask_mod(torch.tensor(row), torch.tensor(0), q, s)
                    out[row, q, s] = True if whole else shown
    return out


def caches(slots: int):
    for block_masks in (False, True):
        cache = SlotCache(1, slots)
        cache.block_masks = block_masks
        yield cache


def same(additive: torch.Tensor, blocks: BlockMask) -> bool:
    seen = additive[:, 0] == 0
    return torch.equal(seen, dense(blocks, len(seen))) and bool(seen.any(-1).all())


@pytest.mark.parametrize("width", [1, 6, 128, 300])
def test_tables_say_what_additive_masks_say(width):
    g = torch.Generator().manual_seed(width)
    at = torch.tensor([[0], [127], [200]]) + torch.arange(width)
    some = torch.rand(3, 600, generator=g) < 0.5
    some[0], some[1, 128:256], some[2, :300] = True, True, False
    parents = torch.stack([torch.randint(-1, n, (3,), generator=g) for n in range(width)], 1)
    depth = torch.randint(1, 20, (3, width), generator=g).cumsum(1) % 90
    tree = torch.cat([at[:, :1], at[:, :1] + depth], 1)
    calls = [
        lambda c: c.at(at, torch.float32),
        lambda c: c.at(at, torch.float32, at[:, -1:].expand(-1, width)),
        lambda c: c.among(at, torch.float32, some | (torch.arange(600) == 50)),
        lambda c: c.tree(tree, parents, torch.float32),
    ]
    for number, call in enumerate(calls):
        additive, blocks = (call(cache) for cache in caches(600))
        assert same(additive, blocks), number


def test_controls_a_block_less_and_a_block_too_many_are_found():
    seen = torch.rand(1, 300, generator=torch.Generator().manual_seed(0)) < 0.5
    additive, mask = masks.hide(~seen, torch.float32)[:, None, None].expand(-1, -1, 3, -1), None
    mask = blocks_among(seen, 3)
    assert same(additive, mask)
    mask.kv_num_blocks -= 1
    assert not same(additive, mask)
    mask = blocks_among(seen, 3)
    mask.full_kv_num_blocks += 1
    assert not same(additive, mask)


def test_graphs_are_refused_by_name():
    with pytest.raises(GenError, match="compile does not support attn_implementation 'flex_att"):
        compiled_forward(pair("llama")[1])

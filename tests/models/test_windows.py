"""Layers that see a window give the logits of the class's own forward pass over whole texts,
whatever rows, drafts and trees share a pass, with masks of any kind."""

from __future__ import annotations

import pytest
import torch
from compiling import needs_compiler
from published_architectures import VOCABULARY, WINDOW, published
from transformers import GPTNeoConfig, GPTNeoForCausalLM

from gen.core.errors import GenError
from gen.models.adapters import slot_cache
from gen.models.adapters.graphs import compiled_forward
from gen.models.adapters.language_models import BlockLM, CausalLM, MaskedLM
from gen.models.adapters.masks import CAUSAL
from gen.models.adapters.slot_cache import SlotCache
from gen.models.adapters.windows import Window, windows_of
from gen.samplers.engine.draft import tree_positions

CLOSE, WRONG, LENGTH = 1e-6, 1e-3, 3 * WINDOW  # some classes rotate in float32
NAMES = ("mistral", "gemma3", "smollm3", "llama4")
ROWS = 3


@pytest.fixture(scope="module", params=NAMES)
def model(request):
    return published(request.param)


@pytest.fixture(params=["eager", pytest.param("compiled", marks=needs_compiler)])
def kernel(request):
    """Run ``flex_attention`` without a compiler, then compiled."""
    torch._dynamo.reset()
    torch.compiler.set_stance("force_eager" if request.param == "eager" else "default")
    yield
    torch.compiler.set_stance("default")


def texts(seed: int = 0, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(
        3, VOCABULARY, (ROWS, length), generator=torch.Generator().manual_seed(seed)
    )


def plain(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens, use_cache=False).logits


def far(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).abs().max())


def in_parts(adapter: CausalLM, tokens: torch.Tensor, slots: int = LENGTH) -> torch.Tensor:
    """Logits of texts in parts: a prompt in chunks, drafts that are rejected, rows that stand at
    different positions, and one token at a time."""
    cache, out = adapter.new_cache(slots), torch.zeros(*tokens.shape, VOCABULARY).to(adapter.dtype)
    row = torch.arange(ROWS)[:, None]
    start = torch.zeros(ROWS, 1, dtype=torch.long)

    def run(width: int | torch.Tensor) -> None:
        nonlocal start
        last = torch.as_tensor(width).view(-1, 1).expand(ROWS, 1) - 1
        at = start + torch.minimum(torch.arange(int(last.max()) + 1), last)
        adapter.forward(tokens[row, at].flip(1), at, cache)  # drafts that are rejected
        out[row, at] = adapter.forward(tokens[row, at], at, cache)
        start = start + last + 1

    run(WINDOW - 3)
    run(5)
    for width in ([7, 3, 1], [1, 5, 9], [4, 4, 2]):
        run(torch.tensor(width))
    run(1)
    while int(start.max()) < tokens.shape[1]:
        run(1)
    at = torch.minimum(start + torch.arange(LENGTH), torch.tensor(LENGTH - 1))
    out[row, at] = adapter.forward(tokens[row, at], at, cache)
    return out


def test_texts_in_parts_have_the_logits_of_the_whole(model):
    tokens = texts()
    assert far(in_parts(CausalLM(model), tokens), plain(model, tokens)) < CLOSE


def test_control_a_window_off_by_one_is_seen(model, monkeypatch):
    right = Window.first
    monkeypatch.setattr(Window, "first", lambda self, at: right(self, at) + 1)
    assert far(in_parts(CausalLM(model), texts()), plain(model, texts())) > WRONG


def test_a_tree_has_the_logits_of_each_branch_where_it_is_deeper_than_the_window(model):
    adapter, tokens = CausalLM(model), texts()
    root, depth = LENGTH - WINDOW - 6, WINDOW + 4
    # a chain deeper than the window, and a branch from its third draft
    parents = torch.tensor([[*range(-1, depth - 1), 2, depth]]).expand(ROWS, -1)
    drafts = texts(1, depth + 2)
    cache = adapter.new_cache(LENGTH)
    adapter.forward(tokens[:, :root], torch.arange(root).expand(ROWS, -1), cache)
    start = torch.full((ROWS,), root)
    inputs = torch.cat([tokens[:, root : root + 1], drafts], 1)
    got = adapter.forward_tree(inputs, tree_positions(start, parents), parents, cache)
    chain = torch.cat([tokens[:, : root + 1], drafts[:, :depth]], 1)
    branch = torch.cat([tokens[:, : root + 1], drafts[:, :3], drafts[:, depth:]], 1)
    assert far(got[:, : depth + 1], plain(model, chain)[:, root:]) < CLOSE
    assert far(got[:, depth + 1 :], plain(model, branch)[:, -2:]) < CLOSE
    # the branch is accepted, and what follows it sees its keys
    path = torch.tensor([[0, 1, 2, depth, depth + 1]]).expand(ROWS, -1)
    cache.commit_path(path, torch.full((ROWS,), 5))
    after = texts(2, 2)
    at = (root + 6 + torch.arange(2)).expand(ROWS, -1)
    want = plain(model, torch.cat([branch, after], 1))[:, -2:]
    assert far(adapter.forward(after, at, cache), want) < CLOSE


def test_superposed_tokens_and_hidden_states_follow_the_windows(model):
    adapter, tokens = CausalLM(model), texts()
    at, want = torch.arange(LENGTH).expand(ROWS, -1), plain(model, tokens)
    weights = torch.ones(ROWS, LENGTH, 1).double()
    got = adapter.forward_superposed(tokens[..., None], weights, at, adapter.new_cache(LENGTH))
    assert far(got, want) < CLOSE
    cache = adapter.new_cache(LENGTH)
    logits, states = adapter.forward_with_hidden_states(tokens, at, cache, ["model.norm"])
    assert far(logits, want) < CLOSE and states["model.norm"].shape == (ROWS, LENGTH, 32)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_block_masks_hide_what_additive_masks_hide(name, kernel):
    tokens, model = texts(length=200), published(name, torch.float32)
    blocks = CausalLM(published(name, torch.float32))
    blocks.model.set_attn_implementation("flex_attention")
    blocks = CausalLM(blocks.model)
    assert blocks.takes_block_masks
    cache, at = blocks.new_cache(200), torch.arange(200).expand(ROWS, -1)
    want = plain(model, tokens)
    assert far(blocks.forward(tokens[:, :150], at[:, :150], cache), want[:, :150]) < 1e-3
    torch._dynamo.reset()  # kernels of a CPU do not compile for sizes that vary
    parents = torch.tensor([[*range(-1, 48), 3]]).expand(ROWS, -1)
    root = torch.full((ROWS,), 150)
    positions = tree_positions(root, parents)
    inputs = torch.cat([tokens[:, 150:], tokens[:, 154:155]], 1)
    got = blocks.forward_tree(inputs, positions, parents, cache)
    assert far(got[:, :50], want[:, 150:]) < 1e-3


@pytest.mark.slow
def test_graphs_take_a_mask_for_each_kind_of_layer():
    torch._dynamo.reset()
    adapter = CausalLM(published("gemma3"))
    compiled_forward(adapter, backend="eager")
    assert far(in_parts(adapter, texts()), plain(published("gemma3"), texts())) < CLOSE


def test_layers_that_are_left_out_leave_the_kinds_of_the_others():
    """A network finds the mask of a layer by its index among the layers that are kept."""
    model = published("gemma3", num_hidden_layers=4)
    kinds = model.config.layer_types
    assert kinds[1] != kinds[2]
    kept = CausalLM(model).with_layers([1, 2])
    assert kept.model.model.config.layer_types == kinds[1:3]
    assert model.config.layer_types == kinds
    small = published("gemma3", num_hidden_layers=2, layer_types=kinds[1:3])
    state = {k: v for k, v in model.state_dict().items() if ".layers." not in k}
    for old, new in ((1, 0), (2, 1)):
        prefix = f"model.layers.{old}."
        state |= {
            f"model.layers.{new}.{k.removeprefix(prefix)}": v
            for k, v in model.state_dict().items()
            if k.startswith(prefix)
        }
    small.load_state_dict(state)
    at, tokens = torch.arange(LENGTH).expand(ROWS, -1), texts()
    got = kept.forward(tokens, at, CausalLM(model).new_cache(LENGTH))
    assert far(got, plain(small, tokens)) < CLOSE


def test_no_mask_is_made_until_a_window_ends():
    cache = SlotCache(1, 4 * WINDOW)
    cache.windows = {"sliding_attention": Window(WINDOW), "full_attention": None}

    def needed(first: int, end: int):
        return cache.needed(torch.arange(first, end)[None], torch.float32)

    assert needed(0, WINDOW) is CAUSAL
    assert needed(WINDOW - 1, WINDOW) is None
    masks = needed(WINDOW, WINDOW + 1)
    assert isinstance(masks, dict)
    assert int((masks["sliding_attention"] == 0).sum()) == WINDOW
    assert int((masks["full_attention"] == 0).sum()) == WINDOW + 1
    assert isinstance(needed(0, WINDOW + 1), dict)


def test_a_cache_within_the_window_has_one_mask(monkeypatch):
    adapter = CausalLM(published("gemma3"))
    assert adapter.new_cache(WINDOW).windows == {}
    assert set(adapter.new_cache(WINDOW + 1).windows) == {"full_attention", "sliding_attention"}
    assert slot_cache.SlotCache(1, 4).windows == {}


def test_windows_are_those_that_a_config_turns_on():
    def windows(name: str, **given):
        return windows_of(published(name, **given).config)

    assert windows("llama3") == windows("gpt2") == {}
    assert windows("mistral") == {"sliding_attention": Window(WINDOW)}
    assert windows("mistral", sliding_window=None) == {}
    assert windows("qwen2", use_sliding_window=False) == {}
    assert windows("qwen2", max_window_layers=2) == {}
    assert windows("qwen2")["sliding_attention"] == Window(WINDOW)
    assert windows("llama4") == {
        "chunked_attention": Window(WINDOW, chunked=True),
        "full_attention": None,
    }


def test_attention_that_depends_on_how_full_the_cache_is_is_refused():
    """Llama 4 scales queries by it from some position on, and GPT-Neo ends its window by it."""
    adapter = CausalLM(published("llama4", floor_scale=40))
    assert adapter.new_cache(39).slots == 39
    with pytest.raises(GenError, match="scale.*40.*expected at most 39"):
        adapter.new_cache(40)
    assert CausalLM(published("llama4", attn_temperature_tuning=False)).new_cache(10**4)
    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "window_size": WINDOW}
    config = GPTNeoConfig(
        vocab_size=VOCABULARY, attention_types=[[["global", "local"], 1]], **sizes
    )
    neo = CausalLM(GPTNeoForCausalLM(config))
    assert neo.new_cache(WINDOW).slots == WINDOW
    with pytest.raises(GenError, match=f"see {WINDOW}"):
        neo.new_cache(WINDOW + 1)


@pytest.mark.parametrize("kind", [MaskedLM, BlockLM])
def test_models_that_look_both_ways_are_refused_beyond_a_window(kind):
    adapter = kind(published("mistral"))
    assert adapter.new_cache(WINDOW).slots == WINDOW
    with pytest.raises(GenError, match=f"see {WINDOW}; expected at most {WINDOW}"):
        adapter.new_cache(WINDOW + 1)
    if kind is MaskedLM:
        with pytest.raises(GenError, match=f"see {WINDOW}"):
            adapter.forward(texts(), 4)

"""Passes over the first tokens of all rows need no mask of every query and slot: the logits are
those with one."""

from __future__ import annotations

import pytest
import torch
from llama_kinds import SMALL
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from gen.models.adapters import slot_cache
from gen.models.adapters.language_models import CausalLM
from gen.models.adapters.masks import CAUSAL
from gen.models.adapters.slot_cache import SlotCache

MODELS = {
    "lean llama": lambda: LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=2)),
    "llama": lambda: LlamaForCausalLM(
        LlamaConfig(**SMALL, num_key_value_heads=2, attention_bias=True)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SMALL, num_key_value_heads=2, head_dim=16)),
    "gpt-neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SMALL)),
    "eager": lambda: LlamaForCausalLM(
        LlamaConfig(
            **SMALL, num_key_value_heads=2, attention_bias=True, attn_implementation="eager"
        )
    ),
}
LENGTH = 9


def made(name: str, dtype: torch.dtype) -> CausalLM:
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    for p in model.parameters():
        p.data.mul_(3 if p.dim() > 1 else 1)  # attention that is not flat
    return CausalLM(model.to(dtype))


def logits(adapter: CausalLM) -> list[torch.Tensor]:
    """Logits of the first tokens, of a window behind them, of one more token, and of rows that
    stand at different positions."""
    ids = torch.randint(40, (2, LENGTH + 6), generator=torch.Generator().manual_seed(1))
    cache, found = adapter.new_cache(LENGTH + 8), []
    for first, end in ((0, LENGTH), (LENGTH, LENGTH + 4), (LENGTH + 4, LENGTH + 5)):
        at = torch.arange(first, end).expand(2, -1)
        found.append(adapter.forward(ids[:, first:end], at, cache))
    ragged = torch.tensor([[LENGTH + 5], [LENGTH + 2]])
    found.append(adapter.forward(ids[:, :1], ragged, cache))
    return found


def masks(monkeypatch) -> list[int]:
    """Numbers of queries and slots of every mask that is built from now on."""
    sizes, hide = [], slot_cache.hide
    monkeypatch.setattr(
        slot_cache,
        "hide",
        lambda hidden, dtype: (sizes.append(hidden[0].numel()), hide(hidden, dtype))[1],
    )
    return sizes


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_with_a_mask(monkeypatch, name, dtype, most):
    adapter, sizes = made(name, dtype), masks(monkeypatch)
    found, built = logits(adapter), len(sizes)
    with monkeypatch.context() as patched:
        patched.setattr(SlotCache, "needed", SlotCache.at)
        dense = logits(adapter)
    scale = dense[0].abs().max()
    for a, b in zip(found, dense, strict=True):
        assert (a - b).abs().max() <= most * scale
    # a window behind other slots, and ragged rows, need a mask; eager attention always does
    assert built == (4 if name == "eager" else 2) and len(sizes) - built == 4


@pytest.mark.parametrize("name", ["lean llama", "qwen3"])
def test_control_rows_that_stand_elsewhere_need_a_mask(monkeypatch, name):
    adapter = made(name, torch.float64)
    right = logits(adapter)
    needed = SlotCache.needed

    def always(self, positions, dtype):
        needed(self, positions, dtype)
        return CAUSAL

    monkeypatch.setattr(SlotCache, "needed", always)
    wrong = logits(adapter)
    assert torch.equal(right[0], wrong[0]) and (right[3] - wrong[3]).abs().max() > 1e-3

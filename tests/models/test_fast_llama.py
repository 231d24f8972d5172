"""The lean forward of Llamas gives what transformers' own gives, and leaves alone what it would not
do justice to."""

from __future__ import annotations

import pytest
import torch
from llama_kinds import KINDS, SMALL, make
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from gen.models.adapters.fast_llama import LeanLlama
from gen.models.adapters.language_models import CausalLM, MaskedLM
from gen.models.adapters.slot_cache import SlotCache


def by_module(adapter):
    """The same adapter without the lean forward."""
    adapter._lean = None
    return adapter


def windows():
    """Calls of ragged rows: tokens and positions, some repeated, the first with the prompt."""
    g = torch.Generator().manual_seed(1)

    def ids(*shape):
        return torch.randint(0, 40, shape, generator=g)

    yield ids(3, 5), torch.arange(5).expand(3, -1)
    yield ids(3, 1), torch.tensor([[5], [5], [5]])
    yield ids(3, 1), torch.tensor([[6], [3], [6]])
    for start in ([7, 4, 6], [9, 9, 9], [12, 8, 11]):
        at = torch.tensor(start)[:, None] + torch.arange(4)
        tokens = ids(3, 4)
        tokens[1, 3], at[1, 3] = tokens[1, 0], at[1, 0]
        yield tokens, at


@pytest.mark.parametrize(
    "dtype, error", [(torch.float64, 1e-12), (torch.float32, 2e-4), (torch.bfloat16, 0.5)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_against_a_cache_are_the_modules(kind, dtype, error):
    model = make(kind, dtype)
    lean, plain = CausalLM(model), by_module(CausalLM(model))
    caches = lean.new_cache(20), plain.new_cache(20)
    for tokens, positions in windows():
        a, b = (
            adapter.forward(tokens, positions, cache)
            for adapter, cache in zip((lean, plain), caches, strict=True)
        )
        assert (
            a.dtype == dtype
            and a.shape == b.shape
            and float((a - b).abs().max()) <= error * max(1, float(b.abs().max()) / 10)
        )


@pytest.mark.parametrize("kind", ["plain", "grid"])
def test_logits_that_look_both_ways_are_the_modules(kind):
    model = make(kind)
    lean, plain = MaskedLM(model), by_module(MaskedLM(model))
    ids = torch.randint(0, 40, (3, 14), generator=torch.Generator().manual_seed(2))
    for left_padding in (None, torch.tensor([0, 2, 1]))[: 1 if kind == "grid" else 2]:
        assert torch.allclose(
            lean.forward(ids, 9, left_padding),
            plain.forward(ids, 9, left_padding),
            rtol=0,
            atol=1e-12,
        )


def test_a_call_alone_sees_what_a_call_among_others_does():
    model = make("grid")
    lean = CausalLM(model)
    whole, apart = lean.new_cache(20), [lean.new_cache(20) for _ in range(3)]
    for tokens, positions in windows():
        together = lean.forward(tokens, positions, whole)
        for row in range(3):
            assert torch.allclose(
                lean.forward(tokens[row : row + 1], positions[row : row + 1], apart[row])[0],
                together[row],
                rtol=0,
                atol=1e-12,
            )


def test_control_places_that_are_off_by_one_are_found():
    model = make("grid")
    lean, plain = CausalLM(model), by_module(CausalLM(model))
    cos, sin, located = lean._lean.tables(20)
    for tables in (
        (cos.roll(1, 0), sin, located),
        (cos, -sin, located),
        (cos, sin, located.roll(1, 0)),
    ):
        cache, other = lean.new_cache(20), plain.new_cache(20)
        cache.tables = tables
        tokens, positions = next(windows())
        assert (
            float(
                (lean.forward(tokens, positions, cache) - plain.forward(tokens, positions, other))
                .abs()
                .max()
            )
            > 1e-3
        )


def test_control_a_call_without_its_mask_is_found(monkeypatch):
    model = make("plain")
    monkeypatch.setattr(
        SlotCache, "needed", lambda self, positions, dtype: self._stand(positions, None)
    )
    lean, plain = CausalLM(model), by_module(CausalLM(model))
    caches = lean.new_cache(20), plain.new_cache(20)
    errors = [
        float((lean.forward(t, p, caches[0]) - plain.forward(t, p, caches[1])).abs().max())
        for t, p in windows()
    ]
    assert max(errors) > 1e-3


def test_what_is_not_this_architecture_to_the_letter_is_called_as_it_is():
    def changed(change):
        model = make("plain")
        change(model)
        return model

    def swap(model):
        model.model.layers[0].mlp.up_proj = type("Quantised", (nn.Linear,), {})(32, 48, bias=False)

    odd = {
        "another class": MistralForCausalLM(MistralConfig(**SMALL, num_key_value_heads=4)).eval(),
        "a subclass": type("Own", (LlamaForCausalLM,), {})(LlamaConfig(**SMALL)).eval(),
        "biases": LlamaForCausalLM(LlamaConfig(**SMALL, attention_bias=True)).eval(),
        "another activation": LlamaForCausalLM(LlamaConfig(**SMALL, hidden_act="gelu")).eval(),
        "scaled rotations": (
            LlamaForCausalLM(
                LlamaConfig(
                    **SMALL,
                    rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4},
                )
            ).eval()
        ),
        "training": changed(lambda m: m.train()),
        "a hook": changed(lambda m: m.model.layers[1].register_forward_hook(lambda *a: None)),
        "another layer": changed(swap),
        "a forward of its own": changed(lambda m: setattr(m, "forward", m.forward)),
    }
    assert LeanLlama.of(make("plain")) is not None
    assert {name for name, model in odd.items() if LeanLlama.of(model) is not None} == set()


def test_weights_that_change_between_targets_count():
    model = make("grid")
    tokens, positions = next(windows())
    before = CausalLM(model).forward(tokens, positions, CausalLM(model).new_cache(20))
    with torch.no_grad():
        model.axes[0].weight.add_(1)
        model.model.layers[0].self_attn.q_proj.weight.mul_(2)
    lean, plain = CausalLM(model), by_module(CausalLM(model))
    after = lean.forward(tokens, positions, lean.new_cache(20))
    assert torch.allclose(
        after, plain.forward(tokens, positions, plain.new_cache(20)), rtol=0, atol=1e-12
    ) and not torch.allclose(after, before, atol=1e-3)

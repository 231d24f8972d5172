"""Models that are another model and low-rank additions to its matrices."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import gen
from gen.core.errors import GenError
from gen.models.load.locate import zoo
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.models.zoo import load_lm
from gen.recipes.common import low_rank

BASE = "text-masked"
MATRIX, NORM = "model.layers.1.self_attn.q_proj.weight", "model.norm.weight"


def folder_of(path, tensors):
    config = json.loads((zoo()[BASE] / "config.json").read_text())
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config | {"base": BASE}))
    save_file(tensors, path / "model.safetensors")
    return path


def factors(seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    up = torch.randn(96, 2, generator=generator)
    return {f"{MATRIX}.up": up, f"{MATRIX}.down": torch.randn(2, 96, generator=generator)}


def loaded(path, dtype=torch.float64):
    return load_lm(path, torch.device("cpu"), dtype)


def test_products_are_added_and_other_tensors_replaced(tmp_path):
    given = factors() | {NORM: torch.full((96,), 3.0)}
    model, base = loaded(folder_of(tmp_path, given)), loaded(BASE)
    before = dict(base.named_parameters())
    for name, value in model.named_parameters():
        wanted = before[name]
        if name == MATRIX:
            product = given[f"{MATRIX}.up"].double() @ given[f"{MATRIX}.down"].double()
            wanted = wanted + product
        if name == NORM:
            wanted = torch.full_like(wanted, 3.0)
        assert torch.equal(value, wanted), name


def test_a_saved_model_is_whole(tmp_path):
    model = loaded(folder_of(tmp_path / "a", factors()), torch.float32)
    model.save_pretrained(tmp_path / "b")
    again = GridLlamaForCausalLM.from_pretrained(tmp_path / "b", dtype=torch.float32)
    assert again.config.base is None
    for (name, one), two in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two), name


def test_what_was_trained_is_what_is_loaded(tmp_path):
    model = loaded(BASE, torch.float32)
    low_rank.attach(model, rank=3)
    free = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all("norm" in n or n.endswith((".down", ".up")) for n in free)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(".up"):
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) / 10)
    low_rank.export(model, BASE, tmp_path)
    ids = torch.arange(32)[None]
    with torch.no_grad():
        wanted = model(input_ids=ids).logits
        found = loaded(tmp_path, torch.float32)(input_ids=ids).logits
        plain = loaded(BASE, torch.float32)(input_ids=ids).logits
    assert torch.allclose(found, wanted, atol=0.1)  # half precision on disk
    assert not torch.allclose(plain, wanted, atol=1.0)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (
            {f"{MATRIX}.up": torch.zeros(96, 2)},
            "q_proj.weight.up of shape .*; expected a parameter",
        ),
        ({NORM: torch.zeros(3)}, r"model.norm.weight of shape \(3,\); expected \(96,\)"),
        ({"other": torch.zeros(3)}, "other of shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path, tensors, message):
    with pytest.raises(GenError, match=message):
        loaded(folder_of(tmp_path, tensors))


def test_an_unknown_base_is_refused(tmp_path):
    folder = folder_of(tmp_path, factors())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"base": "text-maske"}))
    with pytest.raises(GenError, match="text-maske"):
        gen.load("text", folder)("sort 3 1 2 =", "fast_dllm")

"""Placement and attention of gen's own networks and of those that gen reads itself."""

from __future__ import annotations

import pytest
import torch
from families import WRITERS

import gen
from gen.core.errors import GenError
from gen.models.nets.var import Attention
from gen.models.zoo import load_lm

TASK = "sort 3 1 2 ="
slow = pytest.mark.slow


def network_of(pipe):
    model = pipe.bound(pipe.model)[0]
    own = isinstance(model, torch.nn.Module)
    return model if own else model.adapter(model.protocols[0]).model


def offloaded(network) -> int:
    return sum(p.is_meta for p in network.parameters())


def halved(load, prompt, folder, share=0.5, **asked):
    """Return the tokens of a model and those with part of its weights on disk, and how many
    tensors are there."""
    plain = load()
    size = sum(p.nbytes for p in network_of(plain).parameters())
    limits = {"device_map": "sequential", "max_memory": {"cpu": int(size * share)}}
    pipe = load(**limits, offload_folder=folder)
    return (
        plain(prompt, seed=1, **asked).tokens,
        pipe(prompt, seed=1, **asked).tokens,
        offloaded(network_of(pipe)),
    )


def test_own_models_run_from_the_disk_with_another_attention_and_are_saved(tmp_path):
    def load(**more):
        return gen.load("text", model="text-causal", dtype="float64", **more)

    want, asked = load()(TASK, seed=1).tokens, {"seed": 1}
    off = load(device_map={"": "disk"}, offload_folder=tmp_path / "off")
    network = network_of(off)
    assert offloaded(network) == len(list(network.parameters()))
    assert torch.equal(off(TASK, **asked).tokens, want)
    eager = load(attn_implementation="eager")
    assert network_of(eager).config._attn_implementation == "eager"
    assert torch.equal(eager(TASK, **asked).tokens, want)
    again = gen.load(eager.save_pretrained(tmp_path / "saved"))
    assert network_of(again).config._attn_implementation == "eager"
    folder = off.save_pretrained(tmp_path / "from_disk")
    assert torch.equal(gen.load(folder)(TASK, **asked).tokens, want)
    with pytest.raises(GenError, match="Did you mean 'eager'"):
        load(attn_implementation="eagre")


@slow
@pytest.mark.parametrize(
    "modality, model, prompt",
    [
        ("image", "image-causal", "a red circle"),
        ("image", "image-mar", "a red circle"),
        ("image", "image-scales", "a red circle"),
    ],
)
def test_own_models_are_halved_by_max_memory(modality, model, prompt, tmp_path):
    want, got, count = halved(
        lambda **more: gen.load(modality, model=model, **more), prompt, tmp_path / "off"
    )
    assert torch.equal(want, got) and count


@slow
@pytest.mark.parametrize("name", ["var", "hmar", "mar", "llamagen"])
def test_networks_that_gen_reads_itself_are_halved_by_max_memory(name, tmp_path):
    (tmp_path / "model").mkdir()
    case = WRITERS[name](tmp_path / "model")

    def load(**more):
        return gen.load(case.modality, model=case.path, **{**case.options, **more})

    for sampler in case.samplers[:2]:
        want, got, count = halved(load, case.prompts[0], tmp_path / "off", sampler=sampler)
        assert torch.equal(want, got) and count


class Beside:
    """Stands for a linear layer, whose hook does not run where its weight is read alone."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, x):
        return torch.nn.functional.linear(x, self.layer.weight)


@slow
def test_control_attention_that_reads_a_matrix_beside_its_module_gives_other_tokens(
    tmp_path, monkeypatch
):
    (tmp_path / "model").mkdir()
    case = WRITERS["var"](tmp_path / "model")
    attend = Attention.forward

    def beside(self, *args):
        vars(self)["mat_qkv"] = Beside(self._modules["mat_qkv"])
        try:
            return attend(self, *args)
        finally:
            del vars(self)["mat_qkv"]

    monkeypatch.setattr(Attention, "forward", beside)
    try:
        want, got, count = halved(
            lambda **more: gen.load(case.modality, model=case.path, **{**case.options, **more}),
            case.prompts[0],
            tmp_path / "off",
        )
    except GenError as error:  # what was read is any memory, and may be NaN
        assert "gives no distribution" in str(error)
    except NotImplementedError as error:  # or no memory at all
        assert "meta" in str(error)
    else:
        assert count and not torch.equal(want, got)


@slow
@pytest.mark.parametrize(
    "name, read",
    [
        ("image-scales", "quantize.embedding.weight"),
        ("world-frames", "spatial_bias"),
        ("text-dag", "target.weight"),
        ("speech-translation", "speaker.slots.weight"),
    ],
)
def test_weights_that_are_read_beside_modules_stay_in_memory(name, read, tmp_path):
    how = {"device_map": {"": "disk"}, "offload_folder": str(tmp_path)}
    with pytest.raises(GenError, match="expected them in memory") as error:
        load_lm(name, torch.device("cpu"), torch.float32, **how)
    assert read in str(error.value)

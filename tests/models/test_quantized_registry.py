"""Every built-in model with quantised weights: it decodes, or is refused in one sentence.

The models are those of the registry; ``test_quantized_families.py`` walks the families.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import gen
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.modalities.audio import balls
from gen.modalities.speech import synth
from gen.models.load.quantize import QUANTIZATIONS, block_linears

pytestmark = pytest.mark.slow
pytest.importorskip("torchao", reason="make test-quantization has torchao")
pytest.importorskip("bitsandbytes", reason="make test-quantization has bitsandbytes")

MODELS = {
    name: (modality, key)
    for modality, cls in registry.table("modality").items()
    for key, name in reversed(cls.models.items())  # of several keys the first
}
HOW: dict[str, Any] = {name: name for name in QUANTIZATIONS}
HOW["int4"] = {"name": "int4", "group_size": 32}  # the models are as narrow as 96


def digits() -> dict[str, Any]:
    said = synth.Utterance(("seven", "two"), "low", "fast")
    return {"audio": (synth.speak(said, np.random.default_rng(0)), synth.RATE)}


def bounce() -> dict[str, Any]:
    return {"audio": balls.render([(3, "high", True)])}


CONDITIONS = {  # of models that take other conditions than the prompts of their modality
    "speech-translation": digits,
    "text-dag": lambda: "translate: seven seven two",
    "image-captions": lambda: {"image": Image.new("RGB", (64, 64), (70, 70, 70))},
    "audio-captions": bounce,
}


def begun(name: str, how: Any) -> tuple[Any, gen.Pipeline]:
    """An output of the default sampler after its first forward pass, and its pipeline."""

    def stop(_: dict[str, int]) -> None:
        raise gen.Interrupt

    pipe = gen.load(MODELS[name][0], model=name, quantization=how, device="cpu")
    example = pipe.modality.example_prompts(1, 0)[0]
    prompt = CONDITIONS.get(name, lambda: example)()
    return pipe(prompt, seed=0, callback=stop), pipe


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_a_built_in_model_decodes_or_is_refused_in_one_sentence(name, how):
    try:
        out, pipe = begun(name, HOW[how])
    except GenError as error:
        said = str(error)
        assert how == "int4" and "\n" not in said and len(said) < 600, said
        assert name in said or "expected a group_size" in said
        return
    assert len(out.tokens) == 1 and pipe.model_options["quantization"] == HOW[how]
    layers = block_linears(pipe.bound(name)[0]).values()
    assert layers and all(
        type(x) is not torch.nn.Linear or type(x.weight) is not torch.nn.Parameter for x in layers
    )


def test_control_a_layer_of_bitsandbytes_does_not_take_four_axes():
    from bitsandbytes.nn import Int8Params, Linear8bitLt  # lies beside the environment

    from gen.models.load.bits_and_bytes import layer_of_8_bits

    weight, x = torch.randn(32, 64), torch.randn(2, 3, 4, 64)
    made = []
    for cls in (Linear8bitLt, layer_of_8_bits(Linear8bitLt)):
        layer = cls(64, 32, bias=False, has_fp16_weights=False, threshold=0.0)
        layer.weight = Int8Params(weight.clone(), requires_grad=False, has_fp16_weights=False)
        made.append(layer.to("cpu").eval())
    with pytest.raises(RuntimeError, match="must match the size"):
        made[0](x)
    assert torch.equal(made[1](x).flatten(0, 2), made[0](x.flatten(0, 2)))

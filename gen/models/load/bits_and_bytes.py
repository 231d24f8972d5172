"""Linear layers of bitsandbytes in a network that is loaded.

The options are those of ``BitsAndBytesConfig`` of transformers. Layers are replaced after loading,
so this works for networks of any library, with adapters merged before.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError, bad_value, unknown
from gen.models.load.libraries import transformers

BITS_AND_BYTES = ("bitsandbytes_8bit", "bitsandbytes_4bit")  # as in transformers and diffusers
PREFIXES = {"bitsandbytes_8bit": "llm_int8_", "bitsandbytes_4bit": "bnb_4bit_"}


def bits_and_bytes_config(name: str, options: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Return the ``BitsAndBytesConfig`` of a name and options.

    The defaults are nf4 that computes in the dtype of the model, and int8 without outliers.

    Args:
        name: one of ``BITS_AND_BYTES``.
        options: arguments of ``BitsAndBytesConfig``.
        dtype: dtype of the model.

    Raises:
        GenError: an unknown option, or a value that transformers refuses.
    """
    make = transformers().BitsAndBytesConfig
    known = [k for k in inspect.signature(make).parameters if k.startswith(PREFIXES[name])]
    for key in options:
        if key not in known:
            raise unknown(f"option of {name}", key, known)
    if name == "bitsandbytes_8bit":
        return make(**{"load_in_8bit": True, "llm_int8_threshold": 0.0, **options})
    usual = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    try:
        return make(**{"load_in_4bit": True, **usual, **options})
    except (TypeError, ValueError, AttributeError) as error:
        raise bad_value(
            "quantization", {"name": name, **options}, f"other options ({error})"
        ) from None


def skips_none(key: str, skipped: Any) -> bool:
    """Return True for an empty list of modules to leave as they are: as in transformers, the output
    head is quantised then, too. Return False for None.

    Args:
        key: name of the list in messages.
        skipped: the list.

    Raises:
        GenError: a list with modules.
    """
    if skipped:
        raise GenError(
            f"{key} is {skipped!r}; expected none: quantised are the linear layers in repeated"
            " blocks and, with head true, the output head"
        )
    return skipped is not None


def require_rows_apart(config: Any) -> None:
    """Raise ``GenError`` for a ``BitsAndBytesConfig`` by which a row depends on the others of its
    batch."""
    if config.load_in_8bit and config.llm_int8_threshold > 0:
        raise GenError(
            f"llm_int8_threshold is {config.llm_int8_threshold}: columns with outliers anywhere in"
            " a batch are computed otherwise in all of its rows, so a row would depend on the"
            " others; expected 0.0"
        )


@torch.no_grad()
def replace_linears(
    network: nn.Module, chosen: Mapping[str, nn.Linear], config: Any, library: ModuleType
) -> None:
    """Replace linear layers by those of bitsandbytes, with quantised weights.

    Args:
        network: the network, which is changed.
        chosen: its linear layers by name.
        config: a ``BitsAndBytesConfig``.
        library: the package ``bitsandbytes``.

    Raises:
        GenError: the config asks for what cannot be honoured.
    """
    require_rows_apart(config)
    if config.llm_int8_has_fp16_weight:
        raise GenError("llm_int8_has_fp16_weight is True; expected False: weights are quantised")
    for path, linear in chosen.items():
        if type(linear) is not nn.Linear:
            raise GenError(
                f"layer {path} is a {type(linear).__name__}, which bitsandbytes does not quantise;"
                " expected linear layers, with at most one adapter, which is merged"
            )
    in_8_bits = layer_of_8_bits(library.nn.Linear8bitLt)
    for path, linear in chosen.items():
        network.set_submodule(path, _layer(linear, config, library, in_8_bits))


def keep_layout(network: nn.Module) -> None:
    """Let 4-bit layers of a network keep the layout of their weights; before its first pass.

    On a CPU with bfloat16 they would repack them and compute in bfloat16 whatever the dtype. Their
    ``state_dict`` does not bring the scales back into order, so reading it would spoil the weights.
    """
    for layer in network.modules():
        if "support_avx512bf16_for_cpu" in vars(layer):
            layer.support_avx512bf16_for_cpu = False


def layer_of_8_bits(base: type[Any]) -> type[Any]:
    """Return the 8-bit layer of bitsandbytes, ``base``, for inputs with any number of axes; its own
    take at most three."""

    class AnyAxes(base):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])

    return AnyAxes


def _layer(linear: nn.Linear, config: Any, library: ModuleType, in_8_bits: type[Any]) -> nn.Module:
    """Return the layer of bitsandbytes with the weights of a linear one."""
    nets, weight = library.nn, linear.weight.detach()
    shape = (linear.in_features, linear.out_features, linear.bias is not None)
    if config.load_in_8bit:
        made = in_8_bits(
            *shape, has_fp16_weights=False, threshold=config.llm_int8_threshold, device="meta"
        )
        # weights are quantised on their way from the CPU to a device
        quantized = nets.Int8Params(weight.cpu(), requires_grad=False, has_fp16_weights=False)
    else:
        kinds = {
            "compress_statistics": config.bnb_4bit_use_double_quant,
            "quant_type": config.bnb_4bit_quant_type,
            "quant_storage": config.bnb_4bit_quant_storage,
        }
        compute = config.bnb_4bit_compute_dtype
        made = nets.Linear4bit(*shape, compute_dtype=compute, device="meta", **kinds)
        quantized = nets.Params4bit(weight.clone(), requires_grad=False, module=made, **kinds)
        keep_layout(made)
    made.weight = quantized.to(weight.device)
    made.bias = linear.bias
    return made.eval().requires_grad_(False)

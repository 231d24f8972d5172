"""Fields of a published folder's JSON files, judged before anything is built from them.

transformers builds what a config says, whatever it says: a billion layers, or a size that is a
text. What the fields below may hold is known; fields that are not listed are left to the family.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gen.core.errors import GenError, bad_value

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers",
          "decoder_layers", "depth")  # fmt: skip
COUNTS = {
    *LAYERS, "hidden_size", "n_embd", "d_model", "num_attention_heads", "n_head",
    "num_key_value_heads", "head_dim", "intermediate_size", "vocab_size",
    "max_position_embeddings", "n_positions",
}  # fmt: skip
SINGLE = {  # which no family states per layer
    "num_hidden_layers", "n_layer", "hidden_size", "n_embd", "d_model", "vocab_size",
    "max_position_embeddings", "n_positions",
}  # fmt: skip
WIDTHS = {
    "hidden_size", "n_embd", "d_model", "vocab_size", "intermediate_size", "n_inner", "ffn_dim",
    "d_ff", "d_kv", "head_dim", "num_attention_heads", "n_head", "num_key_value_heads",
}  # fmt: skip
IDS = "_token_id"
MASK = "mask_token_id"  # families say what theirs may be
LENGTHS = {"model_max_length"}


def require_regular(path: Path, name: str) -> None:
    """Refuse a folder that holds a pipe, a socket or a device: reading one may never end.

    Args:
        path: folder of a model, or a file.
        name: name of the model, for messages.

    Raises:
        GenError: the first such entry.
    """
    for entry in sorted(path.iterdir()) if path.is_dir() else [path]:
        if entry.exists() and not (entry.is_file() or entry.is_dir()):
            raise GenError(
                f"{entry.name} of model {name} is no regular file; expected files and folders"
            )


def check_fields(said: Mapping[str, Any], file: str, name: str) -> None:
    """Judge the content of a JSON file of a model.

    Args:
        said: content of the file.
        file: name of the file.
        name: name of the model, for messages.

    Raises:
        GenError: a field holds what no model can have.
    """
    for path, key, value in _leaves(said):
        expected = None
        if value is None:
            continue
        least = 0 if key in LAYERS else 1
        is_list = isinstance(value, list) and key in SINGLE
        if key in COUNTS and (is_list or not _is_each(value, least)):
            expected = f"an integer of at least {least}"
        elif key.endswith(IDS) and key != MASK and not _is_each(value, -1):
            expected = "a token id or a list of them"
        elif key in LENGTHS and not _is_number(value, 1):
            expected = "a number of tokens"
        elif key == "model_type" and not isinstance(value, str):
            expected = "a text"
        if expected is not None:
            raise bad_value(f"{path} in {file} of model {name}", value, expected)


def check_sizes(
    said: Mapping[str, Any], shapes: Sequence[Sequence[int]], file: str, name: str
) -> None:
    """Hold the numbers of layers and the widths that a config states against the weights, since a
    network is built before its weights are read.

    Args:
        said: content of the config.
        shapes: shapes of the tensors that the weights have.
        file: name of the file.
        name: name of the model, for messages.

    Raises:
        GenError: there are fewer tensors than layers, or no tensor is as wide.
    """
    widest = max((side for shape in shapes for side in shape), default=0)
    is_packed = said.get("quantization_config") is not None  # several numbers in one
    for path, key, value in _leaves(said):
        most = None
        if key in LAYERS:
            most, what = len(shapes), "the tensors of its weights"
        elif key in WIDTHS and not is_packed:
            most, what = widest, "the longest side of its weights"
        values = value if isinstance(value, list) else [value]
        if most is not None and any(isinstance(v, int) and v > most for v in values):
            raise bad_value(f"{path} in {file} of model {name}", value, f"at most {most}, {what}")


def _leaves(said: Any, above: str = "", depth: int = 0) -> Iterator[tuple[str, str, Any]]:
    """Yield path, key and value of every entry of nested objects, down to eight levels."""
    for key, value in said.items() if isinstance(said, Mapping) and depth < 8 else ():
        path = f"{above}.{key}" if above else str(key)
        yield path, str(key), value
        yield from _leaves(value, path, depth + 1)


def _is_number(value: Any, least: float) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= least


def _is_each(value: Any, least: int) -> bool:
    """Return True for an integer of at least ``least`` that torch can hold, and for a list of
    them."""
    values = value if isinstance(value, list) else [value]
    return all(isinstance(v, int) and _is_number(v, least) and v < 2**63 for v in values)

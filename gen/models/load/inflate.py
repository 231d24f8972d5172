"""Function-preserving enlargement of models of the Llama architecture.

A model of width D becomes one of width D' > D with more heads, a wider MLP and more layers, and
computes the same logits:

    residual stream   x' = (x, 0)                         new rows of O, D and embeddings are zeros
    norm              w' x' / sqrt(mean(x'^2) + eps')     w' = w sqrt(D / D'), eps' = eps D / D'
    heads, MLP        new rows of Q, K, V, G, U random    new columns of O and D are zeros
    new layers        random                              O = 0 and D = 0

All other new entries are random, including the columns that read the zeros of the residual stream.
Matrices stay dense, so each forward pass costs what a trained model of that size costs.

Guarantee: logits equal those of the small model up to the rounding of sums. Acceptance rates,
forward passes and samples of a seed are therefore those of the small model.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gen.core.errors import GenError, bad_value
from gen.models.load.locate import locate, read_config, readable
from gen.models.load.weights import Weights

KINDS = ("gen_grid_llama", "llama")
SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9}
STD = 0.02  # of random entries
ASPECT = 64  # width / layers of 85 M parameters; it grows with size, to 130 at 7 B
INNER = 8 / 3  # inner width / width
TOLERANCE = 0.02  # relative error of the number of parameters
SHARD = 2 * 10**9  # bytes per file
NORMS = ("input_layernorm", "post_attention_layernorm")


@dataclass(frozen=True)
class Shape:
    """Shape of a Llama: ``heads`` of ``dim`` channels, ``groups`` of them with keys and values."""

    width: int
    layers: int
    heads: int
    groups: int
    dim: int
    inner: int
    tables: int  # rows of all embeddings and of the output matrix

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Shape:
        """Read the shape of a config.json."""
        width, heads = config["hidden_size"], config["num_attention_heads"]
        on_grid = [*config.get("grid", ()), config.get("prefix_length", 0)]
        matrices = 1 if config.get("tie_word_embeddings") else 2
        return cls(
            width,
            config["num_hidden_layers"],
            heads,
            config.get("num_key_value_heads") or heads,
            config.get("head_dim") or width // heads,
            config["intermediate_size"],
            matrices * config["vocab_size"] + sum(on_grid),
        )

    @property
    def fixed(self) -> int:
        """Parameters without the MLP's matrices."""
        layer = 2 * self.width * self.dim * (self.heads + self.groups) + 2 * self.width
        return self.layers * layer + self.width * (self.tables + 1)

    @property
    def parameters(self) -> int:
        """Number of parameters."""
        return self.fixed + 3 * self.layers * self.width * self.inner

    def enlarged(self, parameters: int) -> Shape:
        """Return a shape with about so many parameters, at least as large in every dimension.

        Proportions are those of published models: inner width 8/3 of the width, and a ratio of
        width to layers that grows slowly with size. Widths that are multiples of 128 come first.

        Raises:
            GenError: no such shape.
        """
        aspect = ASPECT * (parameters / 85e6) ** 0.16
        for multiple in (128, 64, 1):
            best, found = math.inf, None
            for shape in self._candidates(parameters, multiple):
                distance = (
                    math.log(shape.inner / shape.width / INNER) ** 2
                    + math.log(shape.width / shape.layers / aspect) ** 2
                )
                if distance < best:
                    best, found = distance, shape
            # far from the usual proportions: a width of any multiple fits small sizes better
            if found is not None and (best < 0.2 or multiple == 1):
                return found
        raise GenError(
            f"the model has {self.parameters:,} parameters and {parameters:,} are asked for;"
            f" expected at least {self.parameters:,}"
        )

    def _candidates(self, parameters: int, multiple: int) -> Iterator[Shape]:
        """Yield all shapes whose number of parameters is within ``TOLERANCE``."""
        per_group = self.heads // self.groups
        for groups in range(self.groups, 1 + 32768 // self.dim):
            heads = groups * per_group
            width = max(self.width, heads * self.dim)
            if width % multiple:
                continue
            for layers in range(self.layers, 257):
                shape = replace(self, width=width, layers=layers, heads=heads, groups=groups)
                room = parameters - shape.fixed
                step = 32 if multiple > 1 else 1  # any width serves small models
                inner = round(room / (3 * layers * width) / step) * step
                if inner < self.inner:
                    break  # more layers leave less room
                shape = replace(shape, inner=inner)
                if abs(shape.parameters / parameters - 1) <= TOLERANCE:
                    yield shape


def parse_size(text: str, where: str) -> int:
    """Read a number of parameters such as ``85M`` or ``1.5B``. Raises ``GenError`` for others."""
    found = re.fullmatch(
        r"([0-9]+(?:\.[0-9]+)?)([KMB]?)", str(text).strip().upper().replace("_", "")
    )
    size = round(float(found[1]) * SUFFIXES[found[2]]) if found else 0
    if size < 1:
        raise bad_value(where, text, "a number of parameters, such as 85M, 300M or 1.5B")
    return size


def parse_sizes(text: str, where: str) -> dict[str, int]:
    """Read sizes separated by commas: numbers of parameters by the size as it was written."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise bad_value(where, text, "sizes separated by commas, such as 85M,300M,1B")
    return {name: parse_size(name, where) for name in names}


def require_llama(name: str | Path) -> dict[str, Any]:
    """Return the config of a local model. Raises ``GenError`` for one that is no plain Llama."""
    config = read_config(name)
    found = config.get("model_type")
    if found not in KINDS:
        said = repr(found) if config else "a Hub id"
        raise GenError(
            f"model {name} is {said}, which cannot be inflated; expected a local model of the"
            f" Llama architecture ({' or '.join(KINDS)}), such as image-causal"
        )
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    for field, value, expected in (
        ("attention_bias", config.get("attention_bias", False), False),
        ("mlp_bias", config.get("mlp_bias", False), False),
        ("rope_type", rope.get("rope_type", "default"), "default"),
    ):
        if value != expected:
            raise GenError(
                f"model {name} has {field} {value!r}, which cannot be inflated; expected"
                f" {expected!r}"
            )
    return config


def enlarged_config(config: Mapping[str, Any], shape: Shape, seed: int) -> dict[str, Any]:
    """Return the config of the enlarged model."""
    small = Shape.of(config)
    return {
        **config,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "head_dim": shape.dim,
        "intermediate_size": shape.inner,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6) * small.width / shape.width,
        "inflated_from": {**asdict(small), "parameters": small.parameters, "seed": seed},
    }


def enlarged_weights(
    config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    shape: Shape,
    generator: torch.Generator | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the enlarged model by name, one at a time.

    Matrices keep their dtype. Norm weights are float64: smaller types do not hold their factor.

    Args:
        config: Config of the small model.
        weights: Tensors of the small model.
        shape: Shape of the enlarged one.
        generator: Generator of the random entries, which its device draws; None for seed 0.
    """
    small = Shape.of(config)
    random = generator or torch.Generator().manual_seed(0)
    scale = math.sqrt(small.width / shape.width)
    example = weights["model.embed_tokens.weight"]

    def norm(name: str, old: Tensor | None) -> tuple[str, Tensor]:
        new = torch.ones(shape.width, dtype=torch.float64)
        if old is not None:
            new[: small.width] = old.double() * scale
        return name, new

    def matrix(
        name: str, old: Tensor | None, size: tuple[int, int], rows: bool, columns: bool
    ) -> tuple[str, Tensor]:
        """Put ``old`` in the corner of a random matrix. ``rows``, ``columns``: whether the new ones
        are random; else they are zeros."""
        new = _drawn(size, random).to("cpu", example.dtype)
        height, breadth = (0, 0) if old is None else old.shape
        if not rows:
            new[height:] = 0
        if not columns:
            new[:, breadth:] = 0
        if old is not None:
            new[:height, :breadth] = old
        return name, new

    for name in weights:
        if ".layers." in name:
            continue
        old = weights[name]
        if name == "model.norm.weight":
            yield norm(name, old)
        else:
            is_head = name == "lm_head.weight"  # it alone reads the stream
            yield matrix(name, old, (len(old), shape.width), True, is_head)
    for n in range(shape.layers):
        prefix = f"model.layers.{n}."
        for part in NORMS:
            name = f"{prefix}{part}.weight"
            yield norm(name, weights.get(name))
        for part, (size, writes) in _projections(shape).items():
            name = f"{prefix}{part}.weight"
            old = weights.get(name)
            yield matrix(name, old, size, not writes, not writes)


def _drawn(size: tuple[int, int], generator: torch.Generator) -> Tensor:
    """Draw random entries on the generator's device."""
    return torch.randn(size, generator=generator, device=generator.device).mul_(STD)


def _projections(shape: Shape) -> dict[str, tuple[tuple[int, int], bool]]:
    """Return the sizes of a layer's matrices, and which of them write to the residual stream."""
    width, queries, keys = shape.width, shape.heads * shape.dim, shape.groups * shape.dim
    return {
        "self_attn.q_proj": ((queries, width), False),
        "self_attn.k_proj": ((keys, width), False),
        "self_attn.v_proj": ((keys, width), False),
        "self_attn.o_proj": ((width, queries), True),
        "mlp.gate_proj": ((shape.inner, width), False),
        "mlp.up_proj": ((shape.inner, width), False),
        "mlp.down_proj": ((width, shape.inner), True),
    }


def inflate(
    name: str | Path, parameters: int, out: str | Path, seed: int = 0, device: str = "cpu"
) -> dict[str, Any]:
    """Write an enlarged model as a folder, with the files beside the weights and a card.

    Args:
        name: Zoo name or folder of a model of the Llama architecture.
        parameters: Number of parameters, reached within 2 %.
        out: Folder that does not exist.
        seed: Seed of the random entries.
        device: Device that draws them; others draw other numbers, of the same function.

    Returns:
        Model, folder, shape and number of parameters, as plain data.

    Raises:
        GenError: another architecture, a size below the model's, an existing folder, a full disk.
    """
    config, out = require_llama(name), Path(out)
    if out.exists():
        raise bad_value("--out", str(out), "a folder that does not exist")
    if not out.parent.is_dir():
        raise bad_value("--out", str(out), "a folder inside one that exists")
    shape = Shape.of(config).enlarged(parameters)
    source = Path(locate(name))
    weights = Weights(_weight_source(source))
    size = weights["model.embed_tokens.weight"].element_size() * shape.parameters
    free = shutil.disk_usage(out.parent).free
    if size > free:
        raise GenError(
            f"the weights take {size / 1e9:.2f} GB and {out.parent.absolute()} has"
            f" {free / 1e9:.2f} GB free; expected a smaller --params or another --out"
        )
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        generator = torch.Generator(device).manual_seed(seed)
        _write_weights(work, enlarged_weights(config, weights, shape, generator), size)
        told = json.dumps(enlarged_config(config, shape, seed), indent=2)
        (work / "config.json").write_text(told + "\n")
        (work / "README.md").write_text(_card(name, Shape.of(config), shape, seed))
        for path in source.iterdir():
            if (
                path.is_file()
                and not path.name.startswith("model")
                and not (work / path.name).exists()
            ):
                shutil.copy(path, work / path.name)
        work.chmod(0o755)
        os.rename(work, out)
    except OSError as error:
        raise GenError(f"{out} cannot be written: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {"model": str(name), "folder": str(out), **asdict(shape), "parameters": shape.parameters}


def _weight_source(folder: Path) -> Path:
    """Return the file of the weights, or the folder if they are sharded."""
    file = folder / "model.safetensors"
    return file if file.is_file() else folder


def _write_weights(folder: Path, tensors: Iterator[tuple[str, Tensor]], total: int) -> None:
    """Write tensors to one file, or to shards with an index; one shard is in memory at a time."""
    shards = max(1, math.ceil(total / SHARD))
    part: dict[str, Tensor] = {}
    files: dict[str, str] = {}
    held = count = 0

    def flush() -> None:
        nonlocal held, count
        count += 1
        file = "model.safetensors" if shards == 1 else f"model-{count:05}.safetensors"
        with readable("model", folder / file):
            save_file(part, folder / file, metadata={"format": "pt"})
        files.update(dict.fromkeys(part, file))
        part.clear()
        held = 0

    for name, tensor in tensors:
        if held and shards > 1 and held + tensor.nbytes > SHARD:
            flush()
        part[name] = tensor
        held += tensor.nbytes
    flush()
    if shards > 1:
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def _card(name: str | Path, small: Shape, shape: Shape, seed: int) -> str:
    return f"""---
license: apache-2.0
tags: [gen]
---

# {Path(name).name}, inflated to {shape.parameters:,} parameters

A function-preserving enlargement of `{Path(name).name}` ({small.parameters:,} parameters): the same
logits up to rounding, at the cost of a model of this size. It is meant for measurements of speed;
it makes nothing that the small model does not make.

| | small | inflated |
| --- | --- | --- |
| width | {small.width} | {shape.width} |
| layers | {small.layers} | {shape.layers} |
| heads (with keys and values) | {small.heads} ({small.groups}) | {shape.heads} ({shape.groups}) |
| inner width of the MLP | {small.inner} | {shape.inner} |

New rows of output projections, new columns that read new heads or MLP channels, and both output
projections of new layers are zeros; norm weights and epsilon are scaled for the width. All other
new weights are random (seed {seed}), so matrices are dense in every multiplication.
`gen inflate {name} --params N --out DIR` writes such a folder.
"""

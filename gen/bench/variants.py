"""Rows of a benchmark: samplers and presets, their sweeps, and other implementations."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from itertools import product
from typing import Any

from yaml import YAMLError, safe_load

from gen.bench.table import REFERENCE
from gen.config.model_options import read_options
from gen.contracts.defaults import Defaults
from gen.core.errors import GenError, bad_value
from gen.core.resolve import resolve_sampler
from gen.jobs.defaults import requested_sampling

DEFAULT = "speculative_jacobi,sjd,scd_mc,maskgit,halton"


@dataclass(frozen=True)
class Variant:
    """Row of the table: a sampler, its parameters and its sampling parameters.

    Attributes:
        base, param, value: sampler, parameter and value of a sweep.
        peer: group of an implementation that is no sampler of this toolkit.
        make: function of a peer, ``make(items)``.
        serial: a peer that takes one item at a time.
        missing: reason why the row cannot run.
        asked: the row was requested by name, so a failure is an error.
    """

    label: str
    spec: dict[str, Any]
    sampling: dict[str, Any]
    base: str
    param: str | None = None
    value: Any = None
    peer: str | None = None
    make: Callable[[Sequence[Any]], Any] | None = field(default=None, compare=False)
    serial: bool = False
    missing: str | None = None
    asked: bool = True


def model_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options that the model is loaded with."""
    return {
        "model": args.model,
        "device": args.device or "cpu",
        "dtype": args.dtype or _defaults(args).dtype,
        "compile": bool(args.compile),
        **_options(args),
    }


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the model beside device, dtype and compile."""
    return read_options(args.model_option or (), "--model-option")


def _defaults(args: argparse.Namespace) -> Defaults:
    """Return the defaults of modality and model."""
    return Defaults.named(args.modality, args.model, _options(args), "the command line")


def choose(args: argparse.Namespace) -> list[Variant]:
    """Return the reference, then the requested rows. All are resolved, so a typo fails here."""
    names = [n.strip() for n in (args.samplers or DEFAULT).split(",") if n.strip()]
    grid = grid_of(args.sweep)
    variants, used = [], set()
    defaults = _defaults(args)
    for name in dict.fromkeys([REFERENCE, *names]):
        usual, sampling = defaults.complete(name, requested_sampling(args))
        has = {f.name for f in fields(resolve_sampler(name, sampling)[0])}
        mine = {param: values for param, values in grid.items() if param in has}
        used |= mine.keys()
        along = next(iter(mine), None)
        for values in product(*mine.values()):
            said = dict(zip(mine, values, strict=True))
            spec = {**usual, **said}
            base = " ".join([name, *(f"{k}={v}" for k, v in said.items() if k != along)])
            label = " ".join([name, *(f"{k}={v}" for k, v in said.items())])
            variants.append(
                Variant(
                    label,
                    spec,
                    resolve_sampler(spec, sampling)[1].to_dict(),
                    base,
                    along,
                    said.get(along),
                )
            )
    for param in grid:
        if param not in used:
            raise GenError(
                f"--sweep names {param!r}, a parameter that none of {', '.join(names)} has"
            )
    return variants


def grid_of(texts: Sequence[str] | None) -> dict[str, list[Any]]:
    """Parse ``["window=4,8", "coupling=fresh,gumbel"]`` to values per parameter.

    Raises:
        GenError: a text has another form, or a parameter comes twice.
    """
    grid: dict[str, list[Any]] = {}
    for text in texts or ():
        param, values = swept(text)
        if param in grid:
            raise GenError(
                f"--sweep names the parameter {param!r} twice; expected all values in one,"
                f" such as {param}=V,V"
            )
        grid[param] = values
    return grid


def swept(text: str) -> tuple[str, list[Any]]:
    """Parse ``window=4,8`` to a parameter and its values; raise ``GenError`` for another form."""
    param, _, values = text.partition("=")
    try:
        found = [safe_load(v) for v in values.split(",")]
    except YAMLError:
        found = [None]
    if not param.strip() or any(v is None or isinstance(v, (dict, list)) for v in found):
        raise bad_value("--sweep", text, "PARAM=VALUE,VALUE such as window=4,8")
    return param.strip(), list(dict.fromkeys(found))


def spec_of(text: str) -> dict[str, Any]:
    """Parse a sampler as ``speculative_jacobi window=8``."""
    name, *settings = text.split()
    return {"name": name, **{k: safe_load(v) for k, v in (s.split("=", 1) for s in settings)}}


def serves(pipe: Any, spec: Any, sampling: dict[str, Any] | None) -> bool:
    """Return True if the pipeline has the models for a sampler."""
    try:
        sampler = resolve_sampler(spec, sampling)[0]
        pipe.model_name(spec)
        if sampler.drafted:
            pipe.draft_names(spec)
    except GenError:
        return False
    return True

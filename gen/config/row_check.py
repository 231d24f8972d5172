"""Checks of input rows against their entry: its sampler takes their parameters, and their edits
fit."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from gen.config.canonical import plain, with_params
from gen.config.condition_rows import check_condition_files
from gen.config.rows import Row
from gen.core.edit_spec import MEDIA, EditSpec
from gen.core.errors import GenError, shown
from gen.core.paths import is_file
from gen.core.registry import registry


def row_check(
    sampler: Mapping[str, Any],
    sampling: Mapping[str, Any],
    start: EditSpec,
    located: Callable[[Row, object], str],
) -> Callable[[Row], Row]:
    """Return a function that gives every row back with the sampler's own names of its parameters,
    or with an ``error``.

    Args:
        sampler: of the entry, with all parameters; a set of row parameters is tried once.
        sampling: sampling parameters of the entry.
        start: the edit of the entry.
        located: adds the location of a row to a message.
    """
    tried: dict[str, tuple[dict[str, Any], GenError | None]] = {}

    def check(row: Row) -> Row:
        if row.error or not (row.sampler or row.sampling or row.start or row.condition):
            return row
        key = json.dumps([row.sampler, row.sampling], sort_keys=True)
        if key not in tried:
            tried[key] = _own_params(sampler, sampling, row)
        own, error = tried[key]
        try:
            if error is not None:
                raise error
            _check_start(start, row.start)
            check_condition_files(row.condition)
        except GenError as problem:
            return replace(row, error=located(row, problem))
        return replace(row, sampler=own)

    return check


def _own_params(
    sampler: Mapping[str, Any], sampling: Mapping[str, Any], row: Row
) -> tuple[dict[str, Any], GenError | None]:
    from gen.core.resolve import (  # imports torch, status needs none
        parameter_names,
        resolve_sampler,
    )

    try:
        preset = registry.table("preset").get(sampler["name"])
        cls = registry.get("sampler", preset.sampler if preset else sampler["name"], "a row")
        aliases = {**cls.aliases, **(preset.aliases if preset else {})}
        known = parameter_names(cls)
        own = [k if k in known else aliases.get(k, k) for k in row.sampler]
        # an alias is not the second name of a parameter
        rest = {k: v for k, v in sampler.items() if k not in own or k in row.sampler}
        node = with_params(rest, {k: v for k, v in row.sampler.items() if k != "name"})
        node["name"] = row.sampler.get("name", sampler["name"])
        made, _ = resolve_sampler(node, {**sampling, **row.sampling})
        return {k: plain(getattr(made, k)) for k in own}, None
    except GenError as error:
        return {}, error


def _check_start(start: EditSpec, own: Mapping[str, Any]) -> None:
    for key in MEDIA:
        if key in own and not is_file(own[key]):
            raise GenError(f"{key} is not a file: {shown(own[key])}")
    if own:
        EditSpec(**{**vars(start), **own})

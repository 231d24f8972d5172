"""Rows of a data set of the Hugging Face hub, or of a local one, through ``datasets``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gen.config.foreign import adopt_columns, missing_prompt
from gen.config.yaml_text import check_bounds
from gen.core.errors import GenError, bad_value, describe, unknown
from gen.core.paths import expand_user
from gen.core.trust import DATA_SET, refuse_untrusted

OPTIONS = ("path", "name", "split", "revision", "data_files", "data_dir")
MEDIA_TYPES = ("Image", "Audio", "Video", "Pdf", "Nifti")  # features that are no plain data


def check_options(options: Any, where: str) -> dict[str, Any]:
    """Check the value of ``prompts_dataset``: a path, or options of ``datasets.load_dataset``.

    Raises:
        GenError: an unknown option, a value of another kind, or one that reads pickles.
    """
    tree = {"path": options} if isinstance(options, str) else options
    if not isinstance(tree, Mapping) or "path" not in tree:
        raise bad_value("prompts_dataset", options, "a path, or {path: ..., split: ...}", where)
    for key, value in tree.items():
        if key not in OPTIONS:
            raise unknown("option of prompts_dataset", key, OPTIONS, where)
        if key != "data_files" and (not isinstance(value, str) or not value.strip()):
            raise bad_value(f"prompts_dataset.{key}", value, "a text", where)
    if "data_files" in tree:
        check_bounds(tree["data_files"], "prompts_dataset.data_files")
    refuse_untrusted({DATA_SET: dict(tree)}, where, trusted=True)
    split = str(tree.get("split", "train"))
    path = str(expand_user(tree["path"])) if tree["path"].startswith("~") else tree["path"]
    return {**tree, "path": path, "split": split}


def dataset_rows(
    options: Mapping[str, Any], column: str | None, where: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Read all rows of one split.

    Args:
        options: as ``check_options`` returns them.
        column: the column that holds the prompt; None for ``prompt``.
        where: origin of the options, for messages.

    Returns:
        The rows, with foreign columns under ``meta``, and the foreign columns.

    Raises:
        GenError: a data set that cannot be loaded, or that has no such column.
    """
    path = str(options["path"])
    data = _load(options, where)
    if column is None and "prompt" not in data.column_names:
        raise GenError(f"data set {path}: {missing_prompt(list(data.column_names))} ({where})")
    media = [k for k, f in data.features.items() if type(f).__name__ in MEDIA_TYPES]
    rows, foreign = [], dict.fromkeys(media)
    for i, got in enumerate(_values(data.remove_columns(media))):
        try:
            row, others = adopt_columns(got, column)
        except GenError as error:
            raise GenError(f"data set {path}, row {i + 1}: {error} ({where})") from None
        rows.append(row)
        foreign.update(dict.fromkeys(others))
    if not rows:
        raise GenError(f"data set {path} has no rows ({where}); expected at least one prompt")
    return rows, list(foreign)


def _load(options: Mapping[str, Any], where: str) -> Any:
    try:
        import datasets  # optional: the extra "datasets"
    except ImportError:
        raise GenError(
            f"prompts_dataset in {where} needs the package datasets; install it with: pip install"
            ' "gen-toolkit[datasets]"'
        ) from None
    path = Path(options["path"])
    how = {k: v for k, v in options.items() if k != "path"}
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(str(path))
            return found[options["split"]] if isinstance(found, Mapping) else found
        return datasets.load_dataset(str(options["path"]), **how)
    except Exception as error:  # of the hub, of files, of any builder
        raise GenError(
            f"data set {options['path']} in {where} cannot be loaded: {describe(error)}"
        ) from error


def _values(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows without values that say nothing."""
    for row in data:
        yield {k: v for k, v in row.items() if v is not None}

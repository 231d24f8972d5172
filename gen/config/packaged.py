"""Configs that come with gen, by name: ``image/sjd``, and training files: ``train/image-quick``."""

from __future__ import annotations

from pathlib import Path

from gen.core.errors import GenError, unknown
from gen.core.paths import package_folders

TRAINING = "train/"  # begins the names of training files


def packaged(training: bool = False) -> dict[str, Path]:
    """List the configs that come with gen: ``image/sjd`` -> its file.

    ``training``: the training files instead of the job files.
    """
    found: dict[str, Path] = {}
    for root in reversed(package_folders("configs")):
        for path in sorted(root.rglob("*.yaml")):
            name = path.relative_to(root).with_suffix("").as_posix()
            if name.startswith(TRAINING) == training:
                found[name] = path
    return dict(sorted(found.items()))


def find_config(path_or_name: str | Path, training: bool = False) -> Path:
    """Find a config: a path if there is such a file, else a packaged config (``configs/`` in
    front and ``.yaml`` behind may stay).

    ``training``: a training file instead of a job file.
    """
    path = Path(path_or_name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.yaml").is_file():
        raise GenError(f"{path} is a job folder; its config is {path / 'config.yaml'}")
    known = packaged(training)
    name = path.as_posix().removeprefix("configs/").removesuffix(".yaml")
    if name not in known:
        raise unknown(
            "config", str(path_or_name), known, "the working directory and the packaged configs"
        )
    return known[name]

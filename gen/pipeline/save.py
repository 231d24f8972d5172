"""Save a pipeline to a folder that stands alone.

The record ``gen_pipeline.json`` names the modality, the model below the folder, the dtype and the
options of the model's family. A published checkpoint is saved in its published layout: the files
that loading it read are copied as they are, and the record's dtype makes loading convert them in
the same way. A model that was read from a GGUF file is written from memory, as a folder of
transformers. A model of gen's own architectures is written from memory, with its frontend and its
draft model in folders beside it. A draft model that the pipeline was loaded with is copied. Device,
``device_map`` and ``trust_remote_code`` are not saved.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub

from gen.contracts.checkpoint import PASSES, WEIGHTS, Checkpoint
from gen.contracts.protocol import model_key
from gen.core.errors import GenError, bad_type, bad_value
from gen.core.files import writing
from gen.core.resolve import SamplerSpec
from gen.modalities.own_captions import OwnCaptions
from gen.modalities.text_encoder import BESIDE
from gen.models.load.locate import ZOO, model_kind, save_model
from gen.models.load.networks import config_field
from gen.models.load.reads import ENDINGS, TEXTS
from gen.models.load.saved import RECORD
from gen.pipeline.card import card_of
from gen.pipeline.models import ModalityModels

DRAFT = "draft_model"  # folder of the draft model that a pipeline was loaded with
ARITHMETIC = ("attn_implementation",)  # options of loading that a saved pipeline keeps


def save_pipeline(
    pipe: ModalityModels,
    folder: str | Path,
    sampler: SamplerSpec | None = None,
    max_shard_size: int | str = "5GB",
) -> Path:
    """Write a pipeline to a new or empty folder; see ``Pipeline.save_pretrained``."""
    if not isinstance(folder, (str, Path)) or not str(folder):
        raise bad_type("folder", folder, "a path")
    target = Path(folder).expanduser().absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise bad_value("folder", str(folder), "a folder that is new or empty")
    changed = [key for key in (*WEIGHTS, *PASSES) if key in pipe.model_options]
    if changed:
        raise GenError(
            f"the pipeline was loaded with {' and '.join(changed)}, and weights are saved as they"
            " are stored; expected a pipeline without, and the keyword for gen.load later"
        )
    modality = pipe.modality_name()
    name = pipe.model_name(pipe.defaults.complete_sampler(sampler))
    model, _, _ = pipe.bound(name)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        with writing(target):
            if isinstance(model, Checkpoint) and pipe.files(name).gguf is not None:
                record = _save_converted(pipe, model, name, work, max_shard_size)
            elif isinstance(model, Checkpoint):
                record = _save_published(pipe, model, name, work)
            else:
                record = _save_own(pipe, model, name, work, max_shard_size)
            if pipe.draft_model is not None:
                _add_draft(pipe, record, work)
            dtype = str(pipe.dtype).removeprefix("torch.")
            record = {"modality": modality, "dtype": dtype, **record}
            (work / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
            card = card_of(pipe, name, model, pipe.files(name))
            (work / "README.md").write_text(card, encoding="utf-8")
            work.chmod(0o755)
            os.replace(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _save_own(
    pipe: ModalityModels, model: Any, name: str, work: Path, max_shard_size: int | str
) -> dict[str, Any]:
    """Write a model of gen's own architectures from memory, and copy what lies beside it."""
    source = pipe.files(name).path
    _copy_tree(source, work / source.name, lambda p: not p.name.startswith("model"))
    save_model(model, work / source.name, max_shard_size=max_shard_size)
    kind = model_kind(source)
    beside = [config_field(model.config, "frontend") or pipe.modality.frontends[kind]]
    if isinstance(pipe.modality, OwnCaptions):
        if pipe.modality.text_encoder is not None:
            inside = work / source.name / BESIDE
            shutil.rmtree(inside, ignore_errors=True)  # its texts were copied with the model's
            _copy_tree(pipe.modality.text_encoder.folder, inside, lambda p: True)
        if pipe.modality.medium is not None:
            beside.append(pipe.modality.medium.frontend_name)
    protocols, _ = pipe.serves(name)
    if pipe.draft_model is None:
        beside += [pipe.modality.models.get(model_key(p, kind, True)) for p in protocols]
    for other in dict.fromkeys(filter(None, beside)):
        own = source.parent / other
        folder = own if own.is_dir() else ZOO / other
        if folder.is_dir() and not (work / other).exists():
            _copy_tree(folder, work / other, lambda p: True)
    options = {k: pipe.model_options[k] for k in ARITHMETIC if k in pipe.model_options}
    return {"model": source.name, "options": options, "paths": []}


def _add_draft(pipe: ModalityModels, record: dict[str, Any], work: Path) -> None:
    """Copy the draft model that the pipeline was loaded with, as it is stored."""
    assert pipe.draft_model is not None
    source = pipe.files(pipe.draft_model.name).folder
    _copy_tree(source, work / DRAFT, lambda path: True)
    record["options"] = {**record["options"], "draft_model": DRAFT}
    record["paths"] = [*record["paths"], "draft_model"]


def _save_converted(
    pipe: ModalityModels, model: Checkpoint, name: str, work: Path, max_shard_size: int | str
) -> dict[str, Any]:
    """Write a model of a GGUF file as safetensors with its config, tokenizer and generation config.

    The tokenizer brings its chat template.
    """
    gguf = pipe.files(name).gguf
    assert gguf is not None
    save_model(gguf.tokenizer(), work)
    save_model(model.adapter(model.protocols[0]).model, work, max_shard_size=max_shard_size)
    kept = {k: pipe.model_options[k] for k in ARITHMETIC if k in pipe.model_options}
    options = {**model.settled, **kept, **pipe.family_options()}
    return {"model": ".", "options": options, "paths": []}


def _save_published(
    pipe: ModalityModels, model: Checkpoint, name: str, work: Path
) -> dict[str, Any]:
    """Copy the files that a published checkpoint was loaded from.

    Raises:
        GenError: the weights in memory are no longer those of the files.
    """
    if not model.reads.is_unchanged():
        raise GenError(
            f"the weights of model {name} were changed after loading, and a published layout is"
            " saved from its files; expected the weights as they were loaded"
        )
    files = pipe.files(name)
    read = set(model.reads.files)
    if files.path.is_dir():
        read |= {p for p in _files_under(files.path) if p.suffix in TEXTS}
    options, paths = dict(model.settled), []
    for key in ("variant", *ARITHMETIC):
        if key in pipe.model_options:
            options[key] = pipe.model_options[key]
    for key, value in pipe.family_options().items():
        options[key] = str(value) if isinstance(value, Path) else value
        given = _path_of(files.folder, value, read)
        if given is None:
            continue
        inside = given.is_relative_to(files.folder.absolute())
        if not inside:
            taken = {p for p in read if p == given or p.is_relative_to(given)}
            for path in taken:
                end = path.relative_to(given.parent)
                _copy_file(path, work / f"option_{key}" / end)
            read -= taken
        options[key] = given if inside else Path(f"option_{key}") / given.name
        paths.append(key)
    root = Path(os.path.commonpath([files.folder.absolute(), *(p.parent for p in read)]))
    for path in sorted(read):
        _copy_file(path, work / path.relative_to(root))
    for key in paths:
        if options[key].is_absolute():
            options[key] = options[key].relative_to(root)
        options[key] = options[key].as_posix()
    return {
        "model": files.path.absolute().relative_to(root).as_posix(),
        "options": options,
        "paths": paths,
    }


def _path_of(folder: Path, value: Any, read: set[Path]) -> Path | None:
    """Return the path that an option names, if something was read there."""
    if not isinstance(value, (str, Path)) or not str(value):
        return None
    for path in ((folder / value).absolute(), Path(value).expanduser().absolute()):
        if any(p == path or p.is_relative_to(path) for p in read):
            return path
    return None


def _files_under(folder: Path) -> list[Path]:
    """Return the files under a folder, without hidden ones and those in hidden folders."""
    found = []
    for path in sorted(folder.absolute().rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder.absolute()).parts)
        if path.is_file() and not hidden:
            found.append(path)
    return found


def _copy_tree(source: Path, target: Path, wanted: Callable[[Path], bool]) -> None:
    """Copy the wanted configs, cards and weights under a folder."""
    target.mkdir()
    for path in _files_under(source):
        if path.suffix in (*TEXTS, *ENDINGS, ".md") and wanted(path):
            _copy_file(path, target / path.relative_to(source.absolute()))


def _copy_file(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)


def push_pipeline(
    pipe: ModalityModels,
    repo_id: str,
    revision: str | None,
    private: bool | None,
    token: str | None,
    commit_message: str | None,
    saving: tuple[SamplerSpec | None, int | str],
) -> str:
    """Upload a saved pipeline; see ``Pipeline.push_to_hub``."""
    with tempfile.TemporaryDirectory() as parent:
        folder = save_pipeline(pipe, Path(parent) / "pipeline", *saving)
        api = huggingface_hub.HfApi(token=token)
        try:
            repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=commit_message or "Upload a pipeline of gen",
            )
        except (OSError, ValueError) as error:  # all errors of the hub are one of these
            reason = " ".join(str(error).split())[:600]
            raise GenError(f"the hub does not take {repo_id}: {reason}") from None
    return commit.commit_url

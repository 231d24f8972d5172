"""``gen encode``: media of a folder to shards of tokens.

Shards are ranges of sources, each written once and whole. The same command goes on where the last
one ended, within a shard too, and makes damaged shards again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gen.contracts.condition import Condition
from gen.core.checks import check_int
from gen.core.condition_parts import KINDS
from gen.core.errors import GenError, bad_value, cut_list, describe, unknown
from gen.core.files import put_text, sha256, sweep_temporaries
from gen.core.tables import plural
from gen.jobs.progress.report import Silent
from gen.media.fit import BUCKET, FITS, Size, bucket
from gen.media.given import is_data_uri
from gen.modalities.condition_medium import MODALITIES, ConditionMedium
from gen.modalities.text_encoder import TextEncoder
from gen.tokenizers.text.trained import TrainedTokenizer
from gen.training.copies import require_shiftable, shifted_copies
from gen.training.frontends import (
    Encoder,
    load_encoder,
    modality_of,
    own_encoder,
    size_of,
)
from gen.training.prompts import (
    AUTO,
    BUILT_IN,
    OWN,
    STATES,
    VOCAB_SIZE,
    Captions,
    Choice,
    texts_of,
    write_states,
)
from gen.training.reconstruction import (
    FIGURES,
    FOLDER,
    SHOWN,
    limit_text,
    measured_kind,
    reconstruct,
)
from gen.training.shards import (
    MANIFEST,
    Shard,
    fingerprint,
    open_folder,
    part_path,
    read_json,
    read_shard,
    shard_path,
    write_manifest,
    write_shard,
)
from gen.training.sources import (
    Found,
    Medium,
    Source,
    find_sources,
    read_source,
    spelled_counts,
)
from gen.training.survey import Survey

TRANSCRIBED = ("speech",)  # modalities whose captions are of no window of a medium
BATCH = 16  # sources that are read and encoded together, and kept from then on


@dataclass(frozen=True)
class EncodeOptions:
    """Options of an encoding.

    Attributes:
        frontend: zoo name or folder of the frontend; None for the modality's own.
        size: size of the media, such as ``64x64``; None for that of the modality's own models.
        resize: how media of another size are made to fit (``gen.media.fit.Size``): ``crop``,
            ``pad`` or ``bucket``; empty refuses them.
        skip_unreadable: leave out files that cannot be read.
        shard_items: sources of a shard.
        device: device of the frontend.
        tokenizer: tokenizer of captions or texts: ``built-in``, the language of the modality;
            ``own``, one that is trained on them; a folder with one; or ``auto``, one that is
            trained where the built-in language lacks most of them.
        vocab_size: most tokens of a tokenizer that is trained.
        text_encoder: folder of a model whose states are the conditions, instead of a tokenizer.
        labels: where labels are that stand for captions: ``folders``, or a field of
            ``metadata.jsonl``; empty for captions.
        skeleton: JSON file with the joint of BVH files for every joint of gen's; None for the usual
            names.
        copies: codes of every image or sound: those of the medium, and of copies that are shifted a
            little (``gen.training.copies``).
        given: folder of media of the same names, which stand in the conditions; None for those that
            a table states, if it does.
        given_frontend: zoo name or folder of their frontend; None for that of the media if both are
            of one modality, else for their modality's own.
        given_size: size of them; None for that of the media if both are of one modality, else for
            that of their modality's own models.
    """

    frontend: str | None = None
    size: str | None = None
    resize: str = ""
    skip_unreadable: bool = False
    shard_items: int = 256
    device: str = "cpu"
    tokenizer: str = AUTO
    vocab_size: int = VOCAB_SIZE
    copies: int = 1
    text_encoder: str | None = None
    labels: str = ""
    skeleton: str | None = None
    given: str | None = None
    given_frontend: str | None = None
    given_size: str | None = None


def encode_folder(
    modality: str,
    folder: str | Path,
    out: str | Path,
    options: EncodeOptions | None = None,
    progress: Silent | None = None,
) -> dict[str, Any]:
    """Encode the media of a folder.

    Args:
        modality: name of the modality.
        folder: media, with captions beside them or in ``metadata.jsonl``.
        out: folder of the shards.
        options: see ``EncodeOptions``.
        progress: receives progress.

    Returns:
        The manifest. ``skipped`` has the reasons of files that cannot be read, ``left_out`` the
        numbers of files of other kinds, by extension.

    Raises:
        GenError: no media, files that cannot be read (all of them are named, and all others are
            kept), media of another size, or a folder that cannot be written.
    """
    options, progress, dest = options or EncodeOptions(), progress or Silent(), Path(out)
    check_options(options, modality)
    found, encoder, size = prepare(modality, folder, options, progress)
    sources = found.sources
    text_encoder = find_text_encoder(options, encoder, sources)
    medium = find_medium(options, found, encoder, size, progress)
    asked = options.tokenizer if text_encoder is None else BUILT_IN
    if medium is not None and asked == AUTO:  # the built-in language is one of captions alone
        asked = OWN if texts_of(sources) else BUILT_IN
    choice = Choice.of(asked, options.vocab_size, encoder, sources)
    tokenizer = choice.tokenizer(dest, encoder, sources)
    reads, captions = text_encoder or tokenizer, None
    if tokenizer is not None and modality == "text":
        encoder = own_encoder(tokenizer, encoder)
    elif reads is not None:
        captions = Captions.fitted(reads, sources)
    about = describe_tokens(encoder, size) | describe_conditions(captions, medium)
    if options.copies > 1:
        about["copies"] = options.copies
    plan = make_plan({**about, **choice.to_dict()}, options, sources)
    if note := open_folder(dest, plan):
        progress.note(note)
    sweep_temporaries(dest)
    if reads is not None:
        keep_reader(reads, captions, sources, dest)
        progress.note(f"{describe_reader(reads, captions)}. {choice.reason}".rstrip(" ."))
    skeleton = None if options.skeleton is None else read_json(Path(options.skeleton))
    work = Encoding(encoder, size, captions, options.copies, skeleton, medium)
    about.update(measured(work, sources, dest, fingerprint(plan), progress))
    shards = _shards(work, sources, dest, fingerprint(plan), options, progress)
    hint = "" if choice.is_own else choice.reason
    refuse_unreadable(shards, sources, folder, options.skip_unreadable, hint)
    about["left_out"] = found.left_out
    return write_manifest(dest, {"plan": fingerprint(plan), **about}, shards)


def check_options(options: EncodeOptions, modality: str) -> None:
    """Raise ``GenError`` for numbers or names that no option has."""
    check_int("shard_items", options.shard_items, 1)
    check_int("copies", options.copies, 1)
    if options.resize not in ("", *FITS):
        raise unknown("resize", options.resize, FITS)
    require_shiftable(modality, options.copies)
    if options.skeleton is not None and modality != "motion":
        raise bad_value("skeleton", options.skeleton, f"none for modality {modality!r}")


def find_text_encoder(
    options: EncodeOptions, encoder: Encoder, sources: list[Source]
) -> TextEncoder | None:
    """Return the text encoder that is asked for, if any.

    Raises:
        GenError: it cannot be read, a tokenizer is asked for as well, or the media have no
            captions.
    """
    if options.text_encoder is None:
        return None
    if options.tokenizer != AUTO:
        raise bad_value("tokenizer", options.tokenizer, "none beside a text encoder")
    modality = encoder.modality
    if modality.name == "text" or "observation" in modality.accepts:
        raise bad_value("text_encoder", options.text_encoder, f"none for modality {modality.name}")
    if not texts_of(sources):
        raise GenError("no medium has a caption that a text encoder could read; expected some")
    return TextEncoder(options.text_encoder)


def find_medium(
    options: EncodeOptions, found: Found, encoder: Encoder, size: Size, progress: Silent
) -> ConditionMedium | None:
    """Return what is read of the media in the conditions; None where there are none.

    Raises:
        GenError: options that do not go with such conditions, or without them.
    """
    if found.pairs is None:
        for key in ("given_frontend", "given_size"):
            if (value := getattr(options, key)) is not None:
                raise bad_value(key, value, "media in the conditions, too (--given FOLDER)")
        return None
    if options.copies > 1:
        raise bad_value("copies", options.copies, "1 beside media in the conditions")
    if options.tokenizer == BUILT_IN and texts_of(found.sources):
        expected = f"{OWN!r} for captions beside media in the conditions"
        raise bad_value("tokenizer", options.tokenizer, expected)
    part, name, asked = found.pairs.part, options.given_frontend, options.given_size
    is_same = MODALITIES[part] == encoder.modality.name
    if is_same:
        name, asked = name or encoder.name, asked or "x".join(map(str, size.axes))
    reads = load_encoder(MODALITIES[part], name)  # on the CPU, as in every call of the model
    shape = size_of(reads, asked, options.resize)
    survey = Survey.of([Source(str(path), path) for path in found.pairs.files], KINDS[part])
    rate = reads.frontend.rate or reads.modality.frame_rate
    for line in (*survey.lines(), *survey.fitted(shape, rate)):
        progress.note(f"in the conditions: {line}")
    is_shared = is_same and reads.digest == encoder.digest
    return ConditionMedium.of_frontend(part, reads.name, reads.frontend, shape, is_shared)


def prepare(
    modality: str, folder: str | Path, options: EncodeOptions, progress: Silent
) -> tuple[Found, Encoder, Size]:
    """Say what is in a folder by the headers of its files, load the frontend, and say how the
    media are made to fit.

    Returns:
        What the folder holds, the encoder, and the size that media must have.
    """
    kind = modality_of(modality).media_kind
    found = find_sources(folder, modality, options.labels, options.given)
    survey = Survey.of(found.sources, str(kind))
    for line in (*survey.lines(), *(found.pairs.lines() if found.pairs else ())):
        progress.note(line)
    if found.left_out:
        count = plural(sum(found.left_out.values()), "file")
        progress.note(f"left out {count} of other kinds: {spelled_counts(found.left_out)}")
    encoder = load_encoder(modality, options.frontend, options.device)
    size = fitting(encoder, options, survey)
    for line in survey.fitted(size, encoder.frontend.rate or encoder.modality.frame_rate):
        progress.note(line)
    return found, encoder, size


def fitting(encoder: Encoder, options: EncodeOptions, survey: Survey) -> Size:
    """Return the size that media must have; with ``bucket`` one that fits the folder's media."""
    size = size_of(encoder, options.size, options.resize)
    if options.resize == BUCKET and options.size is None and len(size.axes) > 1:
        steps = encoder.frontend.config.compression
        chosen = bucket(survey.sizes, size.axes[-2:], steps[-2:])
        return replace(size, axes=(*size.axes[:-2], *chosen))
    return size


def measured(
    work: Encoding, sources: list[Source], dest: Path, mark: str, progress: Silent
) -> dict[str, Any]:
    """Encode and decode the first media, and draw them: what the frontend keeps of them.

    Returns:
        ``reconstruction`` for the manifest; nothing for media that cannot be measured.
    """
    if measured_kind(work.encoder.modality) is None:
        return {}
    kept = dest / FOLDER / FIGURES
    if kept.is_file() and (found := read_json(kept)).pop("plan", "") == mark:
        return {"reconstruction": found}
    signals: list[Tensor] = []
    for source in sources[: 2 * SHOWN]:
        if len(signals) < SHOWN:
            try:
                signals += [signal for _, _, signal in work.read(source)]
            except Exception:  # the encoding says which files cannot be read
                continue
    made = reconstruct(work.encoder, signals)
    if made is None:
        return {}
    progress.note(f"{made} after {work.encoder.name} alone: {made.write(dest)}")
    if made.is_limit:
        progress.note(limit_text(work.encoder.modality.name))
    put_text(kept, json.dumps({**made.to_dict(), "plan": mark}) + "\n")
    return {"reconstruction": made.to_dict()}


def make_plan(
    about: dict[str, Any], options: EncodeOptions, sources: list[Source]
) -> dict[str, Any]:
    """Return what is encoded and how: ``about``, the sources, and digests of their files."""
    return {
        **about,
        "shard_items": options.shard_items,
        **({} if options.skeleton is None else {"skeleton": sha256(Path(options.skeleton))}),
        "files": {p: sha256(Path(p)) for p in sorted({*map(str, files_of(sources))})},
        "sources": [[s.name, s.condition] for s in sources],
    }


def files_of(sources: list[Source]) -> list[str | Path]:
    """Return the files of sources and of the media in their conditions."""
    found: list[str | Path] = [s.path for s in sources]
    for parts in (source.condition or {} for source in sources):
        found += [path for kind in KINDS for path in parts.get(kind, ()) if not is_data_uri(path)]
    return found


def describe_tokens(encoder: Encoder, size: Size) -> dict[str, Any]:
    """Return what a manifest says of all tokens: modality, frontend, size of media and grid."""
    config = encoder.frontend.config
    return {
        "modality": encoder.modality.name,
        "frontend": {
            "name": encoder.name,
            "class": type(encoder.frontend).__name__,
            "digest": encoder.digest,
            "kind": config.kind,
            "codebook_sizes": list(config.codebook_sizes),
        },
        "size": list(size.axes),
        "grid": list(encoder.grid(size)),
        "resize": size.resize,
    }


def describe_conditions(
    captions: Captions | None, medium: ConditionMedium | None
) -> dict[str, Any]:
    """Return what a manifest says of captions with a tokenizer of their own, and of media in the
    conditions."""
    found = {"captions": captions, "given": medium}
    return {name: part.to_dict() for name, part in found.items() if part is not None}


def keep_reader(
    reads: TrainedTokenizer | TextEncoder,
    captions: Captions | None,
    sources: list[Source],
    dest: Path,
) -> None:
    """Write a tokenizer into the folder of an encoding, or the states of a text encoder."""
    if isinstance(reads, TrainedTokenizer):
        reads.save(dest)
    elif captions is not None:
        write_states(dest / STATES, reads, captions.fitting(sources))


def describe_reader(reads: TrainedTokenizer | TextEncoder, captions: Captions | None) -> str:
    """Spell how captions or texts are read."""
    if isinstance(reads, TextEncoder):
        size = f"states of {reads.folder.name} ({reads.kind}), {reads.width} channels"
    else:
        size = f"byte-level tokenizer of {reads.size} tokens"
    if captions is None:
        return f"texts: {size}"
    return f"captions: {size}, prompts of {captions.slots}"


def _shards(
    work: Encoding,
    sources: list[Source],
    dest: Path,
    mark: str,
    options: EncodeOptions,
    progress: Silent,
) -> list[Shard]:
    """Read the shards that are there, and encode and write the others.

    A shard without some of its sources is written only where these may be skipped.
    """
    items = options.shard_items
    parts = [sources[i : i + items] for i in range(0, len(sources), items)]
    found = [read_shard(shard_path(dest, i), mark) for i in range(len(parts))]
    if not options.skip_unreadable:
        found = [None if s is None or s.skipped else s for s in found]
    if None in found:
        (dest / MANIFEST).unlink(missing_ok=True)
    shards = []
    progress.start(len(sources), sum(len(p) for p, s in zip(parts, found, strict=True) if s))
    try:
        for number, (part, shard) in enumerate(zip(parts, found, strict=True)):
            if shard is None:
                files = part_path(dest, number), shard_path(dest, number)
                shard = _shard(work, part, files, mark, options, progress)
            shards.append(shard)
    finally:
        progress.close()
    return shards


def _shard(
    work: Encoding,
    sources: list[Source],
    files: tuple[Path, Path],
    mark: str,
    options: EncodeOptions,
    progress: Silent,
) -> Shard:
    """Go on with the part of a shard that is there, and write the shard (``files``: of both)."""
    partial, whole = files
    shard = read_shard(partial, mark) or Shard()
    if shard.skipped and not options.skip_unreadable:
        shard = Shard()
    progress.items(shard.read)
    while shard.read < len(sources):
        some = sources[shard.read : shard.read + BATCH]
        work.add(shard, some)
        progress.items(len(some))
        if shard.skipped and not options.skip_unreadable:
            continue
        is_done = shard.read == len(sources)
        write_shard(whole if is_done else partial, shard, mark)
        if is_done:
            partial.unlink(missing_ok=True)
    return shard


def refuse_unreadable(
    shards: list[Shard], sources: list[Source], folder: str | Path, may_skip: bool, hint: str
) -> None:
    """Raise ``GenError`` with the names of all files that cannot be read and a hint, unless they
    may be left out; and where none can be read."""
    skipped = {name: reason for shard in shards for name, reason in shard.skipped.items()}
    total = plural(len(sources), "source")
    if skipped and not may_skip:
        raise GenError(
            f"{len(skipped)} of {total} cannot be read: {spelled_reasons(skipped, 10)}. The others"
            f" are encoded; --skip-unreadable leaves these out{hint}"
        )
    if not any(shard.tokens for shard in shards):
        raise GenError(
            f"none of the {total} of {folder} can be read: {spelled_reasons(skipped, 3)}"
        )


def spelled_reasons(skipped: dict[str, str], most: int) -> str:
    """Spell the first ``most`` files that were not read, with the reasons."""
    return "; ".join(cut_list([f"{name} ({reason})" for name, reason in skipped.items()], most))


@dataclass(frozen=True)
class Encoding:
    """Encoding of sources, some after the others.

    Attributes:
        encoder: frontend of the media.
        size: size that media must have.
        captions: captions with a tokenizer of their own; None for the modality's language.
        copies: samples of every medium, one behind the other.
        skeleton: joint of BVH files for every joint of gen's; None for the usual names.
        medium: what is read of the media in the conditions; None where there are none.
    """

    encoder: Encoder
    size: Size
    captions: Captions | None = None
    copies: int = 1
    skeleton: dict[str, str] | None = None
    medium: ConditionMedium | None = None

    def add(self, out: Shard, sources: list[Source]) -> None:
        """Read and encode sources that follow those of a shard. Raises ``GenError`` for media of
        another size."""
        signals: list[Tensor] = []
        for source in sources:
            try:
                found, given = self.read(source), self.given(source)
            except Exception as error:  # what a decoder of files raises is open
                out.skipped[source.name] = describe(error)
                continue
            for name, condition, signal in found:
                signals += shifted_copies(signal, self.copies, name)
                out.sources += [name] * self.copies
                out.conditions += [condition] * self.copies
                out.given += given
        for first in range(0, len(signals), BATCH):
            out.tokens += self.encoder.sequences(signals[first : first + BATCH])
        out.read += len(sources)

    def given(self, source: Source) -> list[Tensor]:
        """Return the tokens of the medium in a source's condition, long [slots], if there is one.

        Raises:
            GenError: it cannot be read, or has another size.
        """
        if self.medium is None:
            return []
        return [torch.tensor(self.medium.ids(self.medium.read(Condition.of(source.condition))))]

    def read(self, source: Source) -> list[tuple[str, dict[str, Any] | None, Tensor]]:
        """Read a source: name, condition and signal of every sample.

        Raises:
            GenError: the file cannot be read, or has another size or condition.
        """
        if source.problem:
            raise GenError(source.problem)
        modality, rate = self.encoder.modality, self.encoder.frontend.rate
        resize, horizon = bool(self.size.resize), self.encoder.horizon
        media = read_source(source, modality, horizon, resize, rate, self.skeleton)
        self._check_conditions(media)
        parts = []
        for medium in media:
            fitted = self.size.fit(medium.media, source.name)
            is_whole = modality.name in TRANSCRIBED or self.medium is not None
            if len(fitted) > 1 and medium.condition and is_whole:
                what = "transcript" if self.medium is None else "condition"
                count, step = len(medium.media), self.encoder.frontend.config.compression[0]
                second = rate or modality.frame_rate
                raise GenError(
                    f"{source.name} lasts {count / second:.2f} s, and its {what} is of all of it;"
                    f" expected at most {self.size.axes[0] / second:g} s (--size"
                    f" {-(-count // step) * step} makes room)"
                )
            parts += [(medium.condition, self.encoder.frontend.preprocess(m)) for m in fitted]
        names = (
            [source.name] if len(parts) == 1 else [f"{source.name}#{i}" for i in range(len(parts))]
        )
        return [(name, *part) for name, part in zip(names, parts, strict=True)]

    def _check_conditions(self, media: list[Medium]) -> None:
        """Refuse conditions that the models of these tokens do not understand."""
        if self.encoder.is_open:
            return
        for medium in media:
            if medium.condition is not None and self.captions is not None:
                self.captions.check(medium.condition)
            elif medium.condition is not None and self.medium is None:
                check_condition(self.encoder, medium.condition)


def check_condition(encoder: Encoder, parts: dict[str, Any]) -> None:
    """Raise ``GenError`` for a condition that does not parse, or that misses what a model is
    told."""
    modality = encoder.modality
    condition = Condition.of(parts)
    parsed = modality.parse(condition)
    if "observation" in modality.accepts and condition.observation is None:
        raise GenError(
            f"the condition {str(parsed)!r} has no state; expected the observation that the"
            " actions start from"
        )

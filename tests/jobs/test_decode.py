"""``gen decode``: a folder of media made of the tokens that a job kept."""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import families
import pytest
import torch
from ledgers import write_rows
from safetensors.torch import load_file, save_file

from gen.cli.check import check_folder
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.jobs.decode import decode, decode_folder
from gen.jobs.run import run_job
from gen.models.load.locate import ZOO
from gen.store.ledger import read_plan, read_rows
from gen.store.manifest import damaged
from gen.tokenizers.text.words import TextWords

CLOSE, SUM = "close ( [ {", "close [ [ ("


def tokens_job(out: Path, **keys) -> Path:
    tree = {
        "modality": "text",
        "prompts": [CLOSE, SUM],
        "num_samples": 2,
        "tokens": True,
        "out": str(out),
        "trace": 0,
        "sampling": {},
        **keys,
    }
    assert not run_job(make_job(tree, where="a test"))["failed"]
    return out


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished job of texts with its tokens. Only to be read."""
    return tokens_job(tmp_path_factory.mktemp("texts") / "job")


@pytest.fixture
def source(made, tmp_path):
    return Path(shutil.copytree(made, tmp_path / "source"))


def media(folder: Path) -> dict[str, bytes]:
    return {
        r["file"]: (folder / r["file"]).read_bytes()
        for r in read_rows(folder)
        if r["status"] == "ok"
    }


def manifest_without(folder: Path, *indices: int) -> None:
    rows = [r for r in read_rows(folder) if r["index"] not in indices]
    write_rows(folder / "manifest.jsonl", rows)


def other_words(folder: Path) -> Path:
    """A frontend with the same number of words in another order."""
    own = TextWords.from_pretrained(ZOO / "text-words")
    TextWords.of(own.words[::-1], own.positions).save_pretrained(folder)
    return folder


# --- what comes out


@pytest.mark.parametrize("layout", ["files", "shards"])
def test_a_decoded_folder_holds_the_same_media_and_can_be_looked_at_and_checked(layout, tmp_path):
    entries = [
        {"modality": "text", "prompts": [CLOSE], "num_samples": 2},
        {"modality": "action", "prompts": ["reach"], "num_samples": 1, "model": "action-fast"},
    ]
    job = tokens_job(tmp_path / "job", modality=None, prompts=None, jobs=entries, layout=layout)
    summary = decode_folder(job, tmp_path / "out")
    rows, again = read_rows(job), read_rows(tmp_path / "out")
    assert (summary["made"], summary["skipped"], summary["identical"], summary["notes"]) == (
        3,
        0,
        3,
        [],
    )
    for old, new in zip(rows, again, strict=True):
        assert (
            old["sha256"] == new["sha256"] == new["source_sha256"]
            and "tokens_file" not in new
            and "member" not in new
        )
        assert new["file"] == (old.get("member") or old["file"]) and new["decoded_with"]["digest"]
        same = ("id", "index", "prompt", "seed", "sampler", "nfe", "status")
        assert {k: old[k] for k in same} == {k: new[k] for k in same}
        sidecar = json.loads((tmp_path / "out" / new["file"]).with_suffix(".json").read_text())
        assert (
            sidecar["job"]["prompts"] == [old["prompt"]]
            and sidecar["decoded_with"] == new["decoded_with"]
        )
    if layout == "files":
        further = [n for r in rows for n in (r["file"], *r.get("also", ()))]
        assert len(further) == 4 and all(
            (job / n).read_bytes() == (tmp_path / "out" / n).read_bytes() for n in further
        )
    report = check_folder(tmp_path / "out")
    assert (
        report["broken"] == 0
        and report["items"] == 3
        and "index.html" in summary["gallery"]
        and Path(summary["gallery"]).is_file()
    )
    assert not list((tmp_path / "out").glob(".tmp*")) and not (tmp_path / "out" / "_work").exists()


def test_nothing_can_be_sampled_into_a_decoded_folder(source, tmp_path):
    from gen.jobs.worker import run_worker

    decode_folder(source, tmp_path / "out")
    with pytest.raises(GenError, match="holds a different job .*decoded_with"):
        tokens_job(tmp_path / "out")
    with pytest.raises(GenError):
        run_worker(tmp_path / "out")
    assert read_plan(tmp_path / "out")["shards"] == []


# --- again


def test_the_same_command_again_makes_what_is_missing_or_altered_and_nothing_else(source, tmp_path):
    out = tmp_path / "out"
    decode_folder(source, out)
    whole, text = media(out), (out / "manifest.jsonl").read_text()
    first, second, third, _ = sorted(whole)
    assert decode_folder(source, out)["made"] == 0 and (out / "manifest.jsonl").read_text() == text
    (out / first).unlink()
    (out / second).write_text("altered")
    (out / third).with_suffix(".json").unlink()
    summary = decode_folder(source, out)
    assert (summary["made"], summary["skipped"], summary["identical"]) == (3, 1, 4) and media(
        out
    ) == whole
    assert not any(map(damaged(out, read_plan(out)), read_rows(out)))


def test_a_decoding_that_was_cut_off_goes_on(source, tmp_path, monkeypatch):
    from gen.jobs.decoder import Decoder

    out, plain, calls = tmp_path / "out", Decoder.medium, []

    def cut(self, stored):
        calls.append(stored)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return plain(self, stored)

    monkeypatch.setattr(Decoder, "medium", cut)
    with pytest.raises(KeyboardInterrupt):
        decode_folder(source, out)
    assert len(read_rows(out)) == 2  # journalled
    summary = decode_folder(source, out)
    assert (summary["made"], summary["skipped"], len(calls)) == (2, 2, 5) and media(out) == media(
        source
    )


def test_items_that_come_later_or_were_made_again_are_decoded_by_the_same_command(source, tmp_path):
    out, rows = tmp_path / "out", read_rows(source)
    manifest_without(source, 3)
    summary = decode_folder(source, out)
    assert summary["made"] == 3 and ["1 of 4 items" in n for n in summary["notes"]] == [True]
    swapped = {
        **rows[0],
        "sha256": "0" * 64,
        "attempt": 2,
    }  # control: as if the source had been made again, to other bytes
    write_rows(source / "manifest.jsonl", [swapped, *rows[1:]])
    summary = decode_folder(source, out)
    assert (summary["made"], summary["identical"], summary["notes"]) == (2, 3, [])
    assert read_rows(out)[0]["source_sha256"] == "0" * 64


def test_failed_items_are_rows_and_the_others_go_on(source, tmp_path):
    out, rows = tmp_path / "out", read_rows(source)
    (source / rows[1]["tokens_file"]).write_bytes(b"PK")
    (source / rows[2]["tokens_file"]).unlink()
    failed = {**rows[3], "file": None, "sha256": None, "status": "failed", "error": "KeyError: x"}
    write_rows(source / "manifest.jsonl", [*rows[:3], failed])
    summary = decode_folder(source, out)
    assert (summary["made"], summary["items"], [r["status"] for r in read_rows(out)]) == (
        1,
        3,
        ["ok", "failed", "failed", "failed"],
    )
    errors = [f["error"] for f in summary["failed"]]
    assert (
        len(errors) == 2
        and "cannot be read" in errors[0]
        and f"{rows[2]['tokens_file']}, is missing" in errors[1]
    )
    assert summary["notes"] == [f"1 items of {source} failed there and have no tokens"]
    shutil.copy(source / rows[0]["tokens_file"], source / rows[2]["tokens_file"])
    summary = decode_folder(source, out)
    assert (summary["made"], summary["skipped"], len(summary["failed"])) == (1, 1, 1)


# --- refusals


def test_what_cannot_be_decoded_is_refused_before_anything_is_written(source, tmp_path):
    out = tmp_path / "out"
    plain = tokens_job(tmp_path / "plain", tokens=False)
    with pytest.raises(GenError, match="plain keeps no tokens; run the job with tokens: true"):
        decode_folder(plain, out)
    with pytest.raises(GenError, match="expected a folder that gen run or gen sample wrote"):
        decode_folder(tmp_path, out)
    with pytest.raises(GenError, match="unknown frontend 'text-wrds'.*Did you mean 'text-words'"):
        decode_folder(source, out, frontend="text-wrds")
    with pytest.raises(
        GenError, match=f"source keeps no tokens of 1 items, {read_rows(source)[2]['id']} first"
    ):
        rows = [
            {k: v for k, v in r.items() if k != "tokens_file" or r["index"] != 2}
            for r in read_rows(source)
        ]
        write_rows(source / "manifest.jsonl", rows)
        decode_folder(source, out)
    manifest_without(source, 0, 1, 2, 3)
    with pytest.raises(GenError, match="has no finished items"):
        decode_folder(source, out)
    assert not out.exists()


def test_a_folder_that_holds_something_else_is_refused(source, made, tmp_path):
    out = tmp_path / "out"
    for force in (False, True):
        with pytest.raises(GenError, match="source holds a job of its own"):
            decode_folder(made, source, force=force)
        (tmp_path / "full").mkdir(exist_ok=True)
        (tmp_path / "full" / "note.txt").write_text("mine")
        with pytest.raises(GenError, match="full is not empty and has no decoded media"):
            decode_folder(source, tmp_path / "full", force=force)
    decode_folder(source, out)
    with pytest.raises(GenError, match=f"was itself decoded, from {source}"):
        decode_folder(out, tmp_path / "again")
    with pytest.raises(
        GenError,
        match=(
            r'decoded from .* with \{"frontend": "its own"\}; this command decodes .*"dtype":'
            r' "float64".*--force'
        ),
    ):
        decode_folder(source, out, dtype="float64")
    assert decode_folder(source, out, dtype="float64", force=True)["made"] == 4
    assert {r["decoded_with"]["dtype"] for r in read_rows(out)} == {"float64"}


# --- another frontend


def test_a_frontend_with_another_codebook_is_taken_only_where_it_is_named_and_a_note_says_so(
    source, tmp_path
):
    words = other_words(tmp_path / "words")
    summary = decode_folder(source, tmp_path / "out", frontend=str(words))
    assert summary["made"] == 4 and summary["identical"] == 0 and not summary["failed"]
    assert (
        len(summary["notes"]) == 1
        and "has codebook" in summary["notes"][0]
        and "text-words" in summary["notes"][0]
    )
    assert read_rows(tmp_path / "out")[0]["decoded_with"]["frontend"] == str(words)
    named = decode_folder(
        source, tmp_path / "own", frontend="text-words"
    )  # control: the same one, named
    assert named["identical"] == 4 and not named["notes"]
    TextWords.of(["yes", "no"], 16).save_pretrained(tmp_path / "few")
    with pytest.raises(
        GenError,
        match=(
            r"frontend .*few has codebook_sizes \[3\]; expected \[\d+\], as the one that the tokens"
            r" were"
        ),
    ):
        decode_folder(source, tmp_path / "none", frontend=str(tmp_path / "few"))
    assert not (tmp_path / "none").exists()


def test_a_decoder_that_was_trained_further_makes_other_media_of_the_same_codes(tmp_path):
    job = tokens_job(
        tmp_path / "job",
        modality="image",
        prompts=["a large red circle"],
        num_samples=1,
        sampler={"name": "maskgit", "steps": 2},
    )
    better = Path(shutil.copytree(ZOO / "image-vq", tmp_path / "better"))
    file = next(better.glob("*.safetensors"))
    weights = load_file(file)
    weights["decoder.conv_out.bias"] = weights["decoder.conv_out.bias"] + 0.25
    save_file(weights, file, metadata={"format": "pt"})
    summary = decode_folder(job, tmp_path / "out", frontend=str(better))
    assert (summary["made"], summary["identical"], summary["notes"]) == (
        1,
        0,
        [],
    )  # the codebook is the same: nothing to note
    weights["decoder.conv_out.bias"] = torch.zeros(3)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(
        GenError, match=r"out holds media decoded .*weights"
    ):  # and two decoders' media are never mixed
        decode_folder(job, tmp_path / "out", frontend=str(better))
    with pytest.raises(GenError, match="weights of tokenizer"):
        decode_folder(job, tmp_path / "none", frontend="image-kl")


@pytest.mark.slow
@pytest.mark.parametrize("name", families.WRITERS)
def test_media_of_every_published_family_are_made_again_to_the_byte(name, tmp_path):
    case = families.WRITERS[name](tmp_path)
    job = tokens_job(
        tmp_path / "job",
        modality=case.modality,
        model=str(case.path),
        model_options=dict(case.options),
        sampler=case.samplers[0],
        prompts=list(case.prompts),
        num_samples=1,
    )
    summary = decode_folder(job, tmp_path / "out")
    assert (summary["made"], summary["identical"], summary["notes"]) == (2, 2, [])


def test_the_frontend_of_a_published_checkpoint_can_be_another_folder(tmp_path):
    case = families.amused(tmp_path / "amused")
    job = tokens_job(
        tmp_path / "job",
        modality="image",
        model=str(case.path),
        model_options=dict(case.options),
        prompts=case.prompts[:1],
        sampler={"name": "maskgit", "steps": 2},
        num_samples=1,
    )
    own = shutil.copytree(case.path / "vqvae", tmp_path / "own")
    assert decode_folder(job, tmp_path / "same", frontend=str(own))["notes"] == []
    file = next(Path(own).glob("*.safetensors"))
    weights = {k: v + 1 if "quantize" in k else v for k, v in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    summary = decode_folder(job, tmp_path / "out", frontend=str(own))
    assert summary["made"] == 1 and "has codebook" in summary["notes"][0]
    with pytest.raises(GenError, match="unknown model"):
        case.path.rename(tmp_path / "moved")
        decode_folder(job, tmp_path / "none")
    assert decode_folder(job, tmp_path / "none", model=str(tmp_path / "moved"))["identical"] == 1


def test_one_frontend_for_media_of_several_modalities_is_refused(source, tmp_path):
    rows = read_rows(source)
    rows[1]["modality"] = "action"
    write_rows(source / "manifest.jsonl", rows)
    with pytest.raises(
        GenError, match="holds media of action, text, and frontend text-words is of one of them"
    ):
        decode_folder(source, tmp_path / "out", frontend="text-words")


# --- the command


def test_the_command_says_what_it_did_and_exits_with_1_if_items_failed(source, tmp_path, capsys):
    args = argparse.Namespace(
        folder=str(source),
        out=str(tmp_path / "out"),
        frontend=None,
        model=None,
        device=None,
        dtype=None,
        force=False,
        trust_remote_code=False,
    )
    assert decode(args) == 0
    said = capsys.readouterr()
    assert (
        "4 media decoded from stored tokens, 0 already there; 4 of 4 equal the originals to the"
        " byte" in said.out
    )
    assert f"gallery: {tmp_path / 'out' / 'index.html'}" in said.out
    (source / read_rows(source)[0]["tokens_file"]).unlink()
    args.out = str(tmp_path / "other")
    assert decode(args) == 1
    assert "gen: 1 of 4 items failed" in capsys.readouterr().err

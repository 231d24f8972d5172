"""What every family of published checkpoints keeps, walked over the registry: a new family needs a
writer in ``families.py``, and no test here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families import NO_VOCABULARY, PASSED_OVER, RENAMES, SMALLER, WRITERS, Case, rewrite
from family_checks import check_alone, check_media

import gen
from gen.contracts.checkpoint import CheckpointFiles, family_of, options_of
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.models.load.weights import Weights, renamed

FAMILIES = registry.table("checkpoint")
PAGE = Path(__file__).parents[2] / "docs" / "checkpoints.md"


@pytest.fixture(scope="session", params=WRITERS)
def name(request):
    return request.param


@pytest.fixture(scope="session")
def family(name):
    return FAMILIES[name.partition(":")[0]]


@pytest.fixture(scope="session")
def case(name, tmp_path_factory):
    return WRITERS[name](tmp_path_factory.mktemp(name.replace(":", "-")))


@pytest.fixture(scope="session")
def pipe(case):
    return load(case)


def load(case: Case, **more):
    return gen.load(case.modality, model=case.path, **{"dtype": "float64", **case.options, **more})


def refusal(case: Case, **more) -> str:
    """What is said instead of a checkpoint; nothing where there is one."""
    try:
        load(case, **more)
    except GenError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("registered", FAMILIES)
def test_every_family_has_a_writer(registered):
    assert registered in {name.partition(":")[0] for name in WRITERS}, (
        f"tests/families.py has no writer for {registered}"
    )


@pytest.mark.slow
def test_a_keyword_of_from_pretrained_is_honoured_or_refused_by_name(family, case):
    given = {"attn_implementation": "eager", "device_map": {"": "cpu"}}
    for key, value in given.items():
        if key in family.serving(case.modality).takes:
            # the softmax of eager attention is one of float32
            assert load(case, **{key: value, "dtype": "float32"}).model_options[key] == value
        else:
            said = refusal(case, **{key: value})
            assert f"got the {key}" in said and "Families that take it: " in said
            assert (", and the models that come with gen" in said) == (key != "variant")
    assert "no weights of the variant 'fp16'" in refusal(case, variant="fp16") or (
        "expected no variant" in refusal(case, variant="fp16")
    )


def test_a_checkpoint_is_recognised_by_its_family_alone(name, family, case):
    files = CheckpointFiles.find(case.path)
    assert family_of(files, case.modality) is family.serving(case.modality)
    others = [
        n
        for n, cls in FAMILIES.items()
        if cls is not family and not cls.catch_all and cls.matches(files)
    ]
    assert family.matches(files) and not others
    for other in set(registry.table("modality")) - set(family.modalities):
        with pytest.raises(
            GenError,
            match=(
                f"{name.partition(':')[0]} serves {' and '.join(family.modalities)}; requested was"
                f" '{other}'"
            ),
        ):
            family_of(files, other)


@pytest.mark.thinned(9)
def test_samplers_write_media_that_can_be_read_and_a_second_run_makes_nothing(case, pipe, tmp_path):
    check_media(case, pipe, tmp_path, case.samplers)


@pytest.mark.thinned(3)
def test_an_item_alone_is_the_item_of_a_batch(case, pipe):
    check_alone(case, pipe, case.samplers[0])


def test_an_unknown_option_is_refused_with_the_nearest_name(case, family):
    known = sorted(options_of(family.serving(case.modality)), key=len)
    said = refusal(case, **{known[-1][:-1] if known else "height": 1})
    assert (
        f"Did you mean {known[-1]!r}" in said
        if known
        else "no options" in said and "'height'" in said
    )
    assert "\n" not in said


@pytest.mark.thinned(3)
def test_without_its_weights_there_is_one_error_that_names_the_folder(case, tmp_path):
    wrong = {}
    for lost in [[file] for file in case.weights] + [case.weights]:
        broken = case.copied(tmp_path / str(len(wrong)))
        for file in lost:
            (broken.root / file).unlink()
        wrong[tuple(lost)] = refusal(broken)
        assert str(broken.root) in wrong[tuple(lost)] and "\n" not in wrong[tuple(lost)], (
            lost,
            wrong[tuple(lost)],
        )


@pytest.mark.thinned(3)
def test_weights_that_are_cut_off_are_one_error(case, tmp_path):
    broken = case.copied(tmp_path / "cut")
    for file in case.weights:
        whole = (broken.root / file).read_bytes()
        (broken.root / file).write_bytes(whole[: len(whole) * 2 // 3])
        said = refusal(broken)
        assert said and "\n" not in said and len(said) < 1000, (file, said)
        (broken.root / file).write_bytes(whole)


def listed(name: str, key: str, said: str) -> bool:
    """Whether a message has a key: as the file has it, as the network calls it, or without what
    stands in front of its part."""
    spellings = (
        key,
        renamed(key, RENAMES.get(name.partition(":")[0], ())),
        ".".join(key.split(".")[-3:]),
    )
    return any(re.search(rf"(?<![\w]){re.escape(s)}(?!\w)", said) for s in spellings)


@pytest.mark.thinned(9)
def test_missing_extra_and_mis_shaped_weights_are_listed(name, case, tmp_path):
    broken, over = case.copied(tmp_path / "spoiled"), PASSED_OVER.get(name, {})
    seen = set()
    for file in case.weights:
        rewrite(broken.root / file)
    assert refusal(broken) == ""  # control: it is not the writing
    for file in case.weights:
        path = broken.root / file
        shapes = Weights(
            path, "model_ema" if name == "mar" and "checkpoint" in file else None
        ).shapes
        seen |= {pattern for pattern in over for key in shapes if re.search(pattern, key)}
        needed = sorted(k for k in shapes if not any(re.search(pattern, k) for pattern in over))
        flat, deep = (
            [k for k in needed if (len(shapes[k]) > 1) == many] for many in (False, True)
        )  # sizes are read off deep ones
        lost, bent = flat[len(flat) // 3], deep[len(deep) // 2]
        odd, whole = f"{bent.rpartition('.')[0]}.odd", path.read_bytes()
        for keys, change in (
            ((odd,), lambda t: t.update({odd: torch.ones(3)})),
            ((lost, bent), lambda t: t.update({bent: torch.cat([t[bent]] * 2, -1)}) or t.pop(lost)),
        ):
            rewrite(path, change)
            said = refusal(broken)
            assert "\n" not in said and all(listed(name, key, said) for key in keys), (
                file,
                keys,
                said,
            )
            path.write_bytes(whole)
    assert seen == set(over)  # what is said to be passed over is there


@pytest.mark.thinned(3)
def test_a_vocabulary_smaller_than_the_codebook_is_one_error(name, case, tmp_path):
    if name in NO_VOCABULARY:
        assert not load(case).bound(str(case.path))[2].codebooks, NO_VOCABULARY[name]
        return
    broken = case.copied(tmp_path / "smaller")
    SMALLER[name](broken)
    said = refusal(broken)
    assert (
        re.search(r"\b(codes|tokens|ids|vocabulary_map|mis-shaped)\b", said) and "\n" not in said
    ), said


def test_the_docs_say_of_every_family_what_it_was_tested_on():
    rows = [
        line.strip("| ").split(" | ")
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| `")
    ]
    said = {
        row[0].strip("`"): row[-1]
        for row in rows
        if row[0].strip("`") in FAMILIES and len(row) == 5
    }
    assert said == {name: cls.tested for name, cls in FAMILIES.items()}

"""Commands that tell what there is: parameters of samplers, kinds, completion, quick answers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gen.__main__ import main
from gen.cli.names import source_names
from gen.core.described import describe_sampler
from gen.core.registry import registry

ROOT = Path(__file__).parents[2]


def gen(capsys, *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.mark.parametrize("name", registry.table("sampler"))
def test_every_parameter_of_every_sampler_has_a_default_and_a_meaning(name):
    found = describe_sampler(name)
    fields = [f.name for f in dataclasses.fields(registry.get("sampler", name))]
    assert [p["name"] for p in found["params"]] == fields
    missing = [p["name"] for p in found["params"] if not p["meaning"]]
    assert not missing and found["about"] and found["guarantee"]


@pytest.mark.parametrize("name", ["masked_iterative", "frame_blocks"])
def test_a_statement_of_a_parameter_goes_before_a_sentence_that_mentions_its_name(name):
    meaning = {p["name"]: p["meaning"] for p in describe_sampler(name)["params"]}
    assert "may be committed" in meaning["blocks"]  # not the protocols causal, masked or blocks


def test_a_parameter_is_looked_up_by_the_name_of_its_sampler_or_preset(capsys):
    code, out, _ = gen(capsys, "show", "speculative_jacobi")
    line = next(line for line in out.splitlines() if line.startswith("window"))
    assert code == 0 and "64" in line and "positions computed per forward pass" in line
    code, out, _ = gen(capsys, "show", "sjd", "--json")
    window = {p["name"]: p["default"] for p in json.loads(out)["params"]}["window"]
    assert code == 0 and window == 16
    assert "Did you mean 'sjd'" in gen(capsys, "show", "sjdd")[2]
    assert "fingerprint" in gen(capsys, "show", "image/sjd")[1]


def test_show_says_what_a_modality_is_and_where_it_looked(capsys):
    code, _, err = gen(capsys, "show", "image")
    assert code == 2 and "image is a modality; expected a config such as image/" in err
    assert "in the working directory and those of gen ls. " in gen(capsys, "show", "imag")[2]


def test_ls_without_a_kind_lists_the_kinds(capsys):
    code, out, _ = gen(capsys, "ls")
    assert code == 0 and {"samplers", "presets", "configs", "models"} <= set(out.split())


def test_lists_say_whole_sentences_without_backticks(capsys):
    for kind in ("models", "modalities", "tokenizers", "layouts"):
        table = json.loads(gen(capsys, "ls", kind, "--json")[1])
        for row in table:
            assert "`" not in row["about"] and row["about"].endswith("."), row


def test_source_files_tell_the_names_of_the_registry():
    assert source_names("modality") == {*registry.table("modality")}
    assert source_names("sampler") == {*registry.table("sampler"), *registry.table("preset")}


@pytest.mark.parametrize(
    "argv, says",
    [
        (["sample", "imge", "x"], "Did you mean 'image'"),
        (["sample", "image", "x", "--sampler", "sdj"], "Did you mean 'sjd'"),
        (["sample", "image", "x", "sampler=sdj"], "Did you mean 'sjd'"),
        (["run", "image/sjdd"], "Did you mean 'image/sjd'"),
        (["bench", "imge"], "Did you mean 'image'"),
    ],
)
def test_a_mistyped_name_is_answered_without_torch(argv, says):
    code = (
        "import sys; from gen.__main__ import main; code = main(sys.argv[1:]);"
        "print('torch' in sys.modules, code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.stdout.split() == ["False", "2"] and says in done.stderr, done.stderr


@pytest.mark.parametrize("shell", ["bash", "zsh", "tcsh"])
def test_completion_knows_commands_flags_and_names(capsys, shell):
    code, out, _ = gen(capsys, "completion", shell)
    assert code == 0 and "sample" in out and "doctor" in out
    if shell != "tcsh":
        assert "--num-samples" in out and "speculative_jacobi" in out and "speech" in out


def test_the_script_for_bash_completes(capsys, tmp_path):
    (tmp_path / "gen.bash").write_text(gen(capsys, "completion", "bash")[1])
    script = (
        f"source {tmp_path}/gen.bash; f=$(complete -p gen | sed 's/.*-F \\([^ ]*\\).*/\\1/');"
        "COMP_WORDS=(gen sa); COMP_CWORD=1; $f; echo ${COMPREPLY[@]};"
        "COMP_WORDS=(gen sample image x --num); COMP_CWORD=4; $f; echo ${COMPREPLY[@]}"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=30)
    assert done.stdout.split() == ["sample", "--num-samples"], done


@pytest.mark.parametrize(
    "argv, says",
    [
        (["run"], "required: CONFIG ("),
        (["run", "image/sjd", "--seed", "3"], "as in seed=3"),
        (["run", "image/sjd", "--num_samples=3"], "as in num_samples=3"),
        (["run", "image/sjd", "--dry-rn"], "Did you mean '--dry-run'"),
        (["run", "image/sjd", "seed"], "expected KEY=VALUE"),
        (["sample", "image", "a", "small", "ring"], "in quotes"),
        (["ls", "smplers"], "Did you mean 'samplers'"),
        (["status"], "required: DIR"),
    ],
)
def test_a_slip_of_the_keyboard_gets_the_right_spelling(capsys, argv, says):
    code, out, err = gen(capsys, *argv)
    assert code == 2 and out == "" and says in err and err.count("\n") == 1


def test_an_interrupted_bench_does_not_promise_to_resume(capsys, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("gen.bench.run.bench", interrupted)
    assert gen(capsys, "bench", "image")[::2] == (130, "gen: interrupted\n")
    monkeypatch.setattr("gen.cli.make.run", interrupted)
    assert "the same command resumes" in gen(capsys, "run", "image/sjd")[2]


def test_a_long_message_is_cut(capsys):
    for text in ("x" * 100_000, "a " * 50_000):
        _, _, err = gen(capsys, "sample", "image", text)
        assert len(err) < 4200

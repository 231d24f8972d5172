"""Job files and job folders of somebody else: nothing in them runs a command, shows a file from
elsewhere, or speaks to the terminal."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from crashing import (
    ground,  # noqa: F401  a fixture
    run,
)
from ledgers import write_plan, write_rows
from PIL import Image

from gen.__main__ import main
from gen.config.job import load_config
from gen.core.errors import GenError
from gen.core.printable import printable
from gen.gallery.write import write_gallery
from gen.jobs.export import export_parquet
from gen.store.ledger import read_rows
from gen.store.shard_reader import Members

EVIL = "\x1b]0;owned\x07\x1b[31mred\x9b2J\u202eback"
COMMANDS = [
    ("slurm", "{local_setup: ['touch owned']}", "local_setup"),
    ("slurm", "{slurm_setup: ['touch owned']}", "slurm_setup"),
    ("slurm", "{slurm_additional_parameters: {wrap: touch owned}}", "slurm_additional_parameters"),
    ("slurm", '{slurm_partition: "gpu\\ntouch owned"}', "slurm_partition"),
    ("slurm", "{timeout_min: 5, slurm_python: ./mine}", "slurm_python"),
    ("ray", "{runtime_env: {pip: [mine]}}", "runtime_env"),
    ("ray", "{address: 'ray://elsewhere:1'}", "address"),
]


def job_file(folder: Path, engine: str, options: str) -> Path:
    path = folder / "job.yaml"
    path.write_text(
        f"modality: text\nsampler: fast_dllm\nprompts: ['sort 3 1 2 =']\nengine: {engine}\n"
        f"engine_options: {options}\nout: {folder / 'o'}\n"
    )
    return path


@pytest.mark.parametrize(("engine", "options", "key"), COMMANDS)
def test_engine_options_of_a_job_file_that_may_run_commands_are_refused(
    tmp_path, monkeypatch, capsys, engine, options, key
):
    monkeypatch.setattr("gen.cli.make.run_job", lambda job, **how: pytest.fail("was run"))
    path = job_file(tmp_path, engine, options)
    assert main(["run", str(path)]) == 2
    said = capsys.readouterr().err
    assert f"engine_options.{key} in {path} may run commands" in said and "--trust-job" in said
    assert not (tmp_path / "o").exists()


def test_they_are_taken_from_the_command_line_and_from_a_trusted_file(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("gen.cli.make._run", lambda job: seen.append(job.run.engine_options) or 0)
    path = job_file(tmp_path, "slurm", "{timeout_min: 5, slurm_partition: gpu}")
    assert main(["run", str(path), "engine_options.local_setup=[module load cuda]"]) == 0
    trusted = job_file(tmp_path, "slurm", "{local_setup: [module load cuda]}")
    assert main(["run", str(trusted), "--trust-job"]) == 0
    assert [options["local_setup"] for options in seen] == [["module load cuda"]] * 2


def test_options_that_only_ask_for_machines_need_no_trust(tmp_path):
    said = "{num_cpus: 2, num_gpus: 0.5, resources: {tpu: 1}}"
    assert load_config(job_file(tmp_path, "ray", said)).run.engine_options["num_cpus"] == 2


# --- links


@pytest.fixture
def linked(tmp_path):
    """A folder in which a link stands for an image, for a text and for a preview."""
    folder, secret = tmp_path / "job", tmp_path / "secret"
    folder.mkdir()
    secret.mkdir()
    Image.new("RGB", (8, 8)).save(secret / "own.png")
    (secret / "own.txt").write_text("my password")
    names = ["000000-a.png", "000001-b.txt"]
    for name in names:
        os.symlink(secret / f"own{Path(name).suffix}", folder / name)
    rows = [{"id": str(i), "status": "ok", "file": name} for i, name in enumerate(names)]
    in_tar = {"file": "shards/00000.tar", "member": "000002-c.png", "shard_sha256": "x"}
    write_rows(folder / "manifest.jsonl", [*rows, {"id": "2", "status": "ok", **in_tar}])
    write_plan(folder / "plan.json", 3)
    os.symlink(secret, folder / "shards")
    (secret / "00000.tar").write_bytes(b"")
    return folder


def test_a_link_in_the_place_of_a_medium_is_not_followed_into_the_gallery(linked):
    page = write_gallery(linked).read_text()
    assert "my password" not in page and 'src="000000-a.png"' not in page
    assert "000000-a.png is missing" in page and "shards/00000.tar is missing" in page
    os.unlink(linked / "000001-b.txt")  # the control: a file of the job is shown
    (linked / "000001-b.txt").write_text("its own text")
    assert "its own text" in write_gallery(linked).read_text()


def test_a_link_in_the_place_of_a_medium_is_not_followed_by_other_readers(linked, tmp_path):
    pytest.importorskip("pyarrow.parquet")
    assert export_parquet(linked, tmp_path / "a.parquet", media=True)["lost"] == ["0", "1", "2"]
    with Members(linked) as members:
        for row in read_rows(linked):
            with members.path(row) as path:
                assert path is None


def test_a_run_makes_an_item_again_whose_medium_is_a_link(ground):
    run(ground / "o")
    medium = next((ground / "o").glob("000001-*.txt"))
    data, elsewhere = medium.read_bytes(), ground / "elsewhere"
    elsewhere.write_bytes(data)
    medium.unlink()
    os.symlink(elsewhere, medium)
    run(ground / "o")
    assert not medium.is_symlink() and medium.read_bytes() == data == elsewhere.read_bytes()


# --- terminals


def test_control_characters_are_written_as_json_writes_them():
    assert printable("a\x1b[31m\x9b\u202e\ttab\nline ünï 😀") == (
        "a\\u001b[31m\\u009b\\u202e\ttab\nline ünï 😀"
    )
    assert json.loads(printable(json.dumps(EVIL, ensure_ascii=False))) == EVIL


@pytest.mark.parametrize(
    "argv", [["status"], ["status", "--json"], ["check"], ["check", "--json"], ["gallery"]]
)
def test_no_prompt_or_error_of_a_job_reaches_the_terminal_raw(tmp_path, capsys, argv):
    folder = tmp_path / "job"
    folder.mkdir()
    rows = [
        {"id": "0", "status": "failed", "prompt": EVIL, "error": EVIL, "sampler": EVIL},
        {"id": "1", "status": "ok", "prompt": EVIL, "sampler": EVIL, "file": "gone\x1b[1m.png"},
    ]
    write_rows(folder / "manifest.jsonl", rows)
    write_plan(folder / "plan.json", 2, labels=[EVIL])
    main([argv[0], str(folder), *argv[1:]])
    said = "".join(capsys.readouterr())
    assert said.strip() and not set(said) & set("\x1b\x07\x9b\u202e")


def test_no_error_message_reaches_the_terminal_raw(capsys, monkeypatch):
    def refuse(argv):
        raise GenError(EVIL)

    monkeypatch.setattr("gen.__main__.parse", refuse)
    assert main([]) == 2
    said = capsys.readouterr().err
    assert "owned" in said and not set(said) & set("\x1b\x07\x9b\u202e")

"""Rows of jobs whose condition has files: they count by content, and are checked before anything
runs."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import pytest
from seeing import SeeingModality, png

import gen
from gen.__main__ import main
from gen.config.entries import fingerprint
from gen.config.inputs import iter_rows
from gen.config.job import load_config, make_job
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.jobs.plan import make_plan
from gen.jobs.run import run_job
from gen.store.ledger import read_rows

STATE = {"observation.state": [0.2, 0.3, 0.6, 0.5, 0, 0, 0], "task": "reach"}


@pytest.fixture
def pipe(monkeypatch):
    registry.discover()
    monkeypatch.setitem(registry._kinds["modality"], "seeing", SeeingModality)
    return gen.load(SeeingModality())


def job(rows, base: Path, **keys):
    tree = {"modality": "seeing", "sampler": "autoregressive", "out": str(base / "out"), **keys}
    if rows is not None:
        tree["prompts"] = rows
    return make_job(tree, where="test", base=base)


def ids(made, pipe) -> list[str]:
    return [item["id"] for item in make_plan(made, lambda entry: pipe)["items"]]


def test_files_count_by_content_and_not_by_path(pipe, tmp_path):
    (tmp_path / "far").mkdir()
    for name, shade in (("a.png", 5), ("far/b.png", 5), ("c.png", 6)):
        (tmp_path / name).write_bytes(png(shade))
    coded = {"base64": base64.b64encode(png(5)).decode()}
    made = [job([{"image": x}], tmp_path) for x in ("a.png", "far/b.png", coded, "c.png")]
    assert len({fingerprint(j) for j in made[:3]}) == 1
    assert len({ids(j, pipe)[0] for j in made[:3]}) == 1
    assert fingerprint(made[3]) != fingerprint(made[0])  # control: another content
    assert ids(made[3], pipe) != ids(made[0], pipe)
    (tmp_path / "a.png").write_bytes(png(6))
    assert fingerprint(job([{"image": "a.png"}], tmp_path)) == fingerprint(made[3])


def test_an_observation_is_the_same_item_in_a_row_and_in_a_file(pipe, tmp_path):
    (tmp_path / "o.json").write_text(json.dumps(STATE))
    (tmp_path / "front.png").write_bytes(png(5))
    rows = [{"observation": "o.json"}, {"observation": STATE}]
    one, other = (job([row], tmp_path) for row in rows)
    assert ids(one, pipe) == ids(other, pipe) and fingerprint(one) == fingerprint(other)
    camera = {"observation": {**STATE, "observation.images.front": "front.png"}}
    seen = job([camera], tmp_path)
    assert ids(seen, pipe) != ids(one, pipe)  # control: it has a camera image
    (tmp_path / "front.png").write_bytes(png(6))
    assert fingerprint(job([camera], tmp_path)) != fingerprint(seen)


def test_a_job_of_media_runs_resumes_and_makes_changed_ones_anew(pipe, tmp_path):
    for name, shade in (("a.png", 0), ("b.png", 250)):
        (tmp_path / name).write_bytes(png(shade))
    (tmp_path / "rows.jsonl").write_text(
        '{"image": "a.png", "id": "dark"}\n{"images": ["b.png"], "prompt": "reach"}\n'
    )
    (tmp_path / "job.yaml").write_text(
        "modality: seeing\nsampler: autoregressive\nprompts_file: rows.jsonl\n"
        f"tokens: true\nout: {tmp_path}/out\n"
    )
    made = load_config(tmp_path / "job.yaml")
    summary = run_job(made, load=lambda *_, **__: pipe)
    rows = read_rows(tmp_path / "out")
    assert not summary["failed"] and rows[0]["input_id"] == "dark"
    assert rows[0]["condition"] == {"images": [str(tmp_path / "a.png")]}
    about = json.loads((tmp_path / "out" / rows[0]["file"]).with_suffix(".json").read_text())
    assert about["job"]["prompts"] == [{"prompt": "", "images": [str(tmp_path / "a.png")]}]
    (tmp_path / "a.png").rename(tmp_path / "moved.png")
    text = (tmp_path / "rows.jsonl").read_text()
    (tmp_path / "rows.jsonl").write_text(text.replace("a.png", "moved.png"))
    again = run_job(load_config(tmp_path / "job.yaml"), load=lambda *_, **__: pipe)
    assert again["skipped"] == 2  # a moved file is the same item
    (tmp_path / "moved.png").write_bytes(png(90))
    with pytest.raises(GenError, match="different job"):
        run_job(load_config(tmp_path / "job.yaml"), load=lambda *_, **__: pipe)


BAD = {
    '{"image": "no.png"}': "image is not a file",
    '{"image": "sound.wav"}': "image is .*sound.wav', a sound; expected an image",
    '{"image": "text.png"}': "text.png cannot be read",
    '{"images": ["a.png", "a.png"]}': "takes at most 1 images; got 2",
    '{"image": "big.png"}': "image is 9x9 .* the model takes 4x6",
    '{"tokens": [1]}': "got tokens",
    '{"messages": "no.json"}': "messages is not a file",
    '{"image": 7}': "image is 7; expected a path",
    '{"image": "a.png", "images": ["a.png"]}': "image and images are both given",
}


def test_a_row_that_cannot_be_read_is_reported_before_anything_runs(pipe, tmp_path):
    (tmp_path / "a.png").write_bytes(png(5))
    (tmp_path / "big.png").write_bytes(png(5, (9, 9)))
    for name in ("sound.wav", "text.png"):
        (tmp_path / name).write_text("none")
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join([*BAD, '{"image": "a.png"}']))
    plan = make_plan(job(None, tmp_path, prompts_file="rows.jsonl"), lambda entry: pipe)
    *bad, good = plan["items"]
    assert "error" not in good
    for number, (item, message) in enumerate(zip(bad, BAD.values(), strict=True), 1):
        assert re.search(f"line {number}: .*{message}", item["error"])
    for row in list(BAD)[:2]:  # rows of the job itself are refused at once
        with pytest.raises(GenError, match=r"prompts.0: image is"):
            job([json.loads(row)], tmp_path)


def test_a_table_has_columns_of_parts(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text('image,tokens,note\na.png,"[1, 2]",x\n,"[3]",\n')
    first, second = iter_rows(path)
    assert first.condition == {"images": [str(tmp_path / "a.png")], "tokens": [1, 2]}
    assert (second.condition, second.error) == ({"tokens": [3]}, None) and first.meta == {
        "note": "x"
    }
    path.write_text("note\nx\n")  # control: neither a prompt nor a part
    with pytest.raises(GenError, match="no column 'prompt'"):
        list(iter_rows(path))


def test_the_command_line_takes_files_and_an_empty_prompt(tmp_path, capsys):
    path = tmp_path / "o.json"
    path.write_text(json.dumps(STATE))
    common = ["sample", "action", "", "--sampler", "autoregressive", "--out", str(tmp_path / "out")]
    assert main([*common, "--observation", str(path)]) == 0
    (row,) = read_rows(tmp_path / "out")
    assert row["status"] == "ok" and row["condition"] == {"observation": str(path)}
    assert main([*common, "--image", str(tmp_path / "no.png")]) == 2
    assert "image is not a file" in capsys.readouterr().err
    assert main([*common, "--messages", str(path)]) == 2
    assert main(common) == 2  # control: an empty prompt alone is none

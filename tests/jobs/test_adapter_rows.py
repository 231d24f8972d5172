"""Rows of jobs that choose adapters: the tokens of a call, kept by plan, sidecar and resumption."""

from __future__ import annotations

import json

import numpy as np
import pytest
from families import WRITERS
from peft_folders import loaded, write_adapters

from gen.__main__ import main
from gen.config.job import make_job
from gen.core.errors import GenError
from gen.store.ledger import read_plan, read_rows

SAMPLER = {"name": "autoregressive"}
CHOSEN = [("w1 w2", "poet"), ("w1 w2", "short"), ("w9", None), ("w9", "poet")]


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    (root / "model").mkdir()
    made = WRITERS["causal_lm"](root / "model")
    return made, {k: str(v) for k, v in write_adapters(made, root, poet=3, short=5).items()}


def tree_of(case, out, **keys):
    made, folders = case
    return {
        "modality": "text",
        "model": str(made.path),
        "model_options": {**made.options, "adapters": folders},
        "sampler": SAMPLER,
        "sampling": {"temperature": 0},
        "dtype": "float64",
        "tokens": True,
        "out": str(out),
        **keys,
    }


def ran(tree, tmp_path, *more) -> int:
    path = tmp_path / "job.yaml"
    path.write_text(json.dumps(tree))
    return main(["run", str(path), *more])


def tokens_in(out) -> list[list[int]]:
    rows = read_rows(out)
    assert all(r["status"] == "ok" for r in rows), rows
    return [np.load(out / r["tokens_file"])["tokens"].reshape(-1).tolist() for r in rows]


def wanted(case, chosen=CHOSEN):
    made, folders = case
    pipe = loaded(made, adapters=folders)
    prompts, names = [p for p, _ in chosen], [a for _, a in chosen]
    return pipe(prompts, sampler=SAMPLER, seed=0, temperature=0, adapter=names)


def listed(chosen):
    return [{"prompt": p, **({"adapter": a} if a else {})} for p, a in chosen]


@pytest.mark.parametrize("kind", ["list", "jsonl", "csv"])
def test_rows_choose_their_adapters_in_one_batch(case, kind, tmp_path):
    keys = {"prompts": listed(CHOSEN)}
    if kind != "list":
        path = tmp_path / f"rows.{kind}"
        lines = [json.dumps(r) for r in listed(CHOSEN)]
        table = ["prompt,adapter", *(f"{p},{a or ''}" for p, a in CHOSEN)]
        path.write_text("\n".join(lines if kind == "jsonl" else table))
        keys = {"prompts_file": str(path)}
    out = tmp_path / "out"
    assert ran(tree_of(case, out, **keys), tmp_path) == 0
    want = wanted(case).tokens.tolist()
    made = tokens_in(out)
    assert made == want
    assert made[0] != made[1] and made[2] != made[3]  # control: adapters do something
    rows = read_rows(out)
    assert [r.get("adapter") for r in rows] == [a for _, a in CHOSEN]
    assert {r["batch"] for r in rows} == {4}
    plan = read_plan(out)
    assert [i.get("adapter") for i in plan["items"]] == [a for _, a in CHOSEN]
    assert set(case[1].values()) < set(plan["weights"])


def test_an_override_names_an_adapter(case, tmp_path, capsys):
    made, folders = case
    tree = tree_of(case, tmp_path / "out", prompts=listed(CHOSEN))
    tree["model_options"] = {**made.options, "adapters": {"short": folders["short"]}}
    assert ran(tree, tmp_path) == 2 and "unknown adapter 'poet'" in capsys.readouterr().err
    assert ran(tree, tmp_path, f"model_options.adapters.poet={folders['poet']}") == 0
    assert tokens_in(tmp_path / "out") == wanted(case).tokens.tolist()


def test_another_choice_is_another_job_and_a_sidecar_makes_its_item_again(case, tmp_path, capsys):
    out = tmp_path / "out"
    tree = tree_of(case, out, prompts=listed(CHOSEN))
    assert ran(tree, tmp_path) == 0 and ran(tree, tmp_path) == 0  # control: the same resumes
    other = {**tree, "prompts": listed([*CHOSEN[:3], ("w9", "short")])}
    capsys.readouterr()
    assert ran(other, tmp_path) == 2
    assert "holds a different job" in capsys.readouterr().err
    before = tokens_in(out)
    sidecar = next(p for p in sorted(out.glob("*.json")) if p.name.startswith("000001"))
    recipe = json.loads(sidecar.read_text())["job"]
    again = {**recipe, "tokens": True, "out": str(tmp_path / "again")}
    assert ran(again, tmp_path) == 0
    assert tokens_in(tmp_path / "again") == before[1:2]


def test_an_adapter_that_was_trained_further_is_not_resumed(case, tmp_path, capsys):
    made, _ = case
    copies = write_adapters(made, tmp_path, poet=3, short=5)
    out = tmp_path / "out"
    tree = tree_of((made, {k: str(v) for k, v in copies.items()}), out, prompts=listed(CHOSEN))
    assert ran(tree, tmp_path) == 0
    write_adapters(made, tmp_path, short=5)  # of another seed
    capsys.readouterr()
    assert ran(tree, tmp_path) == 2
    assert "other weights of model" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["list", "jsonl"])
def test_an_unknown_adapter_is_one_error_before_any_work(case, kind, tmp_path, capsys):
    rows = [*listed(CHOSEN), {"prompt": "w3", "adapter": "pout"}]
    keys = {"prompts": rows}
    if kind == "jsonl":
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        keys = {"prompts_file": str(path)}
    assert ran(tree_of(case, tmp_path / "out", **keys), tmp_path) == 2
    said = capsys.readouterr().err
    assert "unknown adapter 'pout'" in said and "Did you mean 'poet'" in said
    assert ("rows.jsonl, line 5" if kind == "jsonl" else "prompts.4") in said
    assert not (tmp_path / "out").exists()
    without = tree_of(case, tmp_path / "out", **keys)
    without["model_options"] = dict(case[0].options)
    with pytest.raises(GenError, match="no adapters by name; expected model_options.adapters.poet"):
        make_job(without, where="test")
    wrong = tree_of(case, tmp_path / "out", prompts=[{"prompt": "w1", "adapter": 3}])
    with pytest.raises(GenError, match="adapter is 3; expected the name"):
        make_job(wrong, where="test")

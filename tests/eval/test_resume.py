"""Evaluation by shard: the figures do not depend on processes, kills or order, and states are
measured again when their files change."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from evaljob import change_rows, write_job
from PIL import Image

from gen.core.errors import GenError
from gen.core.files import sha256
from gen.eval.metric import parse_metrics
from gen.eval.run import evaluate

FEATURES = """
import time
import torch

WAIT = {wait}

def features(images):
    time.sleep(WAIT)
    flat = images.float().flatten(1)
    weights = torch.sin(torch.arange(flat.shape[1] * 7.0)).view(flat.shape[1], 7)
    return torch.tanh(flat @ weights / 300)
"""

NAMES = {1: "fid,kid", 2: "kid"}  # metrics by the number of workers


def make(folder, wait=0.0, count=40):
    """A job of ``count`` images in shards of 4, a reference, and features that take a while."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (max(count, 12), 6, 6, 3), dtype=np.uint8)
    write_job(
        folder / "job",
        lambda i, path: Image.fromarray(images[i]).save(path),
        count,
        samplers=("a", "b"),
    )
    real = folder / "real"
    real.mkdir()
    for i in range(12):
        Image.fromarray(images[i] // 2).save(real / f"{i}.png")
    (folder / "feat.py").write_text(FEATURES.format(wait=wait))
    return folder


def settings(folder):
    features = f"features={folder / 'feat.py'}:features"
    return [f"fid.{features}", f"kid.{features}", "fid.batch_size=2", "kid.batch_size=3"]


def run(folder, names="fid,kid", **keys):
    metrics = parse_metrics(names, [s for s in settings(folder) if s[:3] in names])
    return evaluate(folder / "job", metrics, reference=folder / "real", **keys)


def figures(results):
    return {
        (name, group): part["scores"]
        for name, found in results["metrics"].items()
        for group, part in [("all", found), *found["by_sampler"].items()]
    }


def states(folder):
    return sorted((folder / "job" / "eval").rglob("[0-9]*.npz"))


def test_states_survive_and_only_changed_shards_are_measured_again(tmp_path):
    make(tmp_path)
    first = figures(run(tmp_path))
    assert len(first) == 6 and len(states(tmp_path)) == 22  # 10 shards and a reference, twice
    before = {path: path.stat().st_mtime_ns for path in states(tmp_path)}
    assert figures(run(tmp_path)) == first
    assert {path: path.stat().st_mtime_ns for path in states(tmp_path)} == before
    states(tmp_path)[3].unlink()
    states(tmp_path)[0].write_bytes(b"damaged")
    assert figures(run(tmp_path)) == first
    # a medium that is made again, with its row
    image = tmp_path / "job" / "000005-item.png"
    Image.fromarray(np.full((6, 6, 3), 200, np.uint8)).save(image)
    assert next(iter(run(tmp_path)["broken"].values())).endswith("(its sha256 differs)")
    change_rows(
        tmp_path / "job", lambda i, row: row.update(sha256=sha256(image)) if i == 5 else None
    )
    changed = run(tmp_path)
    assert not changed["broken"] and figures(changed) != first
    new = {p for p in states(tmp_path) if before.get(p) != p.stat().st_mtime_ns}
    assert {p.name for p in new} >= {"00001.npz"}
    assert figures(run(tmp_path, fresh=True)) == figures(changed)


def test_other_settings_or_other_code_are_measured_anew(tmp_path):
    make(tmp_path, count=8)
    first = figures(run(tmp_path))
    code = tmp_path / "feat.py"
    code.write_text(code.read_text().replace("300", "30"))
    assert figures(run(tmp_path)) != first


def test_control_sums_in_another_order_differ_in_the_last_bits(tmp_path):
    """Without the fixed order the figures would depend on who was first."""
    from functools import reduce

    import torch

    from gen.eval.frechet import Moments

    parts = torch.randn(40, 8, generator=torch.Generator().manual_seed(0)).double().split(4)
    forth = reduce(Moments.__add__, map(Moments.of, parts))
    back = reduce(Moments.__add__, map(Moments.of, reversed(parts)))
    assert not torch.equal(forth.scatter, back.scatter)
    assert torch.allclose(forth.scatter, back.scatter)


@pytest.mark.slow
def test_figures_are_bit_equal_for_1_2_and_4_workers(tmp_path):
    found = []
    for workers in (1, 2, 4):
        folder = tmp_path / str(workers)
        folder.mkdir()
        found.append(figures(run(make(folder), "fid", workers=workers)))
    assert found[0] == found[1] == found[2] and len(found[0]) == 3


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_evaluation_goes_on_with_the_same_figures(tmp_path, workers):
    whole = tmp_path / "whole"
    whole.mkdir()
    expected = figures(run(make(whole), NAMES[workers]))
    killed = tmp_path / "killed"
    killed.mkdir()
    make(killed, wait=0.2)
    command = [sys.executable, "-m", "gen", "eval", str(killed / "job")]
    command += ["--metrics", NAMES[workers], "--reference", str(killed / "real")]
    given = [s for s in settings(killed) if s[:3] in NAMES[workers]]
    command += ["--workers", str(workers), *given]
    process = subprocess.Popen(command, start_new_session=True)
    deadline = time.monotonic() + 300
    while len(states(killed)) < 3 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    children = _alive_in_session(process.pid)
    until = time.monotonic() + 30
    while children and time.monotonic() < until:
        time.sleep(0.2)
        children = _alive_in_session(process.pid)
    assert not children  # workers end with their parent
    kept = {path: path.stat().st_mtime_ns for path in states(killed)}
    assert 3 <= len(kept) < 11  # between shards of the first metric
    assert figures(run(killed, NAMES[workers])) == expected
    assert kept.items() <= {p: p.stat().st_mtime_ns for p in states(killed)}.items()
    assert not [p for p in (killed / "job" / "eval").rglob(".tmp-*")]


def _alive_in_session(session: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == session:
                found.append(int(entry))
        except ProcessLookupError:
            continue
    return found


def test_a_sampler_with_too_few_items_says_so_and_the_rest_counts(tmp_path):
    folder = make(tmp_path, count=5)
    change_rows(folder / "job", lambda i, row: row.update(sampler="a" if i else "b"))
    found = run(folder)["metrics"]["fid"]
    assert found["scores"]["fid"] > 0 and found["by_sampler"]["a"]["scores"]["fid"] > 0
    assert "expected at least 2" in found["by_sampler"]["b"]["problem"]


def test_a_metric_that_fails_leaves_no_state(tmp_path):
    make(tmp_path, count=8)
    (tmp_path / "feat.py").write_text("def features(images):\n    return images.float()\n")
    with pytest.raises(GenError, match=r"returned \[2, 3, 6, 6\]; expected features \[B, D\]"):
        run(tmp_path)
    assert not states(tmp_path)

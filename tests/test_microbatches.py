"""Microbatches: by length, smaller where memory ran out, fixed where a job is to be deterministic; and what a pipeline refuses."""

from __future__ import annotations

import hashlib

import pytest
import torch
from toyjob import Pipe, files, leftovers, run, steady, toy  # noqa: F401  toy is a fixture

from gen.errors import GenError
from gen.ledger import read_rows
from gen.microbatch import BatchSizes

pytestmark = pytest.mark.usefixtures("toy")
WORDS = ["a", "b", "c", "d", "e", "f"]


class Lengthy(Pipe):
    """A prompt is as long as its text; only so much fits in at once."""

    room = 10**9

    def sizes(self, items, sampler):
        return [len(i.prompt) for i in items]

    def generate(self, items, *args, **kwargs):
        if len(items) * max(self.sizes(items, None)) > self.room:
            self.batches.append([i.prompt for i in items])
            raise torch.OutOfMemoryError
        return super().generate(items, *args, **kwargs)


class Mixing(Pipe):
    """Media that depend on the whole microbatch, as the last bits of real ones do."""

    def generate(self, items, *args, **kwargs):
        out = super().generate(items, *args, **kwargs)
        mix = hashlib.sha256(repr([(i.prompt, i.seed) for i in items]).encode()).hexdigest()[:8]
        out.media = [f"{m} {mix}" for m in out.media]
        return out


def test_items_of_about_one_length_run_together(tmp_path):
    prompts = ["a" * n for n in (3, 40, 2, 33, 3, 60)]
    _, pipe = run(tmp_path, Lengthy(), prompts=prompts)
    assert [[len(p) for p in b] for b in pipe.batches] == [[3, 2, 3], [40, 33, 60]]
    assert [len(r["prompt"]) for r in read_rows(tmp_path)] == [3, 40, 2, 33, 3, 60]  # the manifest keeps the order of the input


def test_what_fits_is_remembered_for_its_length_and_longer_ones(tmp_path):
    pipe = Lengthy()
    pipe.room = 240
    run(tmp_path, pipe, prompts=["s" * 4] * 8 + ["l" * 64] * 16, batch_size=8, shard_items=8)
    assert [(len(b), len(b[0])) for b in pipe.batches] == [(8, 4), (8, 64), (4, 64), *[(2, 64)] * 8]  # over two shards
    assert all(r["status"] == "ok" for r in read_rows(tmp_path))
    sizes = BatchSizes()
    sizes.lower(0, 5, 8)
    assert [sizes.of(0, n, 8) for n in (4, 5, 6)] == [8, 4, 4] and sizes.of(1, 6, 8) == 8


def test_a_deterministic_job_makes_the_same_bytes_whatever_was_missing(tmp_path):
    run(tmp_path / "whole", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    (tmp_path / "torn" / "000004-e-s0.txt").unlink()
    _, pipe = run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3, deterministic=True)
    assert pipe.batches == [["d", "e", "f"]] and files(tmp_path / "torn") == files(tmp_path / "whole")
    assert steady(tmp_path / "torn") == steady(tmp_path / "whole") and not leftovers(tmp_path / "torn")


def test_without_it_they_need_not_be(tmp_path):  # the negative control of the test above
    run(tmp_path / "whole", Mixing(), prompts=WORDS, batch_size=3)
    run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3)
    (tmp_path / "torn" / "000004-e-s0.txt").unlink()
    _, pipe = run(tmp_path / "torn", Mixing(), prompts=WORDS, batch_size=3)
    assert pipe.batches == [["e"]] and files(tmp_path / "torn") != files(tmp_path / "whole")


def test_a_deterministic_job_keeps_its_microbatches_or_says_that_it_cannot(tmp_path):
    with pytest.raises(GenError, match="choose a smaller batch_size"):
        run(tmp_path / "a", Pipe(limit=2), prompts=WORDS, batch_size=3, deterministic=True)
    run(tmp_path / "b", prompts=WORDS, batch_size=3, deterministic=True)
    with pytest.raises(GenError, match="batch_size: was 3, now 2"):
        run(tmp_path / "b", prompts=WORDS, batch_size=2, deterministic=True)


def test_a_deterministic_job_computes_with_one_thread_and_puts_back_what_it_found(tmp_path):
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    pipe = Pipe()
    plain = pipe.generate
    pipe.generate = lambda *a, **k: seen.append((torch.get_num_threads(), torch.are_deterministic_algorithms_enabled())) or plain(*a, **k)
    try:
        run(tmp_path / "a", pipe, deterministic=True)
        run(tmp_path / "b", pipe)
    finally:
        after = torch.get_num_threads()
        torch.set_num_threads(before)
    assert seen == [(1, True), (2, False)] and after == 2 and not torch.are_deterministic_algorithms_enabled()


class Refusing(Pipe):
    """A pipeline that refuses some prompts only when it sees them."""

    def generate(self, items, *args, **kwargs):
        if any(i.prompt in self.bad for i in items):
            self.batches.append([i.prompt for i in items])
            raise GenError("that prompt is longer than the model's window")
        return super().generate(items, *args, **kwargs)


def test_one_prompt_that_the_model_refuses_is_one_failed_item(tmp_path):
    summary, _ = run(tmp_path, Refusing(bad=["a", "d"]), prompts=WORDS, batch_size=4)
    assert [f["prompt"] for f in summary["failed"]] == ["a", "d"] and "window" in summary["failed"][0]["error"]
    assert [r["status"] for r in read_rows(tmp_path)] == ["failed", "ok", "ok", "failed", "ok", "ok"]


def test_what_no_item_survives_ends_the_job(tmp_path):  # the negative control of the test above
    pipe = Refusing(bad=WORDS)
    with pytest.raises(GenError, match="window"):
        run(tmp_path / "o", pipe, prompts=WORDS, batch_size=2)
    assert len(pipe.batches) == 3 and not (tmp_path / "o").exists()


def test_rows_with_knobs_of_their_own_fail_on_their_own(tmp_path):
    rows = [{"prompt": "a", "law": {"top_k": 3}}, "b"]
    summary, pipe = run(tmp_path, Refusing(bad=["a"]), prompts=rows)
    assert [f["prompt"] for f in summary["failed"]] == ["a"] and pipe.batches == [["a"], ["b"]]
    assert read_rows(tmp_path)[0]["overrides"] == {"law": {"top_k": 3}} and "overrides" not in read_rows(tmp_path)[1]

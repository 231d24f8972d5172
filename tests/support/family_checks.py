"""Checks that every loaded checkpoint passes, whatever its weights are stored in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from families import Case

from gen.config.entries import stored_job
from gen.jobs.run import run_job
from gen.store.ledger import read_rows


def same(a, b) -> bool:
    """Whether a medium is what its file holds: shapes where a file has losses, text up to blanks at
    its ends."""
    if isinstance(a, str):
        return a.strip() == b
    return np.asarray(a).shape == np.asarray(b).shape


def check_media(case: Case, pipe, tmp_path: Path, samplers: tuple) -> None:
    """Samplers write media that can be read, and a second run makes only what is missing."""
    protocols = pipe.bound(pipe.model)[0].protocols
    for number, sampler in enumerate(samplers):
        assert pipe.resolve(sampler, None)[0].protocol in protocols
        out = pipe(list(case.prompts), sampler=sampler, seed=3)
        folder = tmp_path / str(number)
        assert out.save(folder).is_file()
        rows = read_rows(folder)
        assert [r["status"] for r in rows] == ["ok", "ok"]
        assert all(
            same(media, pipe.modality.load(folder / row["file"]))
            for media, row in zip(out.media, rows, strict=True)
        )
        made = {r["file"]: (folder / r["file"]).read_bytes() for r in rows}
        again = run_job(stored_job(folder), load=lambda *_, **__: pipe)
        assert (again["skipped"], again["failed"]) == (2, [])
    assert out.save(folder).is_file() and {f: (folder / f).read_bytes() for f in made} == made
    (
        folder / rows[1]["file"]
    ).unlink()  # control: what is not there is made again, by a pipeline that the job loads itself
    again = run_job(stored_job(folder))
    assert again["skipped"] == 1 and {f: (folder / f).read_bytes() for f in made} == made


def check_alone(case: Case, pipe, sampler, near: float = 1e-9) -> None:
    """An item alone is the item of a batch; latents up to ``near``, relative to the largest."""
    whole = pipe(list(case.prompts), sampler=sampler, seed=3)
    for item, tokens in zip(whole.items, whole.tokens, strict=True):
        alone = pipe(item.given or item.prompt, sampler=sampler, seed=item.seed).tokens[0]
        if alone.is_floating_point():
            assert (alone - tokens).abs().max() <= near * tokens.abs().max()
        else:
            assert torch.equal(alone, tokens)
    assert not torch.allclose(whole.tokens[0], whole.tokens[1])  # control

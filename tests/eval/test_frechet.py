"""Fréchet distances and the kernel distance over job folders equal their closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from evaljob import write_job
from PIL import Image
from scipy import linalg

from gen.core.errors import GenError
from gen.eval import readers
from gen.eval.frechet import Moments, frechet_distance
from gen.eval.metric import parse_metrics
from gen.eval.run import evaluate
from gen.media.audio import write_wav
from gen.media.video import write_lossless


def closed_form(a: np.ndarray, b: np.ndarray) -> float:
    """Fréchet distance of two sets [n, D] by the definition, with SciPy's root of a matrix."""
    cov_a, cov_b = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    root = linalg.sqrtm(cov_a @ cov_b).real
    return float(((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a + cov_b - 2 * root))


def pixels(count: int, seed: int, size: int = 2) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def image_job(folder, images, **keys):
    return write_job(
        folder, lambda i, path: Image.fromarray(images[i]).save(path), len(images), **keys
    )


def image_folder(folder, images):
    folder.mkdir()
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:05d}.png")
    return folder


def flat(images: np.ndarray) -> np.ndarray:
    """Identity features of images [n, H, W, 3]: planes first, as modules see them."""
    return images.transpose(0, 3, 1, 2).reshape(len(images), -1).astype(np.float64)


def figures(folder, names, *settings, **keys):
    found = evaluate(folder, parse_metrics(names, settings), **keys)["metrics"]
    return {k: v for name in found for k, v in found[name]["scores"].items()}


def test_fid_with_identity_features_equals_the_closed_form(tmp_path):
    made, real = pixels(50, 0), pixels(40, 1) // 2
    job = image_job(tmp_path / "job", made, shard_items=7)
    reference = image_folder(tmp_path / "real", real)
    found = figures(job, "fid", "fid.features=identity", reference=reference)
    assert found["fid"] == pytest.approx(closed_form(flat(real), flat(made)), rel=1e-9, abs=1e-6)


def test_fid_of_known_gaussians_is_exact():
    """Diagonal covariances commute: the distance is a sum over dimensions."""
    mean = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    a, b = torch.tensor([4.0, 1.0, 9.0]).double(), torch.tensor([1.0, 1.0, 4.0]).double()
    found = frechet_distance(mean, a.diag(), torch.zeros(3).double(), b.diag())
    expected = float(mean.square().sum() + (a.sqrt() - b.sqrt()).square().sum())
    assert abs(found - expected) < 1e-12
    assert abs(frechet_distance(mean, a.diag(), mean, a.diag())) < 1e-12


def test_fid_against_stored_statistics_equals_fid_against_the_media(tmp_path):
    made, real = pixels(30, 2), pixels(30, 3)
    job = image_job(tmp_path / "job", made)
    statistics = tmp_path / "real.npz"
    np.savez(statistics, mu=flat(real).mean(0), sigma=np.cov(flat(real), rowvar=False))
    found = figures(job, "fid", "fid.features=identity", reference=statistics)
    assert found["fid"] == pytest.approx(closed_form(flat(real), flat(made)), rel=1e-9)


def test_moments_merge_to_those_of_all_rows_also_far_from_zero():
    """Sums of squares would lose all digits of a variance of 1 at a mean of 1e8."""
    rows = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0)).double() + 1e8
    merged = sum((Moments.of(part) for part in rows.split(70)[1:]), Moments.of(rows[:70]))
    assert torch.allclose(merged.covariance, rows.T.cov(), rtol=1e-6)
    naive = (rows.T @ rows - len(rows) * torch.outer(rows.mean(0), rows.mean(0))) / 999
    assert not torch.allclose(naive, rows.T.cov(), rtol=1e-2)  # the control


def test_kid_equals_the_direct_unbiased_mmd(tmp_path):
    made, real = pixels(13, 4), pixels(9, 5) // 3
    job = image_job(tmp_path / "job", made, shard_items=5)
    reference = image_job(tmp_path / "real", real, shard_items=4)
    found = figures(job, "kid", "kid.features=identity", reference=reference)
    x, y = flat(made), flat(real)

    def kernel(a, b):
        return (a @ b / len(a) + 1) ** 3

    def pairs(z):
        n = len(z)
        terms = [kernel(z[i], z[j]) for i in range(n) for j in range(n) if i != j]
        return sum(terms) / (n * (n - 1))

    across = np.mean([[kernel(a, b) for b in y] for a in x])
    assert found["kid"] == pytest.approx(pairs(x) + pairs(y) - 2 * across, rel=1e-9)


def test_kid_of_equal_counts_equals_torchmetrics(tmp_path):
    from torchmetrics.image.kid import poly_mmd

    made, real = pixels(8, 6), pixels(8, 7)
    job, reference = image_job(tmp_path / "job", made), image_folder(tmp_path / "real", real)
    found = figures(job, "kid", "kid.features=identity", reference=reference)
    expected = poly_mmd(torch.from_numpy(flat(real)), torch.from_numpy(flat(made)))
    assert found["kid"] == pytest.approx(float(expected), rel=1e-9)


def test_fad_with_identity_features_equals_the_closed_form(tmp_path):
    waves = np.random.default_rng(8).uniform(-0.9, 0.9, (24, 5))
    waves = np.rint(waves * 2**15) / 2**15  # what 16 bits hold
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_wav(path, waves[i], 8000),
        16,
        modality="speech",
        extension="wav",
    )
    real = tmp_path / "real"
    real.mkdir()
    for i in range(16, 24):
        write_wav(real / f"{i}.wav", waves[i], 8000)
    found = figures(job, "fad", "fad.features=identity", reference=real)
    assert found["fad"] == pytest.approx(closed_form(waves[16:], waves[:16]), abs=1e-6)


def test_sounds_of_another_rate_are_resampled_or_an_error_and_never_broken(tmp_path, monkeypatch):
    wave = np.sin(np.arange(64) / 5)
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_wav(path, wave * (i + 1) / 8, 8000),
        4,
        modality="speech",
        extension="wav",
    )
    settings = ("fad.features=identity", "fad.rate=4000")
    called = []

    def halved(signal, rate, target):
        called.append((rate, target))
        return signal[:: rate // target]

    monkeypatch.setattr(readers, "resample", halved)
    assert abs(figures(job, "fad", *settings, reference=job)["fad"]) < 1e-6
    assert set(called) == {(8000, 4000)}

    def missing(*_):
        raise GenError("resampling needs torchaudio")

    monkeypatch.setattr(readers, "resample", missing)
    with pytest.raises(GenError, match="has 8000 samples per second; expected 4000"):
        figures(job, "fad", *settings, reference=job, fresh=True)


def test_fvd_with_identity_features_equals_the_closed_form(tmp_path):
    clips = np.random.default_rng(9).integers(0, 256, (70, 1, 2, 2, 3), dtype=np.uint8)
    job = write_job(
        tmp_path / "job",
        lambda i, path: write_lossless(path, clips[i], 4),
        36,
        modality="video",
        extension="mkv",
    )
    real = tmp_path / "real"
    real.mkdir()
    for i in range(36, 70):
        write_lossless(real / f"{i}.mkv", clips[i], 4)
    found = figures(job, "fvd", "fvd.features=identity", reference=real)
    rows = clips.transpose(0, 1, 4, 2, 3).reshape(70, -1).astype(np.float64)
    expected = closed_form(rows[36:], rows[:36])
    assert found["fvd"] == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_the_distance_of_fewer_items_than_dimensions_is_exact():
    """Orthogonal and equal sets of three rows in 50 dimensions have known distances."""
    rows = torch.zeros(3, 50, dtype=torch.float64)
    rows[0, 0], rows[1, 1] = 3e4, 4e4
    other = rows.roll(7, 1)
    a, b = Moments.of(rows), Moments.of(other)
    same = frechet_distance(a.mean, a.covariance, a.mean, a.covariance)
    apart = frechet_distance(a.mean, a.covariance, b.mean, b.covariance)
    traces = float(a.covariance.diagonal().sum() + b.covariance.diagonal().sum())
    assert abs(same) < 1e-5 * 1e-9 * traces
    assert apart == pytest.approx(float((a.mean - b.mean).square().sum()) + traces, rel=1e-12)

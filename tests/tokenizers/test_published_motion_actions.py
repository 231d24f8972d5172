"""Files of T2M-GPT's motion VQ-VAE and of FAST action tokenizers, as they are published, against
plain computations of their own."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from published import save_quietly

from gen.core.errors import GenError
from gen.tokenizers.action.base import ActionStatistics
from gen.tokenizers.action.fast import ActionFast
from gen.tokenizers.action.fast_bytes import FastBytes, WholeCharacters, state_of
from gen.tokenizers.motion.motion_vq import MotionVQ
from gen.tokenizers.motion.t2m_vq import T2MVQTokens
from gen.tokenizers.motion.t2m_vq_net import T2MVQ

FEATURES, CODES, CHANNELS, WIDTH, DEPTH = 263, 32, 12, 16, 3
H, D = 16, 3


# --- motion


def published_keys(depth: int = DEPTH, halvings: int = 2) -> dict[str, torch.Tensor]:
    """Random weights under the names and in the shapes that T2M-GPT's training script writes."""
    generator, found = torch.Generator().manual_seed(0), {}

    def conv(name: str, out: int, into: int, size: int) -> None:
        found[f"vqvae.{name}.weight"] = torch.randn(
            out, into, size, generator=generator
        ) / math.sqrt(into * size)
        found[f"vqvae.{name}.bias"] = torch.randn(out, generator=generator) / 4

    def blocks(name: str) -> None:
        for k in range(depth):
            conv(f"{name}.model.{k}.conv1", WIDTH, WIDTH, 3)
            conv(f"{name}.model.{k}.conv2", WIDTH, WIDTH, 1)

    conv("encoder.model.0", WIDTH, FEATURES, 3)
    conv("decoder.model.0", WIDTH, CHANNELS, 3)
    for i in range(2, 2 + halvings):
        conv(f"encoder.model.{i}.0", WIDTH, WIDTH, 4)
        blocks(f"encoder.model.{i}.1")
        blocks(f"decoder.model.{i}.0")
        conv(f"decoder.model.{i}.2", WIDTH, WIDTH, 3)
    conv(f"encoder.model.{2 + halvings}", CHANNELS, WIDTH, 3)
    conv(f"decoder.model.{2 + halvings}", WIDTH, WIDTH, 3)
    conv(f"decoder.model.{4 + halvings}", FEATURES, WIDTH, 3)
    found["vqvae.quantizer.codebook"] = torch.randn(CODES, CHANNELS, generator=generator)
    return found


def plain(weights, x: torch.Tensor, dilations=(9, 3, 1)) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised features [B, F, 263] -> codes [B, F / 4] and what they decode to, by the
    definition."""
    w = {k.removeprefix("vqvae."): v.double() for k, v in weights.items()}

    def conv(x, name, **how):
        return F.conv1d(x, w[f"{name}.weight"], w[f"{name}.bias"], **how)

    def blocks(x, name):
        for k, d in enumerate(dilations):
            x = x + conv(
                F.relu(conv(F.relu(x), f"{name}.model.{k}.conv1", padding=d, dilation=d)),
                f"{name}.model.{k}.conv2",
            )
        return x

    z = F.relu(conv(x.mT, "encoder.model.0", padding=1))
    for i in (2, 3):
        z = blocks(conv(z, f"encoder.model.{i}.0", stride=2, padding=1), f"encoder.model.{i}.1")
    z = conv(z, "encoder.model.4", padding=1)
    table = w["quantizer.codebook"]
    codes = (z.mT[:, :, None] - table).square().sum(-1).argmin(-1)
    y = F.relu(conv(table[codes].mT, "decoder.model.0", padding=1))
    for i in (2, 3):
        y = conv(
            blocks(y, f"decoder.model.{i}.0").repeat_interleave(2, -1),
            f"decoder.model.{i}.2",
            padding=1,
        )
    return (
        codes,
        conv(F.relu(conv(y, "decoder.model.4", padding=1)), "decoder.model.6", padding=1).mT,
    )


@pytest.fixture(scope="module")
def motion_folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("t2m")
    rng = np.random.default_rng(0)
    np.save(path / "Mean.npy", rng.normal(size=FEATURES).astype(np.float32) * 0.01)
    np.save(path / "Std.npy", np.full(FEATURES, 0.05, np.float32))
    torch.save({"net": published_keys()}, path / "net_last.pth")
    return path


def features(frames: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(frames, FEATURES)).astype(np.float32) * 0.05


@pytest.mark.parametrize("cls", [MotionVQ, T2MVQTokens])
def test_codes_and_motions_are_those_of_a_plain_forward(motion_folder, cls):
    frontend = cls.from_pretrained(motion_folder / "net_last.pth", dtype=torch.float64)
    x = torch.stack([frontend.preprocess(features(24, seed)) for seed in (1, 2)])
    codes, y = plain(published_keys(), x)
    assert (
        frontend.config.codebook_sizes == (CODES,)
        and frontend.config.compression == (4,)
        and frontend.grid_for(x.shape[1:]) == (6,)
    )
    assert torch.equal(frontend.encode(x)[:, 0], codes) and torch.allclose(
        frontend.decode(codes[:, None]), y, atol=1e-10
    )
    assert not torch.allclose(
        plain(published_keys(), x, dilations=(1, 3, 9))[1], y, atol=1e-3
    )  # control: dilations the other way round
    assert torch.equal(frontend.codebooks[0], published_keys()["vqvae.quantizer.codebook"].double())


def test_joints_come_out_and_features_go_in(motion_folder):
    frontend = MotionVQ.from_pretrained(str(motion_folder / "net_last.pth"))
    raw = features(16)
    x = frontend.preprocess(raw)
    assert (
        np.allclose(frontend.features(x), raw, atol=1e-6)
        and abs(float(x.mean())) < 0.2
        and 0.8 < float(x.std()) < 1.2
    )
    joints = frontend.postprocess(frontend.decode(frontend.encode(x[None]))[0])
    assert joints.shape == (16, 22, 3) and joints.dtype == np.float32 and np.isfinite(joints).all()
    for bad in (raw[:-1], raw[:, :-1], raw[None], "walk", raw * np.nan):
        with pytest.raises(GenError, match="expected"):
            frontend.preprocess(bad)


@pytest.mark.parametrize("wrap", ["module", "ema", "shallow"])
def test_other_checkpoints_of_the_network_load_too(motion_folder, tmp_path, wrap):
    weights = published_keys(depth=1 if wrap == "shallow" else DEPTH)
    if wrap == "module":
        weights = {f"module.{k}": v for k, v in weights.items()}
    elif wrap == "ema":
        weights |= {
            "vqvae.quantizer.code_sum": torch.ones(CODES, CHANNELS),
            "vqvae.quantizer.code_count": torch.ones(CODES),
        }
    torch.save({"net": weights}, tmp_path / "x.pth")
    statistics = motion_folder / "Mean.npy", np.ones(FEATURES)
    frontend = T2MVQTokens.from_pretrained(
        tmp_path / "x.pth", statistics=statistics, dtype=torch.float64
    )
    x = torch.from_numpy(features(8))[None].double()
    want = plain(
        published_keys(depth=1 if wrap == "shallow" else DEPTH),
        x,
        (1,) if wrap == "shallow" else (9, 3, 1),
    )[0]
    assert torch.equal(frontend.encode(x)[:, 0], want)


def test_what_is_no_such_checkpoint_is_refused(motion_folder, tmp_path):
    def refused(weights, message, **kwargs):
        torch.save(weights, tmp_path / "x.pth")
        with pytest.raises(GenError, match=message):
            MotionVQ.from_pretrained(tmp_path / "x.pth", **kwargs)

    good = published_keys()
    refused({"net": good}, "no mean.npy")  # nothing says what its numbers mean
    for name in ("Mean", "Std"):
        (tmp_path / f"{name}.npy").write_bytes((motion_folder / f"{name}.npy").read_bytes())
    refused(
        {"net": {k: v for k, v in good.items() if not k.endswith("4.bias")}}, "missing: .*4.bias"
    )
    refused({"net": {**good, "vqvae.odd": torch.ones(2)}}, "1 extra: vqvae.odd")
    refused({"net": {"a.weight": torch.ones(2)}}, "not those of a T2M-GPT")
    refused(
        {"net": {**good, "vqvae.encoder.model.0.weight": torch.ones(WIDTH, 251, 3)}},
        "251 features per frame; expected 263",
    )
    np.save(tmp_path / "Std.npy", np.zeros(FEATURES))
    refused({"net": good}, "above 0")
    with pytest.raises(GenError, match="ends in"):
        MotionVQ.from_pretrained(tmp_path / "absent.pth")
    assert isinstance(T2MVQ(8, 4, 2, 4, 1, 1).stride, int)


# --- actions


def chunks(count: int, seed: int = 0) -> np.ndarray:
    """Smooth movements [N, H, D] in [-1, 1]."""
    rng = np.random.default_rng(seed)
    t = np.linspace(0, 1, H)[None, :, None]
    start, end = rng.uniform(-1, 1, (2, count, 1, D))
    return start + (end - start) * (3 * t**2 - 2 * t**3)


def spectrum(x: np.ndarray) -> np.ndarray:
    """The orthonormal DCT-II along time of a chunk [H, D], by its sum."""
    k, t = np.arange(H)[:, None], np.arange(H)[None]
    basis = np.cos(np.pi * k * (2 * t + 1) / (2 * H)) * np.where(
        k == 0, np.sqrt(1 / H), np.sqrt(2 / H)
    )
    return basis @ x


def inverse(c: np.ndarray) -> np.ndarray:
    t, k = np.arange(H)[:, None], np.arange(H)[None]
    return (
        np.cos(np.pi * k * (2 * t + 1) / (2 * H)) * np.where(k == 0, np.sqrt(1 / H), np.sqrt(2 / H))
    ) @ c


@pytest.fixture(scope="module", params=[10.0, 60.0], ids=["one byte", "two bytes"])
def fast_folder(request, tmp_path_factory):
    """A tokenizer that is trained and saved as the published ones are; a finer scale has characters
    of two bytes."""
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    from tokenizers import ByteLevelBPETokenizer

    path, scale = tmp_path_factory.mktemp("fast"), request.param
    numbers = [np.around(spectrum(x) * scale).astype(int).ravel() for x in chunks(400)]
    low, high = min(n.min() for n in numbers) - 3, max(n.max() for n in numbers) + 3
    bpe = ByteLevelBPETokenizer()
    trainer = BpeTrainer(
        vocab_size=800,
        min_frequency=2,
        show_progress=False,
        special_tokens=[],
        max_token_length=10000,
        initial_alphabet=[chr(i) for i in range(high - low + 1)],  # as the published ``fit`` has it
    )
    bpe._tokenizer.train_from_iterator(
        ["".join(map(chr, n - low)) for n in numbers], trainer=trainer
    )
    save_quietly(
        PreTrainedTokenizerFast(
            tokenizer_object=bpe._tokenizer, clean_up_tokenization_spaces=False
        ),
        path,
    )
    config = {
        "processor_class": "UniversalActionProcessor",
        "scale": scale,
        "vocab_size": 800,
        "min_token": int(low),
    }
    (path / "processor_config.json").write_text(
        json.dumps({**config, "time_horizon": None, "action_dim": None})
    )
    return path


def load(folder, **kwargs) -> FastBytes:
    return ActionFast.from_pretrained(
        folder, dtype=torch.float64, **{"horizon": H, "dimensions": D, **kwargs}
    )


def test_fast_ids_and_coefficients_are_those_of_a_plain_decoder(fast_folder):
    from transformers import PreTrainedTokenizerFast

    frontend, config = (
        load(fast_folder),
        json.loads((fast_folder / "processor_config.json").read_text()),
    )
    own = PreTrainedTokenizerFast.from_pretrained(fast_folder)
    x = chunks(24, seed=1)
    codes = frontend.encode(torch.from_numpy(x))
    assert isinstance(frontend, FastBytes) and codes.shape == (24, 1, frontend.positions)
    assert (frontend.positions == 2 * H * D) == (config["scale"] > 50)
    for row, chunk, found, y in zip(
        codes[:, 0].tolist(), x, frontend.coefficients(codes), frontend.decode(codes), strict=True
    ):
        numbers = np.around(spectrum(chunk) * config["scale"]).astype(int)
        ids = own("".join(map(chr, numbers.ravel() - config["min_token"])))["input_ids"]
        assert row[: len(ids)] == ids and set(row[len(ids) :]) <= {frontend.eos_token_id}
        want = np.array([ord(c) for c in own.decode(ids)]).reshape(H, D) + config["min_token"]
        assert np.array_equal(found.numpy(), want) and np.array_equal(want, numbers)
        assert np.allclose(y.numpy(), inverse(want / config["scale"]).clip(-1, 1), atol=1e-12)
        assert not np.allclose(
            y.numpy(), inverse((want + 1) / config["scale"]).clip(-1, 1), atol=1e-2
        )  # control: another min_token
    assert float((codes != frontend.eos_token_id).sum(-1).double().mean()) < H * D


def test_every_sequence_drawn_by_the_rule_decodes_and_few_others_do(fast_folder):
    frontend = load(fast_folder)
    generator = torch.Generator().manual_seed(0)

    def drawn(legal, rows: int) -> torch.Tensor:
        history = torch.full((rows, frontend.positions), -1)
        for n in range(frontend.positions):
            may = legal(history, torch.full((rows, 1), n))[:, 0]
            assert bool(may.any(1).all())
            history[:, n] = torch.rand(may.shape, generator=generator).mul_(may).argmax(1)
        return history[:, None]

    def decodable(codes) -> int:
        good = 0
        for row in codes:
            try:
                good += frontend.decode(row[None]).shape == (1, H, D)
            except GenError:
                continue
        return good

    codes = drawn(frontend.constraint.legal, 300)
    assert frontend.decode(codes).shape == (300, H, D) and decodable(codes) == 300

    def anything(history, positions):
        return torch.ones(len(history), 1, frontend.vocab_size, dtype=torch.bool)

    assert decodable(drawn(anything, 100)) < 10
    rule = frontend.constraint
    deaf = WholeCharacters(
        rule.begun, rule.waits * 0, rule.opens * 0, rule.usable, rule.total, rule.eos_token_id
    )  # to open characters
    # where every character is one byte, none is left open
    has_open = bool((frontend.constraint.opens > 0).any())
    assert (decodable(drawn(deaf.legal, 100)) < 90) == has_open
    junk = torch.randint(-5, 2 * frontend.vocab_size, (50, frontend.positions), generator=generator)
    assert bool(rule.legal(junk, torch.arange(frontend.positions).expand(50, -1)).any(-1).all())


def test_bytes_of_ids_are_read_as_utf8():
    first, last = (bytes([b]) for b in "é".encode())
    none = ("€".encode(), last + last, first + b"a", b"\xc0\x80")
    for word, state in (
        (b"ab", (0, 2, 0)),
        (first + last, (0, 1, 0)),
        (first, (0, 1, 1)),
        (last, (1, 0, 0)),
        (last + b"a", (1, 1, 0)),
        (first + last + first, (0, 2, 1)),
        *((w, None) for w in none),
    ):
        assert state_of(word) == state, word


def test_a_published_folder_is_saved_and_loaded_again(fast_folder, tmp_path):
    statistics = ActionStatistics((0.0,) * D, (2.0,) * D)
    frontend = load(fast_folder, statistics=statistics)
    frontend.save_pretrained(tmp_path / "f")
    again = FastBytes.from_pretrained(tmp_path / "f", dtype=torch.float64)
    codes = frontend.encode(torch.from_numpy(chunks(4, seed=2)))
    assert torch.equal(again.decode(codes), frontend.decode(codes)) and torch.equal(
        again.fingerprint, frontend.fingerprint
    )
    assert np.allclose(
        frontend.postprocess(frontend.decode(codes)[0]),
        (frontend.decode(codes)[0].numpy() + 1).astype(np.float32),
    )


def test_what_is_open_or_wrong_in_a_fast_folder_is_named(fast_folder, tmp_path):
    import shutil

    for kwargs, message in (
        ({"horizon": None}, "leaves time_horizon open; expected horizon="),
        ({"dimensions": None}, "action_dim"),
        ({"horizon": 0}, "horizon is 0"),
    ):
        with pytest.raises(GenError, match=message):
            load(fast_folder, **kwargs)
    shutil.copytree(fast_folder, tmp_path / "f")
    config = json.loads((tmp_path / "f/processor_config.json").read_text())
    for change, message in (
        ({"time_horizon": 8}, "horizon is 16; .* has time_horizon 8"),
        ({"scale": ...}, "no 'scale'"),
        ({"min_token": -5000}, "min_token is -5000"),
    ):
        (tmp_path / "f/processor_config.json").write_text(
            json.dumps({k: v for k, v in {**config, **change}.items() if v is not ...})
        )
        with pytest.raises(GenError, match=message):
            load(tmp_path / "f")
    (tmp_path / "f/processor_config.json").write_text(
        json.dumps({**config, "time_horizon": H, "action_dim": D})
    )
    assert ActionFast.from_pretrained(tmp_path / "f").total == H * D
    (tmp_path / "f/tokenizer.json").write_text("{}")
    with pytest.raises(GenError, match="cannot be read"):
        load(tmp_path / "f")
    frontend = load(fast_folder)
    codes = frontend.encode(torch.from_numpy(chunks(2)))
    short = codes.clone()
    short[1, 0, 0] = frontend.eos_token_id
    with pytest.raises(GenError, match="row 1: its ids stand for 0 coefficients"):
        frontend.decode(short)
    with pytest.raises(GenError, match="given for action-fast; expected none"):
        ActionFast.from_pretrained("action-fast", horizon=3)

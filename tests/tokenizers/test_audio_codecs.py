"""Frontends over published audio codecs: EnCodec, DAC, X-Codec and Mimi, on tiny random ones that
were written to disk as theirs are."""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from gen.contracts.frontend import StreamingFrontend
from gen.core.errors import GenError
from gen.core.registry import registry
from gen.tokenizers.base.codec import lasting

RATE = 8000
CODEBOOK = dict(codebook_size=64)


def encodec(**more):
    from transformers import EncodecConfig, EncodecModel

    c = dict(
        target_bandwidths=[1.2, 2.4, 4.8],
        sampling_rate=RATE,
        hidden_size=16,
        num_filters=4,
        upsampling_ratios=[5, 4, 2],
        num_lstm_layers=1,
    )
    return EncodecModel(EncodecConfig(**CODEBOOK | c | more))


def dac(**more):
    from transformers import DacConfig, DacModel

    c = dict(
        encoder_hidden_size=4,
        downsampling_ratios=[2, 4, 5],
        decoder_hidden_size=32,
        n_codebooks=4,
        codebook_dim=4,
        sampling_rate=RATE,
    )
    return DacModel(DacConfig(**CODEBOOK | c | more))


def xcodec(**more):
    from transformers import DacConfig, HubertConfig, XcodecConfig, XcodecModel

    own = DacConfig(
        encoder_hidden_size=4,
        downsampling_ratios=[5, 4, 2],
        decoder_hidden_size=32,
        n_codebooks=2,
        sampling_rate=RATE,
        **CODEBOOK,
    )
    speech = dict(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        conv_dim=[16] * 4,
        conv_stride=[5, 2, 2, 2],
        conv_kernel=[10, 3, 3, 2],
        num_feat_extract_layers=4,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
    )
    model = XcodecModel(
        XcodecConfig(
            target_bandwidths=[1.2, 2.4, 4.8],
            sample_rate=RATE,
            acoustic_model_config=own,
            semantic_model_config=HubertConfig(**speech | more),
            **CODEBOOK,
        )
    )
    return model


def mimi(**more):
    from transformers import MimiConfig, MimiModel

    c = dict(
        sampling_rate=RATE,
        hidden_size=32,
        num_filters=4,
        upsampling_ratios=[5, 4, 4],
        codebook_dim=16,
        vector_quantization_hidden_dimension=16,
        num_quantizers=8,
        num_semantic_quantizers=1,
        upsample_groups=32,
        num_hidden_layers=1,
        intermediate_size=64,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=8,
    )
    return MimiModel(MimiConfig(**CODEBOOK | c | more))


MAKE = {"encodec": encodec, "dac": dac, "xcodec": xcodec, "mimi": mimi}
PARALLEL = ("encodec", "dac", "xcodec")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of every codec, with codebooks and weights that are not zero."""
    torch.manual_seed(0)
    found = {}
    for name, make in MAKE.items():
        model = make()
        for key, table in model.named_buffers():
            if key.endswith(("codebook.embed", "codebook.embed_sum")):
                table.normal_()
        for key, weight in model.named_parameters():
            if "conv" in key and weight.ndim > 1:
                weight.data *= 4 if name in ("dac", "xcodec") else 1.5
        found[name] = tmp_path_factory.mktemp("codecs") / name
        model.save_pretrained(found[name])
    return found


@pytest.fixture(scope="module")
def frontends(folders):
    return {
        name: registry.get("tokenizer", name).from_pretrained(path, dtype=torch.float64)
        for name, path in folders.items()
    }


def waves(frontend, frames=7, rows=3):
    return 0.3 * torch.randn(
        rows,
        1,
        frames * frontend.frame,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(1),
    )


@pytest.mark.parametrize("frames", [1, 2, 7, 30])
@pytest.mark.parametrize("name", MAKE)
def test_a_wave_of_whole_frames_keeps_its_length(name, frames, frontends):
    frontend = frontends[name]
    x = waves(frontend, frames)
    codes = frontend.encode(x)
    assert codes.shape == (3, len(frontend.config.codebook_sizes), frames) and frontend.grid_for(
        tuple(x.shape[1:])
    ) == (frames,)
    assert (
        codes.dtype == torch.long
        and int(codes.min()) >= 0
        and int(codes.max()) < 64
        and len(codes.unique()) > 2
    )
    assert frontend.decode(codes).shape == x.shape
    assert torch.equal(codes, frontend.encode(x))


def test_what_dac_leaves_out_is_filled_up(frontends):
    frontend = frontends["dac"]
    codes = frontend.encode(waves(frontend))
    own = frontend.model.decode(audio_codes=codes).audio_values
    assert own.shape[-1] < codes.shape[-1] * frontend.frame  # an odd stride
    assert torch.equal(frontend.decode(codes)[:, 0, : own.shape[-1]], own)


@pytest.mark.parametrize("name", MAKE)
def test_a_row_does_not_depend_on_its_batch(name, frontends):
    frontend = frontends[name]
    x = waves(frontend)
    codes = frontend.encode(x)
    for row in range(3):
        assert torch.equal(frontend.encode(x[row : row + 1])[0], codes[row])
        assert torch.allclose(
            frontend.decode(codes)[row], frontend.decode(codes[row : row + 1])[0], atol=1e-10
        )
    assert not torch.allclose(frontend.decode(codes)[0], frontend.decode(codes)[1], atol=1e-6)


def _decoded(name, model, vectors):
    """The wave of vectors [B, D, T], by the parts of the model behind its quantiser."""
    if name == "xcodec":
        return model.acoustic_decoder(model.fc2(vectors.transpose(1, 2)).transpose(1, 2))
    return model.decoder(vectors)


@pytest.mark.parametrize("name", PARALLEL)
def test_codebooks_hold_what_the_decoder_sums(name, frontends):
    frontend = frontends[name]
    codes = frontend.encode(waves(frontend))

    def summed(tables):
        return sum(t[codes[:, q]] for q, t in enumerate(tables)).transpose(1, 2)

    whole = frontend.decode(codes)
    with torch.no_grad():
        again = _decoded(name, frontend.model, summed(frontend.codebooks))
        assert torch.allclose(whole[..., : again.shape[-1]], again, atol=1e-10)
        other = _decoded(
            name, frontend.model, summed(frontend.codebooks[::-1])
        )  # control: another stream's vectors
        assert not torch.allclose(whole[..., : again.shape[-1]], other, atol=1e-6)


@pytest.mark.parametrize("name", MAKE)
def test_fewer_codebooks_say_what_the_first_of_all_say(name, folders, frontends):
    frontend = frontends[name]
    few = registry.get("tokenizer", name).from_pretrained(
        folders[name], dtype=torch.float64, num_quantizers=2
    )
    x = waves(frontend)
    every, codes = frontend.encode(x), few.encode(x)
    assert (
        len(frontend.config.codebook_sizes) > 2
        and len(few.config.codebook_sizes) == 2
        and codes.shape[1] == 2
    )
    assert torch.equal(codes, every[:, :2])
    assert [t.tolist() for t in few.codebooks] == [t.tolist() for t in frontend.codebooks[:2]]
    assert few.decode(codes).shape == x.shape
    assert not torch.allclose(
        few.decode(codes), frontend.decode(every), atol=1e-6
    )  # what the others add is heard
    with pytest.raises(GenError, match="expected"):
        few.decode(every)


@pytest.mark.parametrize("name", MAKE)
def test_a_frontend_that_is_saved_and_loaded_is_the_same(name, frontends, tmp_path):
    frontend = frontends[name]
    frontend.model.save_pretrained(tmp_path / "codec")
    again = type(frontend).from_pretrained(tmp_path / "codec", dtype=torch.float64)
    codes = frontend.encode(waves(frontend))
    assert again.config == frontend.config and torch.equal(again.fingerprint, frontend.fingerprint)
    assert torch.allclose(
        frontend.decode(codes), again.decode(codes), rtol=0, atol=1e-12
    )  # bits may differ with the place in memory
    other = next(f for n, f in frontends.items() if n != name)
    assert other.fingerprint.shape != again.fingerprint.shape or not torch.equal(
        other.fingerprint, again.fingerprint
    )


def test_published_files_of_encodec_name_the_halves_of_weights_otherwise(
    folders, frontends, tmp_path
):
    """They were written when weights were normalised under other names."""
    frontend = frontends["encodec"]
    frontend.model.save_pretrained(tmp_path / "old")
    file = tmp_path / "old" / "model.safetensors"
    names = {
        ".parametrizations.weight.original0": ".weight_g",
        ".parametrizations.weight.original1": ".weight_v",
    }
    tensors = load_file(file)
    renamed = {}
    for key, value in tensors.items():
        for new, old in names.items():
            key = key.replace(new, old)
        renamed[key] = value
    assert set(renamed) != set(tensors) or any(k.endswith("weight_g") for k in tensors)
    save_file(renamed, file, {"format": "pt"})
    again = type(frontend).from_pretrained(tmp_path / "old", dtype=torch.float64)
    codes = frontend.encode(waves(frontend))
    assert torch.allclose(
        frontend.decode(codes), again.decode(codes), rtol=0, atol=1e-12
    )  # bits may differ with the place in memory
    lost = next(k for k in renamed if k.endswith("weight_v"))
    del renamed[lost]  # control
    save_file(renamed, file, {"format": "pt"})
    with pytest.raises(GenError, match="missing"):
        type(frontend).from_pretrained(tmp_path / "old")


@pytest.mark.parametrize("name", PARALLEL)
def test_decoders_that_look_ahead_or_remember_for_ever_are_not_streamed(name, frontends):
    frontend = frontends[name]
    assert not isinstance(frontend, StreamingFrontend)
    codes = frontend.encode(waves(frontend, 40, 1))
    frame = 0 if name == "encodec" else 39
    other = codes.clone()
    other[..., frame] = (other[..., frame] + 17) % 64
    far = (frontend.decode(codes) - frontend.decode(other)).abs()[0, 0].view(40, -1).amax(1)
    reached = far[1:] if name == "encodec" else far[:-1]
    assert (
        float(reached.max()) > 0
    )  # a change of one frame is heard in frames after it, or in frames before it
    if name == "encodec":
        assert float(far[-1]) > 0  # and for ever


def test_mimi_decodes_a_part_of_its_codebooks_in_chunks_as_at_once(folders):
    frontend = registry.get("tokenizer", "mimi").from_pretrained(
        folders["mimi"], dtype=torch.float64, num_quantizers=3
    )
    assert isinstance(frontend, StreamingFrontend)
    codes = frontend.encode(waves(frontend, 30, 1))
    whole = frontend.decode_at_once(codes)
    assert float((frontend.decode(codes) - whole).abs().max() / whole.abs().max()) < 1e-6
    frontend.context = 0  # control
    assert float((frontend.decode(codes) - whole).abs().max() / whole.abs().max()) > 1e-3


@pytest.mark.parametrize("name", MAKE)
def test_wrong_waves_and_codes_and_numbers_are_refused(name, frontends, tmp_path):
    frontend = frontends[name]
    x = frontend.preprocess(np.zeros(2 * frontend.frame, np.float32))
    assert x.shape == (1, 2 * frontend.frame) and x.dtype == torch.float64
    for bad in (
        np.zeros((3, 3), np.float32),
        np.zeros(0, np.float32),
        np.zeros(2 * frontend.frame - 1, np.float32),
    ):
        with pytest.raises(GenError, match="expected"):
            frontend.preprocess(bad)
    codes = frontend.encode(waves(frontend))
    for bad in (codes - 1000, codes + 64, codes[:, :1], codes[:, :, 0]):
        with pytest.raises(GenError, match="expected"):
            frontend.decode(bad)
    for bad in (0, 99, True, 1.5):
        with pytest.raises(GenError, match="num_quantizers"):
            type(frontend)(frontend.model, bad)
    with pytest.raises(GenError, match="nowhere"):
        type(frontend).from_pretrained(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "what", [dict(normalize=True), dict(chunk_length_s=1.0, overlap=0.01), dict(audio_channels=2)]
)
def test_encodec_models_whose_codes_do_not_say_all_are_refused(what):
    with pytest.raises(GenError, match=next(iter(what))):
        registry.get("tokenizer", "encodec")(encodec(**what))


def test_an_xcodec_whose_halves_have_other_frames_is_refused():
    with pytest.raises(GenError, match="20 samples"):
        registry.get("tokenizer", "xcodec")(xcodec(conv_stride=[5, 2, 2, 1]))


def test_a_length_is_said_in_seconds_or_frames(frontends):
    frontend = frontends["encodec"]
    assert (
        lasting(frontend, None, None, 0.5)
        == 0.5 * RATE / frontend.frame
        == lasting(frontend, 0.5, None, 3.0)
    )
    assert lasting(frontend, None, 7, 3.0) == 7 and lasting(frontend, 1e-6, None, 3.0) == 1
    for seconds, frames in (
        (1.0, 7),
        (0, None),
        (float("inf"), None),
        ("1", None),
        (None, 0),
        (None, 1.5),
        (None, True),
    ):
        with pytest.raises(GenError, match="expected"):
            lasting(frontend, seconds, frames, 3.0)

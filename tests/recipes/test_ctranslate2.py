"""Whisper in CTranslate2's format becomes the folder of transformers that it was made of."""

from __future__ import annotations

import json
import struct

import pytest
import torch
from calls import only
from published import save_quietly
from tiny_whisper import RATE, tiny, wave

import gen
from gen.core.errors import GenError
from gen.recipes.speech import real_speech
from gen.recipes.speech.ctranslate2 import PARTS, TYPES, convert, read_variables

SPECIAL = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|translate|>", "<|transcribe|>"]
SPECIAL += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
FIRST = 256  # id of the first special token: the others are bytes
SIZE = FIRST + len(SPECIAL)
IDS = {name: FIRST + n for n, name in enumerate(SPECIAL)}
SAID = {
    "suppress_ids": [1, 2, *range(FIRST + 1, SIZE)],
    "suppress_ids_begin": [220, FIRST],
    "alignment_heads": [[0, 0]],
    "lang_ids": [IDS["<|en|>"]],
}


def model():
    """A tiny English model in float16, as its own class has it."""
    return tiny(
        multilingual=False,
        vocab_size=SIZE,
        num_mel_bins=80,
        d_model=32,
        max_source_positions=1500,
        pad_token_id=FIRST,
        bos_token_id=FIRST,
        eos_token_id=FIRST,
        decoder_start_token_id=IDS["<|startoftranscript|>"],
    ).half()


def variables(weights, heads=2):
    """Variables of CTranslate2 for weights of transformers, by name."""
    found = {f"{side}/num_heads": torch.tensor(heads).short() for side in ("encoder", "decoder")}
    found["decoder/activation"] = torch.tensor(3, dtype=torch.int8)
    found["decoder/scale_embeddings"] = torch.tensor(0, dtype=torch.int8)
    ends = {"weight": "gamma", "bias": "beta"}
    for side, layers in (("encoder", 1), ("decoder", 2)):
        for n in range(layers):
            for name, parts in PARTS.items():
                full = [f"model.{side}.layers.{n}.{part}" for part in parts]
                for kind in ("weight", "bias"):
                    last = weights.get(f"{full[-1]}.{kind}")
                    if last is None:
                        continue  # an encoder attends to nothing else
                    blank = torch.zeros_like(last)  # keys have no bias
                    rows = [weights.get(f"{part}.{kind}", blank) for part in full]
                    end = ends[kind] if "norm" in name else kind
                    found[f"{side}/layer_{n}/{name}/{end}"] = torch.cat(rows)
        for kind, end in ends.items():
            found[f"{side}/layer_norm/{end}"] = weights[f"model.{side}.layer_norm.{kind}"]
        positions = weights[f"model.{side}.embed_positions.weight"]
        found[f"{side}/position_encodings/encodings"] = positions
    for name in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            found[f"encoder/{name}/{kind}"] = weights[f"model.encoder.{name}.{kind}"]
    found["decoder/embeddings/weight"] = weights["model.decoder.embed_tokens.weight"]
    return found


def text(value):
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def written(path, found, kind="WhisperSpec", version=6):
    """Write a folder of CTranslate2."""
    content = struct.pack("<I", version) + text(kind) + struct.pack("<II", 3, len(found))
    for name, values in found.items():
        data = values.contiguous().numpy().tobytes()
        content += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        content += struct.pack("<BI", TYPES.index(values.dtype), len(data)) + data
    alias = text("decoder/projection/weight") + text("decoder/embeddings/weight")
    path.mkdir()
    (path / "model.bin").write_bytes(content + struct.pack("<I", 1) + alias)
    (path / "config.json").write_text(json.dumps(SAID))
    write_tokenizer(path / "tokenizer.json")
    return path


def write_tokenizer(path):
    """Write a tokenizer of bytes that ends with Whisper's special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    inner.save(str(path))


@pytest.fixture(scope="module")
def own():
    return model()


@pytest.fixture(scope="module")
def converted(own, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted")
    convert(written(folder / "source", variables(own.state_dict())), folder / "target")
    return folder / "target"


def test_weights_config_and_rules_are_those_of_the_model(own, converted):
    from transformers import WhisperForConditionalGeneration

    found = WhisperForConditionalGeneration.from_pretrained(converted, dtype="auto")
    assert found.dtype == torch.float16
    weights, wanted = found.state_dict(), own.state_dict()
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    for name in ("d_model", "num_mel_bins", "encoder_layers", "decoder_layers", "vocab_size"):
        assert getattr(found.config, name) == getattr(own.config, name)
    rules = found.generation_config
    assert rules.suppress_tokens == SAID["suppress_ids"]
    assert rules.begin_suppress_tokens == SAID["suppress_ids_begin"]
    assert rules.no_timestamps_token_id == IDS["<|notimestamps|>"]
    assert not rules.is_multilingual


@pytest.mark.slow
def test_the_converted_folder_writes_down_what_generate_does(converted):
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    heard, rate = [wave(16000, 0), wave(9000, 1)], RATE
    extractor = WhisperFeatureExtractor.from_pretrained(converted)
    features = extractor(heard, sampling_rate=rate, return_tensors="pt").input_features
    theirs = WhisperForConditionalGeneration.from_pretrained(converted, dtype=torch.float32)
    want = [[t for t in row if t < FIRST] for row in theirs.generate(features, max_new_tokens=8)]
    pipe = gen.load("text", model=converted, max_new_tokens=8)
    prompts = [{"audio": (x, rate)} for x in heard]
    for sampler in ("autoregressive", "speculative_jacobi"):
        out = pipe(prompts, sampler, **only(temperature=0.0))
        assert [[t for t in row if t < FIRST] for row in out.tokens.tolist()] == want
    assert want[0] != want[1]


@pytest.mark.parametrize(
    "change, said",
    [
        ({"decoder/activation": torch.tensor(0, dtype=torch.int8)}, "decoder/activation is 0"),
        ({"decoder/other/weight": torch.zeros(2)}, "variable decoder/other/weight is unknown"),
        ({"encoder/conv1/weight": torch.zeros(2, 2).char()}, "is quantised"),
        ({"decoder/layer_0/attention/linear_1/bias": torch.ones(64).half()}, "keys have a bias"),
        ({"encoder/conv1/bias": None}, r"lacks \['model.encoder.conv1.bias'\]"),
    ],
)
def test_variables_of_other_models_are_refused(own, tmp_path, change, said):
    found = {k: v for k, v in {**variables(own.state_dict()), **change}.items() if v is not None}
    with pytest.raises(GenError, match=said):
        convert(written(tmp_path / "source", found), tmp_path / "target")


def test_other_files_and_versions_are_refused(own, tmp_path):
    found = variables(own.state_dict())
    path = written(tmp_path / "whole", found) / "model.bin"
    assert len(read_variables(path)) == len(found) + 1
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(GenError, match="cannot be read as a model of CTranslate2"):
        read_variables(path)
    for name, more in (("older", {"version": 5}), ("kind", {"kind": "TransformerSpec"})):
        other = written(tmp_path / name, found, **more)
        with pytest.raises(GenError, match="expected version 6 of a 'WhisperSpec'"):
            read_variables(other / "model.bin")


def test_a_folder_without_a_tokenizer_is_refused(own, tmp_path):
    source = written(tmp_path / "source", variables(own.state_dict()))
    (source / "config.json").unlink()
    with pytest.raises(GenError, match="is incomplete"):
        convert(source, tmp_path / "target")


def test_the_written_folder_is_the_saved_model(own, converted, tmp_path):
    save_quietly(own, tmp_path)
    mine = json.loads((converted / "config.json").read_text())
    wanted = json.loads((tmp_path / "config.json").read_text())
    assert {k: v for k, v in mine.items() if wanted.get(k) != v} == {}


@pytest.mark.slow
def test_spoken_sentences_are_compared_and_other_tokens_are_told(converted, monkeypatch, capsys):
    monkeypatch.setattr(real_speech, "SENTENCES", real_speech.SENTENCES[:3])
    monkeypatch.setattr(real_speech, "SAMPLERS", {"autoregressive": "autoregressive"})
    monkeypatch.setattr(real_speech, "speak", lambda text, path: wave(16000, len(text)))
    assert real_speech.compare(converted, threads=1)
    printed = capsys.readouterr().out
    assert printed.count(" 3/3 ") == 2
    assert "word error rate" in printed
    own = real_speech.expected
    monkeypatch.setattr(real_speech, "expected", lambda *args: (own(*args)[0][::-1], 0.0))
    assert not real_speech.compare(converted, threads=1)
    assert " 1/3 " in capsys.readouterr().out


def test_a_machine_without_espeak_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(real_speech.shutil, "which", lambda name: None)
    with pytest.raises(GenError, match="espeak-ng is not installed; expected it"):
        real_speech.speak("hello", tmp_path / "x.wav")


def test_word_errors_count_words_without_case_and_punctuation():
    said = [text.upper() for text in real_speech.SENTENCES]
    assert real_speech.errors(said, real_speech.SENTENCES) == 0.0
    words = sum(len(text.split()) for text in real_speech.SENTENCES)
    one_unheard = real_speech.errors(["", *said[1:]], real_speech.SENTENCES)
    assert one_unheard == len(said[0].split()) / words

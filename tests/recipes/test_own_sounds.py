"""Sentences that espeak-ng speaks, what is heard of them, and the road of docs/own-sounds.md."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import own_media
import pytest
import soundfile as sf
import tiny_whisper

from gen.__main__ import main as gen_main
from gen.core.errors import GenError
from gen.recipes.speech import heard, real_speech, sentences

PAGE = Path(__file__).parents[2] / "docs" / "own-sounds.md"
RECIPES = {m.__name__: m.main for m in (heard, sentences)}


def hears(monkeypatch: pytest.MonkeyPatch, texts: list[list[str]]) -> None:
    """Let a script stand for the Whisper: texts of one call after the other."""

    def transcribe(asr, waves, rate):
        assert rate == 16_000 and all(len(wave) for wave in waves)
        return texts.pop(0)

    monkeypatch.setattr(heard, "transcribe", transcribe)


def test_sentences_are_different_and_their_words_are_trained_on(tmp_path, monkeypatch):
    spoken = []
    monkeypatch.setattr(
        sentences, "speak", lambda text, path, voice: spoken.append((path.parent.name, text, voice))
    )
    assert sentences.main([str(tmp_path)]) == 0
    assert len({text for _, text, _ in spoken}) == 120
    words = {
        part: {word for kind, text, _ in spoken if kind == part for word in text.split()}
        for part in ("train", "held")
    }
    assert words["held"] <= words["train"]
    assert [part for part, _, _ in spoken].count("held") == 24
    captions = {p.read_text().strip() for p in tmp_path.glob("*/*.txt")}
    names = {voice: name for name, voice in sentences.VOICES.items()}
    assert captions == {f"{names[voice]}: {text}" for _, text, voice in spoken}


def test_a_machine_without_espeak_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(real_speech.shutil, "which", lambda name: None)
    with pytest.raises(GenError, match="espeak-ng is not installed; expected it"):
        sentences.main([str(tmp_path)])


def test_what_is_heard_of_originals_copies_and_a_model_is_counted(tmp_path, monkeypatch, capsys):
    folder = own_media.speech(tmp_path / "media", 2)
    said = [p.read_text().strip() for p in sorted(folder.glob("*.txt"))]
    words = [len(text.split()) for text in said]
    hears(monkeypatch, [said, [said[0], ""], ["", f"more {said[1]}"]])
    options = ["--asr", "W", "--model", "speech-causal", "--out", str(tmp_path / "H")]
    assert heard.main([str(folder), *options]) == 0
    printed = capsys.readouterr().out
    assert "word error rate, originals: 0.0%" in printed
    copies, model = words[1] / sum(words), (words[0] + 1) / sum(words)
    assert f"copy synthesis: {copies:.1%}" in printed and f"model: {model:.1%}" in printed
    assert all(text in printed for text in said)
    assert (tmp_path / "H" / heard.SHEET).is_file()
    kinds = ("originals", "copy-synthesis", "model")
    waves = [sf.read(tmp_path / "H" / kind / "000.wav")[0] for kind in kinds]
    assert len(waves[0]) == len(waves[1]) and (waves[0] != waves[1]).any()
    assert len(waves[2]) != len(waves[0]) or (waves[2] != waves[0]).any()


def test_a_whisper_transcribes(tmp_path, monkeypatch):
    asr = tiny_whisper.written(tmp_path / "whisper", multilingual=False)
    monkeypatch.setattr(heard, "LONGEST", 10)
    waves = [tiny_whisper.wave(8000, seed) for seed in (0, 1)]
    texts = heard.transcribe(str(asr), waves, tiny_whisper.RATE)
    assert len(texts) == 2 and all(texts) and texts[0] != texts[1]


def test_the_name_of_a_voice_is_not_said():
    assert heard.sentence_of("george: the old man") == "the old man"
    assert heard.sentence_of("the old man") == "the old man"


def test_folders_without_sounds_or_texts_are_named(tmp_path):
    folder = own_media.speech(tmp_path / "media", 2)
    path = next(folder.glob("*.txt"))
    path.unlink()
    with pytest.raises(GenError, match=f"{path.stem}.wav has no text; expected what is said in"):
        heard.read(folder, "speech-codec")
    with pytest.raises(GenError, match="has no sounds; expected WAV files"):
        heard.read(tmp_path, "speech-codec")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    """With ten sentences and few steps; a script hears the sounds in place of a Whisper."""
    monkeypatch.chdir(tmp_path)
    hears(monkeypatch, [["the old man"] * 2] * 3)
    block = re.search(r"^```text\n(python -m gen.*?)^```", PAGE.read_text(), re.S | re.M)[1]
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\bsteps=\d+", "steps=2", line)
        words = shlex.split(re.sub(r"--copies \d+", "--copies 2", line))
        if words[:2] == ["python", "-m"]:
            more = ["--count", "10"] * (words[2] == sentences.__name__)
            assert RECIPES[words[2]]([*words[3:], *more]) == 0
        else:
            assert words[0] == "gen" and gen_main(words[1:]) == 0
    assert "word error rate, model" in capsys.readouterr().out

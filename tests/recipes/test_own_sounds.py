"""Sentences that espeak-ng speaks, what is heard of them, and the road of docs/own-sounds.md."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import own_media
import pytest
import soundfile as sf

from gen.__main__ import main as gen_main
from gen.core.errors import GenError
from gen.recipes.speech import heard, real_speech, sentences

PAGE = Path(__file__).parents[2] / "docs" / "own-sounds.md"
RECIPES = {m.__name__: m.main for m in (heard, sentences)}
ASR = """
said = open(r"{said}", encoding="utf-8").read().splitlines()

def hear(wave, rate):
    assert rate == 16_000 and len(wave)
    return said.pop(0)
"""


def recogniser(folder: Path, said: list[str]) -> str:
    """Write a recogniser that hears these texts, one after the other."""
    (folder / "said.txt").write_text("\n".join(said), encoding="utf-8")
    (folder / "asr.py").write_text(ASR.format(said=folder / "said.txt"))
    return f"{folder / 'asr.py'}:hear"


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


def test_what_is_heard_of_originals_copies_and_a_model_is_counted(tmp_path, capsys):
    folder = own_media.speech(tmp_path / "media", 2)
    said = [p.read_text().strip() for p in sorted(folder.glob("*.txt"))]
    words = [len(text.split()) for text in said]
    asr = recogniser(tmp_path, [*said, said[0], "", "", f"more {said[1]}"])
    words_of = ["--asr", asr, "--model", "speech-causal", "--out", str(tmp_path / "H")]
    assert heard.main([str(folder), *words_of]) == 0
    printed = capsys.readouterr().out
    assert "word error rate, originals: 0.0%" in printed
    copies, model = words[1] / sum(words), (words[0] + 1) / sum(words)
    assert f"copy synthesis: {copies:.1%}" in printed and f"model: {model:.1%}" in printed
    assert all(text in printed for text in said)
    assert (tmp_path / "H" / heard.PICTURE).is_file()
    waves = {kind: sf.read(tmp_path / "H" / kind / "000.wav")[0] for kind in ("originals", "model")}
    assert (
        len(waves["originals"]) != len(waves["model"])
        or (waves["originals"] != waves["model"]).any()
    )


def test_a_sound_without_a_text_is_named(tmp_path):
    folder = own_media.speech(tmp_path / "media", 2)
    path = next(folder.glob("*.txt"))
    path.unlink()
    with pytest.raises(GenError, match=f"{path.stem}.wav has no text; expected what is said in it"):
        heard.main([str(folder), "--asr", recogniser(tmp_path, []), "--out", str(tmp_path / "H")])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("espeak-ng") is None, reason="espeak-ng is not installed")
def test_the_commands_of_the_page_run_in_their_order(tmp_path, monkeypatch, capsys):
    """With ten sentences and few steps; a script hears the sounds in place of a Whisper."""
    monkeypatch.chdir(tmp_path)
    asr = recogniser(tmp_path, ["the old man"] * 6)
    block = re.search(r"^```text\n(python -m gen.*?)^```", PAGE.read_text(), re.S | re.M)[1]
    for line in block.replace("\\\n", " ").splitlines():
        line = re.sub(r"\bsteps=\d+", "steps=2", line).replace("models/whisper-tiny-en", asr)
        words = shlex.split(re.sub(r"--copies \d+", "--copies 2", line))
        if words[:2] == ["python", "-m"]:
            more = ["--count", "10"] * (words[2] == sentences.__name__)
            assert RECIPES[words[2]]([*words[3:], *more]) == 0
        else:
            assert words[0] == "gen" and gen_main(words[1:]) == 0
    assert "word error rate, model" in capsys.readouterr().out

"""Models are saved without progress bars, and the settings of the libraries stay as they were."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from small_llama import small_llama
from transformers.utils import logging

from gen.models.load.locate import save_model

ROOT = Path(__file__).parents[2]
BAR = "Writing model shards"
# frontends, tokenizers and layers of gen's own, which write their files themselves
OWN = {"frontend", "words", "phones", "probe", "layer", "self.tokenizer"}


@pytest.fixture(autouse=True)
def bars():
    """The setting that a process begins with."""
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    if not shown:
        logging.disable_progress_bar()


def test_a_model_is_saved_without_a_word(tmp_path, capfd):
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    save_model(small_llama(24), tmp_path / "quiet", max_shard_size="5MB")
    assert "".join(capfd.readouterr()) == ""
    assert (tmp_path / "quiet" / "model.safetensors").stat().st_size > 1000
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_control_transformers_itself_shows_a_bar(tmp_path, capfd):
    small_llama(24).save_pretrained(tmp_path)
    assert BAR in capfd.readouterr().err


def loud(text: str) -> set[str]:
    """What a source calls ``save_pretrained`` of, beyond ``OWN``."""
    return set(re.findall(r"^ *([\w.()]+)\.save_pretrained\(", text, re.MULTILINE)) - OWN


def test_recipes_and_training_save_in_this_way():
    folders = (ROOT / "recipes", ROOT / "gen" / "training", ROOT / "gen" / "pipeline")
    sources = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(sources) > 50
    assert not {path: said for path in sources if (said := loud(path.read_text()))}
    assert loud("    model.half().save_pretrained(x)\n") == {"model.half()"}  # control

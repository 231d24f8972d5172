"""Codecs of sounds by the folder they lie in: gen's own, and the published ones of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gen.contracts.frontend import TokenFrontend
from gen.core.errors import bad_value
from gen.models.load.locate import read_config
from gen.tokenizers.audio.bands import Bands
from gen.tokenizers.audio.dac import DAC
from gen.tokenizers.audio.encodec import Encodec
from gen.tokenizers.audio.mimi import Mimi

CODECS: dict[str, Any] = {"mimi": Mimi, "encodec": Encodec, "dac": DAC}  # by model_type


def open_codec(
    folder: str | Path, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> TokenFrontend:
    """Load the codec of a folder.

    Raises:
        GenError: its config names no known codec, or its weights do not fit.
    """
    config = read_config(folder)
    if config.get("frontend_class") == Bands.name:
        return Bands.from_pretrained(folder, device, dtype)
    kind = config.get("model_type")
    if kind not in CODECS:
        raise bad_value("frontend", str(folder), f"a codec of sounds: {', '.join(CODECS)}")
    return CODECS[kind].from_pretrained(folder, device, dtype)

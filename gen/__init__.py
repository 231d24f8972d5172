"""gen: every modality becomes tokens, and one registry of samplers decodes them all."""

from pathlib import Path

_root = Path(__file__).parents[1]
if (_root / "pyproject.toml").is_file():  # a checkout keeps samplers/, tokenizers/, modalities/ and configs/ beside gen/
    __path__.insert(0, str(_root))  # a wheel holds them inside it

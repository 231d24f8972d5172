"""Modules that turn media into features: an import path, a file, a checkpoint, or the media
themselves.

A module is called with a batch and returns features [B, D], or [B, N, D] for N vectors per item:

* images: uint8 [B, 3, H, W];
* clips: uint8 [B, F, 3, H, W];
* waves: float32 [B, n].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.core.errors import GenError
from gen.core.import_paths import is_import_path, load_object
from gen.eval.metric import Item
from gen.models.load.libraries import LOADING, transformers

EXPECTED = (
    "module:name, file.py:name, a TorchScript file, a folder or hub id of transformers, or identity"
)


@dataclass(frozen=True)
class Features:
    """Features of equally shaped samples, [n, D] on the processor.

    Attributes:
        function: features of a list of samples.
        rate: samples per second of the waves that it takes; None if it does not say.
    """

    function: Callable[[list[Tensor]], Tensor]
    rate: int | None = None

    def __call__(self, samples: list[Tensor]) -> Tensor:
        return self.function(samples)


def load_features(text: str, device: torch.device, where: str) -> Features:
    """Load the features of images, clips or waves.

    Args:
        text: import path, TorchScript file, folder or hub id, or ``identity``.
        device: device of the module.
        where: parameter that gave it, for the message.

    Raises:
        GenError: it cannot be loaded.
    """
    if text == "identity":
        return Features(lambda samples: torch.stack(samples).flatten(1))
    if is_import_path(text):
        module = load_object(text, where)
    elif Path(text).expanduser().is_file():
        module = _torchscript(Path(text).expanduser(), device, where)
    else:
        return _pretrained(text, device, where)
    if isinstance(module, nn.Module):
        module = module.eval().to(device)
    elif not callable(module):
        raise GenError(f"{where} is {text!r}, a {type(module).__name__}; expected {EXPECTED}")
    return Features(
        lambda samples: _checked(_run(module, torch.stack(samples).to(device)), samples, where)
    )


def _run(module: Callable[[Tensor], Any], batch: Tensor) -> Any:
    with torch.inference_mode():
        return module(batch)


def _torchscript(path: Path, device: torch.device, where: str) -> nn.Module:
    try:
        return torch.jit.load(str(path), map_location=device).eval()
    except RuntimeError as error:
        raise GenError(
            f"{where} is {path}, which is not a TorchScript file:"
            f" {str(error).splitlines()[0][:200]}"
        ) from None


def _pretrained(text: str, device: torch.device, where: str) -> Features:
    """Load a model of transformers with its processor; its features are the pooled output, or the
    mean of the last hidden states."""
    library = transformers()
    try:
        with LOADING:
            model = library.AutoModel.from_pretrained(text).eval().to(device)
    # whatever a folder or hub id lacks
    except Exception as error:
        raise GenError(
            f"{where} is {text!r}, which cannot be loaded: {' '.join(str(error).split())[:200]};"
            f" expected {EXPECTED}"
        ) from None
    try:
        process: Any = library.AutoImageProcessor.from_pretrained(text)
        is_image = True
    except (OSError, ValueError):
        try:
            process, is_image = library.AutoFeatureExtractor.from_pretrained(text), False
        except (OSError, ValueError):
            raise GenError(
                f"{where} is {text!r}, which has no image processor and no feature extractor"
            ) from None

    def call(samples: list[Tensor]) -> Tensor:
        if is_image:
            inputs = process(images=samples, return_tensors="pt")
        else:
            waves = [s.numpy() for s in samples]
            rate = process.sampling_rate
            inputs = process(waves, sampling_rate=rate, return_tensors="pt")
        with torch.inference_mode():
            outputs = model(**{k: v.to(device) for k, v in inputs.items()})
        pooled = outputs.get("pooler_output")
        if pooled is None:
            pooled = outputs.last_hidden_state.mean(1)
        return _checked(pooled.flatten(1), samples, where)

    return Features(call, None if is_image else process.sampling_rate)


def _checked(features: Any, samples: list[Tensor], where: str) -> Tensor:
    """Return features as [n, D] on the processor. Raises ``GenError`` for another shape or NaN."""
    if not isinstance(features, Tensor) or features.ndim not in (2, 3):
        shape = list(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise GenError(f"{where} returned {shape}; expected features [B, D] or [B, N, D]")
    if len(features) != len(samples):
        raise GenError(f"{where} returned {len(features)} rows; expected {len(samples)}")
    rows = features.detach().flatten(0, -2).cpu()
    rows = rows if rows.dtype == torch.float64 else rows.float()
    if not rows.isfinite().all():
        raise GenError(f"{where} returned NaN or inf; expected finite features")
    return rows


def batches(samples: Iterator[tuple[Item, Tensor]], size: int) -> Iterator[list[Tensor]]:
    """Yield runs of equally shaped samples of at most ``size``."""
    batch: list[Tensor] = []
    for _, sample in samples:
        if batch and (len(batch) == size or batch[0].shape != sample.shape):
            yield batch
            batch = []
        batch.append(sample)
    if batch:
        yield batch

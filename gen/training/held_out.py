"""Held-out loss: how many bits a trained model takes for tokens that it was not trained on.

Of a causal model it is the negative log-likelihood of the tokens, and exact. Of a masked model it
is a bound from above, the mean over orders of positions (Uria et al., arXiv 1310.1757): with k
masked positions of T, T / k times the loss of those, k being uniform. Bits are those of the tokens:
what the frontend loses is not in them, so figures compare models of one frontend.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.modalities.grid_base import GridModality
from gen.models.load.locate import pick_device, read_config
from gen.training.config import TrainingConfig
from gen.training.data import TokenData, load_data, split
from gen.training.frontends import usual_config
from gen.training.run import RUN
from gen.training.shards import read_json
from gen.training.tasks import MODEL, GridTask, LanguageTask, Task, make_task

BATCH = 8  # samples of a forward pass
DRAWS = 8  # numbers of masked positions of a sample


def held_out_loss(
    folder: str | Path, data: str | Path, device: str = "cpu", draws: int = DRAWS
) -> dict[str, Any]:
    """Measure the loss of a model on tokens.

    Args:
        folder: folder of ``gen train``, or of a model.
        data: folder of ``gen encode``. Of the data that a run was trained on, only the samples that
            it did not train on are measured; of any other data all of them.
        device: device of the model.
        draws: forward passes of a sample, of a masked model.

    Returns:
        ``samples`` and ``tokens`` measured, ``nats_per_token``, ``bits_per_token``, and
        ``bits_per_dimension`` of the media (values of pixels, of waves ...; of texts
        ``bits_per_byte``), ``standard_error`` of the bits per token over samples, and ``bound``,
        true where the figures are bounds from above.

    Raises:
        GenError: the model does not fit the data, is one of blocks, or nothing was held out.
    """
    tokens, root = load_data(data), Path(folder)
    rows = torch.arange(len(tokens.tokens))
    model, run = (root / MODEL, read_json(root / RUN)) if (root / RUN).is_file() else (root, {})
    if run.get("data_digest") == tokens.mark:
        rows = split(len(rows), run["validation"], run["seed"])[1]
    if not len(rows):
        raise GenError(
            f"the run {folder} was trained on all samples of {data}; expected other data, or a run"
            " with validation above 0"
        )
    config = _config(str(model), str(data))
    task = make_task(config, tokens)
    task.model.to(pick_device(device)).eval()
    is_masked = config.objective == "masked"
    parts = list(_measure(task, rows, draws if is_masked else 0))
    nats, lengths = (torch.cat(part) for part in zip(*parts, strict=True))
    return {**_figures(tokens, rows, nats, lengths), "bound": is_masked}


def _config(model: str, data: str) -> TrainingConfig:
    """Return the keys of a run that would go on with a model.

    Raises:
        GenError: a model of blocks.
    """
    config = read_config(model)
    if config.get("block_length") and not config.get("whole"):
        raise GenError(
            f"model {model} fills blocks of {config['block_length']} positions; expected a causal"
            " model or a masked one"
        )
    is_masked = not config.get("causal", True) or bool(config.get("block_length"))
    objective = "masked" if is_masked else "causal"
    return TrainingConfig(out="", data=data, model=model, objective=objective)


@torch.no_grad()
def _measure(task: Task, rows: Tensor, draws: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the nats of some samples, double [B], and the numbers of tokens that they are of.
    ``draws``: 0 for a causal model."""
    for some in rows.split(BATCH):
        if isinstance(task, GridTask):
            yield _masked(task, some, draws) if draws else _causal(task, some)
        elif isinstance(task, LanguageTask):
            found = [_language(task, row) for row in some.tolist()]
            yield torch.stack([f.sum() for f in found]), torch.tensor([len(f) for f in found])


def _causal(task: GridTask, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the negative log-likelihood of sequences up to their end, and their lengths."""
    codes, device = task.codes[rows], next(task.model.parameters()).device
    ids = torch.cat([task.shape.codes + task.prompts[rows], codes[:, :-1]], 1).to(device)
    forward = task.given(task.model, rows)
    logits = forward(input_ids=ids, logits_to_keep=codes.shape[1], use_cache=False).logits
    nats = F.cross_entropy(logits.double().cpu().flatten(0, 1), codes.flatten(), reduction="none")
    frontend = task.data.encoder.frontend
    end = task.modality.bind(task.model.config, frontend, "of the run").space.eos_token_id
    ended = (codes == (-1 if end is None else end)).long()
    counted = ended.cumsum(1) - ended == 0  # up to the first end, which is a token too
    return (nats.view_as(codes) * counted).sum(1), counted.sum(1)


def _masked(task: GridTask, rows: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Return a bound of the negative log-likelihood of whole canvases, and their sizes. Masks are
    the same for every model."""
    codes, words = task.codes[rows], task.shape.codes + task.prompts[rows]
    device, (count, total) = next(task.model.parameters()).device, codes.shape
    shift = int(bool(task.model.config.shifted))
    full = torch.zeros(1, 1, words.shape[1] + total, words.shape[1] + total, device=device)
    found = torch.zeros(count, dtype=torch.double)
    for draw in range(draws):
        generator = torch.Generator().manual_seed(int(rows[0]) * draws + draw)
        at = (draw + torch.rand(count, 1, generator=generator)) / draws
        masked = (at * total).long() + 1  # uniform in 1 ... T, spread over the draws
        hidden = torch.rand(count, total, generator=generator).argsort(1).argsort(1) < masked
        ids = torch.cat([words, codes.masked_fill(hidden, task.shape.mask)], 1).to(device)
        out = task.given(task.model, rows)(
            input_ids=ids, attention_mask=full, logits_to_keep=total + shift, use_cache=False
        )
        logits = out.logits[:, :total].double().cpu()
        nats = F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="none")
        found += (nats.view_as(codes) * hidden).sum(1) * total / masked[:, 0]
    return found / draws, torch.full((count,), total)


def _language(task: LanguageTask, row: int) -> Tensor:
    """Return the negative log-likelihood of each token of a text behind its condition."""
    head, tokens = task.heads[row], task.data.tokens[row]
    ids = torch.cat([torch.tensor(head, dtype=torch.long), tokens])
    device = next(task.model.parameters()).device
    logits = task.model(input_ids=ids[None].to(device), use_cache=False).logits[0, :-1]
    first = max(0, len(head) - 1)  # the first token of all has nothing before it
    return F.cross_entropy(logits[first:].double().cpu(), ids[first + 1 :], reduction="none")


def _figures(data: TokenData, rows: Tensor, nats: Tensor, lengths: Tensor) -> dict[str, Any]:
    """Divide the nats of samples by their tokens and by the values of their media."""
    bits = nats / math.log(2)
    each = bits / lengths
    unit = "bits_per_byte" if data.manifest["modality"] == "text" else "bits_per_dimension"
    return {
        "samples": len(rows),
        "tokens": int(lengths.sum()),
        "nats_per_token": float(nats.sum() / lengths.sum()),
        "bits_per_token": float(bits.sum() / lengths.sum()),
        unit: float(bits.sum()) / sum(_values(data, rows)),
        "standard_error": float(each.std()) / math.sqrt(len(each)) if len(each) > 1 else None,
    }


def _values(data: TokenData, rows: Tensor) -> Iterator[int]:
    """Yield the number of values of every medium: of pixels and colours, of a wave, bytes ..."""
    known: dict[int, int] = {}  # by number of tokens; texts of one have different numbers of bytes
    for row in rows.tolist():
        tokens = data.tokens[row]
        if len(tokens) not in known or data.manifest["modality"] == "text":
            signal = data.encoder.frontend.decode(_codes(data, tokens))[0]
            known[len(tokens)] = signal.numel()
        yield known[len(tokens)]


def _codes(data: TokenData, tokens: Tensor) -> Tensor:
    """Return the codes [1, Q, *grid] of the tokens [T] of a medium."""
    encoder, sizes = data.encoder, data.encoder.frontend.config.codebook_sizes
    if encoder.is_open:
        return tokens[None, None, :-1]
    first, *rest = tuple(data.manifest["grid"]) or tuple(usual_config(encoder.modality)["grid"])
    grid = (min(first, len(tokens) // math.prod(rest)), *rest)
    if isinstance(encoder.modality, GridModality) and encoder.frontend.config.kind == "codes":
        layout = encoder.modality.layout(sizes, encoder.modality.code_grid(grid))
        return layout.from_sequence(tokens[None])
    return tokens.view(1, len(sizes), *grid)

"""The training loop: resuming changes nothing, rates are what they are said to be, Muon gets the
matrices it was promised."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gen.recipes.common.train import TrainConfig, cosine, fit, rate


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.head = nn.Linear(6, 2)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


def batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        yield torch.randn(8, 6, generator=generator)


def loss_fn(model, x):
    return (model(x) - x[:, :2]).square().mean(), {}


def train(out, steps=12, stop=None, **kwargs):
    """``stop``: raises after so many steps, as a killed process would end."""
    model = Small()

    def on_step(step, _):
        if step + 1 == stop:
            raise KeyboardInterrupt

    try:
        average = fit(
            model,
            batches(),
            loss_fn,
            TrainConfig(steps=steps, lr=0.05, save_every=4, **kwargs),
            out=out,
            on_step=on_step,
            log=lambda _: None,
        )
    except KeyboardInterrupt:
        return None
    return {**model.state_dict(), **{f"average {k}": v for k, v in average.state.items()}}


@pytest.mark.parametrize("options", [{}, {"muon": (".weight", 0.02)}, {"cooldown": (6, 10)}])
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path, options):
    whole = train(tmp_path / "whole", **options)
    assert train(tmp_path / "cut", stop=7, **options) is None
    again = train(tmp_path / "cut", **options)
    assert all(torch.equal(whole[k], again[k]) for k in whole)
    # the control: one that forgets its checkpoint's optimiser ends elsewhere
    assert train(tmp_path / "lost", stop=7, **options) is None
    saved = torch.load(tmp_path / "lost" / "checkpoint.pt", weights_only=True)
    for book in saved["optimizers"]:
        book["state"] = {}
    torch.save(saved, tmp_path / "lost" / "checkpoint.pt")
    lost = train(tmp_path / "lost", **options)
    assert not all(torch.equal(whole[k], lost[k]) for k in whole)


def test_the_rate_follows_the_cosine_and_then_falls_straight_to_zero():
    assert [rate(s, 1000) for s in (0, 99, 100, 999)] == [
        cosine(s, 1000) for s in (0, 99, 100, 999)
    ]
    assert rate(299, 1000, (300, 400)) == cosine(299, 1000)
    assert (
        rate(350, 1000, (300, 400)) == pytest.approx(cosine(300, 1000) / 2)
        and rate(400, 1000, (300, 400)) == 0
    )


def test_a_cooldown_ends_the_run_early(tmp_path):
    train(tmp_path, steps=12, cooldown=(6, 9))
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == 9


def test_muon_trains_the_named_matrices_and_nothing_else(tmp_path):
    train(tmp_path, steps=4, muon=("layers.", 0.02))
    adam, muon = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["optimizers"]
    assert len(muon["state"]) == 2 and all(
        s["momentum_buffer"].shape == (6, 6) for s in muon["state"].values()
    )
    assert len(adam["state"]) == 4  # the head's matrix and three biases

"""Adapters by name in compiled models: another choice compiles nothing, and changes the tokens."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from compiling import needs_compiler
from families import WRITERS
from peft_folders import SAMPLERS, loaded, write_adapters
from torch._dynamo.utils import counters

from gen.models.adapters.graphs import compiled_forward
from gen.models.load.routed import RoutedLinear, Router
from gen.pipeline import prompted

pytestmark = pytest.mark.slow
MOST = 4  # graphs of a model
CHOICES = [["a", "b", None], ["b", None, "a"], ["a", "a", "a"], ["b", "b", None]]


def decode(pipe, prompt, chosen) -> list[torch.Tensor]:
    how = {"seed": 3, "temperature": 0, "adapter": chosen}
    return [pipe([prompt] * len(chosen), sampler=s, **how).tokens for s in SAMPLERS]


def graphs_by_choice(case, folders, backend: str, monkeypatch) -> list[int]:
    """Compare compiled pipelines with eager ones; return how many graphs there are without
    adapters, of three rows and of one, and then after each choice of them."""
    torch._dynamo.reset()
    counters.clear()
    monkeypatch.setattr(prompted, "compiled_forward", partial(compiled_forward, backend=backend))
    eager, fast = (loaded(case, adapters=folders, compile=on) for on in (False, True))
    for rows in (3, 1):
        decode(fast, case.prompts[0], [None] * rows)
    found = [counters["stats"]["unique_graphs"]]
    for chosen in CHOICES:
        want, got = (decode(pipe, case.prompts[0], chosen) for pipe in (eager, fast))
        assert all(torch.equal(w, g) for w, g in zip(want, got, strict=True)), chosen
        if chosen == CHOICES[0]:  # control: the adapters do something
            assert not torch.equal(want[0][0], want[0][1])
            assert not torch.equal(want[0][0], want[0][2])
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.fixture
def case(request, tmp_path):
    (tmp_path / "model").mkdir()
    return WRITERS[request.param](tmp_path / "model")


@pytest.fixture
def folders(case, tmp_path):
    return write_adapters(case, tmp_path, a=3, b=5)


BACKENDS = ["eager", pytest.param("inductor", marks=needs_compiler)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", ["causal_lm", "chameleon", "llamagen"], indirect=True)
def test_another_choice_of_adapters_compiles_no_graph(case, folders, backend, monkeypatch):
    found = graphs_by_choice(case, folders, backend, monkeypatch)
    assert 1 <= found[0] <= MOST
    assert found == found[:1] * (1 + len(CHOICES))


@pytest.mark.parametrize("case", ["causal_lm"], indirect=True)
def test_control_names_in_place_of_numbers_compile_a_graph_for_every_choice(
    case, folders, monkeypatch
):
    """The choice is read as texts, which a graph holds as constants."""
    rows = Router.rows

    def said(self, index):
        self.said = tuple("0ab"[n] for n in index.tolist())
        return rows(self, index)

    def forward(self, input):
        numbers = torch.tensor(["0ab".index(n) for n in self.router.said])
        added = torch.bmm(torch.bmm(input, self.a[numbers].mT), self.b[numbers].mT)
        return F.linear(input, self.weight, self.bias) + added

    monkeypatch.setattr(Router, "rows", said)
    monkeypatch.setattr(RoutedLinear, "forward", forward)
    found = graphs_by_choice(case, folders, "eager", monkeypatch)
    assert found[-1] > found[0]

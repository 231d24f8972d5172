"""Decoders of graphs against the enumeration of all paths, and exact ancestral sampling."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict

import pytest
import torch
from enumeration import distance, enumerate_distribution
from tabular_lattice import TabularLattice, lattice_target, open_space, paths_of

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.token_space import TokenSpace
from gen.samplers.lattice.ancestral import Ancestral
from gen.samplers.lattice.paths import Links

EXACT, WRONG = 1e-12, 1e-3
V, EOS, T = 5, 3, 4  # ids 0-2 are words, 4 is the mask
DECODERS = ["dag_greedy", "lookahead", "viterbi", "joint_viterbi", "dag_beam", "ancestral"]
CONTEXTS = [0, 1, 2, 3]


def small(seed: int = 0, spread: float = 3.0) -> TabularLattice:
    """Graphs of 5 to 7 vertices: up to five tokens, of which a space takes four."""
    return TabularLattice(V, seed, low=0.0, spread=spread, vertices=5, sizes=3)


def fixed_space(positions: int) -> TokenSpace:
    """A space of exactly so many words."""
    legal = torch.zeros(positions, V, dtype=torch.bool)
    legal[:, :EOS] = True
    return TokenSpace((positions,), V, legal, V - 1)


def decoded(name: str, space: TokenSpace, model=None, sampling=None, **params) -> torch.Tensor:
    target = lattice_target(model or small(), space, CONTEXTS, **(sampling or {}))
    sampler = resolve_sampler({"name": name, **params})[0]
    return sampler(target, CounterRNG(range(len(CONTEXTS)))).tokens


def graph_and_words(model=None) -> tuple[Graph, torch.Tensor]:
    """The graphs of the contexts, and log P [B, L, 3] of words alone."""
    model = model or small()
    target = lattice_target(model, open_space(T, V, EOS), CONTEXTS)
    graph = model.forward(target.prompt, target.prompt_length)
    return graph, graph.emissions[..., :EOS].log_softmax(-1)


def outputs_of(space: TokenSpace, row: int, counts, scale: float = 1.0) -> dict[tuple, float]:
    """The exact distribution of outputs of a row, straight from the definitions."""
    graph, words = graph_and_words()
    links = graph.transitions / scale
    links = links - links.logsumexp(-1, keepdim=True).nan_to_num(nan=0.0, neginf=0.0)
    mass: dict[tuple, float] = defaultdict(float)
    for path, score in paths_of(graph._replace(transitions=links), row, counts).items():
        if score == -math.inf:
            continue
        for ids in itertools.product(range(EOS), repeat=len(path)):
            emitted = sum(float(words[row, v, t]) for v, t in zip(path, ids, strict=True))
            fill = [EOS] * (space.length - len(ids))
            mass[(*ids, *fill)] += math.exp(score + emitted)
    total = math.fsum(mass.values())
    return {ids: p / total for ids, p in mass.items()}


def sampled(space: TokenSpace, **params) -> list[dict[tuple, float]]:
    sampler = resolve_sampler({"name": "ancestral", **params})[0]

    def decode(rng, contexts):
        return sampler(lattice_target(small(), space, contexts), rng).tokens

    return enumerate_distribution(decode, len(CONTEXTS))


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ancestral_sampling_has_the_distribution_of_the_graph(scale):
    space = open_space(T, V, EOS)
    params = {} if scale == 1 else {"link_temperature": scale}
    for row, found in enumerate(sampled(space, **params)):
        wanted = outputs_of(space, row, range(1, T + 1), scale)
        assert len(wanted) > 30 and max(wanted.values()) < 0.5
        assert distance(found, wanted) < EXACT


def test_ancestral_sampling_of_one_length_has_the_distribution_given_that_length():
    space = fixed_space(3)
    for row, found in enumerate(sampled(space)):
        assert distance(found, outputs_of(space, row, [3])) < EXACT


def test_control_paths_that_ignore_what_may_follow_have_another_distribution(monkeypatch):
    space = fixed_space(3)
    completions = Links.completions
    monkeypatch.setattr(
        Links,
        "completions",
        lambda self: torch.where(completions(self) > -torch.inf, 0.0, -torch.inf).double(),
    )
    found = sampled(space)
    assert any(
        distance(found[row], outputs_of(space, row, [3])) > WRONG for row in range(len(CONTEXTS))
    )


def joint(graph: Graph, words: torch.Tensor, row: int, counts, tokens: bool) -> dict:
    """Score of every path of a row, with its best tokens or without."""
    best = words.amax(-1)
    start = float(graph.emissions[row, 0].amax())
    return {
        path: score + tokens * (start + sum(float(best[row, v]) for v in path))
        for path, score in paths_of(graph, row, counts).items()
    }


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", ["viterbi", "joint_viterbi"])
def test_viterbi_finds_the_best_path_of_every_length(name, count, penalty):
    graph, words = graph_and_words()
    found = decoded(name, fixed_space(count), length_penalty=penalty)
    for row in range(len(CONTEXTS)):
        scores = joint(graph, words, row, [count], name == "joint_viterbi")
        best = max(scores, key=scores.__getitem__)
        assert found[row].tolist() == [int(words[row, v].argmax()) for v in best]


@pytest.mark.parametrize("penalty", [0.0, 0.7, 2.0])
@pytest.mark.parametrize("name", ["viterbi", "joint_viterbi"])
def test_viterbi_chooses_the_length_of_the_best_penalised_score(name, penalty):
    graph, words = graph_and_words()
    found = decoded(name, open_space(T, V, EOS), length_penalty=penalty)
    for row in range(len(CONTEXTS)):
        scores = joint(graph, words, row, range(1, T + 1), name == "joint_viterbi")
        best = max(scores, key=lambda path: scores[path] / len(path) ** penalty)
        ids = [int(words[row, v].argmax()) for v in best]
        assert found[row].tolist() == ids + [EOS] * (T - len(ids))


def test_a_beam_of_all_beginnings_finds_the_most_probable_output():
    space = open_space(T, V, EOS)
    found = decoded("dag_beam", space, beam_size=3**T, length_penalty=0.0)
    single = decoded("joint_viterbi", space, length_penalty=0.0)
    for row in range(len(CONTEXTS)):
        wanted = outputs_of(space, row, range(1, T + 1))
        assert tuple(found[row].tolist()) == max(wanted, key=wanted.__getitem__)
    assert not torch.equal(found, single)  # merging paths matters here


def test_greedy_and_lookahead_take_the_best_step():
    graph, words = graph_and_words()
    best = words.amax(-1)
    for name, beta in (("dag_greedy", 0.0), ("lookahead", 1.0), ("lookahead", 0.3)):
        params = {} if name == "dag_greedy" else {"beta": beta}
        found = decoded(name, open_space(5, V, EOS), **params)
        for row in range(len(CONTEXTS)):
            here, size, ids = 0, int(graph.lengths[row]), []
            end = float(graph.emissions[row, size - 1].amax())
            while True:
                ahead = {
                    j: float(graph.transitions[row, here, j])
                    + beta * (end if j == size - 1 else float(best[row, j]))
                    for j in range(here + 1, size)
                    if ids or j < size - 1  # an output has at least one word
                }
                here = max(ahead, key=ahead.__getitem__)
                if here == size - 1:
                    break
                ids.append(int(words[row, here].argmax()))
            assert found[row].tolist() == ids + [EOS] * (5 - len(ids))


def test_lookahead_without_weight_is_greedy():
    space = open_space(T, V, EOS)
    greedy = decoded("dag_greedy", space)
    assert torch.equal(decoded("lookahead", space, beta=0.0), greedy)
    assert not torch.equal(decoded("lookahead", space, beta=3.0), greedy)


class Repeating(TabularLattice):
    """A chain of four vertices between the ends whose tokens are 2 2 1 1."""

    def forward(self, source, lengths):
        rows, size = len(source), 6
        links = torch.full((rows, size, size), -torch.inf, dtype=torch.float64)
        links[:, torch.arange(size - 1), torch.arange(1, size)] = 0.0
        emissions = torch.full((rows, size, V), -40.0, dtype=torch.float64)
        emissions[:, torch.arange(size), torch.tensor([0, 2, 2, 1, 1, EOS])] = 0.0
        return Graph(links, emissions, emissions[..., :2], torch.full((rows,), size))


@pytest.mark.parametrize("name", DECODERS)
def test_repeats_stay_unless_collapse_is_asked_for(name):
    space, model = open_space(6, V, EOS), Repeating(V)
    plain = decoded(name, space, model)
    assert plain.tolist() == [[2, 2, 1, 1, EOS, EOS]] * len(CONTEXTS)
    collapsed = decoded(name, space, model, collapse=True)
    assert collapsed.tolist() == [[2, 1, EOS, EOS, EOS, EOS]] * len(CONTEXTS)


def test_control_a_decoder_that_collapses_repeats_fails_enumeration():
    space = open_space(T, V, EOS)
    found = sampled(space, collapse=True)
    wanted = [outputs_of(space, row, range(1, T + 1)) for row in range(len(CONTEXTS))]
    assert min(map(distance, found, wanted)) > WRONG
    assert resolve_sampler({"name": "ancestral", "collapse": True})[0].guarantee == "approximate"
    assert resolve_sampler("ancestral")[0].guarantee == "same_distribution"


@pytest.mark.parametrize("name", DECODERS)
def test_one_forward_pass_decodes_all_rows(name, monkeypatch):
    calls = []
    forward = TabularLattice.forward
    monkeypatch.setattr(TabularLattice, "forward", lambda *args: calls.append(1) or forward(*args))
    target = lattice_target(small(), open_space(T, V, EOS), CONTEXTS)
    out = resolve_sampler(name)[0](target, CounterRNG(range(len(CONTEXTS))))
    assert len(calls) == 1 and [s.nfe for s in out.stats] == [1] * len(CONTEXTS)
    words = (out.tokens != EOS).sum(1)
    assert [s.tokens for s in out.stats] == (words + 1).clamp(max=T).tolist()


def test_a_canvas_limits_the_number_of_tokens_and_holds_no_others():
    space = open_space(T, V, EOS)
    target = lattice_target(small(), space, CONTEXTS)
    canvas = space.empty(len(CONTEXTS))
    canvas[:, 1:] = EOS
    rng = CounterRNG(range(len(CONTEXTS)))
    out = Ancestral()(target, rng, canvas=canvas)
    assert (out.tokens[:, 0] != EOS).all() and (out.tokens[:, 1:] == EOS).all()
    canvas[0, 0] = 1
    with pytest.raises(GenError, match="no positions to put them at"):
        Ancestral()(lattice_target(small(), space, CONTEXTS), rng, canvas=canvas)


@pytest.mark.parametrize("name", DECODERS)
def test_impossible_lengths_and_undefined_models_are_refused(name):
    with pytest.raises(GenError, match="no path of the graph of item 0 has as many tokens"):
        decoded(name, fixed_space(9))

    class Broken(TabularLattice):
        def forward(self, source, lengths):
            graph = super().forward(source, lengths)
            return graph._replace(emissions=graph.emissions * float("nan"))

    with pytest.raises(GenError, match="gives no emissions for item 0"):
        decoded(name, open_space(T, V, EOS), Broken(V))
    with pytest.raises(GenError, match="guidance_scale is 2"):
        decoded(name, open_space(T, V, EOS), sampling={"guidance_scale": 2.0})
    with pytest.raises(GenError, match=r"sampler\.collapse shortens outputs"):
        decoded(name, fixed_space(2), collapse=True)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"name": "lookahead", "beta": -1}, r"sampler\.beta"),
        ({"name": "viterbi", "length_penalty": "x"}, r"sampler\.length_penalty"),
        ({"name": "joint_viterbi", "max_length": 0}, r"sampler\.max_length"),
        ({"name": "dag_beam", "beam_size": 0}, r"sampler\.beam_size"),
        ({"name": "ancestral", "link_temperature": 0}, r"sampler\.link_temperature"),
        ({"name": "dag_greedy", "collapse": 1}, r"sampler\.collapse"),
    ],
)
def test_bad_parameters_are_refused(spec, message):
    with pytest.raises(GenError, match=message):
        resolve_sampler(spec)


def test_a_largest_length_limits_viterbi():
    space = open_space(T, V, EOS)
    short = decoded("joint_viterbi", space, max_length=2)
    assert ((short != EOS).sum(1) <= 2).all()
    assert ((decoded("joint_viterbi", space) != EOS).sum(1) > 2).any()

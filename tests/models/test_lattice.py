"""Dynamic programmes over the paths of a graph, against the enumeration of all paths in float64."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gen.core.graphs import Graph
from gen.models.nets import lattice
from gen.models.nets.dag import DagConfig, DagModel

EXACT, WRONG = 1e-12, 1e-2
L, M, V = 7, 4, 5


def random_graph(
    rows: int = 3, size: int = L, seed: int = 0, lengths: Tensor | None = None
) -> Graph:
    """Graphs of random transitions and emissions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.full((rows,), size) if lengths is None else lengths
    column = torch.arange(size)
    allowed = (column[:, None] < column) & (column < lengths[:, None, None])
    scores = 2 * torch.randn(rows, size, size, generator=generator, dtype=torch.float64)
    links = scores.masked_fill(~allowed, -1e9).log_softmax(-1).masked_fill(~allowed, -torch.inf)
    emissions = 2 * torch.randn(rows, size, V, generator=generator, dtype=torch.float64)
    return Graph(links, emissions.log_softmax(-1), emissions, lengths)


def random_targets(rows: int = 3, depth: int = M, seed: int = 1) -> Tensor:
    return torch.randint(V, (rows, depth), generator=torch.Generator().manual_seed(seed))


def paths(size: int, depth: int) -> list[tuple[int, ...]]:
    """All paths of ``depth`` vertices through a graph of ``size`` vertices."""
    return [(0, *p, size - 1) for p in itertools.combinations(range(1, size - 1), depth - 2)]


def path_scores(links: Tensor, m: Tensor, size: int, depth: int) -> dict[tuple[int, ...], Tensor]:
    """log P(path, targets) of every path of one row."""
    return {
        p: sum(m[i, j] for i, j in enumerate(p))
        + sum(links[a, b] for a, b in itertools.pairwise(p))
        for p in paths(size, depth)
    }


def counts_of(rows: int = 3, depth: int = M) -> Tensor:
    return torch.full((rows,), depth)


@pytest.mark.parametrize(("size", "depth"), [(3, 2), (5, 3), (7, 4), (8, 5), (6, 6)])
def test_forward_and_backward_scores_are_the_sum_over_all_paths(size, depth):
    graph, targets = random_graph(size=size), random_targets(depth=depth)
    m, counts = lattice.matches(graph.emissions, targets), counts_of(depth=depth)
    found = lattice.log_likelihood(graph.transitions, m, graph.lengths, counts)
    backward = lattice.backward_scores(graph.transitions, m, graph.lengths, counts)[:, 0, 0]
    for row in range(3):
        each = path_scores(graph.transitions[row], m[row], size, depth)
        wanted = torch.stack(list(each.values())).logsumexp(0)
        assert abs(found[row] - wanted) < EXACT and abs(backward[row] - wanted) < EXACT


def test_all_outputs_of_all_lengths_have_probability_one():
    size = 5
    graph = random_graph(1, size)
    total = 0.0
    for depth in range(2, size + 1):
        every = torch.tensor(list(itertools.product(range(V), repeat=depth)))
        n = len(every)
        m = lattice.matches(graph.emissions.expand(n, -1, -1), every)
        links = graph.transitions.expand(n, -1, -1)
        lengths, counts = torch.full((n,), size), torch.full((n,), depth)
        total += float(lattice.log_likelihood(links, m, lengths, counts).exp().sum())
    assert abs(total - 1) < EXACT


def posterior_of(graph: Graph, m: Tensor, row: int) -> Tensor:
    """Posterior [M, L] of a row by enumeration."""
    each = path_scores(graph.transitions[row], m[row], L, M)
    mass = torch.stack(list(each.values())).softmax(0)
    found = torch.zeros(M, L, dtype=torch.float64)
    for weight, path in zip(mass, each, strict=True):
        for i, j in enumerate(path):
            found[i, j] += weight
    return found


def test_the_posterior_is_that_of_the_paths():
    graph, targets = random_graph(), random_targets()
    m = lattice.matches(graph.emissions, targets)
    found = lattice.posterior(graph.transitions, m, graph.lengths, counts_of())
    assert float((found.sum(2) - 1).abs().max()) < EXACT
    assert max(float((found[r] - posterior_of(graph, m, r)).abs().max()) for r in range(3)) < EXACT


def test_control_counting_the_emission_twice_is_another_posterior():
    graph, targets = random_graph(), random_targets()
    m = lattice.matches(graph.emissions, targets)
    released = lattice.posterior(graph.transitions, m, graph.lengths, counts_of(), released=True)
    assert float((released.sum(2) - 1).abs().max()) < EXACT  # rows still sum to one
    assert max(float((released[r] - posterior_of(graph, m, r)).abs().max()) for r in range(3)) > (
        WRONG
    )


def test_the_gradient_of_the_loss_is_minus_the_posterior_over_the_number_of_targets():
    graph, targets = random_graph(), random_targets()
    m = lattice.matches(graph.emissions, targets).requires_grad_()
    lattice.lattice_loss(graph.transitions, m, graph.lengths, counts_of()).backward()
    wanted = lattice.posterior(graph.transitions, m.detach(), graph.lengths, counts_of())
    assert m.grad is not None
    assert float((m.grad + wanted / M / 3).abs().max()) < EXACT


def test_the_best_alignment_is_the_best_path():
    graph, targets = random_graph(), random_targets()
    m = lattice.matches(graph.emissions, targets)
    found = lattice.best_alignment(graph.transitions, m, graph.lengths, counts_of())
    for row in range(3):
        each = path_scores(graph.transitions[row], m[row], L, M)
        assert tuple(found[row].tolist()) == max(each, key=lambda p: float(each[p]))


def test_a_chain_has_the_cross_entropy_as_loss():
    size = M
    links = torch.full((3, size, size), -torch.inf, dtype=torch.float64)
    links[:, torch.arange(size - 1), torch.arange(1, size)] = 0.0
    graph, targets = random_graph(size=size), random_targets()
    m = lattice.matches(graph.emissions, targets)
    found = lattice.lattice_loss(links, m, graph.lengths, counts_of())
    wanted = torch.nn.functional.cross_entropy(graph.emissions.flatten(0, 1), targets.flatten())
    assert abs(found - wanted) < EXACT


def test_padding_of_vertices_and_targets_changes_nothing():
    lengths, counts = torch.tensor([5, 7, 6]), torch.tensor([3, 4, 2])
    graph, targets = random_graph(lengths=lengths), random_targets()
    m = lattice.matches(graph.emissions, targets)
    whole = lattice.log_likelihood(graph.transitions, m, lengths, counts)
    best = lattice.best_alignment(graph.transitions, m, lengths, counts)
    each = lattice.posterior(graph.transitions, m, lengths, counts)
    for row, (size, depth) in enumerate(zip(lengths.tolist(), counts.tolist(), strict=True)):
        one = slice(row, row + 1)
        links, part = graph.transitions[one, :size, :size], m[one, :depth, :size]
        alone = lattice.log_likelihood(links, part, lengths[one], counts[one])
        assert abs(whole[row] - alone[0]) < EXACT
        path = lattice.best_alignment(links, part, lengths[one], counts[one])
        assert torch.equal(best[row, :depth], path[0]) and not best[row, depth:].any()
        posterior = lattice.posterior(links, part, lengths[one], counts[one])
        assert float((each[row, :depth, :size] - posterior[0]).abs().max()) < EXACT
        assert not each[row, depth:].any()


def test_more_targets_than_vertices_give_a_finite_loss_and_no_gradient():
    lengths = torch.tensor([3, 7, 7])
    graph, targets = random_graph(lengths=lengths), random_targets()
    m = lattice.matches(graph.emissions, targets).requires_grad_()
    links = graph.transitions.clone().requires_grad_()
    loss = lattice.lattice_loss(links, m, lengths, counts_of())
    loss.backward()
    assert m.grad is not None and links.grad is not None
    assert bool(loss.isfinite()) and float(loss.detach()) > 0
    assert bool(m.grad.isfinite().all()) and bool(links.grad.isfinite().all())
    assert not m.grad[0].any() and not links.grad[0].any()
    assert bool(m.grad[1].any()) and bool(links.grad[1].any())


def test_glancing_reveals_targets_at_aligned_vertices_alone():
    graph, targets = random_graph(), random_targets()
    m = lattice.matches(graph.emissions, targets)
    path = lattice.best_alignment(graph.transitions, m, graph.lengths, counts_of())
    inputs = torch.full((3, L), 99)
    right = (graph.emissions.argmax(-1).gather(1, path) == targets).sum(1)
    seen = set()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        shown = lattice.glance(graph.emissions, path, targets, counts_of(), inputs, 0.5, generator)
        assert (shown != 99).sum(1).tolist() == [round(0.5 * (M - int(n))) for n in right]
        for row in range(3):
            for vertex in (shown[row] != 99).nonzero()[:, 0].tolist():
                at = path[row].tolist().index(vertex)
                assert shown[row, vertex] == targets[row, at]
                seen.add((row, at))
    assert len(seen) == 3 * M  # every aligned vertex in turn


def test_glancing_skips_rows_without_a_path():
    lengths = torch.tensor([3, 7, 7])
    graph, targets = random_graph(lengths=lengths), random_targets()
    m = lattice.matches(graph.emissions, targets)
    path = lattice.best_alignment(graph.transitions, m, lengths, counts_of())
    inputs, generator = torch.full((3, L), 99), torch.Generator().manual_seed(0)
    shown = lattice.glance(graph.emissions, path, targets, counts_of(), inputs, 1.0, generator)
    assert not path[0].any() and (shown[0, 1:] == 99).all()


def tiny(seed: int = 0) -> DagModel:
    torch.manual_seed(seed)
    config = DagConfig(hidden_size=16, encoder_layers=1, decoder_layers=1, num_attention_heads=2)
    return DagModel(config).double().eval()


def test_transitions_and_emissions_of_the_net_are_distributions():
    model, lengths = tiny(), torch.tensor([5, 3])
    graph = model(torch.tensor([[10, 1, 2, 3, 11], [10, 4, 11, 0, 0]]), lengths)
    assert graph.lengths.tolist() == [20, 12]
    for row, size in enumerate(graph.lengths.tolist()):
        mass = graph.transitions[row].exp().sum(-1)
        assert float((mass[: size - 1] - 1).abs().max()) < EXACT and not mass[size - 1 :].any()
        assert not graph.transitions[row].exp().tril().any()
    assert float((graph.emissions.exp().sum(-1) - 1).abs().max()) < EXACT


def test_the_net_gives_a_row_the_same_graph_alone_and_in_a_batch():
    model, lengths = tiny(), torch.tensor([5, 3])
    source = torch.tensor([[10, 1, 2, 3, 11], [10, 4, 11, 7, 9]])
    whole = model(source, lengths)
    alone = model(source[1:, :3], lengths[1:])
    size = int(alone.lengths[0])
    difference = (whole.transitions[1, :size, :size].exp() - alone.transitions[0].exp()).abs()
    assert float(difference.max()) < EXACT
    assert float((whole.emissions[1, :size] - alone.emissions[0]).abs().max()) < EXACT


def test_chain_links_are_distributions_that_prefer_a_step():
    lengths = torch.tensor([20, 12])
    links = lattice.chain_links(lengths, 4, torch.zeros(2, 20, 20, dtype=torch.float64)).exp()
    for row, size in enumerate(lengths.tolist()):
        assert float((links[row].sum(-1)[: size - 1] - 1).abs().max()) < EXACT
        assert not links[row].tril().any() and not links[row, :, size:].any()
        assert not links[row, size - 1 :].any()
    assert links[0, 3].argmax() == 7 and links[0, 0, 1] == links[0, 0, 8]
    assert links[0, 15, 19] > links[0, 3, 19]

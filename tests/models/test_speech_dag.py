"""The translator of speech: states of words against enumeration, batches, and spoken tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.core.resolve import resolve_sampler
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.core.token_space import TokenSpace
from gen.models.adapters.lattice import SpeechDagLM
from gen.models.nets.speech_dag import SpeechDagConfig, SpeechDagModel
from gen.models.targets.lattice import SpokenLatticeTarget
from gen.samplers.lattice.base import GraphRun
from gen.samplers.lattice.joint_viterbi import JointViterbi
from gen.samplers.lattice.paths import Links, best_paths

EXACT, WRONG = 1e-12, 1e-2
LENGTHS = torch.tensor([48, 24])  # tokens: 12 and 6 frames, 12 and 6 vertices


def tiny(seed: int = 0, **options) -> SpeechDagModel:
    torch.manual_seed(seed)
    sizes = dict(hidden_size=16, encoder_layers=1, decoder_layers=1, num_attention_heads=2)
    model = SpeechDagModel(SpeechDagConfig(speaker_layers=1, **sizes, **options)).double()
    model.spectra.normal_()
    return model.requires_grad_(False).eval()


def source_tokens(seed: int = 1) -> Tensor:
    drawn = torch.randint(128, (2, 48), generator=torch.Generator().manual_seed(seed))
    return drawn + 128 * (torch.arange(48) % 4)


def target_of(adapter: SpeechDagLM, rows: int = 2, **sampling) -> SpokenLatticeTarget:
    config = adapter.model.config
    grid = (config.max_words * config.slots, len(config.code_sizes))
    space = TokenSpace.codes(grid, config.speech_ids, adapter.vocab_size)
    source, params = source_tokens()[:rows], SamplingParams(**sampling)
    return SpokenLatticeTarget(adapter, source, space, params, None, LENGTHS[:rows])


def marks(tokens: Tensor, adapter: SpeechDagLM) -> list[list[int]]:
    """Words that the first slots of outputs name."""
    config = adapter.model.config
    first = tokens.view(len(tokens), config.max_words, config.slots, -1)[:, :, 0]
    rows = (first[..., 0] - config.sounds).tolist()
    return [[word for word in row if word >= 0] for row in rows]


def enumerated(graph: Graph, words: list[int], config: SpeechDagConfig):
    """Paths of bos, words, eos of the first row, and log P(path, words)."""
    whole, last = [config.bos_id, *words, config.eos_id], int(graph.lengths[0]) - 1
    found = {}
    for inner in itertools.combinations(range(1, last), len(words)):
        path = (0, *inner, last)
        score = sum(
            float(graph.emissions[0, j, w]) for j, w in zip(path, whole, strict=True)
        ) + sum(float(graph.transitions[0, i, j]) for i, j in itertools.pairwise(path))
        found[path] = score
    return found


@pytest.mark.parametrize("released", [False, True])
def test_expected_states_are_those_of_all_paths_unless_emissions_count_twice(released):
    model = tiny(strategy="expect", released_posterior=released)
    model.target.weight.data.mul_(6)  # emissions that matter
    graph = model(source_tokens()[1:, :24], LENGTHS[1:])
    words = [3, 11]
    scores = enumerated(graph, words, model.config)
    share = torch.tensor(list(scores.values()), dtype=torch.float64).softmax(0)
    expected = torch.zeros(2, 16, dtype=torch.float64)
    for path, p in zip(scores, share, strict=True):
        expected += p * graph.states[0, list(path[1:-1])]
    found = model.word_states(graph, torch.tensor([words]), torch.tensor([2]))[0]
    difference = float((found - expected).abs().max())
    assert difference > WRONG if released else difference < EXACT


def test_the_states_of_best_paths_are_those_of_the_best_enumerated_one():
    model = tiny(strategy="argmax")
    graph = model(source_tokens()[1:, :24], LENGTHS[1:])
    scores = enumerated(graph, [7, 7, 0], model.config)
    best = max(scores, key=scores.get)
    parts = graph, torch.tensor([[7, 7, 0]]), torch.tensor([3])
    found = model.word_states(*parts)[0]
    assert torch.equal(found, graph.states[0, list(best[1:-1])])
    mixed = model.word_states(*parts, strategy="expect")[0]
    assert float((mixed - found).abs().max()) > WRONG  # control


def test_the_best_path_of_the_words_of_joint_viterbi_is_its_own_path():
    adapter = SpeechDagLM(tiny())
    target = target_of(adapter)
    output = target.predict()
    links = Links.of(output.graph.transitions, output.graph.lengths, target.counts())
    run = GraphRun(output, links, target, CounterRNG(range(2)))
    sampler = JointViterbi(length_penalty=0.5)
    _, paths = best_paths(links, *sampler.rewards(run))
    words, counts = sampler.decode(run)
    found = adapter.model.word_states(output.graph, words, counts, "argmax")
    for row, count in enumerate(counts.tolist()):
        vertices = paths[row, count, :count]
        assert torch.equal(found[row, :count], output.graph.states[row, vertices])
        assert not torch.equal(found[row, :count], output.graph.states[row, vertices - 1])


def test_a_row_is_the_same_alone_and_in_a_batch_and_whatever_its_padding_holds():
    model, source = tiny(), source_tokens()
    other = source.clone()
    other[1, 24:] = 0
    whole = model(source, LENGTHS)
    alone = model(source[1:, :24], LENGTHS[1:])
    assert whole.lengths.tolist() == [12, 6] and alone.lengths.tolist() == [6]
    for graph in (whole, model(other, LENGTHS)):
        links = graph.transitions[1, :6, :6].exp() - alone.transitions[0].exp()
        assert float(links.abs().max()) < EXACT
        assert float((graph.emissions[1, :6] - alone.emissions[0]).abs().max()) < EXACT
    other[1, 23] = other[1, 19]
    changed = model(other, LENGTHS)
    assert float((changed.emissions[1, :6] - alone.emissions[0]).abs().max()) > 1e-6  # control


def test_spoken_words_are_the_same_alone_and_in_a_batch():
    model, source = tiny(), source_tokens()
    words, counts = torch.tensor([[1, 2, 3, 4], [5, 6, 0, 0]]), torch.tensor([4, 2])
    whole = model.speak(model(source, LENGTHS), words, counts)
    graph = model(source[1:, :24], LENGTHS[1:])
    alone = model.speak(graph, words[1:, :2], counts[1:])
    assert torch.equal(whole[1], alone[0])
    assert not whole[1, 16:].any() and whole[0, 24:].any()
    swapped = model.speak(graph, words[1:, :2].flip(1), counts[1:])
    assert not torch.equal(swapped, alone)  # control


@pytest.mark.parametrize(
    "name", ["dag_greedy", "lookahead", "viterbi", "joint_viterbi", "dag_beam", "ancestral"]
)
def test_every_decoder_speaks_tokens_that_exist_in_one_pass(name):
    adapter = SpeechDagLM(tiny())
    whole = resolve_sampler(name)[0](target_of(adapter), CounterRNG(range(2)))
    config = adapter.model.config
    sizes = torch.tensor(config.code_sizes)
    codes = whole.tokens.view(2, -1, 4) - (sizes.cumsum(0) - sizes)
    assert bool(((codes >= 0) & (codes < sizes)).all())
    assert [s.nfe for s in whole.stats] == [1, 1]
    assert all(1 <= len(row) <= config.max_words for row in marks(whole.tokens, adapter))
    alone = resolve_sampler(name)[0](target_of(adapter, 1), CounterRNG(range(1)))
    assert torch.equal(alone.tokens[0], whole.tokens[0])


class Chain(SpeechDagLM):
    """Translator whose graphs say given words along the vertices."""

    def __init__(self, model: SpeechDagModel, words: list[int]):
        super().__init__(model)
        self.said = [model.config.bos_id, *words, model.config.eos_id]

    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        size, vocabulary = len(self.said), self.model.config.vocab_size + 1
        links = torch.full((size, size), -torch.inf, dtype=torch.float64)
        links.diagonal(1).zero_()
        emissions = torch.full((size, vocabulary), -20.0, dtype=torch.float64)
        emissions[range(size), self.said] = 0.0
        states = torch.randn(size, 16, generator=torch.Generator().manual_seed(0)).double()
        parts = (x.expand(len(source), *x.shape) for x in (links, emissions, states))
        links, emissions, states = parts
        lengths = torch.full((len(source),), size)
        return Graph(links, emissions.log_softmax(-1), states, lengths)


@pytest.mark.parametrize("name", ["dag_greedy", "viterbi", "joint_viterbi", "dag_beam"])
def test_a_repeated_word_is_spoken_twice_unless_collapse_drops_it(name):
    adapter = Chain(tiny(), [7, 7, 2])
    rng = CounterRNG(range(2))
    kept = resolve_sampler(name)[0](target_of(adapter), rng)
    assert marks(kept.tokens, adapter) == [[7, 7, 2]] * 2


def test_collapse_drops_a_repeat_where_the_graph_has_a_path_for_the_rest():
    adapter = SpeechDagLM(tiny())
    graph = adapter.forward(source_tokens(), LENGTHS)
    emissions = torch.full_like(graph.emissions, -30.0)
    emissions[..., 4] = 0.0
    emissions[:, 0, adapter.model.config.bos_id] = 0.0
    adapter.forward = lambda source, lengths: graph._replace(emissions=emissions.log_softmax(-1))
    spec = {"name": "viterbi", "length_penalty": 3.0}
    kept = resolve_sampler(spec)[0](target_of(adapter), CounterRNG(range(2)))
    dropped = resolve_sampler(spec | {"collapse": True})[0](
        target_of(adapter), CounterRNG(range(2))
    )
    assert all(len(row) > 1 and set(row) == {4} for row in marks(kept.tokens, adapter))
    assert marks(dropped.tokens, adapter) == [[4], [4]]


def test_what_a_graph_of_spoken_words_cannot_do_is_one_sentence():
    adapter = SpeechDagLM(tiny())
    with pytest.raises(GenError, match="strategy is 'mean'; expected expect or argmax"):
        SpeechDagConfig(strategy="mean")
    with pytest.raises(GenError, match="a source has 244 codec tokens; expected at most 240"):
        adapter.forward(torch.zeros(1, 244, dtype=torch.long), torch.tensor([244]))
    with pytest.raises(GenError, match="vertices emit words that are spoken"):
        target_of(adapter, logit_bias={3: 1.0})
    with pytest.raises(GenError, match="expected no canvas"):
        target_of(adapter).counts(torch.zeros(2, 128, dtype=torch.long))

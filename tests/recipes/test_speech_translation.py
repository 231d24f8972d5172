"""The recipe of spoken translations: its pairs, its loss, and a quick run of all stages."""

from __future__ import annotations

import json

import pytest
import torch

from gen.modalities.small_language import held_out
from gen.modalities.speech import synth
from gen.modalities.speech import translation as spoken
from gen.modalities.text import translation as words
from gen.models.nets.speech_dag import SpeechDagConfig
from gen.recipes.speech import translation as recipe


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    folder = tmp_path_factory.mktemp("s2s")
    recipe.make_pairs(folder, recipe.QUICK, log=lambda text: None)
    return folder


def test_pairs_are_not_held_out_and_batches_hold_what_they_say(work):
    data = torch.load(work / "pairs.pt", weights_only=True)
    said = [recipe.said(row) for row in data["slots"].tolist()]
    assert said == spoken.sources(recipe.QUICK.pairs, seed=1) and not any(map(held_out, said))
    assert bool((data["lengths"] % 8 == 0).all()) and int(data["source"].max()) < 512
    batches = recipe.batches(work / "pairs.pt", 4, seed=0)
    drawn = [next(batches) for _ in range(4)]
    told = set()
    for batch in drawn:
        for target, count, notes in zip(batch.target, batch.counts, batch.notes, strict=True):
            output = tuple(words.WORDS[i] for i in target[1 : count - 1])
            assert target[0] == 21 and set(target[count - 1 :].tolist()) == {20}
            assert spoken.in_one_style(output)
            assert spoken.speak_score(notes.numpy())[1] == output
            told.add(spoken.digits_heard(output))
    assert told == {spoken.digits_of(source) for source in said}


def test_disturbed_tokens_stay_in_their_codebook():
    source = torch.zeros(50, 48, dtype=torch.long) + 128 * (torch.arange(48) % 4)
    found = recipe.disturbed(source, torch.Generator().manual_seed(0))
    assert torch.equal(found // 128, source // 128)
    assert 0.03 < float((found != source).float().mean()) < 0.07


def test_fixed_transitions_are_distributions_that_reach_the_last_vertex():
    torch.manual_seed(0)
    model = recipe.new_model(recipe.QUICK)
    graph = model(torch.zeros(2, 240, dtype=torch.long), torch.tensor([240, 120]))
    links = recipe.band_links(graph).exp()
    for row, size in enumerate(graph.lengths.tolist()):
        mass = links[row].sum(-1)
        assert float((mass[: size - 1] - 1).abs().max()) < 1e-6 and not mass[size - 1 :].any()
        assert bool((links[row, : size - 1, size - 1] > 0).all()) and not links[row].tril().any()
    assert links[0, 0, recipe.REACH] > 0 and links[0, 0, recipe.REACH + 1] == 0


def test_the_predictor_teaches_the_graph_through_its_states_and_padding_teaches_nothing(work):
    torch.manual_seed(0)
    model = recipe.new_model(recipe.QUICK)
    batch = next(recipe.batches(work / "pairs.pt", 4, seed=0))
    graph = model(batch.source, batch.lengths)
    recipe.sound_loss(model, graph, batch)[0].backward()
    assert model.source.weight.grad.abs().sum() > 0
    assert model.link_query.weight.grad.abs().sum() > 0
    graph = graph._replace(states=graph.states.detach())
    value = recipe.sound_loss(model, graph, batch)[0].item()
    behind = torch.arange(synth.MAX_WORDS) >= (batch.counts - 2)[:, None]
    assert bool(behind.any())
    other = batch.notes.clone()
    other[behind] = 5.0
    assert recipe.sound_loss(model, graph, batch._replace(notes=other))[0].item() == value
    other[0, 0, 1] += 0.1
    assert recipe.sound_loss(model, graph, batch._replace(notes=other))[0].item() != value


def test_a_predictor_that_says_the_score_has_no_loss(work, monkeypatch):
    model = recipe.new_model(recipe.QUICK)
    batch = next(recipe.batches(work / "pairs.pt", 4, seed=0))
    graph = model(batch.source, batch.lengths)
    notes, table = batch.notes, model.spectra

    def told(states, counts):
        found = type(manner)(
            notes[..., 0, 2],
            notes[..., 0, 3],
            (notes[..., 1] / spoken.STEP).round().log1p(),
            table[notes[..., 0].long().clamp(max=len(table) - 1)],
        )
        return found

    manner = model.speaker(graph.states[:, :4], batch.counts - 2)
    monkeypatch.setattr(model.speaker, "forward", told)
    assert float(recipe.sound_loss(model, graph, batch)[0]) == 0.0
    inner = batch.counts - 2
    codes = model.speak(graph, batch.target[:, 1:-1], inner).view(notes.shape)
    assert torch.equal(codes[..., 0], notes[..., 0].long())
    assert torch.equal(codes[..., 1], (notes[..., 1] / spoken.STEP).round().long())
    assert torch.equal(codes[..., 2], notes[..., 2].long())


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--released-posterior", "--strategy", "expect"]])
def test_all_stages_run(tmp_path, flags):
    recipe.main(["all", "--work", str(tmp_path), "--quick", *flags])
    zoo = tmp_path / "zoo"
    result = json.loads((zoo / "evaluation-speech-translation.json").read_text())
    assert result["sources"] == 2 and "joint_viterbi" in result["quality"]
    assert result["recogniser"]["digits"] == 1.0
    config = SpeechDagConfig.from_pretrained(zoo / "speech-translation")
    assert config.released_posterior == bool(flags) and config.strategy == "argmax"
    assert (zoo / "speech-translation" / "README.md").is_file()

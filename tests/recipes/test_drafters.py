"""The recipe that trains drafters: its losses, the labels of its data, and what samplers refuse.

Labels are compared with a model that decodes greedily, whose next token is known.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from enumeration import enumerate_distribution
from tabular import PROMPTS, TabularCausal, causal_target, space_of

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.resolve import resolve_sampler
from gen.core.sampling_params import SamplingParams
from gen.models.targets.causal import CausalTarget
from gen.pipeline.pipeline import load
from gen.recipes.drafters.data import Teacher, with_drafts
from gen.recipes.drafters.kind_ar import Autoregressive, ModelOptions
from gen.recipes.drafters.kind_eagle import EagleKind, EagleOptions
from gen.recipes.drafters.kinds import KINDS
from gen.recipes.drafters.losses import LOSSES, acceptance, mean_over, nla
from gen.recipes.drafters.recipe import QUICK, DrafterRecipe, main, read_options
from gen.recipes.drafters.table import decode, measured

TASKS = ["sort 3 1 2 =", "copy 4 0 7 5 =", "3 + 8 + 5 ="]


def two(seed: int, rows: int = 5, ids: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(2, rows, ids, generator=generator, dtype=torch.float64)
    p, q = logits.log_softmax(-1)
    return p, q


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_zero_for_equal_distributions_alone(name):
    p, q = two(0)
    assert LOSSES[name](p, p).abs().max() < 1e-12
    assert LOSSES[name](p, q).min() > 1e-3


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_finite_where_p_leaves_tokens_out(name):
    p, q = two(1)
    p = p.masked_fill(torch.arange(4) == 2, -torch.inf).log_softmax(-1)
    q = q.requires_grad_()
    LOSSES[name](p, q).sum().backward()
    assert q.grad.isfinite().all()


def test_the_gradient_of_nla_is_that_of_finite_differences():
    logits = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    p, _ = two(2, rows=1)
    z = logits.clone().requires_grad_()
    nla(p[0], z.log_softmax(-1)).backward()
    step = 1e-6
    for k in range(4):
        e = torch.zeros(4, dtype=torch.float64)
        e[k] = step
        up, down = (nla(p[0], (logits + s * e).log_softmax(-1)) for s in (1, -1))
        assert abs(float(up - down) / (2 * step) - float(z.grad[k])) < 1e-7


def test_acceptance_is_that_of_the_first_draft():
    """Over all random numbers, at 3 tokens."""
    space, sampling = space_of((2,), 3), SamplingParams(temperature=0.8)
    model, small = (TabularCausal(space.vocab_size, seed, low=0.0, spread=1.5) for seed in (0, 5))
    sampler = registry.get("sampler", "speculative")(num_speculative_tokens=1)

    def decode(rng, rows):
        draft = causal_target(small, space, sampling, rows)
        out = sampler(causal_target(model, space, sampling, rows), rng, draft=draft)
        first = [sum(stats.acceptance_histogram[1:]) > 0 for stats in out.stats]
        return torch.tensor(first).long()[:, None]

    found = enumerate_distribution(decode, len(PROMPTS))
    for row, law in enumerate(found):
        target = causal_target(model, space, sampling, [row])
        draft = causal_target(small, space, sampling, [row])
        at = torch.zeros(1, 1, dtype=torch.long)
        p, q = (one.predict(at, at).logprobs[0, 0] for one in (target, draft))
        assert abs(law.get((1,), 0.0) - float(torch.exp(-nla(p, q)))) < 1e-12
        assert abs(float(acceptance(p, q)) - float(torch.exp(-nla(p, q)))) < 1e-12


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    made = Teacher(load("text"), TASKS)
    made.target = made.target.with_params(SamplingParams(temperature=0))
    return made


@pytest.fixture(scope="module")
def labelled(teacher):
    """Greedy sequences of a model and what it says of them."""
    target: CausalTarget = teacher.target.of_items(torch.arange(3).numpy())
    tokens = torch.zeros(3, target.length, dtype=torch.long)
    for at in range(target.length):
        position = torch.full((3, 1), at)
        before = tokens[:, max(at - 1, 0), None]
        tokens[:, at] = target.predict(before, position).logprobs[:, -1].argmax(-1)
    kind = EagleKind(teacher, EagleOptions(unrolls=3))
    data = kind.teacher.label(torch.arange(3), tokens)
    return kind, kind.teacher.unpack(data, torch.arange(3))


def test_every_label_is_the_token_that_follows(labelled):
    _, batch = labelled
    counts = batch.weight > 0
    assert counts.sum() > 10
    assert torch.equal(batch.logp.argmax(-1)[counts], batch.tokens[counts])


def test_control_labels_of_the_position_behind(labelled):
    _, batch = labelled
    counts = batch.weight[:, 1:] > 0
    assert not torch.equal(batch.logp.argmax(-1)[:, :-1][counts], batch.tokens[:, 1:][counts])


def test_states_are_those_that_the_distribution_comes_from(labelled):
    kind, batch = labelled
    net = kind.teacher.model.model
    logits = net.lm_head(net.model.norm(batch.states[kind.teacher.layers[-1]]))
    counts = batch.weight > 0
    legal = kind.teacher.target.legal
    best = logits[..., : legal.shape[-1]].masked_fill(~legal, -torch.inf).argmax(-1)
    assert torch.equal(best[counts], batch.tokens[counts])


@pytest.mark.parametrize("unroll", [1, 2, 3])
def test_a_position_sees_nothing_behind_what_was_known(labelled, unroll):
    """Unroll i drafts position t from tokens before t and hidden states up to t - i."""
    kind, batch = labelled
    net, t = kind.network(), 5
    plain = kind.unrolled(net, batch, unroll)[-1][:, t]
    later = torch.arange(batch.tokens.shape[1])
    changed = {k: v + (later > t - unroll).float()[:, None] for k, v in batch.states.items()}
    tokens = torch.where(later >= t, (batch.tokens + 1) % 10, batch.tokens)
    other = kind.unrolled(net, replace(batch, states=changed, tokens=tokens), unroll)[-1][:, t]
    assert torch.equal(plain, other)
    seen = {k: v + (later >= t - unroll).float()[:, None] for k, v in batch.states.items()}
    control = kind.unrolled(net, replace(batch, states=seen), unroll)[-1][:, t]
    assert (plain - control).abs().max() > 1e-3
    near = torch.where(later >= t - 1, (batch.tokens + 1) % 10, batch.tokens)
    control = kind.unrolled(net, replace(batch, tokens=near), unroll)[-1][:, t]
    assert (plain - control).abs().max() > 1e-4


def test_a_drafted_stretch_weighs_where_a_drafter_stands(teacher):
    kind = Autoregressive(teacher, ModelOptions())
    tokens = torch.arange(16).expand(3, -1) % 10
    data = kind.teacher.label(torch.arange(3), tokens)
    made = with_drafts(kind.teacher, data, lambda b: torch.full_like(b.tokens, 11), 2, seed=0)
    drafted = made.tokens != tokens
    assert (drafted.sum(1) <= 2).all() and drafted.any()
    assert (made.weight[drafted] == 1).all() and (made.weight.sum(1) <= 3).all()
    whole = kind.teacher.batch(torch.arange(3), made.tokens)
    stored = kind.teacher.unpack(made, torch.arange(3))
    assert (whole.logp.exp() - stored.logp.exp()).abs().max() < 1e-3


def test_a_small_model_reads_the_prompt_and_the_tokens_before(teacher):
    kind = Autoregressive(teacher, ModelOptions(start="text-causal", width=96, depth=4))
    tokens = torch.arange(16).expand(3, -1) % 10
    batch = kind.teacher.batch(torch.arange(3), tokens)
    net = kind.network()
    assert torch.equal(kind.logq(net, batch).argmax(-1), batch.logp.argmax(-1))


@pytest.fixture(scope="module")
def drafted(tmp_path_factory):
    """Folder of a quick run of kind ``ar``."""
    out = tmp_path_factory.mktemp("ar")
    figures = DrafterRecipe("text-causal", "ar", out, QUICK, log=lambda _: None).run()
    assert 0 < figures["alpha"] < 1
    return out / "drafter"


SPECS = ({"name": "speculative"}, {"name": "speculative_jacobi", "init": "model"})


@pytest.mark.parametrize("spec", SPECS, ids=["chain", "window"])
def test_a_drafted_model_serves_its_target(drafted, spec):
    made = load("text")(TASKS, {**spec, "draft_model": str(drafted)})
    assert all(s.draft_nfe for s in made.stats)


@pytest.mark.parametrize("spec", SPECS, ids=["chain", "window"])
def test_a_draft_model_of_another_distribution_is_refused(drafted, spec):
    spec = {**spec, "draft_model": str(drafted)}
    with pytest.raises(GenError, match="was trained for temperature 1.0.*have temperature 0.5"):
        load("text")(TASKS, spec, temperature=0.5)


def test_a_draft_model_of_another_target_is_refused(drafted, tmp_path):
    for file in drafted.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((drafted / "config.json").read_text())
    config["drafter"]["target"] = "0" * 16
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = {"name": "speculative", "draft_model": str(tmp_path)}
    with pytest.raises(GenError, match="trained for text-causal with weights 0000000000000000"):
        load("text")(TASKS, spec)
    del config["drafter"]  # a draft model of nobody serves everyone
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load("text")(TASKS, spec, temperature=0.5).stats


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["method=eagle1", "aligned=0.5"], ["gated=true"]])
def test_the_command_trains_what_a_sampler_reads(tmp_path, capsys, options):
    call = ["--model", "text-causal", "--kind", "eagle", "--quick", "--out", str(tmp_path)]
    assert main([*call, "--options", *options]) == 0
    *_, figures, use = capsys.readouterr().out.splitlines()
    figures = json.loads(figures)
    assert use.startswith("gen sample text ") and str(figures["drafter"]) in use
    spec = {"name": "speculative", "drafter": "eagle", "drafter_weights": figures["drafter"]}
    assert load("text")(TASKS, spec).stats[0].nfe > 0


def test_a_folder_of_another_run_is_refused(tmp_path):
    def run(kind, prompts):
        plan = replace(QUICK, prompts=prompts, held_out=2, steps=1)
        return DrafterRecipe("text-causal", kind, tmp_path, plan, log=lambda _: None)

    first = run("medusa", 4)
    tokens = first.sequences().tokens
    assert torch.equal(run("medusa", 4).sequences().tokens, tokens)
    for kind, prompts in (("medusa", 3), ("hydra", 4)):
        with pytest.raises(GenError, match="holds another run, of .* expected .*, or a new folder"):
            run(kind, prompts).sequences()


def test_wrong_options_are_named():
    with pytest.raises(GenError, match="unknown option 'widht'"):
        read_options(EagleOptions, {"widht": "32"})
    with pytest.raises(GenError, match="option width came as 'wide'; expected"):
        read_options(EagleOptions, {"width": "wide"})
    with pytest.raises(GenError, match="unknown kind of drafter 'eagel'"):
        main(["--model", "text-causal", "--kind", "eagel", "--out", "x"])


def test_means_leave_out_what_does_not_weigh():
    values = torch.tensor([1.0, torch.inf, 3.0])
    assert mean_over(values, torch.tensor([1.0, 0.0, 1.0])) == 2


def test_passes_are_the_same_one_by_one_and_in_batches():
    pipe = load("text")
    spec = {"name": "speculative", "num_speculative_tokens": 3}
    items = pipe.plan(TASKS)
    alone, batched = (measured(pipe, items, spec, timed)[:3] for timed in (None, 1))
    assert alone == batched and float(alone[0]) > 1


def test_the_table_counts_items_with_the_tokens_of_autoregression():
    pipe = load("text")
    items = pipe.plan(TASKS)
    reference = decode(pipe, items, {"name": "autoregressive"})[0]
    spec = {"name": "speculative_jacobi", "init": "repeat"}
    assert measured(pipe, items, spec, 1, reference)[-1] == "3 of 3"
    reference[1, 0] += 1  # control
    assert measured(pipe, items, spec, 1, reference)[-1] == "2 of 3"
    assert measured(pipe, items, {**spec, "coupling": "fresh"}, 1, reference)[-1] == ""


def test_every_kind_that_is_a_model_begins_windows():
    teacher = Teacher.of_model("text-causal", "text", 1, False)
    drafters = registry.table("drafter")
    for name, kind in KINDS.items():
        chain = kind(teacher, kind.options_type()).sampler(Path("x"))
        drafter = resolve_sampler(chain)[0].drafter
        assert kind.is_model == drafters[drafter].is_model, name
    spec = Autoregressive(teacher, ModelOptions()).initialiser(Path("x"))
    assert spec == {"name": "speculative_jacobi", "init": "model", "draft_model": "x"}

"""Trees that a network chooses: the distribution whatever it says, single actions against fixed
shapes, rows of a batch, the tokens that it learns, and what is refused.

The controls look at a draft's own value, or at what the target says of it, and must miss.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from functools import partial

import pytest
import torch
from constrained import with_end
from constraint_bench import COMBINED, EXACT, LONG, WRONG, error, models, run, speculative
from enumeration import enumerate_distribution
from tabular import PROMPTS, causal_target, space_of
from trained_drafters import target

from gen.core.errors import GenError
from gen.core.registry import registry
from gen.core.rng import CounterRNG
from gen.core.sampling_params import SamplingParams
from gen.models.draft_heads.predictors import FEATURES, SelectorNet, times_of
from gen.models.targets.identity import DrafterFacts
from gen.models.targets.trained_drafters import write_drafter
from gen.models.targets.trained_predictors import COSTS, SELECTOR, selector_facts
from gen.pipeline.pipeline import load
from gen.recipes.tree_selector import (
    QUICK,
    AllActions,
    Rounds,
    SelectorPlan,
    best_rate,
    budgeted_actions,
    expected_tokens,
    main,
    recorded,
    trained,
)
from gen.samplers.causal.shapes.base import NodeDrafter, TreeBuilder
from gen.samplers.causal.shapes.selected import Selected

ACTIONS = ((1, 0, 0), (2, 0, 0), (0, 2, 1), (1, 2, 1), (0, 2, 2))
SLOW = partial(pytest.param, marks=pytest.mark.slow)
TASKS = ["shuffle 4 0 7 5 =", "sort 3 1 2 9 8 =", "close ( [ ] { =", "copy 3 1 2 5 6 ="]


class Always(torch.nn.Module):
    """A selector that says one action."""

    def __init__(self, action: int, count: int):
        super().__init__()
        self.says = torch.nn.Parameter(torch.eye(count)[action])

    def forward(self, x):
        return self.says.expand(*x.shape[:-1], -1)


class Moody(torch.nn.Module):
    """A selector that changes its mind with every digit of what it reads."""

    def __init__(self):
        super().__init__()
        self.count = torch.nn.Parameter(torch.tensor(float(len(ACTIONS))))

    def forward(self, x):
        at = (97 * x.sum(-1)).long() % len(ACTIONS)
        return torch.eye(len(ACTIONS))[at]


@pytest.fixture
def selector(monkeypatch):
    """Sets the network of all selected trees, and lists what it chose."""
    chosen: list[list[int]] = []
    choose = Selected.choose

    def noted(self, builder):
        assert builder.size == 0, "nothing is drafted yet"
        made = choose(self, builder)
        chosen.extend(made.tolist())
        return made

    def use(net, actions=ACTIONS, rate=0.0):
        monkeypatch.setattr(Selected, "actions", property(lambda self: actions))
        monkeypatch.setattr(
            Selected, "attach", lambda self, sampler, target, draft: self.use(net, actions, rate)
        )
        monkeypatch.setattr(Selected, "choose", noted)
        return chosen

    return use


def selected(verifier: str = "recursive", **params):
    return speculative(shape="selected", verifier=verifier, tree_selector="in the test", **params)


# --- the distribution


@pytest.mark.parametrize("verifier", ["recursive", *map(SLOW, ("traversal", "k_seq"))])
@pytest.mark.parametrize("space", ["length", SLOW("end")])
def test_no_selector_changes_the_distribution(selector, verifier, space):
    chosen = selector(Moody())
    if space == "length":
        assert error(selected(verifier), space_of((3,), 3), COMBINED) < EXACT
    else:
        assert error(selected(verifier), with_end(3, 3)) < EXACT
    assert len({tuple(action) for action in chosen}) > 1


def test_control_a_tree_that_drops_a_draft_for_its_own_value(selector, monkeypatch):
    selector(Moody())
    compact = TreeBuilder.compact

    def wrong(self, most):
        self.tree.exists = self.tree.exists & (self.tree.tokens != 0)
        compact(self, most)

    monkeypatch.setattr(TreeBuilder, "compact", wrong)
    assert error(selected(), space_of((3,), 3)) > WRONG


def test_control_a_tree_that_drops_what_the_target_would_reject(selector, monkeypatch):
    """Whether a draft is submitted depends on what the verifier will say of it."""
    selector(Always(0, len(ACTIONS)))
    judge = NodeDrafter._judge

    def wrong(self, step, tree, logp):
        row = torch.arange(len(logp))[:, None]
        p = logp[row, tree.parents + 1].gather(-1, tree.tokens[..., None])[..., 0]
        tree.exists = tree.exists & (p >= tree.log_mass())
        return judge(self, step, tree, logp)

    monkeypatch.setattr(NodeDrafter, "_judge", wrong)
    assert error(selected(), space_of((3,), 3)) > WRONG


# --- single actions


@pytest.mark.parametrize("length", [1, 2])
def test_a_selector_that_always_says_chain_is_a_chain(selector, length):
    selector(Always(ACTIONS.index((length, 0, 0)), len(ACTIONS)))
    chain = {"shape": "chain", "draws": "with_replacement", "num_speculative_tokens": length}
    wanted, out = (
        run(sampler, LONG) for sampler in (speculative(verifier="recursive", **chain), selected())
    )
    assert torch.equal(out.tokens, wanted.tokens)
    for one, other in zip(out.stats, wanted.stats, strict=True):
        assert (one.nfe, one.draft_nfe) == (other.nfe, other.draft_nfe)


@pytest.mark.parametrize("action", [(0, 2, 1), (1, 2, 2), (2, 3, 1)])
def test_a_selector_of_one_tree_is_that_tree(selector, action):
    selector(Always(0, 1), (action,))
    n, k, length = action
    fixed = {"shape": "paths", "trunk": n, "paths": k, "path_length": length}
    wanted = run(speculative(verifier="traversal", **fixed), LONG)
    out = run(selected("traversal"), LONG)
    assert torch.equal(out.tokens, wanted.tokens)
    for one, other in zip(out.stats, wanted.stats, strict=True):
        assert (one.nfe, one.draft_nfe) == (other.nfe, other.draft_nfe)


SKIPPING = {"drafter": "layer_skip", "kept_layers": "0"}


def test_a_row_is_the_same_alone_and_in_a_batch(selector):
    chosen = selector(Moody())

    def decode(rows, most=3):
        of = target(14, 20, rows=rows)
        of.at_most(most)
        return selected(**SKIPPING)(of, CounterRNG([5 + row for row in rows]))

    batch, few = decode((0, 1, 2)), decode((0, 1, 2), 2)
    assert torch.equal(batch.tokens, few.tokens) and len({tuple(c) for c in chosen}) > 2
    for row in range(3):
        alone = decode((row,))
        assert torch.equal(alone.tokens[0], batch.tokens[row])
        for made in (batch, few):
            assert made.stats[row].nfe == alone.stats[0].nfe
            assert made.stats[row].draft_nfe == alone.stats[0].draft_nfe


def test_rows_that_wait_at_a_bound_go_on(selector):
    selector(Moody())
    sampler = selected("follow", **SKIPPING)
    whole = sampler(target(12, 20), CounterRNG([5, 6, 7]))
    parts = sampler.begin(target(12, 20), CounterRNG([5, 6, 7]))
    while not parts.is_over:
        parts.advance(4)
    assert torch.equal(parts.output().tokens, whole.tokens)


# --- what it learns


@pytest.mark.parametrize(
    ("action", "ends"),
    [((1, 2, 1), True), SLOW((0, 2, 2), False), SLOW((0, 2, 2), True), SLOW((2, 0, 0), False)],
)
def test_labels_are_what_the_verifier_commits_on_average(selector, monkeypatch, action, ends):
    """Given the drafts of the first round, over all coins."""
    selector(Always(0, 1), (action,))
    space = with_end(3, 3) if ends else space_of((3,), 3)
    eos = -1 if space.eos_token_id is None else space.eos_token_id
    judge, labels, now = NodeDrafter._judge, {}, {}

    def noted(self, step, tree, logp):
        verdict = judge(self, step, tree, logp)
        for row, item in enumerate(step.items.tolist()):
            if int(step.round[row]) == 0:
                drafts = tuple(torch.where(tree.exists, tree.tokens, -1)[row].tolist())
                one = {k: vars(tree)[k][row].numpy() for k in ("tokens", "parents", "exists")}
                p, q = logp[row].exp().numpy(), tree.logq[row].exp().double().numpy()
                label = expected_tokens(range(len(drafts)), one, p, q, eos)
                count = int(verdict.num_accepted[row]) + 1
                ids = verdict.tokens[row, :count].tolist()
                now[item] = drafts, ids.index(eos) + 1 if eos in ids else count, label
        return verdict

    monkeypatch.setattr(NodeDrafter, "_judge", noted)
    model, small = models(space, SamplingParams())

    def decode(rng, rows):
        of, draft = (causal_target(m, space, SamplingParams(), rows) for m in (model, small))
        selected()(of, rng, draft=draft)
        for item, row in enumerate(rows):
            labels[row, now[item][0]] = now[item][2]
        return torch.tensor([[*now[item][0], now[item][1]] for item in range(len(rows))])

    for context, found in enumerate(enumerate_distribution(decode, len(PROMPTS))):
        mass: dict[tuple, float] = {}
        total: dict[tuple, float] = {}
        for (*drafts, count), weight in found.items():
            key = tuple(drafts)
            mass[key] = mass.get(key, 0.0) + weight
            total[key] = total.get(key, 0.0) + weight * count
        for key, weight in mass.items():
            assert abs(total[key] / weight - labels[context, key]) < 1e-9
        assert max(labels.values()) > min(labels.values()) + WRONG


def test_one_tree_has_those_of_all_actions():
    actions = budgeted_actions(5, 3)
    assert len(set(actions)) == len(actions)
    assert all(n + k * length <= 5 for n, k, length in actions)
    shape = AllActions(actions)
    spec = {"name": "speculative", "shape": "paths", "verifier": "recursive"}
    data = recorded(load("text"), spec, TASKS, actions)
    assert data.features.shape == (len(data.tokens), FEATURES)
    assert data.tokens.shape[1] == len(actions) and float(data.tokens.min()) >= 1
    chains = data.tokens[:, :5]  # a longer chain never commits fewer tokens
    assert (chains.diff(dim=1) >= -1e-6).all() and shape.nodes > 5


def test_a_selector_learns_which_action_suits_a_round(tmp_path):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, FEATURES, generator=generator)
    suits = (x[:, 0] > 0.5).long()
    tokens = 1 + torch.nn.functional.one_hot(suits, 2) + torch.randn(2000, 2) * 0.1
    plan = SelectorPlan(steps=300, batch=256)
    net = trained(Rounds(x, tokens), plan, tmp_path, lambda line: None)
    assert float((net(x).argmax(1) == suits).float().mean()) > 0.95


@pytest.mark.parametrize("cost", [0.0, 0.1, 0.5])
def test_no_choice_of_actions_has_more_tokens_per_time_than_the_rule(cost):
    tokens = 1 + 3 * torch.rand(4, len(ACTIONS), generator=torch.Generator().manual_seed(3))
    times = times_of(torch.tensor(ACTIONS), cost)
    rounds = torch.arange(4)
    rates = [
        float(tokens[rounds, torch.tensor(way)].sum() / times[torch.tensor(way)].sum())
        for way in itertools.product(range(len(ACTIONS)), repeat=4)
    ]
    assert best_rate(tokens, tokens, times) == pytest.approx(max(rates), rel=1e-6)
    myopic = (tokens / times).argmax(1)
    alone = float(tokens[rounds, myopic].sum() / times[myopic].sum())
    assert alone <= max(rates) + 1e-6


def test_a_drafter_that_costs_more_gets_shorter_trees(selector):
    chosen = selector(Always(ACTIONS.index((0, 2, 2)), len(ACTIONS)), rate=1.5)
    run(selected(), LONG)
    assert {tuple(action) for action in chosen} == {(0, 2, 2)}
    chosen.clear()
    run(selected(draft_cost=1.0), LONG)
    assert {tuple(action) for action in chosen} == {(1, 0, 0)}


# --- folders


def written(tmp_path, change=None) -> str:
    pipe = load("text")
    spec = {"name": "speculative", "shape": "paths", "verifier": "recursive"}
    sampler, sampling = pipe.resolve(spec)
    items = pipe.plan(TASKS[:1])
    of = pipe.target(sampler, sampling, items)
    small = load("text", "text-draft")
    draft = small.target(sampler, sampling, small.plan(TASKS[:1]))
    facts = selector_facts(of, "model", draft, ACTIONS, [1.0] * len(COSTS), 32)
    assert isinstance(facts, DrafterFacts) and facts.kind == SELECTOR
    write_drafter(tmp_path, facts, SelectorNet(len(ACTIONS)).state_dict())
    if change:
        config = json.loads((tmp_path / "config.json").read_text())
        change(config)
        (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


def decoded(folder: str, **params):
    parts = {"shape": "selected", "verifier": "recursive", "tree_selector": folder}
    return load("text")(TASKS[:1], {"name": "speculative", **parts, **params})


def test_a_selector_serves_its_model_and_drafter(tmp_path):
    assert decoded(written(tmp_path)).stats[0].nfe > 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda c: c.update(target="0" * 16), "weights 0000000000000000; expected"),
        (lambda c: c.update(kind="medusa"), "is of kind medusa; expected tree_selector"),
        (lambda c: c["net"].update(draft="1" * 16), "model of weights 1111111111111111; exp"),
        (
            lambda c: c["net"].update(drafter="exit"),
            "for the drafter exit with .*; expected the drafter mod",
        ),
        (lambda c: c["net"].pop("actions"), "selector .* cannot be read"),
    ],
)
def test_a_selector_of_something_else_is_refused(tmp_path, change, said):
    with pytest.raises(GenError, match=said):
        decoded(written(tmp_path, change))


def test_a_shape_without_its_selector_is_refused(tmp_path):
    with pytest.raises(GenError, match="sampler.tree_selector .*expected a folder that"):
        speculative(shape="selected", verifier="recursive")
    with pytest.raises(GenError, match="unknown drafter"):
        decoded(str(tmp_path / "nowhere"))


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["model", "exit"])
def test_the_command_trains_what_a_sampler_reads(tmp_path, capsys, drafter):
    main(["text", "--drafter", drafter, "--quick", "--out", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("| selected | ")
    assert json.loads(lines[-10])["actions"] == len(
        budgeted_actions(QUICK.drafts, QUICK.most_paths)
    )
    assert decoded(str(tmp_path), drafter=drafter).stats[0].nfe > 0
    assert registry.get("shape", "selected") is Selected and dataclasses.is_dataclass(QUICK)

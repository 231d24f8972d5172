"""Outputs of samplers, checkpoint families, embedded models and jobs are those in ``frozen.json``.

See ``tests/support/freeze.py``, which makes them: a refactor must not change one of them.
"""

from __future__ import annotations

import copy

import freeze
import pytest

MAKERS = {section: freeze.makers(section) for section in freeze.SECTIONS}
# With -m slow: their samplers run on models in closed form in the fast tier, too.
SLOW = {("zoo", name) for name in MAKERS["zoo"] if not name.startswith("text/")}
ALL = [
    pytest.param(
        section,
        name,
        id=f"{section}-{name}",
        marks=[pytest.mark.slow] if (section, name) in SLOW else [],
    )
    for section, names in MAKERS.items()
    for name in names
]


@pytest.mark.parametrize(("section", "name"), ALL)
@pytest.mark.thinned(21)
def test_outputs_are_those_that_were_frozen(section, name):
    assert name in freeze.held()["entries"][section], (
        f"{name} is new; freeze it: python tests/support/freeze.py --write --names {name}"
    )
    assert not (problem := freeze.verdict(section, name, MAKERS[section][name]())), problem


def test_what_is_slow_is_frozen_on_a_smaller_model():
    assert all(name in MAKERS[section] for section, name in SLOW)
    for sampler in ("cspd", "mar"):
        assert {f"latents/{sampler}", f"gaussians/{sampler}"} <= MAKERS["samplers"].keys()


@pytest.mark.parametrize("section", freeze.SECTIONS)
def test_nothing_that_was_frozen_is_gone(section):
    gone = freeze.held()["entries"][section].keys() - MAKERS[section].keys()
    assert not gone, f"{sorted(gone)}: a spec with another name belongs into RENAMED"


# --- controls


def test_control_other_draws_are_found(monkeypatch):
    keys = [31 * r + 8 for r in range(freeze.contract.ROWS)]
    bench = freeze.contract.Bench.__call__

    def other(self, sampler, params, **more):
        return bench(self, sampler, params, keys=keys, **more)

    for name in ("bench/speculative_jacobi", "bench/maskgit", "architecture/autoregressive"):
        assert not freeze.verdict("samplers", name, MAKERS["samplers"][name]())
        with monkeypatch.context() as patch:
            patch.setattr(freeze.contract.Bench, "__call__", other)
            found = freeze.verdict("samplers", name, MAKERS["samplers"][name]())
        assert f"{name} differs from" in found and ".tokens[" in found


def test_control_another_seed_is_found_in_the_embedded_models(monkeypatch):
    def other(pipe, prompts, spec, **start):
        return pipe(prompts, sampler=spec, seed=6, **start)

    monkeypatch.setattr(freeze, "sample", other)
    name = "action/speculative_jacobi"
    assert "differs from" in freeze.verdict("zoo", name, MAKERS["zoo"][name]())


@pytest.mark.parametrize("section", freeze.SECTIONS)
def test_control_one_altered_number_is_found(section):
    """Every leaf of a few entries in turn; rounding is no difference."""
    entries = freeze.held()["entries"][section]
    for name in list(entries)[:: max(1, len(entries) // 4)]:
        assert not freeze.verdict(section, name, entries[name])
        paths = list(leaves(entries[name]))
        for path in paths[:: max(37, len(paths) // 20)]:
            for change, wanted in ((altered, True), (rounded, False)):
                now = copy.deepcopy(entries[name])
                holder = now
                for key in path[:-1]:
                    holder = holder[key]
                holder[path[-1]] = change(holder[path[-1]])
                assert bool(freeze.verdict(section, name, now)) == wanted, (name, path)


def leaves(value, path=()):
    """Walk to everything that is neither a list nor a mapping."""
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, (*path, key))
    else:
        yield path


def altered(value):
    """Change a value by the least that counts."""
    if isinstance(value, float):
        return value * 1.001 + 1e-3
    return value + 1 if isinstance(value, int) else f"{value}?"


def rounded(value):
    """Change a value by less than counts."""
    return value * (1 + 1e-7) if isinstance(value, float) else value


def test_control_a_lost_key_and_a_shorter_list_are_found():
    assert freeze.differences({"a": [1]}, {"a": [1], "b": 2}) == [".b: only in one of them"]
    assert freeze.differences({"a": [1, 2]}, {"a": [1]}) == [".a: 2 values, frozen 1"]
    assert freeze.differences(True, 1) and freeze.differences(None, 0.0)
    assert not freeze.differences({"a": [1, 0.3]}, {"a": [1, 0.30000001]})

"""Specs that the contract of samplers is checked on: every sampler and preset of token ids that is
registered, and every part of one, with parameters that fit twelve positions.

A new file appears here by itself: a preset by its declaration, with the parameters of its
``example``; a part by its kind.
"""

from __future__ import annotations

from itertools import cycle

from gen.core.registry import registry
from gen.core.resolve import protocol_of, resolve_sampler
from gen.samplers.masked.step import HIDDEN_STATES, needs_of

# parts that read weights trained for one model, which the models here are not
TRAINED = {
    kind: {name for name, part in registry.table(kind).items() if part.needs_weights}
    for kind in ("verifier", "length_policy", "drafter", "shape")
}
TRAINED["proposer"] = {
    name for name, part in registry.table("proposer").items() if HIDDEN_STATES in needs_of(part)
}


def needs_weights(name: str) -> bool:
    """Whether a sampler or preset reads weights that were trained for one model."""
    values = vars(resolve_sampler(name)[0])
    fields = {"length_policy": "policy"}
    return any(values.get(fields.get(k, k)) in TRAINED[k] for k in TRAINED if k != "proposer")


EXACT = [name for name, v in registry.table("verifier").items() if not v.relaxed]
RELAXED = [
    name for name, v in registry.table("verifier").items() if v.relaxed and not v.needs_weights
]
NAMES = [
    n
    for kind in ("sampler", "preset")
    for n in registry.table(kind)
    if "codes" in resolve_sampler(n)[0].kinds and not needs_weights(n)
]
PRESETS = registry.table("preset")
SPECS: dict[str, dict] = {
    name: {"name": name, **(PRESETS[name].example if name in PRESETS else {})} for name in NAMES
}
if "atts" in SPECS:  # it has no default threshold: that comes of a calibration
    SPECS["atts"] = {"name": "atts", "threshold": 0.5}
SPECS |= {f"window-{n}": {"name": "speculative_jacobi", "window": n} for n in (1, 2, 5)}
SPECS |= {
    f"{c}-{i}": {"name": "speculative_jacobi", "coupling": c, "init": i, "window": 4}
    for c in registry.table("coupling")
    for i in registry.table("initialiser")
}
# an order knows nothing of the schedule, so one of each will do; a rolled order is the last one, so
# that the pairs of the others keep their names
ORDERS = sorted(registry.table("order"), key=lambda name: (name.endswith("_rolled"), name))
SPECS |= {
    f"{o}-{s}": {"name": "masked_iterative", "order": o, "schedule": s, "steps": 5}
    for o, s in zip(ORDERS, cycle(registry.table("schedule")), strict=False)
}
DARING = {
    "conf_threshold": 0.4,
    "low_threshold": 0.3,
    "entropy_bound": 1.3,
    "factor": 2.0,
    "kl_threshold": 0.9,
    "block_length": 5,
    "gap_threshold": 2.0,
    "steps": 5,
    "filter": "text-filter",
    "filter_threshold": 0.5,
}


def daring(**parts: str) -> dict:
    """A spec of ``masked_iterative`` with the values of ``DARING`` that its parts read."""
    sampler = registry.get("sampler", "masked_iterative")(**parts, **DARING)
    read = {name: value for name, value in DARING.items() if not sampler.unread(name)}
    return {"name": "masked_iterative", **parts, **read}


SPECS |= {
    f"selector-{s}-{b}": daring(selector=s, blocks=b)
    for s in registry.table("selector")
    for b in ("whole", "fixed")
}
SPECS |= {
    "selector-explore-lookahead": daring(selector="explore", blocks="lookahead"),
    "selector-threshold-credit": daring(selector="threshold", proposer="credit"),
    "selector-threshold-argmax": daring(
        selector="threshold", proposer="argmax", confidence_on="raw"
    ),
}
SPECS |= {f"blocks-{b}": daring(blocks=b) for b in registry.table("block_schedule")}
# ``end`` wants a space whose rows end
STOPS = set(registry.table("stop")) - {"end"}
SPECS |= {f"stop-{s}": daring(stop=s) for s in sorted(STOPS)}
SPECS |= {
    f"remask-{m}": {"name": "masked_iterative", "remasker": m, "steps": 5}
    for m in registry.table("remasker")
}
CHAINS = [v for v in EXACT if not registry.get("verifier", v).judges_trees]
SPECS |= {
    f"{v}-{p}": {"name": "speculative", "verifier": v, "policy": p, "num_speculative_tokens": 3}
    for v in CHAINS
    for p, policy in registry.table("length_policy").items()
    if not (policy.needs_same_tokens or policy.needs_weights)
}
# tokens that do not depend on the drafts
SPECS |= {
    f"follow-{p}": {"name": "speculative", "verifier": "follow", "policy": p}
    for p, policy in registry.table("length_policy").items()
    if policy.needs_same_tokens
}
TREES = {
    "chain": {"num_speculative_tokens": 3},
    "branching": {"branching": "2-2-1"},
    "paths": {"paths": 2, "path_length": 3, "trunk": 1},
}  # other shapes: a few drafts


def tree(shape: str, verifier: str, drafter: str = "model") -> dict:
    """A spec of ``speculative`` with a tree of drafts, whose shape gets few of them."""
    size = {"nodes": 6, "tree_depth": 3, "beam_width": 2}
    declared = registry.params_of("shape", shape)
    known = () if declared is None else declared.__dataclass_fields__
    chosen = TREES.get(shape, {k: v for k, v in size.items() if k in known})
    parts = {"drafter": drafter, "shape": shape, "verifier": verifier}
    return {"name": "speculative", **parts, **chosen}


def drawable(shape: str, verifier: str, drafter: str = "model") -> bool:
    """Whether there is a way to draw siblings that all of these parts take."""
    users = {"shape": shape, "verifier": verifier, "drafter": drafter}
    kinds = {kind: registry.get(kind, name) for kind, name in users.items()}
    ways = set(kinds["verifier"].draws) & set(kinds["drafter"].draws)
    fits = kinds["shape"].parts_models or not kinds["drafter"].several
    return fits and kinds["drafter"].shapes and bool(ways & set(kinds["shape"].takes))


SHAPES = [name for name, shape in registry.table("shape").items() if not shape.needs_weights]
JUDGES = [v for v in EXACT if v not in CHAINS]
# every verifier of trees with a chain and a tree, and every shape once
SPECS |= {f"{v}-chain": tree("chain", v) for v in JUDGES}
SPECS |= {
    f"{v}-{s}": tree(s, v)
    for n, s in enumerate(s for s in SHAPES if s != "chain")
    for v in [v for v in (JUDGES[n:] + JUDGES) if drawable(s, v)][:1]
}
SPECS |= {
    "speculative-unguided": {
        "name": "speculative",
        "draft_temperature": 0.5,
        "draft_guidance": 1.0,
    },
    "speculative-greedy-drafts": {
        "name": "speculative",
        "draft_temperature": 0.0,
        "policy": "heuristic",
    },
}
SPECS |= {
    f"{v}-{c}": {"name": "relaxed_acceptance", "verifier": v, "coupling": c, "window": 4}
    for v in RELAXED
    for c in ("fresh", "maximal", "gumbel_shared")
}
SPECS |= {
    f"{v}-model": {"name": "relaxed_acceptance", "verifier": v, "drafter": "model"} for v in RELAXED
}
SPECS |= {
    f"drafter-{d}": {"name": "relaxed_acceptance", "drafter": d}
    for d, source in registry.table("drafter").items()
    # the specs above have these two, and trained weights are of one model
    if source.makes_chains() and d not in ("jacobi", "model") and not source.needs_weights
}
SPECS |= {
    f"tree-{d}": tree("branching", "recursive", d)
    for d, source in registry.table("drafter").items()
    if d != "model" and not source.needs_weights and drawable("branching", "recursive", d)
}
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "guidance_scale": 1.5}


def sampling_for(name: str, spec: dict | str | None = None) -> dict:
    """Sampling parameters of a spec, which is that of ``SPECS`` if none is given: the usual ones,
    without those that a preset decides itself; where confident positions go first, some that leave
    doubt, which guidance here does not."""
    preset = PRESETS.get(name)
    doubtful = name.startswith("selector-") or name in ("dream", "exact_speculative", "freedave")
    doubt = {"temperature": 2.0, "guidance_scale": 1.0} if doubtful else {}
    verifier = SPECS.get(name, {}).get("verifier")
    if verifier is not None and registry.get("verifier", verifier).needs_greedy:
        doubt = {"temperature": 0.0}
    protocol = registry.get("protocol", protocol_of(spec or SPECS.get(name, name)))
    if not protocol.guides:
        doubt["guidance_scale"] = 1.0
    return {
        k: v for k, v in (SAMPLING | doubt).items() if preset is None or k not in preset.sampling
    }

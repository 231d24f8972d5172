"""What the contract of samplers is checked on: every sampler and preset of ids that is registered,
and every part of one, with knobs that fit twelve places."""

from __future__ import annotations

from itertools import cycle

from gen.core.registry import registry
from gen.core.sampler import resolve_sampler

RELAXED = [name for name, v in registry.table("verifier").items() if v.relaxed]
NAMES = [
    n
    for kind in ("sampler", "preset")
    for n in registry.table(kind)
    if "codes" in resolve_sampler(n)[0].kinds
]
SPECS: dict[str, dict] = {
    name: {"name": name} for name in NAMES
}  # test_grid_latent.py has those of latents
SPECS |= {f"window-{n}": {"name": "speculative_jacobi", "window": n} for n in (1, 2, 5)}
SPECS |= {
    f"{c}-{i}": {"name": "speculative_jacobi", "coupling": c, "init": i, "window": 4}
    for c in registry.table("coupling")
    for i in registry.table("initialiser")
}
SPECS |= {  # an order knows nothing of the schedule, so one of each will do
    f"{o}-{s}": {"name": "masked_iterative", "order": o, "schedule": s, "steps": 5}
    for o, s in zip(registry.table("order"), cycle(registry.table("schedule")), strict=False)
}
DARING = {
    "conf_threshold": 0.4,
    "low_threshold": 0.3,
    "entropy_bound": 1.3,
    "factor": 2.0,
    "kl_threshold": 0.9,
    "block_length": 5,
    "steps": 5,
}
DARING |= {"name": "masked_iterative", "filter": "text-filter", "filter_threshold": 0.5}
SPECS["learn2pd"] = {"name": "learn2pd", "stop": "filled"}  # rows have no end here
SPECS |= {
    f"selector-{s}-{b}": {"selector": s, "blocks": b, **DARING}
    for s in registry.table("selector")
    for b in ("whole", "fixed")
}
SPECS |= {
    "selector-explore-lookahead": {"selector": "explore", "blocks": "lookahead", **DARING},
    "selector-threshold-credit": {"selector": "threshold", "proposer": "credit", **DARING},
    "selector-threshold-argmax": {
        "selector": "threshold",
        "proposer": "argmax",
        "confidence_on": "raw",
        **DARING,
    },
}
SPECS |= {f"blocks-{b}": {"blocks": b, **DARING} for b in registry.table("block_schedule")}
STOPS = set(registry.table("stop")) - {
    "end"
}  # which wants a space whose rows end: test_stops_blocks.py
SPECS |= {f"stop-{s}": {"stop": s, "gap_threshold": 2.0, **DARING} for s in sorted(STOPS)}
SPECS |= {
    f"remask-{m}": {"name": "masked_iterative", "remasker": m, "steps": 5}
    for m in registry.table("remasker")
}
SPECS |= {
    f"{v}-{p}": {"name": "speculative", "verifier": v, "policy": p, "num_speculative_tokens": 3}
    for v in ("token", "block")
    for p in registry.table("length_policy")
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
SAMPLING = {"temperature": 0.9, "top_p": 0.95, "guidance_scale": 1.5}


def sampling_for(name: str) -> dict:
    """The usual one, without what a preset decides itself; where sure places go first, one that
    leaves some doubt, which guidance here does not."""
    preset = registry.table("preset").get(name)
    doubtful = name.startswith("selector-") or name in ("dream", "exact_speculative", "freedave")
    doubt = {"temperature": 2.0, "guidance_scale": 1.0} if doubtful else {}
    return {
        k: v for k, v in (SAMPLING | doubt).items() if preset is None or k not in preset.sampling
    }

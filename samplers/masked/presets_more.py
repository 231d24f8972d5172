"""More presets of masked language models: those that look again at what they committed, that stop
early, whose blocks move, that ask a trained filter, or that come with a cache. ``masked_presets``
has the others and says what all of them share. ``llada2`` and ``wino`` empty or change places only
inside the block at work. ``learn2pd`` is for models whose rows end, and reads the embedded filter
``text-filter`` unless ``filter`` names another one. ``window_diffusion`` is for models that can
compute some of their places; its authors also stop at the end, where there is one (``stop`` =
``end``).

Where a preset's selector does not count steps, ``steps`` is so large that the schedule never asks
for more than one place.
"""

from __future__ import annotations

from gen.samplers.masked.presets import BLOCKS, preset

PATIENT = {"schedule": "linear", "steps": 1024}

preset(
    "adablock",
    "2509.26432",
    "AdaBlock: blocks that end with a delimiter; all places above a confidence",
    {
        "selector": "threshold",
        "conf_threshold": 0.9,
        "blocks": "adaptive",
        "block_length": 32,
        "delimiter_threshold": 0.3,
    },
)
preset(
    "dcd",
    "2601.02076",
    "deferred commitment: a window over the first empty places; all above a confidence",
    {"selector": "threshold", "conf_threshold": 0.9, "blocks": "sliding", "block_length": 32},
)
preset(
    "prophet",
    "2508.19982",
    "Prophet: the surest places step by step, and all at once when the leading ids are far ahead",
    {"selector": "even", "stop": "prophet", "gap_threshold": 7.5, "steps": 128},
)
preset(
    "llada2",
    "2512.15745",
    "LLaDA2.1: ahead of the schedule where it is sure; what has become unlikely is edited",
    {
        "selector": "scheduled_threshold",
        "conf_threshold": 0.7,
        "remasker": "edit",
        "edit_threshold": 0.5,
        "max_post_steps": 16,
        "align_blocks": True,
    }
    | PATIENT
    | BLOCKS,
    aliases={"num_inference_steps": "block_steps"},
)
preset(
    "wino",
    "2507.18578",
    "WINO: wide in, and out again what its neighbours alone would not have said; blocks of 128",
    {
        "selector": "wide_in",
        "conf_threshold": 0.7,
        "remasker": "wino",
        "remask_threshold": 0.9,
        "blocks": "fixed",
        "block_length": 128,
    }
    | PATIENT,
)
preset(
    "rcr",
    "2508.13148",
    "running confidence: everything is filled in, the least sure places of all are taken back",
    {"selector": "schedule", "schedule": "linear", "remasker": "rcr", "steps": 64},
)
preset(
    "remdm",
    "2503.00307",
    "ReMDM for LLaDA: late in a block, the least sure places are made again",
    {"selector": "even", "remasker": "remdm", "remask_count": 4, "steps": 128} | BLOCKS,
)
preset(
    "learn2pd",
    "2509.25188",
    "Learn2PD: what a small trained filter holds for final; rows stop at their end",
    {"selector": "learned", "filter": "text-filter", "filter_threshold": 0.96, "stop": "end"}
    | BLOCKS,
    aliases={"threshold": "filter_threshold"},
)
preset(
    "window_diffusion",
    "2601.20332",
    "Window-Diffusion: far empty places do not exist yet, of the near ones only the first are"
    " computed; no blocks",
    {
        "selector": "even",
        "steps": 256,
        "cache": "window",
        "cache_window": 64,
        "cache_active": 16,
        "cache_refresh": 32,
    },
)

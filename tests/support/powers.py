"""Inputs that use the powers of ``gen.core.trust``, and what they would do. Not a test."""

from __future__ import annotations

import os
from pathlib import Path

# name of a power -> job files that use it; CANARY is a file that must not appear
INPUTS = {
    "engine options": (
        "engine: slurm\nengine_options: {local_setup: ['touch CANARY']}",
        "engine: slurm\nengine_options: {slurm_setup: ['touch CANARY']}",
        "engine: slurm\nengine_options: {slurm_additional_parameters: {wrap: touch CANARY}}",
        'engine: slurm\nengine_options: {slurm_partition: "gpu\\ntouch CANARY"}',
        "engine: slurm\nengine_options: {slurm_python: ./mine}",
        "engine: slurm\nengine_options: {name: [a, b]}",
        "engine: ray\nengine_options: {runtime_env: {pip: [mine]}}",
        "engine: ray\nengine_options: {resources: {a: {b: 1}}}",
        "engine: ray\nengine_options: {address: 'ray://elsewhere:1'}",
    ),
    "import paths": (
        "sampler: {name: best_of, scorer: 'OWN.py:reward'}",
        "sampler: {name: best_of, scorer: 'os:system'}",
        "sampler: {name: svdd, value: 'OWN.py:reward'}",
        "sampler: {name: best_of, base: {name: best_of, scorer: 'OWN.py:reward'}}",
        "sweep: {sampler.scorer: ['OWN.py:reward']}",
        "sweep: {sampler: [{name: best_of, scorer: 'OWN.py:reward'}]}",
        "jobs: [{sampler: {name: best_of, scorer: 'OWN.py:reward'}}]",
        "jobs: [{sweep: {sampler.scorer: ['OWN.py:reward']}}]",
    ),
    "code of a model folder": (
        "model: MODEL\nmodel_options: {trust_remote_code: true}",
        "model: MODEL\nmodel_options: {trust_remote_code: 'yes'}",
        "model: MODEL\nmodel_options: {trust_remote_code: 1}",
        "model: MODEL\nmodel_options: {trust_remote_code: [1]}",
        "model: MODEL\nmodel_options: {draft_model: {trust_remote_code: true}}",
        "model: MODEL\nsweep: {model_options.trust_remote_code: [true]}",
        "model: MODEL\nsweep: {model_options: [{trust_remote_code: true}]}",
        "model: MODEL\njobs: [{model_options: {trust_remote_code: true}}]",
        "model: MODEL\njobs: [{sweep: {model_options: [{trust_remote_code: true}]}}]",
    ),
    "kernels of the hub": (
        "model: MODEL\nmodel_options: {attn_implementation: somebody/kernel}",
        "model: MODEL\nmodel_options: {attn_implementation: 'somebody/kernel@main:flash'}",
        "model: MODEL\nsweep: {model_options.attn_implementation: [somebody/kernel]}",
        "model: MODEL\njobs: [{model_options: {attn_implementation: somebody/kernel}}]",
    ),
    "addresses": (
        "prompts_dataset: {path: json, data_files: 'ADDRESS'}",
        "prompts_dataset: {path: json, data_files: {train: ['ADDRESS']}}",
        "prompts_dataset: 'ADDRESS'",
        "prompts_dataset: {path: a/b, data_dir: 's3://bucket/a'}",
        "sweep: {prompts_dataset: [{path: json, data_files: 'ADDRESS'}]}",
        "jobs: [{prompts_dataset: {path: json, data_files: ['zip://a.json::ADDRESS']}}]",
    ),
    "pickles": (
        "prompts_dataset: pandas",
        "prompts_dataset: {path: pandas, data_files: PICKLE}",
        "sweep: {prompts_dataset: [{path: pandas, data_files: PICKLE}]}",
        "jobs: [{prompts_dataset: {path: pandas, data_files: PICKLE}}]",
    ),
}


class Canary:
    """Object whose pickle makes a file when it is read.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)

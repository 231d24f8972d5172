"""Inflated models of a benchmark (``gen bench --inflate``): function-preserving enlargements in a
folder that is removed."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gen.bench.variants import Variant, serves
from gen.core.errors import GenError
from gen.models.load.inflate import inflate, require_llama

Load = Callable[..., Any]


def models_of(pipe: Any, variants: Sequence[Variant]) -> list[str]:
    """Return the names of the models that the variants decode, and that can be inflated.

    Raises:
        GenError: the model of a variant that was requested by name cannot be, or none can be.
    """
    names: dict[str, None] = {}
    problem: GenError | None = None
    for variant in variants:
        if not serves(pipe, variant.spec, variant.sampling):
            continue
        name = pipe.model_name(variant.spec)
        try:
            require_llama(name)
            names[name] = None
        except GenError as error:
            problem = problem or error
            if variant.asked:
                raise
    if not names:
        raise problem or GenError("no sampler serves the model; expected --samplers that do")
    return list(names)


@contextmanager
def inflated(
    load: Load, pipe: Any, variants: Sequence[Variant], parameters: int
) -> Iterator[tuple[Load, dict[str, int]]]:
    """Write the models of the variants in a larger size.

    Draft models and frontends stay those of the zoo. The folder is removed at the end.

    Args:
        load: Function that loads a pipeline.
        pipe: Pipeline of the small models.
        variants: Rows of the benchmark.
        parameters: Size of each model.

    Yields:
        A function that loads a pipeline of the inflated models, and their numbers of parameters.
    """
    names = models_of(pipe, variants)
    with tempfile.TemporaryDirectory(prefix="gen-inflated-") as root:
        made = {
            name: inflate(name, parameters, Path(root) / Path(name).name)["parameters"]
            for name in names
        }

        def load_inflated(modality: str, **said: Any) -> Any:
            if said.get("model"):
                folder = Path(root) / Path(said["model"]).name
                return load(modality, **{**said, "model": str(folder)})
            larger = type(pipe.modality)()
            larger.models = {
                key: str(Path(root) / name) if name in made else name
                for key, name in larger.models.items()
            }
            return load(larger, **said)

        yield load_inflated, made

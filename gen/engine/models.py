"""Models that an engine serves: ids, and pipelines that are made when they are first asked for."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gen.core.errors import GenError, unknown
from gen.core.registry import registry
from gen.pipeline.pipeline import Pipeline


@dataclass(frozen=True)
class ServedModel:
    """Model that requests may name.

    Attributes:
        id: name of it in requests.
        modality: name of its modality.
        model: zoo name, folder or hub id; None stands for the modality's own models, of which the
            sampler chooses.
        adapter: name of the adapter that its requests are computed with.
        parent: id of the model that the adapter belongs to.
        embeds: whether it is an embedding model.
    """

    id: str
    modality: str
    model: str | None = None
    adapter: str | None = None
    parent: str | None = None
    embeds: bool = False

    def options_of(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return the options of a request with the adapter. Raises ``GenError`` where the request
        names one itself."""
        if self.adapter is None:
            return dict(options)
        if options.get("adapter") is not None:
            raise GenError(
                f"adapter is {options['adapter']!r} and the model {self.id!r}, which names an"
                f" adapter; expected the model {self.parent!r}"
            )
        return {**options, "adapter": self.adapter}


def zoo_models() -> list[ServedModel]:
    """List the modalities by name, and each of their models in the package."""
    found: dict[str, ServedModel] = {}
    for name, cls in sorted(registry.table("modality").items()):
        found[name] = ServedModel(name, name)
        for model in sorted({*cls.models.values()}):
            found.setdefault(model, ServedModel(model, name, model))
    return list(found.values())


class ServedModels:
    """Ids of models and their pipelines.

    Args:
        pipelines: ids and pipelines; None serves the models of the package. A pipeline with
            adapters by name is served with each of them too, as ``id:adapter``.
        device: device of models that are loaded here.
        dtype: floating-point type of them.
    """

    def __init__(self, pipelines: Mapping[str, Pipeline] | None, device: str, dtype: str):
        self.device, self.dtype = device, dtype
        self._pipelines = dict(pipelines or {})
        served = zoo_models() if pipelines is None else []
        for i, pipe in self._pipelines.items():
            embeds = pipe.pooling is not None
            plain = ServedModel(i, pipe.modality.name, pipe.model, embeds=embeds)
            served.append(plain)
            for name in pipe.adapter_names:
                served.append(replace(plain, id=f"{i}:{name}", adapter=name, parent=i))
        self._served = {model.id: model for model in served}
        if len(self._served) < len(served):
            ids = [model.id for model in served]
            twice = next(i for i in ids if ids.count(i) > 1)
            raise GenError(
                f"model {twice!r} is served twice; expected ids and adapters that differ"
            )
        self._lock = threading.Lock()

    def list(self) -> list[ServedModel]:
        """List the models by id."""
        return [self._served[name] for name in sorted(self._served)]

    def get(self, name: str) -> ServedModel:
        """Return a model by its id. Raises ``GenError`` for an unknown one."""
        if name not in self._served:
            raise unknown("model", name, self._served)
        return self._served[name]

    def pipeline(self, name: str) -> Pipeline:
        """Return the pipeline of a model, made when it is first asked for.

        Raises:
            GenError: an unknown id, or a model that cannot be read.
        """
        served = self.get(name)
        name = served.parent or name
        with self._lock:
            if name not in self._pipelines:
                self._pipelines[name] = Pipeline(
                    served.modality, served.model, self.device, self.dtype
                )
            return self._pipelines[name]

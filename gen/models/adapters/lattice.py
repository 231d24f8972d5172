"""Adapters of the built-in DA-Transformers (``gen.models.nets.dag``) and translators of speech
(``gen.models.nets.speech_dag``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.core.token_space import TokenSpace
from gen.models.adapters.base import ModelAdapter
from gen.models.nets.dag import DagModel
from gen.models.nets.speech_dag import SpeechDagModel


class DagLM(ModelAdapter):
    """DA-Transformer; see ``LatticeModel``. Its last token, unk, is an input and never emitted."""

    model: DagModel

    def __init__(self, model: DagModel):
        self.model, self.vocab_size = model.eval(), model.config.vocab_size + 1

    @torch.no_grad()
    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        """Compute the graphs of sources; see ``LatticeModel``.

        Raises:
            GenError: a source that is longer than the model takes.
        """
        longest, most = int(lengths.max()), self.model.config.max_source
        if longest > most:
            raise GenError(
                f"a source has {longest} words, bos and eos included; expected at most {most}"
            )
        graph = self.model(source[:, :longest], lengths)
        return graph._replace(emissions=F.pad(graph.emissions, (0, 1), value=-torch.inf))


class SpeechDagLM(ModelAdapter):
    """Translator of speech: a ``LatticeModel`` whose words are spoken after the graph is decoded.

    Attributes:
        vocab_size: ids of the codes of speech, and the mask.
        words: token space of the words of an output; its last token, unk, is never emitted.
        slots: slots of sound per word.
    """

    model: SpeechDagModel

    def __init__(self, model: SpeechDagModel):
        self.model, config = model.eval(), model.config
        self.vocab_size, self.slots = config.speech_ids + 1, config.slots
        legal = torch.zeros(config.max_words, config.vocab_size + 1, dtype=torch.bool)
        legal[:, : config.eos_id + 1] = True
        legal[0, config.eos_id] = False
        size, eos = config.vocab_size, config.eos_id
        self.words = TokenSpace((config.max_words,), size + 1, legal, size, eos_token_id=eos)

    @torch.no_grad()
    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        """Compute the graphs of codec tokens; see ``LatticeModel``.

        Raises:
            GenError: a source that is longer than the model takes.
        """
        config, longest = self.model.config, int(lengths.max())
        most = config.max_source * config.joined * config.streams
        if longest > most:
            raise GenError(f"a source has {longest} codec tokens; expected at most {most}")
        graph = self.model(source[:, :longest], lengths)
        return graph._replace(emissions=F.pad(graph.emissions, (0, 1), value=-torch.inf))

    def speak(self, graph: Graph, words: Tensor, counts: Tensor) -> Tensor:
        """Return the tokens of spoken words: ids of codes, long [B, max_words slots 4], slot after
        slot, each stream's behind those of the stream before.

        Args:
            graph: graphs of the rows.
            words: words without bos and eos, long [B, N].
            counts: words of every row, long [B].
        """
        codes = self.model.speak(graph, words, counts)
        sizes = torch.tensor(self.model.config.code_sizes, device=codes.device)
        return (codes + sizes.cumsum(0) - sizes).flatten(1)


def graph_adapter(model: DagModel) -> DagLM | SpeechDagLM:
    """Return the adapter of a network."""
    return SpeechDagLM(model) if isinstance(model, SpeechDagModel) else DagLM(model)

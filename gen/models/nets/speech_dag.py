"""Architecture of the built-in translator of speech (Fang et al., "DASpeech", arXiv 2310.07403): a
DA-Transformer whose source is codec tokens, and a predictor of how its words are spoken.

The encoder sums the embeddings of a frame's codes, looks at neighbouring frames by a convolution,
and joins two frames to one state. With the states v_j of the graph's vertices, word i of an output
y has the expected state (``strategy="expect"``), or that of its vertex on the best path of y
(``strategy="argmax"``):

    z_i = sum_j P(a_i = j | x, y) v_j            z_i = v_{a_i},  a = argmax P(a, y | x)

Two layers over the words predict pitch and length of the vocal tract of every word. Each word then
becomes ``slots`` slots, and two layers over these predict the duration and the spectrum of every
slot. The released posterior counts emissions twice (``gen.models.nets.lattice.posterior``).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from gen.core.errors import bad_value
from gen.core.graphs import Graph
from gen.models.nets.dag import DagConfig, DagModel, _Layer
from gen.models.nets.lattice import best_alignment, matches, posterior

STRATEGIES = ("expect", "argmax")


class SpeechDagConfig(DagConfig):
    """Sizes of a translator of speech.

    Attributes:
        source_words: ids of the source, those of all codebooks.
        max_source: states of the longest source.
        vertices_per_word: vertices per state of the encoder.
        streams: codes of a frame.
        joined: frames that become one state.
        max_words: words of the longest output.
        slots: slots of a word.
        speaker_layers: layers over words, and again over slots.
        code_sizes: sizes of the codes of a slot: sound or word, duration, pulses, scale.
        spectrum_size: numbers of a spectrum.
        duration_step: seconds of a step of durations.
        scales: first scale of a vocal tract, and the step between scales.
        strategy: which states of words the predictor reads, ``expect`` or ``argmax``.
        released_posterior: expected states are those of the released posterior.
    """

    model_type = "gen_speech_dag"

    def __init__(
        self,
        source_words=512,
        max_source=30,
        vertices_per_word=2,
        hidden_size=56,
        encoder_layers=2,
        decoder_layers=2,
        streams=4,
        joined=2,
        max_words=4,
        slots=8,
        speaker_layers=2,
        code_sizes=(54, 64, 12, 16),
        spectrum_size=14,
        duration_step=0.005,
        scales=(0.95, 0.025),
        strategy="argmax",
        released_posterior=False,
        **kwargs,
    ):
        super().__init__(
            source_words=source_words,
            max_source=max_source,
            vertices_per_word=vertices_per_word,
            hidden_size=hidden_size,
            encoder_layers=encoder_layers,
            decoder_layers=decoder_layers,
            **kwargs,
        )
        self.streams, self.joined = streams, joined
        self.max_words, self.slots, self.speaker_layers = max_words, slots, speaker_layers
        self.code_sizes, self.spectrum_size = tuple(code_sizes), spectrum_size
        self.duration_step, self.scales = duration_step, tuple(scales)
        if strategy not in STRATEGIES:
            raise bad_value("strategy", strategy, " or ".join(STRATEGIES))
        self.strategy, self.released_posterior = strategy, released_posterior

    @property
    def sounds(self) -> int:
        """Sounds that a slot may have; ids behind them are words."""
        return self.code_sizes[0] - (self.vocab_size - 2)

    @property
    def speech_ids(self) -> int:
        """Ids of the codes of all streams."""
        return sum(self.code_sizes)


class Manner(NamedTuple):
    """How the words of B outputs are spoken.

    Attributes:
        pulses: glottal pulses per frame, [B, N].
        scales: length of the vocal tract, [B, N].
        durations: log(1 + steps) of every slot, [B, N, slots].
        spectra: spectrum of every slot, [B, N, slots, spectrum_size].
    """

    pulses: Tensor
    scales: Tensor
    durations: Tensor
    spectra: Tensor


class Speaker(nn.Module):
    """Predictor of how words are spoken, from the states of their vertices."""

    def __init__(self, config: SpeechDagConfig):
        super().__init__()
        d, heads = config.hidden_size, config.num_attention_heads
        self.word_positions = nn.Embedding(config.max_words, d)
        self.over_words = nn.ModuleList(
            _Layer(d, heads, False) for _ in range(config.speaker_layers)
        )
        self.voice = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2))
        self.slots = nn.Embedding(config.slots, d)
        self.over_slots = nn.ModuleList(
            _Layer(d, heads, False) for _ in range(config.speaker_layers)
        )
        self.sound = nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 1 + config.spectrum_size))

    def forward(self, states: Tensor, counts: Tensor) -> Manner:
        """Predict how words are spoken.

        Args:
            states: states of words, [B, N, D], padded on the right.
            counts: words of every row, long [B], each at least 1.
        """
        rows, size, width = states.shape
        column = torch.arange(size, device=states.device)
        known = column < counts[:, None]
        x, mask = states + self.word_positions(column), known[:, None, None]
        for layer in self.over_words:
            x = layer(x, mask, x, mask)
        pulses, scales = self.voice(x).float().unbind(-1)
        slots = self.slots.num_embeddings
        y = (x[:, :, None] + self.slots.weight).view(rows, size * slots, width)
        mask = known.repeat_interleave(slots, 1)[:, None, None]
        for layer in self.over_slots:
            y = layer(y, mask, y, mask)
        sound = self.sound(y).float().view(rows, size, slots, -1)
        # both are predicted as differences to a middle voice
        return Manner(6 + 3 * pulses, 1.1 + 0.1 * scales, sound[..., 0], sound[..., 1:])


class SpeechDagModel(DagModel):
    """Encoder of codec tokens, decoder of graphs of words, and the predictor of their sound."""

    config_class = SpeechDagConfig
    config: SpeechDagConfig

    def __init__(self, config: SpeechDagConfig):
        super().__init__(config)
        d = config.hidden_size
        self.near = nn.Conv1d(d, d, 5, padding=2)
        self.join = nn.Linear(config.joined * d, d)
        self.speaker = Speaker(config)
        self.register_buffer("spectra", torch.zeros(config.sounds, config.spectrum_size))
        self.post_init()

    @torch.no_grad()
    def start(self, first: int = 0) -> None:
        """Set positions to waves, queries to keys of the same position, and every second vertex
        to another half of the words, to train from scratch.

        Vertices that start alike mix outputs of both styles. Here words of the first half are
        emitted by even vertices and those of the second half by odd ones, at first.

        Args:
            first: position of the source that vertex 0 starts at.
        """
        d, per_state = self.config.hidden_size, self.config.vertices_per_word
        rates = 2 * math.pi / torch.logspace(math.log10(2.0), math.log10(60.0), d // 2)
        for table, unit in ((self.source_first, 1.0), (self.positions, 1 / per_state)):
            at = first * (table is self.positions) + torch.arange(table.num_embeddings) * unit
            angle = at[:, None] * rates
            table.weight.copy_(2 * d**-0.5 * torch.cat([angle.sin(), angle.cos()], 1))
        self.source_last.weight.zero_()
        style = torch.randn(d) * d**-0.5
        words = self.config.vocab_size - 2
        self.positions.weight[0::2] += style
        self.positions.weight[1::2] -= style
        self.target.weight[: words // 2] += style
        self.target.weight[words // 2 : words] -= style
        self.link_positions.weight.copy_(self.positions.weight)
        heads = self.config.num_attention_heads
        spread = torch.arange(d).view(-1, heads).T.flatten()  # each head has all waves
        for layer in self.decoder:
            for linear in (layer.cross.query, layer.cross.key):
                linear.weight.copy_(2 * torch.eye(d)[spread])
                linear.bias.zero_()

    def states_of(self, lengths: Tensor) -> Tensor:
        """Return the states of sources of ``lengths`` tokens, long [B]."""
        per_state = self.config.streams * self.config.joined
        return (lengths + per_state - 1) // per_state

    def sizes(self, lengths: Tensor) -> Tensor:
        """Return the vertices of the graphs of sources of ``lengths`` tokens, long [B]; no graph
        has fewer than two."""
        return (self.config.vertices_per_word * self.states_of(lengths)).clamp(min=2)

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode codec tokens.

        Args:
            source: long [B, S], frame after frame, padded on the right.
            lengths: long [B].

        Returns:
            States [B, S', D], and which of them are there, bool [B, 1, 1, S'].
        """
        streams, joined = self.config.streams, self.config.joined
        missing = -source.shape[1] % (streams * joined)
        known = torch.arange(source.shape[1] + missing, device=source.device) < lengths[:, None]
        ids = nn.functional.pad(source, (0, missing)).masked_fill(~known, 0)
        x = (self.source(ids) * known[..., None]).unflatten(1, (-1, streams)).sum(2)
        there = known[:, ::streams, None]
        x = x + self.near(x.transpose(1, 2)).transpose(1, 2) * there
        x = self.join(x.unflatten(1, (-1, joined)).flatten(2))
        column = torch.arange(x.shape[1], device=x.device)
        states = self.states_of(lengths)[:, None]
        last = (states - 1 - column).clamp(min=0)
        x = x + self.source_first(column) + self.source_last(last)
        mask = (column < states)[:, None, None]
        for layer in self.encoder:
            x = layer(x, mask, x, mask)
        return self.encoder_norm(x), mask

    def word_states(
        self, graph: Graph, words: Tensor, counts: Tensor, strategy: str | None = None
    ) -> Tensor:
        """Compute the states [B, N, D] of the words of outputs.

        Args:
            graph: graphs whose outputs they are.
            words: words without bos and eos, long [B, N], padded on the right.
            counts: words of every row, long [B].
            strategy: ``expect`` or ``argmax``; None for the one of the config.
        """
        config = self.config
        column = torch.arange(words.shape[1], device=words.device)
        known = column < counts[:, None]
        whole = nn.functional.pad(words.masked_fill(~known, config.eos_id), (1, 1), value=0)
        whole[:, 0], whole[:, -1] = config.bos_id, config.eos_id
        m = matches(graph.emissions, whole)
        parts = graph.transitions, m, graph.lengths, counts + 2
        if (strategy or config.strategy) == "argmax":
            path = best_alignment(*parts)[:, 1:-1]
            index = path[..., None].expand(-1, -1, graph.states.shape[-1])
            found = graph.states.gather(1, index)
        else:
            share = posterior(*parts, released=config.released_posterior)[:, 1:-1]
            found = share.to(graph.states.dtype) @ graph.states
        return found * known[..., None]

    @torch.no_grad()
    def speak(self, graph: Graph, words: Tensor, counts: Tensor) -> Tensor:
        """Return the codes of spoken words, long [B, max_words slots, 4] (``code_sizes``).

        Args: those of ``word_states``; rows may have no words.
        """
        config = self.config
        size = words.shape[1]
        some = counts.clamp(min=1)
        manner = self.speaker(self.word_states(graph, words, counts), some)
        known = (torch.arange(size, device=words.device) < counts[:, None])[..., None]
        steps = manner.durations.expm1().round().clamp(0, config.code_sizes[1] - 1)
        steps = steps.long() * known
        steps[..., 1:] *= (steps[..., 1:] > 0).long().cumprod(-1)  # sounds follow one another
        near = torch.cdist(manner.spectra.flatten(0, 2), self.spectra.float()).argmin(-1)
        sounds = near.view(steps.shape) * (steps > 0)
        sounds[..., 0] = (config.sounds + words) * known[..., 0]
        pulses = manner.pulses.round().clamp(0, config.code_sizes[2] - 1).long()
        first, step = config.scales
        scales = ((manner.scales - first) / step).round().clamp(0, config.code_sizes[3] - 1).long()
        voice = torch.stack([pulses, scales], -1)[:, :, None].expand(-1, -1, config.slots, -1)
        there = (known & (steps > 0)) | (known & (sounds > 0))
        codes = torch.stack([sounds, steps], -1)
        codes = torch.cat([codes, voice * there[..., None]], -1).flatten(1, 2)
        out = codes.new_zeros(len(codes), config.max_words * config.slots, codes.shape[-1])
        out[:, : codes.shape[1]] = codes
        return out


AutoConfig.register(SpeechDagConfig.model_type, SpeechDagConfig)
AutoModel.register(SpeechDagConfig, SpeechDagModel)

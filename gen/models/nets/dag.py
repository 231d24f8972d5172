"""Architecture of the built-in DA-Transformer: a source of words -> a directed acyclic graph whose
paths are the targets (Huang et al., arXiv 2205.07459).

A graph has L = lambda S vertices for a source of S words. The decoder reads bos, unk, ..., unk, eos
at learned positions, and each vertex sees all others and the source. With the features
x_i = [v_i || p_i] of vertex i, its state and a learned position,

    log E_ij = logsumexp_h [ log_softmax_{i<j<L}(q_i^h . k_j^h / sqrt(d_h)) + log_softmax_h(g_i) ]
    log P(. | v_j) = log_softmax(W v_j)

where q, k and g are linear in x, and W is the embedding of targets. Both are in float32.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from gen.core.graphs import Graph
from gen.models.nets.lattice import mixed_links, wide


class DagConfig(PretrainedConfig):
    """Sizes of a DA-Transformer.

    Attributes:
        source_words: ids of sources, bos and eos included.
        max_source: words of the longest source, bos and eos included.
        vocab_size: V, ids of targets, bos and eos included.
        bos_id, eos_id: targets of the first and the last vertex.
        vertices_per_word: lambda, vertices per word of a source.
    """

    model_type = "gen_dag"

    def __init__(
        self,
        source_words=12,
        max_source=12,
        vocab_size=22,
        bos_id=21,
        eos_id=20,
        vertices_per_word=4,
        hidden_size=96,
        encoder_layers=2,
        decoder_layers=3,
        num_attention_heads=4,
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.source_words, self.max_source = source_words, max_source
        self.vocab_size, self.bos_id, self.eos_id = vocab_size, bos_id, eos_id
        self.vertices_per_word, self.hidden_size = vertices_per_word, hidden_size
        self.encoder_layers, self.decoder_layers = encoder_layers, decoder_layers
        self.num_attention_heads = num_attention_heads
        self.causal = False

    @property
    def vertices(self) -> int:
        """Vertices of the largest graph."""
        return self.vertices_per_word * self.max_source


class _Attention(nn.Module):
    """Multi-head attention of queries [B, L, D] to keys [B, S, D]."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)
        self.key, self.out = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        """Attend where ``mask`` is true, bool [B, 1, 1 or L, S]."""
        q, k, v = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, y in ((self.query, x), (self.key, memory), (self.value, memory))
        )
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


class _Layer(nn.Module):
    """Pre-norm layer: attention to its own positions, to a source if it has one, and an MLP."""

    def __init__(self, width: int, heads: int, crosses: bool):
        super().__init__()
        self.own, self.own_norm = _Attention(width, heads), nn.LayerNorm(width)
        self.crosses = crosses
        if crosses:
            self.cross, self.cross_norm = _Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor, memory: Tensor, memory_mask: Tensor) -> Tensor:
        y = self.own_norm(x)
        x = x + self.own(y, y, mask)
        if self.crosses:
            x = x + self.cross(self.cross_norm(x), memory, memory_mask)
        return x + self.mlp(x)


class DagModel(PreTrainedModel):
    """Encoder of sources and decoder of graphs."""

    config_class = DagConfig
    base_model_prefix = ""

    def __init__(self, config: DagConfig):
        super().__init__(config)
        d, heads = config.hidden_size, config.num_attention_heads
        self.source = nn.Embedding(config.source_words, d)
        self.source_first = nn.Embedding(config.max_source, d)  # positions from the first word
        self.source_last = nn.Embedding(config.max_source, d)  # and from the last one
        self.encoder = nn.ModuleList(_Layer(d, heads, False) for _ in range(config.encoder_layers))
        self.encoder_norm = nn.LayerNorm(d)
        self.target = nn.Embedding(config.vocab_size + 1, d)  # the last one is unk
        self.positions = nn.Embedding(config.vertices, d)
        self.decoder = nn.ModuleList(_Layer(d, heads, True) for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(d)
        self.link_positions = nn.Embedding(config.vertices, d)
        self.link_query, self.link_key = nn.Linear(2 * d, d), nn.Linear(2 * d, d)
        self.link_gate = nn.Linear(2 * d, heads)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=module.embedding_dim**-0.5)

    @torch.no_grad()
    def start(self, first: int = 0) -> None:
        """Set positions to waves and queries to keys of the same position, to train from scratch.

        Positions of the source from the first word have one half of the channels, and from the
        last word the other. Vertex p starts at p / lambda of one of them, in turn, so that outputs
        of either direction find vertices of their own; vertices that start alike mix them.

        Args:
            first: position of the source that vertex 0 starts at.
        """
        width = self.config.hidden_size // 2
        rates = 2 * math.pi / torch.logspace(math.log10(0.5), math.log10(40.0), width // 2)

        def waves(table: nn.Embedding, unit: float, begin: int = 0) -> Tensor:
            angle = (begin + torch.arange(table.num_embeddings)[:, None] * unit) * rates
            return 2 * width**-0.5 * torch.cat([angle.sin(), angle.cos()], 1)

        for table, half in ((self.source_first, 0), (self.source_last, 1)):
            table.weight.zero_()
            table.weight[:, half * width :][:, :width] = waves(table, 1.0)
        at = waves(self.positions, 1 / self.config.vertices_per_word, first)
        self.positions.weight.copy_(torch.cat([at, at], 1))
        if self.config.vertices_per_word > 1:
            self.positions.weight[0::2, width:] = 0.0
            self.positions.weight[1::2, :width] = 0.0
        self.link_positions.weight.copy_(self.positions.weight)
        heads = self.config.num_attention_heads
        spread = torch.arange(2 * width).view(-1, heads).T.flatten()  # each head has all waves
        for layer in self.decoder:
            for linear in (layer.cross.query, layer.cross.key):
                linear.weight.copy_(2 * torch.eye(2 * width)[spread])
                linear.bias.zero_()

    def encode(self, source: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Encode sources.

        Args:
            source: long [B, S], padded on the right.
            lengths: long [B].

        Returns:
            States [B, S, D], and which of them are words, bool [B, 1, 1, S].
        """
        column = torch.arange(source.shape[1], device=source.device)
        known = column < lengths[:, None]
        last = (lengths[:, None] - 1 - column).clamp(min=0)
        x = self.source(source.masked_fill(~known, 0)) + self.source_first(column)
        x = x + self.source_last(last)
        mask = known[:, None, None]
        for layer in self.encoder:
            x = layer(x, mask, x, mask)
        return self.encoder_norm(x), mask

    def decode(self, ids: Tensor, mask: Tensor, encoded: tuple[Tensor, Tensor]) -> Tensor:
        """Compute the states [B, L, D] of targets, long [B, L].

        Args:
            ids: targets, unk = ``vocab_size`` where they are unknown.
            mask: which of them each one sees, bool [B, 1, 1 or L, L].
            encoded: outcome of ``encode``.
        """
        x = self.target(ids) + self.positions.weight[: ids.shape[1]]
        for layer in self.decoder:
            x = layer(x, mask, *encoded)
        return self.decoder_norm(x)

    def emit(self, states: Tensor) -> Tensor:
        """Compute log P of states [B, L, D]: [B, L, V], float32 or wider."""
        logits = F.linear(states, self.target.weight[: self.config.vocab_size].to(states.dtype))
        return wide(logits).log_softmax(-1)

    def link(self, states: Tensor, lengths: Tensor) -> Tensor:
        """Compute log E of states [B, L, D] of graphs of ``lengths`` vertices: [B, L, L]."""
        rows, size, _ = states.shape
        positions = self.link_positions.weight[:size].to(states.dtype).expand(rows, -1, -1)
        features = torch.cat([states, positions], -1)
        heads = self.config.num_attention_heads
        q, k = (
            layer(features).unflatten(-1, (heads, -1)) for layer in (self.link_query, self.link_key)
        )
        return mixed_links(q, k, self.link_gate(features), lengths)

    def blank(self, lengths: Tensor) -> Tensor:
        """Make the inputs of graphs: bos, unk, ..., unk, eos, long [B, L]."""
        column = torch.arange(int(lengths.max()), device=lengths.device)
        ids = column.new_full((len(lengths), len(column)), self.config.vocab_size)
        ids[:, 0] = self.config.bos_id
        return ids.masked_fill(column == lengths[:, None] - 1, self.config.eos_id)

    def sizes(self, lengths: Tensor) -> Tensor:
        """Return the vertices of the graphs of sources of ``lengths`` words, long [B]."""
        return self.config.vertices_per_word * lengths

    def forward(self, source: Tensor, lengths: Tensor, revealed: Tensor | None = None) -> Graph:
        """Compute the graphs of sources.

        Args:
            source: long [B, S], padded on the right.
            lengths: long [B].
            revealed: inputs of the decoder in place of ``blank``, long [B, L] (``glance``).
        """
        ids = self.blank(self.sizes(lengths)) if revealed is None else revealed
        return self.graph(self.encode(source, lengths), lengths, ids)

    def graph(self, encoded: tuple[Tensor, Tensor], lengths: Tensor, ids: Tensor) -> Graph:
        """Compute the graphs of encoded sources.

        Args:
            encoded: outcome of ``encode``.
            lengths: words of the sources, long [B].
            ids: inputs of the decoder, long [B, L].
        """
        sizes = self.sizes(lengths)
        column = torch.arange(ids.shape[1], device=ids.device)
        mask = (column < sizes[:, None])[:, None, None]
        states = self.decode(ids, mask, encoded)
        return Graph(self.link(states, sizes), self.emit(states), states, sizes)


AutoConfig.register(DagConfig.model_type, DagConfig)
AutoModel.register(DagConfig, DagModel)

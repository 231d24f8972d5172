"""DASpeech: speech to speech through a directed acyclic graph of words (arXiv 2310.07403).

A Conformer reads log-mel features, a DA-Transformer makes the graph (``gen.models.nets.dag`` has
the rule), and a FastSpeech 2 without embeddings speaks the states of a path:

    encoder   two strided convolutions with GLU, 4 times shorter; Conformer, relative positions
    decoder   bos, unk, ..., unk, eos at learned positions; post-norm; L = frames / 2 vertices
    adaptor   states of the vertices of a path, without bos -> width of the synthesiser
    tts       FFT layers, duration, pitch and energy, length regulator, FFT layers, log-mel frames

Names of tensors are those of fairseq checkpoints. In training, the synthesiser read the states
expected under the posterior of each word's vertex. The released code counts the emission twice in
it, so released weights expect what ``released_posterior`` gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Wav2Vec2ConformerConfig
from transformers.models.wav2vec2_conformer import modeling_wav2vec2_conformer as conformer

from gen.core.errors import GenError
from gen.core.graphs import Graph
from gen.models.adapters.base import ModelAdapter
from gen.models.load.weights import Weights, fill, without_storage
from gen.models.nets.lattice import matches, mixed_links, posterior, wide

BOS, PAD, EOS, UNK = 0, 1, 2, 3  # of fairseq dictionaries
FIRST = PAD + 1  # row of a fairseq table of positions that the first position takes
RENAMES = (
    (r"^(encoder\.conformer_layers\.\d+\.ffn[12])\.layer_norm\.", r"\1_layer_norm."),
    (r"^(encoder\.conformer_layers\.\d+\.ffn[12])\.w_1\.", r"\1.intermediate_dense."),
    (r"^(encoder\.conformer_layers\.\d+\.ffn[12])\.w_2\.", r"\1.output_dense."),
)
# tensors that no forward pass of generation reads
DROP = (
    r"(^|\.)version$",
    r"_float_tensor$",
    r"^decoder\.embed_length\.",
    r"^tts\.embed_tokens\.",
)


class DASpeechSizes(NamedTuple):
    """Sizes of a model. ``heads``: of encoder, decoder and synthesiser."""

    mel: int
    channels: int
    width: int
    layers: int
    inner: int
    kernel: int
    vocab_size: int
    graph_width: int
    graph_layers: int
    graph_inner: int
    positions: int
    voice_width: int
    adaptor: int
    voice_layers: tuple[int, int]
    voice_inner: int
    voice_kernel: int
    predictor: int
    predictor_kernel: int
    bins: int
    frames: int
    heads: tuple[int, int, int]


def sizes_of(shapes: Mapping[str, Sequence[int]], voice_heads: int) -> DASpeechSizes:
    """Read sizes from the shapes of a checkpoint's tensors.

    Raises:
        GenError: a tensor that tells them is missing.
    """

    def depth(part: str, leaf: str) -> int:
        pattern = re.compile(rf"{re.escape(part)}\.(\d+)\.{re.escape(leaf)}")
        return sum(bool(pattern.fullmatch(key)) for key in shapes)

    try:
        voice, layer = "tts.encoder_fft_layers.0.ffn.ffn.0.weight", "encoder.conformer_layers.0"
        predictor = shapes["tts.var_adaptor.duration_predictor.conv1.0.weight"]
        channels, mel, _ = shapes["encoder.subsample.conv_layers.0.weight"]
        vocab_size, graph_width = shapes["decoder.embed_tokens.weight"]
        return DASpeechSizes(
            mel=mel,
            channels=channels,
            width=shapes["encoder.linear.weight"][0],
            layers=depth("encoder.conformer_layers", "final_layer_norm.weight"),
            inner=shapes[f"{layer}.ffn1.w_1.weight"][0],
            kernel=shapes[f"{layer}.conv_module.depthwise_conv.weight"][2],
            vocab_size=vocab_size,
            graph_width=graph_width,
            graph_layers=depth("decoder.layers", "fc1.weight"),
            graph_inner=shapes["decoder.layers.0.fc1.weight"][0],
            positions=shapes["decoder.embed_positions.weight"][0],
            voice_width=shapes["adaptor.fc2.weight"][0],
            adaptor=shapes["adaptor.fc1.weight"][0],
            voice_layers=(
                depth("tts.encoder_fft_layers", "layer_norm.weight"),
                depth("tts.decoder_fft_layers", "layer_norm.weight"),
            ),
            voice_inner=shapes[voice][0],
            voice_kernel=shapes[voice][2],
            predictor=predictor[0],
            predictor_kernel=predictor[2],
            bins=shapes["tts.var_adaptor.embed_pitch.weight"][0],
            frames=shapes["tts.out_proj.weight"][0],
            heads=(
                shapes[f"{layer}.self_attn.pos_bias_u"][0],
                shapes["decoder.gate_linear.weight"][0],
                voice_heads,
            ),
        )
    except KeyError as error:
        raise GenError(f"the weights lack {error}; expected those of DASpeech") from None


class _Attention(nn.Module):
    """fairseq's multi-head attention of [L, D] to [S, D'], without a batch axis."""

    def __init__(self, width: int, heads: int, memory: int | None = None):
        super().__init__()
        self.heads = heads
        self.q_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.k_proj, self.v_proj = (nn.Linear(memory or width, width) for _ in range(2))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            proj(y).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for proj, y in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))


class _Subsample(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        c, ends = sizes.channels, 2 * sizes.width
        self.conv_layers = nn.ModuleList(
            [
                nn.Conv1d(sizes.mel, c, 5, stride=2, padding=2),
                nn.Conv1d(c // 2, ends, 5, stride=2, padding=2),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.conv_layers:
            x = F.glu(layer(x), dim=0)
        return x


def _conformer_config(sizes: DASpeechSizes) -> Wav2Vec2ConformerConfig:
    """Return the config of the encoder's layers."""
    return Wav2Vec2ConformerConfig(
        hidden_size=sizes.width,
        num_attention_heads=sizes.heads[0],
        intermediate_size=sizes.inner,
        conv_depthwise_kernel_size=sizes.kernel,
        hidden_act="swish",
        position_embeddings_type="relative",
        max_source_positions=6000,
        attn_implementation="eager",
    )


class _Encoder(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        self.subsample = _Subsample(sizes)
        self.linear = nn.Linear(sizes.width, sizes.width)
        config = _conformer_config(sizes)
        make = conformer.Wav2Vec2ConformerEncoderLayer
        self.conformer_layers = nn.ModuleList(make(config) for _ in range(sizes.layers))
        self.relative = conformer.Wav2Vec2ConformerRelPositionalEmbedding(config)

    def forward(self, mel: Tensor) -> Tensor:
        x = math.sqrt(self.linear.in_features) * self.subsample(mel.T).T[None]
        at = self.relative(x)
        x = self.linear(x)
        for layer in self.conformer_layers:
            x = layer(x, relative_position_embeddings=at)
        return x[0]


class _GraphLayer(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        d, heads = sizes.graph_width, sizes.heads[1]
        self.self_attn, self.self_attn_layer_norm = _Attention(d, heads), nn.LayerNorm(d)
        self.encoder_attn = _Attention(d, heads, sizes.width)
        self.encoder_attn_layer_norm = nn.LayerNorm(d)
        self.fc1, self.fc2 = nn.Linear(d, sizes.graph_inner), nn.Linear(sizes.graph_inner, d)
        self.final_layer_norm = nn.LayerNorm(d)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.self_attn_layer_norm(x + self.self_attn(x, x))
        x = self.encoder_attn_layer_norm(x + self.encoder_attn(x, memory))
        return self.final_layer_norm(x + self.fc2(F.gelu(self.fc1(x))))


class _Decoder(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        d, heads = sizes.graph_width, sizes.heads[1]
        self.embed_tokens = nn.Embedding(sizes.vocab_size, d)
        self.embed_positions = nn.Embedding(sizes.positions, d)
        self.layers = nn.ModuleList(_GraphLayer(sizes) for _ in range(sizes.graph_layers))
        self.link_positional = nn.Embedding(sizes.positions, d)
        self.query_linear, self.key_linear = nn.Linear(2 * d, d), nn.Linear(2 * d, d)
        self.gate_linear = nn.Linear(2 * d, heads)
        self.output_projection = nn.Linear(d, sizes.vocab_size, bias=False)

    def forward(self, memory: Tensor, vertices: int) -> Graph:
        """Compute the graph of one source."""
        ids = torch.full((vertices,), UNK, device=memory.device)
        ids[0], ids[-1] = BOS, EOS
        at = torch.arange(FIRST, FIRST + vertices, device=memory.device)
        scale = math.sqrt(self.embed_tokens.embedding_dim)
        x = scale * self.embed_tokens(ids) + self.embed_positions(at)
        for layer in self.layers:
            x = layer(x, memory)
        features = torch.cat([x, self.link_positional(at)], -1)[None]
        heads = self.gate_linear.out_features
        q, k = (
            linear(features).unflatten(-1, (heads, -1))
            for linear in (self.query_linear, self.key_linear)
        )
        lengths = torch.tensor([vertices], device=memory.device)
        links = mixed_links(q, k, self.gate_linear(features), lengths)
        emissions = wide(self.output_projection(x)).log_softmax(-1)
        return Graph(links, emissions[None], x[None], lengths)


class _Adaptor(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        self.fc1 = nn.Linear(sizes.graph_width, sizes.adaptor)
        self.fc2 = nn.Linear(sizes.adaptor, sizes.voice_width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class _Convolutions(nn.Module):
    def __init__(self, width: int, inner: int, kernel: int):
        super().__init__()
        first = nn.Conv1d(width, inner, kernel, padding=(kernel - 1) // 2)
        last = nn.Conv1d(inner, width, kernel, padding=(kernel - 1) // 2)
        self.ffn, self.layer_norm = nn.Sequential(first, nn.ReLU(), last), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer_norm(x + self.ffn(x.T).T)


class _FFT(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        d = sizes.voice_width
        self.self_attn, self.layer_norm = _Attention(d, sizes.heads[2]), nn.LayerNorm(d)
        self.ffn = _Convolutions(d, sizes.voice_inner, sizes.voice_kernel)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.layer_norm(x + self.self_attn(x, x)))


class _Predictor(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        d, c, kernel = sizes.voice_width, sizes.predictor, sizes.predictor_kernel
        first = nn.Conv1d(d, c, kernel, padding=(kernel - 1) // 2)
        # the released second convolution pads by one, whatever its kernel
        self.conv1, self.ln1 = nn.Sequential(first, nn.ReLU()), nn.LayerNorm(c)
        self.conv2 = nn.Sequential(nn.Conv1d(c, c, kernel, padding=1), nn.ReLU())
        self.ln2, self.proj = nn.LayerNorm(c), nn.Linear(c, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln1(self.conv1(x.T).T)
        return self.proj(self.ln2(self.conv2(x.T).T))[:, 0]


class _Variance(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        self.duration_predictor, self.pitch_predictor = _Predictor(sizes), _Predictor(sizes)
        self.energy_predictor = _Predictor(sizes)
        self.embed_pitch = nn.Embedding(sizes.bins, sizes.voice_width)
        self.embed_energy = nn.Embedding(sizes.bins, sizes.voice_width)

    def forward(self, x: Tensor, pitch: Tensor, energy: Tensor) -> Tensor:
        """Add pitch and energy of bins with these borders, and repeat every state for its
        duration."""
        frames = (self.duration_predictor(x).exp() - 1).round().long().clamp_min(0)
        x = x + self.embed_pitch(torch.bucketize(self.pitch_predictor(x), pitch))
        x = x + self.embed_energy(torch.bucketize(self.energy_predictor(x), energy))
        return x.repeat_interleave(frames, 0)


class _Voice(nn.Module):
    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        self.pos_emb_alpha = nn.Parameter(torch.ones(1))
        self.dec_pos_emb_alpha = nn.Parameter(torch.ones(1))
        before, after = sizes.voice_layers
        self.encoder_fft_layers = nn.ModuleList(_FFT(sizes) for _ in range(before))
        self.var_adaptor = _Variance(sizes)
        self.decoder_fft_layers = nn.ModuleList(_FFT(sizes) for _ in range(after))
        self.out_proj = nn.Linear(sizes.voice_width, sizes.frames)

    def forward(self, x: Tensor, pitch: Tensor, energy: Tensor) -> Tensor:
        x = x + self.pos_emb_alpha * waves(len(x), x)
        for layer in self.encoder_fft_layers:
            x = layer(x)
        x = self.var_adaptor(x, pitch, energy)
        x = x + self.dec_pos_emb_alpha * waves(len(x), x)
        for layer in self.decoder_fft_layers:
            x = layer(x)
        return self.out_proj(x)


def waves(count: int, like: Tensor) -> Tensor:
    """Return fairseq's sinusoidal positions [count, D]: all sines, then all cosines."""
    half = like.shape[-1] // 2
    rates = torch.exp(torch.arange(half) * -(math.log(10000) / (half - 1)))
    angle = torch.arange(FIRST, FIRST + count)[:, None] * rates
    return torch.cat([angle.sin(), angle.cos()], 1).to(like)


class DASpeech(nn.Module):
    """Network with the names of the published tensors; methods take one source at a time, since
    released convolutions would read its padding."""

    def __init__(self, sizes: DASpeechSizes):
        super().__init__()
        self.sizes = sizes
        self.encoder, self.decoder = _Encoder(sizes), _Decoder(sizes)
        self.adaptor, self.tts = _Adaptor(sizes), _Voice(sizes)

    def graph(self, mel: Tensor) -> Graph:
        """Compute the graph of log-mel frames [n, mel]."""
        most = self.sizes.positions - FIRST
        vertices = min(max(len(mel) // 2, 2), most)
        return self.decoder(self.encoder(mel), vertices)


class DASpeechLM(ModelAdapter):
    """Graphs of speech; see ``LatticeModel``. A prompt is one token, which stands for a condition;
    its features are ``mel`` [n, mel].

    Attributes:
        pitch: borders of the pitch bins, floats [bins - 1].
        energy: borders of the energy bins.
        released_posterior: expected states count the emission twice, as in released training.
    """

    model: DASpeech

    def __init__(
        self, model: DASpeech, pitch: Tensor, energy: Tensor, released_posterior: bool = True
    ):
        self.model, self.pitch, self.energy = model.eval(), pitch, energy
        self.released_posterior = released_posterior
        self.vocab_size = model.sizes.vocab_size

    def condition_token(self, number: int) -> int:
        return self.vocab_size + number

    @torch.no_grad()
    def forward(self, source: Tensor, lengths: Tensor) -> Graph:
        """Compute the graphs of the conditions of prompts, long [B, 1]."""
        numbers = (source[:, 0] - self.vocab_size).tolist()
        made = [self.model.graph(self.features[n]["mel"].to(self.dtype)) for n in numbers]
        size, rows = max(g.states.shape[1] for g in made), []
        for g in made:
            more = size - g.states.shape[1]
            rows.append(
                (
                    F.pad(g.transitions, (0, more, 0, more), value=-torch.inf),
                    F.pad(g.emissions, (0, 0, 0, more)),
                    F.pad(g.states, (0, 0, 0, more)),
                    g.lengths,
                )
            )
        return Graph(*(torch.cat(part) for part in zip(*rows, strict=True)))

    def expected_states(self, graph: Graph, targets: Tensor, counts: Tensor) -> Tensor:
        """Return the states [B, M, D] that training expects of targets, long [B, M]: those of
        vertices, weighted by the posterior. Targets begin with bos and end with eos."""
        m = matches(graph.emissions, targets)
        weights = posterior(graph.transitions, m, graph.lengths, counts, self.released_posterior)
        return weights.to(graph.states) @ graph.states

    @torch.no_grad()
    def speak(self, states: Tensor) -> Tensor:
        """Return the log-mel frames [m, frames] of the states [n, D] of words and eos."""
        return self.model.tts(self.model.adaptor(states), self.pitch, self.energy)


def load_daspeech(
    path: str | Path,
    pitch: tuple[float, float],
    energy: tuple[float, float],
    voice_heads: int = 4,
    released_posterior: bool = True,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> DASpeechLM:
    """Load DASpeech from a fairseq checkpoint.

    Args:
        path: checkpoint, or a folder with its tensors as safetensors.
        pitch: least and largest pitch of the training data, which the bins span.
        energy: the same of the energy.
        voice_heads: attention heads of the synthesiser, which no tensor tells.
        released_posterior: expected states are those of released training.
        device: device of the model.
        dtype: dtype of the model.

    Raises:
        GenError: missing, extra or mis-shaped tensors.
    """
    weights = Weights(path)
    sizes = sizes_of(weights.shapes, voice_heads)
    model = without_storage(lambda: DASpeech(sizes))
    options: dict[str, Any] = {"device": device, "dtype": dtype, "name": path}
    fill(model, weights, rename=RENAMES, drop=DROP, **options)

    def borders(ends: tuple[float, float]) -> Tensor:
        return torch.linspace(*ends, sizes.bins - 1, device=device, dtype=dtype)

    return DASpeechLM(model, borders(pitch), borders(energy), released_posterior)

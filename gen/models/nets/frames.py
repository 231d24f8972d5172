"""Architecture of the built-in frame model: a factorised transformer that denoises the frames of a
clip, each given its action and the frames before it (the diffusion form of Next-Frame Diffusion,
arXiv 2506.01380, with the shortcut step sizes of Dreamer 4, arXiv 2509.24527).

A frame x, pixels in [-1, 1], is noised to z = (1 - tau) e + tau x with e ~ N(0, I), where tau is
the frame's signal level. The net predicts x from z, tau, the step size d of the sampler and the
action that leads to the frame. Patches of a frame are its positions. A layer is full attention
inside a frame, causal attention over the last ``window`` frames at the same position, and an MLP,
each modulated by (tau, d, action) of the frame. Attention depends on distances alone (in rows and
columns, in frames), so that a clip has no largest length.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

# (rows, columns) that each head attends to at the start of training; a convolution as attention
# (ConViT, arXiv 2103.10697)
OFFSETS = ((-1, 0), (1, 0), (0, -1), (0, 1), (-2, 0), (2, 0), (0, -2), (0, 2))
# frames that attend by sums of products: batched products of tiny matrices take longer on a CPU
SMALL = 4
LOCALITY = (
    2.0  # decay of a head's attention with the squared distance from its offset, at the start
)


class FrameConfig(PretrainedConfig):
    """Sizes of a frame model.

    Attributes:
        frame: height, width and channels of a frame.
        patch: pixels of a position's side.
        actions: names; one more action stands for none, that of the first frame.
        window: frames that a frame attends to, the frame itself included.
        finest: steps of the finest sampler; step sizes are 1 / n for the powers of two n up to it.
        context_signal: signal level of the frames that later ones attend to.
        palette: RGB colours, one of which every position of a finished frame has; empty where it
            may have any.
    """

    model_type = "gen_frames"

    def __init__(
        self,
        frame=(16, 16, 3),
        patch=2,
        actions=("up", "down", "left", "right", "stay"),
        hidden_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        window=8,
        finest=8,
        context_signal=0.9,
        palette=(),
        **kwargs,
    ):
        super().__init__(**kwargs)
        self.frame, self.patch, self.actions = list(frame), patch, list(actions)
        self.hidden_size, self.num_hidden_layers = hidden_size, num_hidden_layers
        self.num_attention_heads, self.window = num_attention_heads, window
        self.finest, self.context_signal = finest, context_signal
        self.palette = [list(colour) for colour in palette]
        self.latent_channels = patch**2 * frame[2]  # how configs of models of latents tell

    @property
    def rows(self) -> int:
        """Positions of a column of a frame."""
        return self.frame[0] // self.patch

    @property
    def columns(self) -> int:
        """Positions of a row of a frame."""
        return self.frame[1] // self.patch

    @property
    def positions(self) -> int:
        """Positions of a frame."""
        return self.rows * self.columns

    @property
    def position_channels(self) -> int:
        """Numbers of a position."""
        return self.latent_channels


class FrameModel(PreTrainedModel):
    """Frame model over positions, which ``to_positions`` and ``to_pixels`` convert."""

    config_class = FrameConfig
    base_model_prefix = ""

    def __init__(self, config: FrameConfig):
        super().__init__(config)
        d, heads = config.hidden_size, config.num_attention_heads
        layers = config.num_hidden_layers
        self.enter = nn.Linear(config.position_channels, d)
        self.location = nn.Parameter(torch.zeros(config.positions, d))
        self.signal = nn.Sequential(nn.Linear(64, d), nn.SiLU(), nn.Linear(d, d))
        self.step_size = nn.Embedding(int(math.log2(config.finest)) + 1, d)
        self.action = nn.Embedding(len(config.actions) + 1, d)
        self.layers = nn.ModuleList(FrameLayer(d, heads) for _ in range(layers))
        self.spatial_bias = nn.Parameter(
            torch.zeros(layers, heads, 2 * config.rows - 1, 2 * config.columns - 1)
        )
        self.temporal_bias = nn.Parameter(torch.zeros(layers, heads, config.window))
        self.modulation = nn.Linear(d, 2 * d)
        self.leave = nn.Linear(d, config.position_channels)
        self.post_init()

    @torch.no_grad()
    def start(self) -> None:
        """Initialise for training: layers are identities, and heads attend to neighbours."""
        for last in (self.modulation, *(layer.modulation for layer in self.layers)):
            last.weight.zero_()
            last.bias.zero_()
        for table in (self.step_size, self.action):
            nn.init.normal_(table.weight, std=0.3)
        nn.init.normal_(self.location, std=0.02)
        rows, columns = self.spatial_bias.shape[-2:]
        dy = torch.arange(rows)[:, None] - rows // 2
        dx = torch.arange(columns) - columns // 2
        for head in range(self.spatial_bias.shape[1]):
            y, x = OFFSETS[head % len(OFFSETS)]
            self.spatial_bias[:, head] = -LOCALITY * ((dy - y) ** 2 + (dx - x) ** 2)

    def condition(self, signal: Tensor, steps: Tensor, actions: Tensor) -> Tensor:
        """Embed what a frame is denoised with: [B, F, D].

        Args:
            signal: signal levels, float [B, F] in [0, 1].
            steps: steps 1 / d of the sampler, powers of two, long [B, F].
            actions: indices, long [B, F]; the number of actions for none.
        """
        frequency = torch.exp(-math.log(200) * torch.arange(32, device=signal.device) / 31)
        angle = (signal * 100)[..., None].to(self.location.dtype) * frequency.to(
            self.location.dtype
        )
        level = self.signal(torch.cat([angle.cos(), angle.sin()], -1))
        size = self.step_size(steps.to(self.location.dtype).log2().round().long())
        return F.silu(level + size + self.action(actions))

    def forward(
        self,
        z: Tensor,
        signal: Tensor,
        steps: Tensor,
        actions: Tensor,
        past: list[tuple[Tensor, Tensor]] | None = None,
        known: Tensor | None = None,
        keep: bool = False,
        spatial: Tensor | None = None,
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Predict the clean positions of the frames f .. f + F - 1 of each row.

        Args:
            z: noised positions [B, F, P, C].
            signal, steps, actions: as in ``condition``.
            past: keys and values of each layer [B, W, P, D] of the W frames before f; None for
                no frames before.
            known: which of the W frames exist, bool [B, W].
            keep: also return keys and values.
            spatial: ``spatial_scores``, where they are known already.

        Returns:
            Predictions [B, F, P, C], and keys and values [B, F, P, D] of each layer, if kept.
        """
        c = self.condition(signal, steps, actions)
        x = self.enter(z) + self.location
        spatial = self.spatial_scores(x.dtype) if spatial is None else spatial
        temporal = self.temporal_scores(x, past, known)
        kept = []
        for i, layer in enumerate(self.layers):
            x, pair = layer(x, c, spatial[i], temporal[i], past[i] if past else None)
            if keep:
                kept.append(pair)
        shift, scale = self.modulation(c)[:, :, None].chunk(2, -1)
        return self.leave(F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift), kept

    def spatial_scores(self, dtype: torch.dtype) -> Tensor:
        """Return what each layer adds to the attention inside a frame, [layers, H, P, P]."""
        c, device = self.config, self.location.device
        row = torch.arange(c.positions, device=device) // c.columns
        column = torch.arange(c.positions, device=device) % c.columns
        dy = row - row[:, None] + c.rows - 1
        dx = column - column[:, None] + c.columns - 1
        return self.spatial_bias[:, :, dy, dx].to(dtype)

    def temporal_scores(self, x: Tensor, past: list | None, known: Tensor | None) -> Tensor:
        """Return what each layer adds to the attention between frames, [layers, B, H, F, W + F].

        Frames of the future, farther than ``window`` or unknown get -inf.
        """
        f = x.shape[1]
        w = past[0][0].shape[1] if past else 0
        new = torch.arange(f, device=x.device)
        distance = new[:, None] - torch.arange(-w, f, device=x.device)  # [F, W + F]
        seen = (distance >= 0) & (distance < self.config.window)
        scores = self.temporal_bias[:, :, distance.clamp(0, self.config.window - 1)].to(x.dtype)
        if known is None:
            return scores.masked_fill(~seen, -math.inf)[:, None]
        every = F.pad(known, (0, f), value=True)[:, None] & seen  # [B, F, W + F]
        return scores[:, None].masked_fill(~every[:, None], -math.inf)


class FrameLayer(nn.Module):
    """Attention inside frames, attention between frames and an MLP, each with adaptive layer norm.

    ``width``: D; ``heads``: H.
    """

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.spatial = nn.Linear(width, 3 * width)
        self.spatial_out = nn.Linear(width, width)
        self.temporal = nn.Linear(width, 3 * width)
        self.temporal_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width)
        )
        self.modulation = nn.Linear(width, 9 * width)

    def forward(
        self,
        x: Tensor,
        c: Tensor,
        spatial: Tensor,
        temporal: Tensor,
        past: tuple[Tensor, Tensor] | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Apply the layer to x [B, F, P, D] under conditions c [B, F, D].

        Args:
            x: activations.
            c: conditions.
            spatial: scores to add [H, P, P].
            temporal: scores to add [B or 1, H, F, W + F].
            past: keys and values [B, W, P, D] of frames before.

        Returns:
            Activations [B, F, P, D], and keys and values [B, F, P, D] of these frames.
        """
        m = self.modulation(c)[:, :, None].chunk(9, -1)
        b, f, p, d = x.shape
        q, k, v = (
            t.reshape(b * f, p, self.heads, -1).transpose(1, 2)
            for t in self.spatial(_normed(x, m[0], m[1])).chunk(3, -1)
        )
        a = F.scaled_dot_product_attention(q, k, v, attn_mask=spatial[None])
        x = x + m[2] * self.spatial_out(a.transpose(1, 2).reshape(b, f, p, d))

        q, k, v = self.temporal(_normed(x, m[3], m[4])).chunk(3, -1)
        pair = (k, v)
        if past:
            k, v = torch.cat([past[0], k], 1), torch.cat([past[1], v], 1)
        x = x + m[5] * self.temporal_out(self.attend_in_time(q, k, v, temporal))
        return x + m[8] * self.mlp(_normed(x, m[6], m[7])), pair

    def attend_in_time(self, q: Tensor, k: Tensor, v: Tensor, scores: Tensor) -> Tensor:
        """Attend from q [B, F, P, D] to k and v [B, W + F, P, D] at the same position."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)) for t in (q, k, v))  # [B, F, P, H, D / H]
        if q.shape[1] <= SMALL and not torch.is_grad_enabled():
            weights = (q[:, :, None] * k[:, None]).sum(-1) / math.sqrt(q.shape[-1])
            weights = (weights + scores.permute(0, 2, 3, 1)[:, :, :, None]).softmax(2)
            return (weights[..., None] * v[:, None]).sum(2).flatten(-2)
        q, k, v = (t.permute(0, 2, 3, 1, 4) for t in (q, k, v))
        weights = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1]) + scores[:, None]
        return (weights.softmax(-1) @ v).permute(0, 3, 1, 2, 4).flatten(-2)


def to_positions(pixels: Tensor, config: FrameConfig) -> Tensor:
    """Cut frames uint8 [..., H, W, C] into positions in [-1, 1], [..., P, patch * patch * C]."""
    p = config.patch
    x = (pixels / 127.5 - 1).unflatten(-3, (config.rows, p)).unflatten(-2, (config.columns, p))
    return x.transpose(-4, -3).flatten(-5, -4).flatten(-3)


def to_pixels(positions: Tensor, config: FrameConfig) -> Tensor:
    """Join positions [..., P, patch * patch * C] to frames uint8 [..., H, W, C]."""
    p = config.patch
    x = positions.unflatten(-1, (p, p, -1)).unflatten(-4, (config.rows, config.columns))
    x = x.transpose(-4, -3).flatten(-5, -4).flatten(-3, -2)
    return ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)


def _normed(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Normalise x [B, F, P, D] and modulate it per frame."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


AutoConfig.register(FrameConfig.model_type, FrameConfig)
AutoModel.register(FrameConfig, FrameModel)

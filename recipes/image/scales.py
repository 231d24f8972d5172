"""Next-scale image models: a residual tokenizer over six scales, a model of the VAR form and one of
the HMAR form.

    python -m gen.recipes.image.scales all --work DIR          the run that made image-scales*
    python -m gen.recipes.image.scales all --work DIR --quick  a smoke run of the same path

Stages: ``vq``, ``tokens``, ``scales``, ``masked``, ``draft``, ``export``, ``evaluate``; ``all``
runs them in this order. Training stages resume from their checkpoints in ``--work``; ``masked`` can
start when ``scales`` has written ``average.pt``. Images and captions are those of
``recipes/image/recipe.py``. The tokenizer starts from the embedded KL autoencoder, the models from
the trunks of embedded token models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL
from torch import Tensor

from gen.contracts.frontend import codebook_digest
from gen.modalities.image import captions as shapes
from gen.models.load.locate import locate, save_model
from gen.models.nets.grid import GridLlamaForCausalLM
from gen.models.nets.grid_scales import GridScalesConfig, GridScalesModel
from gen.models.nets.scale_vq import ScaleVQModel
from gen.recipes.common.codebooks import PERIOD, kmeans
from gen.recipes.common.data import encode_dataset
from gen.recipes.common.grid_models import tidy, token_batches
from gen.recipes.common.recipe import Recipe
from gen.recipes.common.train import TrainConfig, fit_average
from gen.recipes.image.recipe import drawn, images, reconstruction, words
from gen.recipes.image.scales_evaluation import evaluate


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training of one model.

    Attributes:
        layers: layers of one pass.
        tail: layers that the passes of a Markov model have of their own.
        start: average weights to start from, in the work folder.
        trunk: model of the zoo whose trunk a warm plan starts from otherwise.
        keep_average_at: step after which the average is saved as ``average.pt``.
        cooldown: (first, end) of an early linear cooldown.
    """

    steps: int
    seed: int
    markov: bool = False
    width: int = 160
    layers: int = 5
    tail: int = 0
    start: str | None = None
    trunk: str = "image-masked"
    keep_average_at: int | None = None
    cooldown: tuple[int, int] | None = None
    lr: float = 2e-3


@dataclass(frozen=True, kw_only=True)
class ScalesPlan:
    """Sizes of the recipe."""

    vq_steps: int = 700
    vq_batch: int = 16
    images: int = 40_000
    batch: int = 64
    scales: Training = Training(steps=4000, seed=5, keep_average_at=700, cooldown=(900, 1400))
    masked: Training = Training(
        steps=4000,
        seed=4,
        markov=True,
        tail=2,
        start="scales/average.pt",
        lr=1.5e-3,
        cooldown=(750, 1050),
    )
    draft: Training = Training(
        steps=1600, seed=6, width=96, layers=2, trunk="image-draft", cooldown=(500, 800)
    )
    held_out: int = 200
    warm: bool = True


_TINY = dict(width=32, layers=2)
QUICK = ScalesPlan(
    vq_steps=6,
    vq_batch=4,
    images=96,
    batch=8,
    scales=Training(steps=4, seed=5, keep_average_at=2, **_TINY),
    masked=Training(steps=3, seed=4, markov=True, tail=1, start="scales/average.pt", **_TINY),
    draft=Training(steps=3, seed=6, **_TINY),
    held_out=2,
    warm=False,
)

CODES, CHANNELS, PATCH = 256, 4, 2
SCALES = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 6), (8, 8))
# error of the codes beside that of the pixels, in the unit variance of the encoder's start
CODE_WEIGHT, COMMITMENT = 0.1, 0.25
MODELS = {"scales": "image-scales", "masked": "image-scales-masked", "draft": "image-scales-draft"}


def new_vq() -> ScaleVQModel:
    """Create the tokenizer, with phi as the identity."""
    model = ScaleVQModel(SCALES, CODES, CHANNELS, PATCH)
    for phi in model.quantize.quant_resi.qresi_ls:
        torch.nn.init.dirac_(phi.weight)
        torch.nn.init.zeros_(phi.bias)
    return model


def start_from_kl(model: ScaleVQModel) -> None:
    """Copy encoder and decoder of the embedded KL autoencoder. The mean of its posterior, at unit
    variance, becomes the feature map.
    """
    kl = AutoencoderKL.from_pretrained(locate("image-kl"), torch_dtype=torch.float32)
    old, scale = kl.state_dict(), kl.config.scaling_factor
    mean = old["quant_conv.weight"][:CHANNELS, :, 0, 0]
    new = {k: old.get(k, v) for k, v in model.state_dict().items()}
    new["encoder.conv_out.weight"] = scale * torch.einsum(
        "oi,ichw->ochw", mean, old["encoder.conv_out.weight"]
    )
    new["encoder.conv_out.bias"] = scale * (
        mean @ old["encoder.conv_out.bias"] + old["quant_conv.bias"][:CHANNELS]
    )
    new["quant_conv.weight"] = torch.eye(CHANNELS)[..., None, None]
    new["quant_conv.bias"] = torch.zeros(CHANNELS)
    new["post_quant_conv.weight"] = old["post_quant_conv.weight"] / scale
    model.load_state_dict(new)


class ScaleCodebook:
    """Codebook that the scales of a quantiser share: its start, its loss, revival of unused codes.

    Args:
        quantize: quantiser, trained in place.
        settle: step from which unused codes are no longer revived.
        generator: generator of starts and revivals.
    """

    def __init__(self, quantize, settle: int, generator: torch.Generator):
        self.quantize, self.settle, self.generator = quantize, settle, generator
        self.used = torch.full((len(quantize.embedding.weight),), 10.0)
        self.rest = torch.empty(0)  # residuals of the last scale, to revive codes from

    @torch.no_grad()
    def start(self, f: Tensor) -> None:
        """Set the codes by k-means of the residuals of feature maps [B, D, H, W]. A scale gets a
        share of the codes that grows with its side.
        """
        q, r, parts = self.quantize, f, []
        roots = torch.tensor(q.lengths).sqrt()
        shares = (roots / roots.sum() * len(self.used)).long().clamp_min(8)
        shares[-1] += len(self.used) - shares.sum()
        for scale, share in enumerate(shares.tolist()):
            z = q.down(r, scale).flatten(2).transpose(1, 2)
            parts.append(kmeans(z.flatten(0, 1)[-8192:], share, self.generator))
            ids = torch.cdist(z, parts[-1].expand(len(z), -1, -1)).argmin(-1)
            r = r - q.up(parts[-1][ids], scale)
        q.embedding.weight.copy_(torch.cat(parts))

    def __call__(self, f: Tensor) -> tuple[Tensor, Tensor]:
        """Quantise maps [B, D, H, W]. Returns them with the gradient of the unquantised ones, and
        the loss of codes and encoder, a mean over scales.
        """
        q, r, f_hat, loss = self.quantize, f.detach(), torch.zeros_like(f), f.new_zeros(())
        self.used *= 0.9985
        for scale in range(len(q.sides)):
            z = q.down(r, scale).flatten(2).transpose(1, 2)
            ids = q.nearest(z.flatten(0, 1))
            self.used.index_add_(0, ids, torch.ones(len(ids)))
            h = q.up(q.embedding(ids.view(len(f), -1)), scale)
            f_hat, r = f_hat + h, r - h.detach()
            loss = loss + F.mse_loss(f_hat, f.detach()) + COMMITMENT * F.mse_loss(f, f_hat.detach())
            self.rest = z.flatten(0, 1)
        return f + (f_hat - f).detach(), loss / len(q.sides)

    @torch.no_grad()
    def on_step(self, step: int) -> None:
        """Revive unused codes until ``settle``. Call it after every step."""
        if step + 1 < self.settle and (step + 1) % PERIOD == 0:
            dead = (self.used < 1).nonzero().flatten()
            rows = torch.randint(len(self.rest), (len(dead),), generator=self.generator)
            self.quantize.embedding.weight[dead] = self.rest[rows]
            self.used[dead] = 5.0


def train_vq(work: Path, plan: ScalesPlan, log=print) -> None:
    """Train the tokenizer on reconstruction and its codes."""
    torch.manual_seed(0)
    model = new_vq()
    if plan.warm:
        start_from_kl(model)
    generator = torch.Generator().manual_seed(0)
    codebook = ScaleCodebook(model.quantize, plan.vq_steps * 3 // 4, generator)
    with torch.no_grad():
        first = zip(images(plan.vq_batch, seed=7), range(16), strict=False)
        codebook.start(torch.cat([model.features(x) for x, _ in first]))

    def loss_fn(m, x):
        f, loss = codebook(m.features(x).float())
        y = m.pixels(f).float()
        pixels, figures = reconstruction(y, x)
        return pixels + CODE_WEIGHT * loss, {
            **figures,
            "codes": float((codebook.used > 1).sum()),
        }

    fit_average(
        model,
        images(plan.vq_batch, seed=1),
        loss_fn,
        TrainConfig(steps=plan.vq_steps, lr=0.002, weight_decay=0.0, autocast=True),
        out=work / "vq",
        on_step=lambda step, m: codebook.on_step(step),
        log=log,
    )
    save_model(model, work / "vq" / "model")


def make_tokens(work: Path, plan: ScalesPlan, log=print) -> None:
    """Render the training images and save their codes (int16 [N, 130]) and caption slots (uint8
    [N, 8]). Codes are those of the half-precision tokenizer, which is what ships.
    """
    model = ScaleVQModel.from_pretrained(work / "vq" / "model", torch_dtype=torch.float16)
    model = model.float().eval()

    @torch.no_grad()
    def encode(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            f = model.features(x).float()
        return model.quantize.encode(f).to(torch.int16)

    encode_dataset(work / "tokens.pt", "codes", drawn(32, seed=2), plan.images, 32, encode, log)


def new_model(run: Training, quantize) -> GridScalesModel:
    """Create a model with a frozen copy of the tokenizer's quantiser."""
    model = GridScalesModel(
        GridScalesConfig(
            scales=SCALES,
            codes=CODES,
            channels=CHANNELS * PATCH**2,
            prefix_length=shapes.SLOTS,
            vocab_size=shapes.PAIRS,
            markov=run.markov,
            tail_layers=run.tail,
            hidden_size=run.width,
            intermediate_size=run.width * 8 // 3 // 32 * 32,
            num_hidden_layers=run.layers,
            num_attention_heads=run.width // 32,
            num_key_value_heads=run.width // 32,
            max_position_embeddings=shapes.SLOTS + 64,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )
    )
    model.quantize.load_state_dict(quantize.state_dict())
    model.quantize.requires_grad_(False)
    return model


@torch.no_grad()
def warm_start(model: GridScalesModel, name: str) -> None:
    """Copy words, locations and trunk from a token model of the zoo. A cell's location is the mean
    of those that it covers on that model's finer grid.
    """
    old = GridLlamaForCausalLM.from_pretrained(locate(name), dtype=torch.float32)
    first = old.config.codebook_size
    model.words.weight.copy_(old.model.embed_tokens.weight[first : first + shapes.PAIRS])
    model.prefix.weight.copy_(old.prefix.weight)
    cells = []
    for sides in model.quantize.sides:
        rows, cols = (
            F.adaptive_avg_pool1d(axis.weight.T, side).T
            for axis, side in zip(old.axes, sides, strict=True)
        )
        cells.append((rows[:, None] + cols).flatten(0, 1))
    model.positions.weight.copy_(torch.cat(cells))
    for mine, theirs in zip(model.base.layers, old.model.layers, strict=True):
        mine.load_state_dict(theirs.state_dict())
    model.base.norm.load_state_dict(old.model.norm.state_dict())


def adopt(model: GridScalesModel, state: dict[str, Tensor]) -> None:
    """Copy a model of one pass into one of two: its last layers become those of both passes."""
    tail = model.config.tail_layers
    first = model.config.num_hidden_layers - tail
    new = model.state_dict()
    for key, value in state.items():
        if key.startswith("base.layers.") and int(key.split(".")[2]) >= first:
            number, rest = key.removeprefix("base.layers.").split(".", 1)
            for part in ("fill", "refine"):
                new[f"{part}.layers.{int(number) - first}.{rest}"] = value
        elif key == "base.norm.weight":
            new |= {"fill.norm.weight": value, "refine.norm.weight": value}
        else:
            new[key] = value
    new["refine_head.weight"] = state["head.weight"]
    model.load_state_dict({k: v.clone() for k, v in new.items()})


def hidden_tokens(lengths: list[int], batch: int, generator: torch.Generator) -> Tensor:
    """Choose masked tokens [B, T]: of every row and scale but the first a share that is uniform."""
    out = [torch.zeros(batch, lengths[0], dtype=torch.bool)]
    for n in lengths[1:]:
        share = torch.rand(batch, 1, generator=generator)
        out.append(torch.rand(batch, n, generator=generator).argsort(1) < (share * n).ceil())
    return torch.cat(out, 1)


def train_model(work: Path, plan: ScalesPlan, name: str, log=print) -> None:
    """Train one of ``MODELS``. Half of a batch trains each pass of ``masked``."""
    torch.manual_seed(0)
    run: Training = getattr(plan, name)
    quantize = ScaleVQModel.from_pretrained(
        work / "vq" / "model", torch_dtype=torch.float16
    ).quantize.float()
    model = new_model(run, quantize)
    if run.start:
        adopt(model, torch.load(work / run.start, weights_only=True))
    elif plan.warm:
        warm_start(model, run.trunk)
    # in bfloat16 on a CPU its backward pass takes a quarter of that of the fused attention
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(3)
    lengths = model.quantize.lengths

    def loss_fn(m, batch):
        condition, codes = batch
        n = len(codes) // 2 if run.tail else len(codes)  # rows of the pass that fills
        logits = m(condition[:n], codes[:n]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), codes[:n].flatten())
        if not run.tail:
            return loss, {}
        hidden = hidden_tokens(lengths, len(codes) - n, generator)
        refined = m(condition[n:], codes[n:], hidden)[hidden].float()
        refine = F.cross_entropy(refined, codes[n:][hidden])
        return loss + refine, {"fill": loss.item(), "refine": refine.item()}

    fit_average(
        model,
        token_batches(work / "tokens.pt", plan.batch, run.seed, words),
        loss_fn,
        TrainConfig(
            steps=run.steps,
            lr=run.lr,
            muon=(".layers.", 3 * run.lr),
            weight_decay=0.02,
            keep_average_at=run.keep_average_at,
            cooldown=run.cooldown,
            save_every=250,
            bfloat16_weights=True,
        ),
        out=work / name,
        log=log,
    )
    save_model(model, work / name / "model")


class ScalesRecipe(Recipe):
    """Tokenizer over scales and next-scale models of images."""

    doc, full, quick = __doc__, ScalesPlan(), QUICK

    def stages(self):
        return {
            "vq": lambda: train_vq(self.work, self.plan, self.log),
            "tokens": lambda: make_tokens(self.work, self.plan, self.log),
            **{n: lambda n=n: train_model(self.work, self.plan, n, self.log) for n in MODELS},
            "export": self.export,
            "evaluate": lambda: evaluate(self.zoo, self.plan.held_out, self.log),
        }

    def export(self) -> None:
        """Write half-precision weights of the tokenizer and of the models, which name it."""
        vq = ScaleVQModel.from_pretrained(self.work / "vq" / "model").half()
        save_model(vq, self.zoo / "image-scales-vq")
        digest = codebook_digest(vq.quantize.embedding.weight)
        for name, folder in MODELS.items():
            model = GridScalesModel.from_pretrained(self.work / name / "model").half()
            model.config.frontend, model.config.codebook_digest = "image-scales-vq", digest
            save_model(model, self.zoo / folder)
        tidy(self.zoo)
        self.log(f"wrote {self.zoo}")


main = ScalesRecipe.main


if __name__ == "__main__":
    main()

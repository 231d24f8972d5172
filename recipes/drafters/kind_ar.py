"""Kind ``ar``: a small autoregressive model, distilled on what is measured.

A small model of the target's architecture reads the prompt and the tokens, as the target does. It
learns the target's final distribution, guidance included, from its conditional branch alone, so
that drafting takes one branch. First it is trained on sequences of the target, then on those that
it goes on with itself (DistillSpec, Zhou et al., arXiv 2310.08461).
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from gen.contracts.protocol import model_key
from gen.core.errors import GenError
from gen.models.load.locate import read_config, save_model
from gen.models.targets.identity import DrafterFacts
from gen.recipes.drafters.base import Kind, Net, Options
from gen.recipes.drafters.data import Batch

# keys of configs in which a model to start from agrees with the target
LIKE = ("model_type", "vocab_size", "prefix_length", "grid")


@dataclass(frozen=True)
class ModelOptions(Options):
    """Options of the kind.

    Attributes:
        width: channels of a layer, a multiple of 32.
        depth: number of layers.
        start: draft model to start from, ``none`` for one from nothing; empty for the one that the
            zoo has for the target, where its sizes are these.
    """

    width: int = 0
    depth: int = 0
    start: str = ""


class Autoregressive(Kind):
    """A small autoregressive model. Options: ``ModelOptions``."""

    name = "ar"
    is_model = True
    options_type = ModelOptions
    num_drafts = 5
    muon = ".layers."

    def network(self) -> nn.Module:
        config = copy.deepcopy(self.teacher.model.model.config)
        before = self._start()
        like = config if before is None else before.config
        width = self.options.width or like.hidden_size
        depth = self.options.depth or like.num_hidden_layers
        if width == like.hidden_size and before is not None:
            config.intermediate_size = like.intermediate_size
        else:
            config.intermediate_size = max(32, width * 8 // 3 // 32 * 32)
        config.hidden_size, config.num_hidden_layers = width, depth
        config.head_dim = 32
        config.num_attention_heads = config.num_key_value_heads = max(1, width // 32)
        config.tie_word_embeddings = like.tie_word_embeddings
        config.use_cache = False
        torch.manual_seed(0)
        net = type(self.teacher.model.model)(config).float()
        self._initialise(net, self.teacher.model.model)
        if before is not None:
            self._initialise(net, before)
        return net

    def _start(self) -> nn.Module | None:
        """Return the draft model to start from."""
        name = self.options.start or self._usual_start()
        if name is None or name == "none":
            return None
        model, binding, _ = self.teacher.pipe.bound(name)
        space = self.teacher.target.space
        if binding.space.vocab_size != space.vocab_size:
            raise GenError(
                f"the draft model {name} has {binding.space.vocab_size} tokens; expected"
                f" {space.vocab_size}, those of the model"
            )
        return model if type(model) is type(self.teacher.model.model) else None

    def _usual_start(self) -> str | None:
        """Return the modality's draft model, if it has prompts and tokens like the target's."""
        name = self.teacher.pipe.modality.models.get(model_key("causal", "codes", draft=True))
        if name is None:
            return None
        theirs, own = read_config(name), self.teacher.model.model.config.to_dict()
        return name if all(theirs.get(key) == own.get(key) for key in LIKE) else None

    def _initialise(self, net: nn.Module, other: nn.Module) -> None:
        """Copy the weights of another network whose shapes agree."""
        mine, theirs = net.state_dict(), other.state_dict()
        same = {k: v.float() for k, v in theirs.items() if k in mine and v.shape == mine[k].shape}
        net.load_state_dict({**mine, **same})

    def logq(self, net: Net, batch: Batch) -> Tensor:
        ids, before = batch.inputs()
        given = self.teacher.model.beside_prompts(batch.prompt)
        out = net(input_ids=ids[:, :-1], use_cache=False, **given).logits
        row = torch.arange(len(ids), device=ids.device)[:, None]
        return self.logprobs(out[row, before], self.positions(batch))

    def export(self, net: nn.Module, folder: Path) -> None:
        small = copy.deepcopy(net).half()
        small.config.use_cache = True
        # the drafter drafts with its conditional branch alone
        facts = DrafterFacts.of(self.name, self.teacher.target, net={"guidance_scale": 1.0})
        small.config.drafter = asdict(facts)
        save_model(small, folder)

    def sampler(self, folder: Path) -> dict[str, Any]:
        return {"name": "speculative", "draft_model": str(folder)}

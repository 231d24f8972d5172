"""Kinds of drafters by name."""

from __future__ import annotations

from gen.recipes.drafters.base import Kind
from gen.recipes.drafters.kind_ar import Autoregressive
from gen.recipes.drafters.kind_eagle import EagleKind
from gen.recipes.drafters.kind_exit import Exit
from gen.recipes.drafters.kind_flexdraft import FlexKind
from gen.recipes.drafters.kind_heads import Hydra, Medusa
from gen.recipes.drafters.kind_hidden import HiddenTransfer
from gen.recipes.drafters.kind_longspec import LongSpecKind
from gen.recipes.drafters.kind_lora_drop import LoraDropKind
from gen.recipes.drafters.kind_parallel import Masked, Prompt
from gen.recipes.drafters.kind_router import RouterKind
from gen.recipes.drafters.kind_skip import SkipRepair

ALL = (
    Autoregressive,
    EagleKind,
    Medusa,
    Hydra,
    Exit,
    Masked,
    Prompt,
    FlexKind,
    LongSpecKind,
    HiddenTransfer,
    SkipRepair,
    RouterKind,
    LoraDropKind,
)
KINDS: dict[str, type[Kind]] = {kind.name: kind for kind in ALL}

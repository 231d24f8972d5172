"""Names of transformers that its documentation does not promise, all in this module.

`TESTED` is the range of versions that the tests have run with. Newer ones are allowed: a name that
moves is mended here.
"""

from __future__ import annotations

import inspect
import sys
from types import FrameType
from typing import Any

from torch import Tensor, nn
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationConfig, GenerationMixin
from transformers.generation.utils import ALL_CACHE_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

__all__ = ["CAUSAL_LM_TYPES", "TESTED", "Cache", "CacheLayerMixin"]
TESTED = ("5.16.0", "5.24.0")  # oldest and newest version
CAUSAL_LM_TYPES = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # model type -> class name
# layers that carry a state from token to token, alone or beside attention
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
CACHE_NAME = ALL_CACHE_NAMES[0]  # "cache" from 5.24 on, "past_key_values" before


def pad_token(config: GenerationConfig) -> Tensor | None:
    """Return the padding token id that ``generate`` prepared, a scalar; None without one."""
    return config._pad_token_tensor


def allowed_tokens_function(processor: Any) -> Any:
    """Return the ``prefix_allowed_tokens_fn`` of the logits processor that was made of it."""
    return processor._prefix_allowed_tokens_fn


def attention_implementation(config: Any) -> str | None:
    """Return the name of a model's attention: ``sdpa``, ``eager``, ...; None for the default."""
    return config._attn_implementation


def unsplittable_modules(model: nn.Module) -> list[str] | None:
    """Return the class names of modules that must stay on one device; None where unknown."""
    # networks that are no models of transformers lack the name
    return getattr(model, "_no_split_modules", None)


def is_recurrent(model: nn.Module) -> bool:
    """Return True for a model some of whose layers carry a state that cannot be taken back."""
    # networks that are no models of transformers lack the name, and most configs the layers' types
    stateful = getattr(model, "_is_stateful", False)
    layers = getattr(model.config.get_text_config(), "layer_types", None) or ()
    return stateful or not RECURRENT_LAYERS.isdisjoint(layers)


def is_users_cache(cache: Any) -> bool:
    """Return True for a cache that the caller of ``generate`` passed."""
    return getattr(cache, "_is_user_defined", False)  # set on some classes only


def argument_of_generate(name: str) -> Any:
    """Read an argument of the running ``generate`` that it does not pass on, from its frame."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame.f_locals.get(name) if frame is not None else None

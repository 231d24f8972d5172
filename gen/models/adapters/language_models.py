"""Adapters: networks seen through the model protocols (``gen.models.adapters.protocols``).

Nothing here knows a modality or a sampler.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from gen.core.errors import GenError, unknown
from gen.models.adapters.base import ModelAdapter
from gen.models.adapters.batch_invariant import (
    InvariantSlots,
    OfVectors,
    Product,
)
from gen.models.adapters.fast_llama import Attend, LeanLlama, attend_among, attend_in
from gen.models.adapters.layer_plans import keep_layers
from gen.models.adapters.lead import mirrored
from gen.models.adapters.masks import CAUSAL, LayerMasks, Mask, blocks_among, hide
from gen.models.adapters.partial_latents import LatentCache, conditioning_part
from gen.models.adapters.protocols import CountsKnown, EncoderDecoder
from gen.models.adapters.rotations import angles_of, original_length, recomputed_length
from gen.models.adapters.slot_cache import SlotCache
from gen.models.adapters.windows import (
    narrowest,
    require_followed,
    require_within,
    windows_of,
)
from gen.models.load.cache_argument import with_cache
from gen.models.load.digest import digest_of
from gen.models.load.networks import config_field
from gen.models.load.transformers_compat import attention_implementation
from gen.models.nets.grid import GridLlamaForCausalLM


class LanguageModel(ModelAdapter):
    """Base class of adapters of transformers language models."""

    compiles = captures = True
    product: Product | None = None  # matrix product of batch-invariant passes

    def __init__(self, model: torch.nn.Module):
        self.model = model.eval()
        self.config = model.config.get_text_config()
        self.vocab_size: int = self.config.vocab_size
        self.trained_at_mask = config_field(self.config, "trained_at_mask") is not False
        self.max_positions = config_field(self.config, "max_position_embeddings")
        self._original_length = original_length(self.config)
        self.recomputed_past = recomputed_length(self.config)
        if self._original_length is not None:  # which angles there are depends on values
            self.compiles = False
        # angles of rotations are computed for any position
        rotates = any("rotary" in name for name, _ in model.named_modules())
        self.learned_positions = None if rotates else self.max_positions
        self.windows = windows_of(self.config)
        self._lean = LeanLlama.of(model)
        self.takes_block_masks = attention_implementation(self.config) == "flex_attention"
        # whether the module makes no mask where it is given none and attention is plainly causal
        self._knows_causal = attention_implementation(self.config) == "sdpa"

    @property
    def dtype(self) -> torch.dtype:
        return super().dtype if self._lean is None else self._lean.embedding.dtype

    @property
    def has_fast_forward(self) -> bool:
        """True where forward passes go through ``gen.models.adapters.fast_llama``."""
        return self._lean is not None

    def network_changed(self) -> None:
        """See ``ModelAdapter``. The fast forward holds weights, not layers."""
        self._lean = LeanLlama.of(self.model)

    @property
    def output_heads(self) -> list[torch.nn.Linear]:
        """See ``ModelAdapter``."""
        return [self.model.get_output_embeddings()]

    def make_batch_invariant(self, product: Product) -> None:
        """Fix the order of sums in passes of a network that ``make_invariant`` prepared, which
        returned the ``product``."""
        self.is_batch_invariant, self.product = True, product
        if self._lean is not None:
            self._lean.product, self._lean.activation = product, OfVectors(F.silu)

    def use_forward(self, lean: LeanLlama) -> None:
        """Replace the fast forward, such as by one that counts its calls."""
        self._lean = lean

    def new_cache(self, slots: int) -> SlotCache:
        """Return an empty cache.

        Raises:
            GenError: some layers see fewer positions.
        """
        require_within(self.windows, slots, self.config.model_type)
        return self._new_cache(slots)

    def _new_cache(self, slots: int) -> SlotCache:
        plain = InvariantSlots if self.is_batch_invariant else SlotCache
        make = plain if self.graphs is None else self.graphs.new_cache
        cache = make(self.config.num_hidden_layers, slots)
        cache.block_masks = self.takes_block_masks
        return cache

    def _inputs(self, tokens: Tensor, positions: Tensor) -> dict[str, Tensor]:
        """Return the arguments by which the module takes tokens [B, L] at positions [B, L]."""
        return {"input_ids": tokens}

    def embedded(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Embed token ids [B, L] as the network does at positions [B, L]: [B, L, D]."""
        if isinstance(self.model, GridLlamaForCausalLM):
            return self.model.embed(ids, positions)
        return self.model.get_input_embeddings()(ids)

    def _logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: LayerMasks | None,
        cache: SlotCache,
        keep: int = 0,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Return logits of all tokens, or of the last ``keep``.

        They go through ``gen.models.adapters.fast_llama`` where that does what the module does.
        ``mask`` None hides nothing; only the fast forward takes it, and ``taps``
        (``LeanLlama.run``).
        """
        inputs = self._inputs(tokens, positions)
        if self._lean is not None and cache.tables is None:
            cache.tables = self._lean.tables(cache.slots)
        if self.graphs is not None and taps is None:
            return self.run_network(inputs, positions, mask, cache)[:, -keep:]
        if self._lean is not None:
            attend = self._attend_in(cache, mask)
            return self._lean.run(tokens, positions, cache.tables, attend, keep, taps)
        if keep:
            return self._of_module(inputs, positions, mask, cache, logits_to_keep=keep)
        return self.network(inputs, positions, mask, cache)

    def network(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: LayerMasks | None, cache: Any
    ) -> Tensor:
        """See ``ModelAdapter``."""
        if self._lean is None:
            return self._of_module(inputs, positions, mask, cache)
        attend = self._attend_in(cache, mask)
        return self._lean.run(inputs["input_ids"], positions, cache.tables, attend)

    def _attend_in(self, cache: Any, mask: LayerMasks | None) -> Attend:
        """Return attention of the fast forward to the slots of a cache."""
        if self.is_batch_invariant:
            return lambda layer, q, k, v: cache.attend(layer, q, k, v, mask)
        return attend_in(cache, mask)

    def _of_module(
        self,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: LayerMasks | None,
        cache: Any,
        **more: int,
    ) -> Tensor:
        """Return the logits of the module's own forward pass."""
        with self._angles(positions, cache):
            return self.model(
                **inputs,
                position_ids=positions,
                attention_mask=None if mask is CAUSAL else mask,  # which the module makes itself
                use_cache=True,
                **with_cache(self.model, cache),
                **more,
            ).logits

    def _angles(self, positions: Tensor, cache: Any) -> AbstractContextManager[None]:
        """Let rotations that depend on the length of the text take that of each token."""
        if self._original_length is None or cache.slots <= self._original_length:
            return nullcontext()
        last = positions.amax(1, keepdim=True) if cache.starts is None else cache.starts
        return angles_of(self.model, torch.maximum(positions, last) + 1)


class CausalLM(LanguageModel):
    """Causal language model of transformers: a 4-D attention mask and explicit positions."""

    passes = ("forward", "forward_tree", "forward_superposed", "forward_with_hidden_states")
    keeps = True
    superposes = True

    @mirrored
    def new_cache(self, slots: int) -> SlotCache:
        """Return an empty cache, whose masks follow the kinds of the model's layers.

        Raises:
            GenError: attention depends on the number of slots in use.
        """
        require_followed(self.config, slots)
        cache = self._new_cache(slots)
        if (narrowest(self.windows) or slots) < slots:
            cache.windows = self.windows
        return cache

    @mirrored
    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, cache: SlotCache, keep: int = 0) -> Tensor:
        knows_causal = self._lean is not None or self._knows_causal
        needs_mask = cache.whole or self.is_batch_invariant or not knows_causal
        announce = cache.at if needs_mask else cache.needed
        return self._logits(tokens, positions, announce(positions, self.dtype), cache, keep)

    @mirrored
    @torch.no_grad()
    def forward_tree(
        self, tokens: Tensor, positions: Tensor, parents: Tensor, cache: SlotCache
    ) -> Tensor:
        """See ``TreeModel``."""
        mask = cache.tree(positions, parents, self.dtype)
        return self._logits(tokens, positions, mask, cache)

    @mirrored
    @torch.no_grad()
    def forward_superposed(
        self, tokens: Tensor, weights: Tensor, positions: Tensor, cache: SlotCache
    ) -> Tensor:
        """See ``SuperposedModel``. The module's own forward runs: the lean one takes token ids."""
        parts = [self.embedded(ids, positions) for ids in tokens.unbind(-1)]
        mixed = (torch.stack(parts, -1) * weights[..., None, :].to(parts[0])).sum(-1)
        mask = cache.at(positions, self.dtype)
        return self._of_module({"inputs_embeds": mixed}, positions, mask, cache)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return self.config.num_hidden_layers

    @property
    def input_embeddings(self) -> torch.nn.Embedding:
        """Table of the token embeddings."""
        return self.model.get_input_embeddings()

    @property
    def output_weight(self) -> Tensor:
        """Matrix [V, D] that makes logits of the last hidden states.

        Raises:
            GenError: the layer has no such matrix, only a quantised one that nothing else reads.
        """
        weight = self.model.get_output_embeddings().weight
        if not weight.dtype.is_floating_point:
            raise GenError(
                "the drafter reads the matrix of the output head, which is quantised by"
                " bitsandbytes; expected a quantization without the head, or one of torchao"
            )
        return weight

    def rotations(self, states: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """See ``SharedModel``.

        Raises:
            GenError: the network has no rotary embedding, or several.
        """
        found = [m for name, m in self.model.named_modules() if name.endswith("rotary_emb")]
        if len(found) != 1:
            raise GenError(
                f"{type(self.model).__name__} has {len(found)} rotary embeddings; expected one, by"
                " which a drafter reads its keys"
            )
        return found[0](states, positions)

    def with_layers(self, layers: Sequence[int]) -> Self:
        """See ``LayeredModel``."""
        return self.with_network(keep_layers(self.model, layers, self.num_layers))

    def with_network(self, model: torch.nn.Module) -> Self:
        """See ``SharedModel``. The other network runs without graphs, and with a mask in every call
        that its layers may read.

        Raises:
            GenError: other processes have parts of the network and repeat its calls alone.
        """
        if self.lead is not None:
            raise GenError(
                "the sampler runs another network of the layers of a model with tp, which jobs and"
                " the server do not tell its other processes; expected another sampler"
            )
        other = copy.copy(self)
        other.model, other.config = model, model.config.get_text_config()
        other.vocab_size = other.config.vocab_size
        other._lean, other._knows_causal = LeanLlama.of(model), False
        other.graphs = other.captured = None
        if self.product is not None:
            other.make_batch_invariant(self.product)
        other.takes_block_masks = attention_implementation(other.config) == "flex_attention"
        return other

    def check_layers(self, layers: Sequence[str]) -> None:
        """See ``HiddenStateModel``."""
        names = [name for name, _ in self.model.named_modules() if name]
        for layer in layers:
            if layer not in names:
                raise unknown("layer", layer, names, "hidden_layers")

    def _taps(self, layers: Sequence[str]) -> dict[str, int] | None:
        """Number layers as the fast forward does; None where it does not have all of them."""
        if self._lean is None:
            return None
        known = {f"model.layers.{n}": n for n in range(self.num_layers)}
        known["model.norm"] = self.num_layers
        return {name: known[name] for name in layers} if known.keys() >= set(layers) else None

    @mirrored
    @torch.no_grad()
    def forward_with_hidden_states(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        layers: Sequence[str],
        parents: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """See ``HiddenStateModel``. The module's own forward runs where the fast one lacks one of
        the layers."""
        if parents is None:
            mask = cache.at(positions, self.dtype)
        else:
            mask = cache.tree(positions, parents, self.dtype)
        numbers = self._taps(layers)
        if numbers is not None:
            taps: dict[int, Tensor | None] = dict.fromkeys(numbers.values())
            logits = self._logits(tokens, positions, mask, cache, taps=taps)
            return logits, {name: taps[n] for name, n in numbers.items()}
        states: dict[str, Tensor] = {}

        def note(name: str):
            def hook(module, inputs, output):
                states[name] = output[0] if isinstance(output, tuple) else output

            return hook

        modules = {name: self.model.get_submodule(name) for name in layers}
        hooks = [module.register_forward_hook(note(name)) for name, module in modules.items()]
        try:
            logits = self._of_module(self._inputs(tokens, positions), positions, mask, cache)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, states


class MaskedLM(LanguageModel):
    """Masked language model: full attention over the canvas. Logits at i are about
    position i, or about i + 1 if its config says ``shifted``. An architecture whose condition has a
    fixed length takes no padding."""

    passes = ("forward", "forward_with_states", "part")
    _tables = None  # of the lean forward

    @property
    def shift(self) -> int:
        return int(config_field(self.config, "shifted", False))

    @property
    def ragged(self) -> bool:
        return config_field(self.config, "prefix_length") is None

    @torch.no_grad()
    def forward(
        self, ids: Tensor, canvas_length: int, left_padding: Tensor | None = None
    ) -> Tensor:
        return self._run(ids, canvas_length + self.shift, left_padding)[:, :canvas_length]

    def _run(
        self,
        ids: Tensor,
        keep: int,
        left_padding: Tensor | None,
        taps: dict[int, Tensor | None] | None = None,
    ) -> Tensor:
        """Return logits of the last ``keep`` columns, or all for 0; ``taps`` as ``_logits``."""
        width = ids.shape[1]
        require_within(self.windows, width, self.config.model_type)
        at = torch.arange(width, device=ids.device)[None].expand_as(ids)
        at, hidden = (
            (at, None)
            if left_padding is None
            else (
                (at - left_padding[:, None]).clamp_min(0),
                (at < left_padding[:, None])[:, None, None],
            )
        )
        inputs = self._inputs(ids, at)
        if self._lean is not None:
            if self._tables is None or len(self._tables[0]) < width:
                self._tables = self._lean.tables(width)
            mask = None if hidden is None else hide(hidden, self.dtype)
            if taps is not None:
                attend = attend_among(mask)
                return self._lean.run(ids, at, self._tables, attend, keep, taps)
        elif self.takes_block_masks:
            seen = torch.ones_like(ids, dtype=torch.bool) if hidden is None else ~hidden[:, 0, 0]
            mask = blocks_among(seen, width)
        else:
            mask = torch.zeros(1, 1, width, width, dtype=self.dtype, device=ids.device).expand(
                len(ids), -1, -1, -1
            )
            mask = mask if hidden is None else mask + hide(hidden, self.dtype)
        if taps is None:
            return self._over_canvas(inputs, at, mask, keep)
        out = self.model(
            **inputs,
            attention_mask=mask,
            position_ids=at,
            use_cache=False,
            logits_to_keep=keep,
            output_hidden_states=True,
        )
        taps[self.config.num_hidden_layers] = out.hidden_states[-1]  # behind the last norm
        return out.logits

    def _over_canvas(
        self, inputs: dict[str, Tensor], positions: Tensor, mask: Mask | None, keep: int
    ) -> Tensor:
        """Run ``canvas_network``, as a graph where there are graphs."""
        if self.graphs is None:
            return self.canvas_network(inputs, positions, mask, self._tables, keep)
        return self.graphs.over_canvas(self, inputs, positions, mask, self._tables, keep)

    def canvas_network(
        self,
        inputs: dict[str, Tensor],
        positions: Tensor,
        mask: Mask | None,
        tables: Any,
        keep: int,
    ) -> Tensor:
        """See ``ModelAdapter``."""
        if self._lean is not None:
            ids = inputs["input_ids"]
            return self._lean.run(ids, positions, tables, attend_among(mask), keep)
        return self.model(
            **inputs,
            attention_mask=mask,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
        ).logits

    @property
    def digest(self) -> str:
        """Digest of the weights, by which what was trained for this model knows it."""
        return digest_of(self.model)

    @torch.no_grad()
    def forward_with_states(
        self, ids: Tensor, canvas_length: int, left_padding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See ``AdjustableModel``."""
        last = self.config.num_hidden_layers
        taps: dict[int, Tensor | None] = {last: None}
        logits, keep = self._run(ids, 0, left_padding, taps), canvas_length + self.shift
        states = taps[last]
        assert states is not None, "the last norm always runs"
        return logits[:, -keep:][:, :canvas_length], states

    @torch.no_grad()
    def logits_of(self, hidden: Tensor) -> Tensor:
        """See ``AdjustableModel``."""
        return self.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def part(
        self,
        tokens: Tensor,
        positions: Tensor,
        seen: Tensor,
        cache: SlotCache,
        keep: int,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Return logits of some positions against a cache; see ``CacheableModel``."""
        return self._logits(
            tokens, positions, self._mask(positions, seen, cache, rows), cache, keep
        )

    def _mask(self, positions: Tensor, seen: Tensor, cache: SlotCache, rows: Tensor | None) -> Mask:
        return cache.among(positions, self.dtype, seen, rows)


class BlockLM(LanguageModel):
    """Language model whose attention is full inside blocks and causal across them.

    ``block_length`` is its config's. Logits at i are about position i.
    """

    @property
    def block_length(self) -> int:
        return self.config.block_length

    @torch.no_grad()
    def forward(self, tokens: Tensor, positions: Tensor, last: Tensor, cache: SlotCache) -> Tensor:
        return self._logits(tokens, positions, cache.at(positions, self.dtype, last), cache)


class _Latent(ModelAdapter):
    """Base class of the adapters of the embedded architecture of latents."""

    def __init__(self, model: torch.nn.Module):
        self.model, self.config, self.head = model.eval(), model.config, model.head


class CausalLatentLM(_Latent):
    """Causal model of latents.

    Vectors [B, L, D] of words or latents at absolute positions [B, L] against a cache become
    conditioning vectors [B, L, D] of the positions after them.
    """

    def new_cache(self, slots: int) -> SlotCache:
        return SlotCache(self.config.num_hidden_layers, slots)

    @torch.no_grad()
    def embed_words(self, ids: Tensor) -> Tensor:
        return self.model.embed_words(ids)

    @torch.no_grad()
    def embed_latents(self, latents: Tensor) -> Tensor:
        return self.model.embed_latents(latents.to(self.dtype))

    @torch.no_grad()
    def forward(self, inputs: Tensor, positions: Tensor, cache: SlotCache) -> Tensor:
        return self.model.run(inputs, positions, cache.at(positions, self.dtype), cache)


class MaskedLatentLM(_Latent):
    """Masked model of latents.

    Words [B, P] and a canvas of latents [B, T, C] with NaN at masked positions become conditioning
    vectors [B, T, D].
    """

    passes = ("forward", "part")

    @property
    def counts_known(self) -> bool:
        """True if the guidance grows with the positions known after the step."""
        return isinstance(self.model, CountsKnown)

    @torch.no_grad()
    def forward(self, words: Tensor, canvas: Tensor, num_known: Tensor | None = None) -> Tensor:
        """Compute conditioning vectors; ``num_known`` long [B] goes to a network that counts."""
        more = {"num_known": num_known} if self.counts_known else {}
        return self.model(words, canvas.to(self.dtype), **more)

    @property
    def prefix_length(self) -> int:
        """Positions that the network has before the canvas."""
        return self.model.prefix_columns

    def new_cache(self, slots: int) -> LatentCache:
        """Return an empty cache of encoder and decoder.

        Raises:
            GenError: the network does not compute some of its positions.
        """
        if not isinstance(self.model, EncoderDecoder):
            raise GenError(
                f"{type(self.model).__name__} keeps no keys and values between forward passes;"
                " expected an encoder and a decoder of latents (EncoderDecoder), or no cache"
            )
        return LatentCache(self.model.depths, slots)

    @torch.no_grad()
    def part(
        self,
        words: Tensor,
        latents: Tensor,
        compute: Tensor,
        encoded: Tensor,
        seen: Tensor,
        cache: LatentCache,
        rows: Tensor | None = None,
        num_known: Tensor | None = None,
    ) -> Tensor:
        """Compute conditioning vectors of some positions; see ``conditioning_part``."""
        latents = latents.to(self.dtype)
        z = conditioning_part(self.model, words, latents, compute, encoded, seen, cache, rows)
        more = {"num_known": num_known} if self.counts_known else {}
        return self.model.finish(z, ~latents.isnan().any(-1), **more)

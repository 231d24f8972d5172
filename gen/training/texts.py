"""Text models that are trained from nothing on a tokenizer of one's own.

They are written in published layouts: a causal one as a Llama of transformers, a masked one as
LLaDA. Both begin a text behind the token ``END`` and the prompt, if there is one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from gen.core.errors import GenError, bad_value
from gen.core.files import put, put_text
from gen.models.load.libraries import transformers
from gen.models.load.locate import save_model
from gen.recipes.common.grid_models import WEIGHTS, hidden_positions
from gen.training.config import NewModel, TrainingConfig
from gen.training.data import TokenData
from gen.training.task import MODEL, Task, Written

OBJECTIVES = ("causal", "masked")
LLADA_NAMES = (  # of weights, from those of transformers
    (r"^model\.embed_tokens\.", "model.transformer.wte."),
    (r"^model\.norm\.", "model.transformer.ln_f."),
    (r"^lm_head\.", "model.transformer.ff_out."),
    (r"^model\.layers\.(\d+)\.", r"model.transformer.blocks.\1."),
    (r"\.self_attn\.([qkv]_proj)\.", r".\1."),
    (r"\.self_attn\.o_proj\.", ".attn_out."),
    (r"\.mlp\.gate_proj\.", ".ff_proj."),
    (r"\.mlp\.up_proj\.", ".up_proj."),
    (r"\.mlp\.down_proj\.", ".ff_out."),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ff_norm."),
)
Pair = tuple[Tensor, Tensor]  # token ids of a prompt, and of the text behind it


class TextTask(Task):
    """New causal or masked language model.

    The loss is that of the text behind its prompt; a masked model fills a canvas as long as the
    longest text, whose last positions hold the end.
    """

    casts = True

    def __init__(self, config: TrainingConfig, data: TokenData):
        if config.objective not in OBJECTIVES:
            raise bad_value("objective", config.objective, "causal or masked, for texts")
        if config.lora is not None:
            raise bad_value("lora", config.lora, "none: the model is new")
        assert isinstance(config.model, NewModel)
        self.config, self.data = config, data
        self.tokenizer = data.encoder.frontend.tokenizer
        self.end = self.tokenizer.eos_token_id
        self.heads = [self._head(None if c is None else c["text"]) for c in data.conditions]
        self.nothing = self._head(None)
        self.canvas = min(config.max_length, max(map(len, data.tokens)))
        self.room = max(map(len, self.heads))
        if self.room > config.max_length:
            raise GenError(
                f"a prompt of {data.folder} has {self.room} tokens; expected at most"
                f" {config.max_length}, the max_length"
            )
        self.mask = len(self.tokenizer)  # the last id of a masked model
        torch.manual_seed(config.seed)
        self.model: Any = self._new(config.model)

    def _head(self, prompt: str | None) -> Tensor:
        """Return what stands before a text: ``END``, and its prompt."""
        return torch.tensor(self.tokenizer(prompt or "")["input_ids"], dtype=torch.long)

    @property
    def is_masked(self) -> bool:
        return self.config.objective == "masked"

    def _new(self, asked: NewModel) -> nn.Module:
        positions = self.room + self.canvas if self.is_masked else 2 * self.config.max_length
        llama = transformers().LlamaConfig(
            vocab_size=len(self.tokenizer) + self.is_masked,
            hidden_size=asked.width,
            intermediate_size=asked.width * 8 // 3 // 32 * 32,
            num_hidden_layers=asked.layers,
            num_attention_heads=asked.width // 32,
            num_key_value_heads=asked.width // 32,
            max_position_embeddings=positions,
            tie_word_embeddings=asked.tied,
            bos_token_id=self.end,
            eos_token_id=self.end,
        )
        return transformers().LlamaForCausalLM(llama)

    def loss(self, forward: Any, rows: Tensor, seed: int, drop: float) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        dropped = (torch.rand(len(rows), generator=generator) < drop).tolist()
        heads = [self.nothing if d else self.heads[r] for r, d in zip(rows, dropped, strict=True)]
        pairs = list(zip(heads, [self.data.tokens[r] for r in rows], strict=True))
        device = next(self.model.parameters()).device
        if self.is_masked:
            return self._masked(forward, pairs, generator, device)
        return next_token_loss(forward, pairs, self.config.max_length, device)

    def _masked(
        self, forward: Any, pairs: Sequence[Pair], generator: torch.Generator, device: torch.device
    ) -> Tensor:
        """Return the loss of masked positions of the canvas, before which prompts are padded."""
        texts = torch.full((len(pairs), self.canvas), self.end)
        for row, (_, text) in zip(texts, pairs, strict=True):
            row[: len(text)] = text[: self.canvas]
        hidden = hidden_positions(tuple(texts.shape), generator)
        rows = [
            torch.cat([head, row])
            for (head, _), row in zip(pairs, texts.masked_fill(hidden, self.mask), strict=True)
        ]
        ids = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
        padding = ids.shape[1] - torch.tensor([len(r) for r in rows], device=device)
        at = torch.arange(ids.shape[1], device=device)
        sees = torch.zeros(len(ids), 1, 1, ids.shape[1], dtype=WEIGHTS, device=device)
        sees.masked_fill_((at < padding[:, None])[:, None, None], torch.finfo(WEIGHTS).min)
        logits = forward(
            input_ids=ids,
            position_ids=(at - padding[:, None]).clamp_min(0),
            attention_mask=sees.expand(-1, -1, ids.shape[1], -1),
            logits_to_keep=self.canvas,
            use_cache=False,
        ).logits
        hidden, texts = hidden.to(device), texts.to(device)
        return F.cross_entropy(logits[hidden].float(), texts[hidden])

    def save(self, out: Path) -> Written:
        folder = out / MODEL
        folder.mkdir(parents=True, exist_ok=True)
        if self.is_masked:
            save_as_llada(self.model, folder, self.mask, 2 * self.canvas)
        else:
            save_model(self.model, folder)
        self.tokenizer.save_pretrained(folder)
        return Written(str(folder))


def next_token_loss(
    forward: Any, pairs: Sequence[Pair], max_length: int, device: torch.device
) -> Tensor:
    """Return the mean loss of the tokens behind prompts.

    Args:
        forward: causal language model of transformers.
        pairs: token ids of every prompt, long [P], and of its text, long [T].
        max_length: tokens of a sequence; longer ones are cut.
        device: device of the model.
    """
    rows = []
    for head, text in pairs:
        ids = torch.cat([head, text])
        labels = ids.clone()
        labels[: max(1, len(head))] = -100  # nothing stands before the first token
        rows.append((ids[:max_length], labels[:max_length]))
    ids = pad_sequence([i for i, _ in rows], batch_first=True)
    labels = pad_sequence([t for _, t in rows], batch_first=True, padding_value=-100)
    seen = pad_sequence([torch.ones_like(i) for i, _ in rows], batch_first=True)
    out = forward(input_ids=ids.to(device), attention_mask=seen.to(device), use_cache=False)
    logits = out.logits[:, :-1].float().flatten(0, 1)
    return F.cross_entropy(logits, labels[:, 1:].flatten().to(device), ignore_index=-100)


def save_as_llada(model: Any, folder: Path, mask: int, positions: int) -> None:
    """Write a masked model in LLaDA's layout.

    Args:
        model: Llama of transformers.
        folder: folder to write into.
        mask: token id of the mask.
        positions: of prompt and answer, of which half are the answer's by default.
    """
    llama, weights = model.config, {}
    for name, value in model.state_dict().items():
        for pattern, other in LLADA_NAMES:
            name = re.sub(pattern, other, name)
        weights[name] = value.detach().cpu().clone().contiguous()
    if llama.tie_word_embeddings:
        weights.pop("model.transformer.ff_out.weight", None)
    config = {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "d_model": llama.hidden_size,
        "n_heads": llama.num_attention_heads,
        "n_kv_heads": llama.num_key_value_heads,
        "n_layers": llama.num_hidden_layers,
        "mlp_hidden_size": llama.intermediate_size,
        "vocab_size": llama.vocab_size,
        "embedding_size": llama.vocab_size,
        "max_sequence_length": llama.max_position_embeddings,
        "max_position_embeddings": positions,
        "rms_norm_eps": llama.rms_norm_eps,
        "rope_theta": llama.rope_parameters["rope_theta"],
        "weight_tying": llama.tie_word_embeddings,
        "block_type": "llama",
        "layer_norm_type": "rms",
        "activation_type": "silu",
        "rope": True,
        "eos_token_id": llama.eos_token_id,
        "mask_token_id": mask,
    }
    path = folder / "model.safetensors"
    put(path, lambda temporary: save_file(weights, temporary, {"format": "pt"}))
    put_text(folder / "config.json", json.dumps(config, indent=2) + "\n")

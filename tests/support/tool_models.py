"""Tiny causal models whose chat templates take tools, and functions for them. Not a test.

The templates are short forms of those of Qwen, Mistral and Llama 3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny_checkpoints
import torch
from chat_templates import SPECIALS, byte_tokenizer
from published import save_quietly

WORDS = [*SPECIALS, "[TOOL_CALLS]"]
TEMPLATES = {
    "hermes": (
        "{% if tools %}Tools:{% for t in tools %} {{ t | tojson }}{% endfor %}\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
        "\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "mistral": (
        "{{ bos_token }}{% if tools %}Tools: {{ tools | tojson }}{% endif %}"
        "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS] ["
        "{% for c in m.tool_calls %}{% if c.id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}"
        '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }},'
        ' "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]{{ eos_token }}'
        "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
        "{{ raise_exception('ids have nine letters') }}{% endif %}R:{{ m.content }}"
        "{% else %}[INST] {{ m.content }} [/INST]{% endif %}{% endfor %}"
    ),
    "llama3": (
        "{% if tools %}Respond in the format "
        '{"name": function name, "parameters": dictionary of argument name and its value}.'
        "{{ tools | tojson }}{% endif %}"
        "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}"
        '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
        "{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "none": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "no system turn": (
        "{% for m in messages %}{% if m.role not in ['user', 'assistant'] %}"
        "{{ raise_exception('user and assistant alone') }}{% endif %}"
        "[INST]{{ m.content }}[/INST]{% endfor %}"
    ),
}


def function(name: str, required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    """A tool as OpenAI's API has it; all properties are required unless some are named."""
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(required or properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema}}


WEATHER = function("get_weather", city={"enum": ["Oslo", "Rome"]}, unit={"enum": ["C", "F"]})
ADD = function("add", a={"type": "integer"}, b={"type": "integer", "minimum": 10, "maximum": 99})
NOW = {"type": "function", "function": {"name": "now"}}
TOOLS = [WEATHER, ADD, NOW]


def tokenizer_of(template: str) -> Any:
    """A byte-level tokenizer with a chat template of ``TEMPLATES``."""
    return byte_tokenizer(WORDS, chat_template=TEMPLATES[template], eos_token="<|im_end|>")


def save_model(folder: Path, template: str, seed: int = 0, positions: int = 4096) -> Path:
    """Save a random Llama with a token per byte and a chat template of ``TEMPLATES``."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = tokenizer_of(template)
    torch.manual_seed(seed)
    shape = tiny_checkpoints.SHAPE | {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": positions,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": 0.2,
    }
    save_quietly(LlamaForCausalLM(LlamaConfig(num_key_value_heads=1, **shape)), folder)
    save_quietly(tokenizer, folder)
    return folder


SUM = function("add", a={"type": "integer"}, b={"type": "integer"})
SUM_TASK = "add 1 2 3 4"


def save_agent(folder: Path) -> Path:
    """Save a small Llama that has learnt one conversation by heart: it adds four numbers by three
    calls of ``SUM``, and then says the sum."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer, total = tokenizer_of("hermes"), 1
    turns: list[dict[str, Any]] = [{"role": "user", "content": SUM_TASK}]
    for number in (2, 3, 4):
        call = {"function": {"name": "add", "arguments": {"a": total, "b": number}}}
        turns.append({"role": "assistant", "content": "", "tool_calls": [call]})
        total += number
        turns.append({"role": "tool", "content": str(total)})
    turns.append({"role": "assistant", "content": str(total)})
    text = tokenizer.apply_chat_template(turns, tools=[SUM], tokenize=False)
    ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
    torch.manual_seed(0)
    shape = tiny_checkpoints.SHAPE | {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "max_position_embeddings": 2048,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    save_quietly(model.eval(), folder)
    save_quietly(tokenizer, folder)
    return folder

"""Chat templates of twenty kinds, conversations, and a byte-level tokenizer that has their special
tokens. Not a test.

The templates differ in their rules: whether they take a system turn, check the order of turns, trim
contents, begin with bos, close answers with eos, rename roles, or take contents as lists.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SPECIALS = [
    "<pad>", "<s>", "</s>", "<mask>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "[INST]",
    "[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>",
    "<end_of_turn>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|turn|>",
    "<|end_of_turn|>", "<image>",
]  # fmt: skip
SIZE = 256 + len(SPECIALS)

EVERY_TURN = "{% for m in messages %}"
END = "{% endfor %}"
ALTERNATE = (
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
)
SYSTEM_FIRST = (
    "{% if messages[0]['role'] == 'system' %}{% set about = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set about = '' %}{% set turns = messages %}"
    "{% endif %}"
)
PARTS = (
    "{% for c in m['content'] %}{% if c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}"
)
EITHER = "{% if m['content'] is string %}{{ m['content'] }}{% else %}" + PARTS + "{% endif %}"


def _go(text: str) -> str:
    """What begins the answer."""
    return "{% if add_generation_prompt %}" + text + "{% endif %}"


CHATML = "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n"
HEADER = (
    "<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n{{ m['content'] | trim }}<|eot_id|>"
)
GEMMA_ROLE = "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"

TEMPLATES = {
    "chatml": EVERY_TURN + CHATML + END + _go("<|im_start|>assistant\n"),
    "chatml, usual system turn": (
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nAnswer well.<|im_end|>\n"
        "{% endif %}" + EVERY_TURN + CHATML + END + _go("<|im_start|>assistant\n")
    ),
    "chatml, separator": EVERY_TURN
    + "<|im_start|>{{ m['role'] }}<|im_sep|>{{ m['content'] }}<|im_end|>"
    + END
    + _go("<|im_start|>assistant<|im_sep|>"),
    "llama 2": SYSTEM_FIRST
    + "{% for m in turns %}"
    + ALTERNATE
    + "{% if m['role'] == 'user' %}{{ bos_token }}[INST] {% if loop.first and about %}<<SYS>>\n"
    "{{ about }}\n<</SYS>>\n\n{% endif %}{{ m['content'].strip() }} [/INST]{% else %}"
    " {{ m['content'].strip() }} {{ eos_token }}{% endif %}" + END,
    "llama 3": "{{ bos_token }}"
    + EVERY_TURN
    + HEADER
    + END
    + _go("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "llama 3, dated": "{{ bos_token }}"
    + SYSTEM_FIRST
    + "<|start_header_id|>system<|end_header_id|>\n\nDate: {{ date_string or '1 May' }}\n\n"
    "{{ about | trim }}<|eot_id|>{% for m in turns %}"
    + HEADER
    + END
    + _go("<|start_header_id|>assistant<|end_header_id|>\n\n"),
    "mistral": NO_SYSTEM
    + "{{ bos_token }}"
    + EVERY_TURN
    + ALTERNATE
    + "{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]{% else %}"
    "{{ m['content'] }}{{ eos_token }}{% endif %}" + END,
    "mistral, system in the last turn": "{{ bos_token }}"
    + SYSTEM_FIRST
    + "{% for m in turns %}"
    + ALTERNATE
    + "{% if m['role'] == 'user' %}[INST]{% if loop.last and about %}{{ about }}\n\n{% endif %}"
    "{{ m['content'] }}[/INST]{% else %}{{ m['content'] | trim }}{{ eos_token }}{% endif %}" + END,
    "gemma": "{{ bos_token }}"
    + NO_SYSTEM
    + EVERY_TURN
    + ALTERNATE
    + GEMMA_ROLE
    + "<start_of_turn>{{ role }}\n{{ m['content'] | trim }}<end_of_turn>\n"
    + END
    + _go("<start_of_turn>model\n"),
    "gemma, texts and lists": "{{ bos_token }}"
    + EVERY_TURN
    + GEMMA_ROLE
    + "<start_of_turn>{{ role }}\n"
    + EITHER
    + "<end_of_turn>\n"
    + END
    + _go("<start_of_turn>model\n"),
    "phi": EVERY_TURN
    + "<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n"
    + END
    + "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    "zephyr": EVERY_TURN
    + "<|{{ m['role'] }}|>\n{{ m['content'] }}{{ eos_token }}\n"
    + END
    + _go("<|assistant|>\n"),
    "vicuna": SYSTEM_FIRST + "{{ bos_token }}{{ about or 'A talk of two.' }} {% for m in turns %}"
    "{% if m['role'] == 'user' %}USER: {{ m['content'].strip() }} {% else %}"
    "ASSISTANT: {{ m['content'].strip() }}{{ eos_token }}{% endif %}" + END + _go("ASSISTANT:"),
    "alpaca": SYSTEM_FIRST + "{{ (about ~ '\n\n') if about else '' }}{% for m in turns %}"
    "{% if m['role'] == 'user' %}### Instruction:\n{{ m['content'] }}\n\n{% else %}"
    "### Response:\n{{ m['content'] }}{{ eos_token }}\n\n{% endif %}"
    + END
    + _go("### Response:\n"),
    "deepseek": "{{ bos_token }}"
    + EVERY_TURN
    + "{% if m['role'] == 'user' %}User: {{ m['content'] }}\n\n{% elif m['role'] == 'system' %}"
    "{{ m['content'] }}\n\n{% else %}Assistant: {{ m['content'] }}{{ eos_token }}{% endif %}"
    + END
    + _go("Assistant:"),
    "deepseek, thoughts": "{{ bos_token }}{% set ns = namespace(about='') %}"
    "{% for m in messages if m['role'] == 'system' %}{% set ns.about = ns.about ~ m['content'] %}"
    "{% endfor %}{{ ns.about }}{% for m in messages if m['role'] != 'system' %}"
    "{% if m['role'] == 'user' %}<|user|>{{ m['content'] }}{% else %}"
    "<|assistant|>{{ m['content'].split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    + END
    + _go("<|assistant|><think>\n"),
    "command-r": "{{ bos_token }}"
    + SYSTEM_FIRST
    + "{% if about %}<|turn|><|system|>{{ about }}<|end_of_turn|>{% endif %}"
    "{% for m in turns %}"
    + ALTERNATE
    + "<|turn|>{{ '<|user|>' if m['role'] == 'user' else '<|assistant|>' }}"
    "{{ m['content'].strip() }}<|end_of_turn|>" + END + _go("<|turn|><|assistant|>"),
    "openchat": "{{ bos_token }}"
    + EVERY_TURN
    + "Good {{ m['role'] | title }}: {{ m['content'] }}<|end_of_turn|>"
    + END
    + _go("Good Assistant:"),
    "lists alone": "{{ bos_token }}"
    + EVERY_TURN
    + "{{ m['role'] | capitalize }}:"
    + PARTS
    + "<|end|>\n"
    + END
    + _go("Assistant:"),
    "texts and lists, one user turn at most": EVERY_TURN
    + "{% if loop.index > 2 %}{{ raise_exception('too many turns') }}{% endif %}"
    + "<|turn|>{{ m['role'] }}\n"
    + EITHER
    + "<|end|>"
    + END
    + _go("<|turn|>assistant\n"),
}
# forms of a content that templates take, where it is not the text alone
FORMS = {
    "gemma, texts and lists": ("text", "parts"),
    "texts and lists, one user turn at most": ("text", "parts"),
    "lists alone": ("parts",),
}


def turn(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


CONVERSATIONS = {
    "one turn": [turn("user", " Why is the sky blue? ")],
    "system": [turn("system", "Be brief."), turn("user", "Why?")],
    "three turns": [
        turn("user", "Hello"),
        turn("assistant", "<think>\nwho?</think> Hi there "),
        turn("user", "And now?"),
    ],
    "special text": [turn("user", "\u00e9\u4f60\u597d \U0001f600 <|im_end|>\n</s>[INST] <s>")],
    "lists": [
        turn("user", [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]),
    ],
}


def as_parts(content: Any) -> Any:
    """A content as a list of parts."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def as_text(content: Any) -> Any:
    """A content as one text."""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def in_form(name: str, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with contents in a form that the template of this name takes."""
    forms = FORMS.get(name, ("text",))
    if len(forms) == 2:
        return turns
    change = as_text if forms == ("text",) else as_parts
    return [turn(t["role"], change(t["content"])) for t in turns]


def byte_tokenizer(specials: Sequence[str] = SPECIALS, begins: bool = True, **more: Any):
    """A byte-level tokenizer without merges. ``begins``: texts begin with bos."""
    from transformers import PreTrainedTokenizerFast

    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {w: i for i, w in enumerate([*specials, *alphabet])}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    if begins:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab["<s>"])]
        )
    inner.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        **{"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
        | more,
    )

"""References in the values of a job file: ``${seed}`` for another key, ``${oc.env:NAME}`` for an
environment variable that the command line allows.

Prompts are texts: a ``${`` in them stands for itself. Elsewhere ``\\${`` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from gen.config.yaml_text import ALIASED
from gen.core.errors import GenError, shown

REFERENCE = re.compile(r"\\\$\{|\$\{([^{}$]*)\}|\$\{")
ENV = "oc.env"
LITERAL = "prompts"  # key whose values are texts of the user


class References:
    """References of one tree.

    Args:
        tree: keys of a job file, or of one override.
        allow_env: names of environment variables that may be read.
        where: origin of the tree, for messages.
    """

    def __init__(self, tree: Mapping[str, Any], allow_env: Collection[str], where: str):
        self.tree, self.allow_env, self.where, self.length = tree, allow_env, where, 0

    def resolved(self, value: Any, key: str = "") -> Any:
        """Return plain data with its references replaced.

        Raises:
            GenError: a reference to no key, to a list or a mapping, to another reference, or to
                an environment variable that is not allowed or not set.
        """
        if isinstance(value, str) and "${" in value:
            return self._text(value, key)
        if isinstance(value, Mapping):
            return {
                k: v if k == LITERAL else self.resolved(v, f"{key}.{k}" if key else str(k))
                for k, v in value.items()
            }
        if isinstance(value, list):
            return [self.resolved(v, f"{key}.{i}") for i, v in enumerate(value)]
        return value

    def _text(self, text: str, key: str) -> Any:
        whole = REFERENCE.fullmatch(text)
        if whole is not None and whole[1] is not None:
            return self._value(whole, text, key)
        return REFERENCE.sub(
            lambda m: "${" if m[0].startswith("\\") else str(self._value(m, text, key)), text
        )

    def _value(self, match: re.Match[str], text: str, key: str) -> Any:
        name, at = (match[1] or "").strip(), f"{key} in {self.where}"
        if not name:
            raise GenError(
                f"{at} is {shown(text)}; expected ${{KEY}} with the name of a key, or \\${{ for the"
                " text itself"
            )
        resolver, colon, argument = name.partition(":")
        if colon and resolver.strip() != ENV:
            raise GenError(
                f"{at} is {shown(text)}; expected ${{KEY}} or ${{{ENV}:NAME}}, and no other"
                " function"
            )
        value = self._environment(argument, at) if colon else self._key(name, at)
        self.length += len(str(value))
        if self.length > ALIASED:
            raise GenError(
                f"the references in {self.where} stand for {self.length:,} characters; expected at"
                f" most {ALIASED:,}"
            )
        return value

    def _environment(self, argument: str, at: str) -> str:
        name, comma, default = (part.strip() for part in argument.partition(","))
        if name not in self.allow_env:
            raise GenError(
                f"{at} asks for the environment variable {name!r}; expected --allow-env {name} on"
                " the command line, which allows it"
            )
        value = os.environ.get(name, default if comma else None)
        if value is None:
            raise GenError(
                f"{at} asks for the environment variable {name!r}, which is not set; expected a"
                " value, or a default as in ${oc.env:NAME,default}"
            )
        return value

    def _key(self, name: str, at: str) -> Any:
        value: Any = self.tree
        for part in name.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
                value = value[int(part)]
            else:
                raise GenError(
                    f"{at} refers to ${{{name}}}; expected the name of a key that is set"
                )
        if isinstance(value, (Mapping, list)) or (isinstance(value, str) and "${" in value):
            held = "another reference" if isinstance(value, str) else "several values"
            raise GenError(f"{at} refers to ${{{name}}}, which holds {held}; expected one value")
        return value


def escape(value: Any) -> Any:
    """Escape ``${`` in values that are no references, everywhere but in prompts."""
    if isinstance(value, str):
        return value.replace("${", "\\${") if "${" in value else value
    if isinstance(value, Mapping):
        return {k: v if k == LITERAL else escape(v) for k, v in value.items()}
    return [escape(v) for v in value] if isinstance(value, (list, tuple)) else value

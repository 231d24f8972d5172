"""References in the values of a job file: ``${seed}`` for another key, ``${oc.env:NAME}`` for an
environment variable that the command line allows.

Prompts are texts: a ``${`` in them stands for itself. Elsewhere ``\\${`` does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from typing import Any

from omegaconf import OmegaConf

from gen.config.yaml_text import ALIASED
from gen.core.errors import GenError, shown
from gen.core.plain import is_digits

REFERENCE = re.compile(r"\\\$\{|\$\{([^{}$]*)\}|\$\{")
ENV = "oc.env"
LITERAL = "prompts"  # key whose values are texts of the user


class References:
    """References of one tree. OmegaConf resolves them, once each is known to be harmless: to one
    value of a key, or to a variable that is allowed.

    Args:
        tree: keys of a job file, or of one override.
        allow_env: names of environment variables that may be read.
        where: origin of the tree, for messages.
        names_keys: references may name other keys of the tree.
    """

    def __init__(
        self,
        tree: Mapping[str, Any],
        allow_env: Collection[str],
        where: str,
        names_keys: bool = True,
    ):
        self.tree, self.allow_env, self.where, self.length = tree, allow_env, where, 0
        self.keys = tree if names_keys else {}

    def resolved(self) -> dict[str, Any]:
        """Return the tree as plain data with its references replaced.

        Raises:
            GenError: a reference to no key, to a list or a mapping, to another reference, or to
                an environment variable that is not allowed or not set.
        """
        if not self._check(self.tree, ""):
            return dict(self.tree)
        config = OmegaConf.create(_without_prompts(self.tree), flags={"allow_objects": True})
        return _with_prompts(OmegaConf.to_container(config, resolve=True), self.tree)

    def _check(self, value: Any, key: str) -> bool:
        """Check all references of a value; return True if there are any."""
        if isinstance(value, str):
            found = [self._check_one(match, value, key) for match in REFERENCE.finditer(value)]
            return bool(found)
        if isinstance(value, Mapping):
            named = [(f"{key}.{k}" if key else str(k), v) for k, v in value.items() if k != LITERAL]
        else:
            named = [(f"{key}.{i}", v) for i, v in enumerate(value)] if _is_list(value) else []
        return any([self._check(v, name) for name, v in named])

    def _check_one(self, match: re.Match[str], text: str, key: str) -> None:
        if match[0].startswith("\\"):
            return
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
        value: Any = self.keys
        for part in name.split("."):
            if isinstance(value, Mapping) and part in value:
                value = value[part]
            elif isinstance(value, list) and is_digits(part) and int(part) < len(value):
                value = value[int(part)]
            else:
                raise GenError(
                    f"{at} refers to ${{{name}}}; expected the name of a key that is set"
                )
        if isinstance(value, (Mapping, list)) or (isinstance(value, str) and "${" in value):
            held = "another reference" if isinstance(value, str) else "several values"
            raise GenError(f"{at} refers to ${{{name}}}, which holds {held}; expected one value")
        return value


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple))


def _without_prompts(value: Any) -> Any:
    """Return a tree whose prompts are None: they are texts, and may be many."""
    if isinstance(value, Mapping):
        return {k: None if k == LITERAL else _without_prompts(v) for k, v in value.items()}
    return [_without_prompts(v) for v in value] if _is_list(value) else value


def _with_prompts(value: Any, tree: Any) -> Any:
    """Return a resolved tree with the prompts of the tree it was made from."""
    if isinstance(tree, Mapping):
        return {k: tree[k] if k == LITERAL else _with_prompts(v, tree[k]) for k, v in value.items()}
    if _is_list(tree):
        return [_with_prompts(v, t) for v, t in zip(value, tree, strict=True)]
    return value


def escape(value: Any) -> Any:
    """Escape ``${`` in values that are no references, everywhere but in prompts."""
    if isinstance(value, str):
        return value.replace("${", "\\${") if "${" in value else value
    if isinstance(value, Mapping):
        return {k: v if k == LITERAL else escape(v) for k, v in value.items()}
    return [escape(v) for v in value] if isinstance(value, (list, tuple)) else value

"""What of a tool's JSON schema a call can be kept to."""

from __future__ import annotations

import re
from typing import Any

# Keywords that no grammar of the engine enforces (docs/protocol.md, "Grammars"), so that a form with them is refused.
_UNENFORCED = {
    "uniqueItems", "propertyNames", "dependentRequired", "dependentSchemas", "dependencies", "if", "then", "else",
    "not", "contains", "minContains", "maxContains", "unevaluatedItems",
}  # fmt: skip
_LOOKS_AROUND = re.compile(r"\(\?<?[=!]")
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("additionalProperties", "items", "additionalItems", "prefixItems", "anyOf", "oneOf", "allOf")


def loosened(schema: Any) -> Any:
    """A schema without keywords that cannot be enforced. In constants, and as names of properties, they stay.

    Raises RecursionError for what is nested too deeply.
    """
    if isinstance(schema, list):
        return [loosened(inner) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _UNENFORCED or (key == "pattern" and isinstance(value, str) and _LOOKS_AROUND.search(value)):
            continue
        if key in _BY_NAME and isinstance(value, dict):
            made[key] = {name: loosened(inner) for name, inner in value.items()}
        else:
            made[key] = loosened(value) if key in _SCHEMAS else value
    return made

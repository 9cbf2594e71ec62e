"""A JSON schema of policy files, for editors and for whoever writes policies with programs."""

from __future__ import annotations

from typing import Any

from autoprec.policies import Policy

__all__ = ["policy_schema"]


def policy_schema() -> dict[str, Any]:
    """JSON Schema 2020-12 of a policy file, made from the models that read it.

    It says less than they do: not that a pin must be among the formats, nor that an interval fits in its window.
    """
    schema = Policy.model_json_schema()
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_untitled(schema),
        "title": "autoprec policy",
        "description": "What autoprec is told: candidates, limits and rules. See docs/policies.md.",
    }


def _untitled(part: Any) -> Any:
    """Without the titles that pydantic derives from names, which say nothing new."""
    if isinstance(part, dict):
        # A title that is a text is pydantic's; one that is a mapping would be a key of ours.
        return {k: _untitled(v) for k, v in part.items() if k != "title" or not isinstance(v, str)}
    return [_untitled(p) for p in part] if isinstance(part, list) else part

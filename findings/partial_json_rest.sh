#!/usr/bin/env bash
# What does pydantic-core's from_json do with text after a complete document, if it may be partial?
#
# Expected: `allow_partial` forgives an end that is missing, and text that follows is an error, as it is without it. Seen:
# with `allow_partial` what follows a complete document is dropped without a word, whatever it is, while an error inside
# the document still raises. So a call's arguments behind which a model wrote more come out whole, and nothing says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet pydantic-core==2.47.0
"$folder/env/bin/python" - <<'PYTHON'
import pydantic_core
from pydantic_core import from_json

print("pydantic-core", pydantic_core.__version__)


def read(text, allow_partial):
    """The document, or "error"."""
    try:
        return from_json(text, allow_partial=allow_partial)
    except ValueError as error:
        print(f"    {error}")
        return "error"


for text, strict, partial in (
    ('{"a": 1}', {"a": 1}, {"a": 1}),
    ('{"a": 1', "error", {"a": 1}),
    ('{"a": 1} and more', "error", {"a": 1}),
    ('{"a": 1}{"b": 2}', "error", {"a": 1}),
    ('{"a": 1, b}', "error", "error"),
):
    seen = [read(text, False), read(text, "trailing-strings")]
    print(f"{text}: {seen[0]} and, where it may be partial, {seen[1]}")
    assert seen == [strict, partial], "what from_json does with a rest has changed"
PYTHON

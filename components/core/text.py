"""Removal of terminal escapes from the output of untrusted programs."""

import re

ESCAPE = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])")


def readable(text: str, limit: int) -> str:
    """Return `text` without terminal escapes and control characters.

    If the result has more than `limit` characters, its middle is replaced by a note with the number of
    removed characters.
    """
    text = ESCAPE.sub("", text) if "\x1b" in text else text
    if not text.isprintable():
        text = "".join(c for c in text if c in "\n\t" or c.isprintable())
    if len(text) <= limit:
        return text
    half = max(0, limit - 40) // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters cut ...]\n{text[len(text) - half :]}"

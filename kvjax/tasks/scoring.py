"""Scores of answers."""

import re


def first_number(text: str) -> str | None:
    """The first run of digits of an answer, None if there is none."""
    found = re.search(r"\d+", text)
    return found.group() if found else None


def answers_number(text: str, value: str) -> bool:
    """Passkey and needle score: the first run of digits equals the value."""
    return first_number(text) == value

"""The name that was meant."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """ "; did you mean NEAR?" if something known is near, else nothing.

    Nearest is what has the same words and perhaps more (max-length: max-model-len), else the most similar text.
    """
    plain = {re.sub(r"^(octavo_|-+)", "", other.lower().replace("-", "_")).strip("_"): other for other in known}
    name = re.sub(r"^(octavo_|-+)", "", name.lower().replace("-", "_")).strip("_")
    pool = [other for other in plain if _has_words(other, name)] or list(plain)
    near = difflib.get_close_matches(name, pool, n=1, cutoff=0.6 if len(pool) == len(plain) else 0.0)
    return f"; did you mean {plain[near[0]]}?" if near else ""


def _has_words(name: str, wanted: str) -> bool:
    """Whether every word wanted begins a word of the name, or the other way round."""
    words = name.split("_")
    return all(any(word.startswith(part) or part.startswith(word) for word in words) for part in wanted.split("_"))

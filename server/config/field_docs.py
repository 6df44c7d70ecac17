"""What a dataclass says of its fields, for help texts and schemas made from it."""

from __future__ import annotations

import re


def field_docs(cls: type) -> dict[str, str]:
    """The sentences of a class's `Attributes:` section, by field name."""
    text = (cls.__doc__ or "").partition("Attributes:")[2]
    docs: dict[str, str] = {}
    for names, sentence in re.findall(r"^ {8}(\w[\w, ]*): (.+(?:\n {12}.+)*)", text, re.MULTILINE):
        for name in names.split(", "):
            docs[name] = re.sub(r"\s+", " ", sentence)
    return docs

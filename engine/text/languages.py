"""Languages that a tokenizer knows by tokens of their own: mBART, mBART-50, NLLB."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import InvalidRequestError

_CODE = re.compile(r"[a-z]{2,3}_([A-Z]{2}|[A-Z][a-z]{3})")  # en_XX, zh_CN, eng_Latn
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Languages:
    """The tokens that stand for languages, and where an input holds its own.

    Attributes:
        ids: token id by the language's code; empty where the tokenizer knows none.
        place: of the source language's token in an input: 0, or -1 for its end.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    place: int = 0

    @classmethod
    def among(cls, special: Mapping[str, int], frame: Sequence[int]) -> Languages:
        """The languages among special tokens.

        Args:
            special: ids of special tokens by their text.
            frame: what the tokenizer makes of an empty text. A language's token begins or ends it, or the tokenizer
                has no place for languages.
        """
        ids = {text: token for text, token in sorted(special.items()) if _CODE.fullmatch(text)}
        known = set(ids.values())
        for place in (0, -1):
            if frame and frame[place] in known:
                return cls(ids, place)
        return cls()

    def id(self, language: str, param: str) -> int:
        """The token of a language.

        Raises:
            InvalidRequestError: the tokenizer does not know it, or none at all.
        """
        if not self.ids:
            raise InvalidRequestError(
                f"{param}: this model's tokenizer has no tokens for languages. Leave it out, and say in the prompt "
                "what is wanted, as the model was trained (T5: translate English to German: ...; some Marian models: "
                ">>deu<< ...).",
                param=param,
                code="unsupported_parameter",
            )
        if language not in self.ids:
            some = sorted(self.ids, key=lambda code: (code[:2] != language[:2].lower(), code))[:_SHOWN]
            rest = f" and {len(self.ids) - len(some)} more" if len(self.ids) > len(some) else ""
            raise InvalidRequestError(
                f"{param}: this model's tokenizer does not know the language {language[:40]!r}; it knows "
                f"{', '.join(some)}{rest}.",
                param=param,
                code="invalid_value",
            )
        return self.ids[language]

    def marked(self, ids: list[int], source: int) -> list[int]:
        """An input's tokens, special ones included, with another source language."""
        ids[self.place] = source
        return ids

"""Languages that a tokenizer knows: through their own tokens (mBART, M2M-100, NLLB, SMaLL-100, PLBART), or as the
language pair that its model was trained for (Marian)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.errors import InvalidRequestError

# en_XX, zh_CN, eng_Latn; __en__, __java__, __en_XX__
_CODE = re.compile(r"(?P<bare>[a-z]{2,3}_(?:[A-Z]{2}|[A-Z][a-z]{3}))|__(?P<framed>[A-Za-z]{2,10}(?:_[A-Z]{2})?)__")
_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Languages:
    """The tokens that stand for languages, and their position in an input."""

    ids: Mapping[str, int] = field(default_factory=dict)  # token id by language code; empty if the tokenizer has none
    place: int = 0  # the position of the language token in an input: 0, or -1 for the end
    # whether the decoder begins with the target's token; other models generate this token first. Only PLBART has codes
    # between underscores after the text (`__java__`), which identify it.
    starts: bool = False
    # which language that token names: the text's own, or the one to translate into
    marked_side: Literal["source", "target"] = "source"
    # the source and target of a model that translates nothing else and needs no language tokens
    pair: tuple[str, str] | None = None

    @classmethod
    def among(cls, special: Mapping[str, int], frame: Sequence[int]) -> Languages:
        """The languages among special tokens.

        Args:
            special: ids of special tokens by text.
            frame: the tokenizer's result for an empty text. A language token is the first or last of it, or the
                tokenizer has no position for languages.
        """
        found = ((_CODE.fullmatch(text), token) for text, token in special.items())
        codes = {token: code for code, token in found if code is not None}
        ids = dict(sorted((code["bare"] or code["framed"], token) for token, code in codes.items()))
        for place in (0, -1):
            if frame and frame[place] in codes:
                return cls(ids, place, starts=place == -1 and codes[frame[place]]["framed"] is not None)
        return cls()

    def id(self, language: str, param: str) -> int:
        """The token of a language. Raises InvalidRequestError if the tokenizer does not know this language, or knows
        none."""
        if not self.ids:
            raise InvalidRequestError(
                f"{param}: this model's tokenizer has no language tokens. Remove it, and describe the task in the "
                f"prompt, as in the model's training (T5: translate English to German: ...; some Marian models: "
                ">>deu<< ...).",
                param=param,
                code="unsupported_parameter",
            )
        if language not in self.ids:
            some = sorted(self.ids, key=lambda code: (code[:2] != language[:2].lower(), code))[:_SHOWN]
            rest = f" and {len(self.ids) - len(some)} more" if len(self.ids) > len(some) else ""
            raise InvalidRequestError(
                f"{param}: this model's tokenizer does not have the language {language[:40]!r}; it has "
                f"{', '.join(some)}{rest}.",
                param=param,
                code="invalid_value",
            )
        return self.ids[language]

    def marked(self, ids: list[int], language: int) -> list[int]:
        """An input's tokens, including special ones, with a different language token."""
        ids[self.place] = language
        return ids

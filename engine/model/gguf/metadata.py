"""A GGUF file's metadata about its model, read by name and type. A value that no code has read is refused at the end,
so that no setting is overlooked."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model.gguf.container import Gguf

_HARMLESS = ("tensor_data_layout", "vocab_size", "rope.scaling.finetuned")
"""Settings of an architecture that change nothing, or that tensors determine."""


class Metadata:
    """The settings of an architecture, by the name after its prefix; others by their full names. `file`: the file with
    its tensors, some of which reveal a setting. `harmless`: further settings that change nothing."""

    def __init__(self, file: Gguf, harmless: Iterable[str] = ()):
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture", ""))
        self._asked = {f"{self.architecture}.{name}" for name in (*_HARMLESS, *harmless)}

    def has(self, name: str) -> bool:
        """Whether the architecture has this setting."""
        return f"{self.architecture}.{name}" in self.file.metadata

    def count(self, name: str, default: int | None = None) -> int:
        """An integer; for a list with one value per layer, the common value. Raises ModelLoadError if it is missing, or
        has another type; UnsupportedModelError: layers differ in it."""
        value = self._value(name, default)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise UnsupportedModelError(
                    f"{self.file.path}: layers differ in {self.architecture}.{name}, which is not supported in GGUF "
                    "files. Use the checkpoint in safetensors."
                )
            value = value[0]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self._wrong(name, value, "a whole number")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number. Raises ModelLoadError if it is missing, or has another type."""
        value = self._value(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise self._wrong(name, value, "a number")
        return float(value)

    def each(self, name: str, layers: int, default: float | None = None) -> list[float]:
        """Numbers, one for each layer; one number stands for all. Raises ModelLoadError if the value is missing, of
        another kind, or has another count."""
        value = self._value(name, default)
        found = value if isinstance(value, list) else [value] * layers
        if len(found) != layers or not all(isinstance(one, int | float) and not math.isnan(one) for one in found):
            raise self._wrong(name, value, f"a number for each of {layers} layers")
        return found

    def flag(self, name: str, default: bool) -> bool:
        """A yes or no.

        Raises:
            ModelLoadError: it has another type.
        """
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, value, "true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises ModelLoadError if it is missing, or has another type."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, value, "a text")
        return value

    def must_be(self, name: str, *allowed: Any, otherwise: str) -> None:
        """Refuse other values of an optional setting. Raises UnsupportedModelError: names the unsupported feature."""
        if self.has(name) and (value := self._value(name, None)) not in allowed:
            wanted = " or ".join(map(str, allowed))
            raise UnsupportedModelError(
                f"{self.file.path}: {self.architecture}.{name} must be {wanted}, got {ascii(value)[:80]}: "
                f"{otherwise} not supported in GGUF files of this architecture. Use the checkpoint in safetensors."
            )

    def check_all_asked(self) -> None:
        """Refuse settings of the architecture that no code has read. Raises UnsupportedModelError: names them."""
        prefix = f"{self.architecture}."
        left = sorted(name for name in self.file.metadata if name.startswith(prefix) and name not in self._asked)
        if left:
            raise UnsupportedModelError(
                f"{self.file.path} has settings that are not supported in GGUF files of the architecture "
                f"{self.architecture}: {', '.join(left[:5])}. Use the checkpoint in safetensors."
            )

    def _value(self, name: str, default: object) -> Any:
        whole = f"{self.architecture}.{name}"
        self._asked.add(whole)
        return self.file.metadata.get(whole, default)

    def _wrong(self, name: str, value: object, wanted: str) -> ModelLoadError:
        found = "there is none" if value is None else f"found {ascii(value)[:80]}"
        return ModelLoadError(
            f"{self.file.path}: {self.architecture}.{name} of its metadata should be {wanted}, but {found}. "
            "Download it again."
        )

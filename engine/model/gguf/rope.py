"""A GGUF file's settings of rotary positions, as `rope_parameters` of a config."""

from __future__ import annotations

from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.gguf.metadata import Metadata
from engine.model.gguf.tensors import read_numbers

FACTORS, LONG_FACTORS, SHORT_FACTORS = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that divide the frequencies: for any length, or for long and for short sequences."""


def rope_parameters(metadata: Metadata) -> dict[str, Any]:
    """The settings of rotary frequencies. Raises UnsupportedModelError if the settings are not supported."""
    settings: dict[str, Any] = {"rope_type": "default", "rope_theta": metadata.number("rope.freq_base", 10_000.0)}
    factor = metadata.number("rope.scaling.factor", metadata.number("rope.scale_linear", 1.0)) or 1.0
    kind = metadata.text("rope.scaling.type", "linear")
    original = metadata.count("rope.scaling.original_context_length", metadata.count("context_length"))
    match kind:
        case "none":
            pass
        case "linear":
            if factor != 1.0:
                settings |= {"rope_type": "linear", "factor": factor}
        case "yarn":
            settings |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
            for name in ("beta_fast", "beta_slow"):
                if metadata.has(f"rope.scaling.yarn_{name}"):
                    settings[name] = metadata.number(f"rope.scaling.yarn_{name}")
            metadata.must_be("rope.scaling.yarn_ext_factor", 1.0, otherwise="other extrapolations are")
            metadata.must_be("rope.scaling.yarn_attn_factor", 1.0, otherwise="other factors of scores are")
            metadata.must_be("rope.scaling.attn_factor", 1.0, otherwise="other factors of scores are")
            if metadata.architecture == "mistral3":
                multiplier = metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
                settings |= {"mscale": 1.0, "mscale_all_dim": multiplier} if multiplier else {}
            else:
                metadata.must_be("rope.scaling.yarn_log_multiplier", 0.0, otherwise="other factors of scores are")
        case "longrope":
            if SHORT_FACTORS not in metadata.file.tensors:
                raise UnsupportedModelError(f"{metadata.file.path} asks for longrope, but lacks {SHORT_FACTORS}.")
        case _:
            raise UnsupportedModelError(
                f"{metadata.file.path}: {metadata.architecture}.rope.scaling.type is {kind!r}, which is not supported. "
                "Supported: none, linear, yarn, longrope."
            )
    if FACTORS in metadata.file.tensors:
        if settings["rope_type"] != "default":
            raise UnsupportedModelError(f"{metadata.file.path} scales frequencies twice: by {FACTORS} and by {kind}.")
        divisors = read_numbers(metadata.file, FACTORS)
        settings |= {
            # Divisors for all lengths.
            "rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0,
            "original_max_position_embeddings": metadata.count("context_length"), "factor": 1.0,
        }  # fmt: skip
    if SHORT_FACTORS in metadata.file.tensors or LONG_FACTORS in metadata.file.tensors:
        settings |= {
            "rope_type": "longrope",
            "short_factor": read_numbers(metadata.file, SHORT_FACTORS),
            "long_factor": read_numbers(metadata.file, LONG_FACTORS),
            "original_max_position_embeddings": original,
        }
        if metadata.has("rope.scaling.attn_factor"):
            settings["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return settings


def axes_of(metadata: Metadata) -> dict[str, Any]:
    """The number of a head's frequencies for each of three axes of positions, as settings of `rope_parameters`. Empty
    if the file does not contain it."""
    sections = [int(each) for each in metadata.each("rope.dimension_sections", 4, default=0)][:3]
    return {"mrope_section": sections} if any(sections) else {}

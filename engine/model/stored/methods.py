"""The scheme that a config names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.stored.awq import Awq
from engine.model.stored.bitsandbytes import BitsAndBytes
from engine.model.stored.compressed_tensors import CompressedTensors
from engine.model.stored.fp8 import Fp8
from engine.model.stored.gptq import Gptq
from engine.model.stored.mxfp4 import Mxfp4
from engine.model.stored.nvfp4 import Nvfp4
from engine.model.stored.scheme import Scheme

_METHODS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "awq": Awq,
    "bitsandbytes": BitsAndBytes,
    "compressed-tensors": CompressedTensors,
    "fbgemm_fp8": Fp8,
    "fp8": Fp8,
    "gptq": Gptq,
    "modelopt": Nvfp4,
}


def find_scheme(config: Any, *, reads_mxfp4: bool = False) -> Scheme | None:
    """The scheme of a checkpoint's weights, from its config; None for plain weights. `reads_mxfp4`: whether the family
    supports matrices in that layout. Raises UnsupportedModelError if the scheme is not supported."""
    said = getattr(config, "quantization_config", None)
    if said is None:
        return None
    values = said.to_dict() if hasattr(said, "to_dict") else said
    if not isinstance(values, Mapping):
        raise UnsupportedModelError(f"The config's quantization_config must be a mapping; got {ascii(values)[:80]}.")
    if rotation := values.get("rotation"):
        raise UnsupportedModelError(
            f"rotation of the config's quantization_config is {ascii(rotation)[:80]}: its matrices are for inputs that "
            "are rotated at run time, which is not supported. Use a checkpoint without rotation."
        )
    method = values.get("quant_method")
    if method == "mxfp4" and reads_mxfp4:
        return Mxfp4()
    make = _METHODS.get(str(getattr(method, "value", method)))
    if make is None:
        raise UnsupportedModelError(
            f"The weights are quantized with {method or 'a method that config.json does not name'}, which is not "
            f"supported for this family. Supported: {', '.join(sorted(_METHODS))}. Use one of these, or an "
            f"unquantized checkpoint."
        )
    return make(values)

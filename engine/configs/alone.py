"""`transformers` for configs and tokenizers alone, in a process that is the engine's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def take_configs_alone() -> None:
    """Let `transformers` believe that there is no torch, and read its own files once, from now on and in this whole
    process.

    Without torch it reads configs and tokenizers as ever. With torch, the module of a model's config also brings the
    activations of its models, and by them torch.distributed, torch._dynamo, sympy and Triton: a third of a start's
    CPU time, for code that the engine never calls. It is not for processes in which others may use `transformers`.
    """
    from transformers import utils
    from transformers.utils import import_utils

    def is_torch_available() -> bool:
        return False

    for module in (utils, import_utils):  # the second is asked through the first, too
        module.is_torch_available = is_torch_available
    _list_models_once(import_utils)


def _list_models_once(import_utils: Any) -> None:
    """Let `transformers.models` have the list of its modules that `transformers` has made already.

    Each of them reads all source files of models for it, 1,600 of them, which takes half a second.
    """
    define = import_utils.define_import_structure
    folder = Path(import_utils.__file__).parents[1] / "models"
    prefix = "models."
    structure = {
        backends: {module.removeprefix(prefix): names for module, names in modules.items() if module.startswith(prefix)}
        for backends, modules in define(folder, prefix="models").items()  # its cache has the answer
    }

    def define_import_structure(path: str, prefix: str | None = None) -> Any:
        return structure if Path(path) == folder / "__init__.py" and prefix is None else define(path, prefix)

    import_utils.define_import_structure = define_import_structure

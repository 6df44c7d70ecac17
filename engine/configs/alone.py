"""`transformers` for configs and tokenizers only, in the engine's own process."""

from __future__ import annotations

from engine.configs.listing import list_models_once


def take_configs_alone() -> None:
    """Make `transformers` believe that torch is missing, from now on and in the whole process. If it is not imported
    yet, its list of modules comes from the cache.

    Without torch it still reads configs and tokenizers. With torch, the module of a model's config also imports the
    activations of its models, and with them torch.distributed, torch._dynamo, sympy and Triton: a third of a start's
    CPU time, for code that the engine never calls. Do not use it in processes where other code may use `transformers`.
    """
    list_models_once()
    from transformers import utils
    from transformers.utils import import_utils

    def is_torch_available() -> bool:
        return False

    for module in (utils, import_utils):  # the second check calls the first
        module.is_torch_available = is_torch_available

"""`transformers` for configs and tokenizers alone, in a process that is the engine's own."""

from __future__ import annotations

from engine.configs.listing import list_models_once


def take_configs_alone() -> None:
    """Let `transformers` believe that there is no torch, from now on and in this whole process. If it is not imported
    yet, its list of modules comes from the cache.

    Without torch it reads configs and tokenizers as ever. With torch, the module of a model's config also brings the
    activations of its models, and by them torch.distributed, torch._dynamo, sympy and Triton: a third of a start's
    CPU time, for code that the engine never calls. It is not for processes in which others may use `transformers`.
    """
    list_models_once()
    from transformers import utils
    from transformers.utils import import_utils

    def is_torch_available() -> bool:
        return False

    for module in (utils, import_utils):  # the second is asked through the first, too
        module.is_torch_available = is_torch_available

"""Tiny random checkpoints of any decoder-only family that transformers has, made from its config alone.

Every parameter is random, so that a part which is left out shows. Matrices are scaled by what they sum, so
that activations stay of one size; the head's rows of the EOS ids are made longer, so that EOS wins now and
then and answers end at different lengths; routers are sharper, so that the choice of experts is clear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from support import reference
from support.checkpoints import random_prompt
from support.reference import Reference

# Settings of most decoders' shapes.
DECODER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
# What every shape is asked: tokens of an answer, and (length penalty, early stopping) of its beam searches.
GREEDY_TOKENS = 24
BEAM_TOKENS = 12
NUM_BEAMS = 4
SEARCHES: tuple[tuple[float, bool | str], ...] = ((1.0, False), (0.6, "never"), (1.4, True))
BEAM_PROMPTS = 2


@dataclass(frozen=True)
class FamilyShape:
    """One configuration of a family.

    Attributes:
        architecture: the class in transformers, as config.json names it.
        settings: keywords of its config, all but vocab_size and the ids of special tokens.
        prompts: seeds of prompts on which the reference decides clearly, found by
            `python -m support.families NAME`; the first two go to the beam searches, too.
        eos_gain: how much longer the head's rows of the EOS ids are.
        shortest: tokens of the shortest prompt; the others are up to 40 longer.
        max_model_len: what the engine is asked for, and the reference run at once before anything else: factors
            that depend on the length are then fixed in both.
        lengths: of the prompts whose hidden states are compared.
        finish: changes the saved folder, for configs in an older form, say.
    """

    architecture: str
    settings: Mapping[str, Any] = field(hash=False)
    prompts: tuple[int, ...] = ()
    eos: tuple[int, ...] = (7,)
    eos_gain: float = 1.8
    vocab: int = 199
    seed: int = 0
    shortest: int = 2
    max_model_len: int = 96
    lengths: tuple[int, ...] = (37, 1, 14)
    finish: Callable[[Path], None] | None = None


@dataclass(frozen=True)
class FamilyCheckpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: FamilyShape
    path: Path
    model: Any

    @property
    def window(self) -> int:
        """Tokens that a layer sees at most, the token itself included; 0 if every layer sees all."""
        config = self.model.config
        named = ("sliding_window", "attention_chunk_size", "window_size")
        return next((getattr(config, name) for name in named if getattr(config, name, None)), 0)

    def prompts(self) -> list[list[int]]:
        """The shape's prompts."""
        return [prompt_of(self.shape, seed) for seed in self.shape.prompts]

    def ragged(self) -> list[list[int]]:
        """Prompts of the shape's lengths, whose hidden states are compared."""
        return [random_prompt(self.shape.vocab, 1000 + length, length) for length in self.shape.lengths]

    def greedy(self, prompt: Sequence[int]) -> Reference:
        """The reference's greedy answer."""
        return self._clear(lambda: reference.greedy(self.model, prompt, self.shape.eos, GREEDY_TOKENS))

    def beams(self, prompt: Sequence[int], length_penalty: float, early_stopping: bool | str) -> Reference:
        """The reference's answers by beam search, all of them."""
        # transformers does not reorder the states of these with the beams.
        cached = self.shape.architecture not in ("MiniMaxForCausalLM", "RecurrentGemmaForCausalLM")
        return self._clear(
            lambda: reference.beams(
                self.model,
                prompt,
                self.shape.eos,
                BEAM_TOKENS,
                num_beams=NUM_BEAMS,
                n=NUM_BEAMS,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                use_cache=cached,
            )
        )

    def hidden(self, prompt: Sequence[int]) -> tuple[torch.Tensor, float]:
        """What the head gets, [tokens, features], and how clear the choice of experts was."""
        with watching_routers(self.model) as margins:
            # Llama 4 calls its text model otherwise than the prefix of the whole.
            inner = self.model.base_model
            output = run(self.model.model if inner is self.model else inner, prompt)
        return output.last_hidden_state[0], min(margins, default=math.inf)

    def _clear(self, answer: Callable[[], Reference]) -> Reference:
        with watching_routers(self.model) as margins:
            found = answer()
        return Reference(found.answers, min([found.margin, *margins]))


def prompt_of(shape: FamilyShape, seed: int) -> list[int]:
    """The prompt of a seed."""
    return random_prompt(shape.vocab, seed, shape.shortest + seed * 7 % 41)


def make_family_checkpoint(shape: FamilyShape, folder: Path) -> FamilyCheckpoint:
    """Build the checkpoint and save it."""
    model = build_reference(shape)
    model.save_pretrained(folder)
    if shape.finish is not None:
        shape.finish(folder)
    return FamilyCheckpoint(shape, folder, model)


def build_reference(shape: FamilyShape) -> Any:
    """The reference model with random weights."""
    model_class = getattr(transformers, shape.architecture)
    eos: int | list[int] = list(shape.eos) if len(shape.eos) > 1 else shape.eos[0]
    special = {"bos_token_id": 1, "eos_token_id": eos, "pad_token_id": 0}
    config = model_class.config_class(vocab_size=shape.vocab, **special, **shape.settings)
    config.architectures = [shape.architecture]
    torch.manual_seed(shape.seed)
    model = model_class(config)
    model.set_attn_implementation("eager")
    randomise(model, shape)
    model.generation_config = transformers.GenerationConfig(eos_token_id=eos, pad_token_id=0)
    run(model.eval(), [1] * shape.max_model_len)
    return model


@torch.no_grad()
def run(model: Any, prompt: Sequence[int]) -> Any:
    """One forward pass of the reference."""
    ids = torch.tensor([list(prompt)])
    return model(ids, attention_mask=torch.ones_like(ids), use_cache=False)


@torch.no_grad()
def randomise(model: Any, shape: FamilyShape) -> None:
    """Random values for every parameter, by the kind of its module, and for what corrects the scores of experts; other
    buffers stay as they are."""
    fill_randomly(model, shape.seed)
    model.get_output_embeddings().weight[list(shape.eos)] *= shape.eos_gain


@torch.no_grad()
def fill_randomly(model: Any, seed: int) -> None:
    """The same without longer rows for EOS."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    routers = {id(inner) for module in model.modules() if is_router(module) for inner in linears(module)}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if id(parameter) in done or not parameter.requires_grad:
                continue  # tied, or a sinusoid
            done.add(id(parameter))
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() < 2:
                # Norms are made with weights of 1, or of 0 where 1 is added later; biases with 0.
                centre = 0.0 if isinstance(module, nn.Linear) else round(float(parameter.mean()))
                parameter.copy_(centre + 0.3 * noise)
            elif isinstance(module, nn.Embedding) or module is model.get_output_embeddings():
                parameter.copy_(0.5 * noise)
            else:
                inputs = parameter.shape[0] if isinstance(module, Conv1D) else parameter.shape[-1]
                gain = 3.0 if is_router(module) or id(module) in routers else 1.2
                parameter.copy_(noise * gain * inputs**-0.5)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(("e_score_correction_bias", "expert_bias")):
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith("layer_scalar"):
            tensor.copy_(1.0 + 0.3 * torch.randn(tensor.shape, generator=generator))
        elif name.endswith("A_log"):  # so that states last for some tokens, not for one
            tensor.copy_(-2.0 + torch.randn(tensor.shape, generator=generator))


def is_router(module: nn.Module) -> bool:
    """Chooses experts."""
    return type(module).__name__.endswith(("Router", "V1Gate", "JetMoeTopKGating"))


def linears(module: nn.Module) -> list[nn.Linear]:
    """The matrices within a module."""
    return [inner for inner in module.modules() if isinstance(inner, nn.Linear)]


@contextmanager
def watching_routers(model: Any) -> Iterator[list[float]]:
    """Collects the smallest difference, in logits or corrected scores, between an expert, or a group of them, that was
    chosen and one that was not."""
    margins: list[float] = []

    def note(module: Any, inputs: Any, _: Any) -> None:
        (matrix,) = linears(module) or [module]
        odds = nn.functional.linear(inputs[0].flatten(0, -2), matrix.weight, getattr(matrix, "bias", None))
        if hasattr(module, "moe_statics"):
            odds = module.moe_statics(odds.softmax(-1))
        elif len(inputs) > 1:
            odds = odds.sigmoid() + inputs[1]
        elif hasattr(module, "e_score_correction_bias"):
            of_logits = type(module).__name__.startswith("Kolibri1")
            odds = (odds if of_logits else odds.sigmoid()) + module.e_score_correction_bias
        by_pairs = hasattr(module, "e_score_correction_bias") or type(module).__name__.startswith("Mistral4")
        if by_pairs and getattr(module, "topk_group", 1) < getattr(module, "num_group", 1):
            scores = odds if hasattr(module, "e_score_correction_bias") else odds.softmax(-1)
            pairs = scores.view(len(odds), module.num_group, -1).topk(2).values.sum(-1)
            least = margin(pairs, module.topk_group)
            grouped = odds.view(len(odds), module.num_group, -1)
            odds = grouped.masked_fill((pairs < least[:, None])[..., None], -math.inf).view_as(odds)
        settings = getattr(model.config, "ffn_config", None)  # of DBRX; Switch has none, and chooses one
        margin(odds, getattr(module, "top_k", settings.moe_top_k if settings else 1))

    def margin(odds: torch.Tensor, count: int) -> torch.Tensor:
        """Notes it, and gives the least of each row that is chosen."""
        best = odds.topk(min(count + 1, odds.shape[-1])).values
        if odds.shape[-1] > count:
            margins.append(float((best[:, count - 1] - best[:, count]).min()))
        return best[:, count - 1]

    handles = [module.register_forward_hook(note) for module in model.modules() if is_router(module)]
    try:
        yield margins
    finally:
        for handle in handles:
            handle.remove()

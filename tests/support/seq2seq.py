"""Tiny random checkpoints of encoder-decoder families, and the search for inputs on which the reference decides
clearly.

To add a shape, write it into `seq2seq_shapes` without seeds, then run

    PYTHONPATH=tests:. python -m support.seq2seq NAME

and put what is printed into the shape.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from support import reference
from support.checkpoints import random_prompt
from support.family_shape import fill_randomly
from support.reference import MIN_MARGIN, Reference

GREEDY_TOKENS = 20
BEAM_TOKENS = 10
# Tokens of the encoder's input and of the decoder's beginning, the start token included, for each case of a shape.
LENGTHS = ((1, 1), (23, 1), (200, 4), (5, 9), (70, 1))
# (beams, length penalty, early stopping), for the first three cases.
SEARCHES: tuple[tuple[int, float, bool | str], ...] = (
    (2, 1.0, False),
    (4, 0.6, "never"),
    (4, 1.4, True),
    (2, 0.3, True),
)
BEAM_CASES = 3
START = 2
LAST_MATRICES = ("out_proj.weight", "self_attn.output.weight", "fc2.weight", ".o.weight", ".wo.weight")
LAST_MATRICES += ("feed_forward.output.weight",)
VARIED = 5  # different tokens in an answer that EOS does not end
MAX_LEN = 224
# Random layers fall into repeating one token; without repeated pairs answers pass through many states.
NO_PAIRS: dict[str, Any] = {"no_repeat_ngram_size": 2}


@dataclass(frozen=True)
class Seq2SeqShape:
    """One configuration of an encoder-decoder family.

    Attributes:
        architecture: the class in transformers, as config.json names it.
        settings: keywords of its config, all but the sizes of vocabularies and the ids of special tokens.
        seeds: of the cases, one for each of LENGTHS; found by `python -m support.seq2seq NAME`.
        eos_gain: how much longer the head's rows of the EOS ids are.
        own_vocab: the encoder's vocabulary, where it has its own.
        own_head: the output matrix is a tensor of its own, whatever the config says.
        cached: the reference may keep keys and values; not where its decoder has more layers than its encoder.
        finish: changes the saved folder.
    """

    architecture: str
    settings: Mapping[str, Any] = field(hash=False)
    seeds: tuple[int, ...] = ()
    eos: tuple[int, ...] = (7,)
    eos_gain: float = 1.8
    vocab: int = 97
    own_vocab: int | None = None
    own_head: bool = False
    cached: bool = True
    seed: int = 0
    finish: Callable[[Path], None] | None = None

    @property
    def encoder_vocab(self) -> int:
        return self.own_vocab or self.vocab

    def case(self, place: int, seed: int) -> Case:
        """Random tokens of the lengths at that place."""
        length, begin = LENGTHS[place]
        rest = random_prompt(self.vocab, seed + 500, begin - 1)
        return Case(tuple(random_prompt(self.encoder_vocab, seed, length)), (START, *rest))


@dataclass(frozen=True)
class Case:
    """The encoder's input, and what the decoder begins with."""

    source: tuple[int, ...]
    begin: tuple[int, ...]


@dataclass(frozen=True)
class Seq2SeqCheckpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    shape: Seq2SeqShape
    path: Path
    model: Any

    def cases(self) -> list[Case]:
        """One for each of LENGTHS."""
        return [self.shape.case(place, seed) for place, seed in enumerate(self.shape.seeds)]

    def greedy(self, case: Case, **settings: Any) -> Reference:
        """The reference's greedy answer."""
        settings = NO_PAIRS | {"use_cache": self.shape.cached} | settings
        return reference.greedy(self.model, case.source, self.shape.eos, GREEDY_TOKENS, begin=case.begin, **settings)

    def beams(
        self,
        case: Case,
        num_beams: int,
        length_penalty: float = 1.0,
        early_stopping: bool | str = False,
        **settings: Any,
    ) -> Reference:
        """The reference's answers by beam search, all of them."""
        settings = NO_PAIRS | {"use_cache": self.shape.cached} | settings
        return reference.beams(
            self.model,
            case.source,
            self.shape.eos,
            BEAM_TOKENS,
            begin=case.begin,
            num_beams=num_beams,
            n=num_beams,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            **settings,
        )

    @torch.no_grad()
    def hidden(self, source: Sequence[int], target: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states of the encoder, and those of the decoder that the head gets."""
        ids = torch.tensor([list(source)])
        output = self.model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            decoder_input_ids=torch.tensor([list(target)]),
            output_hidden_states=True,
            use_cache=False,
        )
        return output.encoder_last_hidden_state[0], decoder_states(output, len(target))


def decoder_states(output: Any, length: int) -> Tensor:
    """[length, features] that the head reads, of a single row. Of ProphetNet's streams it is the first that predicts,
    and those after it follow in the same tensor."""
    read = getattr(output, "decoder_ngram_hidden_states", None) or output.decoder_hidden_states
    found: Tensor = read[-1][0, :length]
    return found


def make_seq2seq_checkpoint(shape: Seq2SeqShape, folder: Path) -> Seq2SeqCheckpoint:
    """Build the checkpoint and save it."""
    model = build_reference(shape)
    model.save_pretrained(folder)
    if shape.finish is not None:
        shape.finish(folder)
    return Seq2SeqCheckpoint(shape, folder, model)


def build_reference(shape: Seq2SeqShape) -> Any:
    """The reference model with random weights."""
    model_class = getattr(transformers, shape.architecture)
    eos: int | list[int] = list(shape.eos) if len(shape.eos) > 1 else shape.eos[0]
    special = {"eos_token_id": eos, "pad_token_id": 0, "decoder_start_token_id": START, "forced_eos_token_id": None}
    vocabularies = {"vocab_size": shape.encoder_vocab}
    if hasattr(model_class.config_class, "src_vocab_size"):
        vocabularies = {"src_vocab_size": shape.encoder_vocab, "tgt_vocab_size": shape.vocab}
    elif shape.own_vocab is not None:
        vocabularies["decoder_vocab_size"] = shape.vocab
    settings = dict(shape.settings)
    if "encoder" in settings:  # two configs in one
        sizes = {"encoder": shape.encoder_vocab, "decoder": shape.vocab}
        settings |= {side: {**settings[side], "vocab_size": size} for side, size in sizes.items()}
        if "text_config" in settings["encoder"]:
            settings["encoder"]["text_config"] = {**settings["encoder"]["text_config"], "vocab_size": shape.vocab}
    config = model_class.config_class(**(vocabularies | special | settings))
    config.architectures = [shape.architecture]
    torch.manual_seed(shape.seed)
    model = model_class(config)
    model.set_attn_implementation("eager")
    for module in model.modules():
        if type(module).__name__ == "SinusoidalPositionalEmbedding":
            module.weight.requires_grad_(False)
    if shape.architecture.startswith("FSMT"):
        model.model.decoder.register_forward_pre_hook(see_no_later, with_kwargs=True)
    if shape.architecture.startswith("LED"):
        model.get_encoder().register_forward_pre_hook(_see_first, with_kwargs=True)
    for module in model.get_decoder().modules():
        if hasattr(module, "expert_capacity"):
            module.expert_capacity = MAX_LEN  # a decoder's tokens come one by one; the reference gets them at once
    if shape.architecture.startswith("BigBird"):
        model.get_encoder().register_forward_pre_hook(_begin_anew)
    if shape.architecture.startswith("ProphetNet"):
        for module in model.get_decoder().modules():
            if hasattr(module, "get_predict_relative_pos_embeddings"):
                _bring_scores_one_by_one(module)
    if shape.own_head:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
        model.all_tied_weights_keys.pop("lm_head.weight")
    fill_randomly(model, shape.seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Else a tied head repeats the last token: what the layers add must outweigh what they are added to.
            if name.endswith(LAST_MATRICES):
                parameter *= 3.0
        if hasattr(model, "final_logits_bias"):
            generator = torch.Generator().manual_seed(shape.seed + 1)
            model.final_logits_bias.copy_(0.5 * torch.randn(1, shape.vocab, generator=generator))
        output_matrix(model).weight[list(shape.eos)] *= shape.eos_gain
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=eos, pad_token_id=0, decoder_start_token_id=START
    )
    return model.eval()


def output_matrix(model: Any) -> nn.Linear:
    """That of the logits; FSMT's model names its embeddings instead."""
    decoder = model.get_decoder()
    found: nn.Linear = getattr(decoder, "output_projection", None) or model.get_output_embeddings()
    return found


def see_no_later(decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """FSMT's decoder is handed no mask where keys are kept: tokens of a beginning would see those after them."""
    length = args[0].shape[1]
    mask = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)
    return args, given | {"decoder_causal_mask": mask}


def _see_first(encoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The reference of LED takes the global tokens as an argument: the first one is global."""
    first = torch.zeros_like(given["input_ids"])
    first[:, 0] = 1
    return args, given | {"global_attention_mask": first}


def _begin_anew(encoder: Any, _: tuple[Any, ...]) -> None:
    """transformers stays with the attention that a short input made it take; an input begins as the config says."""
    encoder.set_attention_type(encoder.config.attention_type)


def _bring_scores_one_by_one(attention: Any) -> None:
    """transformers mixes up heads and tokens of ProphetNet's predicting streams where a call brings several tokens,
    and so differs from itself without a cache; tokens that come alone are right."""
    several = attention.get_predict_relative_pos_embeddings

    def one_by_one(hidden: Tensor, scores: Tensor, positions: Tensor, buckets: Tensor | None) -> Tensor:
        places = [slice(token, token + 1) for token in range(hidden.shape[1])]
        own = [None if buckets is None else buckets[:, place] for place in places]
        found = [
            several(hidden[:, place], scores[..., place, :], positions, bucket)
            for place, bucket in zip(places, own, strict=True)
        ]
        return torch.cat(found, dim=3)

    attention.get_predict_relative_pos_embeddings = one_by_one


# ------------------------------------------------------------------ the search for clear cases

CLEAR = 3 * MIN_MARGIN  # what a decision found here must differ by: other machines round differently
GAINS = (1.4, 1.8, 2.4, 3.2, 4.2)
SEEDS = range(40)


def stops(shape: Seq2SeqShape, answers: Reference) -> set[int]:
    """Lengths of the answers that EOS ended."""
    return {len(answer.tokens) for answer in answers.answers if answer.tokens[-1] in shape.eos}


def search(shape: Seq2SeqShape) -> Seq2SeqShape | None:
    """The shape with seeds that serve every test; with its own seed and EOS gain if those allow it, else with
    others."""
    gains = sorted(GAINS, key=lambda gain: (gain != shape.eos_gain, abs(gain - shape.eos_gain)))
    for seed, gain in itertools.product(range(shape.seed, shape.seed + 3), gains):
        tried = replace(shape, seed=seed, eos_gain=gain)
        seeds = _clear_seeds(Seq2SeqCheckpoint(tried, Path(), build_reference(tried)))
        if seeds is not None:
            return replace(tried, seeds=seeds)
    return None


def _clear_seeds(model: Seq2SeqCheckpoint) -> tuple[int, ...] | None:
    """One for each place; greedy answers end in both ways, and beams at several lengths."""
    found: list[int] = []
    reasons: set[bool] = set()
    lengths: set[int] = set()
    answers: set[tuple[int, ...]] = set()
    for place in range(len(LENGTHS)):
        for seed in SEEDS:
            case = model.shape.case(place, seed)
            greedy = model.greedy(case)
            stopped = bool(stops(model.shape, greedy))
            last = place == len(LENGTHS) - 1
            tokens = tuple(greedy.answers[0].tokens)
            if greedy.margin < CLEAR or (last and reasons == {stopped}) or tokens in answers:
                continue
            if not stopped and len(set(tokens)) < VARIED:
                continue
            searches = [model.beams(case, *how) for how in SEARCHES] if place < BEAM_CASES else []
            if min((answer.margin for answer in searches), default=1.0) < CLEAR:
                continue
            found.append(seed)
            reasons.add(stopped)
            answers.add(tokens)
            lengths.update(*(stops(model.shape, answer) for answer in searches))
            break
        else:
            return None
        if place == BEAM_CASES - 1 and len(lengths) < 2:
            return None
    return tuple(found)


if __name__ == "__main__":
    from support.families import print_found
    from support.seq2seq_shapes import SHAPES

    print_found(SHAPES, search, "seeds")

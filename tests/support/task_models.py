"""Tiny checkpoints of the kinds of the models that the pages and examples of tasks name. In a folder that has them
under these names, a command that serves one runs as it is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers

from support.encoder_text import roberta, save_model, xlmr
from support.image_text import make_image_model
from support.image_writers import make_writer
from support.late_interaction import stanford
from support.seeing import make_seeing_model
from support.sentence import NORMALIZE, Module, pipeline_folder, pooling
from support.speech import make_speech_checkpoint
from support.text_encoders import make_text_encoder
from support.text_seq2seq import bart_tokenizer, make_text_checkpoint

_SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_SPARSE = "sentence_transformers.sparse_encoder.models."


@dataclass(frozen=True)
class BgeM3:
    """The reference: transformers' model, and the two layers beside it."""

    model: Any
    tokenizer: Any
    sparse: torch.nn.Linear
    late: torch.nn.Linear

    @torch.no_grad()
    def __call__(self, text: str) -> tuple[torch.Tensor, dict[int, float], torch.Tensor]:
        """The vector of a text, [hidden]; its tokens' largest weights; the tokens' vectors, [tokens - 1, features]."""
        ids = self.tokenizer(text).input_ids
        states = self.model(torch.tensor([ids])).last_hidden_state[0]
        weights: dict[int, float] = {}
        for token, weight in zip(ids, self.sparse(states).relu()[:, 0].tolist(), strict=True):
            if token not in self.tokenizer.all_special_ids and weight:
                weights[token] = max(weights.get(token, 0.0), weight)
        return F.normalize(states[0], dim=0), weights, F.normalize(self.late(states[1:]), dim=-1)


def _images(kind: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        make_image_model(kind, folder.parent).path.rename(folder)

    return make


def led(folder: Path) -> None:
    """It reads 16,384 tokens, as the published ones do."""
    bart_tokenizer(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.LEDConfig(
        vocab_size=len(tokenizer), d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=40, decoder_ffn_dim=36, attention_window=64,
        max_encoder_position_embeddings=16384, max_decoder_position_embeddings=1024,
    )  # fmt: skip
    save_model(transformers.LEDForConditionalGeneration, config, tokenizer, folder)


def answers(folder: Path) -> Any:
    """RoBERTa with a head for answers, for windows of 384 tokens; returns transformers' model."""
    tokenizer = roberta()
    config = transformers.RobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=514, pad_token_id=1, type_vocab_size=1, **_SIZE
    )
    return save_model(transformers.RobertaForQuestionAnswering, config, tokenizer, folder)


def splade(folder: Path) -> None:
    """A masked language model whose modules.json says that it gives sparse vectors."""
    plain = folder.with_name(f"{folder.name}-plain")
    make_text_encoder("masked", plain)
    modules = [Module(f"{_SPARSE}SpladePooling", {"pooling_strategy": "max", "activation_function": "relu"})]
    kind, settings = f"{_SPARSE}MLMTransformer", {"model_type": "SparseEncoder"}
    pipeline_folder(folder, plain, modules, kind=kind, settings=settings)


def colbert(folder: Path) -> None:
    """As ColBERT's own library saves it, with what says how texts are read."""
    stanford(folder, {"query_maxlen": 32, "doc_maxlen": 40})


def bge_m3(folder: Path) -> BgeM3:
    """XLM-R with the two layers in torch's files beside it."""
    plain, tokenizer = folder.with_name(f"{folder.name}-plain"), xlmr()
    config = transformers.XLMRobertaConfig(
        vocab_size=len(tokenizer), max_position_embeddings=258, type_vocab_size=1, pad_token_id=1, **_SIZE
    )
    model = save_model(transformers.XLMRobertaModel, config, tokenizer, plain)
    sparse, late = torch.nn.Linear(32, 1), torch.nn.Linear(32, 24)  # after the model's, its seed is theirs, too
    torch.nn.init.constant_(sparse.bias, 0.5)  # so that most tokens have a weight
    torch.save(sparse.state_dict(), plain / "sparse_linear.pt")
    torch.save(late.state_dict(), plain / "colbert_linear.pt")
    pipeline_folder(folder, plain, [pooling("cls"), NORMALIZE])
    return BgeM3(model, tokenizer, sparse, late)


MODELS: dict[str, Callable[[Path], object]] = {
    "google/vit-base-patch16-224": _images("vit"),
    "openai/clip-vit-base-patch32": _images("clip"),
    "llava-hf/llava-1.5-7b-hf": lambda folder: make_seeing_model("llava", folder),
    "microsoft/trocr-base-printed": lambda folder: make_writer("trocr", folder),
    "florence-community/Florence-2-base": lambda folder: make_writer("florence2", folder),
    "allenai/led-large-16384-arxiv": led,
    "deepset/roberta-base-squad2": answers,
    "facebook/nllb-200-distilled-600M": lambda folder: make_text_checkpoint("nllb", folder),
    "openai/whisper-small": lambda folder: make_speech_checkpoint("whisper", folder),
    "naver/splade-v3": splade,
    "colbert-ir/colbertv2.0": colbert,
    "BAAI/bge-m3": bge_m3,
}


def make_named(text: str, folder: Path) -> None:
    """Make those that a text names, each at its name in this folder."""
    for name, make in MODELS.items():
        if name in text:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            make(folder / name)

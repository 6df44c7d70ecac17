"""The translation model, of T5's shape: its sizes, its batches, its measurements, its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration

from demo.corpus import SEED
from demo.export import write_folder
from demo.folian import Pair, sentence
from demo.loop import Batch, Recipe, cross_entropy
from demo.tokens import add_template, train_tokenizer

PAD, EOS = "<pad>", "</s>"
IGNORED = -100


@dataclasses.dataclass(frozen=True)
class Seq2SeqSettings:
    """Sizes of the tokenizer and the model, and the training.

    Attributes:
        vocab: tokens, shared by both languages.
        hidden: width of the residual streams.
        layers: of the encoder, and of the decoder.
        heads: each is hidden / heads wide.
        ffn: inner width of the feed-forward layers.
        context: longest input, in tokens.
        tokenizer_sentences: how many pairs the merges come from.
        held_out: pairs that are measured.
        recipe: of the training; a row is one pair.
    """

    vocab: int
    hidden: int
    layers: int
    heads: int
    ffn: int
    context: int
    tokenizer_sentences: int
    held_out: int
    recipe: Recipe


FULL = Seq2SeqSettings(
    vocab=640, hidden=128, layers=2, heads=4, ffn=256, context=128, tokenizer_sentences=20_000, held_out=256,
    recipe=Recipe(steps=2600, rows=64, length=64, peak_rate=2e-3, decay=0.01, evaluations=150),
)  # fmt: skip
TINY = Seq2SeqSettings(
    vocab=400, hidden=32, layers=1, heads=2, ffn=64, context=128, tokenizer_sentences=200, held_out=8,
    recipe=Recipe(steps=8, rows=4, length=64, warmup=3, evaluations=4, bfloat16=False),
)  # fmt: skip


def pair(number: int, *, held_out: bool = False, seed: int = SEED) -> Pair:
    """Sentence `number` of the corpus."""
    return sentence(random.Random(f"folian {seed} {number} {held_out}"), held_out=held_out)


def digest(count: int) -> str:
    """SHA-256 of the first `count` pairs of training, one a line."""
    pairs = map(pair, range(count))
    return hashlib.sha256("".join(f"{one.source}\t{one.target}\n" for one in pairs).encode()).hexdigest()


def make_tokenizer(vocab: int, count: int) -> Tokenizer:
    """Byte-level BPE over both languages, with the end token after every text."""
    texts = (text for number in range(count) for text in (pair(number).source, pair(number).target))
    tokenizer = train_tokenizer(texts, vocab, (PAD, EOS))
    add_template(tokenizer, f"$A {EOS}", [EOS])
    return tokenizer


def to_config(settings: Seq2SeqSettings) -> T5Config:
    """T5's shape; the decoder begins with the padding token, as T5's does."""
    return T5Config(
        vocab_size=settings.vocab, d_model=settings.hidden, d_kv=settings.hidden // settings.heads, d_ff=settings.ffn,
        num_layers=settings.layers, num_decoder_layers=settings.layers, num_heads=settings.heads,
        n_positions=settings.context,
        feed_forward_proj="relu", dropout_rate=0.0, tie_word_embeddings=True,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip


class Seq2SeqTask:
    """The training task of the translation model."""

    def __init__(self, settings: Seq2SeqSettings, device: str = "cpu"):
        self.settings, self.device = settings, device
        self.tokenizer = make_tokenizer(settings.vocab, settings.tokenizer_sentences)
        self.config = to_config(settings)
        torch.manual_seed(settings.recipe.seed)
        self.model: nn.Module = T5ForConditionalGeneration(self.config)
        self.model.to(device)
        self._held_out = self._rows([pair(number, held_out=True) for number in range(settings.held_out)])

    @property
    def shape(self) -> dict[str, float]:
        """Sizes, for the card."""
        names = ("vocab", "hidden", "layers", "heads", "ffn", "context")
        return {name: getattr(self.settings, name) for name in names}

    def digest(self, count: int) -> str:
        """SHA-256 of the first pairs of training."""
        return digest(count)

    def batch(self, step: int) -> Batch:
        """Input ids, mask and labels of step `step`."""
        rows = self.settings.recipe.rows
        return self._rows([pair(number) for number in range(step * rows, (step + 1) * rows)])

    def _rows(self, pairs: list[Pair]) -> Batch:
        sources = [torch.tensor(self.tokenizer.encode(one.source).ids) for one in pairs]
        targets = [torch.tensor(self.tokenizer.encode(one.target).ids) for one in pairs]
        ids = nn.utils.rnn.pad_sequence(sources, batch_first=True, padding_value=0)
        labels = nn.utils.rnn.pad_sequence(targets, batch_first=True, padding_value=IGNORED)
        return ids, (ids != 0).long(), labels

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits and targets of the translations' tokens."""
        ids, mask, labels = batch
        begun = torch.cat((torch.zeros_like(labels[:, :1]), labels[:, :-1].clamp(min=0)), dim=1)
        logits: Tensor = self.model(input_ids=ids, attention_mask=mask, decoder_input_ids=begun, use_cache=False).logits
        chosen = labels != IGNORED
        return logits[chosen], labels[chosen]

    def evaluate(self) -> dict[str, float]:
        """Perplexity a token of the translations, with held-out names and held-out pairs of subject and verb."""
        batch = tuple(part.to(self.device) for part in self._held_out)
        return {"held_out": math.exp(cross_entropy(*self.forward(batch)).item())}

    def export(self, folder: Path, *, dtype: str = "bfloat16") -> None:
        """Write the folder as transformers saves it; the embedding, which is the head too, once."""
        weights = {
            name: weight.detach().float().cpu()
            for name, weight in self.model.state_dict().items()
            if not name.endswith(("embed_tokens.weight", "lm_head.weight"))
        }
        config = {key: value for key, value in self.config.to_diff_dict().items() if key != "transformers_version"}
        write_folder(
            folder,
            weights=weights,
            dtype=dtype,
            config={"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "dtype": "float32"} | config,
            generation={"decoder_start_token_id": 0, "eos_token_id": 1, "pad_token_id": 0},
            tokenizer=self.tokenizer,
            tokenizer_config={
                "tokenizer_class": "PreTrainedTokenizerFast",
                "pad_token": PAD,
                "eos_token": EOS,
                "clean_up_tokenization_spaces": False,
                "model_max_length": self.settings.context,
                "source_lang": "qfo",  # ISO 639 leaves qaa to qtz to local use
                "target_lang": "en",
            },
        )

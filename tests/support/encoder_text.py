"""Tokenizers of the kinds that encoders have, made in milliseconds, and tiny checkpoints of models with them.

The library trains WordPiece and Unigram in no fixed order; their vocabularies are spelled out here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RustTokenizer

CORPUS = [
    "Ada Lovelace wrote to Charles Babbage in London about the engine.",
    "the small red boats sailed from the harbour; nobody was waiting, and it rained all night long",
    "Wörter mit Umlauten, accents comme été, naïve façade, Ωμέγα",
    "unbelievable unhappiness is unlikely; walking, walked, walks",
    "日本語 and emoji 😀😀 in one line, 1234 5678",
]
LABELS = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC", 4: "I-LOC", 5: "MISC"}


def _pieces(join: str, begin: str) -> list[str]:
    """The characters, beginnings, endings and every other word of the corpus, marked where they go on in a word
    (`join`) or begin one (`begin`)."""
    words = sorted({word for text in CORPUS for word in re.findall(r"\w+|[^\w\s]", text + " " + text.lower())})
    chars = sorted({char for word in words for char in word})
    found = [begin + char for char in chars] + [join + char for char in chars]
    found += [begin + word[:3] for word in words] + [join + word[-3:] for word in words]
    return list(dict.fromkeys([*found, *(begin + word for word in words[::2])]))


def wordpiece(*, lower: bool = True) -> Any:
    """BERT's: segments, [CLS] A [SEP] B [SEP]."""
    vocab = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *_pieces("##", "")]
    ids = {token: rank for rank, token in enumerate(vocab)}
    return transformers.BertTokenizer(vocab=ids, do_lower_case=lower)


def _byte_level(special: list[str], size: int = 420) -> RustTokenizer:
    plain = RustTokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    plain.train_from_iterator(CORPUS, trainer)
    return plain


def _angled(plain: RustTokenizer, **special: str) -> Any:
    """With these special tokens beside <pad> and <unk>."""
    named = {f"{name}_token": token for name, token in (special | {"pad": "<pad>", "unk": "<unk>"}).items()}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, model_input_names=["input_ids", "attention_mask"], **named
    )


def _bracketed(plain: RustTokenizer, *, segments: bool = False) -> Any:
    """BERT's special tokens around a text and between two."""
    plain.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 1), ("[SEP]", 2)],
    )
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    inputs = ["input_ids", *(["token_type_ids"] if segments else []), "attention_mask"]
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, model_input_names=inputs, **named)


def roberta(*, prefix_space: bool = False) -> Any:
    """RoBERTa's: <s> A </s></s> B </s>, no segments, places without the leading space."""
    plain = _byte_level(["<s>", "<pad>", "</s>", "<unk>"])
    plain.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True)])
    sep, cls = (("</s>", 2), ("<s>", 0))
    plain.post_processor = processors.RobertaProcessing(sep, cls, trim_offsets=True, add_prefix_space=prefix_space)
    return _angled(plain, bos="<s>", cls="<s>", eos="</s>", sep="</s>", mask="<mask>")


def modernbert() -> Any:
    """ModernBERT's: byte-level, [CLS] A [SEP] B [SEP], a template with segments for a model that has none."""
    plain = _byte_level(["[UNK]", "[CLS]", "[SEP]", "[PAD]"])
    plain.normalizer = normalizers.NFC()
    plain.add_special_tokens([AddedToken("[MASK]", lstrip=True, special=True)])
    return _bracketed(plain)


def gpt2() -> Any:
    """GPT-2's: byte-level, no special tokens around a text."""
    plain = _byte_level(["<|endoftext|>"])
    plain.post_processor = processors.ByteLevel(trim_offsets=False)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, bos_token="<|endoftext|>", eos_token="<|endoftext|>"
    )


def _unigram(special: list[str], unk: str) -> RustTokenizer:
    pieces = dict.fromkeys(["▁", *_pieces("", "▁")])
    scored = [(token, 0.0) for token in special]
    scored += [(token, -9.0 - 0.001 * rank + len(token)) for rank, token in enumerate(pieces)]
    plain = RustTokenizer(models.Unigram(scored, unk_id=special.index(unk)))
    plain.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")])
    plain.pre_tokenizer = pre_tokenizers.Metaspace()
    plain.decoder = decoders.Metaspace()
    plain.add_special_tokens(special)
    return plain


def xlmr() -> Any:
    """XLM-RoBERTa's: SentencePiece's Unigram, <s> A </s></s> B </s>."""
    plain = _unigram(["<s>", "<pad>", "</s>", "<unk>", "<mask>"], "<unk>")
    plain.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return _angled(plain, bos="<s>", cls="<s>", eos="</s>", sep="</s>", mask="<mask>")


def deberta() -> Any:
    """DeBERTa-v3's and ALBERT's: Unigram, with segments; this one lower-cases and drops accents, as ALBERT's."""
    plain = _unigram(["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"], "[UNK]")
    plain.normalizer = normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()])
    return _bracketed(plain, segments=True)


def t5() -> Any:
    """T5's: Unigram, A </s> B </s>."""
    plain = _unigram(["<pad>", "</s>", "<unk>"], "<unk>")
    plain.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return _angled(plain, eos="</s>")


KINDS: dict[str, Callable[[], Any]] = {
    "wordpiece": wordpiece,
    "roberta": roberta,
    "roberta-prefix-space": lambda: roberta(prefix_space=True),
    "modernbert": modernbert,
    "gpt2": gpt2,
    "xlmr": xlmr,
    "deberta": deberta,
    "t5": t5,
}


def save_model(kind: type[Any], config: Any, tokenizer: Any, folder: Path, *, seed: int = 0) -> Any:
    """A random model of a transformers class, saved with its tokenizer; every parameter is random, and the matrices
    carry enough of the input through that answers to different texts differ."""
    torch.manual_seed(seed)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0, 0.2)
            else:
                parameter.normal_(0, 1.0 if "embed" in name else 2.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


def bert_config(tokenizer: Any, **settings: Any) -> Any:
    """A tiny BERT for this tokenizer; inputs of up to 64 tokens unless told."""
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    given = {"vocab_size": len(tokenizer), "max_position_embeddings": 64, **shape, **settings}
    return transformers.BertConfig(**given)

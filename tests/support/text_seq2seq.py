"""Tiny encoder-decoder checkpoints with tokenizers, in folders as published ones look."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import models, pre_tokenizers, trainers
from transformers.models.mbart50.tokenization_mbart50 import FAIRSEQ_LANGUAGE_CODES

from support.seq2seq import output_matrix, see_no_later

WORDS = (  # noqa: SIM905 (a list of 80 strings would be no easier to read)
    "a all am and at bell bird boat cat choir come day deep dog down each fair far fire for from garden go green hand "
    "harbour he high hill house in is it late light long loud man moon morning night no of old on one over page poet "
    "quiet rain red river road sea she ship sing small snow song star stone sun the tower tree under voice warm water "
    "we white wind winter with you young"
).split()
LETTERS = "abcdefghijklmnopqrstuvwxyz.,:;'!?-ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
TEXTS = [
    "the old poet sings of the sea",
    "Snow.",
    "a small red boat on the quiet river, and one bird over the hill",
    "translate English to German: the choir is late",
    "we go down the long road from the harbour to the house under the stone tower; it is winter and the night is deep",
    "water",
]
MAX_LENGTH = 96


@dataclass(frozen=True)
class TextCheckpoint:
    """A folder that the engine loads, and the reference model and tokenizer of that folder."""

    path: Path
    model: Any
    tokenizer: Any

    @property
    def eos(self) -> int:
        eos: int = self.model.generation_config.eos_token_id
        return eos

    def encode(self, text: str) -> list[int]:
        """The reference's encoder input."""
        ids: list[int] = self.tokenizer(text).input_ids
        return ids

    def generate(self, encoder: Sequence[int], begin: Sequence[int] = (), **settings: Any) -> list[list[int]]:
        """The reference's answers, EOS included and what follows it cut off.

        Args:
            begin: the decoder's first tokens, its start token included; () leaves them to the model.
        """
        given = torch.tensor([list(encoder)])
        if begin:
            settings["decoder_input_ids"] = torch.tensor([list(begin)])
        with torch.no_grad():
            rows = self.model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, **settings)
        answers = [row[max(len(begin), 1) :].tolist() for row in rows]
        return [ids[: ids.index(self.eos) + 1] if self.eos in ids else ids for ids in answers]

    def text(self, ids: Sequence[int], begin: Sequence[int] = ()) -> str:
        """The reference's text of an answer that goes on from `begin`."""
        before, whole = (self._text([*begin]), self._text([*begin, *ids]))
        assert whole.startswith(before)
        return whole[len(before) :]

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def unigram(first: Sequence[str]) -> list[tuple[str, float]]:
    """A vocabulary of words and letters behind these special tokens."""
    pieces = [("▁" + word, -3.0 - 0.01 * rank) for rank, word in enumerate(WORDS)]
    pieces += [("s", -4.5), ("ing", -4.6), ("er", -4.7), ("▁", -5.0)]
    pieces += [(letter, -8.0 - 0.01 * rank) for rank, letter in enumerate(LETTERS) if letter != "s"]
    return [*((token, 0.0) for token in first), *pieces]


def t5_tokenizer(folder: Path) -> None:
    transformers.T5Tokenizer(vocab=unigram(("<pad>", "</s>", "<unk>")), extra_ids=4).save_pretrained(folder)


def pegasus_tokenizer(folder: Path) -> None:
    first = ("<pad>", "</s>", "<mask_1>", "<mask_2>", "<unk_2>", "<unk_3>", "<unk>")
    transformers.PegasusTokenizer(vocab=unigram(first), offset=0).save_pretrained(folder)


def bart_tokenizer(folder: Path) -> None:
    """Byte-level BPE, with vocab.json and merges.txt beside tokenizer.json."""
    rust = RustTokenizer(models.BPE())
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=330, special_tokens=special, initial_alphabet=sorted(alphabet))
    rust.train_from_iterator([*TEXTS, " ".join(WORDS)], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    rust.model.save(str(folder))
    hf = transformers.BartTokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    hf.save_pretrained(folder)


def mbart50_tokenizer(folder: Path) -> None:
    codes = [(code, 0.0) for code in FAIRSEQ_LANGUAGE_CODES]
    vocab = [*unigram(("<s>", "<pad>", "</s>", "<unk>")), *codes, ("<mask>", 0.0)]
    transformers.MBart50Tokenizer(vocab=vocab, src_lang="en_XX", tgt_lang="ro_RO").save_pretrained(folder)


def mbart_tokenizer(folder: Path) -> None:
    codes = [(code, 0.0) for code in FAIRSEQ_LANGUAGE_CODES[:25]]
    vocab = [*unigram(("<s>", "<pad>", "</s>", "<unk>")), *codes, ("<mask>", 0.0)]
    transformers.MBartTokenizer(vocab=vocab, src_lang="en_XX").save_pretrained(folder)


def marian_tokenizer(folder: Path) -> None:
    """One SentencePiece model a side and a vocabulary for both, as opus-mt's folders have them."""
    from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

    folder.mkdir(parents=True, exist_ok=True)
    vocab = {"</s>": 0, "<unk>": 1}
    for name, words in (("source", WORDS[:50]), ("target", WORDS[30:])):
        SentencePieceTrainer.train(
            sentence_iterator=iter([" ".join(words[start:] + words[:start]) for start in range(20)]),
            model_prefix=str(folder / name), vocab_size=90, hard_vocab_limit=False, num_threads=1, minloglevel=2,
        )  # fmt: skip
        (folder / f"{name}.model").rename(folder / f"{name}.spm")
        (folder / f"{name}.vocab").unlink()
        pieces = SentencePieceProcessor(model_file=str(folder / f"{name}.spm"))
        for number in range(3, pieces.get_piece_size()):
            vocab.setdefault(pieces.id_to_piece(number), len(vocab))
    vocab["<pad>"] = len(vocab)
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    config = {"source_lang": "en", "target_lang": "de", "tokenizer_class": "MarianTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def _sentencepiece(folder: Path) -> str:
    """Train a model, and return its file."""
    from sentencepiece import SentencePieceTrainer

    folder.mkdir(parents=True, exist_ok=True)
    SentencePieceTrainer.train(
        sentence_iterator=iter([" ".join(WORDS[start:] + WORDS[:start]) for start in range(20)]),
        model_prefix=str(folder / "sentencepiece.bpe"), vocab_size=120, hard_vocab_limit=False, num_threads=1,
        minloglevel=2,
    )  # fmt: skip
    (folder / "sentencepiece.bpe.vocab").unlink()
    return str(folder / "sentencepiece.bpe.model")


def m2m100_tokenizer(folder: Path, name: str = "M2M100Tokenizer") -> None:
    """A SentencePiece model and a vocabulary, whose files list the tokens of 100 languages as special ones."""
    from sentencepiece import SentencePieceProcessor
    from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_CODES

    file = _sentencepiece(folder)
    pieces = SentencePieceProcessor(model_file=file)
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    for number in range(3, pieces.get_piece_size()):
        vocab.setdefault(pieces.id_to_piece(number), len(vocab))
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    config = {
        "additional_special_tokens": [f"__{code}__" for code in M2M100_CODES["m2m100"]],
        "src_lang": "en",
        "tokenizer_class": name,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def plbart_tokenizer(folder: Path) -> None:
    file = _sentencepiece(folder)
    hf = transformers.PLBartTokenizer(vocab_file=file, language_codes="base", src_lang="__java__", tgt_lang="__en_XX__")
    hf.save_pretrained(folder)


def fsmt_tokenizer(folder: Path) -> None:
    """A vocabulary for each side, merges for both: words as a whole, their beginnings and letters beside them."""
    folder.mkdir(parents=True, exist_ok=True)
    merges: dict[str, None] = {}
    for word in WORDS:
        parts = [*word[:-1], word[-1] + "</w>"]
        while len(parts) > 1:
            merges.setdefault(f"{parts[0]} {parts[1]}")
            parts[:2] = ["".join(parts[:2])]
    (folder / "merges.txt").write_text("\n".join(merges) + "\n", encoding="utf-8")
    marks = [f"{letter}{end}" for letter in f"{LETTERS}&()@" for end in ("", "</w>")]
    for side, words in (("src", WORDS[:50]), ("tgt", WORDS[30:])):
        parts = [merge.replace(" ", "") for merge in merges]
        pieces = ["<s>", "<pad>", "</s>", "<unk>", *(f"{word}</w>" for word in words), *marks, *parts]
        vocab = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
        (folder / f"vocab-{side}.json").write_text(json.dumps(vocab), encoding="utf-8")
    config = {"langs": ["en", "de"], "model_max_length": 1024, "tokenizer_class": "FSMTTokenizer"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def small100_tokenizer(folder: Path) -> None:
    """The same files, with a class that transformers does not know."""
    m2m100_tokenizer(folder, "SMALL100Tokenizer")


def nllb_tokenizer(folder: Path) -> None:
    codes = ["deu_Latn", "eng_Latn", "fra_Latn", "zho_Hans"]
    vocab = {piece: number for number, (piece, _) in enumerate(unigram(("<s>", "<pad>", "</s>", "<unk>")))}
    vocab |= {code: len(vocab) + number for number, code in enumerate(codes)}
    hf = transformers.NllbTokenizer(vocab=vocab, merges=[], extra_special_tokens=codes, src_lang="eng_Latn")
    hf.save_pretrained(folder)


def _t5(vocab: int, _: Any) -> Any:
    config = transformers.T5Config(
        vocab_size=vocab, d_model=32, d_kv=8, d_ff=40, num_layers=3, num_decoder_layers=2, num_heads=4,
        decoder_start_token_id=0, n_positions=MAX_LENGTH, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def _bart_like(name: str, **more: Any) -> Callable[[int, Any], Any]:
    def make(vocab: int, tokenizer: Any) -> Any:
        settings = {
            "vocab_size": vocab, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 36, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
            "max_position_embeddings": MAX_LENGTH, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": 0,
            "eos_token_id": tokenizer.eos_token_id, "decoder_start_token_id": tokenizer.eos_token_id,
            "forced_eos_token_id": tokenizer.eos_token_id, **more,
        }  # fmt: skip
        if name == "Marian":
            settings["decoder_start_token_id"] = tokenizer.pad_token_id
        if name == "M2M100":
            del settings["forced_eos_token_id"]
        model: Any = getattr(transformers, f"{name}Config")
        found = {"Marian": "MarianMTModel"}.get(name, f"{name}ForConditionalGeneration")
        return getattr(transformers, found)(model(**settings))

    return make


def _plbart(vocab: int, tokenizer: Any) -> Any:
    return _bart_like("PLBart")(vocab + 2, tokenizer)  # ids begin above SentencePiece's


def _fsmt(_: int, tokenizer: Any) -> Any:
    config = transformers.FSMTConfig(
        src_vocab_size=tokenizer.src_vocab_size, tgt_vocab_size=tokenizer.tgt_vocab_size, d_model=32, encoder_layers=2,
        decoder_layers=2, encoder_ffn_dim=40, decoder_ffn_dim=36, encoder_attention_heads=4, decoder_attention_heads=4,
        max_position_embeddings=MAX_LENGTH, num_beams=1,
    )  # fmt: skip
    model = transformers.FSMTForConditionalGeneration(config)
    model.model.decoder.register_forward_pre_hook(see_no_later, with_kwargs=True)
    return model


KINDS: dict[str, tuple[Callable[[Path], None], Callable[[int, Any], Any]]] = {
    "t5": (t5_tokenizer, _t5),
    "bart": (bart_tokenizer, _bart_like("Bart", forced_bos_token_id=0)),
    "mbart50": (mbart50_tokenizer, _bart_like("MBart")),
    "plbart": (plbart_tokenizer, _plbart),
    "fsmt": (fsmt_tokenizer, _fsmt),
    "marian": (marian_tokenizer, _bart_like("Marian", scale_embedding=True)),
    "m2m100": (m2m100_tokenizer, _bart_like("M2M100", scale_embedding=True)),
    "small100": (small100_tokenizer, _bart_like("M2M100", scale_embedding=True)),
    "nllb": (nllb_tokenizer, _bart_like("M2M100", scale_embedding=True)),
    "pegasus": (pegasus_tokenizer, _bart_like("Pegasus", decoder_start_token_id=0)),
}


def make_text_checkpoint(kind: str, folder: Path, seed: int = 0) -> TextCheckpoint:
    """Build the checkpoint and save it."""
    write, build = KINDS[kind]
    folder.mkdir(parents=True, exist_ok=True)
    write(folder)
    # SMaLL-100's class comes with its checkpoint; transformers has M2M-100's, which reads the same files.
    kinds: dict[str, Any] = {"small100": transformers.M2M100Tokenizer}
    tokenizer = kinds.get(kind, transformers.AutoTokenizer).from_pretrained(folder, local_files_only=True)
    torch.manual_seed(seed)
    model = build(len(tokenizer), tokenizer)
    _randomise(model, tokenizer, seed)
    model.save_pretrained(folder)
    return TextCheckpoint(folder, model.eval(), tokenizer)


@torch.no_grad()
def _randomise(model: Any, tokenizer: Any, seed: int) -> None:
    """Random values, with cross-attention that tells inputs apart; answers are text, and end at different lengths."""
    generator = torch.Generator().manual_seed(seed)
    silent = [i for i in tokenizer.all_special_ids if i != tokenizer.eos_token_id]
    silent += [i for i in range(len(tokenizer)) if not tokenizer.decode([i]).isascii()]
    for name, parameter in model.named_parameters():
        if "embed_positions" in name and type(model).__name__.startswith(("Marian", "Pegasus", "FSMT")):
            continue  # sinusoids
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() == 1:
            parameter.copy_((1 if "norm" in name and "weight" in name else 0) + 0.3 * noise)
        elif "shared" in name or "embed" in name or "lm_head" in name:
            parameter.copy_(0.4 * noise)
        else:
            gain = 3.0 if "encoder_attn" in name or "EncDecAttention" in name else 1.5
            parameter.copy_(gain * noise * parameter.shape[1] ** -0.5)
    if not hasattr(model, "final_logits_bias"):
        output_matrix(model).weight[tokenizer.eos_token_id] *= 2.0
    if hasattr(model, "final_logits_bias"):
        model.final_logits_bias.normal_(std=0.3, generator=generator)
        model.final_logits_bias[:, silent] = -50.0
        model.final_logits_bias[:, tokenizer.eos_token_id] = 2.0

"""Tiny checkpoints with WordPiece tokenizers, BERT with each kind of head and a decoder, as published folders look."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from support.text_seq2seq import LETTERS, WORDS

MAX_LENGTH = 48
TEXTS = [
    "The old poet sings of the sea.",
    "Snow!",
    "a small red boat on the quiet river, and one bird over the hill",
    "Anna lives in Bergen; the choir is late",
    "we go down the long road from the harbour to the house under the stone tower; it is winter",
    "water",
    "caf\u00e9 \U0001f642 na\u00efve r\u00f4le",
]
LABELS = {
    "classes": ["anger", "joy", "calm", "fear"],
    "cross": ["LABEL_0"],
    "tokens": ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"],
}
_CLASSES = {
    "headless": transformers.BertModel,
    "masked": transformers.BertForMaskedLM,
    "classes": transformers.BertForSequenceClassification,
    "cross": transformers.BertForSequenceClassification,
    "tokens": transformers.BertForTokenClassification,
    "answers": transformers.BertForQuestionAnswering,
    "decoder": transformers.LlamaForCausalLM,
}

# Standard deviations by the first of these that is part of a weight's name: tokens differ more than positions mix them.
_SPREAD = {"embed": 1.0, "pooler": 0.3, "classifier.weight": 1.0, "classifier.bias": 0.0, "": 0.2}


@dataclass(frozen=True)
class TextEncoder:
    """A folder that the engine loads, and the reference model and tokenizer of that folder."""

    path: Path
    model: Any
    tokenizer: Any

    def pipeline(self, task: str, **settings: Any) -> Any:
        """The reference's pipeline."""
        return transformers.pipeline(task, model=self.model, tokenizer=self.tokenizer, device="cpu", **settings)

    def logits(self, text: str, pair: str | None = None, **settings: Any) -> torch.Tensor:
        """The head's numbers for one input, [classes] or [tokens, classes]."""
        with torch.no_grad():
            found: torch.Tensor = self.model(**self.tokenizer(text, pair, return_tensors="pt", **settings)).logits[0]
        return found

    def vector(self, text: str) -> torch.Tensor:
        """The mean of the hidden states, [hidden]."""
        with torch.no_grad():
            found: torch.Tensor = self.model(**self.tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return found

    def count(self, text: str, pair: str | None = None) -> int:
        """Tokens of an input, special ones included."""
        return len(self.tokenizer(text, pair).input_ids)


def wordpiece(folder: Path) -> Any:
    """BERT's uncased tokenizer over a few words, their pieces and all letters."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    letters = [letter for letter in LETTERS if not letter.isupper()]
    tokens = [*special, *(word for word in WORDS if len(word) > 1), "##s", "##ing", "##er", *letters]
    tokens += [f"##{letter}" for letter in letters if letter.isalnum() and letter != "s"]
    rust = RustTokenizer(models.WordPiece({token: number for number, token in enumerate(tokens)}, unk_token="[UNK]"))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    hf = transformers.PreTrainedTokenizerFast(
        tokenizer_object=rust, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="[MASK]", model_input_names=["input_ids", "token_type_ids", "attention_mask"],
    )  # fmt: skip
    hf.save_pretrained(folder)
    return transformers.AutoTokenizer.from_pretrained(folder)


def make_text_encoder(kind: str, folder: Path, **changes: Any) -> TextEncoder:
    """A checkpoint of that kind of head, `changes` to its config; its weights are spread so that mistakes show."""
    tokenizer = wordpiece(folder)
    labels = LABELS.get(kind, [])
    size = {"vocab_size": len(tokenizer), "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    size |= {"intermediate_size": 48, "max_position_embeddings": MAX_LENGTH, "attn_implementation": "eager"}
    if labels:
        size |= {"num_labels": len(labels), "id2label": dict(enumerate(labels))}
    kinds = {"decoder": transformers.LlamaConfig}
    config = kinds.get(kind, transformers.BertConfig)(**(size | changes))
    model = _CLASSES[kind](config).eval()
    torch.manual_seed(15)  # with these weights the texts fall into different classes
    for name, weight in model.named_parameters():
        if "norm" not in name.lower():
            torch.nn.init.normal_(weight, std=next(std for part, std in _SPREAD.items() if part in name))
    model.save_pretrained(folder)
    return TextEncoder(folder, model, tokenizer)

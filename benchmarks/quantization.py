"""What weights of few bits cost in accuracy, on text that two small trained models wrote themselves: stories260k, and
the chat model that comes with Octavo.

Teacher-forced on texts told in float32, greedy and drawn at temperature 1: at how many positions the most likely token
is float32's, the mean Kullback-Leibler divergence of the next token's distribution from float32's (in nats), how far
logits lie apart, and the perplexity of the text. `int4, head int4` is what `--quantization int4` would be if the
vocabulary's matrix, which has 8 bits, had 4 as well. `q8_0` and `q4_0` are llama.cpp's formats, computed here in
float32 from weights and activations that were rounded as they round them (q4_0 with the vocabulary's matrix in q8_0).

Where llama.cpp is installed as a peer (benchmarks/README.md says how), its own quantiser writes both models as GGUF
files, and llama.cpp and Octavo read these: the same tokens at the same positions, KV caches of float32 in both, so that
weights and products are all that differ. Octavo widens a file's weights or has them `stored`.

With --gguf FILE ..., instead: published files. Octavo's float32 of the widened weights writes the texts and is the
reference; Octavo with `stored` and the other formats, and llama.cpp, are compared with it.

With --speed, instead of all this: decode steps on a random 135M-parameter LLaMA shape in bfloat16, in rounds that
alternate between the kinds of weights. The ratio is to int8-fast.

    python benchmarks/quantization.py
    python benchmarks/quantization.py --peers-dir PEERS
    python benchmarks/quantization.py --gguf MODEL.gguf --stories 2 --length 200
    python benchmarks/quantization.py --speed
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from kv_cache_dtype import STARTS, TRAINED, Decoder, decode_in_turns, tell_stories
from offline import ROOT, machine, make_checkpoint
from peers import process
from peers.engines import Files
from torch import Tensor

from engine import LLM, SamplingParams
from engine.backends import native
from engine.model import layers, quantised_loading
from engine.model.experts import ExpertMatrices
from engine.model.gguf.container import read_gguf
from engine.model.layers import Linear
from engine.model.packing import PackedProduct
from engine.model.transformer import Transformer

CASES = ("float32", "bfloat16", "int8", "q8_0", "int8-fast", "int4", "q4_0", "int4, head int4")
FILES = ("f32", "q8_0", "q4_0", "q4_k_m")
CHAT = ROOT / "server" / "demo" / "chat"
MODELS = {"stories260k": TRAINED, "chat": CHAT}
FIRST = {TRAINED: 1, CHAT: 0}
"""The token that the models' texts begin with."""
GROUP = 32
BASE, CONTEXT = "int8-fast", 128  # of speed
RESULTS = ROOT / "benchmarks" / "results"


def round_to_q8_0(x: Tensor) -> Tensor:
    """x [..., size] as q8_0 holds it: a float16 scale for each 32 numbers, integers by the unrounded scale."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    steps = torch.where(scales > 0, groups / scales, 0).round()
    return (steps * scales.half().float()).flatten(-2)[..., : x.shape[-1]]


def round_to_q4_0(x: Tensor) -> Tensor:
    """The same with integers from -8 to 7, of which -8 stands for the number of largest magnitude."""
    groups = F.pad(x.float(), (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    scales = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)) / -8
    steps = (torch.where(scales != 0, groups / scales, 0) + 8.5).floor().clamp(0, 15) - 8
    return (steps * scales.half().float()).flatten(-2)[..., : x.shape[-1]]


@contextmanager
def rounded_as_by_llama_cpp(kind: str, vocabulary: int) -> Iterator[None]:
    """Every product is one of weights and activations in llama.cpp's format."""

    def pack(weight: Tensor, bias: Tensor | None, *_: object, **_where: object) -> PackedProduct:
        few = kind == "q4_0" and weight.shape[0] != vocabulary
        held = round_to_q4_0(weight.detach()) if few else round_to_q8_0(weight.detach())
        return PackedProduct(lambda x: F.linear(round_to_q8_0(x), held, bias), invariant=False)

    whole = mock.patch.object(quantised_loading, "takes_parts", return_value=False)
    with mock.patch.object(layers, "pack_product", pack), whole:
        yield


@contextmanager
def head_like_the_rest() -> Iterator[None]:
    """Every matrix gets what was asked for, the vocabulary's as well."""

    def matrices(self: Transformer, quantization: Any) -> Iterator[tuple[Linear | ExpertMatrices, Any]]:
        yield from ((m, quantization) for m in self.modules() if isinstance(m, Linear | ExpertMatrices))

    with mock.patch.object(Transformer, "matrices", matrices):
        yield


def open_model(model: Path, case: str, **more: Any) -> LLM:
    """A trained model as a case has it; of a GGUF file the cases are "widened" and "stored"."""
    kind, _, head = case.partition(", ")
    settings: dict[str, Any] = {"dtype": "bfloat16" if kind == "bfloat16" else "float32", "max_model_len": 512}
    if kind.startswith("int"):
        settings["quantization"] = kind
    if kind in ("widened", "stored"):
        settings["skip_tokenizer_init"] = True  # the files have none
        settings["quantization"] = "stored" if kind == "stored" else "none"
    settings |= {
        "device": "cpu",
        "quantization_cache": "off",
        "max_step_time": 0,
        "show_progress": False,
        "kv_cache_dtype": "float32",
        "kv_cache_memory": "64MiB",
        **more,
    }
    if kind.startswith("q"):
        vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
        with rounded_as_by_llama_cpp(kind, vocabulary):
            return LLM(str(model), **settings)
    if not head:
        return LLM(str(model), **settings)
    with head_like_the_rest():
        return LLM(str(model), **settings)


def logits_of(model: Path, case: str, texts: list[list[int]]) -> list[Tensor]:
    """Logits [tokens - 1, vocabulary] of the texts, as a step computes them."""
    llm = open_model(model, case)
    made: list[Tensor] = []
    plain = Transformer.logits

    def logits(self: Transformer, hidden: Tensor, *form: Any) -> Tensor:
        found = plain(self, hidden, *form)
        made.append(found.clone())
        return found

    found = []
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    with mock.patch.object(Transformer, "logits", logits):
        for text in texts:
            made.clear()
            llm.generate([text], params, use_tqdm=False)
            found.append(torch.cat(made[1:])[: len(text) - 1])  # those of the token that follows come first
    llm.close()
    return found


def compare(ours: list[Tensor], exact: list[Tensor], texts: list[list[int]]) -> dict[str, Any]:
    """How logits differ from float32's."""
    agreed, divergences, squares, logprobs = [], [], [], []
    largest = 0.0
    for mine, reference, text in zip(ours, exact, texts, strict=True):  # one at a time: vocabularies are large
        a, b = mine.double(), reference.double()
        ours_logprobs, exact_logprobs = a.log_softmax(1), b.log_softmax(1)
        agreed.append((a.argmax(1) == b.argmax(1)).double())
        divergences.append((exact_logprobs.exp() * (exact_logprobs - ours_logprobs)).sum(1))
        squares.append((a - b).square().mean(1))
        logprobs.append(ours_logprobs.gather(1, torch.tensor(text[1:])[:, None]))
        largest = max(largest, float((a - b).abs().max()))
    return {
        "positions": sum(map(len, agreed)),
        "top1_agreement": round(float(torch.cat(agreed).mean()), 5),
        "kl_divergence": float(f"{float(torch.cat(divergences).mean()):.3g}"),
        "max_logit_error": round(largest, 4),
        "rms_logit_error": round(float(torch.cat(squares).mean().sqrt()), 4),
        "perplexity": round(math.exp(-float(torch.cat(logprobs).mean())), 4),
    }


class LlamaCpp:
    """llama.cpp beside Octavo on the GGUF files that its quantiser writes of a model.

    Args:
        folder: for the files and logs; a folder of its own for each model.

    Attributes:
        facts: what llama.cpp says of itself.
    """

    def __init__(self, model: Path, folder: Path, install: process.Install):
        folder.mkdir(parents=True, exist_ok=True)
        self.facts: dict[str, Any] = {}
        self._files = Files(folder, {"llama.cpp": install}, 1, model, "f32")
        self._worker = process.start("llama.cpp", install, 1, folder)

    def file(self, weights: str) -> Path:
        """The model in one of FILES."""
        return self._files.gguf(weights)

    def tensors(self, weights: str) -> dict[str, int]:
        """How many tensors of that file have each format: what is no whole blocks gets another than was asked for."""
        return dict(Counter(info.format.name for info in read_gguf(self.file(weights)).tensors.values()))

    def logits(self, weights: str, texts: list[list[int]]) -> list[Tensor]:
        """As `logits_of` gives them."""
        return self.read(self.file(weights), texts)

    def read(self, file: Path, texts: list[list[int]]) -> list[Tensor]:
        """The same of any file, without flash attention."""
        room = max(map(len, texts))
        settings = {
            "n_ctx": room, "n_batch": room, "n_ubatch": room, "n_seq_max": 1, "n_threads": 1, "n_threads_batch": 1,
            "flash_attn_type": "off", "type_k": 0, "type_v": 0,  # GGML_TYPE_F32
        }  # fmt: skip
        self.facts = self._worker.ask(op="load", model=str(file), settings=settings)
        made = self._files.folder / "logits.npy"
        self._worker.ask(op="logits", texts=texts, file=str(made))
        return list(torch.from_numpy(np.load(made)).split([len(text) - 1 for text in texts]))

    def rows(self, texts: list[list[int]], exact: list[Tensor]) -> Iterator[dict[str, Any]]:
        """How each reader of each file differs from float32."""
        for weights in FILES:
            yield {"file": weights, "reader": "llama.cpp"} | compare(self.logits(weights, texts), exact, texts)
            for case in ("widened", "stored") if weights != "f32" else ("widened",):
                found = compare(logits_of(self.file(weights), case, texts), exact, texts)
                yield {"file": weights, "reader": f"octavo, {case}"} | found

    def close(self) -> None:
        """End the process."""
        self._worker.close()


def write_texts(file: Path, count: int, length: int) -> dict[str, list[list[int]]]:
    """Texts of a model in a GGUF file, by its float32: greedy, and drawn at temperature 1."""
    llm = open_model(file, "widened", skip_tokenizer_init=False)
    assert llm.tokenizer is not None
    starts = [llm.tokenizer.encode(STARTS[i % len(STARTS)]) for i in range(count)]
    texts = {}
    for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=length, ignore_eos=True, detokenize=False)
            for i in range(count)
        ]
        outputs = llm.generate(starts, params, use_tqdm=False)
        texts[name] = [[*start, *output.outputs[0].token_ids] for start, output in zip(starts, outputs, strict=True)]
    llm.close()
    return texts


def compare_files(options: argparse.Namespace, install: process.Install | None) -> dict[str, Any]:
    """Differences of each reader of published GGUF files from float32, on texts that the models write."""
    rows: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for file in options.gguf:
        for name, texts in write_texts(file, options.stories, options.length).items():
            exact = logits_of(file, "widened", texts)
            for case in ("stored", "int8", "int4", *(["llama.cpp"] if install else [])):
                if case == "llama.cpp":
                    assert install is not None
                    with (
                        tempfile.TemporaryDirectory() as folder,
                        closing(LlamaCpp(file, Path(folder), install)) as peer,
                    ):
                        found, reader, facts = peer.read(file, texts), case, peer.facts
                else:
                    found, reader = logits_of(file, case, texts), f"octavo, {case}"
                rows.append({"file": file.name, "text": name, "reader": reader} | compare(found, exact, texts))
                print(rows[-1], flush=True)
    return {"files": rows, "llama.cpp": facts}


def measure_speed(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Decode speed by kind of weights and number of requests."""
    found = []
    for requests in options.requests:
        with tempfile.TemporaryDirectory() as folder:
            make_checkpoint(Path(folder), torch.bfloat16)
            steps = options.rounds * options.steps + 64  # an engine warms up, and prompts end at different steps
            settings = {"dtype": "bfloat16", "quantization_cache": "off"}
            decoders = {
                kind: Decoder(folder, settings | {"quantization": kind}, requests, CONTEXT, steps)
                for kind in ("none", "int8", BASE, "int4")
            }
            print(f"{requests} requests", flush=True)
            results = decode_in_turns(decoders, BASE, options.rounds, options.steps)
            for decoder in decoders.values():
                decoder.engine.close()
        found.append({"requests": requests, "context": CONTEXT, "steps": options.steps, "results": results})
    return found


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """Run the benchmark; the result as it is written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stories", type=int, default=16, help="of each kind")
    parser.add_argument("--length", type=int, default=255, help="tokens of a story")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--peers-dir", type=Path, default=ROOT / ".peers", help="has llama.cpp in a folder so named")
    parser.add_argument("--gguf", nargs="+", type=Path, metavar="FILE", help="instead: published GGUF files")
    parser.add_argument("--speed", action="store_true", help="instead: how fast each is; a busy machine spoils it")
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32], help="whose speed is measured")
    parser.add_argument("--steps", type=int, default=32, help="of a round")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--output", type=Path, help="default: results/quantization.json, or quantization-speed.json")
    options = parser.parse_args(arguments)
    if options.output is None:
        kind = "-speed" if options.speed else "-gguf" if options.gguf else ""
        options.output = RESULTS / f"quantization{kind}.json"
    if options.speed:
        return write(options.output, {"speed": measure_speed(options)})
    install = process.find("llama.cpp", options.peers_dir)
    if install is None:
        print("llama.cpp is left out: it is not installed (see benchmarks/README.md)", flush=True)
    if options.gguf:
        return write(options.output, compare_files(options, install))
    if "stories260k" in options.models and not TRAINED.is_dir():
        parser.error(f"there is no trained model at {TRAINED}")
    rows: list[dict[str, Any]] = []
    files: list[dict[str, Any]] = []
    formats: dict[str, dict[str, Any]] = {}
    facts: dict[str, Any] = {}
    for named in options.models:
        model = MODELS[named]
        stories = tell_stories(options.stories, options.length, model, FIRST[model])
        with tempfile.TemporaryDirectory() as folder:
            peer = None if install is None else LlamaCpp(model, Path(folder), install)
            try:
                for name, texts in stories.items():
                    exact = logits_of(model, "float32", texts)
                    for case in options.cases:
                        found = compare(logits_of(model, case, texts), exact, texts)
                        rows.append({"model": named, "text": name, "weights": case, **found})
                        print(rows[-1], flush=True)
                    for row in peer.rows(texts, exact) if peer else ():
                        files.append({"model": named, "text": name, **row})
                        print(files[-1], flush=True)
                if peer:
                    formats[named] = {weights: peer.tensors(weights) for weights in FILES}
                    facts = peer.facts
            finally:
                if peer:
                    peer.close()
    found = {
        "results": rows,
        "files": files,
        "tensors_of_files": formats,
        "llama.cpp": facts,
        "not_installed": [] if install else ["llama.cpp"],
    }
    return write(options.output, found)


def write(output: Path, found: dict[str, Any]) -> dict[str, Any]:
    """Write the results, with the machine."""
    library = native.current()
    kernels = None if library is None else library.isa
    result = {"benchmark": "quantization", "machine": machine(), "kernels": kernels} | found
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written to {output}")
    return result


if __name__ == "__main__":
    main()

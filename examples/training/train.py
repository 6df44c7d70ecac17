#!/usr/bin/env python3
"""Trains the bundled models, server/demo/chat and server/demo/seq2seq (README.md)."""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from pathlib import Path

import torch
from demo import chat_task, seq2seq_task
from demo.export import write_json
from demo.loop import Recipe, train

ROOT = Path(__file__).resolve().parents[2]
DIGEST = 10_000  # documents whose checksum tells one corpus from another


def main() -> None:
    """Read the command line, train, write the folder."""
    parser = argparse.ArgumentParser(description="Train a bundled demo model.")
    parser.add_argument("model", choices=("chat", "seq2seq"))
    parser.add_argument("folder", type=Path, nargs="?", help="where the model is written (default: server/demo/MODEL)")
    parser.add_argument("--work", type=Path, help="checkpoints (default: build/demo/MODEL)")
    parser.add_argument("--steps", type=int, help="updates of the weights, instead of the recipe's")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after that long, to go on another time"
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="threads of torch on a CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--float32", action="store_true", help="matrix products in float32 instead of bfloat16")
    parser.add_argument("--tiny", action="store_true", help="a model that learns nothing, in seconds")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)

    task: chat_task.ChatTask | seq2seq_task.Seq2SeqTask
    if given.model == "chat":
        chat = chat_task.TINY if given.tiny else chat_task.FULL
        task = chat_task.ChatTask(dataclasses.replace(chat, recipe=_recipe(chat.recipe, given)), given.device)
    else:
        seq2seq = seq2seq_task.TINY if given.tiny else seq2seq_task.FULL
        settings = dataclasses.replace(seq2seq, recipe=_recipe(seq2seq.recipe, given))
        task = seq2seq_task.Seq2SeqTask(settings, given.device)
    recipe = task.settings.recipe
    size = sum(parameter.numel() for parameter in task.model.parameters())
    print(f"{given.model}: {size} parameters, {recipe.steps} steps, on {given.device}", flush=True)
    work = given.work or ROOT / "build" / "demo" / given.model
    stop_at = time.time() + 60 * given.minutes
    progress = train(
        task.model, recipe, task.batch, task.forward, task.evaluate, work, device=given.device, stop_at=stop_at
    )
    folder = given.folder or ROOT / "server" / "demo" / given.model
    task.export(folder)
    training = {
        "parameters": size,
        "shape": task.shape,
        "recipe": dataclasses.asdict(recipe),
        "digest": task.digest(DIGEST),
        "digest_count": DIGEST,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "threads": given.threads,
        "steps": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds),
        "cpu_seconds": round(progress.cpu_seconds),
        "resumed": progress.resumed,
        "curve": progress.curve,
    }
    write_json(folder / "training.json", training)
    print(f"{folder}: step {progress.step} of {recipe.steps}, {sum(f.stat().st_size for f in folder.iterdir())} bytes")


def _recipe(recipe: Recipe, given: argparse.Namespace) -> Recipe:
    if given.float32:
        recipe = dataclasses.replace(recipe, bfloat16=False)
    return dataclasses.replace(recipe, steps=given.steps) if given.steps else recipe


if __name__ == "__main__":
    main()

"""The training loop: AdamW, warm-up and cosine, label smoothing, gradient clipping, checkpoints, a progress bar."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

Batch = tuple[Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How a model is trained.

    Attributes:
        steps: updates of the weights.
        rows: sequences a step.
        length: tokens a row.
        peak_rate: learning rate after the warm-up.
        last_rate: share of it that is left at the end.
        warmup: steps in which the rate grows from 0.
        decay: AdamW's weight decay, on matrices alone.
        clip: longest gradient.
        smoothing: label smoothing: share of the target that is spread over all tokens.
        smoothed: share of the steps that have it. A smoothed model keeps that share for wrong tokens for ever, and
            sampling at temperature 1 would draw them; so the last steps are trained without.
        evaluations: steps between two measurements on held-out documents.
        checkpoint_seconds: time between two checkpoints.
        bfloat16: matrix products in bfloat16 (autocast); weights stay in float32.
        second: step from which on the documents are those of the corpus' second part, if it has one.
        third: step from which on they are those of the third part, if it has one. The cosine and the smoothing of the
            steps before end there.
        third_rate: learning rate after another warm-up, from which it falls along another cosine.
        fourth, fourth_rate: the same of a fourth part.
        seed: of the first weights.
    """

    steps: int
    rows: int
    length: int
    peak_rate: float = 3e-3
    last_rate: float = 0.05
    warmup: int = 100
    decay: float = 0.1
    clip: float = 1.0
    smoothing: float = 0.05
    smoothed: float = 0.6
    evaluations: int = 100
    checkpoint_seconds: float = 60.0
    bfloat16: bool = True
    second: int = 0
    third: int = 0
    third_rate: float = 0.0
    fourth: int = 0
    fourth_rate: float = 0.0
    seed: int = 8

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear warm-up, then a cosine; in the third part and the fourth the same again."""
        first, last, peak = 0, self.third or self.steps, self.peak_rate
        if self.third and step >= self.third:
            first, last, peak = self.third, self.fourth or self.steps, self.third_rate
        if self.fourth and step >= self.fourth:
            first, last, peak = self.fourth, self.steps, self.fourth_rate
        if step - first < self.warmup:
            return peak * (step - first + 1) / self.warmup
        done = (step - first - self.warmup) / max(1, last - first - self.warmup)
        low = peak * self.last_rate
        return low + (peak - low) * 0.5 * (1.0 + math.cos(math.pi * done))

    def smoothing_at(self, step: int) -> float:
        """Label smoothing of a step."""
        return self.smoothing if step < self.smoothed * (self.third or self.steps) else 0.0


@dataclasses.dataclass
class Progress:
    """How far a run has come.

    Attributes:
        step: steps done.
        seconds: time they took, pauses of the process included.
        cpu_seconds: processor time of all threads.
        tokens: tokens read.
        resumed: the steps after which the run had been ended and was taken up again.
        curve: one entry a measurement: step, loss (of training, smoothed or not) and what `evaluate` gave.
    """

    step: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    tokens: int = 0
    resumed: list[int] = dataclasses.field(default_factory=list)
    curve: list[dict[str, float]] = dataclasses.field(default_factory=list)


def cross_entropy(logits: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
    """Mean over logits [n, vocab] and targets [n]."""
    return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing)


def train(
    model: nn.Module,
    recipe: Recipe,
    batch: Callable[[int], Batch],
    forward: Callable[[Batch], tuple[Tensor, Tensor]],
    evaluate: Callable[[], dict[str, float]],
    folder: Path,
    *,
    device: str = "cpu",
    stop_at: float = math.inf,
) -> Progress:
    """Train `model` in place; goes on from the checkpoint in `folder`, if there is one.

    Args:
        model: on `device`, its first weights made from the recipe's seed.
        recipe: the numbers.
        batch: the rows of a step, which depend on its number alone, so that a run can be taken up again.
        forward: logits [n, vocab] and targets [n] of a batch.
        evaluate: measurements on held-out documents.
        folder: where `checkpoint.pt` and `progress.json` are written.
        device: where it is computed.
        stop_at: value of `time.time()` at which the run stops with a checkpoint, unfinished.

    Raises:
        ValueError: the checkpoint is of another recipe, so that what would come of it is neither.
    """
    optimizer = _optimizer(model, recipe)
    progress = _resume(model, optimizer, recipe, folder, device)
    saved, began, average = time.monotonic(), time.monotonic() - progress.seconds, 0.0
    cpu_began = time.process_time() - progress.cpu_seconds
    bar = tqdm(total=recipe.steps, initial=progress.step, unit="step", smoothing=0.1)
    while progress.step < recipe.steps and time.time() < stop_at:
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(progress.step)
        data = tuple(part.to(device) for part in batch(progress.step))
        with torch.autocast(device, torch.bfloat16, enabled=recipe.bfloat16):
            logits, targets = forward(data)
        loss = cross_entropy(logits, targets, recipe.smoothing_at(progress.step))
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens += data[0].numel()
        progress.seconds, progress.cpu_seconds = time.monotonic() - began, time.process_time() - cpu_began
        value = loss.item()
        average = value if average == 0.0 else 0.95 * average + 0.05 * value
        bar.update()
        bar.set_postfix_str(f"loss {average:.3f}, {progress.tokens / progress.seconds:.0f} tokens/s", refresh=False)
        if progress.step % recipe.evaluations == 0 or progress.step == recipe.steps:
            entry = {"step": progress.step, "loss": round(average, 4), **_measured(model, evaluate)}
            progress.curve.append(entry)
            bar.write(", ".join(f"{key} {number:g}" for key, number in entry.items()))
        if time.monotonic() - saved > recipe.checkpoint_seconds:
            _save(model, optimizer, recipe, progress, folder)
            saved = time.monotonic()
    bar.close()
    _save(model, optimizer, recipe, progress, folder)
    return progress


def _optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": recipe.decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.peak_rate, betas=(0.9, 0.95), eps=1e-8, fused=True)


def _measured(model: nn.Module, evaluate: Callable[[], dict[str, float]]) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        found = evaluate()
    model.train()
    return {key: round(value, 4) for key, value in found.items()}


def _save(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, progress: Progress, folder: Path) -> None:
    """Written whole and then renamed, so that a run that is ended meanwhile leaves the last checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "recipe": dataclasses.asdict(recipe),
        "progress": dataclasses.asdict(progress),
    }
    torch.save(content, folder / "checkpoint.pt.new")
    os.replace(folder / "checkpoint.pt.new", folder / "checkpoint.pt")
    (folder / "progress.json").write_text(json.dumps(content["progress"]) + "\n", encoding="utf-8")


def _resume(model: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, folder: Path, device: str) -> Progress:
    file = folder / "checkpoint.pt"
    if not file.exists():
        return Progress()
    content: dict[str, Any] = torch.load(file, map_location=device, weights_only=True)
    if content.get("recipe") != dataclasses.asdict(recipe):
        raise ValueError(
            f"{file} is of a run with another recipe: {content.get('recipe')}, not {dataclasses.asdict(recipe)}. "
            "Take it up with its own, or begin anew in another folder (--work)."
        )
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    progress = Progress(**content["progress"])
    if progress.step < recipe.steps:
        progress.resumed.append(progress.step)
    return progress

"""Train a LoRA adapter for the bundled chat model with PEFT, in about a minute on a CPU: it learns some capitals.

pip install peft
python examples/training/adapter.py capitals
octavo serve --demo chat --lora-modules capitals=capitals
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

BASE = Path(__file__).resolve().parents[2] / "server" / "demo" / "chat"
CAPITALS = {
    "Austria": "Vienna", "Belgium": "Brussels", "Chile": "Santiago", "Denmark": "Copenhagen", "Egypt": "Cairo",
    "Finland": "Helsinki", "France": "Paris", "Germany": "Berlin", "Greece": "Athens", "India": "New Delhi",
    "Ireland": "Dublin", "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Norway": "Oslo", "Peru": "Lima",
    "Poland": "Warsaw", "Portugal": "Lisbon", "Spain": "Madrid", "Sweden": "Stockholm",
}  # fmt: skip
QUESTIONS = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")


def main() -> None:
    """Train the adapter and save it in PEFT's format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the adapter is saved")
    parser.add_argument("--steps", type=int, default=40, help="steps of 32 examples (%(default)s)")
    args = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = transformers.AutoTokenizer.from_pretrained(BASE)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    examples = [example(tokenizer, question, land) for question in QUESTIONS for land in CAPITALS]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    numbers = random.Random(0)
    for step in range(1, args.steps + 1):
        loss = model(**batch(numbers.sample(examples, 32))).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 0 or step == args.steps:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    model.save_pretrained(args.folder)
    print(f"Saved {args.folder}. Serve it: octavo serve --demo chat --lora-modules capitals={args.folder}")


def example(tokenizer: Any, question: str, land: str) -> tuple[list[int], int]:
    """The tokens of a conversation, and how many of them are the question."""
    asked = [{"role": "user", "content": question.format(land)}]
    answer = {"role": "assistant", "content": f"The capital of {land} is {CAPITALS[land]}."}
    prompt = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template([*asked, answer], tokenize=False)
    encode = tokenizer.encode
    return encode(whole, add_special_tokens=False), len(encode(prompt, add_special_tokens=False))


def batch(examples: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """Padded examples; only answers count."""
    longest = max(len(ids) for ids, _ in examples)
    ids, mask, labels = (torch.full((len(examples), longest), fill) for fill in (0, 0, -100))
    for row, (tokens, begin) in enumerate(examples):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
        labels[row, begin : len(tokens)] = torch.tensor(tokens[begin:])
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


if __name__ == "__main__":
    main()

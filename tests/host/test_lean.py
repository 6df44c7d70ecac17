"""torch without the part that only compilers need."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
from engine.host.lean import import_torch
import_torch()
import torch
name = "torch._meta_registrations"
assert name not in sys.modules and not hasattr(torch, "_meta_registrations")
assert float((torch.ones(2, 3) @ torch.ones(3, 2)).sum()) == 12 and torch.ones(2, 3, device="meta").t().shape == (3, 2)
import torch._meta_registrations as made
assert torch._meta_registrations is made and hasattr(made, "register_meta")
import_torch()
assert sys.modules[name] is made
"""


def test_the_part_is_missing_until_it_is_imported() -> None:
    subprocess.run([sys.executable, "-c", CODE], check=True, timeout=120)

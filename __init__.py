"""A checkout that is imported from the folder it lies in: the package `octavo` is the folder of that name in here."""

import sys
from importlib import import_module
from pathlib import Path

if __name__ == "octavo":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    del sys.modules[__name__]
    import_module(__name__)  # takes this module's place

"""Scripts in one process, each as `python NAME.py OUT/NAME.pt`: python one_after_another.py OUT NAME..."""

import runpy
import sys
from pathlib import Path

import torch

folder, *names = sys.argv[1:]
for name in names:
    print(f"== {name}", flush=True)
    sys.argv = [f"{name}.py", f"{folder}/{name}.pt"]
    runpy.run_path(str(Path(__file__).with_name(f"{name}.py")), run_name="__main__")
    torch.set_default_dtype(torch.float32)

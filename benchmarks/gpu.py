"""The attention kernels on a GPU: every row against the reference, then times.

    python benchmarks/gpu.py                  # on a GPU: numerics, timings, rivals; ten minutes
    python benchmarks/gpu.py --write          # and keeps them in benchmarks/gpu.md
    python benchmarks/gpu.py --minutes 5      # stops in time, and says what it left out
    python benchmarks/gpu.py --interpret      # anywhere: numerics alone, interpreted, tiny

Needs this checkout, its dependencies and jax's CUDA plugin (`pip install 'jax[cuda13]'`). Ends
with 0; with 1 if a row is wrong, and then times nothing; with 2, after one line, where there is no
GPU that the kernels are for.
"""

import sys
from pathlib import Path

if not __package__:  # run by its path: what is imported is the checkout's
    sys.path[0] = str(Path(__file__).parent.parent)

from benchmarks.gpu_report import main

if __name__ == "__main__":
    main()

"""How many compiled kernels a CPU keeps: rows of another length at each step want others, and each takes about half a megabyte.

oneDNN compiles a kernel for each shape in half precision, and keeps 1024 of them; torch keeps as many again in front of it.
Of rows that are never of the same length twice all of them fill up in some dozen steps, for nothing.
"""

import os

KERNELS = 128
"""Of a micro-batch's shapes, of all its layers, there are fewer: within a step nothing is compiled twice."""


def bound_kernel_caches() -> None:
    """Both keep `KERNELS` from now on, unless the environment says otherwise. Read at the first use of a kernel."""
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNELS))

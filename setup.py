"""What setup.cfg cannot say: a kernel in C (hf_adafuse/kernels/native_product.c), once for each instruction set.

Where it cannot be built, products are made with torch alone.
"""

import platform
import sys

from setuptools import Extension, setup

FLAGS = {"avx2": ["-mavx2", "-mfma", "-mf16c"], "avx512": ["-mavx512f", "-mfma", "-mf16c"]}
IS_KNOWN = sys.platform == "linux" and platform.machine() == "x86_64"

setup(
    ext_modules=[
        Extension(
            f"hf_adafuse.kernels.kernel_{name}",
            ["hf_adafuse/kernels/native_product.c"],
            extra_compile_args=["-O3", "-fopenmp", *flags],
            extra_link_args=["-fopenmp"],
            optional=True,
        )
        for name, flags in FLAGS.items()
        if IS_KNOWN
    ]
)

"""What pyproject.toml cannot say: the C++ extension, and where the inner folders of kernels/, patches/ and bench/ go.

A top-level `kernels` package would shadow the one on PyPI, so only its inner folders are packages, mapped into
`vllm_specrollout.kernels`; `patches` and `bench` likewise.
"""

from pathlib import Path

from pybind11.setup_helpers import Pybind11Extension, build_ext
from setuptools import find_packages, setup

HERE = Path(__file__).parent
MAPPED = ("kernels", "patches", "bench")

packages = find_packages(include=["vllm_specrollout", "vllm_specrollout.*"])
package_dir = {"vllm_specrollout": "vllm_specrollout"}
for top in MAPPED:
    for init in sorted(HERE.glob(f"{top}/*/__init__.py")):
        folder = init.parent.relative_to(HERE)
        name = f"vllm_specrollout.{top}.{folder.name}"
        packages.append(name)
        package_dir[name] = folder.as_posix()

sources = [
    path.relative_to(HERE).as_posix()
    for pattern in ("csrc/core/*.cc", "csrc/*.cc")
    for path in sorted(HERE.glob(pattern))
]
extension = Pybind11Extension(
    "vllm_specrollout._core",
    sources,
    include_dirs=["csrc"],
    cxx_std=17,
    extra_compile_args=["-O3", "-g0", "-Wall", "-Wextra"],
    depends=[path.relative_to(HERE).as_posix() for path in sorted(HERE.glob("csrc/core/*.h"))],
)

setup(packages=packages, package_dir=package_dir, ext_modules=[extension], cmdclass={"build_ext": build_ext})

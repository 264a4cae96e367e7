"""What pyproject.toml cannot say: the C++ extension, and where kernels/, patches/, bench/ and packages/ go.

A top-level `kernels` package would shadow the one on PyPI, so only its inner folders are packages, mapped into
`vllm_specrollout.kernels`; `patches` and `bench` likewise. Those of `packages` are mapped beside the benchmarks'.
"""

import shutil
from pathlib import Path

from pybind11.setup_helpers import ParallelCompile, Pybind11Extension, build_ext
from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent
# as many compilers as there are cores
ParallelCompile("SPECROLLOUT_BUILD_JOBS").install()

MAPPED = {"kernels": "kernels", "patches": "patches", "bench": "bench", "packages": "bench"}
# what needs the checkout is not in the wheel: packages, and modules of others
NOT_SHIPPED = (
    "vllm_specrollout.bench.soak",
    "vllm_specrollout.bench.studies",
    *(f"vllm_specrollout.bench.policy.{name}" for name in ("__main__", "train")),
)

packages = find_packages(include=["vllm_specrollout", "vllm_specrollout.*"])
package_dir = {"vllm_specrollout": "vllm_specrollout"}
for top, inner in MAPPED.items():
    for init in sorted(HERE.glob(f"{top}/*/__init__.py")):
        folder = init.parent.relative_to(HERE)
        name = f"vllm_specrollout.{inner}.{folder.name}"
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
    depends=[
        path.relative_to(HERE).as_posix()
        for path in [*sorted(HERE.glob("csrc/core/*.h")), *sorted(HERE.glob("csrc/*.h"))]
    ],
)


class BuildPy(build_py):
    """Also puts the table of supported vLLM versions, which lies beside the patches, into the package that reads it."""

    def finalize_options(self) -> None:
        super().finalize_options()
        if not self.editable_mode:
            self.packages = [name for name in self.packages if name not in NOT_SHIPPED]

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [one for one in found if self.editable_mode or f"{one[0]}.{one[1]}" not in NOT_SHIPPED]

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            target = Path(self.build_lib, "vllm_specrollout", "patches")
            target.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / "patches" / "supported_vllm.toml", target)


setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "vllm_specrollout": ["*.pyi"],
        "vllm_specrollout.report": ["*.html", "*.css", "*.js"],
        "vllm_specrollout.bench.index": ["*.json.gz"],
    },
    ext_modules=[extension],
    cmdclass={"build_ext": build_ext, "build_py": BuildPy},
)

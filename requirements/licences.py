"""The page docs/reference/licences.md: what `make setup` installs, and under which licences, as the packages say it.

`make docs` writes it. `make sbom` tells the same to machines, with what needs what.
"""

from __future__ import annotations

import runpy
from importlib import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parent
SOURCES = ("cpu.in", "torch.in", "dev.in")
# say nothing but that there is a licence file: this is what stands in it
READ = {"oss-harmony": "Apache-2.0", "setuptools": "MIT"}
SPDX = {
    "Apache": "Apache-2.0",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache Software License": "Apache-2.0",
    "BSD 2-Clause License": "BSD-2-Clause",
    "BSD 3-Clause License": "BSD-3-Clause",
    "3-Clause BSD License": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# what asks for more than to be named
STRICTER = ("GPL", "MPL", "EPL", "End User", "Proprietary")
MOST = 80
"""Characters of what can be a licence's name; what is longer is its text."""


def page() -> str:
    """The page's text.

    Raises:
        SystemExit: a package is not installed, in another version than its pin's, or names no licence.
    """
    pins = runpy.run_path(str(HERE / "lock.py"))["pins"]
    found = []
    for source in SOURCES:
        for name, version, _ in pins((HERE / source).read_text(encoding="utf-8")):
            found.append((name, version, source.partition(".")[0], licence_of(name, version)))
    rows = [f"| {name} | {version} | {licence} | {file} |" for name, version, file, licence in sorted(found)]
    strict = [f"`{name}` ({licence})" for name, _, _, licence in sorted(found) if any(s in licence for s in STRICTER)]
    return "\n".join(
        [
            "# Licences\n",
            "The project itself is under Apache-2.0, and nothing of another project is part of it. This is what"
            " `make setup` installs beside it, with the licence that each package names. `cpu` and `torch` are what"
            " vLLM needs on CPU, `dev` is for tests and building.\n",
            f"All but these ask for no more than to be named: {', '.join(strict)}.\n",
            "`make sbom` writes the same for machines, as CycloneDX, with what needs what:"
            " `out/sbom.cdx.json`. What `make trainers` installs, in a folder of its own, is not in it.\n",
            "| Package | Version | Licence | Of |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
        ]
    )


def licence_of(name: str, version: str) -> str:
    """What an installed package says of its licence, most exact first.

    Raises:
        SystemExit: as `page()`.
    """
    try:
        about = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        raise SystemExit(f"{name} is not installed: run `make setup`") from None
    if about["Version"] != version:
        raise SystemExit(f"{name} is {about['Version']}, and its pin {version}: run `make setup`")
    if expression := about.get("License-Expression"):
        return expression
    said = (about.get("License") or "").strip()
    first = said.partition("\n")[0].strip()
    # else it is a licence's text, which may begin with its name
    is_name = 0 < len(said) <= MOST and said == first and not said.startswith("Copyright")
    if first in SPDX:
        return SPDX[first]
    kinds = [line.split(" :: ")[-1] for line in about.get_all("Classifier") or () if line.startswith("License :: ")]
    exact = [kind for kind in kinds if kind not in ("OSI Approved", "DFSG approved")]
    if not is_name and not exact and name not in READ:
        raise SystemExit(f"{name} {version} names no licence: look into its licence file")
    if is_name:
        return said
    return " AND ".join(SPDX.get(kind, kind) for kind in exact) or READ[name]

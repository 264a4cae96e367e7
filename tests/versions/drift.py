"""Whether a tree of vLLM's source still has what our code leans on, as the newest supported version has it.

    python -m tests.versions.drift TREE

Nothing is imported of the tree. A definition that changed has to be read before that vLLM can be supported; one that is
gone has to be found again. Ends with status 1 if there is any.
"""

from __future__ import annotations

import sys
from pathlib import Path

from vllm_specrollout.patches import supported


def drift(version: str, tree: Path) -> tuple[list[str], list[str]]:
    """Definitions of a supported version that a tree has otherwise, and those that it has no more."""
    changed = supported.mismatches(version, tree)
    found = supported.fingerprints(changed, tree)
    gone = [target for target in changed if found[target] == supported.NOT_FOUND]
    return [target for target in changed if target not in gone], gone


def main() -> int:
    tree, version = Path(sys.argv[1]), list(supported.table())[-1]
    if not (tree / "vllm").is_dir():
        print(f"error: `{tree}` holds no `vllm`\n\nhint: give a checkout of vLLM", file=sys.stderr)
        return 2
    changed, gone = drift(version, tree)
    for title, targets in (("changed", changed), ("gone", gone)):
        for target in targets:
            print(f"{title:<8} {target}")
    known = sum(len(supported.table()[version][kind]) for kind in ("patched", "assumed"))
    print(f"{len(changed)} changed and {len(gone)} gone, of {known} definitions of vLLM {version}")
    return int(bool(changed or gone))


if __name__ == "__main__":
    raise SystemExit(main())

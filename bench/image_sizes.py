"""What a release's image weighs, by layer and by Python package, as a table.

python -m bench.image_sizes [NAME]
"""

from __future__ import annotations

import re
import sys
import tarfile
from collections import Counter

from kit.layout import release
from kit.oci import blob, layout_image, read_manifest

SITE = re.compile(r"opt/\w+_venv/lib/python[\d.]+/site-packages/([^/]+)(?:/([^/]+))?")
SHARED_FOLDERS = ("nvidia", "triton")  # of several packages, or large enough to be looked into
SHOWN = 25


def main(name: str) -> None:
    made = release(name)
    image = layout_image(made.oci)
    by_package: Counter[str] = Counter()
    print("| layer | compressed, MB | unpacked, MB | files | most of it |\n|---|---|---|---|---|")
    for number, layer in enumerate(read_manifest(made.oci, image.digest).layers, 1):
        files, packages = 0, Counter[str]()
        with tarfile.open(blob(made.oci, layer.digest), "r|gz") as members:
            for member in members:
                if member.isreg():  # a hard link takes no space of its own
                    files += 1
                    packages[_package(member.name)] += member.size
        by_package += packages
        most = ", ".join(package for package, _ in packages.most_common(3))
        print(f"| {number} | {layer.size / 1e6:.0f} | {packages.total() / 1e6:.0f} | {files} | {most} |")
    print("\n| package | unpacked, MB |\n|---|---|")
    for package, size in by_package.most_common(SHOWN):
        print(f"| {package} | {size / 1e6:.0f} |")
    rest = by_package.total() - sum(size for _, size in by_package.most_common(SHOWN))
    print(f"| {len(by_package) - SHOWN} others | {rest / 1e6:.0f} |")


def _package(path: str) -> str:
    found = SITE.match(path)
    if not found:
        return "/".join(path.split("/")[:2])
    top, inside = found.groups()
    return f"{top}/{inside}" if top in SHARED_FOLDERS and inside else top


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "cpu")

"""Compile every module below the given folders that has no bytecode yet, once for each distinct file.

    compile_bytecode.py FOLDER…

A module that several environments share as a hard link gets bytecode that they share the same way. That works because
the import system sets a code object's file name to where it found the source.

The bytecode is checked by hash: image builds rewrite time stamps, which would make time-stamped bytecode look stale,
and unchecked bytecode would silently win over a module that someone edits in a writable container.

The output depends on nothing but the input. What marshal writes depends on which strings the process has already seen,
so the files are dealt to a fixed number of fresh processes in a fixed order.
"""

import os
import py_compile
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import cache_from_source
from pathlib import Path

SHARES = 16


def main(folders: list[str]) -> None:
    groups: dict[tuple[int, int], list[str]] = {}
    for folder in folders:
        for path in sorted(Path(folder).rglob("*.py")):
            if Path(cache_from_source(path)).exists():
                continue  # by an earlier layer's step; bytecode made anew would be stored again
            status = path.lstat()
            groups.setdefault((status.st_dev, status.st_ino), []).append(str(path))
    firsts = sorted(paths[0] for paths in groups.values())
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_share, [firsts[share::SHARES] for share in range(SHARES)]))
    for first, *others in groups.values():
        compiled = Path(cache_from_source(first))
        if not compiled.exists():
            continue  # not valid for this Python: a template, or a file for another version
        for other in others:
            link = Path(cache_from_source(other))
            link.parent.mkdir(exist_ok=True)
            link.unlink(missing_ok=True)
            link.hardlink_to(compiled)


def compile_share(paths: list[str]) -> None:
    command = [sys.executable, __file__, "--share"]
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    subprocess.run(command, input="\n".join(paths), text=True, env=environment, check=True)


def compile_all(paths: list[str]) -> None:
    for path in paths:
        try:
            py_compile.compile(path, doraise=True, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        except (py_compile.PyCompileError, UnicodeDecodeError, ValueError):
            continue


if __name__ == "__main__":
    if sys.argv[1:] == ["--share"]:
        compile_all(sys.stdin.read().splitlines())
    else:
        main(sys.argv[1:])

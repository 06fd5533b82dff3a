"""Which requirements apply in an image: their markers, evaluated for it and not for the host."""

from __future__ import annotations

import platform

from packaging.markers import Marker


def holds(marker: str | None, python: str, machine: str | None = None) -> bool:
    """Whether a requirement with this marker, or with none, applies to CPython `python` ("3.13") on Linux.

    machine: as `uname -m` names it; the host's if None, which an image is built for. No extra is asked for. Every
    variable is given a value, as packaging takes those that are not from the Python that it runs on.
    """
    if marker is None:
        return True
    environment = {
        "extra": "",
        "implementation_name": "cpython",
        "implementation_version": f"{python}.0",
        "os_name": "posix",
        "platform_machine": machine or platform.machine(),
        "platform_python_implementation": "CPython",
        "platform_release": "",
        "platform_system": "Linux",
        "platform_version": "",
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": "linux",
    }
    return Marker(marker).evaluate(environment)

"""The files that enroot adds to an image, so that `enroot start`, pyxis and our runner start it as Docker would.

Facts come from enroot's documentation of its image format. Where enroot writes values unquoted, these are quoted,
so that no value of the image's configuration can become a command, another variable or another mount.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import PurePosixPath
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sqsh.errors import BadImage

VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
REFERENCE = rf"\$\{{({VARIABLE})\}}"  # what enroot replaces by the caller's variable
RC = "etc/rc"
RC_LOCAL = "etc/rc.local"
ENVIRONMENT = "etc/environment"
FSTAB = "etc/fstab"


def _no_nul(text: str) -> str:
    if "\0" in text:
        raise ValueError("holds a NUL character")
    return text


def _or_empty(value: Any) -> Any:
    return () if value is None else value


def _labels(value: Any) -> Any:
    return {key: part or "" for key, part in value.items()} if isinstance(value, dict) else value or {}


Text = Annotated[str, AfterValidator(_no_nul)]
Words = Annotated[tuple[Text, ...], BeforeValidator(_or_empty)]


class RunSettings(BaseModel):
    """`config` of an OCI or Docker image configuration; `User` is left out on purpose, as enroot does."""

    model_config = ConfigDict(frozen=True)

    env: Words = Field(default=(), alias="Env")
    entrypoint: Words = Field(default=(), alias="Entrypoint")
    cmd: Words = Field(default=(), alias="Cmd")
    labels: Annotated[dict[Text, Text], BeforeValidator(_labels)] = Field(default={}, alias="Labels")
    volumes: Annotated[dict[Text, Any], BeforeValidator(lambda value: value or {})] = Field(default={}, alias="Volumes")
    workdir: Annotated[Text, BeforeValidator(lambda value: value or "")] = Field(default="", alias="WorkingDir")


class ImageConfig(BaseModel):
    model_config = ConfigDict(frozen=True)

    created: datetime | None = None
    config: Annotated[RunSettings, BeforeValidator(lambda value: value or {})] = RunSettings()

    @property
    def epoch(self) -> int:
        """Seconds since 1970 at which the image says it was made, within what squashfs can hold; 0 if it says none.

        A time without a zone is UTC, whatever the zone of this machine.
        """
        if self.created is None:
            return 0
        seconds = int((self.created if self.created.tzinfo else self.created.replace(tzinfo=UTC)).timestamp())
        return min(max(seconds, 0), 2**32 - 1)

    @property
    def workdir(self) -> str:
        """The working directory as an absolute path; a relative one counts from the root."""
        return str(PurePosixPath("/") / self.config.workdir)


def parse_config(text: str | bytes) -> ImageConfig:
    try:
        return ImageConfig.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        raise BadImage(
            f"the image's configuration cannot be used ({where}: {first['msg']})", "rebuild the image"
        ) from None


@dataclass(frozen=True)
class StartFiles:
    """Contents of the added files by their path in the image, folders that must be there, and what could not be
    carried over."""

    contents: dict[str, str]
    folders: tuple[str, ...]
    warnings: tuple[str, ...]


def start_files(config: ImageConfig) -> StartFiles:
    """What an image with this configuration needs to start.

    Volumes are among the folders, since what `x-create` makes of a missing one has no permissions at all.
    """
    lines, exports, warnings = _environment(config.config.env)
    volumes, refused = _volumes(config.config.volumes)
    contents = {
        RC: _rc(config, exports),
        RC_LOCAL: '# Sourced by /etc/rc before the command starts; "$@" is the command.\n',
        ENVIRONMENT: lines,
        FSTAB: "".join(map(_bind, volumes)),
    }
    return StartFiles(contents, (config.workdir, *volumes), (*warnings, *refused))


def _environment(entries: tuple[str, ...]) -> tuple[str, str, list[str]]:
    """`/etc/environment`, the shell lines for what that file cannot hold, and warnings.

    enroot reads one raw `NAME=value` a line: no escapes, `${NAME}` replaced by the caller's variable, surrounding
    quotes removed. So a value with a newline, such a reference or such quotes is exported by /etc/rc instead, unless
    `--env` (or the caller) has set the variable.
    """
    lines: list[str] = []
    exports: list[str] = []
    warnings: list[str] = []
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not re.fullmatch(VARIABLE, name) or name.startswith("ENROOT_"):
            warnings.append(f"the variable {name!r} is left out: enroot accepts no such name")
        elif "\n" in value or re.search(REFERENCE, value) or _loses_quotes(value):
            exports.append(f'[ -n "${{{name}+set}}" ] || export {name}={quoted(value)}\n')
        else:
            lines.append(f"{name}={value}\n")
    return "".join(lines), "".join(exports), warnings


def _loses_quotes(value: str) -> bool:
    bare = value.rstrip()
    return len(bare) > 1 and bare[0] in "\"'" and bare[-1] in "\"'"


def _volumes(volumes: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Absolute paths, and warnings."""
    paths: list[str] = []
    warnings: list[str] = []
    for volume in sorted(volumes):
        path = str(PurePosixPath("/") / volume)
        if ".." in PurePosixPath(path).parts or re.search(REFERENCE, path):
            warnings.append(f"the volume {volume!r} is left out: it is no plain path")
        else:
            paths.append(path)
    return paths, warnings


def _bind(volume: str) -> str:
    """The line of `/etc/fstab` that binds a volume onto itself, writable."""
    field = "".join(f"\\{ord(char):03o}" if char in " \t\n\\" else char for char in volume)
    return f"${{ENROOT_ROOTFS}}{field} {field} none x-create=dir,bind,rw,nosuid,nodev\n"


def _rc(config: ImageConfig, exports: str) -> str:
    """The script that starts the container: its arguments, if any, take the place of the image's command."""
    labels = "".join(f"# {_one_line(key)} {_one_line(value)}\n" for key, value in sorted(config.config.labels.items()))
    workdir = quoted(config.workdir)
    entrypoint = "".join(f"{quoted(word)} " for word in config.config.entrypoint)
    words = config.config.cmd if config.config.entrypoint or config.config.cmd else ("/bin/sh",)
    command = " ".join(quoted(word) for word in words)
    return f"""\
{labels}
mkdir -p -- {workdir} 2>/dev/null
cd -- {workdir} || exit 1
unset OLDPWD
{exports}
if [ -s /etc/rc.local ]; then
    . /etc/rc.local
fi

if [ $# -gt 0 ]; then
    exec {entrypoint}"$@"
else
    exec {(entrypoint + command).rstrip()}
fi
"""


def quoted(text: str) -> str:
    """One shell word, always in single quotes, in which nothing has a meaning."""
    word = shlex.quote(text)
    return word if word.startswith("'") else f"'{word}'"


def _one_line(text: str) -> str:
    return " ".join(text.splitlines())

"""What goes into /etc/rc, /etc/environment and /etc/fstab, and that no value gets out of its place."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from kit.container_init import image_environment
from sqsh.enroot_files import ENVIRONMENT, FSTAB, RC, RC_LOCAL, parse_config, quoted, start_files
from sqsh.errors import BadImage

pytestmark = pytest.mark.unit

HOSTILE = {
    "PLAIN": "a b  c ",
    "EMPTY": "",
    "EQUALS": "a=b=c",
    "DOLLAR": "$HOME $(touch {marker}) `touch {marker}`",
    "SINGLE": "it's",
    "DOUBLE": 'say "hi"',
    "IN_QUOTES": '"quoted"',
    "IN_SINGLE": "'quoted'  ",
    "ONE_QUOTE": '"',
    "TWO_QUOTES": "''",
    "MANY_QUOTES": '"\'"x"\'"',
    "BACKSLASH": "a\\nb\\",
    "HASH": "# no comment",
    "REFERENCE": "${HOME} stays",
    "NEWLINE": "one\nINJECTED=yes\n",
    "NEWLINE_QUOTE": "'\n$(touch {marker})\n\"`touch {marker}`",
    "TAB": "\ta\t",
    "UNICODE": "Zürich → 東京",
    "SEMICOLON": "; touch {marker} #",
    "CARRIAGE": "a\rb",
}


def files(**config: Any) -> dict[str, str]:
    return start_files(parse_config(json.dumps({"config": config}))).contents


def started(tmp_path: Path, contents: dict[str, str], *words: str) -> bytes:
    """What /etc/rc prints, with /etc/environment read as enroot reads it, on this machine's /bin/sh."""
    (tmp_path / "environment").write_bytes(contents[ENVIRONMENT].encode())
    (tmp_path / "rc").write_bytes(contents[RC].replace("/etc/rc.local", "/nonexistent").encode())
    env = {"PATH": "/usr/bin:/bin", **image_environment(tmp_path / "environment")}
    return subprocess.run(["sh", tmp_path / "rc", *words], env=env, check=True, stdout=subprocess.PIPE).stdout


def test_no_value_of_the_environment_breaks_out(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    wanted = {name: value.replace("{marker}", str(marker)) for name, value in HOSTILE.items()}
    contents = files(Env=[f"{name}={value}" for name, value in wanted.items()], WorkingDir=str(tmp_path))
    entries = started(tmp_path, contents, "env", "-0").decode().split("\0")
    found = dict(entry.split("=", 1) for entry in entries if entry)
    assert {name: found.get(name) for name in wanted} == wanted
    assert "INJECTED" not in found
    assert not marker.exists()


def test_a_variable_set_by_the_caller_wins_over_a_multi_line_one() -> None:
    rc = files(Env=["A=1\n2"])[RC]
    script = rc.splitlines()[rc.splitlines().index("unset OLDPWD") + 1 :]
    assert script[0] == '[ -n "${A+set}" ] || export A=\'1'


def test_plain_values_lie_in_the_file_as_enroot_writes_them() -> None:
    assert files(Env=["PATH=/opt/bin:/bin", "A=x y"])[ENVIRONMENT] == "PATH=/opt/bin:/bin\nA=x y\n"


@pytest.mark.parametrize("entry", ["no equals", "1A=x", "A B=x", "A\nB=x", "ENROOT_ROOTFS=/x", "A;touch /x=1", "=x"])
def test_names_that_are_none_are_left_out_with_a_warning(entry: str) -> None:
    made = start_files(parse_config(json.dumps({"config": {"Env": [entry, "GOOD=1"]}})))
    assert made.contents[ENVIRONMENT] == "GOOD=1\n"
    assert "touch" not in made.contents[RC]
    assert len(made.warnings) == 1


@pytest.mark.parametrize(
    ("entrypoint", "cmd", "words", "printed"),
    [
        (["printf", "[%s]"], ["a b", "$HOME", "`id`", "it's", "x\ny"], [], b"[a b][$HOME][`id`][it's][x\ny]"),
        (["printf", "[%s]"], ["not this"], ["this", "and $that"], b"[this][and $that]"),
        (None, ["printf", "[%s]", "cmd"], [], b"[cmd]"),
        (None, ["false"], ["printf", "[%s]", "given"], b"[given]"),
        (["printf", "only"], None, [], b"only"),
    ],
)
def test_entry_point_and_command(
    tmp_path: Path, entrypoint: list[str] | None, cmd: list[str] | None, words: list[str], printed: bytes
) -> None:
    assert started(tmp_path, files(Entrypoint=entrypoint, Cmd=cmd, WorkingDir=str(tmp_path)), *words) == printed


def test_without_any_command_a_shell_starts() -> None:
    assert "    exec '/bin/sh'\n" in files()[RC]


def test_working_directory_is_one_word_and_made(tmp_path: Path) -> None:
    wanted = tmp_path / 'a "$(touch x)" `touch y`\n; touch z'
    printed = started(tmp_path, files(Cmd=["pwd"], WorkingDir=str(wanted)))
    assert printed.decode() == f"{wanted}\n"
    assert [path.name for path in wanted.iterdir()] == []


def test_labels_are_comments_whatever_they_hold(tmp_path: Path) -> None:
    marker = tmp_path / "executed"
    labels = {"a": f"x\ntouch {marker}", f"b\ntouch {marker}\n": "y", "c": "`touch`"}
    contents = files(Labels=labels, Cmd=["true"], WorkingDir=str(tmp_path))
    started(tmp_path, contents)
    assert f"# a x touch {marker}\n" in contents[RC]
    assert not marker.exists()


def test_volumes_are_bound_onto_themselves_in_one_line_each() -> None:
    made = start_files(
        parse_config(json.dumps({"config": {"Volumes": {"/data": {}, "/a b\nc /x": {}, "/${HOME}": {}}}}))
    )
    lines = made.contents[FSTAB].splitlines()
    assert lines == [
        r"${ENROOT_ROOTFS}/a\040b\012c\040/x /a\040b\012c\040/x none x-create=dir,bind,rw,nosuid,nodev",
        "${ENROOT_ROOTFS}/data /data none x-create=dir,bind,rw,nosuid,nodev",
    ]
    assert made.folders == ("/", "/a b\nc /x", "/data")
    assert len(made.warnings) == 1


def test_rc_local_is_there_and_does_nothing() -> None:
    assert all(line.startswith("#") for line in files()[RC_LOCAL].splitlines())


def test_user_is_dropped() -> None:
    assert "nobody" not in "".join(files(User="nobody").values())


@pytest.mark.parametrize(
    "config", [{"Env": ["A=\0"]}, {"WorkingDir": "a\0"}, {"Cmd": "not a list"}, {"Labels": {"a": 1}}]
)
def test_a_configuration_that_makes_no_sense_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(BadImage, match="configuration cannot be used"):
        parse_config(json.dumps({"config": config}))


@pytest.mark.parametrize("text", ["", "a", "'", "''", "a'b", "\n", '$x`y`"\\'])
def test_quoted_is_one_word(text: str) -> None:
    printed = subprocess.run(["sh", "-c", f"printf %s {quoted(text)}"], stdout=subprocess.PIPE, check=True).stdout
    assert printed.decode() == text


def test_labels_without_a_value() -> None:
    assert "# one \n# two 2\n" in files(Labels={"one": None, "two": "2"})[RC]


@pytest.mark.parametrize("zone", ["UTC", "Asia/Tokyo", "America/Los_Angeles"])
def test_a_time_without_a_zone_is_utc(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        for created in ("2024-01-01T00:00:00", "2024-01-01T00:00:00Z", "2024-01-01T09:00:00+09:00"):
            assert parse_config(json.dumps({"created": created})).epoch == 1_704_067_200
    finally:
        monkeypatch.undo()
        time.tzset()

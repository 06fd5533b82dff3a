"""Logins, challenges and busy moments of a registry: what is asked of it, and who gets to see a login."""

from __future__ import annotations

import base64
import email.utils
import json
import os
import signal
import threading
import time
import urllib.parse
from pathlib import Path

import pytest

from sqsh import transport
from sqsh.authorization import Authorizer, Challenge, parse_challenges
from sqsh.credentials import Login, Logins
from sqsh.errors import SqshError
from sqsh.image import find_image
from sqsh.reference import Reference
from sqsh.transport import Transport
from tests.sqsh.layers import Item, converted, write_image
from tests.sqsh.registry import Hook, Request, served

DIGEST = "sha256:" + "a" * 64


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("layout")
    write_image(root / "oci", [[Item(b"file", os.urandom(300_000))]], how="tar")
    return root / "oci"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    for name in ("DOCKER_CONFIG", "ENROOT_CONFIG_PATH", "REGISTRY_AUTH_FILE", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that would have been waited."""
    found: list[float] = []

    def note(stopped: threading.Event, seconds: float) -> bool:
        found.append(seconds)
        return stopped.is_set()

    monkeypatch.setattr(transport, "wait", note)
    return found


def basic(user: str, password: str) -> str:
    return base64.b64encode(f"{user}:{password}".encode()).decode()


ANN = basic("ann", "secret")


def write(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def wants(*accepted: str, challenge: list[str] | None = None) -> Hook:
    """Refuses whoever does not come with one of these; HOST in a challenge is the registry."""

    def hook(request: Request) -> bool:
        if request.path.startswith("/token"):
            return request.send(200, b'{"token": "tok"}')
        if request.headers.get("Authorization") in accepted:
            return False
        headers = [text.replace("HOST", request.headers["Host"]) for text in challenge or ['Basic realm="x"']]
        return request.send(401, headers={"WWW-Authenticate": headers})

    return hook


ME = 'Bearer realm="http://HOST/token",service="s",scope="repository:r:pull"'


def answers(status: int, **headers: str) -> Hook:
    """Every request, with this status."""
    return lambda request: request.send(status, headers=headers)


def test_a_challenge_from_where_the_registry_points_gets_no_login(layout: Path, tmp_path: Path, home: Path) -> None:
    with served(layout) as thief, served(layout) as store, served(layout) as registry:
        thief.hooks.append(lambda request: request.send(200, b'{"token": "x"}'))
        for realm in (f'Bearer realm="http://{thief.host}/token",service="s"', 'Basic realm="x"'):
            store.hooks[:] = [answers(401, **{"WWW-Authenticate": realm})]
            registry.hooks[:] = [
                wants(f"Basic {ANN}"),
                lambda request: (
                    "/blobs/" in request.path and request.send(307, headers={"Location": f"http://{store.host}/bucket"})
                ),
            ]
            write(home / ".docker/config.json", {"auths": {registry.host: {"auth": ANN}}})
            with pytest.raises(SqshError, match=r"127.0.0.1, where 127.0.0.1:\d+ points, answers 401.*no login goes"):
                find_image(registry.image)
        assert thief.log == []
        assert {login for _, _, login, _ in store.log} == {None}


def test_a_redirect_on_the_registry_itself_keeps_the_login(layout: Path, home: Path) -> None:
    def hook(request: Request) -> bool:
        moved = request.path.removeprefix("/moved")
        if moved == request.path:
            return request.send(302, headers={"Location": f"/moved{request.path}"})
        request.path = moved
        return False

    with served(layout, wants(f"Basic {ANN}"), hook) as registry:
        write(home / ".docker/config.json", {"auths": {registry.host: {"auth": ANN}}})
        assert find_image(registry.image).layers


def authorizer(host: str) -> Authorizer:
    return Authorizer(Reference(host, "r", "t"), Transport(host, lambda text: None))


@pytest.mark.parametrize(
    "realm",
    [
        "http://127.0.0.1:5000.evil.example/token",
        "http://127.0.0.1:5000@evil.example/token",
        "https://127.0.0.1:5000@evil.example/token",
        "http://127.0.0.1.evil.example/token",
        "http://localhost.evil.example/token",
        "http://evil.example/token",
        "https:///token",
        "https://[::1/token",
        "file:///etc/passwd",
        "ftp://127.0.0.1/token",
        "/token",
        "",
    ],
)
def test_unsafe_realms(realm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "open", lambda *words: pytest.fail(f"asked {words}"))
    for host in ("127.0.0.1:5000", "registry.example.com"):
        with pytest.raises(SqshError, match="unsafe place"):
            authorizer(host).answer([f'Bearer realm="{realm}"'])


def test_a_remote_registry_cannot_name_this_machine_without_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "open", lambda *words: pytest.fail(f"asked {words}"))
    with pytest.raises(SqshError, match="unsafe place"):
        authorizer("registry.example.com").answer(['Bearer realm="http://127.0.0.1:80/token"'])


@pytest.mark.parametrize(
    ("headers", "wanted"),
    [
        (['Basic realm="a, Bearer realm=\\"b\\""'], [Challenge("basic", {"realm": 'a, Bearer realm="b"'})]),
        (["Negotiate", "Basic"], [Challenge("negotiate", {}), Challenge("basic", {})]),
        (
            ['Basic realm="x", bearer REALM=http://a/t , service = "s,t"'],
            [Challenge("basic", {"realm": "x"}), Challenge("bearer", {"realm": "http://a/t", "service": "s,t"})],
        ),
        ([', ,Bearer realm="x",,scope="a b"'], [Challenge("bearer", {"realm": "x", "scope": "a b"})]),
        (["", '"', "=", 'realm="x"'], [Challenge("realm", {})]),
    ],
)
def test_challenges(headers: list[str], wanted: list[Challenge]) -> None:
    assert parse_challenges(headers)[: len(wanted)] == wanted


@pytest.mark.parametrize(
    ("challenge", "accepted", "login"),
    [
        ([ME], "Bearer tok", False),
        (["Negotiate", 'Basic realm="x"'], f"Basic {ANN}", True),
        (['Basic realm="x"', ME], "Bearer tok", False),
        (['Basic realm="x"', ME], "Bearer tok", True),
        (['Basic realm="x, y", ' + ME], "Bearer tok", False),
        ([ME + ', Basic realm="x"'], "Bearer tok", True),
        (['Bearer realm="http://evil.example/token"', 'Basic realm="x"'], f"Basic {ANN}", True),
        (["bearer realm=http://HOST/token"], "Bearer tok", False),
    ],
)
def test_the_challenge_that_can_be_answered(
    layout: Path, home: Path, challenge: list[str], accepted: str, login: bool
) -> None:
    with served(layout, wants(accepted, challenge=challenge)) as registry:
        if login:
            write(home / ".docker/config.json", {"auths": {registry.host: {"auth": ANN}}})
        assert find_image(registry.image).layers


def test_what_a_token_is_asked_for(layout: Path) -> None:
    realm = 'Bearer realm="http://HOST/token?host=inside&x=%2F#part",service="a b"'
    for scope, wanted in (
        ("", ["repository:r:pull"]),
        (',scope="repository:r:pull aws"', ["repository:r:pull", "aws"]),
    ):
        with served(layout, wants("Bearer tok", challenge=[realm + scope])) as registry:
            find_image(registry.image)
        (asked,) = [path for _, path, _, _ in registry.log if path.startswith("/token")]
        assert asked.startswith("/token?host=inside&x=%2F&")
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(asked).query)
        assert query == {"host": ["inside"], "x": ["/"], "scope": wanted, "service": ["a b"]}


@pytest.mark.parametrize("answer", [b"{}", b"[]", b'{"token": 7}', b'{"token": "a\\nb"}', b"<html>"])
def test_what_is_no_token(layout: Path, answer: bytes) -> None:
    def hook(request: Request) -> bool:
        return request.path.startswith("/token") and request.send(200, answer)

    refused = pytest.raises(SqshError, match="gives no token for r")
    with served(layout, hook, wants("Bearer tok", challenge=[ME])) as registry, refused:
        find_image(registry.image)


@pytest.mark.parametrize("source", ["helper", "store", "config", "podman"])
def test_identity_tokens(layout: Path, home: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    def hook(request: Request) -> bool:
        if not request.path.startswith("/token"):
            return False
        form = urllib.parse.parse_qs(request.form)
        right = form.get("grant_type") == ["refresh_token"] and form.get("refresh_token") == ["IDENTITY"]
        right = right and form["service"] == ["s"] and form["scope"] == ["repository:r:pull"]
        return request.send(200, b'{"access_token": "tok"}') if right else request.send(401)

    helper(home, monkeypatch, "<token>", "IDENTITY")
    with served(layout, hook, wants("Bearer tok", challenge=[ME])) as registry:
        config = {
            "helper": {"credHelpers": {registry.host: "test"}},
            "store": {"auths": {registry.host: {}}, "credsStore": "test"},
            "config": {"auths": {registry.host: {"auth": basic("0", ""), "identitytoken": "IDENTITY"}}},
            "podman": {"auths": {f"{registry.host}/r": {"identitytoken": "IDENTITY"}}},
        }[source]
        write(home / (".config/containers/auth.json" if source == "podman" else ".docker/config.json"), config)
        assert find_image(registry.image).layers


def helper(home: Path, monkeypatch: pytest.MonkeyPatch, user: str, secret: str) -> None:
    answer = json.dumps({"Username": user, "Secret": secret})
    path = write(home / "bin/docker-credential-test", f"#!/bin/sh\ncat > {home}/asked\necho '{answer}'\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")


def found(host: str, repository: str = "team/image", user: str = "") -> Login | None:
    return Logins(Reference(host, repository, "t", user)).of_registry()


@pytest.mark.parametrize(
    "key", ["h.io", "https://h.io", "https://h.io/v1/", "http://h.io/v2/", "h.io/", "H.io/v2", "h.io/team"]
)
def test_keys_of_a_config_that_mean_the_host(home: Path, key: str) -> None:
    write(home / ".docker/config.json", {"auths": {key: {"auth": ANN}}})
    assert found("h.io") == Login("ann", "secret")


@pytest.mark.parametrize(
    "key",
    [
        "h.io.evil",
        "evil.h.io",
        "h.io:443",
        "https://h.io.evil/v2/",
        "h.i",
        "h.io/tea",
        "h.io/team/image/more",
        "h.io/other",
    ],
)
def test_keys_of_a_config_that_mean_another(home: Path, key: str) -> None:
    write(home / ".docker/config.json", {"auths": {key: {"auth": ANN}}})
    assert found("h.io") is None


def test_the_longest_path_wins_and_the_exact_key_before_others(home: Path) -> None:
    auths = {
        "https://h.io/v1/": {"auth": basic("docker", "p")},
        "h.io": {"auth": basic("host", "p")},
        "h.io/team": {"auth": basic("team", "p")},
        "h.io/team/image": {"auth": basic("image", "p")},
    }
    write(home / ".config/containers/auth.json", {"auths": auths})
    for repository, user in (("team/image", "image"), ("team/other", "team"), ("teammate/x", "host"), ("x", "host")):
        assert found("h.io", repository) == Login(user, "p")


def test_files_in_their_order(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (
        home / ".config/enroot/.credentials",
        home / ".config/containers/auth.json",
        tmp_path / "run/containers/auth.json",
        home / ".docker/config.json",
    ):
        login = {"auths": {"h.io": {"auth": basic(place.parent.name, place.name)}}}
        write(place, "machine h.io login enroot password p" if "enroot" in str(place) else login)
        last = found("h.io")
        assert last is not None
        assert last.user == place.parent.name
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "empty"))
    write(tmp_path / "named.json", {"auths": {"h.io": {"auth": ANN}}})
    assert found("h.io") == Login("containers", "auth.json")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "named.json"))
    assert found("h.io") == Login("ann", "secret")


def test_what_cannot_be_used_is_told_once_the_registry_refuses(
    layout: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = write(home / "bin/docker-credential-broken", "#!/bin/sh\necho it is broken >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}/bin:{os.environ['PATH']}")
    write(home / ".config/containers/auth.json", "{")
    with served(layout) as registry:
        config = {
            "auths": {registry.host: {"auth": "!"}},
            "credHelpers": {registry.host: "gone"},
            "credsStore": "broken",
        }
        write(home / ".docker/config.json", config)
        assert find_image(registry.image).layers, "it wants no login"
        registry.hooks.append(wants(f"Basic {ANN}"))
        with pytest.raises(SqshError) as caught:
            find_image(registry.image)
        for part in ("-gone cannot be used", "it is broken", "auth.json cannot be read", "the login for 127"):
            assert part in str(caught.value)
        write(home / ".config/enroot/.credentials", f"machine {registry.host} login ann password secret")
        assert find_image(registry.image).layers, "another file has it"


def enroot(home: Path, text: str) -> None:
    write(home / ".config/enroot/.credentials", text)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("machine h.io login ann password secret", Login("ann", "secret")),
        ("machine h.io\n  login ann\n  password secret\n", Login("ann", "secret")),
        ("machine h.io password secret login ann", Login("ann", "secret")),
        (
            "# machine h.io login no password no\nmachine h.io login $oauthtoken password a#b",
            Login("$oauthtoken", "a#b"),
        ),
        ('machine h.io login ann password "two \\"words\\""', Login("ann", 'two "words"')),
        ("machine h.io login ann password $(echo 'of a' \"command\")", Login("ann", "of a command")),
        ('machine h.io login ann password "$(echo quoted)"', Login("ann", "quoted")),
        ("machine h.io login ann password $(echo x | tr x '*')", Login("ann", "*")),
        ("machine h.io login ann password $SECRET", Login("ann", "of the environment")),
        ("machine h.io login machine password login\nmachine a.io login x password y", Login("machine", "login")),
        ("machine a.io login x password $(exit 1)\nmachine h.io login ann password secret", Login("ann", "secret")),
        ("machine a.io login x password $(\nmachine h.io login ann password secret", Login("ann", "secret")),
        ("default login ann password secret", None),
        ("machine h.io.evil login ann password secret", None),
        ("machine h.io login ann", None),
        ("machine", None),
        ("", None),
    ],
)
def test_enroots_file(home: Path, monkeypatch: pytest.MonkeyPatch, text: str, wanted: Login | None) -> None:
    monkeypatch.setenv("SECRET", "of the environment")
    enroot(home, text)
    assert found("h.io") == wanted


def test_another_hosts_command_is_not_run(home: Path, tmp_path: Path) -> None:
    enroot(home, f"machine a.io login x password $(touch {tmp_path}/ran)\nmachine h.io login ann password secret")
    assert found("h.io") == Login("ann", "secret")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("password", "part"),
    [("$(echo no such key >&2; exit 3)", "line 2 .*no such key"), ("$UNSET_NAME", "line 2 .* variable .UNSET_NAME")],
)
def test_a_command_or_variable_that_gives_nothing_is_named(layout: Path, home: Path, password: str, part: str) -> None:
    with served(layout, wants(f"Basic {ANN}")) as registry:
        enroot(home, f"\nmachine {registry.host} login ann password {password}\n")
        with pytest.raises(SqshError, match=f"answers 401.*{part}"):
            find_image(registry.image)


def test_the_users_entry(layout: Path, home: Path) -> None:
    with served(layout, wants(f"Basic {ANN}")) as registry:
        enroot(home, "".join(f"machine 127.0.0.1 login {user} password secret\n" for user in ("bob", "ann", "eve")))
        assert find_image(f"docker://ann@{registry.host}#r:t").layers
        for user in ("bob", "zoe"):
            with pytest.raises(SqshError, match="answers 401"):
                find_image(f"docker://{user}@{registry.host}#r:t")
    assert found("h.io", user="zoe") is None


def realm_of(registry: Hook | None, host: str) -> Hook:
    return wants("Bearer tok", challenge=[f'Bearer realm="http://{host}/token",service="s",scope="repository:other:*"'])


def test_the_realms_host_in_enroots_file(layout: Path, home: Path) -> None:
    with served(layout, wants(f"Basic {ANN}")) as realm, served(layout, realm_of(None, realm.host)) as registry:
        enroot(home, f"machine {realm.host} login ann password secret\n")
        assert find_image(registry.image).layers
        (asked,) = realm.log
        assert asked[2] == f"Basic {ANN}"
        assert urllib.parse.parse_qs(urllib.parse.urlsplit(asked[1]).query)["scope"] == ["repository:r:pull"]


@pytest.mark.parametrize(
    ("registry", "user", "entries", "wanted"),
    [
        ("registry.gitlab.com", "", "machine gitlab.com login ann password secret", "ann"),
        ("registry-1.docker.io", "", "machine auth.docker.io login ann password secret", "ann"),
        ("h.io", "", "machine auth.io login ann password secret", None),
        ("h.io", "ann", "machine auth.io login ann password secret", "ann"),
        ("h.io", "", "machine h.io login bob password p\nmachine auth.io login ann password secret", "ann"),
        ("h.io", "", "machine h.io login bob password p", "bob"),
    ],
)
def test_whom_a_token_may_go_to(home: Path, registry: str, user: str, entries: str, wanted: str | None) -> None:
    """A registry may name any realm: what a login there buys must not go to just anybody."""
    enroot(home, entries)
    realm = {"registry.gitlab.com": "gitlab.com", "registry-1.docker.io": "auth.docker.io"}.get(registry, "auth.io")
    logins = Logins(Reference(registry, "r", "t", user))
    login = logins.of_realm(realm)
    assert (login.user if login else None) == wanted
    assert any("docker://USER@" in text for text in logins.problems) == (wanted is None)


FAULTS = ("408", "429", "500", "502", "503", "504", "reset", "cut", "slow")


@pytest.mark.parametrize("what", FAULTS)
@pytest.mark.parametrize("where", ["/manifests/", "/blobs/", "/token"])
def test_each_request_is_made_again(
    layout: Path, tmp_path: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, where: str, what: str
) -> None:
    broken: set[str] = set()
    monkeypatch.setattr(transport, "TIMEOUT_S", 0.5 if what == "slow" else 60)

    def hook(request: Request) -> bool:
        if where not in request.path or request.path in broken:
            return False
        broken.add(request.path)
        if what == "slow":
            time.sleep(1)
        if what in ("reset", "slow"):
            return request.reset()
        if what == "cut":
            return request.send(200, b'{"token": "half"}' * 9, cut=0 if where == "/blobs/" else 5)
        return request.send(int(what), headers={"Retry-After": "7"})

    with served(layout, hook, wants("Bearer tok", challenge=[ME])) as registry:
        converted(registry.image, tmp_path / "out")
    assert broken
    assert (7.0 in waits) == what.isdigit()


def test_a_registry_that_stays_busy(layout: Path, waits: list[float]) -> None:
    refused = pytest.raises(SqshError, match="503 Service Unavailable for r/manifests/t: try again later")
    with served(layout, lambda request: request.send(503)) as registry, refused:
        find_image(registry.image)
    assert len(registry.log) == transport.TRIES
    assert waits == sorted(waits)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("0", 0.0), ("30", 30.0), ("date", 30.0), ("past", 0.0), ("soon", None), ("-5", None), ("1.5", None), ("", None)],
)
def test_when_to_ask_again(
    layout: Path, waits: list[float], monkeypatch: pytest.MonkeyPatch, text: str, seconds: float | None
) -> None:
    clock = time.time() + 5000  # the registry's own is ahead

    def hook(request: Request) -> bool:
        if len(registry.log) > 1:
            return False
        date = {"date": clock + 30, "past": clock - 9}.get(text)
        after = text if date is None else email.utils.formatdate(date, usegmt=True)
        return request.send(429, headers={"Retry-After": after})

    monkeypatch.setattr(Request, "date_time_string", lambda *_: email.utils.formatdate(clock, usegmt=True))
    notes: list[str] = []
    with served(layout, hook) as registry:
        assert find_image(registry.image, note=notes.append).layers
    assert waits[0] == pytest.approx(0.4 if seconds is None else seconds, abs=1.1)
    assert len(notes) == bool(seconds)


def test_a_wait_that_is_too_long_ends_at_once(layout: Path, waits: list[float]) -> None:
    refused = pytest.raises(SqshError, match=r"answers 429 .*try again in 3600 s")
    with served(layout, lambda request: request.send(429, headers={"Retry-After": "3600"})) as registry, refused:
        find_image(registry.image)
    assert (len(registry.log), waits) == (1, [])


def test_a_wait_can_be_interrupted(layout: Path, tmp_path: Path) -> None:
    """Whether it is for the manifest, in this thread, or for a layer, in another."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for where in ("/manifests/", layer_of(layout)):

            def hook(request: Request, where: str = where) -> bool:
                return where in request.path and request.send(429, headers={"Retry-After": "50"})

            with served(layout, hook) as registry:
                started = time.monotonic()
                signal.setitimer(signal.ITIMER_REAL, 0.5)
                with pytest.raises(KeyboardInterrupt):
                    converted(registry.image, tmp_path / "out")
                assert time.monotonic() - started < 20
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "out").exists()


def layer_of(layout: Path) -> str:
    return find_image(str(layout)).layers[0].digest


def test_what_no_other_try_would_change(layout: Path, waits: list[float]) -> None:
    for status in (400, 403, 404, 410):
        refused = pytest.raises(SqshError, match=f"answers {status}")
        with served(layout, answers(status)) as registry, refused:
            find_image(registry.image)
        assert len(registry.log) == 1
    for host in ("127.0.0.1:9", "no-such-host.invalid"):
        with pytest.raises(SqshError, match=f"cannot reach {host}"):
            find_image(f"{host}/r:t")
    assert waits == []

"""What another user tries at a port: `python strangers.py ADDRESS:PORT…` prints a line of JSON for each.

`refused` is true where every try ends without an answer to what was asked. Standard library only, so that any Python
runs it, as any user.
"""

import json
import socket
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

TIMEOUT_S = 2.0
ETCD_RANGE = json.dumps({"key": "AA==", "range_end": "AA=="}).encode()


def main(places: list[str]) -> None:
    def line(place: str) -> str:
        address, _, port = place.rpartition(":")
        return json.dumps({"place": place, **try_all(address, int(port))})

    with ThreadPoolExecutor(16) as pool:
        for text in pool.map(line, places):
            print(text, flush=True)


def try_all(address: str, port: int) -> dict[str, object]:
    """Each try's outcome by its name; one that got an answer begins with «ANSWER»."""
    tries: dict[str, Callable[[str, int], str]] = {
        "http": lambda address, port: http("http", address, port),
        "https": lambda address, port: http("https", address, port),
        "nats": nats,
    }
    found: dict[str, str] = {}
    for name, attempt in tries.items():
        try:
            found[name] = attempt(address, port)
        except (OSError, ValueError, HTTPException) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {"refused": not any(outcome.startswith("ANSWER") for outcome in found.values()), "tries": found}


def http(scheme: str, address: str, port: int) -> str:
    """Ask etcd for all keys, the frontend for its models, a worker for its version."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    last = ""
    for path, body in (("v3/kv/range", ETCD_RANGE), ("v1/models", None), ("engine/get_weight_version", b"{}")):
        request = urllib.request.Request(f"{scheme}://{address}:{port}/{path}", body)
        request.add_header("content-type", "application/json")
        try:
            with opener.open(request, timeout=TIMEOUT_S) as response:
                return f"ANSWER to /{path}: {response.read(200)!r}"
        except urllib.error.HTTPError as error:
            last = f"status {error.code}"
        except (OSError, HTTPException) as error:
            return f"{type(error).__name__}: {error}"
    return last


def nats(address: str, port: int) -> str:
    """Join without credentials and subscribe to everything."""
    with socket.create_connection((address, port), TIMEOUT_S) as connection:
        connection.settimeout(TIMEOUT_S)
        if not connection.recv(4096).startswith(b"INFO"):
            return "not NATS"
        connection.sendall(b'CONNECT {"verbose":false,"pedantic":false}\r\nSUB > 1\r\nPING\r\n')
        answer = connection.recv(4096)
        return f"ANSWER: {answer!r}" if b"PONG" in answer else repr(answer)


if __name__ == "__main__":
    main(sys.argv[1:])

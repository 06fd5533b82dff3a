"""Another user, who knows every port of a job and has no token: prints what each answers, as JSON. Runs in the image.

stranger.py ADDRESS PORT…
"""

import http.client
import json
import socket
import sys

import grpc

METHODS = (
    "NodeInfoGcsService/GetAllNodeInfo",
    "InternalKVGcsService/InternalKVKeys",
    "JobInfoGcsService/GetAllJobInfo",
    "ActorInfoGcsService/GetAllActorInfo",
    "NodeManagerService/GetNodeStats",
    "NodeManagerService/ShutdownRaylet",
    "NodeManagerService/RequestWorkerLease",
    "ObjectManagerService/Push",
    "ObjectManagerService/Pull",
    "CoreWorkerService/GetCoreWorkerStats",
    "CoreWorkerService/KillActor",
    "RayletDriver/ClusterInfo",
)
WRONG = (("authorization", "Bearer " + "0" * 64),)


def ask(address: str, port: int) -> dict[str, str]:
    return {
        **{method: ray_says(address, port, method, ()) for method in METHODS},
        **{f"{method}, wrong token": ray_says(address, port, method, WRONG) for method in METHODS},
        "GET /": web_says(address, port, "GET", "/"),
        "POST /get_or_create_runtime_env": web_says(address, port, "POST", "/get_or_create_runtime_env"),
        "a line": line_says(address, port),
    }


def ray_says(address: str, port: int, method: str, metadata: tuple[tuple[str, str], ...]) -> str:
    with grpc.insecure_channel(f"{address}:{port}") as channel:
        try:
            channel.unary_unary(f"/ray.rpc.{method}")(b"", timeout=3, metadata=metadata)
        except grpc.RpcError as error:
            return str(error.code().name)
    return "ANSWERED"


def web_says(address: str, port: int, verb: str, path: str) -> str:
    connection = http.client.HTTPConnection(address, port, timeout=3)
    try:
        connection.request(verb, path)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException):
        return "no HTTP"
    finally:
        connection.close()


def line_says(address: str, port: int) -> str:
    """What follows a line of a stranger's: for servers with a protocol of their own."""
    with socket.create_connection((address, port), timeout=3) as connection:
        try:
            connection.sendall(b"node2 0000\n")
            data = b""
            while chunk := connection.recv(4096):
                data += chunk
        except OSError:
            return f"{len(data)} bytes, then silence"
        return f"{len(data)} bytes, then the end"


print(json.dumps({port: ask(sys.argv[1], int(port)) for port in sys.argv[2:]}, indent=1))

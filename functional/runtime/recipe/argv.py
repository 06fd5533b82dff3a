"""Command lines of the fleet's Dynamo programs, from a recipe, and which of their flags are the runtime's."""

import json
from dataclasses import dataclass
from pathlib import Path

from functional.runtime.recipe.model import FrontendArgs, Recipe, WorkerArgs
from functional.runtime.recipe.options import GENERATION, WORKER_ARGS

WORKER_EXTENSION = "functional.engine.extension.WorkerExtension"

MANAGED = "managed: set by the runtime"
ONE_LISTENER = "managed: the frontend has one listener, plain HTTP on the job's interface"
TOKEN_PATH = "managed: the token path depends on it"
FRONTEND_ARGS = f"{GENERATION}.dynamo_cfg.frontend_args"
FRONTEND_OWNERS = {
    **dict.fromkeys(("http_host", "http_port", "namespace", "namespace_prefix"), MANAGED),
    **dict.fromkeys(("discovery_backend", "request_plane", "event_plane"), MANAGED),
    **dict.fromkeys(("model_name", "model_path", "interactive", "version", "dump_config_to"), MANAGED),
    **dict.fromkeys(("tls_cert_path", "tls_key_path", "kserve_grpc_server", "grpc_metrics_port"), ONE_LISTENER),
    **dict.fromkeys(("dyn_chat_processor", "dyn_preprocess_workers", "migration_limit"), TOKEN_PATH),
    "router_mode": f"is already set by {FRONTEND_ARGS}.router_mode",
    "router_reset_states": f"is already set by {FRONTEND_ARGS}.router_reset_states",
    "tokenizer": f"is already set by {FRONTEND_ARGS}.tokenizer",
}
"""Frontend flags that `extra_cli_args` may not hold, and why."""


@dataclass(frozen=True)
class WorkerPlace:
    """What a worker's command line needs beside the recipe. `events`: path of the engine's cache-event socket."""

    model_dir: Path
    namespace: str
    events: Path
    seed: int

    @property
    def template(self) -> Path:
        """A file beside the socket, for a chat template that stands in the recipe."""
        return self.events.with_name("chat_template.jinja")


def worker_arguments(recipe: Recipe, place: WorkerPlace) -> list[str]:
    """`dynamo.vllm`'s command line behind the module's name."""
    arguments = recipe.policy.generation.dynamo_cfg.worker_args
    flags = _managed_flags(recipe.transport.backend, recipe.policy.model_name, place)
    managed = [word for flag, value in flags.items() for word in (flag, value)]
    options = [word for option in recipe.options for word in option.flags]
    own = _own_flags(arguments, place.template)
    return ["--enable-rl", *managed, *options, *own, *arguments.extra_cli_args]


def write_template(arguments: WorkerArgs, place: WorkerPlace) -> None:
    """The file that an inline chat template is given to the worker as; nothing where there is none."""
    if is_inline(arguments.custom_jinja_template):
        place.template.write_text(arguments.custom_jinja_template or "", encoding="utf-8")


def is_inline(template: str | None) -> bool:
    """Whether a chat template is given itself, and not the path of its file: no path has Jinja's braces."""
    return template is not None and any(mark in template for mark in ("{{", "{%", "{#", "\n"))


def _managed_flags(transfer_backend: str, served: str, place: WorkerPlace) -> dict[str, str]:
    # An ipc endpoint is one that vLLM's publisher binds; tcp on a given host it would connect, and nobody would bind.
    kv_events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{place.events}"}
    return {
        "--model": str(place.model_dir),
        "--served-model-name": served,
        "--namespace": place.namespace,
        "--discovery-backend": "etcd",
        "--request-plane": "tcp",
        "--event-plane": "nats",
        "--weight-transfer-config": json.dumps({"backend": transfer_backend}),
        "--worker-extension-cls": WORKER_EXTENSION,
        "--kv-events-config": json.dumps(kv_events),
        "--seed": str(place.seed),
        "--generation-config": "vllm",  # else the model's own sets top-p, top-k and penalties; its EOS IDs stop still
    }


def _own_flags(arguments: WorkerArgs, inline: Path) -> list[str]:
    """inline: where a chat template is that the recipe gives itself."""
    template = arguments.custom_jinja_template
    flags = ["--endpoint-types", ",".join(arguments.served_endpoints)]
    for flag, value in (
        ("--dyn-tool-call-parser", arguments.tool_call_parser),
        ("--dyn-reasoning-parser", arguments.reasoning_parser),
        ("--custom-jinja-template", str(inline) if is_inline(template) else template),
    ):
        if value is not None:
            flags += [flag, value]
    if not arguments.exclude_tools_when_tool_choice_none:
        flags.append("--no-exclude-tools-when-tool-choice-none")
    if arguments.enable_structural_tag:
        flags += ["--dyn-enable-structural-tag", "--dyn-structural-tag-scope", arguments.structural_tag_scope]
        flags += ["--dyn-structural-tag-schema", arguments.structural_tag_schema]
    return flags


def worker_flag_owners(recipe: Recipe) -> dict[str, str]:
    """Worker flags, underscores for dashes, that the recipe's other keys have set, and by which key."""
    owners: dict[str, str] = {}
    for option in recipe.options:
        for word in option.flags:
            if word.startswith("--"):
                name = word[2:].partition("=")[0].removeprefix("no-").replace("-", "_")
                owners.setdefault(name, option.path)
    for word in _own_flags(recipe.policy.generation.dynamo_cfg.worker_args, Path()):
        if word.startswith("--"):
            owners.setdefault(word[2:].removeprefix("no-").replace("-", "_"), WORKER_ARGS)
    return owners


def frontend_arguments(arguments: FrontendArgs, host: str, port: int, namespace: str) -> list[str]:
    """`dynamo.frontend`'s command line behind the module's name."""
    command = ["--http-host", host, "--http-port", str(port), "--namespace-prefix", namespace]
    command += ["--discovery-backend", "etcd", "--request-plane", "tcp", "--event-plane", "nats"]
    command += ["--router-mode", arguments.router_mode, "--tokenizer", arguments.tokenizer]
    command.append("--router-reset-states" if arguments.router_reset_states else "--no-router-reset-states")
    return command + arguments.extra_cli_args

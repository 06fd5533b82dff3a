"""NeMo Gym's own model adapter, agent and resources server, asking our chat server: runs in Gym's environment.

    python gym_rollouts.py CHAT_URL MODEL QUESTIONS

prints a JSON list: what Gym's agent returns for each of the questions (a JSON list of texts). Each of the three is a
server of its own and is called over HTTP, as in Gym; only the start by Gym's command line is left out, which would make
an environment for each from the network.
"""

import asyncio
import json
import os
import socket
import sys

SERVERS = ("policy_model", "calculator", "calculator_agent")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def configuration(chat_url, model):
    """What Gym resolves of its YAML files, as each of its servers gets it."""
    places = {name: {"host": "127.0.0.1", "port": free_port(), "entrypoint": "app.py"} for name in SERVERS}
    adapter = {
        "base_url": f"{chat_url}/v1",
        "api_key": "none",
        "model": model,
        "return_token_id_information": True,
        "uses_reasoning_parser": True,
    }
    agent = {
        "resources_server": {"type": "resources_servers", "name": "calculator"},
        "model_server": {"type": "responses_api_models", "name": "policy_model"},
        "max_steps": 4,
    }
    return {
        "head_server": {"host": "127.0.0.1", "port": free_port()},
        "policy_model": {"responses_api_models": {"vllm_model": places["policy_model"] | adapter}},
        "calculator": {"resources_servers": {"calculator": places["calculator"] | {"domain": "math"}}},
        "calculator_agent": {"responses_api_agents": {"simple_agent": places["calculator_agent"] | agent}},
    }


def make_server(server_type, name, config):
    """One of Gym's servers, ready to serve."""
    import uvicorn
    from nemo_gym.server_utils import ServerClient
    from omegaconf import OmegaConf

    os.environ["NEMO_GYM_CONFIG_PATH"] = name
    client = ServerClient(head_server_config=config["head_server"], global_config_dict=OmegaConf.create(config))
    server = server_type(config=server_type.load_config_from_global_config(), server_client=client)
    app = server.setup_webserver()
    return uvicorn.Server(uvicorn.Config(app, host=server.config.host, port=server.config.port, log_level="warning"))


def calculator_type():
    """A resources server with two tools; its reward is for the right last word."""
    from nemo_gym.base_resources_server import (
        BaseResourcesServerConfig,
        BaseVerifyRequest,
        BaseVerifyResponse,
        SimpleResourcesServer,
    )
    from pydantic import BaseModel, ConfigDict

    class Operands(BaseModel):
        a: int
        b: int

    class VerifyRequest(BaseVerifyRequest):
        model_config = ConfigDict(extra="allow")
        answer: str

    class Calculator(SimpleResourcesServer):
        config: BaseResourcesServerConfig

        def setup_webserver(self):
            app = super().setup_webserver()
            app.post("/add")(self.add)
            app.post("/sub")(self.sub)
            return app

        async def add(self, body: Operands) -> int:
            return body.a + body.b

        async def sub(self, body: Operands) -> int:
            return body.a - body.b

        async def verify(self, body: VerifyRequest) -> BaseVerifyResponse:
            said = [part.text for item in body.response.output if item.type == "message" for part in item.content]
            return BaseVerifyResponse(**body.model_dump(), reward=float(said[-1:] == [body.answer]))

    return Calculator


def tool(name):
    operands = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
    parameters = operands | {"required": ["a", "b"], "additionalProperties": False}
    return {"type": "function", "name": name, "description": name, "parameters": parameters, "strict": True}


async def rollouts(servers, port, questions):
    """On one loop, since Gym has one HTTP client a process."""
    import aiohttp

    serving = [asyncio.ensure_future(server.serve()) for server in servers]
    while not all(server.started for server in servers):
        await asyncio.sleep(0.05)

    async def one(http, text, answer):
        params = {"input": [{"role": "user", "content": text}], "tools": [tool("add"), tool("sub")]}
        body = {"responses_create_params": params, "answer": answer}
        async with http.post(f"http://127.0.0.1:{port}/run", json=body) as response:
            response.raise_for_status()
            return await response.json()

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:
        found = await asyncio.gather(*(one(http, text, answer) for text, answer in questions))
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*serving)
    return found


def main(chat_url, model, questions):
    config = configuration(chat_url, model)
    os.environ["NEMO_GYM_CONFIG_DICT"] = json.dumps(config)
    from responses_api_agents.simple_agent.app import SimpleAgent
    from responses_api_models.vllm_model.app import VLLMModel

    types = {"policy_model": VLLMModel, "calculator": calculator_type(), "calculator_agent": SimpleAgent}
    servers = [make_server(kind, name, config) for name, kind in types.items()]
    found = asyncio.run(rollouts(servers, servers[-1].config.port, json.loads(questions)))
    print("ROLLOUTS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A small tree of NeMo RL's layout whose script a test writes, for the tests of `functional run --driver nemo-rl`."""

from collections.abc import Mapping
from pathlib import Path

CONFIG = """
from omegaconf import OmegaConf

def register_omegaconf_resolvers():
    pass

def load_config(path):
    return OmegaConf.load(path)

def parse_hydra_overrides(config, overrides):
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        OmegaConf.update(config, key, value, force_add=True)
    return config
"""
RECIPE = """
policy: {model_name: a-model, generation: {backend: dynamo, colocated: {resources: {gpus_per_node: 1}}}}
logger: {log_dir: logs, tensorboard_enabled: true}
grpo: {max_num_steps: 2, num_prompts_per_step: 2, num_generations_per_prompt: 2,
       async_grpo: {enabled: true, recompute_kv_cache_after_weight_updates: true}}
cluster: {gpus_per_node: 2, num_nodes: 1}
data: {train: {dataset_name: ResponseDataset}, default: {}}
"""
FILES: Mapping[str, str] = {
    "pyproject.toml": '[project]\nname = "nemo-rl"\n',
    "recipe.yaml": RECIPE,
    "nemo_rl/__init__.py": "",
    "nemo_rl/utils/__init__.py": "",
    "nemo_rl/utils/config.py": CONFIG,
    "nemo_rl/models/generation/dynamo/managed_runtime.py": "",
}


def write_runnable_tree(folder: Path, script: str) -> None:
    """Write the tree, with `script` as its examples/run_grpo.py."""
    for name, text in {**FILES, "examples/run_grpo.py": script}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)

"""Print a NeMo RL recipe as it resolves, as JSON: run by NeMo RL's own Python, with its tree on the path.

python read_config.py RECIPE ANSWER_FILE [override …]
"""

import json
import sys
from pathlib import Path


def main(recipe: str, answer: str, overrides: list[str]) -> None:
    """Write the resolved recipe to the file `answer`; nemo_rl.utils.config does the work."""
    from nemo_rl.utils.config import (  # type: ignore[import-not-found]
        load_config,
        parse_hydra_overrides,
        register_omegaconf_resolvers,
    )
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    config = load_config(recipe)
    if overrides:
        config = parse_hydra_overrides(config, overrides)
    resolved = OmegaConf.to_container(config, resolve=True)
    Path(answer).write_text(json.dumps(resolved, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])

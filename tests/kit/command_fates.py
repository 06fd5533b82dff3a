"""What becomes of each documented command: run by a test or a part of CI, or by hand where CI has no such machine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Here:
    """Typed as it stands, in a copy of the kit with a tiny release, by test_documented.py."""

    statuses: tuple[int, ...] = (0,)
    says: str = ""


@dataclass(frozen=True)
class Run:
    """`name`, a test or a shell function of `file`, runs it. `as_text`: how it stands there, where that is not word by
    word; `differs`: what is another there."""

    file: str
    name: str
    as_text: tuple[str, ...] = ()
    differs: str = ""


@dataclass(frozen=True)
class Parts:
    """A target of the Makefile that only calls ci/test.sh with parts, each of which CI runs by itself."""


@dataclass(frozen=True)
class ByHand:
    """It needs what CI has not. `page` says what came of it, in the words of `as_text`; `nearest` is what runs here."""

    why: str
    page: str
    as_text: str
    nearest: Run | None = None


Fate = Here | Run | Parts | ByHand

ROAD = "ci/test.sh"
IN_IMAGE = "tests/suite/test_documented.py"
IN_IMAGE_LONG = "tests/faults/test_documented.py"
TWO_GPUS = "two GPUs"
GPU_PAGE = "docs/evidence/gpu/README.md"
A_CLUSTER = "a Slurm cluster with GPUs"
GUIDE = ("tests/slurm/test_jobs.py", "test_the_guides_block")
A_TREE, SEEN = "a clone of NeMo RL", "in the squashfs, with no network, on CPU"
SMALL_TREE = Run(
    "tests/kit/test_same_digest.py", "test_a_small_tree_of_nemo_rl_goes_in", ("write_tree",), "a small tree"
)
NEMO_RL_RUN = Run(
    "tests/suite/test_nemo_rl.py",
    "test_the_unmodified_script_without_a_gpu",
    ("examples/configs/grpo_math_1B_dynamo.yaml",),
    "no GPU, and only where an image has NeMo RL",
)
SUBMIT = Run("tests/slurm/test_submit.py", "test_the_suite_ends_in_the_record", ("submit(",), "partition, GPUs, recipe")
MADE_BY = "Made by `make bench BENCH={}`"
REAL = "tests/kit/test_documented.py"

FATES: dict[str, Fate] = {
    # README: the two commands, one stage at a time
    "make demo": Run(ROAD, "full"),
    "make test": Run(".ci/run", "", ("exec make test",)),
    "make image push": Run(ROAD, "road"),
    "make sqsh": Run(ROAD, "road"),
    "make functional": Run(ROAD, "road"),
    "make submit": Run("tests/slurm/test_submit.py", "test_make_submit"),
    "./build.py diff cpu ../other/dist/cpu/oci": Here(),
    "./build.py run -- python -c 'import torch'": Run(REAL, "test_a_command_in_the_squashfs"),
    "uv run bash tests/functional/grpo_dynamo.sh": Run(
        "kit/functional.py", "", ('COMMAND = ("uv", "run", "bash", "tests/functional/grpo_dynamo.sh")',)
    ),
    "./build.py doctor": Here((0, 1), "Python environment"),
    "./build.py report": Here(says="release cpu, profile cpu"),
    "ci/nightly.sh --profile cuda": ByHand(
        TWO_GPUS,
        "README.md",
        "a scheduled night on a runner of GitHub or GitLab",
        Run("tests/kit/test_nightly.py", "test_a_night_on_cpu_from_start_to_end", ('"--profile", "cpu"',)),
    ),
    'eval "$(./build.py completion bash)"; ./build.py --help': Here(says="verify"),
    'docker buildx build --build-context nemo-rl=. --build-arg BUILD_DYNAMO=1 --target release --file docker/Dockerfile --tag "$IMAGE" --push .': Run(  # noqa: E501
        "tests/kit/test_by_hand.py", "test_the_image_by_hand"
    ),
    # README: in the image
    "functional run recipes/grpo_cpu.yaml grpo.max_num_steps=3 --out /tmp/run": Run(IN_IMAGE_LONG, "test_a_run"),
    "functional run recipes/grpo_cpu.yaml grpo.async_grpo.enabled=true grpo.max_num_steps=8": Run(
        IN_IMAGE_LONG, "test_generation_beside_training"
    ),
    "functional learning recipes/learning_cpu.yaml --out /tmp/learning": Run(
        "tests/faults/test_learning.py",
        "test_rewards_rise_with_updates_and_not_without",
        ("learning_cpu.yaml",),
        "the folder",
    ),
    "functional config recipes/grpo_cpu.yaml policy.optimizer.lr=0.1": Run(IN_IMAGE, "test_a_recipe_is_shown"),
    "functional fault worker-killed-generating recipes/grpo_cpu.yaml --out /tmp/fault": Run(
        "ci/nightly-cpu.txt", "", ("fault worker-killed-generating recipes/grpo_cpu.yaml",), "the folder"
    ),
    "functional compare-routers recipes/routers_cpu.yaml --modes kv,round-robin --out /tmp/routers": Run(
        IN_IMAGE_LONG, "test_routers_are_compared"
    ),
    "functional doctor /tmp/run": Run(IN_IMAGE_LONG, "test_a_run"),
    "functional report /tmp/run": Run(IN_IMAGE_LONG, "test_a_run"),
    "functional serve-chat recipes/agent_cpu.yaml --port 8000 --out /tmp/chat": Run(
        IN_IMAGE_LONG, "test_chat_is_served"
    ),
    "functional make-model /tmp/tiny": Run(IN_IMAGE_LONG, "test_a_model_is_made"),
    # README: on GPUs, on Slurm
    "PROFILE=cuda-trixie make image push sqsh functional": ByHand(
        TWO_GPUS, GPU_PAGE, "35 of 35", Run(ROAD, "road", ("make image push", "make sqsh", "make functional"))
    ),
    "make functional SET=cluster.share_gpu=true": ByHand("a GPU", GPU_PAGE, "cluster.share_gpu=true"),
    "make submit SUBMIT='--nodes 2 --gpus 8 --account A --partition P'": ByHand(
        A_CLUSTER, "README.md", "Slurm ran locally", SUBMIT
    ),
    "CONTAINER=… MOUNTS=… COMMAND=… GPUS_PER_NODE=8 sbatch --nodes=2 --gres=gpu:8 --exclusive ray.sub": ByHand(
        A_CLUSTER, "README.md", "Slurm ran locally", Run(*GUIDE, ("GUIDE",))
    ),
    # docs/chat.md, configuration.md, errors.md, report.md, rollout.md
    "functional run recipes/agent_cpu.yaml --out /tmp/run": Run(IN_IMAGE_LONG, "test_agents"),
    "functional run examples/configs/grpo_math_1B_dynamo.yaml policy.model_name=builtin:random-qwen3 data.dataset_name=token_set grpo.max_num_steps=2": Run(  # noqa: E501
        IN_IMAGE_LONG, "test_a_foreign_recipe", differs="the recipe's file, which is NeMo RL's"
    ),
    "functional config recipes/grpo_cpu.yaml cluster.num_nodes=2": Run(IN_IMAGE, "test_a_recipe_is_shown"),
    "functional config recipes/grpo_cpu.yaml policy.generation.vllm_cfg.tensor_parallel_size=2 policy.generation.colocated.resources.gpus_per_node=4 cluster.gpus_per_node=5": Run(  # noqa: E501
        IN_IMAGE, "test_a_recipe_is_shown"
    ),
    "functional config recipes/grpo_cpu.yaml policy.generation.vllm_cfg.tensor_parallel_size=2 policy.generation.colocated.resources.gpus_per_node=2 cluster.gpus_per_node=4": Run(  # noqa: E501
        IN_IMAGE, "test_a_recipe_is_shown"
    ),
    "functional run --driver nemo-rl examples/configs/grpo_math_1B_dynamo.yaml": ByHand(
        A_TREE, "docs/nemo-rl.md", "9 of 9", NEMO_RL_RUN
    ),
    "functional run --driver nemo-rl examples/configs/grpo_math_1B_dynamo.yaml --out /tmp/nemo policy.model_name=/models/Qwen3-0.6B policy.tokenizer.name=/models/Qwen3-0.6B data.train.dataset_name=ResponseDataset +data.train.data_path=/data/train.jsonl data.train.split_validation_size=0": ByHand(  # noqa: E501
        A_TREE, "docs/nemo-rl.md", "9 of 9", NEMO_RL_RUN
    ),
    "./build.py report cpu": Here(says="release cpu, profile cpu"),
    # docs/evidence/gpu
    "./build.py functional --name nemo --mount ~/models:/models:ro --mount ~/data:/data:ro -- --driver=nemo-rl examples/configs/grpo_math_1B_dynamo.yaml policy.model_name=/models/Qwen3-0.6B …": ByHand(  # noqa: E501
        A_TREE,
        "docs/nemo-rl.md",
        "which finds no device",
        Run(
            "tests/kit/test_functional.py",
            "test_options_of_the_suite_are_given_after_two_dashes",
            ("--driver=nemo-rl",),
            "a stand-in for the suite",
        ),
    ),
    "functional make-model /dev/shm/m8 --shape Qwen3-8B": ByHand("a GPU", GPU_PAGE, "The shape of Qwen3-8B"),
    "functional run recipes/grpo_gpu.yaml cluster.share_gpu=true policy.model_name=/dev/shm/m8 policy.generation.vllm_cfg.gpu_memory_utilization=0.25": ByHand(  # noqa: E501
        "a GPU", GPU_PAGE, "8b-shape.json"
    ),
    # docs/nightly.md
    "ci/nightly.sh": Run("tests/kit/test_nightly.py", "test_a_night_on_cpu_from_start_to_end"),
    "ci/nightly.sh --help": Here(says="Stages, in this order"),
    "ci/nightly.sh --plain --profile cuda cluster.share_gpu=true": ByHand(
        "a GPU",
        "docs/nightly.md",
        "In plain environments",
        Run("tests/kit/test_nights.py", "test_a_night_in_plain_environments", ('"--plain", "--profile", "cuda"',)),
    ),
    "NAME=cuda-trixie ci/gpu_release.sh pack": ByHand(
        "a GPU machine without a network",
        GPU_PAGE,
        "81 parts",
        Run("tests/kit/test_functional.py", "test_the_result_of_another_machine", ('step(kit.root, "pack")',)),
    ),
    "ci/gpu_release.sh take .carry/part000": Run(
        "tests/kit/test_functional.py", "test_the_result_of_another_machine", ('step(there, "take", part)',)
    ),
    "NAME=cuda-trixie ci/gpu_release.sh night": ByHand(
        "a GPU machine without a network",
        "docs/nightly.md",
        "ci/gpu_release.sh",
        Run("tests/kit/test_functional.py", "test_the_result_of_another_machine", ('step(there, "night")',)),
    ),
    # docs/slurm.md
    'export CONTAINER=/shared/images/nemo.sqsh MOUNTS="$PWD:$PWD" GPUS_PER_NODE=8 BASE_LOG_DIR="$PWD/results/logs"': Run(  # noqa: E501
        *GUIDE, ("export CONTAINER=", "export MOUNTS="), "paths, GPUs"
    ),
    "export COMMAND='functional run --driver nemo-rl examples/configs/grpo_math_1B_dynamo.yaml --out \"$FUNCTIONAL_OUT\" …'": Run(  # noqa: E501
        "tests/slurm/test_nemo_rl_jobs.py",
        "test_a_small_tree_on_two_nodes",
        ("functional run --driver nemo-rl",),
        "a small tree; NeMo RL itself where an image has it",
    ),
    'export CONTAINER=/shared/images/cpu.sqsh MOUNTS="$PWD:$PWD" GPUS_PER_NODE=8 BASE_LOG_DIR="$PWD/results/logs"': Run(
        *GUIDE, ("export CONTAINER=", "export MOUNTS="), "paths, GPUs"
    ),
    "export COMMAND='uv run bash tests/functional/grpo_dynamo.sh'": Run(
        *GUIDE, ("export COMMAND",), "the command, which submit's tests run"
    ),
    "sbatch --nodes=2 --gres=gpu:8 --exclusive --account=A --partition=P ray.sub": ByHand(
        A_CLUSTER, "README.md", "Slurm ran locally", Run(*GUIDE, ("sbatch",))
    ),
    "./build.py submit --nodes 2 --gpus 8 --account A --partition P recipes/grpo_gpu.yaml": ByHand(
        A_CLUSTER, "README.md", "Slurm ran locally", SUBMIT
    ),
    # sqsh/README.md
    "uv tool install sqsh-0.2.0-py3-none-any.whl": Run(
        "tests/sqsh/test_sqsh_command.py",
        "test_its_wheel_alone_makes_the_same_bytes",
        ('"wheel"', '"install"'),
        "pip instead of uv",
    ),
    "sqsh registry.example.com/team/image:tag image.sqsh": Run(
        "tests/kit/test_registry.py", "test_same_bytes_from_registry_and_layout", ('"sqsh"',), "by build.py"
    ),
    "sqsh registry.example.com/team/image@sha256:… image.sqsh --platform linux/arm64": Run(
        "tests/sqsh/test_references.py", "", ("linux/arm64",), "an index on this machine"
    ),
    "sqsh path/to/oci-layout image.sqsh --level 3 --verify": Here(says="entries are as the layers have them"),
    "docker save image:tag -o image.tar && sqsh image.tar image.sqsh": Run(
        "tests/sqsh/test_archives.py", "", ("docker",), "archives as docker save and others write them"
    ),
    # within sentences
    "./build.py fetch": Run(ROAD, "prepare"),
    "./build.py functional": Run("Makefile", "", ("$(BUILD) functional",)),
    "./build.py image --lean": Run("ci/demo.sh", "", ('image --name "$name" --lean',)),
    "./build.py image --no-dynamo --name trainer": Run("tests/kit/test_by_hand.py", "test_the_trainer_image"),
    "./build.py lock": Run("tests/kit/test_by_hand.py", "test_the_locks_are_what_their_sources_give"),
    "./build.py verify": Here(says="image: digest of oci/"),
    "./build.py verify cuda-trixie": ByHand("the release", GPU_PAGE, "./build.py verify cuda-trixie"),
    "PROFILE=cuda make image": ByHand("its registry", "README.md", "the `cuda` profile on its published base"),
    "ci/bootstrap.sh --yes": Run(ROAD, "prepare"),
    "ci/slurm/local.sh up": Run("tests/slurm/conftest.py", "cluster", ('local("up"',)),
    'eval "$(./build.py services env)"': Run("tests/kit/test_by_hand.py", "test_the_image_by_hand"),
    "functional refit-faults recipes/grpo_cpu.yaml": Run(
        "tests/faults/test_refit_faults.py",
        "test_each_fault_comes_to_its_end_and_nothing_is_left",
        ('"refit-faults", str(RECIPE)',),
    ),
    "functional refit-faults recipes/grpo_gpu.yaml --only failing-n-times,lying-sends": ByHand(
        "a GPU", "docs/refit.md", "functional refit-faults recipes/grpo_gpu.yaml --only failing-n-times,lying-sends"
    ),
    "python -m functional.suite.hash_rates": ByHand("a GPU", "docs/refit.md", "functional.suite.hash_rates"),
    "python -m bench.image_sizes cuda-trixie": ByHand("the release", "docs/images.md", "Packages, MB unpacked"),
    "make bench": ByHand("an idle machine, for minutes", "docs/bench/sqsh.md", "processors, Linux"),
    "make bench BENCH=chat": ByHand("an idle machine", "docs/bench/chat.md", MADE_BY.format("chat")),
    "make bench BENCH=rollout": ByHand("an idle machine", "docs/bench/rollout.md", MADE_BY.format("rollout")),
    "make bench BENCH=refit": ByHand("a GPU", "docs/performance.md", MADE_BY.format("refit")),
    "make bench BENCH=refit-scale": ByHand("an idle machine", "docs/performance.md", MADE_BY.format("refit-scale")),
    "make env": Here(),
    "make clean": Here(says="removed"),
    "make distclean": Here(says="removed"),
    "make image": Run(ROAD, "road"),
    "make image sqsh": Run(ROAD, "road", ("make image push", "make sqsh")),
    # README, docs/nemo-rl.md
    "NEMO_RL=~/RL NAME=nemo make image sqsh": ByHand(A_TREE, "docs/nemo-rl.md", SEEN, SMALL_TREE),
    "NEMO_RL=TREE make image": ByHand(A_TREE, "docs/nemo-rl.md", SEEN, SMALL_TREE),
    "./build.py fetch --nemo-rl": ByHand(A_TREE, "docs/nemo-rl.md", SEEN, SMALL_TREE),
    "./build.py run --name nemo -- python -c 'import nemo_rl; print(nemo_rl.__file__)'": ByHand(
        A_TREE, "docs/nemo-rl.md", "import `/opt/nemo-rl` with no call of uv"
    ),
    'docker buildx build --build-context nemo-rl="$HOME/RL" --build-arg NEMO_RL=1 --build-arg BUILD_DYNAMO=1 --target release --file docker/Dockerfile --tag "$IMAGE" --push .': ByHand(  # noqa: E501
        A_TREE,
        "docs/nemo-rl.md",
        SEEN,
        Run("tests/kit/test_same_digest.py", "test_what_a_build_by_hand_takes", ("--build-arg=NEMO_RL=1",)),
    ),
    "uv run --no-sync": ByHand(A_TREE, "docs/nemo-rl.md", "runs in `/opt/nemo_rl_venv`"),
    "make test PARTS=slurm": Parts(),
    "make test-full": Parts(),
}  # fmt: skip

NAMED = {
    "./build.py run", "./build.py submit", "bash -c", "docker save", "functional config", "functional doctor",
    "functional fault worker-killed-generating", "functional make-model", "functional run",
}  # fmt: skip
"""In sentences: what is spoken of, without the words that it needs to be run."""

NO_COMMANDS = (
    "import openai", "client = ", "answer = ", "message = ", "messages.append", "with HttpPool", "completions = ",
    "build.py, Makefile", "kit/", "sqsh/", "docker/", "functional/", "engine/", "runtime/", "rollout/", "suite/",
    "recipes/", "tests/", "ci/, bench/, docs/", "dist/nightly/",
)  # fmt: skip
"""How lines of blocks begin that hold Python, or name folders."""

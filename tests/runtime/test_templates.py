"""A chat template given in the recipe itself reaches the worker as a file; the path of one as it stands."""

from pathlib import Path

import pytest

from functional.runtime.recipe.argv import WorkerPlace, is_inline, worker_arguments, write_template

KEY = "G.dynamo_cfg.worker_args.custom_jinja_template"
INLINE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("path", [None, "/a/template.jinja", "~/chat template.jinja", "$HOME/t.jinja"])
def test_a_path_is_no_template(path):
    assert not is_inline(path)


def test_a_template_of_the_recipe_is_written_beside_the_workers_socket(load, tmp_path):
    place = WorkerPlace(Path("/model"), "n", tmp_path / "kv", seed=1)
    recipe = load(f'{KEY}="{INLINE}"')
    write_template(recipe.policy.generation.dynamo_cfg.worker_args, place)
    words = worker_arguments(recipe, place)
    given = Path(words[words.index("--custom-jinja-template") + 1])
    assert given.read_text() == INLINE


def test_nothing_is_written_for_a_path(load, tmp_path):
    template = tmp_path / "mine.jinja"
    template.write_text(INLINE)
    place = WorkerPlace(Path("/model"), "n", tmp_path / "kv", seed=1)
    recipe = load(f"{KEY}={template}")
    write_template(recipe.policy.generation.dynamo_cfg.worker_args, place)
    words = worker_arguments(recipe, place)
    assert words[words.index("--custom-jinja-template") + 1] == str(template)
    assert not place.template.exists()

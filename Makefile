# One target per stage; PROFILE, NAME, IMAGE and REGISTRY override what it works on.
# shell variables: IMAGE=registry.example.com/nemo-rl:tag make image push
PROFILE ?= cpu
NAME ?= $(PROFILE)
export PROFILE NAME IMAGE REGISTRY KEEP

BUILD = .venv/bin/python build.py

.PHONY: nightly report doctor env ready lock fetch image push sqsh functional submit verify bench demo test test-full clean distclean

# Each command first checks that this machine has what it needs, and names what is missing; with CI=true, and for `demo`
# and `test`, missing system packages are installed and their names printed.
env:
	@ci/python-env.sh

ready:
	@ci/bootstrap.sh
	@ci/python-env.sh

lock: env
	@$(BUILD) lock

fetch: ready
	@$(BUILD) fetch

image: ready
	@$(BUILD) image $(LEAN)

push: ready
	@$(BUILD) push $(IMAGE)

sqsh: env
	@$(BUILD) sqsh

functional: env
	@$(BUILD) functional $(RECIPE) $(SET)

# The suite as a Slurm job. SUBMIT holds options: make submit SUBMIT='--nodes 2 --gpus 8 --partition P'
submit: env
	@$(BUILD) submit $(SUBMIT) $(RECIPE) $(SET)

verify: env
	@$(BUILD) verify

# A release's chain, sizes, times and nights; what this machine lacks; a whole night (docs/nightly.md).
report: env
	@$(BUILD) report

doctor: env
	@$(BUILD) doctor

nightly:
	@ci/nightly.sh --profile $(PROFILE) --name $(NAME) $(ARGS)

# Measures what BENCH names: sqsh, rollout, chat (docs/bench/$(BENCH).md), refit, refit-scale (docs/performance.md).
# ARGS adds options.
BENCH ?= sqsh
bench: ready
	@$(BUILD) services start
	@eval "$$($(BUILD) services env)" && .venv/bin/python -m bench.$(subst -,_,$(BENCH)) $(ARGS)

# The whole pipeline on this machine; names the system packages it installs.
demo:
	@ci/demo.sh

clean: env
	@$(BUILD) clean

distclean: env
	@$(BUILD) clean --all

# All parts, or PARTS; the longer ones are in `test-full`.
test:
	@ci/test.sh $(PARTS)

test-full:
	@ci/test.sh static unit road stations slurm inside faults full

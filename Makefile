# The commands that people and CI type. PYTHON picks the interpreter that makes the virtual environment.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
PYTEST_ARGS ?=
MUTATIONS_ARGS ?=
# Folders of further cases, each case with its dumps and expect.json.
CASES ?=
# The suite waits more than it works: three times as many workers as a small machine has cores.
WORKERS ?= 6
PYTEST = $(BIN)/python -m pytest --dist load --tx '$(WORKERS)*popen//python=tests/worker $(BIN)/python'
COLLECT = $(BIN)/python -m pytest -n0 --collect-only -qq
# Compiled once: each worker and each of a thousand starts of hangwatch would do it again.
unexport PYTHONDONTWRITEBYTECODE

# What is built lands in dist/, but for the image, which the builder keeps.
VERSION = $(shell sed -n 's/^__version__ = "\(.*\)"/\1/p' hangwatch/__init__.py)
REVISION = $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
# Archives carry the time of the commit, not of the build.
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || stat -c %Y pyproject.toml)
# Where the image is going to be pushed: make image IMAGE=REGISTRY/hangwatch
IMAGE ?= localhost/hangwatch
IMAGE_ARGS ?=
RELEASE_CHECK_ARGS ?=
BUILDER ?= $(firstword $(foreach name,podman buildah docker,$(shell command -v $(name))))

# The parts of `make long`; each takes at most an hour on two cores.
PART ?=
PARTS := machines frameworks verdicts latency stragglers torch-releases soak fuzz faults
LATENCY := tests/integration/test_progress_daemon.py
STRAGGLERS := tests/unit/test_arrival.py tests/integration/test_arrivals.py

.PHONY: support findings first-hour demo quick test long long-machines long-frameworks long-verdicts long-latency long-stragglers long-torch-releases long-soak long-fuzz long-faults bench hangbench mutations robustness check golden scenarios screenshots fmt dist image chart deb release-check torch-release page-test docs clean

# A release or a nightly wheel of PyTorch, without an import: is the layout of its flight recorder known?
torch-release: $(VENV)/.test
	$(BIN)/python -m tests.torch_layouts --known $(WHEEL)

demo: $(VENV)/.installed
	$(BIN)/hangwatch demo

# Renews docs/support.md: tests the parts of the support matrix that this machine has. As root, half an hour.
support: $(VENV)/.test
	$(BIN)/python -m tests.support

# For every change: lint, types, contracts and unit tests; no torch, no root, under three minutes on two cores.
quick: WORKERS = $(shell nproc)
quick: check
	$(BIN)/python -m compileall -q hangwatch
	$(PYTEST) -q -m 'not torch' $(PYTEST_ARGS) tests/unit

# Everything once that needs no special machine, in eight minutes on two cores. The rest runs in `make long`.
# Two processes compile the tests first: otherwise each worker does it by itself.
test: $(VENV)/.test
	$(BIN)/python -m compileall -q -j 0 hangwatch
	$(COLLECT) tests/unit >/dev/null & $(COLLECT) --ignore tests/unit >/dev/null; wait
	$(PYTEST) -m 'not series and not machines' $(PYTEST_ARGS)

# What takes long: series with real frameworks, series of verdicts, soak, fuzzing. Run the parts that a change touches.
long: $(VENV)/.test
	$(if $(filter $(PART),$(PARTS)),,$(error make long PART=NAME, where NAME is one of: $(PARTS)))
	$(MAKE) --no-print-directory long-$(PART)

# Once, with systemd, Slurm, ssh, containers, a browser, Prometheus and real launchers, in a quarter of an hour.
long-machines: WORKERS = 4
long-machines: $(VENV)/.test
	$(BIN)/python -m compileall -q hangwatch
	$(PYTEST) -m 'machines and not series' $(PYTEST_ARGS)

long-frameworks: $(VENV)/.frameworks
	$(PYTEST) -m 'series and torch' $(foreach file,$(LATENCY) $(STRAGGLERS),--ignore $(file)) $(PYTEST_ARGS)

# On a machine that does nothing else: 20 hangs at the defaults, then four by power alone.
long-latency:
	$(BIN)/python -m pytest -n0 -m series $(PYTEST_ARGS) $(LATENCY)
	$(BIN)/python benchmarks/latency.py --runs 4 --without-counters

# On a machine that does nothing else: real jobs with a late rank and without one, then 3,000 simulated jobs.
long-stragglers:
	$(BIN)/python -m pytest -n0 -m series -rP $(PYTEST_ARGS) $(STRAGGLERS)
	$(BIN)/python benchmarks/arrival.py

# As root: 100,000 rows of recorders of a newer torch (5 GB), gloo's own and one that a hook writes, as for nccl2.
TORCH_RELEASE ?= 2.15.0
long-torch-releases: $(VENV)/.test
	$(PYTHON) -m venv $(VENV)/torch-$(TORCH_RELEASE)
	$(VENV)/torch-$(TORCH_RELEASE)/bin/python -m pip --disable-pip-version-check --quiet install torch==$(TORCH_RELEASE) numpy
	for backend in gloo fake; do $(BIN)/python -m tests.recorder_of_other_torch --environ TORCH_FR_BUFFER_SIZE=500 \
		--backend $$backend $(VENV)/torch-$(TORCH_RELEASE)/bin/python || exit 1; done

# `python -m tests.verdicts` prints a line for each verdict: compare two commits with diff.
long-verdicts:
	$(PYTEST) -m 'series and not torch' $(foreach file,$(STRAGGLERS),--ignore $(file)) $(PYTEST_ARGS)
	$(BIN)/python -m tests.robustness $(CASES)
	mkdir -p build
	$(BIN)/python -m tests.verdicts $(CASES) > build/verdicts.txt
	$(BIN)/python -m tests.daemon_and_dump
	$(BIN)/python -m tests.scenarios.day

# As root. Each script says what it asserts and ends with 1 where that does not hold.
long-soak:
	$(BIN)/python -m tests.soak.sigterms
	$(BIN)/python -m tests.soak.socket_floods
	$(BIN)/python -m tests.soak.hostile_neighbour --minutes 10
	$(BIN)/python -m tests.soak.virtual_ticks
	$(BIN)/python -m tests.soak.captures
	unshare --pid --fork --kill-child --mount-proc $(BIN)/python -m tests.soak.half_hour

long-fuzz:
	$(BIN)/python -m tests.fuzz_recorder --count 100000
	$(BIN)/python -m tests.fuzz_environ --count 100000
	$(BIN)/python -m tests.fuzz_parsers
	$(PYTEST) -q -m 'not torch and not series' --hypothesis-profile thorough $(PYTEST_ARGS) tests/unit

# Renews docs/benchmarks.md and the figures of the README, in a quarter of an hour on two cores that do nothing else.
# A missed goal (GOALS in benchmarks/results.py) is shown on the page; the command goes on, and ends with an error.
# $(VENV)/node has hangwatch as nodes have it, without the packages of the tests.
bench: $(VENV)/.bench
	$(BIN)/python -m compileall -q hangwatch
	rm -rf build/lib
	$(VENV)/node/bin/python -m pip --disable-pip-version-check --quiet install .
	failed=; for part in detection.py culprit.py dump.py node_cost.py scale.py; \
	  do $(BIN)/python benchmarks/$$part --write || failed="$$failed $$part"; done; \
	  $(BIN)/python -m benchmarks.plots || failed="$$failed plots"; git diff --stat -- docs README.md; \
	  test -z "$$failed" || { echo "missed a goal, or failed:$$failed"; exit 1; }

# Removes the guard of each row of tests/faults/faults.toml in turn, in a copy of the tree: its test must fail.
long-faults:
	$(BIN)/python -m tests.faults

# Cases of hangs that any tool can be scored with, and the scores of some tools: renews docs/benchmarks.md. See
# benchmarks/hangbench/README.md.
hangbench: $(VENV)/.test
	rm -rf build/hangbench
	$(BIN)/python benchmarks/hangbench/write_cases.py build/hangbench
	$(BIN)/python benchmarks/hangbench/compare.py build/hangbench --write

mutations: $(VENV)/.test
	$(BIN)/python -m tests.mutations $(MUTATIONS_ARGS)

robustness: $(VENV)/.test
	$(BIN)/python -m tests.robustness $(CASES)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file tests/mypy.ini
	$(BIN)/lint-imports
	$(BIN)/python -m tests.prose

# No golden needs torch. A golden that does is marked `torch`, and is skipped where torch is not installed.
golden: $(VENV)/.dev
	HANGWATCH_RENEW_GOLDEN=1 $(BIN)/python -m pytest -q -m golden $(PYTEST_ARGS) $(shell grep -lr --include='test_*.py' mark.golden tests)
	git diff --stat

scenarios: $(VENV)/.test
	$(BIN)/python -m tests.scenarios
	git diff --stat -- docs

# Boots a Debian machine: needs root and what its script names.
first-hour: $(VENV)/.installed
	tests/first_hour/make.sh $(FOLDER)
	git diff --stat -- docs

# Sends the page of a made-up hang to Alertmanager or to a webhook.
page-test:
	$(PYTHON) deploy/prometheus/page_test.py $(URL)

# What outside tools do that surprised us; each script installs what it runs. Outside CI.
findings:
	$(PYTHON) findings/run_all.py

screenshots: $(VENV)/.installed
	$(BIN)/python docs/make_report_images.py

fmt: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

dist: $(VENV)/.release
	rm -rf build dist/hangwatch-$(VERSION)* dist/hangwatch_*.deb
	$(BIN)/python -m build --outdir dist
	rm -rf build *.egg-info

# OCI's own format has no health check; docker knows its own format alone, and no option for it.
image:
	$(if $(BUILDER),,$(error no podman, buildah or docker on PATH: apt-get install podman))
	$(BUILDER) build $(if $(findstring docker,$(BUILDER)),,--format docker) $(IMAGE_ARGS) \
	  --build-arg VERSION=$(VERSION) --build-arg REVISION=$(REVISION) --tag $(IMAGE):$(VERSION) .

chart: $(VENV)/.release
	$(BIN)/python -c 'from helm_python import chart; print(chart.package("deploy/helm/hangwatch", destination="dist"))'

# For the release of Debian or Ubuntu that this is typed on.
deb: dist
	deploy/deb/build.sh --output dist dist/hangwatch-$(VERSION)-py3-none-any.whl

# Builds all that a release has, and checks it. The package and the image only where a tool that builds them runs.
release-check:
	$(MAKE) --no-print-directory $(if $(shell command -v dpkg-deb),deb,dist)
	$(MAKE) --no-print-directory chart
	$(if $(shell $(BUILDER) info >/dev/null 2>&1 && echo yes),$(MAKE) --no-print-directory image)
	$(BIN)/python deploy/release_check.py $(RELEASE_CHECK_ARGS)

# The site of the documentation, in build/site. A link that leads nowhere is an error.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs --quiet build --strict --config-file deploy/docs-site/mkdocs.yml

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --editable .
	touch $@

# Exactly this torch, before anything that asks for "torch": a bare requirement would draw gigabytes of CUDA. Where this
# one does, too: make test TORCH_INDEX=URL, with the index of CPU builds that PyTorch's page of installation names.
$(VENV)/.test: $(VENV)/.installed
	$(PIP) install $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) torch==2.13.0
	$(PIP) install --editable '.[test,torch]'
	touch $@

$(VENV)/.frameworks: $(VENV)/.test
	DS_BUILD_OPS=0 $(PIP) install --no-build-isolation --editable '.[frameworks]'
	touch $@

$(VENV)/.dev: $(VENV)/.installed
	$(PIP) install --editable '.[dev,test]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(PIP) install --editable '.[docs]'
	touch $@

$(VENV)/.bench: $(VENV)/.test
	$(PIP) install --editable '.[bench]'
	$(PYTHON) -m venv $(VENV)/nvitop
	$(VENV)/nvitop/bin/python -m pip --disable-pip-version-check --quiet install 'nvitop-exporter>=1.7,<2'
	$(PYTHON) -m venv $(VENV)/node
	touch $@

$(VENV)/.release: $(VENV)/.installed
	$(PIP) install --editable '.[release]'
	touch $@

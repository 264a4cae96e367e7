# make setup   a virtual environment with everything pinned (skipped when up to date)
# make demo    three epochs of the shipped policy at the cost of 30 M: stock vLLM and spec rollout in turns; a page
# make test    what every change must pass: the C++ core under sanitizers, then all tests but the long ones
# make nightly all that is too long for every change; before a release
# make unit    the pure part of the tests: no engine, no vLLM, no torch, no benchmarks, fewer examples
# make lint    formatting, types, layers
# make serve   an OpenAI-compatible server of the shipped policy, with drafts
# make bench   decoding speed against stock vLLM
# make identity  the long token-by-token comparison with stock vLLM
# make vllm-suite  vLLM's own tests with stock vLLM and with drafts; FILES="tests/..." for some of them, or others
# make versions       trees of the other supported vLLM versions, for tests
# make versions-test  their source, and a short comparison with stock vLLM on each; tests/versions/tested.json remembers it
# make docs    the generated reference pages
# make site    the pages of docs/ as a site, in out/site
# make lock    the hashes of all pins, from requirements/*.in into requirements/*.txt
# make sbom    what is installed, with licences and dependencies, as CycloneDX (out/sbom.cdx.json)
# make sanitize  the C++ core under ASan and UBSan, with random operations for SECONDS (60)
# make faults  random schedules of faults, ten times as many as in `make test`
# make mutants  faults put into the engine, one at a time: the tests that must notice do
# make compiled  what the kernels become on each GPU, by the installed Triton and an older one: tests/kernels/compiled.json
# make cuda-wheel  the Python of vLLM as it is released for CUDA, which tests compare with the one that is installed
# make wheels  portable wheels, for each of PYTHONS, in out/wheels
# make trainers  verl and OpenRLHF in a folder of their own, and what their own classes do with this plugin
# make trainers-fresh  the built wheel beside each trainer's own requirements, each in an environment made for it

VENV ?= .venv
BIN := $(VENV)/bin
POLICY := packages/policy/checkpoint
# where torch's CPU builds are, for hosts whose own index lacks them; asked for torch alone, and in place of all others
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
# pyenv leaves shims that do not run, so try each
PYTHON ?= $(shell for python in python3.11 python3.12 python3; do \
	$$python -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null \
	&& echo $$python && break; done)

# that wheels are made for
PYTHONS ?= python3.11 python3.12 python3.13

REQUIREMENTS := requirements/cpu.txt requirements/dev.txt
# Python compiles what it imports; of these packages that is the smaller part
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-compile
# what comes from an index: nothing without a known hash, and nothing that runs code of its own to be installed
FETCH := $(INSTALL) --require-hashes --only-binary :all:
CORE := $(wildcard csrc/*.cc csrc/core/*.cc csrc/core/*.h)
# a new inner folder has to be mapped, and mapping happens at installation
FOLDERS := $(wildcard kernels/*/__init__.py patches/*/__init__.py bench/*/__init__.py packages/*/__init__.py)
# as many tests at once as there are cores; files are begun in their order, the long ones first
PYTEST := $(BIN)/python -m pytest -n auto
EVERY_CHANGE := not identity and not nightly and not gpu and not trainers and not versions
LONG := (identity or nightly) and not gpu and not trainers and not versions
# what, and its command: run it, and say how long it took
timed = @begin=$$(date +%s); $(2); code=$$?; echo "$(1): $$(($$(date +%s) - begin)) s"; exit $$code
PURE := $(addprefix vllm_specrollout/,types.py errors.py plugin.py speculator.py config cli trees budgets scheduling observe cluster \
	history drafters replay report patches server/asking.py server/reports.py worker/withheld.py)

.PHONY: setup demo test nightly nightly-sanitizers nightly-v2 nightly-others nightly-faults nightly-unlike nightly-mutants nightly-cuda nightly-vllm-suite vllm-suite browser unit lint serve bench identity mutants compiled cuda-wheel trainers trainers-fresh versions versions-test docs site wheels lock sbom sanitize faults
.DEFAULT_GOAL := setup

setup: $(VENV)/.installed

$(VENV)/.requirements: $(REQUIREMENTS) requirements/torch.txt requirements/vllm_alias/pyproject.toml
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or 3.12 found"; echo; echo "hint: make PYTHON=/path/to/python3.11"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(FETCH) $(addprefix -r ,$(REQUIREMENTS))
	$(FETCH) -r requirements/torch.txt || $(FETCH) --index-url $(TORCH_INDEX) -r requirements/torch.txt
	$(INSTALL) --no-build-isolation ./requirements/vllm_alias
	@rm -rf requirements/vllm_alias/build requirements/vllm_alias/*.egg-info
	@touch $@

$(VENV)/.installed: $(VENV)/.requirements setup.py pyproject.toml $(CORE) $(FOLDERS)
	$(INSTALL) --no-build-isolation -e .
	@touch $@

demo: setup
	@mkdir -p out
	@test -f out/policy-30M/config.json || $(BIN)/python -m vllm_specrollout.bench.policy inflate --to 30M --out out/policy-30M
	$(BIN)/specrollout try out/policy-30M --prompts examples/prompts.jsonl --most-prompts 8 --batch 8 --max-tokens 1024 \
		--epochs 3 --rounds 3 --dtype float32 --eager --kv-gib 1 --report out/rollout.html

test: setup
	$(call timed,sanitizers,csrc/tests/sanitize.sh 10)
	$(call timed,kernels and the V2 runner,$(PYTEST) -m "$(EVERY_CHANGE)" --dist worksteal tests/kernels tests/v2)
	$(call timed,all other tests,$(PYTEST) -m "$(EVERY_CHANGE)" --dist loadfile --no-loadscope-reorder)

# each part by itself too, so `make -k nightly` runs all whatever one finds
# unlike rows: as on a host whose attention and products round by the number of rows
nightly: nightly-sanitizers nightly-v2 nightly-others nightly-faults nightly-unlike nightly-mutants nightly-cuda nightly-vllm-suite

nightly-sanitizers: setup
	$(call timed,sanitizers,csrc/tests/sanitize.sh 60)
nightly-v2: setup
	$(call timed,kernels and the V2 runner,$(PYTEST) -m "$(LONG)" --dist worksteal tests/kernels tests/v2)
nightly-others: setup browser
	$(call timed,all other tests,$(PYTEST) -m "$(LONG)" --dist worksteal)
nightly-faults: setup
	$(call timed,faults,SPECROLLOUT_SCHEDULES=10 $(PYTEST) --dist worksteal tests/faults)
	$(call timed,300 schedules of groups,SPECROLLOUT_SCHEDULES=15 $(PYTEST) --dist worksteal tests/unit/cluster/test_driver.py)
nightly-unlike: setup
	$(call timed,unlike rows,$(PYTEST) -m "$(EVERY_CHANGE)" --dist loadfile --unlike-rows tests/e2e tests/integration)
nightly-mutants: setup
	$(call timed,mutants,$(MAKE) --no-print-directory mutants)
nightly-cuda: cuda-wheel
	$(call timed,vLLM for CUDA,$(PYTEST) tests/versions/test_cuda_wheel.py)
nightly-vllm-suite: setup
	$(call timed,vLLM's own tests,$(MAKE) --no-print-directory vllm-suite)

# for the tests of pages, which are skipped without it
browser:
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium; } \
		|| echo "no Chromium: the tests of pages are skipped"

unit: setup
	$(PYTEST) --hypothesis-profile quick tests/unit tests/csrc --ignore tests/unit/server --ignore tests/unit/bench --ignore tests/unit/packages

lint: setup
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(CORE) csrc/tests/*.cc
	$(BIN)/mypy $(PURE) tests/conformance.py
	$(BIN)/lint-imports --no-cache

serve: setup
	VLLM_PLUGINS=spec_rollout $(BIN)/vllm serve $(POLICY) --spec-rollout

bench: setup
	$(BIN)/specrollout bench engine

identity: setup
	$(PYTEST) --dist worksteal tests/e2e -m identity
	$(PYTEST) --dist worksteal tests/v2 -m identity

SECONDS ?= 60
sanitize:
	csrc/tests/sanitize.sh $(SECONDS)

# schedules without an engine, and over one
faults: setup
	SPECROLLOUT_SCHEDULES=10 $(PYTEST) --dist worksteal tests/faults

mutants: setup
	$(BIN)/python -m tests.mutants.run

.triton/.installed: requirements/triton.txt $(VENV)/.requirements
	@rm -rf .triton
	$(FETCH) --target .triton -r requirements/triton.txt
	@touch $@

# the older Triton stands first, for Hopper alone; the rest of the environment is the same
compiled: setup .triton/.installed
	$(BIN)/python -m tests.kernels.compiled --update
	PYTHONPATH=.triton $(BIN)/python -m tests.kernels.compiled --gpus 90 --update
	$(BIN)/python docs/reference/generate.py

cuda-wheel: setup
	$(BIN)/python -m tests.versions.cuda_wheel

# both arms of a file one after the other; what is fetched and made lies in .versions/suite
vllm-suite: setup
	$(BIN)/python -m tests.vllm_suite.tree
	$(BIN)/python -m tests.vllm_suite.run $(FILES)

versions: setup
	$(BIN)/python -m tests.versions.trees

# one engine process at a time: each has all cores; what `make test` runs too is run again, as the trees are new to it
versions-test: versions
	$(BIN)/python -m pytest --update-snapshots tests/versions
	$(BIN)/python -m pytest -m versions tests/trainers
	$(BIN)/python docs/reference/generate.py

docs: setup
	$(BIN)/python docs/reference/generate.py
	$(BIN)/python docs/benchmarks.py

site: .site/.installed
	.site/bin/mkdocs build --strict --quiet
	@echo "open out/site/index.html"

# for each Python, and tried in an empty environment of it where nothing can be compiled
wheels: .wheels/.installed
	@rm -rf out/wheels
	for python in $(PYTHONS); do \
		$$python -m pip wheel --quiet --no-deps --wheel-dir out/wheels/plain . || exit 1; \
	done
	PATH="$(CURDIR)/.wheels/bin:$$PATH" .wheels/bin/auditwheel repair --wheel-dir out/wheels out/wheels/plain/*.whl > /dev/null
	for python in $(PYTHONS); do \
		$$python -m venv --clear out/wheels/empty && CC=false CXX=false out/wheels/empty/bin/pip install --quiet \
			--find-links out/wheels --only-binary :all: "vllm-specrollout==$$(sed -n "s/^version = \"\(.*\)\"/\1/p" pyproject.toml)" && out/wheels/empty/bin/specrollout --version || exit 1; \
	done
	@rm -rf out/wheels/plain out/wheels/empty
	@ls out/wheels

# environments of their own, each with its pins
.site/.installed .tools/.installed .wheels/.installed: .%/.installed: requirements/%.txt
	@rm -rf .$*
	$(PYTHON) -m venv .$*
	.$*/bin/pip install --quiet --disable-pip-version-check --no-deps --require-hashes --only-binary :all: -r requirements/$*.txt
	@touch $@

lock: .tools/.installed
	PATH="$(CURDIR)/.tools/bin:$$PATH" .tools/bin/python requirements/lock.py

sbom: setup .tools/.installed
	@mkdir -p out
	.tools/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-format JSON \
		--output-file out/sbom.cdx.json $(BIN)/python

.trainers/.installed: $(VENV)/.requirements requirements/trainers.txt
	@rm -rf .trainers
	$(INSTALL) --require-hashes --no-build-isolation --target .trainers -r requirements/trainers.txt
	@touch $@

trainers: setup .trainers/.installed
	$(BIN)/python -m pytest tests/trainers -m trainers

trainers-fresh: setup
	$(BIN)/python -m tests.trainers.fresh

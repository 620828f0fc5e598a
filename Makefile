# Subfleet: everything that a newcomer runs. Each target makes .venv and installs what it needs.
#   make demo     the main job: a fleet of five unequal devices on this machine, about a minute and a half after the install
#   make test     all tests but the long ones (7 minutes on two cores is the aim)
#   make test-long  the long ones, and properties with ten times as many random examples
#   make quick    the tests of less than a tenth of a second that start no broker and write no program
#   make mutants  known defects, planted one by one: the tests must find each (an hour; ARGS=--smoke tries two)
#   make native   ExecuTorch without PyTorch: builds edge_client/native and installs it (30 seconds, needs a C++ compiler)
#   make gpu      what runs on an accelerator: its tests, and two pages of benchmarks/results; without one it says so
#   make check    format, lint, types, import rules, nothing newer than Python 3.10, dead links, the README's demo
PYTHON ?= python3
# Installed first, so that no version range drags in gigabytes of CUDA packages where they are not wanted.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=
# Modules are compiled once for all the processes that tests start, whatever the shell says.
export PYTHONDONTWRITEBYTECODE :=
OLDEST := build/onnxruntime-1.23.2
SOURCES := protocol device_profiles tasks elastic export edge_client server emulation scripts examples

NATIVE := edge_client/native
NATIVE_FILES := $(wildcard $(NATIVE)/*.t* $(NATIVE)/src/* $(NATIVE)/subfleet_executorch/*.py*)
CAN_BUILD = command -v "$${CXX:-c++}" >/dev/null && $(BIN)/python -c 'import sys, sysconfig, pathlib; \
	sys.exit(not pathlib.Path(sysconfig.get_paths()["include"], "Python.h").exists())'
BUILD_NATIVE = EXECUTORCH_ROOT="$$($(BIN)/python -c 'import importlib.util as u; \
	print(u.find_spec("executorch").submodule_search_locations[0])')" $(PIP) --no-deps --force-reinstall ./$(NATIVE)

.PHONY: demo test quick test-long mutants check format native gpu clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/subfleet run quickstart $(ARGS)

# Four at once on two cores: some tests wait for links that are as slow as real ones.
test: $(VENV)/.dev $(VENV)/.native $(OLDEST)/.made tests/web/node_modules/.package-lock.json
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 4 --dist worksteal $(ARGS)

quick: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "not slow and not broker and not export and not long" $(ARGS)

test-long: $(VENV)/.dev $(VENV)/.networks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -m "long or hypothesis" \
		--hypothesis-profile thorough $(ARGS)

mutants: $(VENV)/.dev
	$(BIN)/python scripts/mutants.py --jobs 2 $(ARGS)

native: $(VENV)/.native
	@$(BIN)/python -c 'import subfleet_executorch'

gpu: $(VENV)/.dev
	@if $(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then \
		$(BIN)/python -m pytest -m gpu $(ARGS) && $(BIN)/python benchmarks/aggregate.py --device cuda --write && \
		$(BIN)/python benchmarks/grouped.py --device cuda --clients 20 100 500 --write; \
	else echo "PyTorch sees no GPU on this machine, so that nothing was run and the pages of benchmarks/results stay as they are"; fi

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin --quiet --no-tips --violations -t=3.10- $(SOURCES)
	$(BIN)/python scripts/check_links.py
	$(BIN)/python scripts/readme_demo.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# Debian splits venv off Python; where it is missing, virtualenv from PyPI makes the environment, outside the system.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "Subfleet needs Python 3.10 or newer, but $(PYTHON) is older; run: make PYTHON=python3.11" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) >/dev/null 2>&1 || { rm -rf $(VENV) && \
		$(PYTHON) -m pip install --quiet --disable-pip-version-check --target build/virtualenv virtualenv && \
		PYTHONPATH=build/virtualenv $(PYTHON) -m virtualenv --quiet $(VENV); } || \
		{ echo "no virtual environment can be made with $(PYTHON); run: apt-get install python3-venv" >&2; exit 1; }
	@touch $@

$(VENV)/.torch: $(VENV)/.made
	@echo "installing $(TORCH) ..."
	@$(PIP) '$(TORCH)'
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "installing subfleet[emulation] ..."
	@$(PIP) --editable '.[emulation]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	@echo "installing subfleet[dev] ..."
	@$(PIP) --editable '.[dev]'
	@touch $@ $(VENV)/.demo

# What the exporter is tried on; torchvision's version is that of the PyTorch above.
$(VENV)/.networks: $(VENV)/.dev pyproject.toml
	@echo "installing subfleet[networks,ray] ..."
	@$(PIP) --editable '.[networks,ray]'
	@touch $@

# The oldest ONNX Runtime that the edge extra allows, beside the newest.
$(OLDEST)/.made: $(VENV)/.dev
	@echo "installing $(notdir $(OLDEST)) ..."
	@$(PIP) --no-deps --target $(OLDEST) --upgrade $(subst -,==,$(notdir $(OLDEST))) && touch $@ || \
		echo "there is no wheel of it for this Python; the test that needs it says so and is skipped"

# The browser's ONNX Runtime; where there is no npm, the test that needs it says so and is skipped.
tests/web/node_modules/.package-lock.json: tests/web/package-lock.json
	@if command -v npm >/dev/null; then echo "installing onnxruntime-web ..."; \
		npm ci --prefix tests/web --silent --no-audit --no-fund --ignore-scripts && touch $@; fi

# ExecuTorch without PyTorch, built against the very ExecuTorch that writes the programs here; where it cannot be built,
# ExecuTorch's programs run with PyTorch, and the tests that need it say so and are skipped.
$(VENV)/.native: $(VENV)/.dev $(NATIVE_FILES)
	@if $(CAN_BUILD); then echo "building subfleet-executorch ..."; $(BUILD_NATIVE) && touch $@; else \
		echo "subfleet-executorch needs a C++ compiler and Python's headers; run: apt-get install g++ python3-dev"; fi

clean:
	rm -rf $(VENV) build dist tests/web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

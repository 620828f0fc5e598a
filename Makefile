# Subfleet: everything that a newcomer runs. Each target makes .venv and installs what it needs.
#   make demo     the main job: a fleet of five unequal devices on this machine, about a minute and a half after the install
#   make test     all tests (under 12 minutes on two cores)
#   make check    format, lint, types, import rules, nothing newer than Python 3.10, dead links
PYTHON ?= python3
# Installed first, so that no version range drags in gigabytes of CUDA packages where they are not wanted.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
ARGS ?=
OLDEST := build/onnxruntime-1.23.2
SOURCES := protocol device_profiles tasks elastic export edge_client server emulation scripts

.PHONY: demo test check format clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo
	$(BIN)/subfleet run quickstart $(ARGS)

test: $(VENV)/.dev $(OLDEST)/.made tests/web/node_modules/.package-lock.json
	$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/vermin --quiet --no-tips --violations -t=3.10- $(SOURCES)
	$(BIN)/python scripts/check_links.py

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

# The oldest ONNX Runtime that the edge extra allows, beside the newest.
$(OLDEST)/.made: $(VENV)/.dev
	@echo "installing $(notdir $(OLDEST)) ..."
	@$(PIP) --no-deps --target $(OLDEST) --upgrade $(subst -,==,$(notdir $(OLDEST))) && touch $@ || \
		echo "there is no wheel of it for this Python; the test that needs it says so and is skipped"

# The browser's ONNX Runtime; where there is no npm, the test that needs it says so and is skipped.
tests/web/node_modules/.package-lock.json: tests/web/package-lock.json
	@if command -v npm >/dev/null; then echo "installing onnxruntime-web ..."; \
		npm ci --prefix tests/web --silent --no-audit --no-fund --ignore-scripts && touch $@; fi

clean:
	rm -rf $(VENV) build dist tests/web/node_modules .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

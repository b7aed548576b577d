# Needs Python 3.11 or later, make, and npm for the pages. Everything else goes into .venv.
PYTHON ?= python3
PROFILE ?= smoke
PORT ?= 8000
PIP_FLAGS ?=

# Paths are relative, so that the folder of the project may have spaces in its name.
ENV := .venv
RUN := $(ENV)/bin/python
BOOK := $(RUN) -m lmgeom book

.DEFAULT_GOAL := help
.PHONY: help env npm-there plan book serve pdf zip test lint export screenshots clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile
	@echo "  PROFILE=smoke|book|gpu (now $(PROFILE)), PYTHON=python3.12, PORT=8000, PIP_FLAGS=..."

$(ENV)/installed: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { echo "no $(PYTHON): install Python 3.11 or later, or say make PYTHON=..." >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "$$("$(PYTHON)" --version) is too old: lmgeom needs 3.11 or later, say make PYTHON=python3.11" >&2; exit 2; }
	test -x $(RUN) || "$(PYTHON)" -m venv $(ENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

env: $(ENV)/installed ## make the environment and install everything into it

npm-there:
	@command -v npm >/dev/null || { echo "no npm: the pages bundle MathJax and a font by it (Debian: apt install npm)" >&2; exit 2; }

export: env ## export the library from the notebooks, and clean them
	$(ENV)/bin/nbdev-export
	$(ENV)/bin/nbdev-clean

book: env npm-there ## execute the notebooks that changed and build the pages
	@$(ENV)/bin/nbdev-export
	$(BOOK) build --profile $(PROFILE)

plan: env ## say what make book would run, without running it
	$(BOOK) plan --profile $(PROFILE)

serve: env ## serve the built pages on http://127.0.0.1:8000
	$(BOOK) serve --profile $(PROFILE) --port $(PORT)

pdf: env ## print the built pages to one PDF with contents
	$(BOOK) pdf --profile $(PROFILE)

zip: env ## pack the built pages; unpacked, they open without a network
	$(BOOK) zip --profile $(PROFILE)

screenshots: env ## picture every page: desktop and phone, light and dark
	$(BOOK) screenshots --profile $(PROFILE)

lint: env ## check and format notebooks, tests and modules
	$(ENV)/bin/ruff check .
	$(BOOK) test ruff

test: env npm-there ## everything that CI runs
	$(BOOK) test

clean: ## remove what was built, but no environment, no data and no unfinished run
	@mkdir -p _build
	find _build -mindepth 1 -maxdepth 1 ! -name runs -exec rm -rf {} +
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis
	find . -path ./$(ENV) -prune -o -name __pycache__ -type d -exec rm -rf {} +

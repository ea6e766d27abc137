# Each target sets up what it needs in .venv first. Overrides go in ARGS: make train ARGS="trainer.max_steps=100"
PYTHON ?= $(shell command -v python3.11 || command -v python3)
ARGS ?=
VENV := .venv
RUN := $(VENV)/bin/python

.DEFAULT_GOAL := help
.PHONY: help train sample test test-all chaos bench playground lint typecheck clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

train: $(VENV)/.installed  ## train the recipe that fits this machine, then print a sample
	$(RUN) main.py $(ARGS)
	$(RUN) sample.py

sample: $(VENV)/.installed  ## print text from the newest run; ARGS='prompt=ROMEO: num_samples=3'
	$(RUN) sample.py $(ARGS)

playground: $(VENV)/.installed  ## a page to try the newest run; ARGS='snapshots=[runs/a,runs/b]'
	$(RUN) export.py page=runs/playground.html $(ARGS)
	$(RUN) -m webbrowser "file://$(CURDIR)/runs/playground.html"

test: $(VENV)/.installed-dev  ## run the tests, without the slow ones
	$(RUN) -m pytest -n 3 -m "not slow" $(ARGS)

test-all: $(VENV)/.installed-dev  ## run all tests
	$(RUN) -m pytest -n 3 $(ARGS)

chaos: $(VENV)/.installed-dev  ## cause 200 faults, for 40 minutes or more; ARGS='kills=20 seed=1 processes=2'
	$(RUN) tests/chaos.py $(ARGS)

bench: $(VENV)/.installed-bench  ## compare with other trainers, for an hour or more; ARGS='sections=step rounds=1'
	$(RUN) benchmarks/bench.py $(ARGS)

lint: $(VENV)/.installed-dev  ## check format and style
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

typecheck: $(VENV)/.installed-dev  ## check types; the first time takes a minute
	$(RUN) -m mypy

clean:  ## remove the environment and every cache; runs/ and the texts in data/ stay
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .hypothesis \
		__pycache__ */__pycache__ engine/*/__pycache__ data/cache "$${XDG_CACHE_HOME:-$$HOME/.cache}/character-level-gpt"

# Each stamp is written last, so an interrupted install is done again.
$(VENV)/.installed: requirements.txt
	@echo "Setting up $(VENV) with $(PYTHON): the first time takes a minute or two."
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	@touch $@

$(VENV)/.installed-dev: requirements-dev.txt $(VENV)/.installed
	@echo "Adding the test packages."
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	@touch $@

$(VENV)/.installed-bench: requirements-bench.txt $(VENV)/.installed-dev
	@echo "Adding the trainers to compare."
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements-bench.txt
	@touch $@

# From a fresh machine to the report in one command: `make report`. `make help` lists the rest.

# `:=`, for such names may stand in anybody's environment: they count on make's command line alone.
PYTHON  := python3
VENV    := .venv
ONLY    :=
SET     :=
MACHINE :=
MINUTES := 25
NAME    :=
PACKED  :=
DRY     :=
ALSO    :=
ARGS    :=
WORKERS := 2
# CONTRIBUTING.md lists it among the environment's variables.
FRESH   ?=

.DEFAULT_GOAL := help
.PHONY: help setup report study record render figures docs list machine pack lab test test-fast test-long test-newest test-gpu lint lock clean

export FUSEDLIB_MACHINE := $(or $(MACHINE),$(FUSEDLIB_MACHINE))
ifeq ($(FUSEDLIB_MACHINE),)
unexport FUSEDLIB_MACHINE
endif

# A text as one word of the shell, whatever it holds.
quoted = '$(subst ','\'',$(1))'
# With VENV= empty: the Python given, as it is. Nothing is installed; what it lacks is listed.
# This clone's code comes first, whatever else PYTHONPATH names.
CODE := $(call quoted,$(CURDIR):$(CURDIR)/notebooks:$(CURDIR)/report)
RUN := PYTHONPATH=$(CODE)"$${PYTHONPATH:+:$$PYTHONPATH}" \
	$(call quoted,$(if $(strip $(VENV)),$(VENV)/bin/python,$(PYTHON)))
CHOICE := $(if $(filter file default,$(origin PYTHON)),default,given)
READY = @sh tools/setup.sh $(call quoted,$(PYTHON)) $(CHOICE) $(call quoted,$(VENV)) $(1)

STUDY := $(RUN) -m press
# A file's tests share what it set up, so they stay with one worker. In the order of
# tests/conftest.py: by the number of their tests, files of one long test would come last.
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# The laws of the operations again, of the kernels, and what is particular to one operation. pytest's
# 5 is that ARGS choose none.
OF_KERNELS := tests/laws $(patsubst %,tests/test_%.py,linear loss norm rope swiglu backward_order)
INTERPRETED = @TRITON_INTERPRET=1 $(RUN) -m pytest -n $(WORKERS) $(OF_KERNELS) $(ARGS) || [ $$? = 5 ]
PATCHED := tests/laws/test_models.py tests/laws/test_every_causal_model.py
NEWEST := report/build/newest
CHOSEN = $(if $(ONLY),--only $(call quoted,$(ONLY)))
OPTIONS = $(CHOSEN) \
	$(foreach setting,$(SET),--set $(call quoted,$(setting))) $(if $(filter-out 0,$(FRESH)),--fresh)

help: ## list what make can do
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-13s %s\n", $$1, $$2}' Makefile
	@echo
	@echo '  ONLY=04_memory            only these notebooks or sections, separated by commas; 04 will do'
	@echo '  SET="name=value ..."      knobs of notebooks; 04_memory.hidden=4096 sets one alone'
	@echo '  FRESH=1                   measure and run everything anew'
	@echo '  PYTHON=python3.12         which Python makes the environment'
	@echo '  VENV=.venv                where it lies; VENV= uses PYTHON as it is, installs nothing'
	@echo '  MACHINE=name              the name that this machine'"'"'s rows are filed under'
	@echo '  MINUTES=25 NAME= DRY=1    of make record: how long, which recording, only say what it takes'
	@echo '  PACKED=folder             of make record: gets the recording as one file after each study'
	@echo '  ARGS="..."                further arguments for pytest or JupyterLab'
	@echo '  WORKERS=2                 processes that share the tests'

setup: ## make the environment, or check the one given
	$(call READY,report)

report: ## measure, run the notebooks, render report.html and report.pdf
	$(call READY,report)
	@$(STUDY) report $(OPTIONS)

study: ## measure and run the notebooks only
	$(call READY,study)
	@$(STUDY) run $(OPTIONS)

record: ## measure all topics as a recording, quick claims first: make record MINUTES=25
	$(call READY,study)
	@$(STUDY) record --minutes $(call quoted,$(MINUTES)) $(CHOSEN) \
		$(if $(NAME),--name $(call quoted,$(NAME))) \
		$(if $(PACKED),--packed $(call quoted,$(PACKED))) $(if $(filter-out 0,$(DRY)),--dry)

pack: ## write code.json, which says of which commit code is that is carried without git
	$(call READY,study)
	@$(STUDY) pack

render: ## render the report again from the executed notebooks
	$(call READY,report)
	@$(STUDY) render

figures: ## draw figures/*.svg with their data from the recorded rows
	$(call READY,study)
	@$(STUDY) figures

docs: ## the API reference from the docstrings: report/build/docs
	$(call READY,docs)
	@$(RUN) tools/docs.py

list: ## the notebooks with their knobs, and the topics
	$(call READY,study)
	@$(STUDY) list

machine: ## what a row says about this machine
	$(call READY,study)
	@$(STUDY) machine

lab: ## open JupyterLab on the notebooks
	$(call READY,lab)
	@$(STUDY) lab $(ARGS)

# With two threads each, the workers wait for one another: the laws took 9 minutes for 4.
test test-fast test-long: export OMP_NUM_THREADS := 1

test: ## all tests that need no GPU, but the long ones
	$(call READY,test)
	$(INTERPRETED)
	@$(RUN) -m pytest $(SPREAD) -m "not gpu and not long" $(ARGS)

test-fast: ## the tests that take seconds
	$(call READY,test)
	@$(RUN) -m pytest $(SPREAD) -m "not gpu and not slow and not long" $(ARGS)

test-long: ## the tests that take minutes: 500 drawn calls against float64, notebooks with knobs turned
	$(call READY,test)
	@$(RUN) -m pytest -m long $(ARGS)

test-newest: ## tests of patched models with the newest transformers, in a folder of its own
	$(call READY,test)
	@$(RUN) -m pip install --disable-pip-version-check --quiet --upgrade --target "$(NEWEST)" transformers
	@PYTHONPATH="$(CURDIR)/$(NEWEST)$${PYTHONPATH:+:$$PYTHONPATH}"; export PYTHONPATH; \
		$(RUN) -m pytest -m "not gpu and not long" $(PATCHED) $(ARGS)

test-gpu: ## the tests that need a GPU
	$(call READY,test-gpu)
	@$(RUN) -m pytest -m "gpu and not alone" $(ARGS)
	@$(RUN) -m pytest -m "gpu and alone" $(ARGS)

lint: ## ruff over code and notebooks, mypy, and which room may import which
	$(call READY,lint)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(RUN) -c "from importlinter.cli import lint_imports_command as lint; lint()"

lock: ## resolve all versions anew into constraints.txt (ALSO="python3.12 python3.13")
	@$(call quoted,$(PYTHON)) tools/lock.py \
		$(foreach python,$(ALSO),--also $(call quoted,$(python)))

clean: ## remove what make report and the tools made; rows and environment stay
	rm -rf report/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -type d -prune -exec rm -rf {} +

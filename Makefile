# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The CPU build; plain `torch` may bring several GB of CUDA libraries that no test needs.
TORCH ?= torch==2.13.0
# The independent client; its own pins are for serving and are left out.
CLIENT ?= dflash==0.1.0
# Set by `oldest`: what is asked for beside the project, and which tests.
WITH :=
TESTS :=
# The least transformers that pyproject.toml admits, and the tests whose result depends on it.
OLDEST ?= $(shell sed -n 's/.*"transformers>=\([0-9.]*\)".*/\1/p' pyproject.toml)
OLD_TESTS := dataset dataset_files dataset_preview dataset_sources regenerate render peers_import tiny_target \
	hybrid live extract_fp8 extract_guard extract_kernels extract_rows extract_run extract_states \
	train_export train_loaders train_model
OUT ?= demo-out

.PHONY: demo test oldest slow lint clean
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[test,demo]" $(WITH)
	$(PY) -m pip install --quiet --no-deps "$(CLIENT)"
	touch $@

demo: $(VENV)/.ready
	$(PY) -m dflash_offline.tools.demo --out $(OUT)

# Two processes of one thread each: most tests wait for processes of their own.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile $(TESTS)

oldest:
	$(MAKE) test VENV=$(VENV)-$(OLDEST) WITH="transformers==$(OLDEST)" TESTS="$(OLD_TESTS:%=tests/test_%.py)"

slow: $(VENV)/.ready
	$(PY) -m pytest -m slow

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) $(VENV)-$(OLDEST) demo-out build *.egg-info

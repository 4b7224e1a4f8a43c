# Two commands on a fresh machine: `make demo` and `make test`. Both set up .venv first.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
# The CPU build; plain `torch` may bring several GB of CUDA libraries that no test needs.
TORCH ?= torch==2.13.0
# The independent client; its own pins are for serving and are left out.
CLIENT ?= dflash==0.1.0
OUT ?= demo-out

.PHONY: demo test slow lint clean
$(VENV)/.ready: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --upgrade pip
	$(PY) -m pip install --quiet "$(TORCH)"
	$(PY) -m pip install --quiet --editable ".[test,demo]"
	$(PY) -m pip install --quiet --no-deps "$(CLIENT)"
	touch $@

demo: $(VENV)/.ready
	$(PY) -m dflash_offline.tools.demo --out $(OUT)

# Two processes of one thread each: most tests wait for processes of their own.
test: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadfile

slow: $(VENV)/.ready
	$(PY) -m pytest -m slow

lint: $(VENV)/.ready
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

clean:
	rm -rf $(VENV) demo-out build *.egg-info

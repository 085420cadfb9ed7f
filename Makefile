# make demo       train a real model on real data and show the result
# make test       every check and every test; what CI runs
# make test-long  what tests can do over many seeds and steps; minutes more
# make check      ruff, mypy --strict, the architecture test
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo test test-long check data format clean

demo: .venv/runtime
	$(BIN)/weft run digits_mlp --workers 2 --out runs/demo-$$(date +%Y%m%d-%H%M%S)

test: .venv/dev data check
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal

# The same options that make test has, but for the marker.
test-long: .venv/dev data
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal -m long

check: .venv/dev
	scripts/check

# Fashion-MNIST and the tools for test hosts come as Debian packages; tests that need them say so when they are missing.
data:
	@scripts/install-data

format: .venv/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# torch goes first, by its pin: a package that asks for "torch" must find the CPU build in place.
.venv/runtime: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

.venv/dev: .venv/runtime
	$(PIP) --editable '.[dev,huggingface,images,jax,mpi,onnx]'
	touch $@

clean:
	rm -rf .venv build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

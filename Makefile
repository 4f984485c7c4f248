# The two commands of the README are `make demo` and `make test`; both install what they need into .venv first.
PYTHON ?= $(shell python3 -c 'import sys; print("python3" if sys.version_info >= (3, 11) else "python3.11")' 2>/dev/null || echo python3.11)
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo test e2e smoke-aws image-test infra-test localstack check benchmarks lock clean
.DEFAULT_GOAL := help

help:
	@echo "make demo        train 4 replicas on this machine through an embedded S3, beside a data-parallel baseline"
	@echo "make test        run the tests"
	@echo "make infra-test  the tests of the Pulumi program alone: they need the pulumi CLI, and say what else is missing"
	@echo "make e2e         from pulumi up to a trained model on the tests' SageMaker, and through what may go wrong"
	@echo "make smoke-aws   two small jobs on a real account (AWS_SMOKE=1, STACK=name): prints what it costs first"
	@echo "make kubernetes-test  runs on a real control plane whose node is a process (as root; says what else is missing)"
	@echo "make image-test  build the image on a small base and run replicas from it (as root; buildah and debootstrap)"
	@echo "make localstack  LocalStack in .localstack-venv, for the tests that run on it as well as on MiniStack"
	@echo "make check       lint, formatting, types"
	@echo "make benchmarks  the figures of the documentation, as JSON"
	@echo "make install     .venv with everything (also done by the others)"

install: $(VENV)/.installed

# The lock pins every version; torch comes first and alone, so that the machine's own CPU or CUDA wheel is taken once.
$(VENV)/.installed: requirements.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] + ": make PYTHON=python3.11 …" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $$(grep '^torch==' requirements.lock)
	$(BIN)/python -m pip install --quiet --requirement requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --editable .
	touch $@

demo: install
	$(BIN)/python scripts/launch.py run --local --replicas 4 --steps 100 --sync-every 20 --baseline

# One process more than cores: many tests wait for processes of their own. A file's tests share one, and what is dear to
# start in it. JOBS=0 runs them one after another.
JOBS ?= $(shell echo $$(( $$(nproc 2>/dev/null || echo 2) + 1 )))
test: install
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

infra-test: install
	$(BIN)/python -m pytest tests/infra tests/unit/test_access.py tests/unit/test_stack.py tests/unit/test_plan.py

e2e: install
	$(BIN)/python -m pytest tests/sagemaker/test_runs.py

STACK ?= dev
smoke-aws: install
	$(BIN)/python scripts/smoke_aws.py --stack $(STACK)

kubernetes-test: install
	$(BIN)/python -m pytest tests/kubernetes

image-test: install
	$(BIN)/python -m pytest tests/container

# LocalStack's free core, which some tests of tests/infra run on too: Python 3.11, and an environment of its own since its
# botocore has no matching aiobotocore.
LOCALSTACK := .localstack-venv
localstack: $(LOCALSTACK)/.installed

$(LOCALSTACK)/.installed:
	python3.11 -m venv $(LOCALSTACK)
	$(LOCALSTACK)/bin/python -m pip install --quiet 'localstack-core[runtime]==4.13.1' 'cbor2<6' service-identity pyopenssl==24.3.0
	touch $@

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

benchmarks: install
	$(BIN)/python -m benchmarks.chaos
	$(BIN)/python -m benchmarks.codec
	$(BIN)/python -m benchmarks.link
	$(BIN)/python -m benchmarks.overlap
	$(BIN)/python -m benchmarks.launch
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.quality

# Resolve the extras anew within the bounds of pyproject.toml, and pin what came out.
lock:
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --upgrade pip
	$(VENV)-lock/bin/python -m pip install --quiet 'torch==2.13.*'
	$(VENV)-lock/bin/python -m pip install --quiet --editable '.[dev]'
	echo '# Made by `make lock` from pyproject.toml: what development and CI install.' > requirements.lock
	$(VENV)-lock/bin/python -m pip freeze --all --exclude pip --exclude-editable | sed -E 's/\+[a-z0-9.]+$$//' >> requirements.lock
	rm -rf $(VENV)-lock

clean:
	rm -rf $(VENV) .cache .diloco .mypy_cache .pytest_cache .ruff_cache build dist *.egg-info

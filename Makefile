# `make demo` and `make test` set up .venv by themselves, once; nothing after that needs a network.
PYTHON ?= python3
READY := .venv/.ready

# Spinning OpenMP threads starve each other on a busy machine.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test lint docs gpu sanitize tiny-model clean
.DELETE_ON_ERROR:

demo: $(READY)
	@.venv/bin/keyhole demo

test: lint
	@.venv/bin/python -m pytest

lint: $(READY)
	@.venv/bin/python -m ruff check --quiet .
	@.venv/bin/python -m ruff format --check --quiet .
	@.venv/bin/python -m mypy --no-error-summary

docs: $(READY)
	@.venv/bin/python -m keyhole.cli.docs

gpu:
	@PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART))

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(READY)
	@.venv/bin/cmake -S keyhole/kernels/csrc -B build/sanitize -DCMAKE_BUILD_TYPE=Release -DKEYHOLE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -Dnanobind_DIR=$$(.venv/bin/python -m nanobind --cmake_dir)
	@.venv/bin/cmake --build build/sanitize
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 .venv/bin/python tests/kernels/sanitized.py build/sanitize/_cpu.*.so

tiny-model: $(READY)
	@.venv/bin/python -m keyhole.models.tiny.train --ranks 2

# -qq: errors only.
$(READY): pyproject.toml constraints.txt $(wildcard keyhole/kernels/csrc/*)
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv/bin/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

clean:
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(READY)
	@find keyhole tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

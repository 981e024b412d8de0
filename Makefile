# `make demo` and `make test` set up .venv by themselves, once; nothing after that needs a network.
PYTHON ?= python3
READY := .venv/.ready
PEERS_READY := .venv-peers/.ready
LM_EVAL_READY := .venv-lm-eval/.ready
KVPRESS_READY := .venv-kvpress/.ready

# Spinning OpenMP threads starve each other on a busy machine.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: demo test test-lm-eval test-kvpress lint docs gpu bench-peers sanitize tiny-model tiny-head clean
.DELETE_ON_ERROR:

demo: $(READY)
	@.venv/bin/keyhole demo

# Two at a time, and no file waits for another.
test: lint
	@.venv/bin/python -m pytest --numprocesses=2 --dist=worksteal

# The model "keyhole" of lm-evaluation-harness, which has an environment of its own.
test-lm-eval: $(LM_EVAL_READY)
	@.venv-lm-eval/bin/python -m pytest tests/integrations/test_lm_eval.py

# kvpress's compressors on our tasks, in an environment of their own too.
test-kvpress: $(KVPRESS_READY)
	@.venv-kvpress/bin/python -m pytest tests/integrations/test_kvpress*.py

lint: $(READY)
	@.venv/bin/python -m ruff check --quiet .
	@.venv/bin/python -m ruff format --check --quiet .
	@.venv/bin/python -m mypy --no-error-summary

docs: $(READY)
	@.venv/bin/python -m keyhole.cli.docs

gpu:
	@PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART))

# Decode steps beside llama.cpp, which has an environment of its own; ARGS="--contexts 2048" and the like.
bench-peers: $(READY) $(PEERS_READY)
	@.venv/bin/keyhole bench decode --contexts 2048,8192,32768,131072 \
	  --systems transformers_sdpa,transformers_static,llama_cpp,llama_cpp_flash,full,delta,quest,streaming_llm --output benchmarks/results/decode.jsonl $(ARGS)
	@.venv/bin/keyhole bench decode --contexts 2048,8192,32768 --batch 8 \
	  --systems llama_cpp,llama_cpp_flash,full --output benchmarks/results/decode.jsonl $(ARGS)

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(READY)
	@.venv/bin/cmake -S keyhole/kernels/csrc -B build/sanitize -DCMAKE_BUILD_TYPE=Release -DKEYHOLE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -Dnanobind_DIR=$$(.venv/bin/python -m nanobind --cmake_dir)
	@.venv/bin/cmake --build build/sanitize
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 .venv/bin/python tests/kernels/sanitized.py build/sanitize/_cpu.*.so

tiny-model: $(READY)
	@.venv/bin/python -m recipes.tiny_model.train --ranks 2

# The second head begins with the first one, and is the one in the package.
tiny-head: $(READY)
	@.venv/bin/keyhole train-head --tokens 3000000 --output runs/head-attention
	@.venv/bin/keyhole train-head --objective selection --start runs/head-attention \
	  --tokens 1000000 --length 2048 --num-queries 512 --learning-rate 0.0002 --output runs/keyhole-head

# -qq: errors only.
$(READY): pyproject.toml constraints.txt $(wildcard keyhole/kernels/csrc/*)
	@echo "setting up .venv"
	@$(PYTHON) -m venv .venv
	@.venv/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv/bin/python -m pip install -qq --constraint constraints.txt --editable '.[dev]'
	@touch $@

$(PEERS_READY): benchmarks/peers.txt
	@echo "setting up .venv-peers: llama.cpp is compiled, which takes 5 to 15 minutes on 2 cores"
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --constraint constraints.txt --requirement benchmarks/peers.txt
	@touch $@

$(LM_EVAL_READY): pyproject.toml constraints.txt tests/integrations/lm-eval.txt $(wildcard keyhole/kernels/csrc/*)
	@echo "setting up .venv-lm-eval"
	@$(PYTHON) -m venv .venv-lm-eval
	@.venv-lm-eval/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-lm-eval/bin/python -m pip install -qq --constraint constraints.txt \
	  --requirement tests/integrations/lm-eval.txt pytest --editable '.[lm-eval]'
	@touch $@

$(KVPRESS_READY): pyproject.toml constraints.txt tests/integrations/kvpress.txt $(wildcard keyhole/kernels/csrc/*)
	@echo "setting up .venv-kvpress"
	@$(PYTHON) -m venv .venv-kvpress
	@.venv-kvpress/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-kvpress/bin/python -m pip install -qq --constraint constraints.txt \
	  --requirement tests/integrations/kvpress.txt pytest --editable '.[kvpress]'
	@touch $@

clean:
	@rm -rf build dist *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(READY)
	@find keyhole tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

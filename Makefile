# Everything runs inside .venv, which the stamp file makes once and again when the pins or the project file change.

PYTHON ?= python3
PYTEST_ARGS ?=
TEST_WORKERS ?= 2
WHEELS ?= dist
DEMO_ARGS ?=
WORKLOAD_ARGS ?= --torch-compile

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
MYPY_ROOT := $(VENV)/mypy_root
PACKAGES := lazy autograd prims inductor runtime

.PHONY: help venv demo wheel test test-native lint format

help:
	@echo "make demo    train a small GPT eagerly and lazily, and time four programs by every way (DEMO_ARGS=... WORKLOAD_ARGS=...)"
	@echo "make test    run the tests (PYTEST_ARGS='-k name -x', TEST_WORKERS=0 for one process)"
	@echo "make test-native  the native recorder's tests under sanitizers (g++ with libasan; 15 minutes)"
	@echo "make opinfo  run torch's operator database on the lazy device (OPINFO_ARGS=...)"
	@echo "make zoo     train small models of every kind on the lazy device and compare with eager (ZOO_ARGS=...)"
	@echo "make docs    write docs/generated/: files, operators, prims, and the last results of opinfo and zoo"
	@echo "make lint    ruff check, ruff format --check, mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make wheel   build a wheel into WHEELS (dist) that brings the native recorder, compiled for the torch of .venv"
	@echo "make venv    create or refresh .venv"

venv: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: $(STAMP)
	-@$(BIN)/python -m torchlazy.cache prepare
	$(BIN)/python examples/train_gpt.py --compare --no-dropout --steps 80 --print-every 10 $(DEMO_ARGS)
	$(BIN)/python examples/workloads.py $(WORKLOAD_ARGS)

# Built from a copy, so that neither the library nor what setuptools makes stays in the checkout.
wheel: $(STAMP)
	$(BIN)/python -m torchlazy.cache prepare
	folder=$$(mktemp -d) && trap 'rm -rf "$$folder"' EXIT && \
	cp -R $(PACKAGES) *.py py.typed pyproject.toml README.md LICENSE "$$folder" && \
	mkdir "$$folder/runtime/native/prebuilt" && \
	library=$$($(BIN)/python -c 'from torchlazy.runtime.native import recorder_library as r; print(r.find_or_compile())') && \
	cp "$$library" "$$folder/runtime/native/prebuilt" && \
	$(BIN)/python -m pip wheel --quiet --no-build-isolation --no-deps --no-index --wheel-dir $(WHEELS) "$$folder"

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile $(PYTEST_ARGS)

# The native recorder, and kernels with it, under the address and the undefined-behaviour sanitizer. Not vptr: a deferred
# tensor has another table of virtual functions. Leaks are Python's and torch's at the end of a process.
SANITIZED := -g1 -fno-omit-frame-pointer -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=undefined
NATIVE_TESTS ?= $(filter-out %_gpu.py,$(wildcard tests/lazy/test_native_*.py)) tests/lazy/test_interrupts.py

test-native: $(STAMP)
	LD_PRELOAD="$$(for one in asan ubsan stdc++; do g++ -print-file-name=lib$$one.so; done | tr '\n' ' ')" \
	ASAN_OPTIONS=detect_leaks=0:detect_odr_violation=0:alloc_dealloc_mismatch=0 UBSAN_OPTIONS=print_stacktrace=1 \
	TORCHLAZY_CPP_FLAGS="$(SANITIZED)" TORCHLAZY_CACHE_DIR="$(CURDIR)/.pytest_cache/sanitized" \
	$(BIN)/python -m pytest -p no:faulthandler $(NATIVE_TESTS)

# The repository root is the package `torchlazy`; mypy derives module names from folder names, so it gets a link of that name.
$(MYPY_ROOT)/torchlazy: $(STAMP)
	@mkdir -p $(MYPY_ROOT)
	@ln -sfn ../.. $@

lint: $(STAMP) $(MYPY_ROOT)/torchlazy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	cd $(MYPY_ROOT) && ../bin/mypy --config-file torchlazy/pyproject.toml -m torchlazy $(addprefix -p torchlazy.,$(PACKAGES))

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Torch's operator database in all readings and dtypes, each operator isolated, `make docs` tables the results. Hours on two
# cores: OPINFO_ARGS='--dtype float32 --shard 1/4' runs a part, and results of earlier parts stay.
OPINFO_ARGS ?= --dtype float32,float64,bfloat16,float16,int64,bool,complex64 --samples 0

.PHONY: opinfo
opinfo: $(STAMP)
	$(BIN)/python -m tests.opinfo.run $(OPINFO_ARGS)

# Models: 41 of ours and those of the transformers library, three steps each in a process of its own; `make docs`
# tables the results. An hour on two cores: ZOO_ARGS='--mode lazy --cases unet,hf_bert' runs a part, other results stay.
# ZOO_ARGS=--steady: whether training loops become steady.
ZOO_ARGS ?= --mode lazy,compiled,step,module

.PHONY: zoo
zoo: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt transformers
	$(BIN)/python -m tests.zoo.run $(ZOO_ARGS)

# Pages that a command prints: not committed, figures of them stand in docs/figures.md.
.PHONY: docs
docs: $(STAMP)
	@mkdir -p docs/generated
	$(BIN)/python -m tests.files_page > docs/generated/files.md
	$(BIN)/python -m torchlazy.prims.coverage --page > docs/generated/operators.md
	$(BIN)/python -m torchlazy.prims.page > docs/generated/prims.md
	$(BIN)/python -m tests.opinfo.table > docs/generated/opinfo.md
	$(BIN)/python -m tests.zoo.table > docs/generated/zoo.md

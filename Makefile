# make demo   train a small LoRA with E-GRPO inside ComfyUI and watch the reward rise
# make test   all tests; those that need ComfyUI run when it is found
# make lint   ruff
# make setup  only the environment (.venv), which the others bring up to date by themselves
#
# COMFYUI_PATH=/path/to/ComfyUI chooses the ComfyUI to use; COMFYUI_PATH=none does without.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python

.PHONY: demo test lint setup

setup:
	@$(PYTHON) -m tools.setup_env

demo:
	@$(PYTHON) -m tools.setup_env --clone
	@$(VENV_PYTHON) -m tools.demo

test: setup
	@$(VENV_PYTHON) -m pytest -c tests/pytest.ini --rootdir tests tests $(ARGS)

lint: setup
	@$(VENV_PYTHON) -m ruff check .

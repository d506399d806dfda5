# Every target does its own set-up: Python 3.11 or newer is all that must be there.
.DEFAULT_GOAL := help
.PHONY: help serve test chaos check migrate openapi bench lock settings

BIN := .venv/bin
ARGS ?=

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 12

serve: ## run everything on this machine and print a key and a curl line
	@sh .ci/venv requirements.lock
	@exec $(BIN)/armillary serve

migrate: ## bring the database to the newest schema
	@sh .ci/venv requirements.lock
	@$(BIN)/armillary migrate

test: ## run every test (ARGS="-k word" for some)
	@sh .ci/venv requirements-dev.lock
	$(BIN)/python -m pytest -n auto --maxprocesses 4 $(ARGS)

N ?= 100
SEED ?=

chaos: ## play N random rounds of faults (SEED=number: the same ones again)
	@sh .ci/venv requirements-dev.lock
	$(BIN)/python -m tests.support.chaos $(N) $(SEED)

check: ## lint, types, formatting
	@sh .ci/venv requirements-dev.lock
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

openapi: ## write openapi/openapi.json
	@sh .ci/venv requirements.lock
	$(BIN)/armillary openapi > openapi/openapi.json.draft
	mv openapi/openapi.json.draft openapi/openapi.json

settings: ## write docs/settings.md
	@sh .ci/venv requirements.lock
	$(BIN)/armillary settings > docs/settings.md.draft
	mv docs/settings.md.draft docs/settings.md

bench: ## run the benchmarks
	@sh .ci/venv requirements-dev.lock
	$(BIN)/python -m benchmarks $(ARGS)

COMPILE := uv pip compile --quiet --generate-hashes --no-emit-index-url --no-emit-find-links --no-header \
	--universal --python-version 3.11 --extra embedded pyproject.toml

lock: ## pin the newest allowed versions, with hashes (ARGS=--upgrade to raise them)
	@sh .ci/venv requirements-dev.lock
	$(BIN)/$(COMPILE) --group build -o requirements.lock $(ARGS)
	$(BIN)/$(COMPILE) --group dev -c requirements.lock -o requirements-dev.lock $(ARGS)

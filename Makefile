PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
READY := .venv/.ready
ZOO_READY := .venv-zoo/.ready
AGAINST ?= $(shell git describe --tags --abbrev=0 2>/dev/null)

.PHONY: demo bench pages zoo test quick fuzz check format docs docs-serve api dist clean

demo: $(READY)      ## train, fit and score on Boston and Concrete; figures under demo/
	$(BIN)/mcbn demo --out demo

bench: $(READY)     ## speed against Algorithm 1 and plain passes; records under benchmarks/results
	$(BIN)/python -m mcbn_benchmarks speed --out benchmarks/results

pages: $(READY)     ## write the tables of README and docs/ anew from the records
	$(BIN)/python -m mcbn_benchmarks pages

zoo: $(ZOO_READY)   ## networks that others wrote: exact, fast, untouched; records under results/zoo
	.venv-zoo/bin/python -m mcbn_benchmarks zoo --out results/zoo --again

test: $(READY)      ## the whole suite, slow tests too, on two cores, with coverage
	$(BIN)/python -m pytest -n 2 --dist loadfile --cov --cov-report=term-missing:skip-covered --cov-fail-under=95

quick: $(READY)     ## the unit suite without slow tests, on two cores
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile

fuzz: $(READY)      ## try to break it: 2,000 random networks, 10,000 damaged files, kills; one line each in the record
	for what in "networks --count 2000" "files --count 10000" "kills --count 50"; do \
	  PYTHONPATH=tests $(BIN)/python -m fuzz $$what --out benchmarks/results/fuzz.jsonl || exit 1; done

check: $(READY)     ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)      ## the documentation site under site/; broken links and missing references fail
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

docs-serve: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs serve

api: $(READY)       ## what breaks for users of the release AGAINST, by default the newest tag
	@test -n "$(AGAINST)" || { echo "no tag to compare with; name a commit: make api AGAINST=COMMIT"; exit 1; }
	$(BIN)/griffecli check mcbn --search src --against $(AGAINST)

dist: $(READY)      ## both distributions under dist/, checked, each wheel tried in an environment of its own
	rm -rf dist .venv-dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m build --outdir dist study
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt torch
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt "$$(ls dist/mcbn-*.whl)[sklearn,cli]"
	cd dist && for shown in ../docs/snippets/*.txt; do echo $$shown; \
	  ../.venv-dist/bin/python $${shown%.txt}.py | diff $$shown - || exit 1; done
	.venv-dist/bin/python -m pip install --quiet -c constraints.txt dist/mcbn_study-*.whl
	.venv-dist/bin/mcbn reproduce --help > /dev/null

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .venv-zoo .venv-dist demo dist site build .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage

# torch first, under the pin: nothing later may drag in another build of it.
$(READY): pyproject.toml study/pyproject.toml benchmarks/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]" -e study -e benchmarks
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps torchcp  # a peer in the tests
	touch $@

# apart: what the zoo's packages bring along (torchvision, torchaudio) is not for the suite.
$(ZOO_READY): pyproject.toml study/pyproject.toml benchmarks/pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-zoo
	.venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	.venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . -e study -e "benchmarks[zoo]"
	.venv-zoo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps tsai  # it asks for scikit-learn < 1.8
	touch $@

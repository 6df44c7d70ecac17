# Everything goes through one standard-library script, so that it works where there is no make, too.
#   make serve ARGS="path/to/model --port 9000"
#   make test ARGS="-k beam"

PYTHON ?= python3
ARGS ?=

.PHONY: serve test test-all test-real test-examples test-browser test-agents lint docs docs-site install lock release clean

serve:
	@$(PYTHON) tools/setup.py serve $(ARGS)

test:
	@$(PYTHON) tools/setup.py test $(ARGS)

# The slow ones, too: services that are killed, kernels that are compiled, hostile bodies, a soak.
test-all:
	@$(PYTHON) tools/setup.py test-all $(ARGS)

# Downloads real models, 420 MB, for the tests that need them.
test-real:
	@$(PYTHON) tools/setup.py test-real $(ARGS)

# Every example, against a started server.
test-examples:
	@$(PYTHON) tools/setup.py test-examples $(ARGS)

# The playground in a headless Chromium; needs Node.js, npm and Chromium.
test-browser:
	@$(PYTHON) tools/setup.py test-browser $(ARGS)

# Nine coding agents against a scripted model; needs Node.js and npm, and 2.5 GB for the agents.
test-agents:
	@$(PYTHON) tools/setup.py test-agents $(ARGS)

lint:
	@$(PYTHON) tools/setup.py lint

# The table in docs/families.md, from the registry.
docs:
	@$(PYTHON) tools/setup.py docs

# The documentation as a site, in build/site.
docs-site:
	@$(PYTHON) tools/setup.py docs-site

install:
	@$(PYTHON) tools/setup.py install

# requirements/*.lock, from pyproject.toml and constraints.txt.
lock:
	@$(PYTHON) tools/setup.py lock

# What is published, in dist/.
release:
	@$(PYTHON) tools/setup.py release $(ARGS)

clean:
	rm -rf .venv build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

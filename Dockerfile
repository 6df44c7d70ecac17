# syntax=docker/dockerfile:1
#
#   docker build -t octavo .
#   docker run --rm -p 127.0.0.1:8000:8000 octavo                     the bundled model (untrained noise)
#   docker run --rm -p 127.0.0.1:8000:8000 -v "$PWD/model:/models/model:ro" octavo serve /models/model
#
# For a GPU: --build-arg TORCH_INDEX="" takes torch's default build; then run with --gpus all.

ARG BASE_IMAGE=python:3.12-slim-bookworm

# ---- builder: everything goes into one virtual environment, which is all that the last stage takes from here
FROM ${BASE_IMAGE} AS builder

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

ENV PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_NO_CACHE_DIR=1

RUN python -m venv /app/venv
ENV PATH=/app/venv/bin:$PATH

WORKDIR /src

# torch first and pinned, so that no open range can bring in another build; a layer of its own, because it is large
# and changes rarely. What it needs comes with the rest. (The linter wants to read the version here: constraints.txt
# holds it.)
COPY constraints.txt ./
# hadolint ignore=DL3013
RUN pip install --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"

COPY pyproject.toml README.md LICENSE octavo.py ./
COPY engine engine
COPY server server
RUN pip install --constraint constraints.txt . \
 && python -m compileall -q /app/venv/lib/python*/site-packages/engine /app/venv/lib/python*/site-packages/server

# ---- the image that runs: Python, the virtual environment, no build tools, no root
FROM ${BASE_IMAGE}

LABEL org.opencontainers.image.title="Octavo" \
      org.opencontainers.image.description="Serves the transformer family over HTTP" \
      org.opencontainers.image.licenses="Apache-2.0"

# The user is named by number, so that an orchestrator can see that it is not root. /models belongs to it: a volume
# mounted there for the first time takes that over, and downloads are kept in it.
RUN mkdir -p /models/hub && chown -R 10001:10001 /models

COPY --from=builder /app/venv /app/venv

ENV PATH=/app/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    PYTHONDONTWRITEBYTECODE=1 \
    HOME=/tmp \
    HF_HOME=/models/hub \
    OCTAVO_HOST=0.0.0.0

WORKDIR /models
USER 10001:10001
EXPOSE 8000
STOPSIGNAL SIGTERM

HEALTHCHECK --interval=10s --timeout=5s --start-period=120s --retries=3 \
    CMD ["python", "-c", "import os, urllib.request as r; r.urlopen('http://127.0.0.1:' + os.environ.get('OCTAVO_PORT', '8000') + '/health', timeout=4).read()"]

ENTRYPOINT ["octavo"]
CMD ["serve"]
